"""Encode texts for preparation, in batches on all cores, and identify the tokenizer that did it."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sinkdlm.errors import DataError

_UINT16_IDS = 1 << 16
_LEAD = "\n"
_LONG = 3 << 19  # characters of a piece that is encoded window by window: only text without line breaks has such
_WINDOW, _OVERLAP, _ALIKE = 1 << 16, 1 << 12, 1 << 8
_TRIES = 4  # at places where a window may begin: within digits, which many tokenizers take three by three, one in so many fits


def mark_tokenizer(tokenizer: Any, source: str | None = None) -> dict[str, Any]:
    """Identify a tokenizer: `sha256` of everything it does to a text, `vocabulary_sha256` of its tokens and ids alone, and the
    embedding rows that its ids need. source: where it came from, as the user named it."""
    content = _content(tokenizer)
    vocabulary = sorted(tokenizer.get_vocab().items())
    return {
        "sha256": hashlib.sha256(_canonical(content)).hexdigest(),
        "vocabulary_sha256": hashlib.sha256(_canonical(vocabulary)).hexdigest(),
        "rows": 1 + max(index for _, index in vocabulary),
        "source": source if source is not None else str(getattr(tokenizer, "name_or_path", "")),
    }


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def _content(tokenizer: Any) -> dict[str, Any]:
    """tokenizer.json without padding and truncation, which a caller may have switched on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError(f"tokenizer {type(tokenizer).__name__}: has no tokenizer.json form, which preparing needs")
    return {**json.loads(backend.to_str()), "padding": None, "truncation": None}


def unknown_counter(tokenizer: Any) -> Callable[[Sequence[int] | np.ndarray[Any, Any]], int]:
    """Return a counter of unknown tokens. It finds none where the tokenizer can spell every text byte by byte."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    token = getattr(model, "unk_token", tokenizer.unk_token)  # a Unigram model does not say
    unknown = None if token is None else tokenizer.get_vocab().get(token)
    return lambda ids: int(np.count_nonzero(np.asarray(ids) == unknown))


def with_bos(ids: list[int], bos_id: Any, bos: bool | None) -> list[int]:
    """Put BOS in front of the ids or remove it; None leaves them as they are."""
    if bos is None:
        return ids
    bare = ids[1:] if ids[:1] == [bos_id] else ids
    return [bos_id, *bare] if bos else bare


def literal_content(tokenizer: Any, eos_id: int) -> dict[str, Any]:
    """tokenizer.json with the end-of-document token marked special: texts can be kept from spelling special tokens."""
    content = _content(tokenizer)
    added = [{**token, "special": token["special"] or token["id"] == eos_id} for token in content.get("added_tokens") or []]
    return {**content, "added_tokens": added}


class Encoder:
    """Encodes texts to ids. A text that spells a special token ("<|endoftext|>") is taken literally, unless `parse`.

    bos: whether BOS goes in front where special tokens are added; None: as the tokenizer does by itself."""

    def __init__(self, tokenizer: Any, eos_id: int | None = None, bos: bool | None = None) -> None:
        from tokenizers import Tokenizer

        found = tokenizer.eos_token_id if eos_id is None else eos_id
        vocabulary = tokenizer.get_vocab()
        self.n_rows = 1 + max(vocabulary.values())
        if found is None:
            raise DataError("the tokenizer has no end-of-document token; --eos ID names one of its ids")
        if not 0 <= found < self.n_rows:
            raise DataError(f"--eos {found}: the tokenizer's ids are 0 to {self.n_rows - 1}")
        self.eos_id = int(found)
        self.bos = bos
        self._bos_id: Any = getattr(tokenizer, "bos_token_id", None)
        if bos and self._bos_id is None:
            raise DataError("--bos: the tokenizer has no beginning-of-text token")
        self.count_unknown = unknown_counter(tokenizer)
        self._content = json.dumps(literal_content(tokenizer, self.eos_id))
        self._literal = Tokenizer.from_str(self._content)
        self._literal.encode_special_tokens = True
        self.dtype = np.dtype("<u2" if self.n_rows <= _UINT16_IDS else "<u4")
        self._lead = self.encode([_LEAD])[0]

    @functools.cached_property
    def _parsing(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self._content)

    def encode(self, texts: Sequence[str], *, add_special: bool = False, parse: bool = False) -> list[list[int]]:
        """Encode texts. add_special: with the tokens that the tokenizer puts around a text (BOS). Releases Python's lock."""
        backend = self._parsing if parse else self._literal
        bos = self.bos if add_special else None
        return [
            with_bos(found.ids, self._bos_id, bos) for found in backend.encode_batch_fast(texts, add_special_tokens=add_special)
        ]

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[Any]:
        """Encode pairs (piece, does it begin a text?). A later piece is encoded behind a line break, whose ids are then removed:
        what a tokenizer puts at the start of a text ("▁") must appear only there."""
        led = [piece if first else _LEAD + piece for piece, first in pieces]
        short = iter(self.encode([text for text in led if len(text) <= _LONG]))
        found: list[Any] = [next(short) if len(text) <= _LONG else self._encode_long(text) for text in led]
        n = len(self._lead)
        for place, (piece, first) in enumerate(pieces):
            if not first:
                ids = found[place]
                whole = self._encode_long if len(piece) > _LONG else lambda text: self.encode([text])[0]
                found[place] = ids[n:] if list(ids[:n]) == self._lead else whole(piece)
        return found

    def _encode_long(self, text: str) -> Any:
        """The ids of the whole text, in the memory of a window: tokenizers takes 400 bytes for a character.

        Each window begins at a token of the one before. Two are joined where both have the same tokens for a while, so that neither
        feels its end there; where they never agree, as in a word without end that has no token, the text is encoded whole."""
        found, (ids, spans), start, end = [], self._window(text, 0, _WINDOW), 0, _WINDOW
        while end < len(text):
            for begin in spans[spans[:, 0] >= end - _OVERLAP, 0][:_TRIES].tolist():
                middle, following = (begin + end) // 2, self._window(text, begin, begin + _WINDOW)
                others = [following]
                if not any(map(str.isspace, text[middle - _ALIKE : middle + _ALIKE])):  # so long a word may feel how it ends
                    others.append(self._window(text, start, end - 1))
                place = _common_token(middle, (ids, spans), others)
                if place is not None:
                    break
            else:
                return self.encode([text])[0]
            found.append(ids[: np.searchsorted(spans[:, 0], place)])
            kept, start, end = np.searchsorted(following[1][:, 0], place), begin, begin + _WINDOW
            ids, spans = following[0][kept:], following[1][kept:]
        return np.concatenate([*found, ids])

    def _window(self, text: str, begin: int, end: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Ids, and where in the text each begins and ends."""
        (found,) = self._literal.encode_batch([text[begin:end]], add_special_tokens=False)
        return np.array(found.ids, self.dtype), begin + np.array(found.offsets, np.int64).reshape(-1, 2)


def _common_token(middle: int, one: Any, others: Any) -> int | None:
    """Where a token begins, about the middle, with the same tokens on both sides of it in all."""
    seen = []
    for ids, spans in (one, *others):
        near = (spans[:, 0] >= middle - _ALIKE) & (spans[:, 1] <= middle + _ALIKE)
        seen.append((ids[near], spans[near]))
        if bool((np.diff(spans[:, 0]) < 0).any()):
            return None
    starts = seen[0][1][:, 0]
    same = len(starts) > 2 and all(np.array_equal(a, b) for found in seen[1:] for a, b in zip(seen[0], found, strict=True))
    return int(starts[len(starts) // 2]) if same else None
