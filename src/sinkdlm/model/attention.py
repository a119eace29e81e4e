"""Attention with a sink lane: every token sees every visible token, and the sinks.

Owns two forms: `attend_naive`, the reference, which also returns the weights; and `attend`, which passes the sinks to torch's
kernel as extra keys and never holds a (T, T) tensor. Knows nothing of layers, positions or configs: keys are already rotated.

B batch, T tokens, S sinks, H query heads, K key/value heads (H a multiple of K), D head width.
q (B, H, T, D); k, v (B, K, L, D), L = T unless keys are cached; sink_k, sink_v (1 or B, K, S, D); sink_logit (H,);
visible: boolean, broadcastable to (B, H, T, L), over content keys only: sinks are visible to everyone.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_LOGIT_WIDTH = 8  # elements added to a head for a sink logit: kernels read heads in 16-byte pieces


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor | None = None,
    sink_v: Tensor | None = None,
    *,
    sink_logit: Tensor | None = None,
    visible: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend to sinks and content: softmax over all keys, times values, (B, H, T, D)."""
    check_causal(causal, sink_k, sink_logit, visible)
    scale, width, heads = 1 / math.sqrt(q.shape[3]), q.shape[3], q.shape[1]
    k, v, visible = append_sinks(k, v, sink_k, sink_v, visible)
    k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    if sink_logit is not None:
        q, k, v, visible = append_logit(q, k, v, sink_logit, visible)
    out = scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal, scale=scale)
    return out[..., :width]


def append_sinks(
    k: Tensor, v: Tensor, sink_k: Tensor | None, sink_v: Tensor | None, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Put the sinks in front of the content's keys, values and visibility."""
    if sink_k is None or sink_v is None or not sink_k.shape[2]:
        return k, v, visible
    k = torch.cat([sink_k.expand(k.shape[0], -1, -1, -1), k], dim=2)
    v = torch.cat([sink_v.expand(v.shape[0], -1, -1, -1), v], dim=2)
    return k, v, None if visible is None else pad(visible, (sink_k.shape[2], 0), value=True)


def append_logit(
    q: Tensor, k: Tensor, v: Tensor, sink_logit: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Add a sink logit as one more key with a zero value. Heads get more elements: 1 in queries, and in this key three parts that
    sum to the logit: three half-precision numbers hold a float32."""
    batch, heads, _, width = q.shape
    left = sink_logit.to(torch.promote_types(q.dtype, torch.float32)) * math.sqrt(width)
    parts = []
    for _ in range(3):
        parts.append(left.to(q.dtype))
        left = left - parts[-1].to(left.dtype)
    key = pad(torch.stack(parts, dim=-1), (width, _LOGIT_WIDTH - 3))
    ones = q.new_ones(*q.shape[:3], 3)
    q = pad(torch.cat([q, ones], dim=-1), (0, _LOGIT_WIDTH - 3))
    k = torch.cat([key.view(1, heads, 1, -1).expand(batch, -1, -1, -1), pad(k, (0, _LOGIT_WIDTH))], dim=2)
    v = pad(v, (0, _LOGIT_WIDTH, 1, 0))
    return q, k, v, None if visible is None else pad(visible, (1, 0), value=True)


def attend_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor | None = None,
    sink_v: Tensor | None = None,
    *,
    sink_logit: Tensor | None = None,
    visible: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return output and weights (B, H, T, S + L), sinks first. Weights are float32 or wider; a sink logit's column is dropped."""
    check_causal(causal, sink_k, sink_logit, visible)
    with torch.autocast(q.device.type, enabled=False):  # autocast would round the matmuls to half precision
        batch, heads, tokens, width = q.shape
        k, v, visible = append_sinks(k, v, sink_k, sink_v, visible)
        k, v = repeat_heads(k, heads), repeat_heads(v, heads)
        precise = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(precise) @ k.to(precise).mT) / math.sqrt(width)
        if causal:
            visible = torch.ones(tokens, k.shape[2], dtype=torch.bool, device=q.device).tril()
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        if sink_logit is not None:
            column = sink_logit.to(precise).view(1, heads, 1, 1).expand(batch, heads, tokens, 1)
            weights = torch.softmax(torch.cat([column, scores], dim=-1), dim=-1)[..., 1:]
        else:
            weights = torch.softmax(scores, dim=-1)
        return (weights @ v.to(precise)).to(q.dtype), weights


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each key/value head for the query heads of its group: (B, K, ...) -> (B, H, ...)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def check_causal(causal: bool, *others: Tensor | None) -> None:
    if causal and any(other is not None and other.numel() for other in others):
        raise ValueError("causal=True: attention of the AR parent; leave out sinks, sink_logit and visible")
