"""Make a tokenizer from the text that it is for: its bytes, its characters, or byte-pair encoding learned from it.

The tokenizer depends on the text alone: the same text gives the same ids again.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from sinkdlm.data.inputs import Reader, Source, text_of
from sinkdlm.data.prepare import Settings
from sinkdlm.errors import DataError

EOS, UNKNOWN = "<eos>", "<unk>"
_BYTES = 256
_MOST = 1 << 16  # ids that two bytes hold
ALLOWED = f"bytes, chars, or bpe:N with N from {_BYTES + 2} to {_MOST}, as in bpe:2048"


def is_own(name: str) -> bool:
    """Check whether a name asks for a tokenizer of the text itself; any other names a file or a folder."""
    return name in ("bytes", "chars") or name.startswith("bpe:")


def make_tokenizer(name: str, sources: Sequence[Source], settings: Settings) -> Any:
    """Make the tokenizer called bytes, chars or bpe:N for the texts of the sources."""
    size = _BYTES + 1 if name == "bytes" else _size(name)
    if name == "bytes":
        return byte_pairs([], size)
    if settings.kind != "text":
        raise DataError(
            f"--tokenizer {name}: learns from running text, not from --kind {settings.kind}; "
            "give the tokenizer of a prepared set: --tokenizer DIR/tokenizer"
        )
    texts = _texts(sources, settings)
    return byte_pairs(texts, size) if size else characters([*sorted({char for text in texts for char in set(text)}), EOS, UNKNOWN])


def _size(name: str) -> int:
    """Return N of bpe:N, 0 of chars."""
    if name == "chars":
        return 0
    digits = name.removeprefix("bpe:")
    if not re.fullmatch(r"[1-9][0-9]{0,9}", digits, re.ASCII) or not _BYTES + 2 <= int(digits) <= _MOST:
        raise DataError(f"--tokenizer {name}: allowed are {ALLOWED}")
    return int(digits)


def _texts(sources: Sequence[Source], settings: Settings) -> Iterator[str]:
    for _, _, row in Reader(sources, documents=settings.documents).rows((settings.field,)):
        text = text_of(row, settings.field)
        yield from [] if text is None else [text] if isinstance(text, str) else text.pieces


def byte_pairs(texts: Iterator[str] | Sequence[str], size: int) -> Any:
    """Learn byte-level BPE with at most `size` ids: EOS, every byte, and the most frequent pairs. It can spell any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return _wrapped(backend)


def characters(vocabulary: Sequence[str]) -> Any:
    """One id a character, in this order. All other characters become UNKNOWN, which the vocabulary must have, like EOS."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return _wrapped(backend, unk_token=UNKNOWN)


def _wrapped(backend: Any, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, clean_up_tokenization_spaces=False, **special)
