"""A parent that many runs start from, read once: a GGUF file takes a quarter of a minute to unpack, and many follow one another."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkdlm.checkpoint.directory import written_aside
from sinkdlm.checkpoint.durable import held
from sinkdlm.checkpoint.tokenizer import write_tokenizer
from sinkdlm.config.model import MODEL_TYPE
from sinkdlm.config.recipe import Recipe
from sinkdlm.data.encoding import mark_tokenizer
from sinkdlm.interop import Source, open_source
from sinkdlm.interop.tokenizer import tokenizer_of

Load = Callable[..., Any]  # (recipe, dtype, source=, tokenizer=): as the command line loads init.from


class HeldSource(Source):
    """A foreign model whose tensors are kept in memory. Whoever reads them makes copies, so that none is ever changed."""

    def __init__(self, found: Source) -> None:
        self.__dict__.update(found.__dict__)
        self.__dict__["held"] = list(found.read())

    def read(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.__dict__["held"])


class Parents:
    """Loads `init.from` of recipes. Checkpoints of ours are quick to read and are not held. folder: for parents' tokenizers."""

    def __init__(self, load: Load, folder: Path) -> None:
        self._load, self._folder = load, folder
        self._held: dict[str, dict[str, Any]] = {}

    def __call__(self, recipe: Recipe, dtype: torch.dtype) -> Any:
        path = str(recipe.init.from_)
        if path not in self._held:
            found = open_source(path)
            self._held[path] = {} if found.kind == MODEL_TYPE else self._hold(found)
        return self._load(recipe, dtype, **self._held[path])

    def _hold(self, found: Source) -> dict[str, Any]:
        tokenizer = tokenizer_of(found)
        return {"source": HeldSource(found), "tokenizer": None if tokenizer is None else self._write(tokenizer)}

    def _write(self, tokenizer: Any) -> Path:
        """Once and whole: other processes may be reading it."""
        folder = self._folder / mark_tokenizer(tokenizer)["sha256"][:16]
        with held(self._folder, "reproduction", wait=True):
            if not folder.is_dir():
                with written_aside(folder) as aside:
                    write_tokenizer(aside, tokenizer)
        return folder
