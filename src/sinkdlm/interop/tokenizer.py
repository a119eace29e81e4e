"""Tokenizers that come with a model, or are given beside it."""

from pathlib import Path
from typing import Any

from sinkdlm.config import ModelConfig
from sinkdlm.errors import ConvertError
from sinkdlm.interop.sources import Source

_PROBES = ("Hello world", "The capital of France is Paris.", "x = 12 + 34")


def tokenizer_of(source: Source) -> Any:
    """The tokenizer stored with a source, or None."""
    if source.form == "GGUF":
        from transformers import AutoTokenizer

        return _guarded(source.path, lambda: AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name))
    folder = source.path if source.path.is_dir() else source.path.parent
    return read_tokenizer_at(folder) if source.path.is_dir() else None


def read_tokenizer_at(path: str | Path) -> Any:
    """From a folder, a tokenizer.json or a SentencePiece model; None from a folder without any."""
    path = Path(path)
    if not path.exists():
        raise ConvertError(f"{path}: no such tokenizer file or folder")
    folder, name = (path, None) if path.is_dir() else (path.parent, path.name)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if name is not None and path.suffix == ".json" and name != "tokenizer.json":
        return _guarded(path, lambda: PreTrainedTokenizerFast(tokenizer_file=str(path)))
    if name == "tokenizer.json" or (name is None and (folder / "tokenizer.json").exists()):
        return _guarded(path, lambda: PreTrainedTokenizerFast.from_pretrained(folder))
    if (name or "").endswith(".model") or (name is None and (folder / "tokenizer.model").exists()):
        return _sentencepiece(path if name else folder / "tokenizer.model")
    if name is None and (folder / "vocab.json").exists():
        return _guarded(path, lambda: AutoTokenizer.from_pretrained(folder))
    if name is None:
        return None
    raise ConvertError(f"{path}: no tokenizer; expected tokenizer.json, a SentencePiece tokenizer.model, or a folder with one")


def _sentencepiece(path: Path) -> Any:
    """As LlamaTokenizer, compared with SentencePiece itself: other classes read such a file and give other ids without a word."""
    try:
        import sentencepiece
    except ImportError:
        raise ConvertError(f"{path}: a SentencePiece tokenizer needs: pip install 'sinkdlm[interop]'") from None
    from transformers import LlamaTokenizer

    tokenizer = _guarded(path, lambda: LlamaTokenizer.from_pretrained(path.parent, legacy=True))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in _PROBES:
        ours, theirs = tokenizer.encode(text, add_special_tokens=False), reference.encode(text)
        if ours != theirs:
            raise ConvertError(f"{path}: read as LlamaTokenizer, {text!r} gives {ours}, SentencePiece itself gives {theirs}")
    return tokenizer


def _guarded(path: Path, read: Any) -> Any:
    try:
        return read()
    except Exception as failure:  # transformers raises whatever its parsers raise
        raise ConvertError(f"{path}: tokenizer cannot be read: {str(failure).splitlines()[0]}") from failure


def check_vocabulary(tokenizer: Any, config: ModelConfig, path: Path) -> None:
    highest = max(tokenizer.get_vocab().values())
    if highest >= config.embedding_rows:
        raise ConvertError(f"{path}: the tokenizer's ids go up to {highest}, the model has {config.embedding_rows} embedding rows")
