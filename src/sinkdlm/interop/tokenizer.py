"""Read tokenizers that come with a model, or are given beside it."""

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sinkdlm.checkpoint import hub
from sinkdlm.checkpoint.tokenizer import hushed
from sinkdlm.config.model import ModelConfig
from sinkdlm.errors import ConvertError, check_regular, first_line, panics_raised
from sinkdlm.interop.sources import GGUF_MARK, Source, model_in, open_source

EXPECTED = "give a tokenizer.json, a SentencePiece .model, a GGUF file, or a checkpoint or folder with one"
_PROBES = ("Hello world", "The capital of France is Paris.", "x = 12 + 34")


def tokenizer_of(source: Source) -> Any:
    """The tokenizer stored with a source, or None."""
    if source.form == "GGUF":
        from transformers import AutoTokenizer

        if source.tensors.facts.get("tokenizer.ggml.model") is None:
            return None
        given = {"gguf_file": source.path.name, "trust_remote_code": False}
        return _guarded(source.path, lambda: AutoTokenizer.from_pretrained(source.path.parent, **given))
    return read_folder(source.path) if source.path.is_dir() else None


def read_tokenizer_at(path: str | Path) -> Any:
    """Read a tokenizer from a folder, the hub, a tokenizer.json (whatever its name), a SentencePiece model or a GGUF file."""
    from transformers import PreTrainedTokenizerFast

    path = hub.find(path, weights=False)
    if path.is_dir():
        path = model_in(path)
        check_regular(path, ConvertError)
        found = read_folder(path)
        if found is None:
            raise ConvertError(
                f"{path}: no tokenizer in this folder: tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
            )
        return found
    if not path.exists():
        raise ConvertError(f"{path}: no such tokenizer file or folder")
    check_regular(path, ConvertError)
    if path.name == "tokenizer.json":
        return read_folder(path.parent)
    if path.suffix == ".json":
        return _guarded(path, lambda: PreTrainedTokenizerFast(tokenizer_file=str(path)))
    if path.suffix == ".model":
        return _sentencepiece(path)
    found = tokenizer_of(open_source(path)) if _is_gguf(path) else None
    if found is None:
        raise ConvertError(f"{path}: holds no tokenizer; {EXPECTED}")
    return found


def named_mask(tokenizer: Any, config: ModelConfig) -> Any:
    """A copy in which [MASK] has a name, so that transformers' fill-mask pipeline finds it; ids before it that no token has get
    fillers."""
    if tokenizer.mask_token_id == config.mask_id:
        return tokenizer
    found, rows = copy.deepcopy(tokenizer), len(tokenizer)
    own = found.convert_ids_to_tokens(config.mask_id) if config.mask_id < rows else None
    if own is None:
        found.add_tokens([f"[PAD{index}]" for index in range(rows, config.mask_id)])
    found.add_special_tokens({"mask_token": own or "[MASK]"})
    return found if found.mask_token_id == config.mask_id else tokenizer  # its text has another [MASK]


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MARK)) == GGUF_MARK
    except OSError as failure:
        raise ConvertError(f"{path}: cannot be read: {failure.strerror}; {EXPECTED}") from None


def read_folder(folder: Path) -> Any:
    """Read a folder's tokenizer files, and never run code that it brings along; None where there are none."""
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer.json").exists():
        return _guarded(folder, lambda: PreTrainedTokenizerFast.from_pretrained(folder))
    if (folder / "tokenizer.model").exists():
        return _sentencepiece(folder / "tokenizer.model")
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        from transformers import Qwen2Tokenizer

        return _guarded(folder, lambda: Qwen2Tokenizer.from_pretrained(folder))  # Qwen's and Dream's files
    return None


def _sentencepiece(path: Path) -> Any:
    """Read as LlamaTokenizer and compare with SentencePiece itself: other classes silently give other ids for such a file."""
    try:
        import sentencepiece
    except ImportError:
        raise ConvertError(f"{path}: a SentencePiece tokenizer needs: pip install 'sinkdlm[interop]'") from None
    from transformers import LlamaTokenizer

    reference = _guarded(path, lambda: sentencepiece.SentencePieceProcessor(model_file=str(path)))
    with tempfile.TemporaryDirectory() as folder:  # LlamaTokenizer reads one name only; settings beside it come along
        shutil.copy(path, Path(folder) / "tokenizer.model")
        for settings in ("tokenizer_config.json", "special_tokens_map.json"):
            if (path.parent / settings).exists():
                shutil.copy(path.parent / settings, folder)
        tokenizer = _guarded(path, lambda: LlamaTokenizer.from_pretrained(folder, legacy=True))
    for text in _PROBES:
        ours, theirs = tokenizer.encode(text, add_special_tokens=False), reference.encode(text)
        if ours != theirs:
            raise ConvertError(f"{path}: read as LlamaTokenizer, {text!r} gives {ours}, SentencePiece itself gives {theirs}")
    return tokenizer


def _guarded(path: Path, read: Any) -> Any:
    try:
        with hushed(), panics_raised():
            return read()
    except Exception as failure:  # transformers raises whatever its parsers raise
        raise ConvertError(f"{path}: tokenizer cannot be read: {first_line(failure)}; --tokenizer gives another") from failure
