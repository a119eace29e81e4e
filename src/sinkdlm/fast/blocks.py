"""The model's block, with faster arithmetic where a `FastContext` asks for it: same parameters, same results.

`prepare` of runner.py swaps the class of each plain Block for this one. With a plain `View` it is the plain block.

B batch, T tokens, S sinks, N rows behind the B T flat tokens (sinks, then zero padding), d model width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sinkdlm.fast import float8_training as float8
from sinkdlm.fast.checkpointing import Recompute, run_again
from sinkdlm.fast.functions import add_norm, attend_flat, project, swiglu_matmul
from sinkdlm.model import model as plain
from sinkdlm.model.context import View
from sinkdlm.model.lane import Lane

MULTIPLE = 16  # rows of tokens and sinks are padded to it, for fast matmuls
_FUSED_SIZE = 1 << 20  # elements from which a fused SwiGLU kernel pays


class FastContext(NamedTuple):
    """A runner's decisions for one forward, the same for every layer but the last."""

    view: View
    flat_batch: int = 0  # B, on the flat path: one matrix (B T + N, d) holds tokens, then sinks; 0 elsewhere
    joins: bool = False  # whether the sinks' states share the tokens' matmuls, in a row's own shape
    dtype: torch.dtype = torch.float32  # of the matmuls, on the flat path and where sinks join
    float8: bool = False  # whether those are in float8
    kernels: Any = None  # inference kernels, where nothing needs gradients
    recompute: Recompute = "none"
    select: Tensor | None = None  # (M,), for the last layer: the only tokens whose output is needed
    per_row: int = 0  # how many of each row, where rows select equally many, else 0
    front: int = 0  # for the last layer: the first tokens of each row, if only their output is needed, else 0
    keeps_lane: bool = False  # whether layers return their Lane, for a cache


Result = tuple[Tensor, Tensor | None, Lane | None]


class Block(plain.Block):
    """The fast block. It has the plain one's name because wrappers look for that."""

    def forward(self, x: Tensor, carried: Tensor | Lane | None, ctx: View | FastContext) -> Result:
        """Run one layer. carried: the sinks' states or cached Lane; on the flat path, the pending residual update."""
        if not isinstance(ctx, FastContext):
            return super().forward(x, carried, ctx)
        if ctx.recompute != "none":
            # Inside forward, so that the compiler and hooks that gather sharded weights wrap it.
            return run_again(self.compute, ctx.recompute, x, carried, ctx)
        return self.compute(x, carried, ctx)

    def compute(self, x: Tensor, carried: Tensor | Lane | None, ctx: FastContext) -> Result:
        if ctx.flat_batch:
            assert not isinstance(carried, Lane)
            return self._flat(x, carried, ctx)
        whole = ctx.select is None and not ctx.front
        if ctx.joins and whole and isinstance(carried, Tensor):
            return self._joined(x, carried, ctx)
        if ctx.kernels is None and whole:
            x, states, lane = super().forward(x, carried, ctx.view)
            return x, states, lane if ctx.keeps_lane else None
        states, lane = self.run_lane(carried) if isinstance(carried, Tensor) else (None, carried)
        normed = self.attention_norm(x)
        if ctx.kernels is None:
            seen = self.attention.see(*self.attention.project(normed), lane, ctx.view)
            q, seen_rest, visible, logit = seen.q, seen[1:5], seen.visible, seen.sink_logit
        else:
            q, k, v, visible = self._place_heads(normed, lane, ctx)
            seen_rest, logit = (k, v, None, None), None if ctx.view.causal else self.attention.sink_logit
        if ctx.select is not None and ctx.per_row:
            q = pick(q.transpose(1, 2), ctx).transpose(1, 2)
        mixed = ctx.view.attend(q, *seen_rest, sink_logit=logit, visible=visible, causal=ctx.view.causal).transpose(1, 2)
        if ctx.select is not None:
            mixed = mixed if ctx.per_row else pick(mixed, ctx)
            x, normed = pick(x, ctx), pick(normed, ctx)
        elif ctx.front:
            x, normed, mixed = (part[:, : ctx.front] for part in (x, normed, mixed))
        x = x + self.attention.finish(normed, mixed)
        hidden = self.mlp_norm(x)
        update = self.mlp(hidden) if ctx.kernels is None else self.mlp.down(ctx.kernels.swiglu(self.mlp.gate_up(hidden)))
        return x + update, states, lane if ctx.keeps_lane else None

    def _joined(self, x: Tensor, sinks: Tensor, ctx: FastContext) -> Result:
        """Run the layer with the sinks' rows behind the tokens' in each matmul: by themselves they cost as many kernels, and a
        gradient of each weight."""
        attention, n_tokens, n_sinks = self.attention, x.shape[0] * x.shape[1], sinks.shape[1]

        def join(tokens: Tensor, lane: Tensor) -> Tensor:
            filling = lane.new_zeros(-(n_tokens + n_sinks) % MULTIPLE, *lane.shape[2:])
            return torch.cat([part.to(ctx.dtype) for part in (tokens.flatten(0, 1), lane[0], filling)])

        def part(rows: Tensor) -> tuple[Tensor, Tensor]:
            return rows[:n_tokens].unflatten(0, x.shape[:2]), rows[n_tokens : n_tokens + n_sinks][None]

        normed = join(self.attention_norm(x), self.attention_norm(sinks))
        heads, own = part(attention.qkv(normed).unflatten(-1, (-1, attention.head_dim)))
        _, k, v = attention.part(own)
        lane = Lane(k, torch.zeros_like(v) if attention.zero_value else v)
        seen = attention.see(*attention.part(heads), lane, ctx.view)
        mixed = ctx.view.attend(*seen[:5], sink_logit=seen.sink_logit, visible=seen.visible, causal=ctx.view.causal)
        alone = lane.v.repeat_interleave(attention.n_heads // attention.n_kv_heads, dim=-2)
        update, own = part(attention.finish(normed, join(mixed.transpose(1, 2), alone)))
        x, sinks = x + update, sinks + own
        update, own = part(self.mlp(join(self.mlp_norm(x), self.mlp_norm(sinks))))
        return x + update, sinks + own, lane if ctx.keeps_lane else None

    def _place_heads(self, x: Tensor, lane: Lane | None, ctx: FastContext) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Compute `Attention.see` in one pass over memory, with the sinks' keys and values in front of the tokens'."""
        attention, view = self.attention, ctx.view
        heads = self._norm_heads(attention.qkv(x).unflatten(-1, (-1, attention.head_dim)))
        lane = None if lane is None or view.sink_rotation is None else Lane(lane.k.to(heads.dtype), lane.v.to(heads.dtype))
        n_sinks = 0 if lane is None else lane.k.shape[1]
        visible = view.visible
        if visible is not None and view.cache is None:
            visible = functional.pad(visible, (n_sinks, 0), value=True)
        given = (heads, attention.n_heads, view.rotation, lane, view.sink_rotation)
        if view.cache is None:
            return *ctx.kernels.place_heads(*given), visible
        cache = view.cache
        whole = cache.rows(attention.layer, heads[:, :, : attention.n_kv_heads].transpose(1, 2), n_sinks)
        start = cache.start if isinstance(cache.start, Tensor) else heads.new_full((), cache.start, dtype=torch.int64)
        q, _, _ = ctx.kernels.place_heads(*given, whole, start, cache.first, cache.stop)
        return q, *cache.read(attention.layer), visible

    def _norm_heads(self, heads: Tensor) -> Tensor:
        """Norm queries and keys in place of the kernels, which know no norms of heads."""
        return heads if self.attention.q_norm is None else torch.cat(self.attention.part(heads), dim=-2)

    def _flat(self, x: Tensor, update: Tensor | None, ctx: FastContext) -> Result:
        """Run the layer on the flat path: sinks share the tokens' matmuls, and the next norm adds the residual update."""
        attention, view = self.attention, ctx.view
        x, normed = add_norm(x, update, self.attention_norm.weight, self.attention_norm.eps, ctx.dtype)
        heads = self._norm_heads(_matmul(attention.qkv, normed, ctx).unflatten(-1, (-1, attention.head_dim)))
        given = (heads, view.rotation, view.sink_rotation, ctx.flat_batch, attention.n_heads)
        mixed = attend_flat(*given, zero_value=attention.zero_value, sink_logit=attention.sink_logit)
        if ctx.select is not None:
            x, mixed = x.index_select(0, ctx.select), mixed.index_select(0, ctx.select)
            normed = normed if attention.gate is None else normed.index_select(0, ctx.select)
        if attention.gate is not None:
            gate = _matmul(attention.gate, normed, ctx._replace(float8=False))
            mixed = mixed * torch.sigmoid(gate).unflatten(-1, (attention.n_heads, -1))
        update = _matmul(attention.out, mixed.flatten(-2), ctx)
        x, normed = add_norm(x, update, self.mlp_norm.weight, self.mlp_norm.eps, ctx.dtype)
        return x, self._flat_feed_forward(normed, ctx), None

    def _flat_feed_forward(self, x: Tensor, ctx: FastContext) -> Tensor:
        gate_up, down = self.mlp.gate_up, self.mlp.down
        if ctx.float8 and float8.fits(gate_up, down):
            predictions = float8.predictions_of(self.mlp, down.weight)
            return float8.swiglu_mlp(x, gate_up.weight, down.weight, ctx.dtype, predictions)
        wide = _matmul(gate_up, x, ctx)
        if is_linear(down) and wide.numel() >= _FUSED_SIZE:
            return swiglu_matmul(wide, down.weight)
        gate, up = wide.chunk(2, dim=-1)
        return down(functional.silu(gate) * up)


def is_linear(layer: nn.Module) -> bool:
    """Check that a layer is only weight and bias, unlike an adapter."""
    return type(layer) in (nn.Linear, float8.Linear)


def _matmul(layer: nn.Linear, x: Tensor, ctx: FastContext) -> Tensor:
    if ctx.float8 and float8.fits(layer):
        return float8.linear(layer, x, ctx.dtype)
    return project(x.to(ctx.dtype), layer.weight, layer.bias) if is_linear(layer) else layer(x)


def pick(x: Tensor, ctx: FastContext) -> Tensor:
    """Select tokens of (B, T, ...): (B, per_row, ...), or (M, ...) where rows select unequally many."""
    assert ctx.select is not None
    found = x.flatten(0, 1).index_select(0, ctx.select)
    return found.unflatten(0, (-1, ctx.per_row)) if ctx.per_row else found
