"""The tokenizer of a checkpoint: read, written, and compared with the vocabulary of its model.

Knows nothing of weights.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sinkdlm.config.model import ModelConfig
from sinkdlm.errors import CheckpointError, first_line, panics_raised


def write_tokenizer(folder: Path, tokenizer: Any) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as failure:  # tokenizers raises a bare Exception, also where the disk is full
        raise OSError(f"tokenizer: {first_line(failure)}") from None


def is_filler(token: str) -> bool:
    """Check whether a token is one of the unused [PADn] tokens that fill up a GGUF file's vocabulary."""
    return re.fullmatch(r"\[PAD\d+\]", token) is not None


def _used_ids(tokenizer: Any) -> set[int]:
    return {index for token, index in tokenizer.get_vocab().items() if not is_filler(token)}


def highest_id(tokenizer: Any) -> int:
    """Return the highest id in use."""
    return max(_used_ids(tokenizer))


def absent_ids(tokenizer: Any, vocab_size: int) -> list[int]:
    """Return ids below vocab_size without a token. A model whose vocabulary was rounded up may still predict them."""
    return sorted(set(range(vocab_size)) - _used_ids(tokenizer))


def check_vocabulary(tokenizer: Any, config: ModelConfig, place: Path | str, cure: str = "") -> None:
    """Refuse a tokenizer whose ids go beyond the model's vocabulary; only [MASK], in the row after it, may have a token."""
    highest = highest_id(tokenizer)
    named_mask = highest == config.mask_id and getattr(tokenizer, "mask_token_id", None) == config.mask_id
    if highest >= config.vocab_size and not named_mask:
        ids = f"the tokenizer's ids go up to {highest}, the model has {config.vocab_size} vocabulary rows"
        raise CheckpointError(f"{place}: {ids}{cure}")


def read_tokenizer(path: Path) -> Any:
    """Load the tokenizer saved with a checkpoint, or None."""
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        # AutoTokenizer picks a class by config.json's model type, and ours has none.
        if (path / "tokenizer.json").exists():
            from transformers import PreTrainedTokenizerFast

            with panics_raised():
                return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        with hushed(), panics_raised():
            return AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # and no prompt to run the folder's code
    except Exception as failure:  # transformers raises whatever its parsers raise
        if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            what = "tokenizer_config.json and no tokenizer.json; put that back"
        else:
            what = f"tokenizer files cannot be read: {first_line(failure)}; put whole ones there"
        raise CheckpointError(f"{path}: {what}, or remove tokenizer* to load the model without one") from failure


@contextmanager
def hushed() -> Iterator[None]:
    """Silence transformers: its warnings about our model type, and its progress bars."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
