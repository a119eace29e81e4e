"""A block's products in a training step in float8, each as one function with its own backward.

Every tensor has one scale, found anew at each product: nothing is remembered from step to step, so a run resumes bit for bit. What
is kept for the backward is the rounded input, turned, half of what bfloat16 keeps; weights are rounded again, so that a sharded
block need not stay whole in float8. Inference in float8 is float8.py's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sinkdlm import float8_operators as operators
from sinkdlm.errors import TrainError
from sinkdlm.float8_operators import GRADIENTS, MULTIPLE, TOKENS, VALUES, gain_of
from sinkdlm.fusion import has_kernels

CAPABILITY = (8, 9)  # of a GPU, from which on it has such products


def why_not(device: torch.device) -> str | None:
    """What is missing for products in float8; None where they run."""
    if device.type != "cuda":
        return "a CPU has no float8 products"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no float8 products (they come with compute capability 8.9)"
    return None


def check_training(device: torch.device) -> None:
    """Raises where a run in float8 cannot be made."""
    missing = why_not(device)
    if missing is None and not has_kernels():
        missing = "Triton's kernels, which round, cannot be built here"
    if missing is not None:
        raise TrainError(f'train.precision = "fp8": {missing}; set train.precision = "bf16"')


def fits(*layers: nn.Module) -> bool:
    """Whether float8 products take these layers' weights."""
    return all(type(layer) is nn.Linear and not (layer.in_features | layer.out_features) % MULTIPLE for layer in layers)


def product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x (..., K) @ weight (N, K).T, in dtype."""
    return _Product.apply(x, weight, dtype)


def swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """(silu(gate) * up) @ down.T, gate and up being the halves of x (..., K) @ gate_up (2 F, K).T: one function, so that what
    flows between the products is rounded where it is made."""
    return _SwigluMlp.apply(x, gate_up, down, dtype)


def _round(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(M, K) -> in float8, the same turned, their gain."""
    gain = _gain(x, dtype)
    return *operators.round_float8(x, gain, dtype, True, TOKENS), gain


def _gain(x: Tensor, dtype: torch.dtype) -> Tensor:
    return gain_of(operators.peak(x), dtype)


def _round_weight(weight: Tensor, gain: Tensor) -> Tensor:
    return operators.round_float8(weight, gain, VALUES, True, 0)[0]


def _turn_weight(weight: Tensor, gain: Tensor) -> Tensor:
    return operators.round_float8(weight, gain, VALUES, False, MULTIPLE)[1]


def _multiply(left: Tensor, right: Tensor, gains: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """left @ right.T, both float8 with their gains. fast: sums with fewer bits, as is usual for a forward and not for gradients,
    which are small beside what they are added to."""
    scales = [gain.reciprocal() for gain in gains]
    if left.is_cuda:
        return torch._scaled_mm(left, right.T, scale_a=scales[0], scale_b=scales[1], out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(left.device.type, enabled=False):  # which would take the factors' product to half precision
        return ((left.float() @ right.float().T) * (scales[0] * scales[1])).to(dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        rows, turned, gain = _round(x.flatten(0, -2), VALUES)
        weight_gain = _gain(weight, VALUES)
        ctx.save_for_backward(turned, gain, weight, weight_gain)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        out = _multiply(rows, _round_weight(weight, weight_gain), (gain, weight_gain), dtype, fast=True)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        turned, gain, weight, weight_gain = ctx.saved_tensors
        rows, grad_turned, grad_gain = _round(grad.flatten(0, -2), GRADIENTS)
        grad_x = _multiply(rows, _turn_weight(weight, weight_gain), (grad_gain, weight_gain), ctx.dtype)
        return grad_x.view(ctx.shape), _multiply(grad_turned, turned, (grad_gain, gain), weight.dtype), None


class _SwigluMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
        rows, turned, gain = _round(x.flatten(0, -2), VALUES)
        wide_gain, down_gain = _gain(gate_up, VALUES), _gain(down, VALUES)
        wide = _multiply(rows, _round_weight(gate_up, wide_gain), (gain, wide_gain), dtype, fast=True)  # (M, 2 F)
        hidden, hidden_gain = operators.swiglu_float8(wide)
        ctx.save_for_backward(turned, gain, wide, hidden_gain, gate_up, wide_gain, down, down_gain)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        out = _multiply(hidden, _round_weight(down, down_gain), (hidden_gain, down_gain), dtype, fast=True)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        turned, gain, wide, hidden_gain, gate_up, wide_gain, down, down_gain = ctx.saved_tensors
        rows, grad_turned, grad_gain = _round(grad.flatten(0, -2), GRADIENTS)
        inner = _multiply(rows, _turn_weight(down, down_gain), (grad_gain, down_gain), wide.dtype)  # (M, F)
        wide_rows, wide_turned, inner_gain, hidden = operators.swiglu_float8_backward(wide, inner, hidden_gain)
        grad_down = _multiply(grad_turned, hidden, (grad_gain, hidden_gain), down.dtype)
        grad_x = _multiply(wide_rows, _turn_weight(gate_up, wide_gain), (inner_gain, wide_gain), ctx.dtype)
        grad_gate_up = _multiply(wide_turned, turned, (inner_gain, gain), gate_up.dtype)
        return grad_x.view(ctx.shape), grad_gate_up, grad_down, None
