"""Turn a model found on disk into our diffusion model: [MASK], new sinks, a new gate.

Tensors of the source are kept bit for bit (or converted to the requested dtype); only what the new config adds is made.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sinkdlm.checkpoint.directory import RESERVED, Loaded, check_finite, load, read_provenance
from sinkdlm.checkpoint.hub import name_of
from sinkdlm.checkpoint.tokenizer import check_vocabulary, highest_id, is_filler
from sinkdlm.config.model import MODEL_TYPE, ModelConfig
from sinkdlm.errors import ConfigError, ConvertError
from sinkdlm.fast import accelerate
from sinkdlm.interop.layouts import check_shape
from sinkdlm.interop.sources import DREAM_MASK_ID, SDAR_MASK_ID, Source, open_source
from sinkdlm.interop.tokenizer import read_tokenizer_at, tokenizer_of
from sinkdlm.model.model import DiffusionLM, draw_normal

SHAPE_KEYS = ("n_heads", "n_kv_heads")
FREE_KEYS = (
    "mask_id",
    "context_length",
    "shift_logits",
    "block_size",
    "n_sinks",
    "sink_kind",
    "sink_position",
    "sink_value",
    "gate",
)
_LITTLE = 0.02  # noise of new rows, as a share of the table's spread: enough for equal sinks to diverge

SinkInit = Literal["mean", "normal"]
GateInit = Literal["normal", "keep"]


def load_any(
    path: str | Path | Source,
    changes: Mapping[str, Any] | None = None,
    *,
    tokenizer: str | Path | None = None,
    sink_init: SinkInit = "mean",
    gate_init: GateInit = "normal",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Loaded:
    """Load any model that `convert` reads, as a diffusion model in memory. changes: config fields to set (`--set`)."""
    changes = dict(changes or {})
    shape = {key: changes.pop(key) for key in SHAPE_KEYS if key in changes}
    source = path if isinstance(path, Source) else open_source(path, shape)
    if source.kind == MODEL_TYPE:
        own = load(source.path, device=device, dtype=dtype)  # with its checks
        if not changes and tokenizer is None:
            return own
        del own  # its tensors are read again below, one at a time
    given = read_tokenizer_at(tokenizer) if tokenizer is not None else tokenizer_of(source)
    config, notes = target_config(source, changes, given)
    if given is not None:
        check_vocabulary(given, config, Path(tokenizer) if tokenizer is not None else source.path)
    state, made = _assemble(source, config, sink_init, gate_init, seed, dtype)
    with torch.device("meta"):
        model = accelerate(DiffusionLM(config))
    model.load_state_dict(state, assign=True)
    parent: dict[str, Any] = {
        "kind": source.kind,
        "form": source.form,
        "path": name_of(source.path),
        "found": source.describe(),
        "changes": changes,
    }
    if source.special_ids:
        parent["special_ids"] = dict(source.special_ids)
    if not source.has_mask:
        parent["new_mask"] = True
    before: dict[str, Any] = {}
    if source.kind == MODEL_TYPE:  # a checkpoint of ours keeps its history, and the family that it came from
        before = own_history(read_provenance(source.path))
        parent |= {"kind": family_of(before) or MODEL_TYPE, "special_ids": special_ids_of(before)}
    inits = {"sink_init": sink_init, "gate_init": gate_init, "init_seed": seed} if made else {}
    notes = [*notes_of(before), *notes, *made]
    return Loaded(model.to(device), given, config, {**before, "parent": parent, "notes": notes, **inits})


def own_history(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """A provenance without the facts that saving writes anew."""
    return {key: value for key, value in provenance.items() if key not in RESERVED}


def notes_of(provenance: Mapping[str, Any]) -> list[Any]:
    """Notes of all conversions so far. Other programs may have put anything there."""
    found = provenance.get("notes", [])
    return found if isinstance(found, list) else [found]


def family_of(provenance: Mapping[str, Any]) -> str | None:
    parent = provenance.get("parent")
    return str(parent["kind"]) if isinstance(parent, dict) and "kind" in parent else None


def special_ids_of(provenance: Mapping[str, Any]) -> dict[str, int]:
    """The parent's ids of bos, eos and pad, as far as it had them."""
    parent = provenance.get("parent")
    found = parent.get("special_ids") if isinstance(parent, dict) else None
    return dict(found) if isinstance(found, dict) else {}


def target_config(source: Source, changes: Mapping[str, Any], tokenizer: Any) -> tuple[ModelConfig, list[str]]:
    """Return the config of the diffusion model, and notes on what was decided."""
    found, fixed = source.config, fixed_keys(source)
    for key, value in changes.items():
        if key in fixed and value != getattr(found, key):
            free = [name for name in FREE_KEYS if name not in fixed] + list(SHAPE_KEYS) * (source.kind == "official")
            trained = f"the model was trained with {key} = {getattr(found, key)}"
            raise ConvertError(f"--set {key}={value}: {trained}; what can be set: {', '.join(free)}")
    notes = list(source.notes)
    if source.kind == "official" and "context_length" not in changes:
        notes.append(f"context_length is {found.context_length}, as the authors': weights do not tell it; --set context_length=N")
    if not source.has_mask and "mask_id" not in changes:
        mask_id, why = choose_mask(source, tokenizer)
        notes.append(f"[MASK] is id {mask_id}: {why}")
        changes = {**changes, "mask_id": mask_id}
    try:
        config = found.replace(**changes)
    except ConfigError as failure:
        raise ConvertError(f"--set {failure}") from None
    if not source.has_mask and tokenizer is not None and config.mask_id < config.vocab_size:
        check_mask(config.mask_id, tokenizer)
    return config, notes


def check_mask(mask_id: int, tokenizer: Any, option: str = "--set mask_id") -> None:
    """Refuse a text token as [MASK]: a prompt that has it would be taken for one with gaps."""
    token = tokenizer.convert_ids_to_tokens(mask_id) if mask_id < len(tokenizer) else None
    special = getattr(tokenizer.added_tokens_decoder.get(mask_id), "special", False)
    if token is not None and mask_id == tokenizer.mask_token_id:
        return
    in_use = mask_id in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    if token is not None and not is_filler(token) and (in_use or not special):
        raise ConvertError(
            f"{option}={mask_id}: the tokenizer uses it, for {token!r}; choose a row that it does not use, or leave it out"
        )


def fixed_keys(source: Source) -> list[str]:
    """The config fields that a source's weights decide, and that cannot be changed."""
    has_sinks = source.config.n_sinks > 0
    decided = {"mask_id": source.has_mask, "n_sinks": has_sinks, "sink_kind": has_sinks, "gate": source.config.gate != "none"}
    return [key for key in ModelConfig.keys() if key not in FREE_KEYS or decided.get(key, False)]  # noqa: SIM118  (a method)


def choose_mask(source: Source, tokenizer: Any) -> tuple[int, str]:
    """Choose [MASK]: an unused row of the parent's vocabulary where there is one, or a new row. Returns the reason too."""
    vocab = source.config.vocab_size
    used = None if tokenizer is None else highest_id(tokenizer) + 1
    named = None if tokenizer is None else tokenizer.mask_token_id
    if named is not None and named < vocab:
        return named, "the tokenizer names it so"
    for kind, chosen, whose in (("qwen2", DREAM_MASK_ID, "Dream"), ("qwen3", SDAR_MASK_ID, "SDAR")):
        if source.kind == kind and vocab > chosen >= (used or 0):
            return chosen, f"an unused row, {whose}'s choice"
    if used is not None and used < vocab:
        return used, "the first row that the tokenizer does not use"
    return vocab, "a new embedding row"


def _assemble(
    source: Source, config: ModelConfig, sink_init: SinkInit, gate_init: GateInit, seed: int, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], list[str]]:
    with torch.device("meta"):
        wanted = {name: tuple(weight.shape) for name, weight in DiffusionLM(config).state_dict().items()}
    state: dict[str, Tensor] = {}
    for name, tensor in source.read():
        if not tensor.is_floating_point():
            raise ConvertError(f"{source.path}: {name} is {tensor.dtype}, not floating point")
        # A copy, not a view into a mapped file or a larger tensor.
        state[name] = tensor.to(dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)
        check_finite(state[name], f"{source.path}: {name}")
    odd = [name for name in state if name not in wanted]
    if odd or "embed.weight" not in state:
        raise ConvertError(f"{source.path}: {f'unexpected tensor {odd[0]}' if odd else 'missing tensor embed.weight'}")
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()})
    if len(dtypes) > 1:
        raise ConvertError(f"{source.path}: weights are {' and '.join(dtypes)}; choose one with --dtype")
    made = []
    table = state["embed.weight"]
    if table.shape[0] == wanted["embed.weight"][0] - 1:
        state["embed.weight"] = torch.cat([table, _new_rows(table, 1, seed, "embed.weight")])
        made.append("new [MASK] embedding row: the mean of the table plus a little noise")
    if config.gate != "none" and source.config.gate == "none":
        made.append(_add_gate(state, wanted, config, gate_init, seed))
    for name, shape in wanted.items():
        if name in state:
            check_shape(f"{source.path}: {name}", state[name], shape)
        elif name == "sinks":
            state[name] = _new_rows(table, shape[0], seed, name, sink_init)
            made.append(f"{shape[0]} new sink row(s), init {sink_init}")
        elif name.endswith("sink_logit"):
            state[name] = torch.zeros(shape, dtype=table.dtype)
        else:
            raise ConvertError(f"{source.path}: missing tensor {name}")
    return {name: state[name] for name in wanted}, made


def _new_rows(table: Tensor, rows: int, seed: int, name: str, init: SinkInit = "mean") -> Tensor:
    """New rows for an embedding table: its mean plus a little noise, or normal with its spread."""
    center, share = (table.float().mean(0), _LITTLE) if init == "mean" else (0.0, 1.0)
    return (center + draw_normal((rows, table.shape[1]), seed, name) * (share * table.float().std())).to(table.dtype)


def _add_gate(
    state: dict[str, Tensor], wanted: Mapping[str, tuple[int, ...]], config: ModelConfig, gate_init: GateInit, seed: int
) -> str:
    """Add gates. normal, as in the paper: they scatter around 0.5 and halve attention's output. keep: zero weights make every gate
    exactly 0.5; the output projection is doubled, which is exact, so the model computes what its parent does."""
    for layer in range(config.n_layers):
        name, out = f"blocks.{layer}.attention.gate.weight", f"blocks.{layer}.attention.out.weight"
        if gate_init == "keep":
            state[name] = torch.zeros(wanted[name], dtype=state[out].dtype)
            state[out] = state[out] * 2
        else:
            std = math.sqrt(2 / (5 * config.d_model))
            state[name] = (draw_normal(wanted[name], seed, name) * std).to(state[out].dtype)
    return f"new {config.gate} gate, init {gate_init}"
