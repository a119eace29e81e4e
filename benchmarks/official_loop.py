"""The baseline of the benchmarks: a plain re-implementation of the official sampling loop and model form.

The sink is a token in front, isolated by a dense (T+1)^2 mask that is built in every forward; the head gives logits everywhere; a
step takes a float64 softmax over every masked position. Norms, matmuls and attention are torch's own kernels, so that the form
makes the difference.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from sinkdlm import DiffusionLM
from sinkdlm.model.model import Block, Norm


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
        """torch's RMSNorm, even if `accelerate` has replaced the model's."""
        return functional.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.eps)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate (B, H, T, D) with tables in the model's precision, as the official code does."""
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


Fill = Callable[[Tensor, Tensor, float], Tensor]  # logits of what is masked, the share to reveal, temperature -> tokens, or -1


@torch.no_grad()
def _unmask(
    fill: Fill,
    denoise: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    steps: int,
    mask_id: int,
    temperature: float = 0.0,
    first_steps: int = 0,
) -> Tensor:
    """The official loop over a batch of one length; fill chooses the tokens of masked positions. first_steps: stop after them."""
    times = torch.linspace(1, 1e-5, steps + 1)
    shares = 1 - times[1:] / times[:-1]
    shares[-1] = 1.0
    for share in shares[: first_steps or steps]:
        masked = tokens == mask_id
        filled = fill(denoise(tokens)[masked], share, temperature)
        tokens = tokens.masked_scatter(masked, torch.where(filled < 0, mask_id, filled))
    return tokens


def _fill_greedily(logits: Tensor, share: Tensor, temperature: float) -> Tensor:
    """Reveal the most confident positions, chosen over the flattened batch."""
    proposal = _gumbel_max(logits, temperature)
    probabilities = logits.to(torch.float64).softmax(-1)
    confidence = probabilities.gather(-1, proposal[:, None])[:, 0]
    chosen = confidence.topk(int(len(proposal) * share)).indices
    return torch.full_like(proposal, -1).index_copy_(0, chosen, proposal[chosen])


def _fill_at_random(logits: Tensor, share: Tensor, temperature: float) -> Tensor:
    """Reveal random positions, and draw only their tokens."""
    revealed = torch.rand(len(logits), device=logits.device) < float(share)
    filled = torch.full((len(logits),), -1, device=logits.device)
    filled[revealed] = _gumbel_max(logits[revealed], temperature)
    return filled


official_greedy, official_origin = partial(_unmask, _fill_greedily), partial(_unmask, _fill_at_random)


def _gumbel_max(logits: Tensor, temperature: float) -> Tensor:
    """Draw in float64, as the official code does; at temperature 0 take the argmax, without noise."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.to(torch.float64)
    noise = (-torch.rand_like(logits).log()) ** temperature
    return (logits.exp() / noise).argmax(-1)
