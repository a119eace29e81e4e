"""What a token is: [MASK], special, white space, punctuation, or a word; and how to write it on an axis.

Read from each token's own text, which a vocabulary writes in one of three ways: bytes as printable letters (byte-level BPE, where
"Ġthe" is " the"), spaces as "▁" with single bytes as "<0x0A>" (SentencePiece), or plainly. Knows tokenizers, not models.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

KINDS = ("mask", "special", "space", "punctuation", "word")
MASK, SPECIAL, SPACE, PUNCTUATION, WORD = range(len(KINDS))

MASK_LABEL = "[M]"
_LABEL_LENGTH = 12
_MARKS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "↵"}
_SPACE_MARK = "▁"  # of SentencePiece
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # <|im_start|>, </tool_call>, [PAD7]: what tokenizers add to a vocabulary


def classify(tokenizer: Any, n_ids: int, mask_id: int) -> np.ndarray | None:
    """(n_ids,) uint8, an index into KINDS for every id that a model may see; None without a tokenizer: nothing is known then.

    special: what the tokenizer calls so, markers added to its vocabulary, characters that show nothing, and ids without a token.
    space: white space only. word: any letter or digit, or a part of a character that takes several tokens. punctuation: the
    rest, other symbols included. n_ids: as many rows as the model embeds, [MASK] among them.
    """
    if tokenizer is None:
        return None
    special, texts = special_ids(tokenizer), texts_of(tokenizer, range(n_ids))
    kinds = np.array([SPECIAL if index in special else kind_of(text) for index, text in enumerate(texts)], dtype=np.uint8)
    kinds[mask_id] = MASK
    return kinds


def kind_of(text: bytes | None) -> int:
    """Of a token's own bytes; None: there is no such token."""
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
    """What is called special, and what was added and looks like a marker: Qwen's <|fim_pad|> is not called so."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {index for index, token in added.items() if token.special or _MARKER.fullmatch(token.content)}
    return marked | set(tokenizer.all_special_ids)


def texts_of(tokenizer: Any, ids: Sequence[int] | range) -> list[bytes | None]:
    """What each token stands for, a leading space included, in bytes: one token may be a part of a character. None: no such token.

    Not by `decode`, which drops the space in front of a single token of SentencePiece and cannot show parts of characters.
    """
    names = tokenizer.convert_ids_to_tokens(list(ids))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    read = _reader(tokenizer)
    found: list[bytes | None] = []
    for index, name in zip(ids, names, strict=True):
        if index in added:
            found.append(added[index].content.encode())  # added tokens are written plainly
        else:
            found.append(None if name is None else read(name))
    return found


def _reader(tokenizer: Any) -> Any:
    """How this vocabulary writes text, by the parts that undo it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [] if backend is None else [backend.decoder, backend.pre_tokenizer, backend.normalizer]
    states = b"".join(part.__getstate__() for part in parts if part is not None).decode()
    if '"ByteLevel"' in states:
        return _read_byte_letters
    if _SPACE_MARK in states or hasattr(tokenizer, "sp_model"):
        return _read_sentencepiece
    return str.encode


def _byte_letters() -> dict[str, int]:
    """The letter for each byte in byte-level BPE: itself where Latin-1 shows it, otherwise the next one from 256 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_LETTERS = _byte_letters()


def _read_byte_letters(name: str) -> bytes:
    try:
        return bytes(_BYTE_LETTERS[letter] for letter in name)
    except KeyError:  # not written in that way after all: a name of its own
        return name.encode()


def _read_sentencepiece(name: str) -> bytes:
    byte = _BYTE.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace(_SPACE_MARK, " ").encode()


def labels(tokenizer: Any, ids: Sequence[int] | np.ndarray, mask_id: int) -> list[str]:
    """A few printable letters for each token: spaces as marks, [MASK] as [M], bytes that are no text as escapes.

    Without a tokenizer, the ids themselves.
    """
    plain = [int(index) for index in ids]
    if tokenizer is None:
        return [MASK_LABEL if index == mask_id else str(index) for index in plain]
    texts = texts_of(tokenizer, plain)
    return [MASK_LABEL if index == mask_id else _label(index, text) for index, text in zip(plain, texts, strict=True)]


def _label(index: int, text: bytes | None) -> str:
    if not text:
        return f"#{index}"
    shown = [_shown(letter) for letter in text.decode(errors="surrogateescape")]
    if len(shown) > _LABEL_LENGTH:
        shown = [*shown[: _LABEL_LENGTH - 1], "…"]
    return "".join(shown)


def _shown(letter: str) -> str:
    if letter in _MARKS:
        return _MARKS[letter]
    code = ord(letter)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no text by itself
        return f"\\x{code - 0xDC00:02x}"
    if letter.isprintable():
        return letter
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"
