"""Read and write checkpoint directories: config.json, model.safetensors (sharded when large), tokenizer files, provenance.json.

Owns atomic writes, fingerprints, and the refusal of damaged or foreign files. Knows no other format. No pickle is written or read.
"""

import functools
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sinkdlm import __version__
from sinkdlm.checkpoint import hub
from sinkdlm.checkpoint.durable import is_plain_name, read_object, sync
from sinkdlm.checkpoint.tokenizer import check_vocabulary, read_tokenizer, write_tokenizer
from sinkdlm.config.model import MODEL_TYPE, ModelConfig
from sinkdlm.errors import CheckpointError, ConfigError, UserError, check_regular, first_line
from sinkdlm.fast import accelerate
from sinkdlm.model.model import DiffusionLM

CONFIG, WEIGHTS, INDEX, PROVENANCE = "config.json", "model.safetensors", "model.safetensors.index.json", "provenance.json"
_TOKENIZER = "tokenizer.json"
_OTHER_TOKENIZER = "remove it and give the right one: sinkdlm convert {} DST --tokenizer T"
SHARD_BYTES = 5 * 10**9
_WEIGHT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What transformers adds to a config.json that it writes; none of it describes the model beyond our own fields.
_TRANSFORMERS_KEYS = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
# Beginnings of the names that a checkpoint directory may hold.
_TOKENIZER_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template")
_OWN_FILES = (CONFIG, "model", PROVENANCE, "generation", *_TOKENIZER_FILES)
RESERVED = ("sinkdlm_version", "torch_version", "created", "config_sha256", "weights", "tokenizer_sha256")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory. `tokenizer` is None where the directory has none."""

    model: DiffusionLM
    tokenizer: Any
    config: ModelConfig
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The weights' dtype, as in "float32", or how those of blocks are held, as in "int8"."""
        held = getattr(cast(Any, self.model.blocks[0]).attention.qkv, "kind", None)
        return held or _short(self.model.embed.weight.dtype)


def save(
    path: str | Path,
    model: DiffusionLM,
    tokenizer: Any = None,
    provenance: Mapping[str, Any] | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint directory, whole or not at all. An existing checkpoint is replaced; anything else is left alone.

    tokenizer: anything with save_pretrained. provenance: JSON values; versions, time and fingerprints are added.
    """
    model = getattr(model, "_orig_mod", model)  # the wrapper of a compiled model
    return save_weights(path, model.config, model.state_dict(), tokenizer, provenance, shard_bytes=shard_bytes)


def save_weights(
    path: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Any = None,
    provenance: Mapping[str, Any] | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint as `save` does, from weights by name."""
    path = Path(path).resolve()  # a link is followed, not replaced
    _check_weights(config, weights)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config, "tokenizer")
    clash = [key for key in RESERVED if key in (provenance or {})]
    if clash:
        raise CheckpointError(f"provenance: {', '.join(clash)}: written by save itself; use another key")
    check_destination(path)
    with written_aside(path) as aside:
        _write_json(aside / CONFIG, config.to_dict())
        fingerprints = write_weights(aside, weights, shard_bytes)
        if tokenizer is not None:
            write_tokenizer(aside, tokenizer)
        spelling = aside / _TOKENIZER
        own = {"tokenizer_sha256": fingerprint(spelling)["sha256"]} if spelling.exists() else {}
        write_provenance(aside, config, fingerprints, {**(provenance or {}), **own})
    return path


def write_provenance(folder: Path, config: ModelConfig, fingerprints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    _write_json(
        folder / PROVENANCE,
        {
            **given,
            "sinkdlm_version": __version__,
            "torch_version": str(torch.__version__),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "config_sha256": _config_fingerprint(config.to_dict()),
            "weights": dict(fingerprints),
        },
    )


def _check_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Refuse to write what loading would refuse."""
    with torch.device("meta"):
        wanted = {name: tuple(weight.shape) for name, weight in DiffusionLM(config).state_dict().items()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    odd = sorted(set(found) ^ set(wanted)) or [name for name in wanted if found[name] != wanted[name]]
    if odd:
        raise CheckpointError(f"model: tensor {odd[0]} does not fit its config; merge adapters and unwrap modules before saving")
    dtypes = {weight.dtype for weight in weights.values()}
    if len(dtypes) > 1 or not dtypes <= set(_WEIGHT_DTYPES.values()):
        names = " and ".join(sorted(map(_short, dtypes)))
        raise CheckpointError(f"model: weights are {names}; a checkpoint has one floating dtype: model.to(torch.float32)")
    if any(weight.is_meta for weight in weights.values()):
        raise CheckpointError("model: weights on the meta device have no values to save")
    for name, weight in weights.items():
        check_finite(weight, f"model: {name}")


def check_finite(weight: Tensor, place: str) -> None:
    """Refuse NaN and infinity: one such value spoils every output, and what is sampled from it still looks like an answer."""
    if weight.numel() and not bool(torch.stack(weight.detach().aminmax()).isfinite().all()):  # a pass without a copy
        raise CheckpointError(f"{place} holds NaN or infinity: the weights are broken, or too large for {_short(weight.dtype)}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_destination(path: Path) -> None:
    """Refuse to replace anything but a checkpoint with nothing else in its folder."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    try:
        own = json.loads((path / CONFIG).read_text()).get("model_type") == MODEL_TYPE
    except (OSError, ValueError, AttributeError, RecursionError):
        own = False
    if not own:
        raise CheckpointError(f"{path}: exists and is no sinkdlm checkpoint; choose another folder or remove it")
    other = sorted(file.name for file in path.iterdir() if not file.name.startswith(_OWN_FILES))
    if other:
        raise CheckpointError(f"{path}: holds {other[0]}, which replacing the checkpoint would delete; choose another folder")


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling folder, which replaces `path` once it is complete and on disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    except OSError as failure:
        raise CheckpointError(f"{path}: cannot write there: {failure.strerror}") from None
    try:
        yield aside
        aside.chmod(0o777 & ~_umask())
        for file in aside.rglob("*"):
            if file.is_file():
                file.chmod(0o666 & ~_umask())
                sync(file)
        sync(aside)
        retired = aside.with_suffix(".replaced")
        if path.exists():
            path.rename(retired)
        try:
            aside.rename(path)
        except OSError:
            if retired.exists():
                retired.rename(path)
            raise
        shutil.rmtree(retired, ignore_errors=True)
        sync(path.parent)
    except (OSError, SafetensorError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise CheckpointError(f"{path}: writing failed: {reason}; what was there before is untouched") from failure
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@functools.cache
def _umask() -> int:
    """The umask, read once: reading it changes it for a moment, for every thread."""
    current = os.umask(0)
    os.umask(current)
    return current


def write_weights(folder: Path, state: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Write model.safetensors, or shards with their index; return each file's size and SHA-256."""
    split = split_state_dict_into_shards_factory(  # its torch form imports distributed tensors, which takes a second
        dict(state),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    fingerprints = {}
    for name, keys in split.filename_to_tensors.items():
        save_file({key: state[key].detach().cpu().contiguous() for key in keys}, folder / name, metadata={"format": "pt"})
        fingerprints[name] = fingerprint(folder / name)
    if split.is_sharded:
        _write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    return fingerprints


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except TypeError as failure:
        raise CheckpointError(f"{path.name}: {failure}; give plain JSON values") from None


def fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _config_fingerprint(fields: Mapping[str, Any]) -> str:
    """Hash the fields as the file has them: a field that ModelConfig gains later does not change an old checkpoint's hash.

    Fields that are not set do not count: transformers leaves them out.
    """
    own = {key: value for key, value in fields.items() if key not in _TRANSFORMERS_KEYS and value is not None}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    verify: bool = True,
    runner: Literal["auto", "plain"] = "auto",
) -> Loaded:
    """Read a checkpoint directory. dtype: convert the weights; by default they stay as they were saved.

    verify: compare weights, config and tokenizer with the fingerprints in provenance.json (reads each file once more), and
    refuse weights that are not finite. runner: "plain" runs the readable model alone, without kernels.
    """
    if dtype is not None and dtype not in _WEIGHT_DTYPES.values():
        raise CheckpointError(f"dtype = {dtype!r}: allowed are {', '.join(map(str, _WEIGHT_DTYPES.values()))}")
    path, place = Path(path), find_device(device)
    check_regular(path, CheckpointError)
    config, provenance, files = read_config(path), read_provenance(path), weight_files(path)
    if verify:
        _verify(path, provenance, files)
    check_size(path / CONFIG, config, _shapes(files), CheckpointError)
    with torch.device("meta"):
        model = DiffusionLM(config)
    if runner == "auto":
        accelerate(model)
    _fill(model, path, files, place, dtype)
    if verify:
        for name, weight in model.state_dict().items():
            check_finite(weight, f"{path}: {name}")
    tokenizer = read_tokenizer(path)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config, path, f"; {_OTHER_TOKENIZER.format(path)}")
    return Loaded(model, tokenizer, config, provenance)


def read_config(path: str | Path) -> ModelConfig:
    """Read the config of a checkpoint directory, without its weights."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: a file, not a checkpoint folder; other models are read by `sinkdlm convert`")
    if not path.exists():
        left = sorted(path.parent.glob(f".{path.name}.*.replaced"))
        hint = f"; an interrupted save left the former one in {left[-1]}: rename it back" if left else ""
        raise CheckpointError(f"{path}: no such folder{hint or hub.hint(path)}")
    if not (path / CONFIG).exists():
        raise CheckpointError(f"{path}: no {CONFIG}: not a sinkdlm checkpoint; other models are read by `sinkdlm convert`")
    fields = read_object(path / CONFIG, CheckpointError)
    kind = fields.pop("model_type", None)
    if kind != MODEL_TYPE:
        other = f"model_type is {kind!r}, not {MODEL_TYPE!r}"
        raise CheckpointError(f"{path / CONFIG}: {other}: convert it first: sinkdlm convert {path} DST")
    try:
        return ModelConfig(**{key: value for key, value in fields.items() if key not in _TRANSFORMERS_KEYS})
    except ConfigError as failure:
        raise CheckpointError(f"{path / CONFIG}: {failure}") from None


def read_provenance(path: Path) -> dict[str, Any]:
    return read_object(path / PROVENANCE, CheckpointError) if (path / PROVENANCE).exists() else {}


def weight_files(path: Path) -> list[Path]:
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    if not (path / INDEX).exists():
        raise CheckpointError(f"{path}: neither {WEIGHTS} nor {INDEX}")
    names = read_object(path / INDEX, CheckpointError).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) and is_plain_name(name) for name in names.values()):
        raise CheckpointError(f"{path / INDEX}: no weight_map of file names")
    files = [path / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file}: missing shard, named in {INDEX}")
    return files


def find_device(device: str | torch.device) -> torch.device:
    """Return the device of this name. Raise if this machine lacks it, or if it holds no values (meta)."""
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as failure:
        raise CheckpointError(f"device = {device!r}: not available here: {first_line(failure)}") from None
    if place.type == "meta":
        raise CheckpointError("device = 'meta': stores no values; build DiffusionLM(read_config(path)) there instead")
    return place


def _verify(path: Path, provenance: Mapping[str, Any], files: list[Path]) -> None:
    """Compare files with provenance.json, as far as it has fingerprints: other tools write none."""
    expected = provenance.get("config_sha256")
    if expected is not None and expected != _config_fingerprint(read_object(path / CONFIG, CheckpointError)):
        raise CheckpointError(f"{path / CONFIG}: does not match {PROVENANCE}: the config was changed after it was written")
    changed = f"changed since it was written: its SHA-256 is not the one in {PROVENANCE}"
    spelling, mark = path / _TOKENIZER, provenance.get("tokenizer_sha256")
    if mark is not None and spelling.exists() and fingerprint(spelling)["sha256"] != mark:
        raise CheckpointError(f"{spelling}: {changed}; put the former one back, or {_OTHER_TOKENIZER.format(path)}")
    weights: Any = provenance.get("weights")
    for file in files if isinstance(weights, dict) else []:
        mark = weights.get(file.name)
        if not isinstance(mark, dict) or not {"bytes", "sha256"} <= set(mark):
            raise CheckpointError(f"{file}: not among the weights recorded in {PROVENANCE}")
        size = file.stat().st_size
        if size != mark["bytes"]:
            kind = "truncated" if size < mark["bytes"] else "too long"
            raise CheckpointError(f"{file}: {kind}: {size} bytes, {PROVENANCE} says {mark['bytes']}")
        if fingerprint(file)["sha256"] != mark["sha256"]:
            raise CheckpointError(f"{file}: {changed}")


def check_size(place: object, config: ModelConfig, shapes: Iterable[Sequence[int]], error: type[UserError]) -> None:
    """Refuse a config of a far larger model than the weights before it is built. What fits about is compared tensor by tensor."""
    sizes = [math.prod(shape) for shape in shapes]
    if config.n_layers > len(sizes) or config.count_parameters().total > 8 * sum(sizes):
        described = f"{config.n_layers} layers, {config.count_parameters().total} parameters"
        raise error(f"{place}: describes a model of {described}, and its weights are {len(sizes)} tensors of {sum(sizes)} numbers")


def _shapes(files: Iterable[Path]) -> list[tuple[int, ...]]:
    found = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                found += [tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118  (not a mapping)
        except (SafetensorError, OSError) as failure:
            raise CheckpointError(f"{file}: not a whole safetensors file: {failure}") from None
    return found


def _fill(model: DiffusionLM, path: Path, files: list[Path], device: torch.device, dtype: torch.dtype | None) -> None:
    """Put the files' tensors into a model on the meta device; check each key, shape and dtype before reading it."""
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    state: dict[str, Tensor] = {}
    common: tuple[str, str] | None = None  # the first tensor's name and dtype
    for file in files:
        try:
            with safe_open(file, framework="pt", device=str(device)) as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                    view = tensors.get_slice(name)
                    shape, kind = tuple(view.get_shape()), view.get_dtype()
                    common = common or (name, kind)
                    if name not in shapes:
                        problem = f"unexpected tensor {name}: config.json describes a model without it"
                    elif name in state:
                        problem = f"tensor {name} is in another shard too"
                    elif shape != shapes[name]:
                        problem = f"{name} has shape {shape}, config.json asks for {shapes[name]}"
                    elif kind not in _WEIGHT_DTYPES:
                        problem = f"{name} is {kind}; allowed are {', '.join(_WEIGHT_DTYPES)}"
                    elif dtype is None and kind != common[1]:
                        problem = f"{name} is {kind} but {common[0]} is {common[1]}; pass dtype= to convert all"
                    else:
                        state[name] = tensors.get_tensor(name).to(dtype or _WEIGHT_DTYPES[kind])
                        continue
                    raise CheckpointError(f"{file}: {problem}")
        except (SafetensorError, OSError) as failure:
            raise CheckpointError(f"{file}: not a whole safetensors file: {failure}") from None
    missing = [name for name in shapes if name not in state]
    if missing:
        where = files[0] if len(files) == 1 else path
        raise CheckpointError(f"{where}: missing {len(missing)} tensors, first {missing[0]}")
    model.load_state_dict(state, assign=True)
