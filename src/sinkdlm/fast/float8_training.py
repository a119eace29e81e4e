"""A block's products in a training step in float8, each as one function with its own backward.

Every tensor has one scale, found anew at each product: what is remembered from step to step is a guess, which changes no result, so
a run resumes bit for bit. What is kept for the backward is the rounded input, turned, half of what bfloat16 keeps; weights are
rounded again, so that a sharded block need not stay whole in float8. Inference in float8 is float8.py's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sinkdlm.errors import TrainError
from sinkdlm.kernels import float8_ops as operators
from sinkdlm.kernels.available import has_kernels
from sinkdlm.kernels.float8_ops import GRADIENTS, MULTIPLE, TOKENS, VALUES, gain_of, new_guesses

_GUESSES = 6  # tensors of a layer whose gains are found, at most
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


def guesses_of(layer: nn.Module, weight: Tensor) -> Tensor | None:
    """What a layer remembers of its tensors' gains, made when it is first asked for; None in the compiler, which does not guess."""
    if torch.compiler.is_compiling():
        return None
    guesses: Tensor | None = getattr(layer, "float8_guesses", None)
    if guesses is None or guesses.device != weight.device:
        guesses = layer.float8_guesses = new_guesses(_GUESSES, weight.device)
    return guesses


def product(x: Tensor, weight: Tensor, dtype: torch.dtype, guesses: Tensor | None = None) -> Tensor:
    """x (..., K) @ weight (N, K).T, in dtype. guesses: of this layer; they change no result."""
    return _Product.apply(x, weight, dtype, guesses)


def swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype, guesses: Tensor | None = None) -> Tensor:
    """(silu(gate) * up) @ down.T, gate and up being the halves of x (..., K) @ gate_up (2 F, K).T: one function, so that what
    flows between the products is rounded where it is made."""
    return _SwigluMlp.apply(x, gate_up, down, dtype, guesses)


def _round(x: Tensor, dtype: torch.dtype, guess: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(M, K) -> in float8, the same turned, and what undoes their gain."""
    if guess is None:
        gain = gain_of(operators.peak(x), dtype)
        return *operators.round_float8(x, gain, dtype, True, TOKENS), gain.reciprocal()
    rows, turned, _, scale = operators.round_by_guess(x, guess, dtype, TOKENS)
    return rows, turned, scale


def _round_weight(weight: Tensor, guess: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """In float8, by which gain, and what undoes it."""
    if guess is None:
        gain = gain_of(operators.peak(weight), VALUES)
        return operators.round_float8(weight, gain, VALUES, True, 0)[0], gain, gain.reciprocal()
    rows, _, gain, scale = operators.round_by_guess(weight, guess, VALUES, 0)
    return rows, gain, scale


def _turn_weight(weight: Tensor, gain: Tensor) -> Tensor:
    return operators.round_float8(weight, gain, VALUES, False, MULTIPLE)[1]


def _swiglu(wide: Tensor, guess: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(M, F) in float8, by which gain, and what undoes it."""
    if guess is not None:
        return operators.swiglu_by_guess(wide, guess)
    hidden, gain = operators.swiglu_float8(wide)
    return hidden, gain, gain.reciprocal()


def _swiglu_backward(
    wide: Tensor, grad: Tensor, hidden_gain: Tensor, guess: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of wide in float8, turned, what undoes its gain; and what _swiglu gave, turned."""
    if guess is not None:
        rows, turned, _, hidden, scale = operators.swiglu_backward_by_guess(wide, grad, hidden_gain, guess)
        return rows, turned, scale, hidden
    rows, turned, gain, hidden = operators.swiglu_float8_backward(wide, grad, hidden_gain)
    return rows, turned, gain.reciprocal(), hidden


def _multiply(left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """left @ right.T, both float8, with what undoes their gains. fast: sums with fewer bits, as is usual for a forward and not for
    gradients, which are small beside what they are added to."""
    if left.is_cuda:
        return torch._scaled_mm(left, right.T, scale_a=scales[0], scale_b=scales[1], out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(left.device.type, enabled=False):  # which would take the factors' product to half precision
        return ((left.float() @ right.float().T) * (scales[0] * scales[1])).to(dtype)


def _each(guesses: Tensor | None) -> tuple[Tensor, ...] | list[None]:
    return [None] * _GUESSES if guesses is None else guesses.unbind()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, guesses: Tensor | None) -> Tensor:
        of_input, of_weight, ctx.of_grad, *_ = _each(guesses)
        rows, turned, scale = _round(x.flatten(0, -2), VALUES, of_input)
        weight_rows, weight_gain, weight_scale = _round_weight(weight, of_weight)
        ctx.save_for_backward(turned, scale, weight, weight_gain, weight_scale)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return _multiply(rows, weight_rows, (scale, weight_scale), dtype, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        turned, scale, weight, weight_gain, weight_scale = ctx.saved_tensors
        rows, grad_turned, grad_scale = _round(grad.flatten(0, -2), GRADIENTS, ctx.of_grad)
        grad_x = _multiply(rows, _turn_weight(weight, weight_gain), (grad_scale, weight_scale), ctx.dtype)
        return grad_x.view(ctx.shape), _multiply(grad_turned, turned, (grad_scale, scale), weight.dtype), None, None


class _SwigluMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype, guesses: Tensor | None) -> Tensor:
        of_input, of_gate_up, of_down, of_hidden, ctx.of_grad, ctx.of_inner = _each(guesses)
        rows, turned, scale = _round(x.flatten(0, -2), VALUES, of_input)
        wide_rows, wide_gain, wide_scale = _round_weight(gate_up, of_gate_up)
        down_rows, down_gain, down_scale = _round_weight(down, of_down)
        wide = _multiply(rows, wide_rows, (scale, wide_scale), dtype, fast=True)  # (M, 2 F)
        hidden, hidden_gain, hidden_scale = _swiglu(wide, of_hidden)
        kept = (turned, scale, wide, hidden_gain, hidden_scale, gate_up, wide_gain, wide_scale, down, down_gain, down_scale)
        ctx.save_for_backward(*kept)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return _multiply(hidden, down_rows, (hidden_scale, down_scale), dtype, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        turned, scale, wide, hidden_gain, hidden_scale, gate_up, wide_gain, wide_scale, down, down_gain, down_scale = (
            ctx.saved_tensors
        )
        rows, grad_turned, grad_scale = _round(grad.flatten(0, -2), GRADIENTS, ctx.of_grad)
        inner = _multiply(rows, _turn_weight(down, down_gain), (grad_scale, down_scale), wide.dtype)  # (M, F)
        wide_rows, wide_turned, inner_scale, hidden = _swiglu_backward(wide, inner, hidden_gain, ctx.of_inner)
        grad_down = _multiply(grad_turned, hidden, (grad_scale, hidden_scale), down.dtype)
        grad_x = _multiply(wide_rows, _turn_weight(gate_up, wide_gain), (inner_scale, wide_scale), ctx.dtype)
        grad_gate_up = _multiply(wide_turned, turned, (inner_scale, scale), gate_up.dtype)
        return grad_x.view(ctx.shape), grad_gate_up, grad_down, None, None
