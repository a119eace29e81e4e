"""Float8 matmuls of a training step, as autograd functions with their own backward.

Every tensor has one scale, computed at each matmul: predictions of it change no result, so a run resumes bit for bit. For the
backward only the rounded, transposed input is kept, half of bfloat16's memory. Weights are rounded again, so that a sharded block
need not stay whole in float8. Float8 inference is in quantized.py.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sinkdlm.errors import TrainError
from sinkdlm.kernels import float8_ops as ops
from sinkdlm.kernels.available import has_kernels
from sinkdlm.kernels.float8_format import GRADIENTS, MULTIPLE, TOKENS, VALUES, new_predictions

_TENSORS = 6  # of a layer that need a scale, at most
CAPABILITY = (8, 9)  # the first compute capability with float8 matmuls


def why_not(device: torch.device) -> str | None:
    """Return why float8 matmuls cannot run on a device; None where they can."""
    if device.type != "cuda":
        return "a CPU has no float8 matmuls"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no float8 matmuls (they come with compute capability 8.9)"
    return None


def check_training(device: torch.device) -> None:
    """Raise a TrainError where float8 training cannot run."""
    missing = why_not(device)
    if missing is None and not has_kernels():
        missing = "the Triton kernels that round to float8 cannot be built here"
    if missing is not None:
        raise TrainError(f'train.precision = "fp8": {missing}; set train.precision = "bf16"')


def fits(*layers: nn.Module) -> bool:
    """Check whether float8 matmuls take these layers' weights."""
    linear = [layer for layer in layers if isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, Linear)]
    return len(linear) == len(layers) and not any(size % MULTIPLE for layer in linear for size in layer.weight.shape)


class Linear(nn.Linear):
    """A linear layer with float8 matmuls while it trains. `fast.prepare` makes one by setting an nn.Linear's class."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        kind = x.device.type
        return linear(self, x, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype)


def linear(layer: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute layer(x) in dtype, by a float8 matmul."""
    out = matmul(x, layer.weight, dtype, predictions_of(layer, layer.weight))
    return out if layer.bias is None else out + layer.bias.to(out.dtype)


def predictions_of(layer: nn.Module, weight: Tensor) -> Tensor | None:
    """Return a layer's predicted scales, created on first use; None under the compiler, where nothing is predicted."""
    if torch.compiler.is_compiling():
        return None
    found: Tensor | None = getattr(layer, "float8_predictions", None)
    if found is None or found.device != weight.device:
        found = layer.float8_predictions = new_predictions(_TENSORS, weight.device)
    return found


def matmul(x: Tensor, weight: Tensor, dtype: torch.dtype, predictions: Tensor | None = None) -> Tensor:
    """Compute x (..., K) @ weight (N, K).T, in dtype."""
    return _Matmul.apply(x, weight, dtype, predictions)


def swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype, predictions: Tensor | None = None) -> Tensor:
    """Compute (silu(gate) * up) @ down.T, where x (..., K) @ gate_up (2 F, K).T gives gate and up. It is one function so that
    values between the matmuls are rounded as they are computed."""
    return _SwigluMlp.apply(x, gate_up, down, dtype, predictions)


def _transpose_weight(weight: Tensor, scale: Tensor) -> Tensor:
    return ops.round_float8(weight, scale, VALUES, False, MULTIPLE)[1]


def _multiply(left: Tensor, right: Tensor, inverses: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Compute left @ right.T, both float8, with their inverse scales. fast: accumulate with fewer bits, as is usual in a forward;
    gradients are small beside their sums and need more."""
    if left.is_cuda:
        return torch._scaled_mm(left, right.T, scale_a=inverses[0], scale_b=inverses[1], out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(left.device.type, enabled=False):  # autocast would round to half precision
        return ((left.float() @ right.float().T) * (inverses[0] * inverses[1])).to(dtype)


def _each(predictions: Tensor | None) -> tuple[Tensor, ...] | list[None]:
    return [None] * _TENSORS if predictions is None else predictions.unbind()


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, predictions: Tensor | None) -> Tensor:
        of_input, of_weight, ctx.of_grad, *_ = _each(predictions)
        rows, transposed, _, inverse = ops.quantize(x.flatten(0, -2), of_input, VALUES, TOKENS)
        weight_rows, _, weight_scale, weight_inverse = ops.quantize(weight, of_weight, VALUES, 0)
        ctx.save_for_backward(transposed, inverse, weight, weight_scale, weight_inverse)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return _multiply(rows, weight_rows, (inverse, weight_inverse), dtype, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        transposed, inverse, weight, weight_scale, weight_inverse = ctx.saved_tensors
        rows, grad_transposed, _, grad_inverse = ops.quantize(grad.flatten(0, -2), ctx.of_grad, GRADIENTS, TOKENS)
        grad_x = _multiply(rows, _transpose_weight(weight, weight_scale), (grad_inverse, weight_inverse), ctx.dtype)
        if not ctx.needs_input_grad[1]:  # frozen
            return grad_x.view(ctx.shape), None, None, None
        grad_weight = _multiply(grad_transposed, transposed, (grad_inverse, inverse), weight.dtype)
        return grad_x.view(ctx.shape), grad_weight, None, None


class _SwigluMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype, predictions: Tensor | None) -> Tensor:
        of_input, of_gate_up, of_down, of_hidden, ctx.of_grad, ctx.of_inner = _each(predictions)
        rows, transposed, _, inverse = ops.quantize(x.flatten(0, -2), of_input, VALUES, TOKENS)
        wide_rows, _, wide_scale, wide_inverse = ops.quantize(gate_up, of_gate_up, VALUES, 0)
        down_rows, _, down_scale, down_inverse = ops.quantize(down, of_down, VALUES, 0)
        wide = _multiply(rows, wide_rows, (inverse, wide_inverse), dtype, fast=True)  # (M, 2 F)
        hidden, hidden_scale, hidden_inverse = ops.swiglu_float8(wide, of_hidden)
        scales = (wide_scale, wide_inverse, down_scale, down_inverse, hidden_scale, hidden_inverse)
        ctx.save_for_backward(transposed, inverse, wide, gate_up, down, *scales)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return _multiply(hidden, down_rows, (hidden_inverse, down_inverse), dtype, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        transposed, inverse, wide, gate_up, down, *scales = ctx.saved_tensors
        wide_scale, wide_inverse, down_scale, down_inverse, hidden_scale, hidden_inverse = scales
        rows, grad_transposed, _, grad_inverse = ops.quantize(grad.flatten(0, -2), ctx.of_grad, GRADIENTS, TOKENS)
        inner = _multiply(rows, _transpose_weight(down, down_scale), (grad_inverse, down_inverse), wide.dtype)  # (M, F)
        wide_rows, wide_transposed, inner_inverse, hidden = ops.swiglu_float8_backward(wide, inner, hidden_scale, ctx.of_inner)
        grad_down = _multiply(grad_transposed, hidden, (grad_inverse, hidden_inverse), down.dtype)
        grad_x = _multiply(wide_rows, _transpose_weight(gate_up, wide_scale), (inner_inverse, wide_inverse), ctx.dtype)
        grad_gate_up = _multiply(wide_transposed, transposed, (inner_inverse, inverse), gate_up.dtype)
        return grad_x.view(ctx.shape), grad_gate_up, grad_down, None, None
