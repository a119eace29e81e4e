"""Fast forms of the objective: compiled corruption, a loss over chunks of logits, results read without a sync.

They equal diffusion.py's plain forms, and are passed to it as `corrupt(mask=...)` and `denoising_loss(nll=...)`.

N masked positions, V vocabulary, d model width.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinkdlm.diffusion import Mask, Noisy, mask_rows
from sinkdlm.kernels.available import has_kernels

_COMPILE_FROM = 1 << 16  # positions from which corruption on a GPU is compiled
_LOGITS = 160_000_000  # held at once, about 0.6 GB in float32
_LEAST, _MULTIPLE = 2048, 256  # rows of a chunk: with fewer, a large head's gradient is read and written too often


def mask_compiled(tokens: Tensor, *given: Any) -> Noisy:
    """Compute `diffusion.mask_rows` in one or two kernels: on a GPU, launching its operations takes longer than running them."""
    pays = tokens.is_cuda and tokens.numel() >= _COMPILE_FROM and not torch.compiler.is_compiling()
    return (_compiled() if pays else mask_rows)(tokens, *given)


@functools.cache
def _compiled() -> Mask:
    return torch.compile(mask_rows) if importlib.util.find_spec("triton") else mask_rows


def round_slots(count: int) -> int:
    """Round a count of positions up to head slots: a multiple that makes matmuls fast, and never 0."""
    return max(1, -(-count // _MULTIPLE)) * _MULTIPLE


def read_later(values: Tensor) -> Callable[[], Any]:
    """Start a copy to the host; call the result for values.tolist(). It does not wait for GPU work that began later."""
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
    """Return the rows of logits that exist at a time; planning/formulas.py has the same formula."""
    return max(_LEAST, _LOGITS // vocab_size // _MULTIPLE * _MULTIPLE)


def chunked_nll(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    exclude: int | None = None,
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `diffusion.token_nll`, a chunk of logits at a time.

    The forward computes the gradients too, chunk by chunk, so that no more than one chunk of logits ever exists.
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
                logits = grad = None  # free the last chunk before making this one
                weight = weights[part, None]
                logits = _multiply(rows[part], matrix.mT, precise)  # (chunk, V)
                nll[part], grad = _nll(logits, targets[part], exclude, dtype if wants_hidden or wants_matrix else None)
                if grad is None:
                    continue
                # The row weights multiply the small factor of each matmul, not (chunk, V).
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
    """Return nll (N,) of logits (N, V), which may be overwritten, and d nll / d logits = p - onehot in grad_dtype."""
    if logits.dtype == torch.float32 and logits.is_cuda and has_kernels():
        from sinkdlm.kernels import dense

        return dense.nll_of_logits(logits, targets, exclude, grad_dtype)
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
    """Compute left @ right in `dtype`, which is theirs or wider."""
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total, without rounding the matmul below total's precision."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
