"""Triton kernels of a training step: the fused norm (residual addition and RMSNorm) and its backward, SwiGLU's backward (its
forward is in inference.py) and the loss, each in one pass over memory.

ops.py defines each function in plain torch. Sums are float32. Imported only where a kernel runs: importing Triton is slow.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 8
_COLUMNS = 1024  # _swiglu_backward: columns of a program
_ROW_ELEMENTS = 256  # _add_norm: elements of a warp
# Consecutive elements that a thread loads. By default Triton takes 8 of half precision and 4 of float32, and then converts the
# layout through shared memory.
_TOGETHER = 4
_NORM_WARPS, _NORM_ELEMENTS = 16, 512  # _norm_backward: warps per SM, elements of a warp
_NORM_STAGES = {4: 2, 2: 3}  # _norm_backward: pipeline stages (rows), by bytes of an element
_SUM_ROWS, _SUM_COLUMNS = 256, 16  # _sum_rows: its tile
_VOCABULARY = 4096  # _nll: logits of a tile
_NLL_WARPS = 16  # _nll: many, for low occupancy: rows are still in cache when they are read again


@triton.jit
def _swiglu_backward(gate_up, grad, into, out, n, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < n
    gate = tl.load(gate_up + row * 2 * n + column, inside, 0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + n + column, inside, 0).to(tl.float32)
    given = tl.load(grad + row * n + column, inside, 0).to(tl.float32)
    chance = 1 / (1 + tl.exp(-gate))
    silu = (gate * chance).to(out.dtype.element_ty).to(tl.float32)  # rounded as in the forward
    tl.store(out + row * n + column, (silu * up).to(out.dtype.element_ty), inside)
    slope = chance * (1 + gate * (1 - chance))
    tl.store(into + row * 2 * n + column, (given * up * slope).to(into.dtype.element_ty), inside)
    tl.store(into + row * 2 * n + n + column, (given * silu).to(into.dtype.element_ty), inside)


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    n = grad.shape[-1]
    into, out = torch.empty_like(gate_up), torch.empty_like(grad)
    block = min(_COLUMNS, triton.next_power_of_2(n))
    _swiglu_backward[(grad.numel() // n, triton.cdiv(n, block))](gate_up, grad, into, out, n, block=block)
    return into, out


@triton.jit
def _add_norm(x, update, weight, into, normed, eps, n, block: tl.constexpr, adds: tl.constexpr, together: tl.constexpr):
    """Compute the fused norm of one row, which stays in registers."""
    column = tl.max_contiguous(tl.arange(0, block), together)
    inside = column < n
    place = tl.program_id(0).to(tl.int64) * n + column
    values = tl.load(x + place, inside, 0).to(tl.float32)
    if adds:
        total = (values + tl.load(update + place, inside, 0).to(tl.float32)).to(into.dtype.element_ty)
        tl.store(into + place, total, inside)
        values = total.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values, 0) / n + eps)
    gain = tl.load(weight + column, inside, 0).to(tl.float32)
    tl.store(normed + place, (values * scale * gain).to(normed.dtype.element_ty), inside)


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, update = x.contiguous(), None if update is None else update.contiguous()
    n = x.shape[-1]
    into = x.new_empty(0) if update is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, update.dtype))
    normed = torch.empty_like(x, dtype=dtype)
    block = triton.next_power_of_2(n)
    _add_norm[(x.numel() // n,)](
        x, x if update is None else update, weight.contiguous(), into, normed, eps, n,
        block=block, adds=update is not None, together=_TOGETHER, num_warps=min(8, max(1, block // _ROW_ELEMENTS)),
    )  # fmt: skip
    return into, normed


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _norm_backward(
    grad_sum, grad_normed, x, weight, into, half_into, into_weight, eps, n_rows, n,
    block: tl.constexpr, stages: tl.constexpr, writes_half: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th row and sums their gradients of the weight."""
    column, first = tl.max_contiguous(tl.arange(0, block), together), tl.program_id(0).to(tl.int64)
    inside = column < n
    sum_ = tl.zeros([block], tl.float32)
    for row in tl.range(first, n_rows, tl.num_programs(0), num_stages=stages):
        place = row * n + column
        values = tl.load(x + place, inside, 0).to(tl.float32)
        grads = tl.load(grad_normed + place, inside, 0).to(tl.float32)
        given = tl.load(grad_sum + place, inside, 0).to(tl.float32)
        gain = tl.load(weight + column, inside, 0).to(tl.float32)  # reloaded from cache: registers would spill
        # One reduction for both sums: the only place where warps synchronize.
        square, along = tl.reduce((values * values, grads * gain * values), 0, _add_pairs)
        scale = 1 / tl.sqrt(square / n + eps)
        sum_ += grads * (values * scale)
        total = given + (grads * gain - values * (along / n * scale * scale)) * scale
        tl.store(into + place, total.to(into.dtype.element_ty), inside)
        if writes_half:
            tl.store(half_into + place, total.to(half_into.dtype.element_ty), inside)
    tl.store(into_weight + first * n + column, sum_, inside)


@triton.jit
def _sum_rows(rows, into, n_rows, n, block: tl.constexpr, columns: tl.constexpr):
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    sum_ = tl.zeros([block, columns], tl.float32)
    for begin in range(0, n_rows, block):
        row = begin + tl.arange(0, block)
        sum_ += tl.load(rows + row[:, None] * n + column[None, :], (row < n_rows)[:, None] & (column < n)[None, :], 0)
    tl.store(into + column, tl.sum(sum_, 0).to(into.dtype.element_ty), column < n)


def add_norm_backward(
    grad_sum: Tensor, grad_normed: Tensor, x: Tensor, weight: Tensor, eps: float, update_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_sum, grad_normed, x = grad_sum.contiguous(), grad_normed.contiguous(), x.contiguous()
    n = x.shape[-1]
    n_rows = x.numel() // n
    into = torch.empty_like(x)
    half = x.new_empty(0) if update_dtype is None else torch.empty_like(x, dtype=update_dtype)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    block = triton.next_power_of_2(n)
    warps = min(16, max(1, block // _NORM_ELEMENTS))
    n_programs = min(n_rows, _NORM_WARPS // warps * processors)
    sums = torch.empty(n_programs, n, dtype=torch.float32, device=x.device)
    _norm_backward[(n_programs,)](
        grad_sum, grad_normed, x, weight.contiguous(), into, half, sums, eps, n_rows, n,
        block=block, stages=_NORM_STAGES.get(x.element_size(), 2),
        writes_half=update_dtype is not None, together=_TOGETHER, num_warps=warps,
    )  # fmt: skip
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    _sum_rows[(triton.cdiv(n, _SUM_COLUMNS),)](
        sums, grad_weight, n_programs, n, block=_SUM_ROWS, columns=_SUM_COLUMNS, num_warps=_WARPS
    )
    return into, half, grad_weight


@triton.jit
def _read_logits(logits, column, n, exclude, policy: tl.constexpr):
    # The excluded logit is loaded, then masked: a load mask per column would prevent vectorized loads.
    score = tl.load(logits + column, column < n, float("-inf"), eviction_policy=policy)
    return tl.where(column == exclude, float("-inf"), score)


@triton.jit
def _nll(logits, targets, nll, grad, n, exclude, wants: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most, total = tl.full([block], -3e38, tl.float32), tl.zeros([block], tl.float32)  # finite: inf - inf would be NaN
    for begin in range(0, n, block):
        column = begin + tl.arange(0, block)
        score = _read_logits(logits + row * n, column, n, exclude, "")
        higher = tl.maximum(most, score)
        total = total * tl.exp(most - higher) + tl.exp(score - higher)
        most = higher
    peak = tl.max(most, 0)
    whole = peak + tl.log(tl.sum(total * tl.exp(most - peak), 0))
    target = tl.load(targets + row)
    loss = whole - tl.load(logits + row * n + target)
    tl.store(nll + row, loss)
    if wants:
        # At the target p - 1 = expm1(-nll): a series where p is near 1, because exp(-nll) - 1 would cancel.
        small = loss * (-1 + loss * (0.5 + loss * (-1 / 6 + loss * (1 / 24))))
        surplus = tl.where(loss < 0.05, small, tl.exp(-loss) - 1)
        for begin in range(0, n, block):
            column = begin + tl.arange(0, block)
            score = _read_logits(logits + row * n, column, n, exclude, "evict_first")  # last read
            chance = tl.where(column == target, surplus, tl.exp(score - whole))
            tl.store(grad + row * n + column, chance.to(grad.dtype.element_ty), column < n, eviction_policy="evict_first")


def nll_of_logits(
    logits: Tensor, targets: Tensor, exclude: int | None, grad_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Compute nll (N,) of float32 logits (N, V) and, in grad_dtype, p - onehot(target). exclude: an id outside the softmax."""
    n_rows, n = logits.shape
    nll = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    grad = None if grad_dtype is None else torch.empty_like(logits, dtype=grad_dtype)
    block = min(_VOCABULARY, triton.next_power_of_2(n))
    _nll[(n_rows,)](
        logits, targets, nll, nll if grad is None else grad, n, -1 if exclude is None else exclude,
        wants=grad is not None, block=block, num_warps=_NLL_WARPS,
    )  # fmt: skip
    return nll, grad


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mm(grad.mT, x) if grad.dtype == dtype else torch.mm(grad.mT, x, out_dtype=dtype)
