"""A tokenizer as preparation uses it: texts in batches to ids on all cores, its end-of-document id, and its mark in the index."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sinkdlm.errors import DataError

_UINT16_IDS = 1 << 16
_LEAD = "\n"


def mark_tokenizer(tokenizer: Any, source: str | None = None) -> dict[str, Any]:
    """What tells one tokenizer from another: `sha256` of everything it does to a text, `vocabulary_sha256` of its tokens and ids
    alone, and how many rows its ids need. source: where it came from, as the user said it."""
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
    """tokenizer.json without padding and truncation, which a user of the tokenizer may have switched on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError(f"tokenizer {type(tokenizer).__name__}: has no tokenizer.json form, which preparing needs")
    return {**json.loads(backend.to_str()), "padding": None, "truncation": None}


def unknown_counter(tokenizer: Any) -> Callable[[Sequence[int]], int]:
    """Counts tokens that stand for what the tokenizer does not have: none where every text can be spelled, byte by byte."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    token = getattr(model, "unk_token", tokenizer.unk_token)  # a Unigram model does not say
    unknown = None if token is None else tokenizer.get_vocab().get(token)
    return lambda ids: list[Any](ids).count(unknown)


def with_bos(ids: list[int], bos_id: Any, bos: bool | None) -> list[int]:
    """BOS in front of the ids, or none there; None: as they are."""
    if bos is None:
        return ids
    bare = ids[1:] if ids[:1] == [bos_id] else ids
    return [bos_id, *bare] if bos else bare


def literal_content(tokenizer: Any, eos_id: int) -> dict[str, Any]:
    """The same, with the end-of-document token among the special ones: those that a text can be kept from spelling."""
    content = _content(tokenizer)
    added = [{**token, "special": token["special"] or token["id"] == eos_id} for token in content.get("added_tokens") or []]
    return {**content, "added_tokens": added}


class Encoder:
    """Texts to ids. A text that spells a special token ("<|endoftext|>") is taken literally, letter by letter, unless `parse`.

    bos: where special tokens are added, BOS in front or not, whatever the tokenizer does by itself (None: what it does)."""

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
        """add_special: with the tokens that the tokenizer puts around a text (BOS). Waits without holding Python's lock."""
        backend = self._parsing if parse else self._literal
        bos = self.bos if add_special else None
        return [
            with_bos(found.ids, self._bos_id, bos) for found in backend.encode_batch_fast(texts, add_special_tokens=add_special)
        ]

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """(piece, does it begin a text?). A later piece is read after a line break, which is then taken off again, so that what a
        tokenizer puts at the start of a text ("▁") stands only there."""
        found = self.encode([piece if first else _LEAD + piece for piece, first in pieces])
        n = len(self._lead)
        for place, (piece, first) in enumerate(pieces):
            if not first:
                ids = found[place]
                found[place] = ids[n:] if ids[:n] == self._lead else self.encode([piece])[0]
        return found
