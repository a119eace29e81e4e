"""Recordings: one trajectory in a file for the inspector page, with canvases, attention, sinks, value norms and candidates.

Owns the form of recordings. The server makes them of finished requests, `analyze` of a capture's first trajectory. Numbers are
rounded to bytes; content sinks are exact, as they are found before rounding.

N frames (frame i is what step i saw, the last one the finished text), E layers, H heads, T tokens, S sinks, K = S + T keys.
"""

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sinkdlm import __version__
from sinkdlm.analysis.capture import RULES, Rules, attention_maps, clean_row, sink_logit_of, stands_out
from sinkdlm.analysis.kinds import kind_finder
from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.errors import AnalysisError
from sinkdlm.model.model import DiffusionLM
from sinkdlm.model.observe import Watcher
from sinkdlm.sampling.drawing import precise
from sinkdlm.text.prompts import piece_of

FORMAT, VERSION = "sinkdlm-recording", 1
MOST_VALUES = 1 << 24  # received attention of all frames, a byte each before they are packed
MOST_ROWS = 1 << 21  # attention rows of all tokens, frames and heads; where there are more, none are kept
N_CANDIDATES = 5
_LEVELS = 255
_CHUNK_LOGITS = 1 << 24
_DIGITS = 4  # of a probability


class Seen(NamedTuple):
    """Statistics of one canvas. A sink logit has a column in received, and none in values."""

    received: np.ndarray  # (E, H, K)
    values: np.ndarray  # (E, K)
    absolute: list[int]  # content sinks by the absolute rule, as indices into a flat (E, H, T)
    relative: list[int]  # and by the relative one
    top: list[int]  # a flat (E, H): the token of the text that receives most


def look_at(model: DiffusionLM, tokens: Sequence[int], rules: Rules = RULES, *, clean: Sequence[int] | None = None) -> Seen:
    """Compute the statistics of a canvas. In block diffusion they are of the blocks up to the first that is not finished, and
    received attention is zero behind it. With `clean`, they are of all blocks, each behind the clean ones before it."""
    config, device = model.config, model.embed.weight.device
    logits: Any = [sink_logit_of(model, layer) for layer in range(config.n_layers)]
    lengths = None
    if config.block_size is not None and clean is None and config.mask_id in tokens:
        first = list(tokens).index(config.mask_id)
        reached = first - first % config.block_size + config.block_size
        lengths = torch.tensor([min(reached, len(tokens))], device=device)
    shape: dict[str, Any] = {"block_size": config.block_size, "copies": 1 if clean is None else 2}
    watcher = Watcher(lengths, logits, n_registers=config.n_registers, **shape)
    with model.inference():
        model(torch.tensor([list(tokens)], device=device), clean=clean_row(clean, device), observe=watcher)
    layers = watcher.layers
    received = torch.stack([torch.cat([one.sink_received, one.received], dim=-1)[0] for one in layers])
    values = torch.stack([torch.cat([one.sink_value_norm, one.value_norm], dim=-1)[0] for one in layers])
    content = torch.stack([one.received[0] for one in layers])
    many = None if lengths is None else lengths.expand(len(layers))
    rules_say = (content > rules.threshold, stands_out(content, many, rules.margin))
    absolute, relative = (said.flatten().nonzero()[:, 0].tolist() for said in rules_say)
    return Seen(received.cpu().numpy(), values.cpu().numpy(), absolute, relative, content.argmax(-1).flatten().tolist())


def likeliest(
    model: DiffusionLM,
    tokens: Sequence[int],
    positions: Sequence[int],
    k: int,
    barred: Sequence[int] = (),
    clean: Sequence[int] | None = None,
) -> list[list[tuple[int, float]]]:
    """The k most likely tokens of each position and their probabilities, [MASK] left out. barred: ids that are never written, as
    in `model.denoiser`."""
    config, device = model.config, model.embed.weight.device
    forbidden = sorted({*barred, config.mask_id} & set(range(config.vocab_size)))
    found: list[list[tuple[int, float]]] = []
    with model.inference():
        hidden = model(torch.tensor([list(tokens)], device=device), clean=clean_row(clean, device))
        size = max(1, _CHUNK_LOGITS // config.vocab_size)
        for begin in range(0, len(positions), size):
            logits = precise(model.head(hidden[0, list(positions[begin : begin + size])]))
            logits[:, forbidden] = -torch.inf
            best = logits.softmax(-1).topk(min(k, config.vocab_size - len(forbidden)))
            found += [list(zip(*one, strict=True)) for one in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return found


@dataclass(eq=False)
class Recorder:
    """Takes frames one by one, so that others can use the model in between; `side` is one model's part of a recording.

    confidence: for each frame a byte a token, 0 for none, else 1 + 254 p. clean: as of `look_at`. effort: what writing took.
    """

    lm: Any
    name: str
    canvases: Sequence[Sequence[int]]
    n_given: int
    confidence: Sequence[bytes] = ()
    rules: Rules = RULES
    clean: Sequence[int] | None = None
    effort: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        n_frames, config, length = len(self.canvases), self.lm.config, len(self.canvases[0])
        self._barred = absent_ids(self.lm.tokenizer, config.vocab_size)  # never written, so never a candidate
        self._seen: list[Seen] = []
        self._rows: list[np.ndarray] = []
        self._candidates: list[list[list[tuple[int, float]]]] = []
        if any(len(canvas) != length for canvas in self.canvases):
            raise AnalysisError("the text grew while it was written: only frames of one length can be recorded; give a length")
        per_frame = config.n_layers * config.n_heads * (config.n_sinks + length)
        if per_frame * n_frames > MOST_VALUES:
            raise AnalysisError(
                f"{n_frames} frames of {length} tokens in {config.n_layers} x {config.n_heads} heads: more than the "
                f"{MOST_VALUES} numbers of a recording; take fewer steps or tokens"
            )
        self._with_rows = per_frame * length * n_frames <= MOST_ROWS

    def take(self) -> None:
        """Take the next frame."""
        canvas, model, config = self.canvases[len(self._seen)], self.lm.model, self.lm.config
        self._seen.append(look_at(model, canvas, self.rules, clean=self.clean))
        self._candidates.append(likeliest(model, canvas, range(len(canvas)), N_CANDIDATES, self._barred, self.clean))
        if self._with_rows:
            places = list(np.ndindex(config.n_layers, config.n_heads))
            maps = attention_maps(model, canvas, places, clean=self.clean)  # in this order
            rows = np.stack([one.float().numpy() for one in maps.values()])
            self._rows.append(rows.reshape(config.n_layers, config.n_heads, *rows.shape[1:]))

    def record(self, tick: Callable[[int], None] = lambda rows: None) -> dict[str, Any]:
        """Take all frames at once, and return the side."""
        for _ in self.canvases:
            self.take()
            tick(1)
        return self.side()

    def side(self) -> dict[str, Any]:
        config, seen, tokenizer = self.lm.config, self._seen, self.lm.tokenizer
        kind = kind_finder(tokenizer, config.mask_id)
        candidates = {token for frame in self._candidates for place in frame for token, _ in place}
        ids = sorted(({token for canvas in self.canvases for token in canvas} | candidates) - {config.mask_id})
        return {
            "model": self.name,
            **{name: getattr(config, name) for name in ("n_layers", "n_heads", "n_sinks")},
            "sink_kind": config.sink_kind if config.n_sinks else None,
            "n_given": self.n_given,
            **(self.effort or {}),
            "rules": self.rules._asdict(),
            "tokens": [[None if token == config.mask_id else token for token in canvas] for canvas in self.canvases],
            "confidence": [base64.b64encode(sure).decode() for sure in self.confidence] or None,
            "pieces": {str(token): piece_of(tokenizer, token) for token in ids},
            "kinds": {str(token): kind(token) for token in ids},
            "received": pack([one.received for one in seen]),
            "values": pack([one.values for one in seen]),
            **{name: [getattr(one, name) for one in seen] for name in ("absolute", "relative", "top")},
            "rows": pack(self._rows) if self._with_rows else None,
            "candidates": [
                [[[token, round(chance, _DIGITS)] for token, chance in place] for place in frame] for frame in self._candidates
            ],
        }


def effort(forwards: int, accepted: int, n_tokens: int) -> dict[str, float]:
    """What n_tokens took. accepted: those beyond one step per forward."""
    return {"forwards": forwards, "accepted": accepted, "tokens_per_forward": n_tokens / max(1, forwards)}


def pack(frames: Sequence[np.ndarray]) -> dict[str, Any]:
    """Pack non-negative numbers: value = byte * scale of its frame. data: base64 of zlib, frames first, last dimension fastest."""
    scales = [float(frame.max(initial=0.0)) / _LEVELS or 1.0 for frame in frames]
    levels = np.stack([np.rint(frame / scale) for frame, scale in zip(frames, scales, strict=True)]).astype(np.uint8)
    data = base64.b64encode(zlib.compress(levels.tobytes(), 9)).decode()
    return {"shape": list(levels.shape), "scales": scales, "data": data}


def join_sides(sides: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> dict[str, Any]:
    """A whole recording. asked: the settings that the page shows (prompt, seed, policy, steps, length)."""
    return {"format": FORMAT, "version": VERSION, "made": {"sinkdlm": __version__}, "asked": dict(asked), "sides": list(sides)}
