"""The text of a row while it is written: what can be shown of it, and where it ends.

A diffusion model does not write left to right. A transcript shows what can no longer change: the tokens before the first open
one, less a broken character and the beginning of a possible stop string. Piece by piece or at once, the text is the same.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

_CONTEXT = 8  # given tokens decoded with the written ones: some tokenizers drop a blank at a text's beginning
_BROKEN = "\ufffd"


class Transcript:
    """given: the tokens before the gap. stops: strings before which the text ends. echo: text shown before the answer."""

    def __init__(self, tokenizer: Any, given: Sequence[int], eos_id: int | None, stops: Sequence[str] = (), echo: str = "") -> None:
        self._tokenizer, self._eos_id, self.stops, self.echo = tokenizer, eos_id, tuple(stops), echo
        self._given = list(given[-_CONTEXT:])
        self._before = self._decode(self._given)
        self.text = ""  # all that may be shown
        self.stopped = False  # by EOS or a stop string, not by the end of the canvas
        self.n_tokens = 0  # written, up to EOS
        self._cut = False  # by a stop string
        self._offsets = [0]  # where tokens begin in the text, as far as anybody asked; the last is where the next begins

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def read(self, tokens: Sequence[int], *, done: bool) -> str:
        """Take all final tokens; return the text that may be shown and was not shown before."""
        kept = list(tokens)
        if self._eos_id in kept:
            kept = kept[: kept.index(self._eos_id)]
            self.stopped = True
        self.n_tokens = len(kept)
        text = self._wording(kept)
        end = first_stop(text, self.stops)
        self._cut = end is not None
        self.stopped |= self._cut
        text = text[:end] if done or self.stopped else _settled(text, self.stops)
        if not text.startswith(self.text):  # the decoding has changed: keep what was shown
            text = self.text
        new, self.text = text[len(self.text) :], text
        return new

    def stops_in(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens hold a stop string. Changes nothing: another thread may read at the same time."""
        return bool(self.stops) and first_stop(self._wording(list(tokens)), self.stops) is not None

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """Where each token begins in the text; a part of a character begins where the character does."""
        while len(self._offsets) <= len(tokens):
            n = len(self._offsets)
            near = [*self._given, *tokens[:n]][-_CONTEXT - 1 :]
            width = len(self._decode(near).rstrip(_BROKEN)) - len(self._decode(near[:-1]).rstrip(_BROKEN))
            self._offsets.append(self._offsets[-1] + max(0, width))
        return self._offsets[: len(tokens)]

    def n_shown(self, tokens: Sequence[int], *, done: bool) -> int:
        """How many tokens the text that was read last shows: all that began before its end."""
        return self.n_tokens if done and not self._cut else bisect_left(self.offsets(tokens[: self.n_tokens]), len(self.text))

    def _wording(self, tokens: list[int]) -> str:
        whole = self._decode([*self._given, *tokens])
        return whole[len(self._before) :] if whole.startswith(self._before) else self._decode(tokens)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the text ends: before the stop string that is complete first, so that the size of pieces does not matter."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _settled(text: str, stops: Sequence[str]) -> str:
    """Hold back an incomplete character, and what may be the beginning of a stop string."""
    text = text.rstrip(_BROKEN)
    held = max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
    return text[: len(text) - held]
