"""The masked-diffusion objective: noise schedules, corruption, and the loss on masked positions.

A sample is corrupted at a time t in (0, 1): each maskable token becomes [MASK] with probability p(t), and the loss is
p'(t)/p(t) times the cross-entropy of the masked tokens, whose expectation bounds the negative log-likelihood (paper eq. 3, 4).
Takes any model that maps tokens to hidden states and has a head weight; knows no architecture, tokenizer or file.

B batch, T tokens, N masked positions, V vocabulary, d model width.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinkdlm.kernels.available import has_kernels
from sinkdlm.noise import Key, Stream, counter, fold, golden_words, hash_words, stream_state, top_bits, unit_interval

_PROBABILITY_BITS = 32
_FUSE_FROM = 1 << 16  # positions from which corruption on a GPU is compiled
_LOGITS = 160_000_000  # held at once, about 0.6 GB in float32
_LEAST_ROWS, _ROWS = 2048, 256  # of them: with fewer a large head's gradient is read and written too often; multiples of this
ROUNDED = ("cuda",)  # devices whose products like a multiple of rows, in the last layer too

ScheduleName = Literal["linear", "cosine", "loglinear"]


class Schedule(NamedTuple):
    """How the masking probability grows with t.

    linear: p = (1 - eps) t + eps, the paper's. The official code weighs by 1/p; ours is p'/p = (1 - eps)/p, the same up to 1 - eps.
    cosine: p = (1 - eps)(1 - cos(pi t / 2)) and loglinear: p = (1 - eps) t, as MDLM defines them (Sahoo et al. 2024).
    """

    name: ScheduleName = "linear"
    eps: float = 1e-3

    def probability(self, t: Tensor) -> Tensor:
        if self.name == "linear":
            return (1 - self.eps) * t + self.eps
        if self.name == "cosine":
            return (1 - self.eps) * 2 * torch.sin(t * (math.pi / 4)) ** 2  # 1 - cos, without its cancellation near 0
        return (1 - self.eps) * t

    def weight(self, t: Tensor) -> Tensor:
        """p'(t) / p(t)."""
        if self.name == "linear":
            return (1 - self.eps) / self.probability(t)
        if self.name == "cosine":
            return (math.pi / 2) / torch.tan(t * (math.pi / 4))
        return 1 / t


LINEAR = Schedule()


class Noisy(NamedTuple):
    """A corrupted batch: tokens (B, T) with [MASK] where masked (B, T); t and the loss weight of each row (B,), float64."""

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
) -> Noisy:
    """Masks each row as its sample number (B,) says: a pure function of (seed, sample, position), whatever the batch.

    maskable (B, T): only these positions can be masked (a prompt never is, padding never is).
    """
    if schedule.name not in get_args(ScheduleName) or times not in ("golden", "independent"):
        raise ValueError(
            f"schedule {schedule.name!r}, times {times!r}: allowed are {get_args(ScheduleName)}, ('golden', 'independent')"
        )
    if samples.shape != tokens.shape[:1]:
        raise ValueError(f"samples has shape {tuple(samples.shape)}: one number for each of the {tokens.shape[0]} rows")
    device = tokens.device
    fuse = tokens.is_cuda and tokens.numel() >= _FUSE_FROM and not torch.compiler.is_compiling()
    form = _fused_corruption() if fuse else _corrupt
    return form(
        tokens,
        samples.to(device),
        counter(tokens.shape[1], device),
        maskable,
        stream_state(seed, Stream.TIME, device),
        stream_state(seed, Stream.MASK, device),
        mask_id,
        schedule,
        times,
    )


def _corrupt(
    tokens: Tensor,
    samples: Tensor,
    positions: Tensor,
    maskable: Tensor | None,
    time_state: Tensor,
    mask_state: Tensor,
    mask_id: int,
    schedule: Schedule,
    times: str,
) -> Noisy:
    t = _times(time_state, samples, times)
    # Integers decide: a probability off by a rounding on another device moves the threshold by at most one part in 2**32.
    threshold = (schedule.probability(t) * 2.0**_PROBABILITY_BITS).round().to(torch.int64)
    masked = top_bits(_PROBABILITY_BITS, fold(mask_state, samples[:, None], positions)) < threshold[:, None]
    if maskable is not None:
        masked &= maskable
    return Noisy(torch.where(masked, mask_id, tokens), masked, t, schedule.weight(t))


def _times(state: Key, samples: Tensor, times: str) -> Tensor:
    return unit_interval(golden_words(state, samples) if times == "golden" else fold(state, samples))


def times_of(samples: Tensor, *, seed: int, times: Literal["golden", "independent"] = "golden") -> Tensor:
    """The t (B,) at which `corrupt` masks these samples, float64: known wherever their numbers are, without their tokens."""
    return _times(hash_words(seed, int(Stream.TIME)), samples, times)


@functools.cache
def _fused_corruption() -> Callable[..., Noisy]:
    """The same operations in one or two kernels: on a GPU, launching them one by one takes longer than their arithmetic."""
    return torch.compile(_corrupt) if importlib.util.find_spec("triton") else _corrupt


class _Shape(Protocol):
    vocab_size: int
    mask_id: int
    shift_logits: bool


class HiddenModel(Protocol):
    """What the loss needs of a model."""

    @property
    def config(self) -> _Shape: ...

    @property
    def head_weight(self) -> Tensor: ...

    def __call__(self, tokens: Tensor, *, lengths: Tensor | None = None, **options: Any) -> Tensor: ...


class Loss(NamedTuple):
    """total: sum of weight * nll / denominator, differentiable. nll (N,): of each scored position, detached, row by row.

    rows (N,): the row of each of them. With a fixed number of places: `used` says which of the N hold a position, nll is 0 in the
    others, and `missed` counts the positions that found no place; a loss that missed any is not the loss.
    """

    total: Tensor
    nll: Tensor
    scored: Tensor
    rows: Tensor
    used: Tensor | None = None
    missed: Tensor | None = None


def denoising_loss(
    model: HiddenModel,
    tokens: Tensor,
    noisy: Noisy,
    *,
    denominator: Tensor | float,
    lengths: Tensor | None = None,
    documents: Tensor | None = None,
    opening: tuple[float, int] | None = None,
    chunk: int | None = None,
    places: int | None = None,
) -> Loss:
    """The loss of one micro-batch. `denominator` is global (maskable positions of the whole batch), so cuts change nothing.

    A shifted model has no position from which to predict token 0, so that token is left out, and so is the first of each of the
    packed `documents` (B, T), a run of equal ids each. A [MASK] row inside the vocabulary is no outcome and is left out of the
    softmax, as sampling and likelihood leave it out. `documents` and `opening` are the model's, which sees them where given.

    places: how many positions reach the head, whatever the masks; then nothing here waits for the device, and no shape depends on
    what it computes. Those to spare weigh nothing.
    """
    options = {name: value for name, value in (("documents", documents), ("opening", opening)) if value is not None}
    scored = scored_of(noisy, shifted=model.config.shift_logits, documents=documents)
    early = documents is None and getattr(model, "picks_early", False)  # its last layer ends where the loss looks
    if early and scored.device.type in ROUNDED:
        early = torch.is_grad_enabled()
        if early and places is None:
            places = round_places(int(scored.sum()))  # which waits for the device
    choose = _choose(scored) if places is None else functools.partial(_choose_fixed, scored, places)
    if early:
        index, used = choose()
        states = model(noisy.tokens, lengths=lengths, **options, wanted=index)
    else:
        hidden = model(noisy.tokens, lengths=lengths, **options)
        index, used = choose()
        states = hidden.flatten(0, 1).index_select(0, index)
    rows = index // scored.shape[1]
    weights = noisy.weight.to(torch.promote_types(states.dtype, torch.float32))[rows]
    if used is not None:
        weights = weights.where(used, 0)
    config = model.config
    exclude = config.mask_id if config.mask_id < config.vocab_size else None
    total, nll = chunked_nll(states, model.head_weight, tokens.flatten()[index], weights, exclude=exclude, chunk=chunk)
    if used is None:
        return Loss(total / denominator, nll, scored, rows)
    return Loss(total / denominator, nll.where(used, 0), scored, rows, used, scored.sum() - used.sum())


def scored_of(noisy: Noisy, *, shifted: bool, documents: Tensor | None = None) -> Tensor:
    """(B, T): the masked positions that a loss looks at."""
    scored = noisy.masked
    if shifted:
        scored = scored.clone()
        scored[:, 0] = False
        if documents is not None:
            scored[:, 1:] &= documents[:, 1:] == documents[:, :-1]
    return scored


def round_places(count: int) -> int:
    """Places of the head for so many positions: at least one row of them, and a multiple that products like."""
    return max(1, -(-count // _ROWS)) * _ROWS


def _choose(scored: Tensor) -> Callable[[], tuple[Tensor, None]]:
    """Where the scored positions lie in the flattened batch, in order: as many as there are, counted while the model runs."""
    count = read_later(scored.sum())
    return lambda: (torch.nonzero_static(scored.flatten(), size=count())[:, 0], None)


def _choose_fixed(scored: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """The same for a given number of places, and which of them are used."""
    index = torch.nonzero_static(scored.flatten(), size=places, fill_value=-1)[:, 0]
    used = index >= 0
    # Places to spare repeat the first scored position, so that nothing can be infinite there alone.
    return index.where(used, index[:1].clamp_min(0)), used


def read_later(values: Tensor) -> Callable[[], Any]:
    """values.tolist(), asked for now and read later: the host need not wait until a GPU has computed what was begun since."""
    if not values.is_cuda:
        return values.tolist
    landing = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> Any:
        arrived.synchronize()
        return landing.tolist()

    return read


def head_chunk(vocab_size: int) -> int:
    """Rows of logits that exist at a time; planning.py counts them likewise."""
    return max(_LEAST_ROWS, _LOGITS // vocab_size // _ROWS * _ROWS)


def chunked_nll(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    exclude: int | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum of weights * nll, nll (N,) detached) of hidden (N, d) against targets (N,), `chunk` rows of logits at a time.

    Gradients are formed in the forward, chunk by chunk, so that no more than one chunk of logits ever exists.
    """
    chunk = chunk or head_chunk(head_weight.shape[0])
    return _ChunkedNLL.apply(hidden, head_weight, targets, weights, exclude, chunk, torch.is_grad_enabled())


class _ChunkedNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        weights: Tensor,
        exclude: int | None,
        chunk: int,
        trains: bool,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        precise = torch.promote_types(dtype, torch.float32)
        rows, matrix = hidden.to(dtype), head_weight.to(dtype)
        nll = torch.empty(rows.shape[0], dtype=precise, device=hidden.device)
        wants_hidden, wants_matrix = (trains and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_matrix = torch.zeros_like(head_weight, dtype=precise) if wants_matrix else None
        with torch.autocast(device, enabled=False):
            for start in range(0, rows.shape[0], chunk):
                part = slice(start, start + chunk)
                logits = grad = None  # the chunk before is let go before this one is made
                weight = weights[part, None]
                logits = _multiply(rows[part], matrix.mT, precise)  # (chunk, V)
                nll[part], grad = _nll(logits, targets[part], exclude, dtype if wants_hidden or wants_matrix else None)
                if grad is None:
                    continue
                # The row's weight goes to the thin factor of each product, not to (chunk, V).
                if grad_hidden is not None:
                    grad_hidden[part] = (grad @ matrix) * weight
                if grad_matrix is not None:
                    _accumulate(grad_matrix, grad.mT, (rows[part] * weight).to(dtype))
        ctx.save_for_backward(grad_hidden, grad_matrix)
        ctx.matrix_dtype = head_weight.dtype
        ctx.mark_non_differentiable(nll)
        return (nll * weights).sum(), nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_matrix = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = torch.mul(grad_hidden, grad_total, out=torch.empty_like(grad_hidden))
        if grad_matrix is not None:
            grad_matrix = torch.mul(grad_matrix, grad_total, out=torch.empty_like(grad_matrix, dtype=ctx.matrix_dtype))
        return grad_hidden, grad_matrix, None, None, None, None, None


def _nll(logits: Tensor, targets: Tensor, exclude: int | None, grad_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """nll (N,) of logits (N, V), which may be overwritten, and d nll / d logits = p - onehot in grad_dtype."""
    if logits.dtype == torch.float32 and logits.is_cuda and has_kernels():
        from sinkdlm.kernels import dense as training_kernels

        return training_kernels.nll_of_logits(logits, targets, exclude, grad_dtype)
    if exclude is not None:
        logits[:, exclude] = -math.inf
    log_p = torch._log_softmax(logits, 1, False, out=logits)  # in place: each row is written after it is read
    nll = -log_p.gather(1, targets[:, None])[:, 0]
    if grad_dtype is None:
        return nll, None
    grad = torch.exp(log_p, out=torch.empty_like(log_p, dtype=grad_dtype))
    # At the target, p - 1 = expm1(-nll): in half precision p alone would round to 1 for a confident model.
    grad.scatter_(1, targets[:, None], torch.expm1(-nll[:, None]).to(grad_dtype))
    return nll, grad


def _multiply(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`, which is theirs or wider."""
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, the product never rounded to less than total's precision."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
