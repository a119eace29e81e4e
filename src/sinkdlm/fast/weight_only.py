"""Frozen linear layers that hold their weight in 8 or 4 bits and dequantise it for every matmul: less memory, not less time.

int8 has a scale for each output. nf4 and int4 have 16 levels and a float32 scale for each 64 elements, 4.5 bits in all. Codes
depend on the weight alone. Gradients reach a layer's input, and neither its weight nor its bias.
"""

from functools import cache
from statistics import NormalDist
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sinkdlm.fast.runner import dtype_of
from sinkdlm.model.model import Block, DiffusionLM

Kind = Literal["int8", "nf4", "int4"]
LAYERS = ("qkv", "out", "gate_up", "down")  # of each block; norms, gates, embedding and head keep their precision
_GROUP = 64  # elements that share a scale
_TINY = 1e-12


@cache
def _levels(kind: Kind) -> Tensor:
    """Return 16 levels, ascending. nf4: quantiles of the normal distribution, from -1 to 1 with 0 (QLoRA, arXiv 2305.14314, 3)."""
    if kind == "int4":
        return torch.arange(-8, 8, dtype=torch.float32, device="cpu") / 7  # the first is never the nearest
    quantile, last = NormalDist().inv_cdf, 1 - (1 / 32 + 1 / 30) / 2
    above = [quantile(last + (0.5 - last) * step / 8) for step in range(8)]
    below = [-quantile(last + (0.5 - last) * step / 7) for step in range(7)]
    return torch.tensor([*below, 0.0, *reversed(above)], dtype=torch.float32, device="cpu") / above[0]


def _quantize(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Round a matrix (N, K): codes (N, K) and scales (N, 1), or two codes a byte (groups, 32) and scales (groups, 1)."""
    weight = weight.detach().float()
    if kind == "int8":
        scale = weight.abs().amax(1, keepdim=True).clamp_min(_TINY) / 127
        return (weight / scale).round_().to(torch.int8), scale
    groups = functional.pad(weight.flatten(), (0, -weight.numel() % _GROUP)).view(-1, _GROUP)
    scale = groups.abs().amax(1, keepdim=True).clamp_min(_TINY)
    levels = _levels(kind).to(weight.device)
    codes = torch.bucketize(groups / scale, (levels[1:] + levels[:-1]) / 2, out_int32=True).byte()
    return codes[:, ::2] << 4 | codes[:, 1::2], scale


def _dequantize(codes: Tensor, scale: Tensor, pairs: Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """pairs (256, 2): the two levels of a byte; None for int8."""
    if pairs is None:
        return (codes * scale).to(dtype)
    values = functional.embedding(codes.int(), pairs).flatten(1).mul_(scale)
    return values.to(dtype).flatten()[: shape[0] * shape[1]].view(shape)


class _Matmul(torch.autograd.Function):
    """x @ weight.T + bias, which keeps only the codes for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, shape: tuple[int, int], *held: Tensor | None) -> Tensor:
        ctx.shape = shape
        ctx.save_for_backward(*held)
        codes, scale, pairs = cast("tuple[Tensor, Tensor, Tensor | None]", held)
        return functional.linear(x, _dequantize(codes, scale, pairs, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale, pairs = ctx.saved_tensors
        return grad @ _dequantize(codes, scale, pairs, ctx.shape, grad.dtype), None, None, None, None, None


class WeightOnlyLinear(nn.Module):
    """A linear layer with a quantised, frozen weight. Codes and scales are buffers: FSDP2 leaves them whole on every rank."""

    codes: Tensor
    scale: Tensor
    pairs: Tensor | None

    def __init__(self, linear: nn.Linear, kind: Kind) -> None:
        super().__init__()
        weight = linear.weight
        self.shape, self.bias = (linear.out_features, linear.in_features), linear.bias
        self.kind = kind
        for name, tensor in zip(("codes", "scale"), _quantize(weight, kind), strict=True):
            self.register_buffer(name, tensor)
        levels = _levels(kind).to(weight.device) if kind != "int8" else None
        self.register_buffer("pairs", None if levels is None else torch.cartesian_prod(levels, levels), persistent=False)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return _dequantize(self.codes, self.scale, self.pairs, self.shape, dtype)

    def forward(self, x: Tensor) -> Tensor:
        dtype = dtype_of(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Matmul.apply(x.to(dtype), bias, self.shape, self.codes, self.scale, self.pairs)


@torch.no_grad()
def quantize_blocks(model: DiffusionLM, kind: Kind) -> dict[str, WeightOnlyLinear]:
    """Quantise the linear layers of a model's blocks, in place, below adapters where there are any. Returns them by name."""
    found = {}
    for number, block in enumerate(cast("list[Block]", model.blocks)):
        for part, parent in (("attention", block.attention), ("mlp", block.mlp)):
            for name in LAYERS:
                layer: Any = getattr(parent, name, None)
                if layer is None:
                    continue
                adapted = hasattr(layer, "base_layer")
                made = WeightOnlyLinear(layer.base_layer if adapted else layer, kind)
                setattr(layer if adapted else parent, "base_layer" if adapted else name, made)
                found[f"blocks.{number}.{part}.{name}"] = made
    return found
