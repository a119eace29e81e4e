"""Routes of /v1/inspect: the frames of finished requests, and what the model saw in them.

What the model saw is computed when a client asks: one more forward of a step's canvas, in the engine's thread. Numbers come as
bytes with a scale (frames.py). Frames are kept for a while; later requests for them get 404.

E layers, H heads, S sinks (in front), T tokens.
"""

import asyncio
import base64
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from fastapi import APIRouter, Depends, Query, Request
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool

from sinkdlm.analysis.capture import RULES, attention_maps
from sinkdlm.analysis.recording import Recorder, Seen, effort, likeliest, look_at
from sinkdlm.errors import AnalysisError
from sinkdlm.serving.bodies import Route
from sinkdlm.serving.frames import quantise
from sinkdlm.serving.problems import ApiError
from sinkdlm.serving.site import Site

_MOST_FRAMES = 256  # in one answer
_MOST_VALUES = 1 << 23  # numbers of one answer
_MOST_CANDIDATES = 100

Id = Annotated[str, InPath(max_length=64)]
Index = Annotated[int, InPath(ge=0)]
Number = Annotated[int, Query(ge=0)]
_T = TypeVar("_T")
router = APIRouter(prefix="/v1/inspect/{request_id}", route_class=Route)


class _Kept:
    """A finished request and its model, by the path."""

    def __init__(self, request: Request, request_id: Id) -> None:
        site: Site = request.app.state.site
        found = site.frames.find(request_id)
        if found is None:
            cure = "send a request with sinkdlm.inspect = true to keep it for a while"
            raise ApiError(404, f"{request_id}: no such request, or no longer kept; {cure}")
        self.request, self.seconds_left = found, site.frames.left(found)
        self.served = site.find(found.model)

    def frames(self, choice: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return _of(self.request.frames, choice, "choice")

    async def compute(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.served.engine.query(function))


Kept = Annotated[_Kept, Depends()]


class _Canvas:
    """The canvas that a step saw, by the path."""

    def __init__(self, kept: Kept, choice: Index, step: Index) -> None:
        self.kept, self.served, self.model = kept, kept.served, kept.served.lm.model
        self.tokens: list[int] = _of(kept.frames(choice), step, "step")[0].tolist()

    def check_position(self, position: int) -> None:
        if position >= len(self.tokens):
            raise AnalysisError(f"position {position}: this canvas has {len(self.tokens)} tokens, from 0 on")

    async def look(self, n_layers: int, cure: str) -> Seen:
        """Compute the attention of the canvas; refuse what is too large for one answer, at n_layers layers."""
        config = self.model.config
        if n_layers * config.n_heads * (config.n_sinks + len(self.tokens)) > _MOST_VALUES:
            raise AnalysisError(f"received attention of all layers is too much for one answer; {cure}")
        return await self.compute(look_at)

    async def compute(self, function: Callable[..., Any], *given: Any, **more: Any) -> Any:
        """Run function(model, tokens, ...) in the engine's thread."""
        return await self.kept.compute(partial(function, self.model, self.tokens, *given, **more))


Canvas = Annotated[_Canvas, Depends()]


def _of(rows: list[_T], index: int, name: str) -> _T:
    if index >= len(rows):
        raise ApiError(404, f"{name} {index}: there are {len(rows)}, from 0 on", param=name)
    return rows[index]


@router.get("")
def describe(kept: Kept) -> dict[str, Any]:
    """The choices of a request and their frames. A frame is a canvas as a step saw it; the last is the finished text."""
    found, config = kept.request, kept.served.lm.config
    choices = [
        {"index": index, "frames": len(frames), "length": len(frames[-1][0]), "n_given": given, **effort(*written)}
        for index, (frames, given, written) in enumerate(zip(found.frames, found.n_given, found.written, strict=True))
    ]
    shape = {name: getattr(config, name) for name in ("n_layers", "n_heads", "n_sinks")}
    kind = config.sink_kind if config.n_sinks else None
    return {"id": found.id, "model": found.model, "choices": choices, "seconds_left": kept.seconds_left, **shape, "sink_kind": kind}


@router.get("/{choice}/frames")
def frames(
    kept: Kept, choice: Index, start: Number = 0, count: Annotated[int, Query(ge=1, le=_MOST_FRAMES)] = _MOST_FRAMES
) -> dict[str, Any]:
    """Canvases and confidences. ids: null where a token is still to be written; confidence: bytes, 0 for none, else
    (byte - 1) / 254. pieces, kinds: the text and kind of every id that occurs."""
    chosen, mask_id = kept.frames(choice)[start : start + count], kept.request.mask_id
    ids = sorted({token for tokens, _ in chosen for token in np.unique(tokens).tolist()} - {mask_id})
    shown = [
        {
            "tokens": [None if token == mask_id else token for token in tokens.tolist()],
            "confidence": base64.b64encode(sure.tobytes()).decode(),
        }
        for tokens, sure in chosen
    ]
    named = (("pieces", kept.served.piece), ("kinds", kept.served.kind))
    return {"start": start, "frames": shown, **{name: {str(token): find(token) for token in ids} for name, find in named}}


@router.get("/{choice}/recording")
async def recording(kept: Kept, choice: Index) -> dict[str, Any]:
    """All that a file needs to show the request: one model's side of a recording, computed frame by frame."""
    served, frames = kept.served, kept.frames(choice)
    canvases, sure = [tokens.tolist() for tokens, _ in frames], [levels.tobytes() for _, levels in frames]
    took = effort(*kept.request.written[choice])
    recorder = Recorder(served.lm, served.name, canvases, kept.request.n_given[choice], confidence=sure, effort=took)
    for _ in canvases:
        await kept.compute(recorder.take)
    return await run_in_threadpool(recorder.side)


@router.get("/{choice}/{step}/look")
async def look(canvas: Canvas) -> dict[str, Any]:
    """Received attention (layers, heads, sinks + tokens) and norms of values (layers, sinks + tokens). Computed before rounding:
    content sinks by either rule as places in (layers, heads, tokens), and each head's most attended token."""
    seen = await canvas.look(canvas.model.config.n_layers, "ask for one layer's")
    sinks = {"absolute": seen.absolute, "relative": seen.relative, "top": seen.top, "rules": RULES._asdict()}
    return {"received": quantise(seen.received), "values": quantise(seen.values), **sinks}


@router.get("/{choice}/{step}/received")
async def received(canvas: Canvas, layer: Number | None = None) -> dict[str, Any]:
    """Received attention, (layers, heads, sinks + tokens)."""
    n_layers = canvas.model.config.n_layers
    if layer is not None and layer >= n_layers:
        raise AnalysisError(f"layer {layer}: this model has {n_layers}, from 0 on")
    seen = await canvas.look(n_layers if layer is None else 1, "give a layer")
    return quantise(seen.received if layer is None else seen.received[layer : layer + 1])


@router.get("/{choice}/{step}/row")
async def row(canvas: Canvas, position: Number, layer: Number | None = None, head: Number | None = None) -> dict[str, Any]:
    """What one token attends to, (sinks + tokens): a mean over layers, or heads, where none is given."""
    canvas.check_position(position)
    config = canvas.model.config
    layers = range(config.n_layers) if layer is None else [layer]
    heads = range(config.n_heads) if head is None else [head]
    found = await canvas.compute(attention_maps, [(one, other) for one in layers for other in heads], query=position)
    return quantise(torch.stack([one[0].float() for one in found.values()]).mean(0).numpy())


@router.get("/{choice}/{step}/values")
async def values(canvas: Canvas) -> dict[str, Any]:
    """Norms of values, (layers, sinks + tokens)."""
    return quantise((await canvas.compute(look_at)).values)


@router.get("/{choice}/{step}/candidates")
async def candidates(canvas: Canvas, position: Number, k: Annotated[int, Query(ge=1, le=_MOST_CANDIDATES)] = 10) -> dict[str, Any]:
    """The likeliest tokens of a position."""
    canvas.check_position(position)
    served = canvas.served
    (found,) = await canvas.compute(likeliest, [position], k, served.engine.barred)
    shown = [{"token": token, "piece": served.piece(token), "probability": chance} for token, chance in found]
    return {"position": position, "candidates": shown}
