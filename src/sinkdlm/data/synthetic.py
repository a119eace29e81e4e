"""Make a small synthetic corpus for models that learn on a CPU, with a grammar, checkable answers and its own tokenizer.

Every document is a pure function of (seed, number). Numbers, names and things vary; the answers that follow are always right.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from sinkdlm.data.inputs import Source
from sinkdlm.data.own_tokenizer import EOS, UNKNOWN, characters
from sinkdlm.data.prepare import Settings, prepare_sources
from sinkdlm.noise import random_bits

SYMBOLS = "\n !+,.-0123456789:=?abcdefghijklmnopqrstuvwxyz"
_FURTHER = "#AQ"  # characters that GSM8K's rows have and the corpus has not
_KEY = 0x636F72707573  # "corpus" in ASCII, to keep these random numbers apart
_LINES = (3, 6)  # fewest and most lines of a document
_DRAWS = 1 + 8 * _LINES[1]  # random numbers that the longest document uses: its lines, and for each its form and 7 choices

_NAMES = ("tom", "ann", "ben", "eva", "max", "lily", "sam", "mia", "leo", "zoe")
_THINGS = ("apples", "books", "coins", "pens", "cards", "eggs", "nuts", "cups")
_ANIMALS = (("cat", "cats"), ("dog", "dogs"), ("bird", "birds"), ("horse", "horses"), ("fox", "foxes"), ("mouse", "mice"))
_COLOURS = ("red", "black", "white", "brown", "grey", "green")
_ACTS = (("sleeps", "sleep"), ("runs", "run"), ("sings", "sing"), ("eats", "eat"), ("waits", "wait"), ("jumps", "jump"))
_PLACES = ("in the house", "by the river", "under the tree", "on the hill", "near the road")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class _Draws:
    """The random numbers of one document, taken in turn."""

    def __init__(self, bits: list[int]) -> None:
        self._bits = iter(bits)

    def below(self, n: int) -> int:
        return next(self._bits) % n

    def one(self, choices: Any) -> Any:
        return choices[self.below(len(choices))]


def _problem(draws: _Draws) -> tuple[str, str]:
    """A word problem and its answer. Nobody ever has just one thing, so that plurals are right."""
    name, thing = draws.one(_NAMES), draws.one(_THINGS)
    if draws.below(2):
        have, more = 2 + draws.below(8), 1 + draws.below(9)
        return f"{name} has {have} {thing} and gets {more} more.", f"{name} has {have + more} {thing}."
    have = 4 + draws.below(7)
    less = 1 + draws.below(have - 2)
    return f"{name} has {have} {thing} and loses {less}.", f"{name} has {have - less} {thing}."


def _sum(draws: _Draws) -> tuple[str, str]:
    left, right = 10 + draws.below(90), 10 + draws.below(90)
    return f"{left}+{right}=", str(left + right)


def _pattern(draws: _Draws) -> tuple[str, str]:
    kind = draws.one(("copy", "reverse"))
    word = "".join(draws.one(_LETTERS) for _ in range(3 + draws.below(3)))
    return f"{kind} {word}:", f" {word if kind == 'copy' else word[::-1]}"


def _sentence(draws: _Draws) -> tuple[str, str]:
    """Verb and noun agree in number."""
    many = draws.below(2)
    noun, verb = draws.one(_ANIMALS)[many], draws.one(_ACTS)[many]
    return f"the {draws.one(_COLOURS)} {noun} {verb} {draws.one(_PLACES)}.", ""


_LINE_FORMS: tuple[Callable[[_Draws], tuple[str, str]], ...] = (_problem, _sum, _pattern, _sentence)


def _document(draws: _Draws) -> str:
    lines = []
    for _ in range(_LINES[0] + draws.below(_LINES[1] - _LINES[0] + 1)):
        form = draws.one(_LINE_FORMS)
        start, end = form(draws)
        lines.append(f"{start} {end}" if form is _problem else start + end)
    return "\n".join(lines)


def _pair(draws: _Draws) -> dict[str, str]:
    question, answer = _problem(draws)
    name, _, _, thing = question.split()[:4]
    return {"prompt": f"{question} how many {thing} does {name} have?", "response": f"\n{answer}"}


def corpus(documents: int, seed: int, kind: str = "text") -> list[Any]:
    """Return texts, or for kind "sft" rows with prompt and response."""
    make: Callable[[_Draws], Any] = _document if kind == "text" else _pair
    drawn = random_bits(31, seed, _KEY, torch.arange(documents)[:, None], torch.arange(_DRAWS)[None])
    return [make(_Draws(bits)) for bits in drawn.tolist()]


def character_tokenizer() -> Any:
    """One id a character, EOS, and one id for all other characters: fewer than 64 in all."""
    return characters((*SYMBOLS, EOS, *_FURTHER, UNKNOWN))


def prepare_example(
    out: str | Path, *, documents: int = 20_000, kind: Literal["text", "sft"] = "text", seed: int = 0
) -> dict[str, Any]:
    """Write the corpus as token shards, with the tokenizer beside them; 5 % are held out for validation."""
    rows = corpus(documents, seed, kind)
    values = [{"text": row} for row in rows] if kind == "text" else rows
    name = f"made-up corpus, {documents} documents, seed {seed}"
    source = Source(name, "memory", stamp=name, rows=values)
    settings = Settings(kind=kind, validation=0.05)
    return prepare_sources([source], [name], character_tokenizer(), out, settings, source="characters")
