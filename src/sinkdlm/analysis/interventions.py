"""Change attention at inference and measure the effect: remove, empty or move the sink, or ban the top content sink.

The weights were trained without the change. NELBO, predictions and samples are compared with those of the unchanged model, with
the same noise. Knows no tokenizer and no file.

B rows, T tokens, S sinks, H query heads, K key/value heads, D head width, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinkdlm.analysis.capture import RULES, Rules, noisy
from sinkdlm.analysis.intervals import mean_interval
from sinkdlm.likelihood import log_likelihood
from sinkdlm.model.context import Intervention, Seen
from sinkdlm.model.model import DiffusionLM
from sinkdlm.model.observe import summarize
from sinkdlm.model.positions import Rotation
from sinkdlm.sampling.loop import gather, step
from sinkdlm.sampling.requests import Request, start

_SHARES = (0.25, 0.5, 0.75)  # of masked tokens, at which predictions are compared


class Change(NamedTuple):
    name: str
    label: str
    intervene: Intervention


def find_changes(model: DiffusionLM, rules: Rules = RULES) -> tuple[list[Change], dict[str, str]]:
    """The changes that a model allows, and why it does not allow the others."""
    config = model.config
    omitted: dict[str, str] = {}
    if not config.n_sinks:
        omitted = dict.fromkeys(("remove", "zero", "move"), "the model has no sink token")
    elif config.has_sink_logit:
        omitted = dict.fromkeys(("zero", "move"), "a sink logit has neither value nor position")
    elif config.n_registers:
        omitted = {"move": "a register sees the tokens, so moving it also changes what it sees"}
    far, banned = "end" if config.sink_position == "front" else "front", f"it receives more than {rules.threshold:g}"
    changes = [
        Change("remove", "sink removed", partial(_remove, config.n_registers)),
        Change("zero", "sink's value set to zero", partial(_zero, config.n_registers)),
        *(Change(f"move-{to}", f"sink moved to the {to}", partial(_move, config, to)) for to in (far, "middle")),
        Change("ban", f"top content sink banned where {banned}", partial(_ban, model, rules.threshold)),
    ]
    return [change for change in changes if change.name.partition("-")[0] not in omitted], omitted


def _remove(n_registers: int, _: int, seen: Seen) -> Seen:
    if n_registers:
        hidden = torch.arange(seen.k.shape[2], device=seen.k.device) >= n_registers
        return seen._replace(visible=_and(seen.visible, hidden[None, None, None]))
    return seen._replace(sink_k=None, sink_v=None, sink_logit=None)


def _content(visible: Tensor, n_rows: int) -> Tensor:
    """Which tokens of a row are not padding, (B, T), by who sees them."""
    visible = visible.expand(n_rows, -1, -1, -1)[:, 0]
    if visible.shape[1] == 1:  # only padding is hidden
        return visible[:, 0]
    # Of blocks, every token of the text sees the first. In two copies, no clean token sees a noised one.
    half = visible.shape[2] // 2
    return visible[:, :, 0] if visible[:, half:, 0].any() else visible[:, half:, half]


def _zero(n_registers: int, _: int, seen: Seen) -> Seen:
    if n_registers:
        return seen._replace(v=torch.cat([torch.zeros_like(seen.v[:, :, :n_registers]), seen.v[:, :, n_registers:]], dim=2))
    return seen if seen.sink_v is None else seen._replace(sink_v=torch.zeros_like(seen.sink_v))


def _move(config: Any, where: str, _: int, seen: Seen) -> Seen:
    """Rotate the sinks' keys on from their place: rotary angles add up, and only distances to the tokens matter."""
    if seen.sink_k is None:
        return seen
    batch = seen.q.shape[0]
    n_tokens = torch.full((batch,), seen.k.shape[2], device=seen.k.device)
    if isinstance(seen.visible, Tensor):
        n_tokens = _content(seen.visible, batch).sum(-1)
    n_sinks, in_front = seen.sink_k.shape[2], config.sink_position == "front"
    whole = n_tokens + n_sinks
    by = {"end": whole, "front": -whole, "middle": n_sinks + n_tokens // 2 if in_front else n_tokens // 2 - n_tokens}[where]
    rotation = Rotation.at(by[:, None].expand(-1, n_sinks), config, seen.sink_k.dtype)
    moved = rotation.apply(seen.sink_k.expand(batch, -1, -1, -1).transpose(1, 2)).transpose(1, 2)
    return seen._replace(sink_k=moved, sink_v=None if seen.sink_v is None else seen.sink_v.expand(batch, -1, -1, -1))


def _ban(model: DiffusionLM, threshold: float, _: int, seen: Seen) -> Seen:
    """In each head, hide the content token that receives most from all queries, if it receives more than the threshold. In block
    diffusion, hide from each block the token that receives most from it."""
    n, visible = model.config.n_registers, seen.visible
    content = _content(visible, seen.q.shape[0]) if isinstance(visible, Tensor) else None
    sinks = (seen.k[:, :, :n], seen.v[:, :, :n]) if n else (seen.sink_k, seen.sink_v)
    find = partial(summarize, k=seen.k[:, :, n:], v=seen.v[:, :, n:], sink_k=sinks[0], sink_v=sinks[1], sink_logit=seen.sink_logit)
    if content is None or visible.shape[2] == 1:
        lengths = None if content is None else content.sum(-1) - n
        banned = _top(find(seen.q[:, :, n:], lengths=lengths).received, threshold)[:, :, None]  # (B, H, 1, T)
    else:
        n_tokens, n_keys = content.shape[1], visible.shape[2]
        inside, size = content.repeat(1, n_keys // n_tokens)[:, None], model.config.block_size or n_tokens
        starts = [(copy, start) for copy in range(0, n_keys, n_tokens) for start in range(0, n_tokens, size)]
        parts = []
        for block in (slice(copy + start, copy + min(start + size, n_tokens)) for copy, start in starts):
            received = find(seen.q[:, :, block], visible=visible[:, :, block]).received * inside
            parts.append(_top(received, threshold)[:, :, None].expand(-1, -1, block.stop - block.start, -1))
        banned = torch.cat(parts, dim=2)  # (B, H, T, T)
    if not banned.any():
        return seen
    left = _and(visible, ~torch.nn.functional.pad(banned, (n, 0)))
    if not n and seen.sink_k is None and seen.sink_logit is None:  # a query that sees one token has nothing else to attend to
        left = torch.where(left.any(-1, keepdim=True), left, torch.ones_like(left) if visible is None else visible)
    return seen._replace(visible=left)


def _top(received: Tensor, threshold: float) -> Tensor:
    """(B, H, L) bool: the token that receives most, if that is above the threshold."""
    most = received.max(-1, keepdim=True)
    return torch.zeros_like(received, dtype=torch.bool).scatter(-1, most.indices, most.values > threshold)


def _and(visible: Any, also: Tensor) -> Tensor:
    return also if visible is None else visible & also


class Ground(NamedTuple):
    """The texts and requests on which changes are measured."""

    texts: Sequence[Sequence[int]]  # for NELBO and predictions; each has a token to predict (a shifted row's first is none)
    requests: Sequence[Request]  # for samples
    draws: int = 16  # of NELBO for each text
    batch: int = 8  # samples at a time
    seed: int = 0
    barred: Sequence[int] = ()  # ids that are never written


def measure_changes(
    model: DiffusionLM, ground: Ground, rules: Rules = RULES, *, tick: Callable[[int], None] = lambda done: None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """For each change: NELBO before and after, their difference, the KL divergence of predictions, and the share of written tokens
    that differ, with intervals over texts and requests; and what was left out. tick: called after each model, the unchanged first.
    """
    changes, omitted = find_changes(model, rules)
    n_tokens = sum(map(len, ground.texts)) / max(1, len(ground.texts))  # reported, as short rows have stronger sinks
    with model.inference():
        before = _look(model, ground, None)
        tick(1)
        rows = []
        for change in changes:
            after = _look(model, ground, change.intervene)
            told = {"name": change.name, "label": change.label, "text_tokens": n_tokens}
            rows.append(told | _compare(*before, *after, _divergences(model, ground, change.intervene), ground.seed))
            tick(1)
    return rows, omitted


def _look(model: DiffusionLM, ground: Ground, intervene: Intervention | None) -> tuple[np.ndarray, list[Tensor]]:
    """With or without a change: NELBO of each text in nats a token, and the tokens written for each request."""
    denoiser: Any = partial(model.denoiser(), intervene=intervene)
    denoiser.barred, denoiser.block_size = tuple(ground.barred), model.config.block_size  # a partial passes no attributes on
    texts = [list(row) for row in ground.texts]
    scored = [[position > 0 or not model.config.shift_logits for position in range(len(row))] for row in texts]
    device, mask_id = model.embed.weight.device, model.config.mask_id
    found = log_likelihood(denoiser, texts, scored, draws=ground.draws, mask_id=mask_id, seed=ground.seed, device=device)
    counts = np.array([sum(row) for row in scored])
    nelbo = -np.asarray(found.mean, dtype=np.float64) / counts
    return nelbo, _write(denoiser, ground, device)


def _divergences(model: DiffusionLM, ground: Ground, intervene: Intervention) -> np.ndarray:
    """KL divergence of predictions at masked positions for each text, in nats. One forward's predictions are held at a time."""
    mask_id, device, denoiser = model.config.mask_id, model.embed.weight.device, model.denoiser()
    found = []
    for number, row in enumerate(ground.texts):
        total, n_masked = 0.0, 0
        clean = None if model.config.block_size is None else torch.tensor([list(row)], device=device)
        for tokens, masked in zip(*noisy([row], _SHARES, mask_id, ground.seed, numbers=[number], device=device), strict=True):
            masked[:, :1] &= not model.config.shift_logits  # nothing predicts a shifted row's first token
            old, new = (
                _log_probabilities(denoiser(tokens, where=masked, clean=clean, intervene=change), mask_id)
                for change in (None, intervene)
            )
            total += float(torch.where(old.isneginf(), 0.0, old.exp() * (old - new)).sum())
            n_masked += int(masked.sum())
        if n_masked:
            found.append(total / n_masked)
    return np.array(found)


def _log_probabilities(logits: Tensor, mask_id: int) -> Tensor:
    logits = logits.float()
    if mask_id < logits.shape[-1]:
        logits[:, mask_id] = -math.inf
    return logits.log_softmax(-1)


def _write(denoiser: Any, ground: Ground, device: torch.device) -> list[Tensor]:
    written = []
    for begin in range(0, len(ground.requests), ground.batch):
        states = start(ground.requests[begin : begin + ground.batch])
        for state in states:
            state.leave_cache()
        while any(not state.done for state in states):
            step(states, denoiser, device=device)
        for row, state in zip(gather(states).rows, states, strict=True):
            opened = torch.tensor(state.request.canvas) == state.request.mask_id
            written.append(torch.tensor(row)[opened[: len(row)]])
    return written


def _compare(
    old: np.ndarray, old_written: list[Tensor], new: np.ndarray, written: list[Tensor], divergences: np.ndarray, seed: int
) -> dict[str, Any]:
    changed = np.array([float((a != b).double().mean()) for a, b in zip(old_written, written, strict=True)])
    nelbo, kl, differ = (mean_interval(values, seed=seed) for values in (new - old, divergences, changed))
    means = {"before": float(old.mean()), "after": float(new.mean()), "change": nelbo.pop("mean")}
    return {"nelbo": means | nelbo, "kl": kl, "changed": differ}
