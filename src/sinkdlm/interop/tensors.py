"""Files of tensors, opened lazily: safetensors (one or sharded), torch files without code, GGUF.

Each reader lists names and shapes and gives one tensor at a time, so that a conversion never holds two copies of a model.
"""

import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sinkdlm.checkpoint.directory import INDEX, WEIGHTS
from sinkdlm.errors import ConvertError


class TensorFile(Protocol):
    path: Path

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get(self, name: str) -> Tensor: ...


class SafetensorsFiles:
    """One safetensors file, or the shards of a transformers directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = [path] if path.is_file() else shards_of(path)
        self._of: dict[str, Any] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as failure:
                raise ConvertError(f"{file}: not a whole safetensors file: {failure}") from None
            for name in handle.keys():  # noqa: SIM118  (not a mapping)
                self._of[name] = handle

    def names(self) -> set[str]:
        return set(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name].get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        return self._of[name].get_tensor(name)


def shards_of(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        pickled = sorted(folder.glob("*.bin"))
        hint = f"; {pickled[0].name} is a pickle: save it as safetensors first" if pickled else ""
        raise ConvertError(f"{folder}: neither {WEIGHTS} nor {INDEX}{hint}")
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ConvertError(f"{folder / INDEX}: no weight_map of file names") from None
    for name in names:
        if not (folder / name).is_file():
            raise ConvertError(f"{folder / name}: missing shard, named in {INDEX}")
    return [folder / name for name in names]


class TorchFile:
    """A .pth of tensors. It is read with weights_only: a file that holds code is refused, not run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError:
            raise ConvertError(f"{path}: holds code or objects beside tensors; refused (only plain tensors are read)") from None
        except (RuntimeError, OSError, EOFError, ValueError) as failure:
            raise ConvertError(f"{path}: not a whole torch file: {' '.join(str(failure).split())[:200]}") from None
        if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
            content = content["model"]
        if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
            raise ConvertError(f"{path}: no state dict (a mapping of names to tensors, or one under 'model')")
        self._content = dict(content)

    def names(self) -> set[str]:
        return set(self._content)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._content[name].shape)

    def get(self, name: str) -> Tensor:
        return self._content[name]


class GGUFFile:
    """A GGUF file; tensors come dequantised, in float32."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise ConvertError(f"{path}: reading GGUF needs the package gguf: pip install 'sinkdlm[interop]'") from None
        self.path = path
        self._dequantize = gguf.dequantize
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError) as failure:
            raise ConvertError(f"{path}: not a whole GGUF file: {' '.join(str(failure).split())[:200]}") from None
        self._of = {tensor.name: tensor for tensor in reader.tensors}
        # Facts alone: the reader holds an array object for each of the vocabulary's strings.
        self._facts = {name: fact.contents() for name, fact in reader.fields.items() if len(fact.data) == 1}

    def field(self, name: str, default: Any = None) -> Any:
        return self._facts.get(name, default)

    def names(self) -> set[str]:
        return set(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._of[name].shape))

    def get(self, name: str) -> Tensor:
        tensor = self._of[name]
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as failure:
            raise ConvertError(
                f"{self.path}: {name} is {tensor.tensor_type.name}, which cannot be dequantised: {failure}"
            ) from None
        # An unquantised tensor comes as a read-only view of the file.
        return torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(self.shape(name))
