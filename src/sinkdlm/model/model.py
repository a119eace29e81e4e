"""DiffusionLM: a bidirectional transformer whose sinks run as a lane beside the tokens. Variants are values of the config.

A sink attends only to itself, so its states depend on the weights alone, not on the batch or the tokens. Each layer therefore runs
its sinks by themselves (`run_lane`) and hands their keys and values to the tokens' attention, which needs no mask.

Owns the whole model in plain torch: layers, the lane, initialisation, and the default runner, `run_plain`. Other runners compute
the same from the same blocks. Does not know of noise schedules, losses, samplers, files, tokenizers, devices or kernels.

B batch, T tokens, S sinks, H query heads, K key/value heads, D head width, d model width.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from sinkdlm.config.model import ModelConfig
from sinkdlm.model.context import FORMS, Context, Intervention, Observer, Seen, View, inside_of
from sinkdlm.model.lane import Lane, Scope
from sinkdlm.model.visibility import Annealing
from sinkdlm.noise import Stream, hash_words


def draw_normal(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Draw standard normal values from (seed, name) alone: float32, on the CPU, whatever torch's defaults are."""
    key = hash_words(seed, int(Stream.WEIGHTS), *name.encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(int(key) >> 1), dtype=torch.float32, device="cpu")


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, self.weight.dtype)  # so that a narrower x is rounded once, at the end
        return functional.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


class Embedding(nn.Embedding):
    """Embed tokens, or project to logits as a tied head. Both call forward, where hooks (sharding, offloading) load the weight."""

    def reset_parameters(self) -> None:
        """Do nothing: the model draws its weights."""

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
        self.q_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.out = nn.Linear(config.attention_width, config.d_model, bias=False)
        self.gate = nn.Linear(config.d_model, config.gate_width, bias=False) if config.gate_width else None
        self.sink_logit = nn.Parameter(torch.zeros(config.n_heads)) if config.has_sink_logit else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, d) -> q (B, T, H, D), k and v (B, T, K, D), before rotary."""
        return self.part(self.qkv(x).unflatten(-1, (-1, self.head_dim)))

    def part(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split projected heads (..., H + 2K, D) into q, k and v, and norm q and k if the model has norms for them."""
        q, k, v = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=-2)
        return (q, k, v) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k), v)

    def run_lane(self, x: Tensor) -> tuple[Tensor, Lane]:
        """Run the sinks' own attention: each sees only itself, so its output is its value (eq. 6)."""
        _, k, v = self.project(x)
        if self.zero_value:
            v = torch.zeros_like(v)
        return self.finish(x, v.repeat_interleave(self.n_heads // self.n_kv_heads, dim=-2)), Lane(k, v)

    def see(self, q: Tensor, k: Tensor, v: Tensor, lane: Lane | None, view: View) -> Seen:
        """Rotate, and put heads first: queries (B, H, T, D), keys and values of tokens (B, K, T, D) and sinks (1 or B, K, S, D)."""
        if self.zero_value and self.n_registers and not view.causal:
            v = torch.cat([torch.zeros_like(v[:, : self.n_registers]), v[:, self.n_registers :]], dim=1)
        q, k, v = view.rotation.apply(q).transpose(1, 2), view.rotation.apply(k).transpose(1, 2), v.transpose(1, 2)
        sink_k = sink_v = None
        if lane is not None and view.sink_rotation is not None:
            sink_k, sink_v = view.sink_rotation.apply(lane.k).transpose(1, 2), lane.v.transpose(1, 2)
        if view.cache is not None:
            k, v = view.cache.join(self.layer, k, v, sink_k, sink_v)
            sink_k = sink_v = None  # they lie in front of k and v
        return Seen(q, k, v, sink_k, sink_v, None if view.causal else self.sink_logit, view.visible)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Gate attention's output (B, T, H, D) by the layer's input x (eq. 9) and project it to (B, T, d)."""
        if self.gate is not None:
            mixed = mixed * torch.sigmoid(self.gate(x)).unflatten(-1, (self.n_heads, -1))  # (B, T, H, D or 1)
        return self.out(mixed.flatten(-2))

    def forward(self, x: Tensor, lane: Lane | None, view: View) -> Tensor:
        """Attend from each token to the visible tokens and the sinks (eq. 5)."""
        seen = self.see(*self.project(x), lane, view)
        if view.intervene is not None:
            seen = view.intervene(self.layer, seen)
        if view.observe is not None:
            view.observe(self.layer, *seen[:5])
        mixed = view.attend(*seen[:5], sink_logit=seen.sink_logit, visible=seen.visible, causal=view.causal)
        return self.finish(x, mixed.transpose(1, 2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """One layer, which runs tokens and lane in one forward: the unit of sharding."""

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

    def forward(self, x: Tensor, sinks: Tensor | Lane | None, view: View) -> tuple[Tensor, Tensor | None, Lane | None]:
        """Return x, the lane's next states and this layer's Lane. sinks: the lane's states (1, S, d), a cached Lane, or None."""
        states, lane = self.run_lane(sinks) if isinstance(sinks, Tensor) else (None, sinks)
        x = x + self.attention(self.attention_norm(x), lane, view)
        return x + self.mlp(self.mlp_norm(x)), states, lane


class Runner(Protocol):
    """Run a model's blocks: embedded tokens (B, T, d) -> hidden states after the final norm, (B, T, d), or (N, d) at the positions
    `select` (N,) of the flattened batch. Holds no model and no weights."""

    def __call__(self, model: "DiffusionLM", x: Tensor, ctx: Context, select: Tensor | None) -> Tensor: ...


def run_plain(model: "DiffusionLM", x: Tensor, ctx: Context, select: Tensor | None = None) -> Tensor:
    """Run the model as in the paper: the reference that every other runner must equal."""
    view = ctx.view(model.config, x)
    sinks = model.first_lane(x, ctx)
    for block in model.blocks:
        x, sinks, _ = block(x, sinks, view)
    x = model.norm(x)
    return x if select is None else x.flatten(0, 1)[select]


class DiffusionLM(nn.Module):
    """The model: `model(tokens)` gives hidden states, `model.head(hidden)` logits. Callers never see a sink."""

    def __init__(self, config: ModelConfig, *, seed: int = 0, attention: str = "auto") -> None:
        """attention: one of context.FORMS. On the meta device, weights stay empty until `init_weights`."""
        super().__init__()
        if attention not in FORMS:
            raise ValueError(f"attention form {attention!r}: allowed: {', '.join(FORMS)}")
        self.config = config
        self.attention_form = attention
        self.runner: Runner = run_plain
        self.scope: Scope | None = None
        home = torch.empty(0).device
        with torch.device("meta"):  # torch's own initialisation would draw from the global generator
            self.embed = Embedding(config.embedding_rows, config.d_model)
            n_sinks = config.n_lane + config.n_registers
            self.sinks = nn.Parameter(torch.empty(n_sinks, config.d_model)) if n_sinks else None
            self.blocks = nn.ModuleList([Block(config, layer) for layer in range(config.n_layers)])
            self.norm = Norm(config.d_model, config.norm_eps)
            self.lm_head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        if home.type != "meta":
            self.to_empty(device=home)
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Initialise as the official code does. A tensor depends on (seed, its name) alone: variants share weights."""
        for name, weight in self.named_parameters():
            weight.copy_(self.initial_weight(name, tuple(weight.shape), seed))

    def initial_weight(self, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
        """Return the initial value of the parameter `name`: float32, unsharded, on the CPU."""
        width = self.config.d_model
        kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if kind in ("attention_norm", "mlp_norm", "norm", "q_norm", "k_norm", "bias", "sink_logit"):
            return torch.full(shape, 0.0 if kind in ("bias", "sink_logit") else 1.0, dtype=torch.float32, device="cpu")
        std = 1 / math.sqrt(width) / self.config.n_layers if kind in ("out", "down") else math.sqrt(2 / (5 * width))
        return draw_normal(shape, seed, name).mul_(std)

    def forward(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
        annealing: Annealing | None = None,
        clean: Tensor | None = None,
        block_size: int | None = None,
        causal: bool = False,
        cache: Any = None,
        observe: Observer | None = None,
        intervene: Intervention | None = None,
        select: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden states after the final norm, (B, T) int64 -> (B, T, d), each at the position of the token it predicts.

        lengths (B,): rows are padded on the right; no token attends to padding, whatever it holds.
        documents (B, T), integers: a run of equal ids is a document, computed as if alone in its row.
        annealing: each token sees a random share of later tokens, for an AR parent on its way to full attention.
        clean (B, T): for block diffusion, the tokens without noise. Each block of `tokens` sees itself and the clean blocks before
            it. Without `clean`, it sees itself and the blocks of `tokens` before it.
        block_size: instead of the config's.
        causal: run the AR parent: causal attention, no sinks, no shift; position i predicts token i+1.
        cache: holds the keys and values of a longer row, of which `tokens` is a span. A shifted model's span needs one more
            token on its left, but for a cache of block diffusion, which keeps that token's state.
        observe(layer, q, k, v, sink_k, sink_v): called with the inputs of attention, registers in front of the tokens.
        intervene(layer, seen): returns changed inputs of attention; `observe` is called after it.
        select: return only these positions: (B, n) of each row gives (B, n, d), (N,) of the flattened batch (N, d).
        """
        config = self.config
        facts: dict[str, Any] = {"lengths": lengths, "causal": causal, "cache": cache, "form": self.attention_form}
        facts |= {"documents": documents, "annealing": annealing, "observe": observe, "intervene": intervene}
        ctx = Context.of(config, tokens, clean=clean, block_size=block_size, **facts)
        x = self.embed_rows(tokens, clean, ctx)
        n_tokens, n_registers = tokens.shape[1], 0 if causal else config.n_registers
        shifted = config.shift_logits and not causal
        if shifted and cache is not None and ctx.block_size is not None:
            x = cache.shift(self.runner(self, x, ctx, None))
            return x if select is None else x.take_along_dim(select[..., None], dim=1)
        if select is not None:
            ctx, source = ctx.select(select, n_tokens, n_registers, shifted=shifted)
            states = self.runner(self, x, ctx, source)
            return states if select.ndim == 1 else states.unflatten(0, select.shape)  # a needless view makes FSDP warn
        x = self.runner(self, x, ctx, None)
        if shifted:
            return x.take_along_dim(ctx.sources(n_tokens, n_registers, x.device, shifted=True)[..., None], dim=1)
        return x[:, n_registers : n_registers + n_tokens]

    def embed_rows(self, tokens: Tensor, clean: Tensor | None, ctx: Context) -> Tensor:
        """Embed registers, tokens and clean tokens, one behind the other; padding becomes [MASK]."""
        inside = inside_of(tokens.shape[1], ctx.lengths)
        row = tokens if clean is None else torch.cat([tokens, clean], dim=1)
        x = self.embed(row if inside is None else row.masked_fill(~inside.repeat(1, ctx.copies), self.config.mask_id))
        if ctx.causal or not self.config.n_registers or self.sinks is None:
            return x
        # Only rotary positions give an order, so registers are stored in front even where their position is the end.
        return torch.cat([self.sinks.expand(x.shape[0], -1, -1).to(x), x], dim=1)

    def first_lane(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Return the lane's states (1, S, d) before the first layer, in x's dtype; None without a lane."""
        return None if self.sinks is None or ctx.causal or not self.config.n_lane else self.sinks[None].to(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Compute raw logits (..., vocab_size); a [MASK] row inside the vocabulary has one too."""
        return self.embed(hidden, self.config.vocab_size) if self.lm_head is None else self.lm_head(hidden)

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix, (vocab_size, d)."""
        return self.embed.weight[: self.config.vocab_size] if self.lm_head is None else self.lm_head.weight

    @contextmanager
    def inference(self) -> Iterator["DiffusionLM"]:
        """Open a scope without gradients, in which a runner may cache the lane. Weights must not change inside it.

        A runner with a cache notices an optimizer step, load_state_dict or a replaced weight, and recomputes the lane. It misses an
        edit through `.data` until the scope closes, which then raises a RuntimeError.
        """
        if self.scope is not None:
            with torch.no_grad():
                yield self
            return
        self.scope = scope = Scope()
        try:
            with torch.no_grad():
                yield self
                scope.close()
        finally:
            self.scope = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the scope, and with the plain runner: whoever loads or trains a model sets a fast one."""
        return {**self.__dict__, "scope": None, "runner": run_plain}

    def denoiser(self, barred: Sequence[int] = ()) -> "Denoiser":
        """Return a callable tokens -> logits for samplers and estimators. Inside `inference()` it uses the cached lane.

        barred: ids that samplers never write, such as those without a token in the tokenizer; logits do not change."""
        return Denoiser(self, barred)


class Denoiser:
    """A model as a function: (B, T) tokens -> (B, T, V) logits, without gradients.

    where: return logits at these positions only: (B, n) gives (B, n, V); boolean (B, T) gives (number of True, V), row by row.
    """

    capturable = True  # a forward never waits for the device, so that a sampler may record it once and replay it

    def __init__(self, model: DiffusionLM, barred: Sequence[int] = ()) -> None:
        self.model, self.barred = model, tuple(barred)
        self.reach = int(model.config.shift_logits)  # extra tokens that a span needs on its left
        self.cacheable = not model.config.n_registers
        self.block_size = model.config.block_size

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    def __call__(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        where: Tensor | None = None,
        cache: Any = None,
        clean: Tensor | None = None,
        **facts: Any,
    ) -> Tensor:
        """facts: `observe` and `intervene` of the model's forward. Samplers inspect this signature for the other names."""
        with torch.no_grad():
            chosen = where is not None and where.dtype == torch.bool
            select = None if chosen else where
            hidden = self.model(tokens, lengths=lengths, cache=cache, clean=clean, select=select, **facts)
            return self.model.head(hidden[where] if chosen else hidden)
