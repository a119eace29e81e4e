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
from sinkdlm.model.attention import attend, attend_naive
from sinkdlm.model.positions import Documents, Rotation, place
from sinkdlm.model.visibility import PADDING, SHARED, Annealing, DrawnAnnealing, Visibility
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
    cache: Any = None  # keys and values of tokens outside the computed span: sampling's BlockCache


class Context(NamedTuple):
    """The arguments of one forward; `DiffusionLM.forward` explains them."""

    span: tuple[int | Tensor, int]  # index of the first token in its row, length of the row
    lengths: Tensor | None = None
    documents: Documents | None = None
    annealing: Annealing | None = None
    causal: bool = False
    observe: Observer | None = None
    intervene: Intervention | None = None
    cache: Any = None
    form: str = "auto"
    per_row: int = 0  # n where every row selects n positions, else 0

    @classmethod
    def of(
        cls, config: ModelConfig, tokens: Tensor, *, documents: Tensor | None, annealing: Annealing | None, **facts: Any
    ) -> "Context":
        """Collect a call's arguments and check them against each other."""
        if annealing is not None and annealing.share >= 1:
            annealing = None
        cache, lengths = facts.get("cache"), facts.get("lengths")
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
        span = (0, tokens.shape[1]) if cache is None else (cache.start, cache.length)
        return cls(span, documents=packed, annealing=annealing, **facts)

    def select(self, positions: Tensor, n_tokens: int, n_registers: int, *, shifted: bool) -> tuple["Context", Tensor]:
        """Turn positions, (B, n) of each row or (N,) of the flattened batch, into flat indices of the states that predict them."""
        if positions.dim() == 2:
            positions = positions + n_tokens * torch.arange(len(positions), device=positions.device)[:, None]
        source = positions.flatten()
        if shifted:
            first = source % n_tokens == 0 if self.documents is None else self.documents.first.flatten()[source]
            source = torch.where(first, source, source - 1)
        source = source + (source // n_tokens + 1) * n_registers
        return self._replace(per_row=positions.shape[1] if positions.dim() == 2 else 0), source

    def shift(self, x: Tensor) -> Tensor:
        """Align states (B, T, d) of a next-token model with the tokens that they predict."""
        shifted = torch.cat([x[:, :1], x[:, :-1]], dim=1)
        return shifted if self.documents is None else torch.where(self.documents.first[..., None], x, shifted)

    def view(self, config: ModelConfig, x: Tensor) -> View:
        """Build the View of states x (B, R + T, d), in plain torch."""
        how = _naive if self.form == "naive" else attend
        rule = visibility(config, x, self)
        visible = padding_mask(config, x, self) if rule is None else rule.dense()
        return View(*rotations(config, x, self), visible, self.causal, how, self.observe, self.intervene, self.cache)


def _naive(*seen: Tensor | None, **how: Any) -> Tensor:
    return attend_naive(*seen, **how)[0]  # type: ignore[arg-type]


def inside_of(n_tokens: int, lengths: Tensor | None) -> Tensor | None:
    """Return which tokens (B, T) are not padding; None without lengths."""
    return None if lengths is None else torch.arange(n_tokens, device=lengths.device) < lengths[:, None]


def rotations(config: ModelConfig, x: Tensor, ctx: Context) -> tuple[Rotation, Rotation | None]:
    n_tokens = x.shape[1] - (0 if ctx.causal else config.n_registers)
    return place(config, n_tokens, x.device, x.dtype, ctx.span, ctx.lengths, ctx.documents, ctx.causal)


def padding_mask(config: ModelConfig, x: Tensor, ctx: Context) -> Tensor | None:
    """Build the mask that hides padding. Causal rows need none: their padding comes last."""
    if ctx.lengths is None or ctx.causal:
        return None
    inside = inside_of(x.shape[1] - config.n_registers, ctx.lengths)
    assert inside is not None
    return functional.pad(inside, (config.n_registers, 0), value=True)[:, None, None]


def visibility(config: ModelConfig, x: Tensor, ctx: Context) -> Visibility | None:
    """Build the visibility rule of documents and annealing; None where neither is given."""
    if ctx.documents is None and ctx.annealing is None:
        return None
    n_registers = config.n_registers
    n_tokens = x.shape[1] - n_registers
    empty = torch.zeros(1, n_tokens, dtype=torch.int32, device=x.device)
    numbers = empty if ctx.documents is None else ctx.documents.number
    inside = inside_of(n_tokens, ctx.lengths)
    if inside is not None:
        numbers = torch.where(inside, numbers, PADDING)
    drawn = None
    if ctx.annealing is not None:
        words = pair_words(ctx.annealing.key, Stream.ANNEALING, n_tokens, x.device)
        drawn = DrawnAnnealing.draw(ctx.annealing.share, functional.pad(words, (n_registers, 0)))
    return Visibility(functional.pad(numbers, (n_registers, 0), value=SHARED), drawn)
