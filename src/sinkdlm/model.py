"""DiffusionLM: a bidirectional transformer whose sinks run as a lane beside the tokens. Variants are values of the config.

Owns the architecture, its initialisation and the lane. Does not know of noise schedules, losses, samplers, files or
tokenizers.

B batch, T tokens, S sinks, H query heads, K key/value heads, D head width, d model width.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from sinkdlm import operators
from sinkdlm.attention import PADDING, SHARED, Choice, DrawnOpening, Opening, Visibility, attend, choose_form, merges_fast
from sinkdlm.config import ModelConfig
from sinkdlm.fused_attention import attend_heads
from sinkdlm.fusion import find_kernels, trains_fused
from sinkdlm.lane import Lane, LaneCache, arithmetic_of
from sinkdlm.noise import Stream, hash_words, pair_words
from sinkdlm.positions import Documents, Rotation, place
from sinkdlm.recompute import Recompute, run_again

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
    wanted: Tensor | None = None  # (B, n), for the last layer: the only tokens whose output is needed
    intervene: Intervention | None = None
    fused: torch.dtype | None = None  # of products, in a training step whose chains of operations go through operators.py
    attends_fused: bool = False  # and its attention too


def _pick(x: Tensor, places: Tensor) -> Tensor:
    """(B, T, ...) at places (B, n)."""
    index = places.view(*places.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def branch(self, x: Tensor, update: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x + update, and its norm in dtype: for a training step, as one function."""
        return _AddNorm.apply(x, update, self.weight, self.eps, dtype)


class _AddNorm(torch.autograd.Function):
    """The residual stream with an update added, and its norm in the products' precision; one pass over both in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        x = x.view_as(x) if update is None else x + update
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.update_dtype = eps, None if update is None else update.dtype
        normed = functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        return x, normed if normed.dtype == dtype else normed.to(dtype)  # see attention._Merge.forward

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_update, grad_weight = operators.add_norm_backward(grad_sum, grad_normed, x, weight, ctx.eps, ctx.update_dtype)
        return grad_x, grad_update if ctx.update_dtype is not None else None, grad_weight, None, None


class Embedding(nn.Embedding):
    """A table that embeds and, where the head is tied to it, projects: both within its own forward, where hooks (offloading,
    sharding) have its weight ready."""

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

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Gates the mixed values (B, T, H, D) by the layer's input x (eq. 9) and projects them back."""
        if self.gate is not None:
            gate = torch.sigmoid(self.gate(x)).unflatten(-1, (self.n_heads, -1))  # (B, T, H, D or 1)
            mixed = mixed * gate
        return self.out(mixed.flatten(-2))

    def run_lane(self, x: Tensor) -> tuple[Tensor, Lane]:
        """The sinks' own attention: each sees only itself, so its output is its value (eq. 6)."""
        _, k, v = self.project(x)
        if self.zero_value:
            v = torch.zeros_like(v)
        return self.finish(x, v.repeat_interleave(self.n_heads // self.n_kv_heads, dim=-2)), Lane(k, v)

    def forward(self, x: Tensor, lane: Lane | None, around: Surroundings) -> Tensor:
        if around.sink_rotation is None:
            lane = None
        if around.attends_fused and around.wanted is None and around.intervene is None:
            return self.finish(x, self._attend_fused(x, lane, around))
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
        if around.wanted is not None:
            q, x = _pick(q.transpose(1, 2), around.wanted).transpose(1, 2), _pick(x, around.wanted)
        mixed = attend(q, *seen[1:5], sink_logit=seen.sink_logit, visible=seen.visible, causal=around.causal, form=around.form)
        return self.finish(x, mixed.transpose(1, 2))

    def _attend_fused(self, x: Tensor, lane: Lane | None, around: Surroundings) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        sinks: tuple[Tensor, ...] = ()
        if lane is not None and around.sink_rotation is not None:
            both = (around.sink_rotation.apply(lane.k), lane.v)
            sinks = tuple(part.to(heads.dtype).transpose(1, 2) for part in both)
        return attend_heads(heads, around.rotation, self.n_heads, *sinks).transpose(1, 2)

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
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2K, D)
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

    def forward(self, x: Tensor, *, fused: bool = False) -> Tensor:
        """fused: by an operator of its own, with gradients."""
        gate_up = self.gate_up(x)
        if fused and gate_up.numel() >= _FUSED_SIZE:
            return _SwigluDown.apply(gate_up, self.down.weight)
        kernels = find_kernels(gate_up)
        if kernels is not None:
            return self.down(kernels.swiglu(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class _SwigluDown(torch.autograd.Function):
    """SwiGLU and the product after it. Keeps gate_up alone, and goes over it once in the backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return functional.linear(operators.swiglu(gate_up), weight.to(gate_up.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weight = ctx.saved_tensors
        grad_gate_up, hidden = operators.swiglu_backward(gate_up, grad @ weight.to(grad.dtype))
        grad_weight = grad.flatten(0, -2).mT @ hidden.flatten(0, -2)
        return grad_gate_up, grad_weight.to(weight.dtype)


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
        """`sinks` are the lane's states (1, S, d), which go on to the next layer, or this layer's cached Lane, or nothing."""
        if around.recompute != "none" and torch.is_grad_enabled():
            # In here, so that hooks which gather a sharded block's weights, and the compiler, lie around it.
            return run_again(self.compute, around.recompute, x, sinks, around)
        return self.compute(x, sinks, around)

    def compute(self, x: Tensor, sinks: Tensor | Lane | None, around: Surroundings) -> tuple[Tensor, Tensor | None, Lane | None]:
        states, lane = self.run_lane(sinks) if isinstance(sinks, Tensor) else (None, sinks)
        if around.fused is not None and around.wanted is None:
            x, normed = self.attention_norm.branch(x, None, around.fused)
            x, normed = self.mlp_norm.branch(x, self.attention(normed, lane, around), around.fused)
            return x + self.mlp(normed, fused=True), states, None
        update = self.attention(self.attention_norm(x), lane, around)
        x = (x if around.wanted is None else _pick(x, around.wanted)) + update
        kept = None if torch.is_grad_enabled() else lane  # for the cache, which serves no training
        return x + self.mlp(self.mlp_norm(x)), states, kept


def draw_normal(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Standard normal values for the tensor of this name: float32, on the CPU, whatever the defaults are."""
    key = hash_words(seed, int(Stream.WEIGHTS), *name.encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(int(key) >> 1), dtype=torch.float32, device="cpu")


class DiffusionLM(nn.Module):
    """`model(tokens)` gives hidden states, `model.head(hidden)` logits. Callers never see a sink."""

    def __init__(self, config: ModelConfig, *, seed: int = 0, attention: str = "auto") -> None:
        """`attention` names a form of attention.py; on the meta device weights stay empty until `init_weights`."""
        super().__init__()
        self.config = config
        self.attention_form = attention
        self.recompute: Recompute = "none"  # activation checkpointing: what the backward computes again
        self._lanes: LaneCache | None = None
        home = torch.empty(0).device
        with torch.device("meta"):  # torch's own initialisation would draw from the global generator
            self.embed = Embedding(config.embedding_rows, config.d_model)
            n_rows = config.n_lane + config.n_registers
            self.sinks = nn.Parameter(torch.empty(n_rows, config.d_model)) if n_rows else None
            self.blocks = nn.ModuleList([Block(config, layer) for layer in range(config.n_layers)])
            self.norm = Norm(config.d_model, config.norm_eps)
            self.lm_head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        if home.type != "meta":
            self.to_empty(device=home)
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """The official initialisation. Each tensor's draw depends on (seed, its name) alone, so twins share what they share."""
        for name, weight in self.named_parameters():
            weight.copy_(self.initial_weight(name, tuple(weight.shape), seed))

    def initial_weight(self, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
        """What the parameter of this name begins as: float32, whole, on the CPU."""
        width = self.config.d_model
        kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if kind in ("attention_norm", "mlp_norm", "norm", "bias", "sink_logit"):
            return torch.full(shape, 0.0 if kind in ("bias", "sink_logit") else 1.0, dtype=torch.float32, device="cpu")
        std = 1 / math.sqrt(width) / self.config.n_layers if kind in ("out", "down") else math.sqrt(2 / (5 * width))
        return draw_normal(shape, seed, name).mul_(std)

    # -- the call ---------------------------------------------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
        opening: Opening | None = None,
        causal: bool = False,
        cache: KeyValueCache | None = None,
        observe: Observer | None = None,
        wanted: Tensor | None = None,
        intervene: Intervention | None = None,
    ) -> Tensor:
        """(B, T) int64 -> (B, T, d), after the final norm, each row aligned to the token it predicts.

        lengths (B,): rows are padded on the right; padding is never attended to, whatever it holds.
        documents (B, T), integers: a run of equal ids is a document, which is computed as if it were alone in a row.
        opening: a token sees only some of those after it, as an AR parent on its way to full attention does.
        causal: the AR parent: causal attention, no sinks, no shift; row i predicts token i+1.
        cache: tokens are a span of a longer row whose other keys and values the cache holds. The shift of a shifted model
            stays within the span: give it one token more on the left.
        observe(layer, q, k, v, sink_k, sink_v): sees what attention sees.
        wanted (B, n): positions whose states come back, (B, n, d); the last layer computes no others.
        intervene(layer, seen): changes what attention sees, before an observer looks. Registers lie in front of the tokens.
        """
        config = self.config
        if cache is not None and (lengths is not None or config.n_registers):
            raise ValueError("a cache takes rows of one length, and no register sinks: those see every token and change with it")
        if opening is not None and opening.share >= 1:
            opening = None
        if wanted is not None and documents is not None:
            raise ValueError("wanted= and documents= do not go together")
        if documents is not None or opening is not None:
            self._check_pairwise(tokens, documents, causal=causal, cached=cache is not None, observed=observe is not None)
        inside = None
        if lengths is not None:
            inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]  # (B, T)
            tokens = tokens.masked_fill(~inside, config.mask_id)
        packed = None if documents is None else Documents.of(documents, inside)
        x = self.embed(tokens)
        n_registers = 0 if causal else config.n_registers
        if n_registers:
            assert self.sinks is not None
            # Attention does not read storage order, only rotary positions: registers lie in front even where they sit at the end.
            x = torch.cat([self.sinks.expand(x.shape[0], -1, -1).to(x), x], dim=1)
        visible = None if causal else self._visible(x, inside, packed, opening)  # right padding is out of sight of causal rows
        around = self._surroundings(tokens, x, lengths, packed, visible, causal, cache, observe)
        if intervene is not None:
            around = around._replace(intervene=intervene)
        is_shifted = config.shift_logits and not causal
        if wanted is not None:
            wanted = ((wanted - 1).clamp_min(0) if is_shifted else wanted) + n_registers
        early = None if causal else wanted  # whom a token sees causally depends on where it stands among all
        x = self._run_blocks(x, around, config.n_lane > 0 and not causal, early)
        if wanted is not None:
            return self.norm(x if early is not None else _pick(x, wanted))
        x = self.norm(x[:, n_registers:])
        if is_shifted:
            shifted = torch.cat([x[:, :1], x[:, :-1]], dim=1)
            x = shifted if packed is None else torch.where(packed.first[..., None], x, shifted)
        return x

    def _check_pairwise(self, tokens: Tensor, documents: Tensor | None, *, causal: bool, cached: bool, observed: bool) -> None:
        given = "opening" if documents is None else "documents"
        for flag, refused in (("causal", causal), ("cache", cached), ("observe", observed)):
            if refused:
                raise ValueError(f"{given}= and {flag}= do not go together")
        if documents is None:
            return
        if documents.shape != tokens.shape or documents.is_floating_point():
            given = f"{documents.dtype} {tuple(documents.shape)}"
            raise ValueError(f"documents: an integer for each of the tokens {tuple(tokens.shape)}, not {given}")
        if self.config.n_registers:
            raise ValueError(
                "documents= with sink_kind 'register': a register sees every document and tells each of the others; "
                "pack rows without documents, or use sink_kind 'isolated'"
            )

    def _visible(
        self, x: Tensor, inside: Tensor | None, packed: Documents | None, opening: Opening | None
    ) -> Tensor | BlockMask | None:
        """Whom a token sees: everyone, those within the row's length, or what documents and opening say. x has registers too."""
        n_registers = self.config.n_registers
        if packed is None and opening is None:
            visible = None if inside is None else inside[:, None, None]
            return functional.pad(visible, (n_registers, 0), value=True) if n_registers and visible is not None else visible
        n_tokens = x.shape[1] - n_registers
        numbers = torch.zeros(1, n_tokens, dtype=torch.int32, device=x.device) if packed is None else packed.number
        if inside is not None:
            numbers = torch.where(inside, numbers, PADDING)
        drawn = None
        if opening is not None:
            words = pair_words(opening.key, Stream.OPENING, n_tokens, x.device)
            drawn = DrawnOpening.draw(opening.share, functional.pad(words, (n_registers, 0)))
        rule = Visibility(functional.pad(numbers, (n_registers, 0), value=SHARED), drawn)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if self._choose(kind, dtype, pairwise=True).form == "flex":
            return rule.blocks(x.shape[0], self.config.n_lane)
        return rule.dense()

    def _surroundings(
        self,
        tokens: Tensor,
        x: Tensor,
        lengths: Tensor | None,
        packed: Documents | None,
        visible: Tensor | BlockMask | None,
        causal: bool,
        cache: KeyValueCache | None,
        observe: Observer | None,
    ) -> Surroundings:
        span = (0, tokens.shape[1]) if cache is None else (cache.start, cache.length)
        given = (self.config, tokens, x.dtype, span, lengths, packed, causal)
        by_shape = lengths is None and packed is None and isinstance(span[0], int)
        if not by_shape or self._lanes is None or torch.is_grad_enabled():
            rotations = place(*given)
        else:
            key = (x.dtype, x.device, causal, tokens.shape[1], span)
            rotations = self._lanes.table(key, lambda: place(*given))
        around = Surroundings(*rotations, visible, causal, self.attention_form, observe, cache, self.recompute)
        device, dtype, autocast = arithmetic_of(self)
        dtype = autocast or dtype
        if not trains_fused(device, dtype):
            return around
        plain = self.attention_form == "auto" and not (causal or self.config.has_sink_logit or self.config.n_registers)
        plain = plain and all(each is None for each in (visible, observe, cache))
        fast = plain and merges_fast(device.type, dtype, self.config.head_dim, x.shape[1])
        return around._replace(fused=dtype, attends_fused=fast)

    def _run_blocks(self, x: Tensor, around: Surroundings, use_lane: bool, wanted: Tensor | None = None) -> Tensor:
        scope = self._lanes if use_lane and not torch.is_grad_enabled() else None
        cached = None if scope is None else scope.find(self)
        sinks = self.sinks[None].to(x) if use_lane and cached is None and self.sinks is not None else None
        lanes = []
        with ExitStack() as stack:
            if (around.observe or around.intervene) is not None and not torch.compiler.is_compiling():
                stack.enter_context(torch.compiler.set_stance("force_eager"))  # a watcher cannot live in a compiled block
            for layer, block in enumerate(self.blocks):
                if layer == len(self.blocks) - 1:
                    around = around._replace(wanted=wanted)
                x, sinks, lane = block(x, sinks if cached is None else cached[layer], around)
                if lane is not None:
                    lanes.append(lane)
        if scope is not None and cached is None:
            scope.keep(self, lanes)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """Raw logits (..., vocab_size), also for a [MASK] row inside the vocabulary."""
        return self.embed(hidden, self.config.vocab_size) if self.lm_head is None else self.lm_head(hidden)

    @property
    def head_weight(self) -> Tensor:
        """(vocab_size, d): what the chunked loss multiplies by."""
        return self.embed.weight[: self.config.vocab_size] if self.lm_head is None else self.lm_head.weight

    # -- inference --------------------------------------------------------------------------------------------------------

    @contextmanager
    def inference(self) -> Iterator["DiffusionLM"]:
        """A scope without gradients in which the lane is computed once. Weights must not change inside it.

        Every forward compares the weights' identity and version, which reveals an optimizer step, load_state_dict or a swap, and
        recomputes. An edit through `.data` leaves no such trace; so the scope keeps a fingerprint of the weights' content and
        raises, as it closes or as it next recomputes, if they are no longer those whose lane it served.
        """
        if self._lanes is not None:
            with torch.no_grad():
                yield self
            return
        lanes = self._lanes = LaneCache()
        try:
            with torch.no_grad():
                yield self
                lanes.verify()
        finally:
            self._lanes = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model is outside the scope of the original."""
        return {**self.__dict__, "_lanes": None}

    def denoiser(self) -> "Denoiser":
        """A callable tokens -> logits for samplers and estimators. Inside `inference()` it uses the cached lane."""
        return Denoiser(self)

    def attention_choice(self, *, padded: bool = False, documents: bool = False, opening: bool = False) -> Choice:
        """Which form of attention a forward takes here and now (with lengths, documents, an opening below 1), and why."""
        device, dtype, autocast = arithmetic_of(self)
        return self._choose(
            device.type,
            autocast or dtype,
            masked_keys=padded,
            pairwise=documents or opening,
            trained_tokens=self.config.context_length if trains_fused(device, autocast or dtype) else 0,
        )

    def _choose(
        self, device: str, dtype: torch.dtype, *, masked_keys: bool = False, pairwise: bool = False, trained_tokens: int = 0
    ) -> Choice:
        return choose_form(
            device,
            dtype,
            trained_tokens=trained_tokens,
            n_sinks=self.config.n_lane,
            has_logit=self.config.has_sink_logit,
            masked_keys=masked_keys,
            pairwise=pairwise,
            width=self.config.head_dim,
            form=self.attention_form,
        )


class Denoiser:
    """(B, T) tokens -> (B, T, V) logits, without gradients.

    where: positions (B, n), whose logits come back as (B, n, V); or boolean (B, T): (number of True, V), row by row.
    """

    capturable = True  # nothing in a forward waits for the device

    def __init__(self, model: DiffusionLM) -> None:
        self.model = model
        self.reach = int(model.config.shift_logits)  # tokens to the left that a span must have beside its own

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    def __call__(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        where: Tensor | None = None,
        cache: KeyValueCache | None = None,
        observe: Observer | None = None,
        intervene: Intervention | None = None,
    ) -> Tensor:
        with torch.no_grad():
            chosen = where is not None and where.dtype == torch.bool
            wanted = None if chosen else where
            hidden = self.model(tokens, lengths=lengths, cache=cache, observe=observe, wanted=wanted, intervene=intervene)
            return self.model.head(hidden[where] if chosen else hidden)
