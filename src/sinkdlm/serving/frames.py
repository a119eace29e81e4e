"""Frames of finished requests, kept for a while and within a number of bytes.

A frame is a canvas and its confidences as the next step saw them. Needs only numpy; knows no model and no HTTP.

T tokens of a frame.
"""

import base64
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkdlm.serving.engine import Frame

_LEVELS = 254  # a confidence takes 1..255; 0 is a position that was not written
_BYTES_PER_TOKEN = 5  # an id and a confidence
_BYTES_PER_FRAME = 320  # two arrays without their contents, and what holds them


def quantise(values: np.ndarray) -> dict[str, Any]:
    """Encode numbers of 0 or more as bytes: value = byte * scale. data: base64, in row-major order."""
    scale = float(values.max(initial=0.0)) / 255 or 1.0
    levels = np.rint(values.astype(np.float64) / scale).astype(np.uint8)
    return {"shape": list(values.shape), "scale": scale, "data": base64.b64encode(levels.tobytes()).decode()}


def size_of(rows: Iterable[tuple[int, int]]) -> int:
    """The most bytes that rows of (frames, tokens) can take."""
    return sum(frames * (tokens * _BYTES_PER_TOKEN + _BYTES_PER_FRAME) for frames, tokens in rows)


@dataclass
class RequestFrames:
    """Frames of one request. frames: of each row, (ids int32 (T,), confidences uint8 (T,)). written: once it is finished, of each
    row its forwards, accepted tokens and tokens."""

    id: str
    model: str
    mask_id: int
    n_given: list[int]  # tokens before the gap of each row
    frames: list[list[tuple[np.ndarray, np.ndarray]]]
    written: Sequence[tuple[int, int, int]] = ()
    n_bytes: int = 0
    expires: float = math.inf

    def add(self, frame: Frame) -> None:
        sure = np.array(frame.confidence)
        levels = np.where(np.isnan(sure), 0, 1 + np.rint(np.nan_to_num(sure).clip(0, 1) * _LEVELS)).astype(np.uint8)
        self.frames[frame.row].append((np.array(frame.tokens, dtype=np.int32), levels))
        self.n_bytes += size_of([(1, len(levels))])


class FrameStore:
    def __init__(self, most_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_bytes, self.seconds, self._clock = most_bytes, seconds, clock
        self._kept: dict[str, RequestFrames] = {}  # the oldest first
        self._lock = threading.Lock()  # routes look them up in threads of their own
        self.n_bytes = 0

    def add(self, new: RequestFrames) -> None:
        """Keep a request's frames and drop the oldest ones for room; frames larger than the whole store are not kept."""
        with self._lock:
            self._forget(room=new.n_bytes)
            if new.n_bytes <= self.most_bytes:
                new.expires = self._clock() + self.seconds
                self._kept[new.id] = new
                self.n_bytes += new.n_bytes

    def find(self, name: str) -> RequestFrames | None:
        with self._lock:
            self._forget()
            return self._kept.get(name)

    def left(self, found: RequestFrames) -> float:
        """Seconds for which it is still kept."""
        return max(0.0, found.expires - self._clock())

    def _forget(self, room: int = 0) -> None:
        for oldest in list(self._kept.values()):
            if oldest.expires >= self._clock() and self.n_bytes + room <= self.most_bytes:
                return
            self.n_bytes -= self._kept.pop(oldest.id).n_bytes
