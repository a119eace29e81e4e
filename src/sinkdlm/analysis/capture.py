"""Watch a model denoise: reduced statistics of every forward, layer and head, without changing the output.

No (T, T) map is held; single maps are computed afterwards from the tokens that a forward saw. Needs the core packages alone.
Knows no tokenizer and no file.

B rows, N forwards of a row, E layers, H heads, T tokens, S sinks of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from sinkdlm.analysis.metrics import Trajectory
from sinkdlm.errors import AnalysisError, ModelError
from sinkdlm.model.attention import attend_naive
from sinkdlm.model.model import Block, Denoiser, DiffusionLM
from sinkdlm.model.observe import part_registers, see_blocks, share_on, summarize
from sinkdlm.noise import Stream, fold, hash_words, unit_interval
from sinkdlm.sampling.loop import step
from sinkdlm.sampling.requests import Request, start
from sinkdlm.sampling.unmasking import APPROXIMATE

_NOISE = -3  # noise key beside those of sampling: which positions of a given text are masked


class Rules(NamedTuple):
    """The two rules for content sinks."""

    threshold: float = 0.3  # absolute: received attention is above it (Gu et al.)
    margin: float = 3.0  # relative: the column sum exceeds the other tokens' mean by more (Rulli et al.)


RULES = Rules()


_MEASURED = {"received", "value_norm", "resting", "update_ratio"}  # numbers whose last dimension is T
_PER_TOKEN = {"absolute", "relative", *_MEASURED}


class Watched(Denoiser):
    """A denoiser that captures statistics of every forward. `last`: those of the last forward, a dictionary for each row.

    barred: ids that are never written, as in `model.denoiser`. reached: for each row, the tokens that count; later ones, of blocks
    not yet begun, get NaN."""

    capturable = False

    def __init__(self, model: DiffusionLM, rules: Rules = RULES, barred: Sequence[int] = ()) -> None:
        super().__init__(model, barred)
        self.rules, self._n_registers = rules, model.config.n_registers
        self.last: list[dict[str, np.ndarray]] = []
        self.reached: Sequence[int] | None = None
        self._layers: list[dict[str, Tensor]] = []  # statistics of each, rows first, named as in Trajectory
        self._states: Tensor | None = None  # |h| of the layer that is being computed, (B, R + T)
        self._lengths: Tensor | None = None  # of the rows
        self._counted: Tensor | None = None  # tokens that count
        self._n_tokens = self._copies = 1  # of a row; of each token

    def __call__(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        where: Tensor | None = None,
        cache: Any = None,
        clean: Tensor | None = None,
        **facts: Any,
    ) -> Tensor:
        self._layers, self._lengths = [], lengths
        self._n_tokens, self._copies = tokens.shape[1], 1 if clean is None else 2
        self._counted = lengths if self.reached is None else torch.tensor(self.reached, device=tokens.device)
        with ExitStack() as stack:
            for block in cast(list[Block], self.model.blocks):
                stack.callback(block.register_forward_pre_hook(self._enter).remove)
                stack.callback(block.attention.register_forward_hook(self._leave).remove)
            with torch.no_grad():
                self.model(tokens, lengths=lengths, clean=clean, observe=self._look)
        self.last = self._collect(tokens)
        # The watched forward runs the plain path and rounds differently: the sampler gets an unwatched forward's output.
        return super().__call__(tokens, lengths=lengths, where=where, cache=cache, clean=clean, **facts)

    def _look(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None, sink_v: Tensor | None) -> None:
        q, k, v, sink_k, sink_v = part_registers(self._n_registers, q, k, v, sink_k, sink_v)
        given, logit = (q[:, :, : self._n_tokens], k, v, sink_k, sink_v), sink_logit_of(self.model, layer)
        visible = see_blocks(self._n_tokens, self.model.config.block_size, q.device, self._copies)
        how: dict[str, Any] = {"sink_logit": logit, "lengths": self._counted, "visible": visible, "copies": self._copies}
        found = summarize(*given, **how)
        absolute = found.received > self.rules.threshold
        most = found.received.max(-1)
        self._layers.append(
            {
                "absolute": absolute,
                "relative": stands_out(found.received, self._counted, self.rules.margin),
                "top": most.indices,
                "top_received": most.values,
                "resting": share_on(absolute, *given, **how),
                **found._asdict(),
                "received": found.received.mean(1),
            }
        )

    def _enter(self, _: Any, given: tuple[Any, ...]) -> None:
        self._states = _norms(given[0])

    def _leave(self, attention: Any, given: tuple[Any, ...], update: Tensor) -> None:
        """|z| / |h| of each token."""
        assert self._states is not None
        self._layers[-1]["update_ratio"] = (_norms(update) / self._states)[:, self._n_registers :][:, : self._n_tokens]

    def _collect(self, tokens: Tensor) -> list[dict[str, np.ndarray]]:
        """Transfer each statistic once, then split it by row and cut padding."""
        columns = {name: torch.stack([one[name] for one in self._layers], dim=1).cpu().numpy() for name in self._layers[0]}
        seen = tokens.cpu().numpy()
        sizes = [tokens.shape[1]] * tokens.shape[0] if self._lengths is None else self._lengths.tolist()
        rows = []
        for row, size in enumerate(sizes):
            found = {name: x[row][..., :size] if name in _PER_TOKEN else x[row] for name, x in columns.items()}
            if self.reached is not None:
                for name in _MEASURED:
                    found[name][..., self.reached[row] :] = np.nan
            rows.append({**found, "tokens": seen[row, :size].astype(np.int32)})
        return rows


def _norms(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).norm(dim=-1)


def sink_logit_of(model: DiffusionLM, layer: int) -> Tensor | None:
    return cast(Block, model.blocks[layer]).attention.sink_logit


def stands_out(received: Tensor, lengths: Tensor | None, margin: float) -> Tensor:
    """(B, H, L) bool: the column sum exceeds the mean column sum of the other tokens by more than the margin. In block diffusion
    a column counts as if all tokens saw it."""
    n_tokens = received.new_full((received.shape[0],), received.shape[-1]) if lengths is None else lengths
    n_tokens = n_tokens.to(received)[:, None, None]
    column = received * n_tokens
    others = (column.sum(-1, keepdim=True) - column) / (n_tokens - 1).clamp_min(1)
    return column - others > margin


def capture(
    model: DiffusionLM,
    requests: Sequence[Request],
    *,
    rules: Rules = RULES,
    batch: int = 8,
    tick: Callable[[int], None] = lambda forwards: None,
    barred: Sequence[int] = (),
) -> Iterator[Trajectory]:
    """Sample the requests, `batch` at a time, and yield the trajectory of each in order.

    tick: called after a step with the number of rows that went through the model. barred: ids that are never written.
    """
    for request in requests:
        _check(request)
    for begin in range(0, len(requests), batch):
        states = start(requests[begin : begin + batch])
        seen: list[list[dict[str, np.ndarray]]] = [[] for _ in states]
        for state in states:
            state.step_alone()
            state.leave_cache()  # an exact one; others are refused
        with model.inference():
            watched = Watched(model, rules, barred)
            while plans := [(number, state.plan) for number, state in enumerate(states) if not state.done]:
                watched.last = []
                if model.config.block_size is not None:
                    watched.reached = [states[number].reached for number, _ in plans]
                step(states, watched, device=watched.device)
                for (number, plan), row in zip(plans, watched.last, strict=False):  # no row where none had a forward
                    if plan.n_predicted:  # a step that only remasks needs no forward, even if others of its batch do
                        seen[number].append(row)
                tick(len(watched.last))
        for state, steps in zip(states, seen, strict=True):
            request = state.request
            n_prompt = sum(token != request.mask_id for token in request.canvas)
            yield _join(steps, request.number, n_prompt, request.mask_id, state.tokens.cpu().numpy())


def _check(request: Request) -> None:
    policy = request.policy
    for refused, why in (
        (policy.guidance, "guidance: each step has two forwards, one without the prompt; analyse without guidance"),
        (
            policy.cache in APPROXIMATE,
            f"cache = {policy.cache!r}: its forwards see only a part of the row; analyse with cache = 'none'",
        ),
        (request.grow, "an open end: positions of a growing row cannot be compared; give a length"),
    ):
        if refused:
            raise AnalysisError(why)


def _join(steps: list[dict[str, np.ndarray]], number: int, n_prompt: int, mask_id: int, final: np.ndarray) -> Trajectory:
    columns = {name: np.stack([step.pop(name) for step in steps]) for name in list(steps[0])}
    return Trajectory(number, n_prompt, mask_id, final=final.astype(np.int32), **columns)


def capture_noise(
    model: DiffusionLM,
    rows: Sequence[Sequence[int]],
    shares: Sequence[float],
    *,
    seed: int = 0,
    rules: Rules = RULES,
    batch: int = 8,
    tick: Callable[[int], None] = lambda forwards: None,
) -> Iterator[Trajectory]:
    """Yield a trajectory for each given text: one forward for each share of masked tokens, the largest first.

    Each token has one random number, keyed by (seed, row, position), and is masked at every share above it: masks are nested.
    In block diffusion, a block sees the clean blocks before it.
    """
    mask_id, device = model.config.mask_id, model.embed.weight.device
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise AnalysisError(f"shares of masked tokens {list(shares)}: give one or more from 0 to 1")
    levels = sorted(shares, reverse=True)
    for begin in range(0, len(rows), batch):
        some = rows[begin : begin + batch]
        (*inputs, text), _ = noisy(some, [*levels, 0.0], mask_id, seed, numbers=range(begin, begin + len(some)), device=device)
        clean = None if model.config.block_size is None else text
        lengths = torch.tensor([len(row) for row in some], device=device)
        seen: list[list[dict[str, np.ndarray]]] = [[] for _ in some]
        with model.inference():
            watched = Watched(model, rules)
            for tokens in inputs:
                if bool(watched(tokens, lengths=lengths, clean=clean).isnan().any()):  # in `capture` the sampler checks this
                    raise ModelError
                for steps, found in zip(seen, watched.last, strict=True):
                    steps.append(found)
                tick(len(some))
        for place, (row, steps) in enumerate(zip(some, seen, strict=True)):
            yield _join(steps, begin + place, 0, mask_id, np.array(row))


def noisy(
    rows: Sequence[Sequence[int]], shares: Sequence[float], mask_id: int, seed: int, *, numbers: Sequence[int], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """For each share: the rows (B, T) with that share masked, padded on the right; and which positions are masked."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row, device=device) for row in rows], batch_first=True)
    places = torch.arange(padded.shape[1], device=device)
    inside = places < torch.tensor([len(row) for row in rows], device=device)[:, None]
    keys = hash_words(seed, int(Stream.SAMPLING), torch.tensor(list(numbers), device=device))
    assert isinstance(keys, Tensor)
    times = unit_interval(fold(keys[:, None], 0, places, _NOISE))
    masked = [(times < share) & inside for share in shares]
    return [padded.masked_fill(chosen, mask_id) for chosen in masked], masked


def clean_row(clean: Sequence[int] | None, device: torch.device) -> Tensor | None:
    return None if clean is None else torch.tensor([list(clean)], device=device)


def attention_maps(
    model: DiffusionLM,
    tokens: Sequence[int],
    places: Sequence[tuple[int, int]],
    *,
    query: int | None = None,
    clean: Sequence[int] | None = None,
) -> dict[tuple[int, int], Tensor]:
    """Attention (T, S + T) of each chosen (layer, head) on this row, sinks in front; a sink logit has no column.

    query: only this token's row, (1, S + T). clean: of block diffusion; a token's two keys count as one.
    """
    n_tokens, copies = len(tokens), 1 if clean is None else 2
    rows = slice(None) if query is None else slice(query, query + 1)
    found: dict[tuple[int, int], Tensor] = {}
    device = model.embed.weight.device
    visible = see_blocks(n_tokens, model.config.block_size, device, copies)
    visible = None if visible is None else visible[:, :, rows]
    n, group = model.config.n_registers, model.config.n_heads // model.config.n_kv_heads
    for layer, head in places:
        if not (0 <= layer < model.config.n_layers and 0 <= head < model.config.n_heads):
            most = f"{model.config.n_layers - 1}, {model.config.n_heads - 1}"
            raise AnalysisError(f"layer {layer}, head {head}: not in this model; choose from 0, 0 to {most}")

    def look(layer: int, q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None, sink_v: Tensor | None) -> None:
        logit = sink_logit_of(model, layer)
        for head in (head for wanted, head in places if wanted == layer):
            one = slice(head // group, head // group + 1)
            of_head = [None if x is None else x[:, one] for x in (k, v, sink_k, sink_v)]
            given = None if logit is None else logit[head : head + 1]
            one_q = q[:, head : head + 1, n : n + n_tokens][:, :, rows]
            _, weights = attend_naive(one_q, *of_head, sink_logit=given, visible=visible)  # type: ignore[arg-type]
            first, *second = weights[0, 0].tensor_split([weights.shape[-1] - (copies - 1) * n_tokens], dim=-1)
            first[:, -n_tokens:] += second[0] if copies > 1 else 0
            found[layer, head] = first.cpu()

    with model.inference():
        model(torch.tensor([list(tokens)], device=device), clean=clean_row(clean, device), observe=look)
    return found
