"""Open tensor files lazily: safetensors (one or sharded), torch files without code, GGUF.

A conversion reads one tensor at a time, so that it never holds two copies of a model.
"""

import math
import mmap
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sinkdlm.checkpoint.directory import INDEX, WEIGHTS, weight_files
from sinkdlm.errors import ConvertError, first_line

_GGUF_FORMS = "BbHhIif?  Qqd"  # struct's letter of each GGUF type; blank: strings (8) and arrays (9)
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_MOST_ITEMS = 1 << 20  # in a GGUF header: twice as many as the largest vocabularies have, with their scores and merges


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
    """A .pth of tensors, read with weights_only: a file that holds code is refused, not run."""
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped and any(part.compress_type for part in zipfile.ZipFile(path).infolist()):
            raise ConvertError(f"{path}: a compressed zip file, which torch never writes: it may unpack to any size; save it again")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError:
        raise ConvertError(f"{path}: holds code or objects beside tensors; refused (only plain tensors are read)") from None
    except ConvertError:
        raise
    except Exception as failure:  # whatever a pickle can bring about
        raise ConvertError(f"{path}: not a whole torch file: {first_line(failure)}") from None
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConvertError(f"{path}: no state dict (a mapping of names to tensors, or one under 'model')")
    for name, value in content.items():
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ConvertError(f"{path}: {name} is larger than the numbers that the file has for it; save it with .contiguous()")
    return TensorFile(path, {name: tuple(value.shape) for name, value in content.items()}, content.__getitem__)


class _GGUFHeader:
    """What a GGUF header says. gguf's own reader takes a second for 30,000 strings, and goes on behind the end of a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._n_items = data, 4, 0
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are read, of little-endian machines")
        n_tensors, n_facts = self._count(), self._count()
        self.facts = {self._text(): self._value(self._number("I")) for _ in range(n_facts)}
        self.tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}  # shape, type, offset
        for _ in range(n_tensors):
            name, n_sizes = self._text(), self._number("I")
            sizes = struct.unpack(f"<{n_sizes}Q", self._take(8 * n_sizes))
            if name in self.tensors:
                raise ValueError(f"two tensors {name}")
            self.tensors[name] = sizes[::-1], self._number("I"), self._number("Q")
        alignment = self.facts.get("general.alignment", 32)
        self.start = -(-self._at // alignment) * alignment  # of the tensors' numbers

    def _take(self, n_bytes: int) -> bytes:
        if n_bytes > len(self._data) - self._at:
            raise ValueError("truncated: its header counts more than the file holds")
        self._at += n_bytes
        return self._data[self._at - n_bytes : self._at]

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _count(self) -> int:
        count = int(self._number("Q"))
        self._n_items += count
        if self._n_items > _MOST_ITEMS:
            raise ValueError(f"its header counts {self._n_items} items, which no model has")
        return count

    def _text(self) -> str:
        return self._take(self._number("Q")).decode()

    def _value(self, kind: int) -> Any:
        """Single values. Arrays, which are the tokenizer's, are passed over."""
        if kind == _GGUF_STRING:
            return self._text()
        if kind != _GGUF_ARRAY:
            return self._number(_GGUF_FORMS[kind])
        kind, count = self._number("I"), self._count()
        if kind == _GGUF_ARRAY:
            raise ValueError("an array of arrays, which no tokenizer has")
        if kind == _GGUF_STRING:
            for _ in range(count):
                self._take(self._number("Q"))
        else:
            self._take(count * struct.calcsize(f"<{_GGUF_FORMS[kind]}"))
        return None


def open_gguf(path: Path) -> TensorFile:
    """A GGUF file; tensors come dequantised, in float32."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
    except ImportError:
        raise ConvertError(f"{path}: reading GGUF needs the package gguf: pip install 'sinkdlm[interop]'") from None
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _GGUFHeader(data)
        places = {}
        for name, (shape, kind, offset) in header.tensors.items():
            block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * n_bytes
            if shape[-1] % block or header.start + offset + rows * row_bytes > len(data):
                raise ValueError(f"{name} does not fit, or goes beyond the end of the file")
            places[name] = GGMLQuantizationType(kind), header.start + offset, (rows, row_bytes)
    except Exception as failure:  # whatever a header can bring about
        raise ConvertError(f"{path}: not a whole GGUF file: {first_line(failure)}") from None
    shapes = {name: shape for name, (shape, _, _) in header.tensors.items()}

    def get(name: str) -> Tensor:
        kind, start, (rows, row_bytes) = places[name]
        try:
            values = dequantize(np.frombuffer(data, np.uint8, rows * row_bytes, start).reshape(rows, row_bytes), kind)
        except (NotImplementedError, ValueError) as failure:
            raise ConvertError(f"{path}: {name} is {kind.name}, which cannot be dequantised: {failure}") from None
        # An unquantised tensor comes as a read-only view of the file.
        return torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(shapes[name])

    return TensorFile(path, shapes, get, header.facts)
