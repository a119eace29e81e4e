"""Float8 matmuls for inference: about half the time of bfloat16's on GPUs that have them, and less precision.

Weights are rounded once, with a scale per output; inputs at every matmul, with a scale per token. Embedding, norms, attention,
head and residual stream do not change. Knows a model's blocks, and no sampler.
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
    """Round rows to float8: (M, N) -> (M, N), and the factor (M, 1) that restores each row."""
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
            kind = torch.bfloat16  # the only output dtype of scaling by row
            out = torch._scaled_mm(rows, self.weight.T, scale_a=scale, scale_b=self.scale, out_dtype=kind, use_fast_accum=True)
        else:
            out = (rows.float() @ self.weight.float().T) * scale * self.scale
        out = out.to(x.dtype).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def _save_to_state_dict(self, *_: Any) -> None:
        raise RuntimeError("a float8 model is for inference only: save the model that it was made from")


@torch.no_grad()
def to_float8(model: DiffusionLM) -> DiffusionLM:
    """Replace the matmuls of the model's blocks, in place. This rounds the weights: load the model again to undo it."""
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
