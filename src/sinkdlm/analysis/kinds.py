"""Kinds of tokens ([MASK], special, white space, punctuation, word) and their texts.

A token's text is read from its vocabulary, which writes it in one of three ways: bytes as printable letters (byte-level BPE, where
"Ġthe" is " the"), spaces as "▁" with single bytes as "<0x0A>" (SentencePiece), or plainly. Knows tokenizers, not models.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

KINDS = ("mask", "special", "space", "punctuation", "word")
MASK, SPECIAL, SPACE, PUNCTUATION, WORD = range(len(KINDS))

MASK_LABEL = "[M]"
_SPACE_MARK = "▁"  # of SentencePiece
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # <|im_start|>, </tool_call>, [PAD7]: what tokenizers add to a vocabulary


def classify(tokenizer: Any, n_ids: int, mask_id: int) -> np.ndarray:
    """(n_ids,) uint8: an index into KINDS for every id that a model may see.

    special: what the tokenizer calls so, markers added to its vocabulary, invisible characters, and ids without a token.
    space: white space only. word: any letter or digit, or a part of a character that takes several tokens. punctuation: the
    rest, other symbols included. n_ids: the model's embedding rows, [MASK] among them.
    """
    special, texts = special_ids(tokenizer), texts_of(tokenizer, range(n_ids))
    kinds = np.array([SPECIAL if index in special else kind_of(text) for index, text in enumerate(texts)], dtype=np.uint8)
    kinds[mask_id] = MASK
    return kinds


def kind_finder(tokenizer: Any, mask_id: int) -> Callable[[int], str]:
    """A function from a token's id to the name of its kind, without reading the whole vocabulary."""
    special = special_ids(tokenizer)

    def find(token: int) -> str:
        if token == mask_id:
            return KINDS[MASK]
        return KINDS[SPECIAL if token in special else kind_of(texts_of(tokenizer, [token])[0])]

    return find


def kind_of(text: bytes | None) -> int:
    """The kind of a token, from its bytes; None: there is no such token."""
    if not text:
        return SPECIAL
    try:
        letters = text.decode()
    except UnicodeDecodeError:
        return WORD
    if letters.isspace():
        return SPACE
    categories = {unicodedata.category(letter)[0] for letter in letters if not letter.isspace()}
    if categories & {"L", "N", "M"}:
        return WORD
    return PUNCTUATION if categories & {"P", "S"} else SPECIAL


def special_ids(tokenizer: Any) -> set[int]:
    """Ids called special, and added ids that look like markers: Qwen's <|fim_pad|> is not called special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {index for index, token in added.items() if token.special or _MARKER.fullmatch(token.content)}
    return marked | set(tokenizer.all_special_ids)


def texts_of(tokenizer: Any, ids: Sequence[int] | range) -> list[bytes | None]:
    """The bytes of each token, a leading space included; a token may be a part of a character. None: no such token.

    `decode` will not do: it drops a leading space of SentencePiece tokens and cannot show parts of characters.
    """
    added, read = getattr(tokenizer, "added_tokens_decoder", {}), _reader(tokenizer)
    found: list[bytes | None] = []
    for index, name in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        if index in added:
            found.append(added[index].content.encode())  # added tokens are written plainly
        else:
            found.append(None if name is None else read(name))
    return found


def _reader(tokenizer: Any) -> Any:
    """The function that reads this vocabulary's token names, found from the tokenizer's parts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [] if backend is None else [backend.decoder, backend.pre_tokenizer, backend.normalizer]
    states = b"".join(part.__getstate__() for part in parts if part is not None).decode()
    if '"ByteLevel"' in states:
        return _read_byte_letters
    if _SPACE_MARK in states or hasattr(tokenizer, "sp_model"):
        return _read_sentencepiece
    return str.encode


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The letter for each byte in byte-level BPE."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _read_byte_letters(name: str) -> bytes:
    try:
        return bytes(map(_byte_letters().__getitem__, name))
    except KeyError:  # a name that is not written in byte letters
        return name.encode()


def _read_sentencepiece(name: str) -> bytes:
    byte = _BYTE.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace(_SPACE_MARK, " ").encode()


def labels(tokenizer: Any, ids: Sequence[int] | np.ndarray, mask_id: int) -> list[str]:
    """Each token's text, a leading space included; bytes that are no text become a replacement sign. #id without a text."""
    ids = [int(index) for index in ids]
    texts = (
        text.decode(errors="replace") if text else f"#{index}" for index, text in zip(ids, texts_of(tokenizer, ids), strict=True)
    )
    return [MASK_LABEL if index == mask_id else text for index, text in zip(ids, texts, strict=True)]
