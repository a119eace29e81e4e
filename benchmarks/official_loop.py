"""What samplers are measured against: the official loop and the official form of the model, re-implemented plainly.

The sink is a token in front, isolated by a dense (T+1)^2 mask that is built in every forward; the head gives logits everywhere; a
step takes a float64 softmax over every masked position. Norms, products and the attention kernel are torch's own, as ours
are, so that the difference is that of the two forms.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from sinkdlm import DiffusionLM
from sinkdlm.layers import Block, Norm


class MaskedForm:
    """tokens (B, T) -> logits (B, T, V) with the weights of a model with one isolated sink in front, or none."""

    def __init__(self, model: DiffusionLM) -> None:
        self.model, self.config = model, model.config
        n_tokens = self.config.context_length + self.config.n_sinks
        pairs = torch.arange(0, self.config.head_dim, 2) / self.config.head_dim
        angles = torch.arange(n_tokens)[:, None] / self.config.rope_base**pairs
        weight = model.embed.weight
        self.cos, self.sin = (table.repeat(1, 2).to(weight) for table in (angles.cos(), angles.sin()))

    @staticmethod
    def _norm(x: Tensor, norm: Norm) -> Tensor:
        """torch's own, whatever ours has become."""
        return functional.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.eps)

    def _rotate(self, x: Tensor) -> Tensor:
        """(B, H, T, D), with tables in the model's own precision, as the official code has them."""
        n, half = x.shape[2], x.shape[3] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * self.cos[:n].to(x.dtype) + turned * self.sin[:n].to(x.dtype)

    def _mask(self, n_tokens: int, like: Tensor) -> Tensor | None:
        if not self.config.n_sinks:
            return None
        mask = torch.zeros(n_tokens, n_tokens, dtype=like.dtype, device=like.device)
        mask[0, 1:] = -math.inf
        return mask

    def __call__(self, tokens: Tensor) -> Tensor:
        model, config = self.model, self.config
        x = model.embed(tokens)
        if config.n_sinks:
            assert model.sinks is not None
            x = torch.cat([model.sinks.to(x).expand(x.shape[0], -1, -1), x], dim=1)
        mask = self._mask(x.shape[1], x)
        for block in cast("list[Block]", model.blocks):
            q, k, v = (part.transpose(1, 2) for part in block.attention.project(self._norm(x, block.attention_norm)))
            k, v = (part.repeat_interleave(config.n_heads // config.n_kv_heads, dim=1) for part in (k, v))
            mixed = functional.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, attn_mask=mask)
            x = x + block.attention.out(mixed.transpose(1, 2).flatten(-2))
            gate, up = block.mlp.gate_up(self._norm(x, block.mlp_norm)).chunk(2, dim=-1)
            x = x + block.mlp.down(functional.silu(gate) * up)
        return model.head(self._norm(x[:, config.n_sinks :], model.norm))


@torch.no_grad()
def official_greedy(
    denoise: Callable[[Tensor], Tensor], tokens: Tensor, *, steps: int, mask_id: int, temperature: float = 0.0, first_steps: int = 0
) -> Tensor:
    """The official `greedy` over a batch of one length, choosing over the flattened batch. With first_steps, only those."""
    times = torch.linspace(1, 1e-5, steps + 1)
    for i in range(first_steps or steps):
        masked = tokens == mask_id
        logits = denoise(tokens)[masked]
        proposal = _gumbel_max(logits, temperature)
        probabilities = logits.to(torch.float64).softmax(-1)
        confidence = probabilities.gather(-1, proposal[:, None])[:, 0]
        n_masked = len(proposal)
        count = n_masked if i == steps - 1 else int(n_masked * (1 - times[i + 1] / times[i]))
        if count:
            chosen = confidence.topk(count).indices
            filled = torch.full_like(proposal, mask_id)
            filled[chosen] = proposal[chosen]
            tokens = tokens.clone()
            tokens[masked] = filled
    return tokens


@torch.no_grad()
def official_origin(
    denoise: Callable[[Tensor], Tensor], tokens: Tensor, *, steps: int, mask_id: int, temperature: float = 0.0, first_steps: int = 0
) -> Tensor:
    """The official `origin`: noise decides what a step reveals, and only those tokens are drawn. With first_steps, only those."""
    times = torch.linspace(1, 1e-5, steps + 1)
    for i in range(first_steps or steps):
        masked = tokens == mask_id
        logits = denoise(tokens)[masked]
        share = 1.0 if i == steps - 1 else float(1 - times[i + 1] / times[i])
        revealed = torch.rand(logits.shape[0], device=tokens.device) < share
        filled = torch.full(revealed.shape, mask_id, device=tokens.device)
        filled[revealed] = _gumbel_max(logits[revealed], temperature)
        tokens = tokens.clone()
        tokens[masked] = filled
    return tokens


def _gumbel_max(logits: Tensor, temperature: float) -> Tensor:
    """In float64, as the official code draws. At temperature 0 without the noise that it would then raise to the power of 0."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.to(torch.float64)
    noise = (-torch.rand_like(logits).log()) ** temperature
    return (logits.exp() / noise).argmax(-1)
