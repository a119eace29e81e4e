"""Rotary positions of content and sinks, and the documents of packed rows.

Does not know who attends to whom, nor how attention is computed.

B batch, T tokens, P positions, S sinks, D head width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sinkdlm.config.model import ModelConfig


class Rotation(NamedTuple):
    """cos and sin of rotary angles, (1 or B, P, 1, D/2)."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> "Rotation":
        """Compute the tables for positions (P,) or (B, P): float32 whatever the model's dtype (float64 for a float64 model)."""
        precise = torch.promote_types(dtype, torch.float32)
        angles = positions.to(precise)[..., None] * frequencies(config, precise, positions.device)
        angles = angles.view(-1 if positions.dim() == 2 else 1, positions.shape[-1], 1, config.head_dim // 2)
        return cls(angles.cos(), angles.sin())

    def apply(self, x: Tensor) -> Tensor:
        """Rotate (B, P, heads, D): the first half of D pairs with the second half."""
        first, second = x.to(self.cos.dtype).chunk(2, dim=-1)
        rotated = torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)
        return rotated.to(x.dtype)


def frequencies(config: ModelConfig, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return the radians by position of each rotary pair, (D/2,).

    With Llama 3's scaling, an angle that turns seldom in the original context turns `rope_factor` times slower, one that turns
    often keeps its speed, and those between are interpolated.
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=dtype, device=device)
    plain = 1.0 / config.rope_base ** (pairs / config.head_dim)
    if config.rope_factor == 1:
        return plain
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_context * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / config.rope_factor)


class Documents(NamedTuple):
    """Each token's document in packed rows, (B, T) each. A document is a run of equal ids; padding ends it."""

    number: Tensor  # int32, grows along the row
    first: Tensor  # whether the token is its document's first
    start: Tensor  # index of its document's first token
    end: Tensor  # index after its document's last token

    @classmethod
    def of(cls, ids: Tensor, inside: Tensor | None) -> "Documents":
        index = torch.arange(ids.shape[1], device=ids.device)
        parts = ids[:, 1:] != ids[:, :-1]
        if inside is not None:
            parts = (parts & inside[:, 1:]) | (inside[:, 1:] != inside[:, :-1])
        first, last = functional.pad(parts, (1, 0), value=True), functional.pad(parts, (0, 1), value=True)
        start = torch.where(first, index, 0).cummax(1).values
        end = torch.where(last, index + 1, ids.shape[1]).flip(1).cummin(1).values.flip(1)
        return cls(first.cumsum(1).to(torch.int32), first, start, end)


def place(
    config: ModelConfig,
    n_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    span: tuple[int | Tensor, int | Tensor],
    lengths: Tensor | None,
    packed: Documents | None,
    causal: bool,
    copies: int = 1,
) -> tuple[Rotation, Rotation | None]:
    """Compute rotations of the tokens, registers included, and of the lane. copies: of the same row, one behind the other.

    Sinks in front have positions 0..S-1, and content follows; sinks at the end have those after each row's last token. `span`:
    index of the first token in its row, end of the row.

    Packed documents share the sinks. With sinks in front, each document starts right after them; with sinks at the end, each ends
    right before them. Rotary angles are relative, so each document attends to them as if it were alone.
    """
    n_sinks = 0 if causal or config.has_sink_logit else config.n_sinks
    in_front = config.sink_position == "front"
    start, end = span
    row_end = end if lengths is None else lengths[:, None]
    content = torch.arange(n_tokens, device=device) + start + (n_sinks if in_front else 0)
    if packed is not None:
        content = content - packed.start if in_front else content + (row_end - packed.end)
    content = torch.cat([content] * copies, dim=-1)
    sinks = torch.arange(n_sinks, device=device)
    if not in_front and n_sinks:
        sinks = sinks + row_end
    if n_sinks and config.n_registers:
        if sinks.dim() == 2:
            content = content.expand(sinks.shape[0], -1)
        content = torch.cat([sinks, content], dim=-1)
    sink_rotation = Rotation.at(sinks, config, dtype) if n_sinks and config.n_lane else None
    return Rotation.at(content, config, dtype), sink_rotation
