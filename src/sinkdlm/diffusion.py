"""The masked-diffusion objective: noise schedules, corruption, and the loss on masked positions.

A sample is corrupted at a time t in (0, 1): each maskable token becomes [MASK] with probability p(t), and the loss is
p'(t)/p(t) times the cross-entropy of the masked tokens, whose expectation bounds the negative log-likelihood (paper eq. 3, 4).
In block diffusion (Arriola et al. 2025), each block of a sample has a time of its own, and is predicted after the clean blocks
before it.

Takes any model that maps tokens to hidden states and has a head weight; knows no architecture, tokenizer or file.

B batch, T tokens, N masked positions, V vocabulary, d model width.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from sinkdlm.noise import Key, Stream, counter, fold, golden_words, hash_words, stream_state, top_bits, unit_interval

_PROBABILITY_BITS = 32

ScheduleName = Literal["linear", "cosine", "loglinear"]


class Schedule(NamedTuple):
    """How the masking probability grows with t.

    linear: p = (1 - eps) t + eps, the paper's. The official code weighs by 1/p; ours is p'/p = (1 - eps)/p, equal up to 1 - eps.
    cosine: p = (1 - eps)(1 - cos(pi t / 2)) and loglinear: p = (1 - eps) t, as MDLM defines them (Sahoo et al. 2024).
    equal: every masked token weighs the same, 2: the weights then sum to about those of p'/p. No bound, but less noise.
    """

    name: ScheduleName = "linear"
    eps: float = 1e-3
    equal: bool = False

    def probability(self, t: Tensor) -> Tensor:
        if self.name == "linear":
            return (1 - self.eps) * t + self.eps
        if self.name == "cosine":
            return (1 - self.eps) * 2 * torch.sin(t * (math.pi / 4)) ** 2  # 1 - cos, without its cancellation near 0
        return (1 - self.eps) * t

    def weight(self, t: Tensor) -> Tensor:
        """p'(t) / p(t), unless all are equal."""
        if self.equal:
            return torch.full_like(t, 2.0)
        if self.name == "linear":
            return (1 - self.eps) / self.probability(t)
        if self.name == "cosine":
            return (math.pi / 2) / torch.tan(t * (math.pi / 4))
        return 1 / t


LINEAR = Schedule()


class Noisy(NamedTuple):
    """A corrupted batch: tokens (B, T) with [MASK] where masked (B, T); t and the loss weight of each row (B,), float64. In block
    diffusion, t and weight are those of each token's block, (B, T)."""

    tokens: Tensor
    masked: Tensor
    t: Tensor
    weight: Tensor


def corrupt(
    tokens: Tensor,
    samples: Tensor,
    *,
    seed: int,
    mask_id: int,
    schedule: Schedule = LINEAR,
    times: Literal["golden", "independent"] = "golden",
    maskable: Tensor | None = None,
    mask: "Mask | None" = None,
    block_size: int | None = None,
    documents: Tensor | None = None,
    t_range: tuple[float, float] = (0.0, 1.0),
) -> Noisy:
    """Mask tokens (B, T) by their sample indices (B,): a pure function of (seed, sample, position), whatever the batch.

    maskable (B, T): only these positions can be masked (a prompt never is, padding never is).
    mask: a faster form of `mask_rows`.
    block_size: block diffusion. The times of a sample's n blocks lie in n equal parts of (0, 1), one in each, in random order; only
        blocks with maskable tokens count. documents (B, T): in packed rows, blocks count from a document's first token.
    t_range: times are drawn from this part of (0, 1) instead, which lowers the variance of gradients for short blocks.
    """
    if schedule.name not in get_args(ScheduleName) or times not in ("golden", "independent"):
        raise ValueError(
            f"schedule {schedule.name!r}, times {times!r}: allowed are {get_args(ScheduleName)}, ('golden', 'independent')"
        )
    if samples.shape != tokens.shape[:1]:
        raise ValueError(f"samples has shape {tuple(samples.shape)}: give one index for each of the {tokens.shape[0]} rows")
    device = tokens.device
    blocks = None
    if block_size is not None and (documents is not None or tokens.shape[1] > block_size):
        blocks = number_blocks(tokens.shape[1], block_size, documents, device)
    return (mask or mask_rows)(
        tokens,
        samples.to(device),
        counter(tokens.shape[1], device),
        maskable,
        stream_state(seed, Stream.TIME, device),
        stream_state(seed, Stream.MASK, device),
        mask_id,
        schedule,
        times,
        blocks,
        t_range,
    )


def number_blocks(n_tokens: int, block_size: int, documents: Tensor | None = None, device: torch.device | None = None) -> Tensor:
    """Number the blocks of a row from 0, (1, T), or of packed rows, (B, T): there, each document begins a block."""
    index = torch.arange(n_tokens, device=device if documents is None else documents.device)[None]
    if documents is None:
        return index // block_size
    parts = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    start = torch.where(parts, index, 0).cummax(1).values
    return ((index - start) % block_size == 0).cumsum(1) - 1


def mask_rows(
    tokens: Tensor,
    samples: Tensor,
    positions: Tensor,
    maskable: Tensor | None,
    time_state: Tensor,
    mask_state: Tensor,
    mask_id: int,
    schedule: Schedule,
    times: str,
    blocks: Tensor | None = None,
    t_range: tuple[float, float] = (0.0, 1.0),
) -> Noisy:
    """Compute `corrupt`, with positions and noise streams given as tensors, and the number of each token's block."""
    t = _times(time_state, samples, times)
    if blocks is not None:
        blocks = blocks.expand(tokens.shape)
        t = _block_times(time_state, samples, positions, t, blocks, maskable, times).gather(1, blocks)
    if t_range != (0.0, 1.0):
        t = t_range[0] + (t_range[1] - t_range[0]) * t
    # Compare integers: a rounding difference between devices moves the threshold by at most one part in 2**32.
    threshold = (schedule.probability(t) * 2.0**_PROBABILITY_BITS).round().to(torch.int64)
    if t.dim() == 1:
        threshold = threshold[:, None]
    masked = top_bits(_PROBABILITY_BITS, fold(mask_state, samples[:, None], positions)) < threshold
    if maskable is not None:
        masked &= maskable
    return Noisy(torch.where(masked, mask_id, tokens), masked, t, schedule.weight(t))


def complement(tokens: Tensor, noisy: Noisy, *, mask_id: int, schedule: Schedule = LINEAR, maskable: Tensor | None = None) -> Noisy:
    """Mask what `noisy` leaves, at the time 1 - t (Fast-dLLM v2): of the two, each maskable token is masked in one.

    For the linear schedule: others mask the complement's tokens with another probability than that of 1 - t."""
    masked = ~noisy.masked if maskable is None else maskable & ~noisy.masked
    t = 1 - noisy.t
    return Noisy(torch.where(masked, mask_id, tokens), masked, t, schedule.weight(t))


Mask = Callable[..., Noisy]


def _times(state: Key, samples: Tensor, times: str) -> Tensor:
    return unit_interval(golden_words(state, samples) if times == "golden" else fold(state, samples))


def _block_times(
    state: Key, samples: Tensor, index: Tensor, t: Tensor, blocks: Tensor, maskable: Tensor | None, times: str
) -> Tensor:
    """Return the time of each block, (B, T), where T bounds the number of blocks. t (B,): the samples' own times. index (T,): 0 to
    T - 1, given and not made here, so that it stays in 64 bits.

    Of n blocks, one has time (rank + t) / n for each rank below n: a keyed permutation. A sample of one block keeps its t.
    """
    words = torch.as_tensor(fold(state, samples[:, None], index))  # (B, blocks)
    held = torch.ones_like(blocks) if maskable is None else maskable.to(torch.int64)
    counts = torch.zeros_like(blocks).scatter_add_(1, blocks, held) > 0
    n = counts.sum(1, keepdim=True).clamp_min(1)
    if times == "independent":
        return torch.where(n == 1, t[:, None], unit_interval(words))
    order = words.masked_fill(~counts, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)
    ranks = torch.empty_like(order).scatter_(1, order, index.expand(order.shape).contiguous())
    return ((ranks + t[:, None]) / n).where(counts, t[:, None])


def times_of(samples: Tensor, *, seed: int, times: Literal["golden", "independent"] = "golden") -> Tensor:
    """Return the t (B,), float64, at which `corrupt` masks these samples. Needs only their indices, not their tokens."""
    return _times(hash_words(seed, int(Stream.TIME)), samples, times)


# (hidden (N, d), head weight (V, d), targets (N,), weights (N,), exclude) -> (sum of weights * nll, nll (N,) detached)
Nll = Callable[[Tensor, Tensor, Tensor, Tensor, int | None], tuple[Tensor, Tensor]]


class Loss(NamedTuple):
    """total: sum of weight * nll / denominator, differentiable. nll (N,): of each scored position, detached, row by row.

    positions, rows (N,): of each, in the flattened batch, and its row. With a fixed number of head slots, `used` marks the slots
    that hold a position, nll is 0 in the others, and `missed` counts positions without a slot: unless it is 0, the loss is wrong.
    """

    total: Tensor
    nll: Tensor
    scored: Tensor
    rows: Tensor
    positions: Tensor
    used: Tensor | None = None
    missed: Tensor | None = None

    def __repr__(self) -> str:
        """One line: the total, how much of the batch is scored, and the mean over it."""
        n = self.nll.numel() if self.used is None else int(self.used.sum())
        mean = f", {float(self.nll.double().sum()) / n:.4f} nats each" if n else ""
        missed = f", {int(self.missed)} without a slot" if self.missed is not None and int(self.missed) else ""
        return f"Loss {float(self.total.detach()):.4f}: {n:,} of {self.scored.numel():,} tokens scored{mean}{missed}"


def denoising_loss(
    model: Any,
    tokens: Tensor,
    noisy: Noisy,
    *,
    denominator: Tensor | float,
    lengths: Tensor | None = None,
    documents: Tensor | None = None,
    annealing: tuple[float, int] | None = None,
    slots: int | None = None,
    nll: Nll | None = None,
    block_size: int | None = None,
    two_copies: bool = False,
) -> Loss:
    """Compute one micro-batch's loss. `denominator` is global (maskable positions of the whole batch), so cuts change nothing.

    A shifted model cannot predict token 0 or a packed document's first token, so these are not scored. In `documents` (B, T), a
    run of equal ids is a document. A [MASK] row inside the vocabulary is left out of the softmax, as in sampling and likelihood.

    model: has `config` and `head_weight`; model(tokens, lengths=, select=) gives hidden states (N, d) at the flattened positions
    `select` (N,), and takes `documents`, `annealing`, and for block diffusion `clean` and `block_size`, where they are given.
    slots: a fixed number of positions that reach the head: no shape depends on the masks, and nothing waits for the device.
    Unused slots have weight 0. nll: a faster form of `token_nll`.
    block_size: of block diffusion, instead of the model's. Rows longer than a block are computed beside their clean tokens;
        two_copies: shorter rows, too, which changes nothing but the rounding.
    """
    block_size = block_size or getattr(model.config, "block_size", None)
    clean = tokens if block_size is not None and (two_copies or tokens.shape[1] > block_size) else None
    facts = {"documents": documents, "annealing": annealing, "clean": clean, "block_size": block_size}
    options = {name: value for name, value in facts.items() if value is not None}
    scored = scored_of(noisy, shifted=model.config.shift_logits, documents=documents)
    index, used = choose_positions(scored, slots)
    states = model(noisy.tokens, lengths=lengths, **options, select=index)
    rows = index // scored.shape[1]
    weights = noisy.weight.to(torch.promote_types(states.dtype, torch.float32))
    weights = weights[rows] if weights.dim() == 1 else weights.flatten()[index]
    if used is not None:
        weights = weights.where(used, 0)
    config = model.config
    exclude = config.mask_id if config.mask_id < config.vocab_size else None
    total, each = (nll or token_nll)(states, model.head_weight, tokens.flatten()[index], weights, exclude)
    if used is None:
        return Loss(total / denominator, each, scored, rows, index)
    return Loss(total / denominator, each.where(used, 0), scored, rows, index, used, scored.sum() - used.sum())


def scored_of(noisy: Noisy, *, shifted: bool, documents: Tensor | None = None) -> Tensor:
    """Return which positions (B, T) are scored."""
    scored = noisy.masked
    if shifted:
        scored = scored.clone()
        scored[:, 0] = False
        if documents is not None:
            scored[:, 1:] &= documents[:, 1:] == documents[:, :-1]
    return scored


def choose_positions(scored: Tensor, slots: int | None) -> tuple[Tensor, Tensor | None]:
    """Return flat indices of the scored positions, in order; with a fixed number of slots, also which slots are used."""
    if slots is None:
        return torch.nonzero(scored.flatten())[:, 0], None
    index = torch.nonzero_static(scored.flatten(), size=slots, fill_value=-1)[:, 0]
    used = index >= 0
    # Unused slots repeat the first scored position: they are finite wherever it is.
    return index.where(used, index[:1].clamp_min(0)), used


def token_nll(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor, exclude: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (sum of weights * nll, nll (N,) detached) of hidden (N, d) and targets (N,). exclude: an id outside the softmax."""
    logits = functional.linear(hidden, head_weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if exclude is not None:
        logits = logits.index_fill(1, torch.tensor([exclude], device=logits.device), -math.inf)
    nll = functional.cross_entropy(logits, targets, reduction="none")
    return (nll * weights).sum(), nll.detach()
