"""One layer: norms, attention with its lane, and the feed-forward part; and what every layer of a forward is told.

Owns a layer's arithmetic. Does not know how many there are, where tokens come from or what is predicted.

B batch, T tokens, S sinks, H query heads, K key/value heads, D head width, d model width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from sinkdlm.config.model import ModelConfig
from sinkdlm.fast.checkpointing import Recompute, run_again
from sinkdlm.fast.float8_training import fits, guesses_of, product, swiglu_mlp
from sinkdlm.fast.functions import add_last_norm, add_norm, attend_rows, project, swiglu_product
from sinkdlm.kernels.available import find_kernels
from sinkdlm.model.attention import attend
from sinkdlm.model.lane import Lane
from sinkdlm.model.positions import Rotation

_FUSED_SIZE = 1 << 20  # elements from which on a kernel of its own pays

Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None]


class Seen(NamedTuple):
    """What attention sees in one layer (attention.py tells the shapes), for those who change it."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink_k: Tensor | None
    sink_v: Tensor | None
    sink_logit: Tensor | None
    visible: Tensor | BlockMask | None


Intervention = Callable[[int, Seen], Seen]


class KeyValueCache(Protocol):
    """Keys and values of tokens outside the span that is being computed (block caches of sampling)."""

    start: int | Tensor  # index of the span's first token in its row; a tensor () where it is known only on the device
    length: int  # tokens of the whole row

    def rows(self, layer: int, k: Tensor, n_sinks: int) -> tuple[Tensor, Tensor]:
        """Where keys and values of the whole row lie, (B, K, S + length, D), with room for the sinks' in front."""

    def join(self, layer: int, k: Tensor, v: Tensor, n_sinks: int) -> tuple[Tensor, Tensor]:
        """Takes the span's rotated keys and values (B, K, span, D) and returns those of the whole row, without the sinks'."""


class Surroundings(NamedTuple):
    """What is the same for every layer of one forward."""

    rotation: Rotation
    sink_rotation: Rotation | None = None
    visible: Tensor | BlockMask | None = None
    causal: bool = False
    form: str = "auto"
    observe: Observer | None = None
    cache: KeyValueCache | None = None
    recompute: Recompute = "none"
    wanted: Tensor | None = None  # (B, n) or (N,), for the last layer: the only tokens whose output is needed
    intervene: Intervention | None = None
    fused: torch.dtype | None = None  # of products, in a training step whose chains of operations go through operators.py
    rows: int = 0  # of the batch, where tokens and, behind them, sinks go through such a step as rows of one matrix
    float8: torch.dtype | None = None  # of what products in float8 give, in a training step that has them


def pick(x: Tensor, places: Tensor) -> Tensor:
    """(B, T, ...) at places (B, n), or at places (N,) of all rows in one: (N, ...)."""
    if places.dim() == 1:
        return x.flatten(0, 1).index_select(0, places)
    index = places.view(*places.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def _product(linear: nn.Linear, x: Tensor, around: Surroundings) -> Tensor:
    """linear(x), in float8 where the step has that and the layer's sides allow it."""
    if around.float8 is None or not fits(linear):
        return _plain_product(linear, x, around)
    out = product(x, linear.weight, around.float8, guesses_of(linear, linear.weight))
    return out if linear.bias is None else out + linear.bias.to(out.dtype)


def _plain_product(linear: nn.Linear, x: Tensor, around: Surroundings) -> Tensor:
    """linear(x), not in float8."""
    if around.fused is None or type(linear) is not nn.Linear:  # an adapter's has more to it than a weight
        return linear(x)
    return project(x.to(around.fused), linear.weight, linear.bias)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, self.weight.dtype)  # rounded once, as kernels do, where x is narrower
        return functional.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)

    def branch(self, x: Tensor, update: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x + update, and its norm in dtype: for a training step, as one function."""
        return add_norm(x, update, self.weight, self.eps, dtype)

    def end(self, x: Tensor, update: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm of x + update alone, likewise."""
        return add_last_norm(x, update, self.weight, self.eps, dtype)


class Embedding(nn.Embedding):
    """A table that embeds and, where the head is tied to it, projects: both within its own forward, where hooks (offloading,
    sharding) have its weight ready."""

    def reset_parameters(self) -> None:
        """Not here: the model draws its weights, and on the meta device torch's way to draw would load its compiler, 1 s."""

    def forward(self, x: Tensor, project_to: int | None = None) -> Tensor:
        return super().forward(x) if project_to is None else functional.linear(x, self.weight[:project_to])


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.zero_value = config.sink_value == "zero"
        self.n_registers = config.n_registers
        self.qkv = nn.Linear(config.d_model, (config.n_heads + 2 * config.n_kv_heads) * config.head_dim, bias=config.qkv_bias)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
        gate_width = {"none": 0, "elementwise": config.d_model, "headwise": config.n_heads}[config.gate]
        self.gate = nn.Linear(config.d_model, gate_width, bias=False) if gate_width else None
        self.sink_logit = nn.Parameter(torch.zeros(config.n_heads)) if config.has_sink_logit else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, d) -> q (B, T, H, D), k and v (B, T, K, D), before rotary."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=-2)
        return q, k, v

    def finish(self, x: Tensor, mixed: Tensor, around: Surroundings | None = None) -> Tensor:
        """Gates the mixed values (B, T, H, D) by the layer's input x (eq. 9) and projects them back."""
        if self.gate is not None:
            gate = self.gate(x) if around is None else _plain_product(self.gate, x, around)
            gate = torch.sigmoid(gate).unflatten(-1, (self.n_heads, -1))  # (B, T, H, D or 1)
            mixed = mixed * gate
        mixed = mixed.flatten(-2)
        return self.out(mixed) if around is None else _product(self.out, mixed, around)

    def run_lane(self, x: Tensor) -> tuple[Tensor, Lane]:
        """The sinks' own attention: each sees only itself, so its output is its value (eq. 6)."""
        _, k, v = self.project(x)
        if self.zero_value:
            v = torch.zeros_like(v)
        return self.finish(x, v.repeat_interleave(self.n_heads // self.n_kv_heads, dim=-2)), Lane(k, v)

    def forward(self, x: Tensor, lane: Lane | None, around: Surroundings) -> Tensor:
        if around.sink_rotation is None:
            lane = None
        kernels = find_kernels(x) if self._is_fusable(lane, around) else None
        logit = None if around.causal else self.sink_logit
        if kernels is None:
            seen = Seen(*self._place(x, lane, around), logit, around.visible)
            if around.intervene is not None:
                seen = around.intervene(self.layer, seen)
            shown = seen[:5]
        else:
            n_sinks = 0 if lane is None else lane.k.shape[1]
            q, k, v = self._place_fused(kernels, x, lane, around)
            visible = around.visible
            if n_sinks and isinstance(visible, Tensor):
                visible = functional.pad(visible, (n_sinks, 0), value=True)
            seen = Seen(q, k, v, None, None, logit, visible)  # the sinks' lie in front of the others
            sinks = (k[:, :, :n_sinks], v[:, :, :n_sinks]) if n_sinks else (None, None)
            shown = (q, k[:, :, n_sinks:], v[:, :, n_sinks:], *sinks)
        if around.observe is not None:
            around.observe(self.layer, *shown)
        q = seen.q
        spread = around.wanted is not None and around.wanted.dim() == 1  # unequally many of each row: no shape for attention
        if around.wanted is not None:
            x = pick(x, around.wanted)
            q = q if spread else pick(q.transpose(1, 2), around.wanted).transpose(1, 2)
        mixed = attend(q, *seen[1:5], sink_logit=seen.sink_logit, visible=seen.visible, causal=around.causal, form=around.form)
        mixed = mixed.transpose(1, 2)
        return self.finish(x, pick(mixed, around.wanted) if spread and around.wanted is not None else mixed, around)

    def forward_rows(self, x: Tensor, around: Surroundings) -> Tensor:
        """(B T + N, d), sinks behind the tokens: one product of each kind serves both. Of the last layer, wanted rows alone."""
        heads = _product(self.qkv, x, around).unflatten(-1, (-1, self.head_dim))
        given = (around.rotation, around.sink_rotation, around.rows, self.n_heads)
        mixed = attend_rows(heads, *given, zero_value=self.zero_value)
        if around.wanted is not None:
            mixed = mixed.index_select(0, around.wanted)
            x = x if self.gate is None else x.index_select(0, around.wanted)
        return self.finish(x, mixed, around)

    def _is_fusable(self, lane: Lane | None, around: Surroundings) -> bool:
        """Whether sinks may be appended here, rather than by whatever form of attention was asked for, and nobody steps in."""
        appended = lane is None or around.form in ("auto", "append")
        return appended and around.intervene is None and not self.n_registers and not isinstance(around.visible, BlockMask)

    def _place_fused(self, kernels: Any, x: Tensor, lane: Lane | None, around: Surroundings) -> tuple[Tensor, Tensor, Tensor]:
        """`_place` in one pass over memory, the sinks' keys and values in front of the tokens'."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        if lane is not None and lane.k.dtype != heads.dtype:
            lane = Lane(lane.k.to(heads.dtype), lane.v.to(heads.dtype))
        if around.cache is None:
            return kernels.place_heads(heads, self.n_heads, around.rotation, lane, around.sink_rotation)
        n_sinks = 0 if lane is None else lane.k.shape[1]
        whole = around.cache.rows(self.layer, heads[:, :, : self.n_kv_heads].transpose(1, 2), n_sinks)
        start = (
            around.cache.start
            if isinstance(around.cache.start, Tensor)
            else heads.new_full((), around.cache.start, dtype=torch.int64)
        )
        return kernels.place_heads(heads, self.n_heads, around.rotation, lane, around.sink_rotation, whole, start)

    def _place(
        self, x: Tensor, lane: Lane | None, around: Surroundings
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Queries (B, H, T, D), keys and values of the tokens (B, K, T, D) and of the sinks (1 or B, K, S, D), rotated."""
        heads = _product(self.qkv, x, around).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2K, D)
        turned, v = heads.split([self.n_heads + self.n_kv_heads, self.n_kv_heads], dim=-2)
        q, k = around.rotation.apply(turned).split([self.n_heads, self.n_kv_heads], dim=-2)
        if self.zero_value and self.n_registers and not around.causal:
            v = torch.cat([torch.zeros_like(v[:, : self.n_registers]), v[:, self.n_registers :]], dim=1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if around.cache is not None:
            k, v = around.cache.join(self.layer, k, v, 0 if lane is None else lane.k.shape[1])
        if lane is None or around.sink_rotation is None:
            return q, k, v, None, None
        return q, k, v, around.sink_rotation.apply(lane.k).transpose(1, 2), lane.v.transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor, *, fused: bool = False, float8: torch.dtype | None = None) -> Tensor:
        """fused: by an operator of its own, with gradients. float8: of the result, where products are in float8."""
        if float8 is not None and fits(self.gate_up, self.down):
            guesses = guesses_of(self, self.down.weight)
            return swiglu_mlp(x, self.gate_up.weight, self.down.weight, float8, guesses)
        gate_up = project(x, self.gate_up.weight) if fused and type(self.gate_up) is nn.Linear else self.gate_up(x)
        if fused and type(self.down) is nn.Linear and gate_up.numel() >= _FUSED_SIZE:  # an adapter's has more to it than a weight
            return swiglu_product(gate_up, self.down.weight)
        kernels = find_kernels(gate_up)
        if kernels is not None:
            return self.down(kernels.swiglu(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """One layer, for tokens and lane in one forward: the unit of compilation and of sharding."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = Norm(config.d_model, config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = Norm(config.d_model, config.norm_eps)
        self.mlp = FeedForward(config)

    def run_lane(self, sinks: Tensor) -> tuple[Tensor, Lane]:
        update, lane = self.attention.run_lane(self.attention_norm(sinks))
        sinks = sinks + update
        return sinks + self.mlp(self.mlp_norm(sinks)), lane

    def forward(self, x: Tensor, sinks: Tensor | Lane | None, around: Surroundings) -> tuple[Tensor, Tensor | None, Lane | None]:
        """`sinks` are the lane's states (1, S, d), which go on to the next layer, or this layer's cached Lane, or nothing.

        With around.rows, x is all rows (B T + N, d), and beside it goes what the layer before adds to them and has not added yet.
        """
        if around.recompute != "none" and torch.is_grad_enabled():
            # In here, so that hooks which gather a sharded block's weights, and the compiler, lie around it.
            return run_again(self.compute, around.recompute, x, sinks, around)
        return self.compute(x, sinks, around)

    def compute(self, x: Tensor, sinks: Tensor | Lane | None, around: Surroundings) -> tuple[Tensor, Tensor | None, Lane | None]:
        if around.rows and around.fused is not None and not isinstance(sinks, Lane):
            x, normed = self.attention_norm.branch(x, sinks, around.fused)
            update = self.attention.forward_rows(normed, around)
            x = x if around.wanted is None else x.index_select(0, around.wanted)
            x, normed = self.mlp_norm.branch(x, update, around.fused)
            return x, self.mlp(normed, fused=True, float8=around.float8), None
        states, lane = self.run_lane(sinks) if isinstance(sinks, Tensor) else (None, sinks)
        if around.fused is not None and around.wanted is None:
            x, normed = self.attention_norm.branch(x, None, around.fused)
            x, normed = self.mlp_norm.branch(x, self.attention(normed, lane, around), around.fused)
            return x + self.mlp(normed, fused=True, float8=around.float8), states, None
        update = self.attention(self.attention_norm(x), lane, around)
        x = (x if around.wanted is None else pick(x, around.wanted)) + update
        kept = None if torch.is_grad_enabled() else lane  # for the cache, which serves no training
        return x + self.mlp(self.mlp_norm(x), float8=around.float8), states, kept
