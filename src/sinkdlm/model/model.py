"""DiffusionLM: a bidirectional transformer whose sinks run as a lane beside the tokens. Variants are values of the config.

Owns how layers (layers.py) make a model, its initialisation and the lane's cache. Does not know of noise schedules, losses,
samplers, files or tokenizers.

B batch, T tokens, S sinks, H query heads, K key/value heads, D head width, d model width.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from sinkdlm.config.model import ModelConfig
from sinkdlm.fast.checkpointing import Recompute
from sinkdlm.fast.force_eager import uncompiled
from sinkdlm.kernels.available import trains_fused
from sinkdlm.model.attention import Choice, choose_form, merges_fast
from sinkdlm.model.lane import LaneCache, arithmetic_of
from sinkdlm.model.layers import Block, Embedding, Intervention, KeyValueCache, Norm, Observer, Surroundings, pick
from sinkdlm.model.positions import Documents, place
from sinkdlm.model.visibility import PADDING, SHARED, DrawnOpening, Opening, Visibility
from sinkdlm.noise import Stream, hash_words, pair_words

_ROWS = 16  # the products of a training step like a multiple of rows


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
        self.picks_early = False  # whether a loss says where it looks, for the last layer to end there
        self.float8 = False  # whether blocks' products are in float8 where gradients are wanted
        self.residual: torch.dtype | None = None  # of what layers add to under autocast; by default the weights'
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
        wanted (B, n): positions whose states come back, (B, n, d); the last layer computes no others. Or (N,), in all rows as if
            they were one, which gives (N, d): there attention computes them all, and what comes after it does not.
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
        if self.residual is not None and torch.is_autocast_enabled(x.device.type):
            x = x.to(self.residual)
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
            row, place = (wanted // tokens.shape[1], wanted % tokens.shape[1]) if wanted.dim() == 1 else (0, wanted)
            place = ((place - 1).clamp_min(0) if is_shifted else place) + n_registers
            wanted = place + row * x.shape[1]
        # Whom a token sees causally depends on where it stands among all; and blocks that are compiled want few shapes.
        early = None if causal or (around.fused is not None and not around.rows) else wanted
        if around.rows and intervene is None and (wanted is None or wanted.dim() == 1):
            x = self._run_rows(x, around, wanted)
            if wanted is not None:
                return x
        else:
            x = self.run_blocks(x, around._replace(rows=0), config.n_lane > 0 and not causal, early)
            if wanted is not None:
                return self.norm(x if early is not None else pick(x, wanted))
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
        kind = x.device.type  # not the weights': they may lie elsewhere until a layer asks for them
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if self.float8 and torch.is_grad_enabled():
            around = around._replace(float8=dtype)
        if not trains_fused(x.device, dtype):
            return around
        fast = (
            not causal and all(each is None for each in (visible, observe, cache)) and self.trains_as_rows(kind, dtype, x.shape[1])
        )
        return around._replace(fused=dtype, rows=x.shape[0] if fast else 0)

    def trains_as_rows(self, device: str, dtype: torch.dtype, tokens: int) -> bool:
        """Whether, by kernels, full rows of so many tokens go through a training step as rows of one matrix."""
        plain = self.attention_form == "auto" and not (self.config.has_sink_logit or self.config.n_registers)
        return plain and merges_fast(device, dtype, self.config.head_dim, tokens)

    def _run_rows(self, x: Tensor, around: Surroundings, wanted: Tensor | None = None) -> Tensor:
        """A training step's blocks and final norm over all tokens, and behind them the sinks, as rows of one matrix: the lane costs
        no products of its own. What a layer adds is added in the norm of the next. The result is of the products' precision.

        wanted (N,): rows that come back, which are all that the last layer computes once attention has been.
        """
        assert around.fused is not None
        n_tokens = x.shape[0] * x.shape[1]
        rows = x.flatten(0, 1)
        if around.sink_rotation is not None and self.sinks is not None:
            filling = x.new_zeros(-(n_tokens + len(self.sinks)) % _ROWS, x.shape[2])
            rows = torch.cat([rows, self.sinks.to(x), filling])
        # Nothing to add yet, in a form that lets the first block run what the others run.
        update = torch.zeros_like(rows, dtype=around.fused, requires_grad=True)
        for block in list(self.blocks)[: None if wanted is None else -1]:
            rows, update, _ = block(rows, update, around)
        if wanted is None:
            return self.norm.end(rows, update, around.fused)[:n_tokens].view_as(x)
        last = self.blocks[-1]
        if type(last) is Block:  # not sharded. As it is written, not as it is compiled: its shapes are new in every step
            rows, update, _ = Block.forward(last, rows, update, around._replace(wanted=wanted))  # type: ignore[assignment]
        else:
            rows, update, _ = last(rows, update, around._replace(wanted=wanted))
        return self.norm.end(rows, update, around.fused)

    def run_blocks(self, x: Tensor, around: Surroundings, use_lane: bool, wanted: Tensor | None = None) -> Tensor:
        """Of all layers, with the lane beside them. Public, so that a trainer can put a compiled form in its place."""
        scope = self._lanes if use_lane and not torch.is_grad_enabled() else None
        cached = None if scope is None else scope.find(self)
        sinks = self.sinks[None].to(x) if use_lane and cached is None and self.sinks is not None else None
        lanes = []
        watched = (around.observe or around.intervene) is not None and not torch.compiler.is_compiling()
        with uncompiled() if watched else nullcontext():
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

    def denoiser(self, barred: Sequence[int] = ()) -> "Denoiser":
        """A callable tokens -> logits for samplers and estimators. Inside `inference()` it uses the cached lane.

        barred: ids that samplers never write, as those that a tokenizer lacks; logits are the same."""
        return Denoiser(self, barred)

    def attention_choice(self, *, padded: bool = False, documents: bool = False, opening: bool = False) -> Choice:
        """Which form of attention a forward takes here and now (with lengths, documents, an opening below 1), and why."""
        device, dtype, autocast = arithmetic_of(self)
        choice = self._choose(
            device.type,
            autocast or dtype,
            masked_keys=padded,
            pairwise=documents or opening,
            trained_tokens=self.config.context_length if trains_fused(device, autocast or dtype) else 0,
        )
        if self.config.n_registers and choice.form == "plain":
            return choice._replace(reason="registers are tokens of the row")
        return choice

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

    def __init__(self, model: DiffusionLM, barred: Sequence[int] = ()) -> None:
        self.model, self.barred = model, tuple(barred)
        self.reach = int(model.config.shift_logits)  # tokens to the left that a span must have beside its own
        self.cacheable = not model.config.n_registers

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
