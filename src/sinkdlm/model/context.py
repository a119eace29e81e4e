"""The arguments of one forward, and what its layers use of them.

A `Context` holds the arguments. A runner turns it into a `View`: rotations, visibility and the attention function. Knows no layer
and no weights.

B batch, T tokens, S sinks, H query heads, K key/value heads, D head width, R registers in front of the tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sinkdlm.config.model import ModelConfig
from sinkdlm.diffusion import number_blocks
from sinkdlm.model.attention import attend, attend_naive
from sinkdlm.model.positions import Documents, Rotation, place
from sinkdlm.model.visibility import PADDING, SHARED, Annealing, DrawnAnnealing, Visibility, block_codes
from sinkdlm.noise import Stream, pair_words

FORMS = ("auto", "naive", "append", "flex")  # of attention; a runner without one computes the same by another

Attend = Callable[..., Tensor]
Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None]


class Seen(NamedTuple):
    """One layer's inputs of attention (shapes as in attention.py), which `intervene` may change."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink_k: Tensor | None
    sink_v: Tensor | None
    sink_logit: Tensor | None
    visible: Any


Intervention = Callable[[int, Seen], Seen]


class View(NamedTuple):
    """What every layer of one forward uses."""

    rotation: Rotation
    sink_rotation: Rotation | None = None
    visible: Any = None  # boolean as in attention.py, or what the runner's `attend` takes
    causal: bool = False
    attend: Attend = attend
    observe: Observer | None = None
    intervene: Intervention | None = None
    cache: Any = None  # keys and values of sinks and tokens outside the computed span: a RowCache of sampling


class Context(NamedTuple):
    """The arguments of one forward; `DiffusionLM.forward` explains them."""

    span: tuple[int | Tensor, int | Tensor]  # index of the first token in its row, end of the row
    lengths: Tensor | None = None
    documents: Documents | None = None
    annealing: Annealing | None = None
    causal: bool = False
    observe: Observer | None = None
    intervene: Intervention | None = None
    cache: Any = None
    form: str = "auto"
    per_row: int = 0  # n where every row selects n positions, else 0
    blocks: Tensor | None = None  # block diffusion: number of each token's block, (B or 1, T)
    block_size: int | None = None  # block diffusion with a cache: blocks count from the row's beginning
    copies: int = 1  # 2: noised tokens, then the clean ones

    @property
    def pairwise(self) -> bool:
        """Whether a rule over pairs of tokens says who sees whom."""
        return self.documents is not None or self.annealing is not None or self.blocks is not None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        tokens: Tensor,
        *,
        documents: Tensor | None,
        annealing: Annealing | None,
        clean: Tensor | None = None,
        block_size: int | None = None,
        **facts: Any,
    ) -> "Context":
        """Collect a call's arguments and check them against each other. tokens: without the clean copy."""
        if annealing is not None and annealing.share >= 1:
            annealing = None
        cache, lengths = facts.get("cache"), facts.get("lengths")
        block_size = None if facts.get("causal") else block_size or config.block_size
        _check_blocks(config, tokens, block_size, clean, annealing, cache)
        if cache is not None and (lengths is not None or config.n_registers):
            raise ValueError("cache= takes neither lengths= nor register sinks, which change with every token; leave it out")
        given = "documents" if documents is not None else "annealing"
        for name in ("causal", "cache", "observe"):
            if (documents is not None or annealing is not None) and facts.get(name):
                raise ValueError(f"{given}= and {name}= do not go together; give one of them")
        packed = None
        if documents is not None:
            if documents.shape != tokens.shape or documents.is_floating_point():
                wrong = f"{documents.dtype} {tuple(documents.shape)}"
                raise ValueError(f"documents: give an integer for each of the tokens {tuple(tokens.shape)}, not {wrong}")
            if config.n_registers:
                raise ValueError(
                    "documents= with sink_kind 'register': a register attends to every document and would mix them; "
                    "pack rows without documents, or use sink_kind 'isolated'"
                )
            packed = Documents.of(documents, inside_of(tokens.shape[1], lengths))
        blocks = None
        if block_size is not None and cache is None and (clean is not None or tokens.shape[1] > block_size):
            blocks = number_blocks(tokens.shape[1], block_size, documents, tokens.device)
        facts |= {"blocks": blocks, "block_size": block_size, "copies": 1 if clean is None else 2}
        span = (0, tokens.shape[1]) if cache is None else (cache.start, cache.row_end)
        return cls(span, documents=packed, annealing=annealing, **facts)

    def select(self, positions: Tensor, n_tokens: int, n_registers: int, *, shifted: bool) -> tuple["Context", Tensor]:
        """Turn positions, (B, n) of each row or (N,) of the flattened batch, into flat indices of the states that predict them."""
        if positions.dim() == 2:
            positions = positions + n_tokens * torch.arange(len(positions), device=positions.device)[:, None]
        source = positions.flatten()
        if shifted or n_registers or self.copies > 1:
            row, width = source // n_tokens, n_registers + self.copies * n_tokens
            own = self.sources(n_tokens, n_registers, source.device, shifted=shifted)
            place = own.flatten()[source] if len(own) > 1 else own[0, source % n_tokens]
            source = row * width + place
        return self._replace(per_row=positions.shape[1] if positions.dim() == 2 else 0), source

    def sources(self, n_tokens: int, n_registers: int, device: torch.device, *, shifted: bool) -> Tensor:
        """Return where in its row the state lies that predicts each token, (B or 1, T).

        In a shifted model that is the token before it, but for a row's or document's first token. For a block's first token, it is
        the clean copy of the token before it.
        """
        index = torch.arange(n_tokens, device=device)[None]
        if shifted:
            first = index == 0 if self.documents is None else self.documents.first
            before = index - 1
            if self.copies > 1 and self.blocks is not None:
                begins = functional.pad(self.blocks[:, 1:] != self.blocks[:, :-1], (1, 0), value=True)
                before = torch.where(begins, before + n_tokens, before)
            index = torch.where(first, index, before)
        return index + n_registers

    def view(self, config: ModelConfig, x: Tensor) -> View:
        """Build the View of states x (B, R + T, d), in plain torch."""
        how = _naive if self.form == "naive" else attend
        rule = visibility(config, x, self)
        visible = unruled_mask(config, x, self) if rule is None else rule.dense()
        return View(*rotations(config, x, self), visible, self.causal, how, self.observe, self.intervene, self.cache)


def _naive(*seen: Tensor | None, **how: Any) -> Tensor:
    return attend_naive(*seen, **how)[0]  # type: ignore[arg-type]


def inside_of(n_tokens: int, lengths: Tensor | None) -> Tensor | None:
    """Return which tokens (B, T) are not padding; None without lengths."""
    return None if lengths is None else torch.arange(n_tokens, device=lengths.device) < lengths[:, None]


def _check_blocks(
    config: ModelConfig, tokens: Tensor, block_size: int | None, clean: Tensor | None, annealing: Annealing | None, cache: Any
) -> None:
    """Refuse what does not go with block diffusion, or without it."""
    kept = getattr(cache, "block_size", None)
    if cache is not None and kept != block_size:
        raise ValueError(f"cache= keeps blocks of {kept} tokens, the model's are {block_size}; open the cache with the model's own")
    if block_size is None:
        if clean is not None:
            raise ValueError("clean= is for block diffusion; leave it out, or give the model a block_size")
        return
    if clean is not None and (clean.shape != tokens.shape or cache is not None):
        raise ValueError(f"clean= {tuple(clean.shape)}: give the tokens {tuple(tokens.shape)} without noise, and no cache=")
    if annealing is not None:
        raise ValueError("annealing= does not go with block_size; let block sizes grow instead")
    if config.n_registers or (config.n_lane and config.sink_position == "end"):
        raise ValueError("block_size= goes with sinks in front, without registers; use sink_kind 'isolated', sink_position 'front'")


def rotations(config: ModelConfig, x: Tensor, ctx: Context) -> tuple[Rotation, Rotation | None]:
    n_tokens = x.shape[1] // ctx.copies - (0 if ctx.causal else config.n_registers)
    return place(config, n_tokens, x.device, x.dtype, ctx.span, ctx.lengths, ctx.documents, ctx.causal, ctx.copies)


def unruled_mask(config: ModelConfig, x: Tensor, ctx: Context) -> Tensor | None:
    """Build the mask of a forward without a visibility rule: of the keys in a cache, sinks included, or of padding."""
    if ctx.cache is not None:
        ends: Tensor | None = ctx.cache.ends(x.shape[1], x.device)
        n_sinks = 0 if ctx.causal else config.n_lane
        return None if ends is None else torch.arange(-n_sinks, ctx.cache.length, device=x.device) < ends
    return padding_mask(config, x, ctx)


def padding_mask(config: ModelConfig, x: Tensor, ctx: Context) -> Tensor | None:
    """Build the mask that hides padding. Causal rows need none: their padding comes last."""
    if ctx.lengths is None or ctx.causal:
        return None
    inside = inside_of(x.shape[1] - config.n_registers, ctx.lengths)
    assert inside is not None
    return functional.pad(inside, (config.n_registers, 0), value=True)[:, None, None]


def visibility(config: ModelConfig, x: Tensor, ctx: Context) -> Visibility | None:
    """Build the visibility rule of documents, annealing and blocks; None where none is given."""
    if not ctx.pairwise:
        return None
    n_registers = config.n_registers
    n_tokens = x.shape[1] // ctx.copies - n_registers
    empty = torch.zeros(1, n_tokens, dtype=torch.int32, device=x.device)
    numbers = empty if ctx.documents is None else ctx.documents.number
    inside = inside_of(n_tokens, ctx.lengths)
    if inside is not None:
        numbers = torch.where(inside, numbers, PADDING)
    if ctx.blocks is not None:
        clean = block_codes(ctx.blocks, noised=False)
        codes = clean if ctx.copies == 1 else torch.cat([block_codes(ctx.blocks, noised=True), clean], dim=1)
        return Visibility(torch.cat([numbers] * ctx.copies, dim=1), blocks=codes)
    drawn = None
    if ctx.annealing is not None:
        words = pair_words(ctx.annealing.key, Stream.ANNEALING, n_tokens, x.device)
        drawn = DrawnAnnealing.draw(ctx.annealing.share, functional.pad(words, (n_registers, 0)))
    return Visibility(functional.pad(numbers, (n_registers, 0), value=SHARED), drawn)
