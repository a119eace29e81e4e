"""Files of tensors, opened lazily: safetensors (one or sharded), torch files without code, GGUF.

A conversion reads one tensor at a time, so that it never holds two copies of a model.
"""

import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sinkdlm.checkpoint.directory import INDEX, WEIGHTS, weight_files
from sinkdlm.errors import ConvertError, first_line


@dataclass(frozen=True)
class TensorFile:
    """Tensors by name: the shapes of all, and `get`, which reads one."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    get: Callable[[str], Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)  # what a GGUF file says of its model


def open_safetensors(path: Path) -> TensorFile:
    """One safetensors file, or the shards of a directory."""
    if path.is_dir() and not (path / WEIGHTS).exists() and not (path / INDEX).exists():
        for pickled in sorted(path.glob("*.bin"))[:1]:
            raise ConvertError(f"{path}: {pickled.name} is a pickle: save it as safetensors first")
    handles: dict[str, Any] = {}
    for file in [path] if path.is_file() else weight_files(path):
        try:
            handle = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as failure:
            raise ConvertError(f"{file}: not a whole safetensors file: {failure}") from None
        handles |= dict.fromkeys(handle.keys(), handle)
    shapes = {name: tuple(handle.get_slice(name).get_shape()) for name, handle in handles.items()}
    return TensorFile(path, shapes, lambda name: handles[name].get_tensor(name))


def open_torch(path: Path) -> TensorFile:
    """A .pth of tensors. It is read with weights_only: a file that holds code is refused, not run."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError:
        raise ConvertError(f"{path}: holds code or objects beside tensors; refused (only plain tensors are read)") from None
    except (RuntimeError, OSError, EOFError, ValueError) as failure:
        raise ConvertError(f"{path}: not a whole torch file: {first_line(failure)}") from None
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConvertError(f"{path}: no state dict (a mapping of names to tensors, or one under 'model')")
    return TensorFile(path, {name: tuple(value.shape) for name, value in content.items()}, content.__getitem__)


def open_gguf(path: Path) -> TensorFile:
    """A GGUF file; tensors come dequantised, in float32."""
    try:
        import gguf
    except ImportError:
        raise ConvertError(f"{path}: reading GGUF needs the package gguf: pip install 'sinkdlm[interop]'") from None
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as failure:
        raise ConvertError(f"{path}: not a whole GGUF file: {first_line(failure)}") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}

    def get(name: str) -> Tensor:
        tensor = tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as failure:
            raise ConvertError(f"{path}: {name} is {tensor.tensor_type.name}, which cannot be dequantised: {failure}") from None
        # An unquantised tensor comes as a read-only view of the file.
        return torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(shapes[name])

    # Single values alone: the reader holds an array object for each of the vocabulary's strings.
    facts = {name: fact.contents() for name, fact in reader.fields.items() if len(fact.data) == 1}
    return TensorFile(path, shapes, get, facts)
