"""What finished requests looked like on their way, kept for a while and within a number of bytes.

A frame is a canvas and its confidences as the next step saw them. Numpy alone; knows no model and no HTTP.

N frames of a row, T tokens.
"""

import base64
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sinkdlm.serving.engine import Frame

_LEVELS = 254  # a confidence takes 1..255; 0 is a position that was not written
_BYTES_PER_TOKEN = 5  # an id and a confidence
_BYTES_PER_FRAME = 320  # two arrays without their contents, and what holds them


def quantise(values: np.ndarray) -> dict[str, Any]:
    """Numbers from 0 up as bytes: value = byte * scale. data: base64, the last dimension first to change."""
    top = float(values.max(initial=0.0))
    scale = top / 255 or 1.0
    levels = np.rint(values.astype(np.float64) / scale).astype(np.uint8)
    return {"shape": list(values.shape), "scale": scale, "data": base64.b64encode(levels.tobytes()).decode()}


def byte_of(sure: float) -> int:
    return 0 if math.isnan(sure) else 1 + round(min(1.0, max(0.0, sure)) * _LEVELS)


def size_of(rows: Sequence[tuple[int, int]]) -> int:
    """Bytes that rows of (frames, tokens) come to at most."""
    return sum(frames * (tokens * _BYTES_PER_TOKEN + _BYTES_PER_FRAME) for frames, tokens in rows)


@dataclass
class Record:
    """One request. frames: of each row, (ids int32 (T,), confidences uint8 (T,))."""

    id: str
    model: str
    mask_id: int
    n_given: list[int]  # tokens before the gap of each row
    frames: list[list[tuple[np.ndarray, np.ndarray]]]
    n_bytes: int = 0
    expires: float = field(default=math.inf)

    def add(self, frame: Frame) -> None:
        sure = np.array([byte_of(value) for value in frame.confidence], dtype=np.uint8)
        tokens = np.array(frame.tokens, dtype=np.int32)
        self.frames[frame.row].append((tokens, sure))
        self.n_bytes += size_of([(1, len(tokens))])


class Records:
    def __init__(self, most_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_bytes, self.seconds, self._clock = most_bytes, seconds, clock
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._lock = threading.Lock()  # routes look them up in threads of their own
        self.n_bytes = 0

    def add(self, record: Record) -> None:
        """Keeps it; the oldest go where there is no room, and it is not kept where there never was."""
        with self._lock:
            self._forget()
            while self._records and self.n_bytes + record.n_bytes > self.most_bytes:
                self._drop()
            if record.n_bytes <= self.most_bytes:
                record.expires = self._clock() + self.seconds
                self._records[record.id] = record
                self.n_bytes += record.n_bytes

    def find(self, name: str) -> Record | None:
        with self._lock:
            self._forget()
            return self._records.get(name)

    def left(self, record: Record) -> float:
        return max(0.0, record.expires - self._clock())

    def _forget(self) -> None:
        while self._records and next(iter(self._records.values())).expires < self._clock():
            self._drop()

    def _drop(self) -> None:
        _, record = self._records.popitem(last=False)
        self.n_bytes -= record.n_bytes
