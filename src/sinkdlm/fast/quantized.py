"""Matmuls in float8, for inference: about half the time of bfloat16's on GPUs that have them, and less precision.

Weights are rounded once, a scale for each output; inputs at every matmul, a scale for each token. Embedding, norms, attention,
head and the residual stream stay as they are. Takes a model by its blocks; knows no sampler.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from sinkdlm.errors import UserError
from sinkdlm.fast.float8_training import fits, why_not
from sinkdlm.kernels.available import find_kernels
from sinkdlm.model.model import Block, DiffusionLM

DTYPE = torch.float8_e4m3fn
_TINY = 1e-12


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(M, N) -> the same in float8, and what each row is to be multiplied by (M, 1)."""
    kernels = find_kernels(x)
    if kernels is not None:
        return kernels.to_float8(x, DTYPE)
    scale = x.float().abs().amax(1, keepdim=True).clamp_min(_TINY) / torch.finfo(DTYPE).max
    return (x.float() / scale).to(DTYPE), scale


class Float8Linear(nn.Module):
    """A linear layer whose weight and inputs are rounded to float8. Without gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = round_rows(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale.T.contiguous(), requires_grad=False)  # (1, outputs)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = round_rows(x.reshape(-1, x.shape[-1]))
        if x.is_cuda:
            kind = torch.bfloat16  # the only one that scales by row gives out
            out = torch._scaled_mm(rows, self.weight.T, scale_a=scale, scale_b=self.scale, out_dtype=kind, use_fast_accum=True)
        else:
            out = (rows.float() @ self.weight.float().T) * scale * self.scale
        out = out.to(x.dtype).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def _save_to_state_dict(self, *_: Any) -> None:
        raise RuntimeError("a model in float8 is for inference: save the one that it was made from")


@torch.no_grad()
def to_float8(model: DiffusionLM) -> DiffusionLM:
    """Replaces the matmuls of the model's blocks, in place. Its weights are rounded: load them again to have them back."""
    weight = model.embed.weight
    missing = why_not(weight.device) if weight.is_cuda else None
    if missing is not None:
        raise UserError(f"float8: {missing}; use bfloat16")
    for block in cast("list[Block]", model.blocks):
        for parent in (block.attention, block.mlp):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear) and fits(layer):
                    setattr(parent, name, Float8Linear(layer))
    return model
