"""Routes that look at finished requests: frames as they were, and what the model saw in them, computed when asked.

Numbers come as bytes with a scale (records.py). A record is gone after a while; so are its answers.
"""

import asyncio
import base64
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, Query
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool

from sinkdlm.analysis.capture import RULES
from sinkdlm.analysis.recording import Recorder
from sinkdlm.serving import inspection
from sinkdlm.serving.frames import Record, Records, quantise
from sinkdlm.serving.problems import ApiError
from sinkdlm.serving.served import Served

_MOST_FRAMES = 256  # in one answer
_MOST_CANDIDATES = 100
_MOST = 2**31 - 1

Id = Annotated[str, InPath(max_length=64)]
Index = Annotated[int, InPath(ge=0, le=_MOST)]
Number = Annotated[int, Query(ge=0, le=_MOST)]


def register(app: FastAPI, records: Records, find_model: Callable[[str], Served]) -> None:
    def find(name: str) -> Record:
        record = records.find(name)
        if record is None:
            raise ApiError(404, f"{name}: no such request, or it is gone; ask with sinkdlm.inspect = true to keep one for a while")
        return record

    def find_canvas(name: str, choice: int, step: int) -> tuple[Served, list[int]]:
        record = find(name)
        frames = _of(record.frames, choice, "choice")
        return find_model(record.model), _of(frames, step, "step")[0].tolist()

    async def compute(served: Served, look: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(served.engine.look(look))

    @app.get("/v1/inspect/{request_id}")
    def describe(request_id: Id) -> dict[str, Any]:
        """What there is to see: a frame is a canvas as a step saw it, the last one the finished text."""
        record = find(request_id)
        config = find_model(record.model).lm.config
        choices = [
            {"index": index, "frames": len(frames), "length": len(frames[-1][0]), "n_given": given}
            for index, (frames, given) in enumerate(zip(record.frames, record.n_given, strict=True))
        ]
        shape: dict[str, Any] = {"n_layers": config.n_layers, "n_heads": config.n_heads, "n_sinks": config.n_sinks}
        shape |= {"sink_kind": config.sink_kind if config.n_sinks else None}
        return {"id": record.id, "model": record.model, "choices": choices, "seconds_left": records.left(record), **shape}

    @app.get("/v1/inspect/{request_id}/{choice}/frames")
    def frames(
        request_id: Id, choice: Index, start: Number = 0, count: Annotated[int, Query(ge=1, le=_MOST_FRAMES)] = _MOST_FRAMES
    ) -> dict[str, Any]:
        """Canvases and confidences. ids: null where a token is still to be written; confidence: bytes, 0 for none, else
        (byte - 1) / 254. pieces, kinds: the text and kind of every id that occurs."""
        record = find(request_id)
        served, chosen = find_model(record.model), _of(record.frames, choice, "choice")[start : start + count]
        ids = sorted({token for tokens, _ in chosen for token in np.unique(tokens).tolist()} - {record.mask_id})
        shown = [
            {
                "tokens": [None if token == record.mask_id else token for token in tokens.tolist()],
                "confidence": base64.b64encode(sure.tobytes()).decode(),
            }
            for tokens, sure in chosen
        ]
        named = {
            name: {str(token): find(token) for token in ids} for name, find in (("pieces", served.piece), ("kinds", served.kind))
        }
        return {"start": start, "frames": shown, **named}

    @app.get("/v1/inspect/{request_id}/{choice}/recording")
    async def recording(request_id: Id, choice: Index) -> dict[str, Any]:
        """All there is to see, for a file: one model's side of a recording, a frame computed at a time."""
        record = find(request_id)
        served, frames = find_model(record.model), _of(record.frames, choice, "choice")
        recorder = Recorder(
            served.lm.model,
            served.name,
            [tokens.tolist() for tokens, _ in frames],
            record.n_given[choice],
            piece=served.piece,
            kind=served.kind,
            confidence=[sure.tobytes() for _, sure in frames],
            barred=served.engine.barred,
        )
        for _ in range(recorder.n_frames):
            await compute(served, recorder.take)
        return await run_in_threadpool(recorder.side)

    @app.get("/v1/inspect/{request_id}/{choice}/{step}/look")
    async def look(request_id: Id, choice: Index, step: Index) -> dict[str, Any]:
        """Received attention (layers, heads, sinks + tokens) and norms of values (layers, sinks + tokens); found before anything is
        rounded: content sinks by either rule as places in (layers, heads, tokens), and each head's most received token."""
        served, tokens = find_canvas(request_id, choice, step)
        seen = await compute(served, lambda: inspection.look(served.lm.model, tokens))
        sinks = {"absolute": seen.absolute, "relative": seen.relative, "top": seen.top, "rules": RULES._asdict()}
        return {"received": quantise(seen.received), "values": quantise(seen.values), **sinks}

    @app.get("/v1/inspect/{request_id}/{choice}/{step}/received")
    async def received(request_id: Id, choice: Index, step: Index, layer: Number | None = None) -> dict[str, Any]:
        """Received attention, (layers, heads, sinks + tokens)."""
        served, tokens = find_canvas(request_id, choice, step)
        model = served.lm.model
        return quantise(await compute(served, lambda: inspection.received_attention(model, tokens, layer)))

    @app.get("/v1/inspect/{request_id}/{choice}/{step}/row")
    async def row(
        request_id: Id, choice: Index, step: Index, position: Number, layer: Number | None = None, head: Number | None = None
    ) -> dict[str, Any]:
        """What one token attends to, (sinks + tokens); mean over all layers, or heads, where none is given."""
        served, tokens = find_canvas(request_id, choice, step)
        model = served.lm.model
        return quantise(await compute(served, lambda: inspection.attention_row(model, tokens, layer, head, position)))

    @app.get("/v1/inspect/{request_id}/{choice}/{step}/values")
    async def values(request_id: Id, choice: Index, step: Index) -> dict[str, Any]:
        """Norms of values, (layers, sinks + tokens)."""
        served, tokens = find_canvas(request_id, choice, step)
        model = served.lm.model
        return quantise(await compute(served, lambda: inspection.value_norms(model, tokens)))

    @app.get("/v1/inspect/{request_id}/{choice}/{step}/candidates")
    async def candidates(
        request_id: Id,
        choice: Index,
        step: Index,
        position: Number,
        k: Annotated[int, Query(ge=1, le=_MOST_CANDIDATES)] = 10,
    ) -> dict[str, Any]:
        """The likeliest tokens of a position."""
        served, tokens = find_canvas(request_id, choice, step)
        model, barred = served.lm.model, served.engine.barred
        found = await compute(served, lambda: inspection.candidates(model, tokens, position, k, barred))
        shown = [{"token": token, "piece": served.piece(token), "probability": chance} for token, chance in found]
        return {"position": position, "candidates": shown}


def _of(rows: list[Any], index: int, name: str) -> Any:
    if index >= len(rows):
        raise ApiError(404, f"{name} {index}: there are {len(rows)}, from 0 on", param=name)
    return rows[index]
