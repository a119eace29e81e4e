"""Attention statistics of a layer: attention received by keys and sinks, entropy, value norms, output bounds.

They are computed from the inputs of attention (the model's `observe`), a chunk of queries at a time, so that no full attention map
is ever held. In block diffusion a token sees its own block and those before it: observers do not receive that mask, so it is
applied again here. Of two copies, the noised tokens are the queries, and a token's two keys count as one. Used in training and
by the analysis; knows no model, tokenizer or file.

B batch, T queries, S sinks, L content keys, H query heads, K key/value heads, D head width.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sinkdlm.model.attention import attend_naive

_CHUNK_WEIGHTS = 1 << 21  # attention weights held at once
_CHUNK_WEIGHTS_GPU = 1 << 26


class AttentionStatistics(NamedTuple):
    """Means over a row's queries (without padding), in float32 or wider.

    received (B, H, L): attention received by content key j, the mean of A[q, j] over the queries that see it (Gu et al.); zero for
        padding. Without blocks every query sees every key.
    sink_received (B, H, S): the same for each sink; for a sink logit (B, H, 1), the share of its column.
    entropy (B, H): of the attention weights, in nats, over content and sinks.
    value_norm (B, L), sink_value_norm (B, S): eq. 15 and 16: the L2 norm of a token's value, averaged over heads.
    output_norm, bound (B, H): eq. 20: |o_i| and sum_j a_ij |v_j|.
    """

    received: Tensor
    sink_received: Tensor
    entropy: Tensor
    value_norm: Tensor
    sink_value_norm: Tensor
    output_norm: Tensor
    bound: Tensor

    @property
    def sink_share(self) -> Tensor:
        """(B, H): share of attention on sinks."""
        return self.sink_received.sum(-1)


def part_registers(
    n: int, q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None, sink_v: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Split off the n registers in front of the tokens: their keys count as sinks, their queries are dropped."""
    return (q[:, :, n:], k[:, :, n:], v[:, :, n:], k[:, :, :n], v[:, :, :n]) if n else (q, k, v, sink_k, sink_v)


def see_blocks(n_tokens: int, block_size: int | None, device: torch.device, copies: int = 1) -> Tensor | None:
    """Build the mask (1, 1, T, copies * T) of a row in block diffusion; None where every token sees every token."""
    if block_size is None or (n_tokens <= block_size and copies == 1):
        return None
    blocks = torch.arange(n_tokens, device=device) // block_size
    own, before = blocks == blocks[:, None], blocks < blocks[:, None]
    return (own | before if copies == 1 else torch.cat([own, before], dim=1))[None, None]


@torch.no_grad()
def summarize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor | None = None,
    sink_v: Tensor | None = None,
    *,
    sink_logit: Tensor | None = None,
    lengths: Tensor | None = None,
    visible: Tensor | None = None,
    copies: int = 1,
) -> AttentionStatistics:
    """Compute one layer's statistics. Shapes as in attention.py; lengths (B,): rows are padded on the right; visible: as made by
    `see_blocks`; copies: of each token among the keys, the noised ones first."""
    batch, heads, queries, _ = q.shape
    n_keys, n_sinks = k.shape[2], 0 if sink_k is None else sink_k.shape[2]
    precise = torch.promote_types(q.dtype, torch.float32)
    norms = v.to(precise).norm(dim=-1)  # (B, K, L)
    sink_norms = (
        q.new_zeros(batch, v.shape[1], 0, dtype=precise)
        if sink_v is None
        else sink_v.to(precise).norm(dim=-1).expand(batch, -1, -1)
    )
    all_norms = torch.cat([sink_norms, norms], dim=-1).repeat_interleave(heads // v.shape[1], dim=1)  # (B, H, S + L)

    totals = torch.zeros(batch, heads, n_sinks + n_keys, dtype=precise, device=q.device)
    entropy, output_norm, bound, outside = (torch.zeros(batch, heads, dtype=precise, device=q.device) for _ in range(4))
    for part in _look_at_queries(q, k, v, sink_k, sink_v, sink_logit, lengths, visible, copies):
        weights, column, keep = part.weights, part.column, part.keep
        totals += torch.einsum("bhqk,bhq->bhk", weights, keep)
        entropy += ((torch.special.entr(weights).sum(-1) + torch.special.entr(column)) * keep).sum(-1)
        output_norm += (part.out.norm(dim=-1) * keep).sum(-1)
        bound += (torch.einsum("bhqk,bhk->bhq", weights, all_norms) * keep).sum(-1)
        outside += (column * keep).sum(-1)
    n_queries = torch.full((batch, 1), queries, device=q.device) if lengths is None else lengths[:, None]
    n_seeing = n_queries[..., None] if visible is None else _count_seeing(visible, lengths, copies)
    on_sinks = totals[..., :n_sinks] / n_queries[..., None]
    sink_received = (outside / n_queries)[..., None] if sink_logit is not None else on_sinks
    return AttentionStatistics(
        received=totals[..., n_sinks:].unflatten(-1, (copies, -1)).sum(-2) / n_seeing,
        sink_received=sink_received,
        entropy=entropy / n_queries,
        value_norm=norms.mean(1)[:, : n_keys // copies],
        sink_value_norm=sink_norms.mean(1),
        output_norm=output_norm / n_queries,
        bound=bound / n_queries,
    )


@torch.no_grad()
def share_on(
    chosen: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor | None = None,
    sink_v: Tensor | None = None,
    *,
    sink_logit: Tensor | None = None,
    lengths: Tensor | None = None,
    visible: Tensor | None = None,
    copies: int = 1,
) -> Tensor:
    """Return each query's attention (B, T) on the chosen content keys (B, H, L) and on all sinks, averaged over heads."""
    n_sinks = 0 if sink_k is None else sink_k.shape[2]
    wanted = torch.nn.functional.pad(chosen.repeat(1, 1, copies), (n_sinks, 0), value=True)
    parts = []
    for part in _look_at_queries(q, k, v, sink_k, sink_v, sink_logit, lengths, visible, copies):
        on_chosen = torch.einsum("bhqk,bhk->bhq", part.weights, wanted.to(part.weights.dtype))
        parts.append(((on_chosen + part.column) * part.keep).mean(1))
    return torch.cat(parts, dim=1)


def _count_seeing(visible: Tensor, lengths: Tensor | None, copies: int) -> Tensor:
    """How many queries see each key, at least 1: broadcastable to (B, H, L)."""
    if lengths is not None:
        visible = visible & (torch.arange(visible.shape[2], device=visible.device) < lengths[:, None])[:, None, :, None]
    return visible.sum(2).unflatten(-1, (copies, -1)).sum(-2).clamp_min(1)


class _Queries(NamedTuple):
    """A chunk of Q queries: out (B, H, Q, D), weights (B, H, Q, S + L); column, the share of a sink logit, and keep, 0 for padding
    and 1 for other queries, (B, H, Q) each."""

    out: Tensor
    weights: Tensor
    column: Tensor
    keep: Tensor


def _look_at_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor | None,
    sink_v: Tensor | None,
    sink_logit: Tensor | None,
    lengths: Tensor | None,
    visible: Tensor | None,
    copies: int,
) -> Iterator[_Queries]:
    batch, heads, queries, _ = q.shape
    n_keys = k.shape[2] + (0 if sink_k is None else sink_k.shape[2])
    precise = torch.promote_types(q.dtype, torch.float32)
    inside = counted = None
    if lengths is not None:
        inside = (torch.arange(k.shape[2] // copies, device=k.device) < lengths[:, None]).repeat(1, copies)[:, None, None]
        counted = torch.arange(queries, device=q.device) < lengths[:, None]  # (B, T)
    values = v.to(precise)
    room = _CHUNK_WEIGHTS if q.device.type == "cpu" else _CHUNK_WEIGHTS_GPU
    chunk = max(1, room // (batch * heads * n_keys))
    for start in range(0, queries, chunk):
        part = slice(start, start + chunk)
        seen = inside
        if visible is not None:
            seen = visible[:, :, part] if inside is None else visible[:, :, part] & inside
        out, weights = attend_naive(q[:, :, part].to(precise), k, values, sink_k, sink_v, sink_logit=sink_logit, visible=seen)
        column = (1 - weights.sum(-1)).clamp_min(0) if sink_logit is not None else torch.zeros_like(weights[..., 0])
        keep = torch.ones_like(column) if counted is None else counted[:, None, part].expand_as(column).to(precise)
        yield _Queries(out, weights, column, keep)


class Watcher:
    """Collect the statistics of every layer of one forward: `model(tokens, observe=watcher)`.

    sink_logits: each layer's sink logits, if the model has them: observers do not receive them.
    n_registers: number of register sinks, which then count as sinks and not as content.
    block_size: of block diffusion. The forward must compute whole rows, in so many copies.
    """

    def __init__(
        self,
        lengths: Tensor | None = None,
        sink_logits: Sequence[Tensor] | None = None,
        *,
        n_registers: int = 0,
        block_size: int | None = None,
        copies: int = 1,
    ) -> None:
        self.layers: list[AttentionStatistics] = []
        self._lengths = lengths
        self._sink_logits = sink_logits
        self._n_registers = n_registers
        self._block_size, self._copies = block_size, copies

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None, sink_v: Tensor | None) -> None:
        logit = None if self._sink_logits is None else self._sink_logits[layer]
        q, k, v, sink_k, sink_v = part_registers(self._n_registers, q, k, v, sink_k, sink_v)
        n_tokens = k.shape[2] // self._copies
        visible = see_blocks(n_tokens, self._block_size, q.device, self._copies)
        given = (q[:, :, :n_tokens], k, v, sink_k, sink_v)
        self.layers.append(summarize(*given, sink_logit=logit, lengths=self._lengths, visible=visible, copies=self._copies))
