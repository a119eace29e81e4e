"""Out again: the official layout, transformers directories, and the whole conversion from path to path."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sinkdlm.checkpoint.directory import CONFIG, WEIGHTS, Loaded, read_provenance, save, write_weights, written_aside
from sinkdlm.config.model import MODEL_TYPE, ModelConfig
from sinkdlm.errors import ConvertError
from sinkdlm.interop import layouts
from sinkdlm.interop.adapt import SHAPE_KEYS, family_of, load_any, notes_of, own_history
from sinkdlm.interop.sources import open_source

Target = Literal["sinkdlm", "official", "hf"]


def convert(
    source: str | Path, destination: str | Path, to: Target = "sinkdlm", *, standalone: bool = False, **options: Any
) -> dict[str, Any]:
    """Reads any supported model and writes it as `to`. Returns what was found and done. options: those of load_any."""
    destination = Path(destination)
    if standalone and to != "hf":
        raise ConvertError("--standalone goes with --to hf")
    if to != "sinkdlm" and destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConvertError(f"{destination}: exists and is not empty; choose another folder or remove it")
    _check_no_run(destination)
    changes = dict(options.get("changes") or {})
    found = open_source(source, {key: value for key, value in changes.items() if key in SHAPE_KEYS})
    loaded = load_any(found, **options)
    earlier = notes_of(read_provenance(found.path)) if found.kind == MODEL_TYPE else []
    notes = notes_of(loaded.provenance)[len(earlier) :]  # a checkpoint's own notes are of when it was made
    if to == "official":
        wrote = write_official(destination, loaded)
        notes += _untold(destination, loaded.config)
    elif to == "hf":
        wrote = write_transformers(destination, loaded, standalone=standalone)
    else:
        save(destination, loaded.model, loaded.tokenizer, own_history(loaded.provenance))
        wrote = "sinkdlm checkpoint"
    return {
        "found": found.describe(),
        "notes": notes,
        "wrote": wrote,
        "path": str(destination),
        "tokenizer": type(loaded.tokenizer).__name__ if loaded.tokenizer is not None else None,
        "dtype": str(loaded.model.embed.weight.dtype).removeprefix("torch."),
        "config": loaded.config.to_dict(),
    }


def _check_no_run(destination: Path) -> None:
    """A checkpoint may be made again by whatever made it; what a run has trained is not convert's to replace."""
    place = destination.resolve()
    owned = [place.parent] if place.name in ("model", "ema") else [place.parents[1]] if place.parent.name == "milestones" else []
    if place.exists() and owned and (owned[0] / "run.json").is_file():
        raise ConvertError(f"{destination}: is what the run in {owned[0]} has trained; choose another folder")


# -- official -----------------------------------------------------------------------------------------------------------------


def write_official(destination: Path, loaded: Loaded) -> str:
    """DST/model.safetensors, with the authors' keys, shapes and embedding rows."""
    config = loaded.config
    needs: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "qkv_bias": (config.qkv_bias, (False,)),
        "tie_embeddings": (config.tie_embeddings, (False,)),
        "shift_logits": (config.shift_logits, (False,)),
        "mask_id": (config.mask_id, (config.vocab_size,)),
        "norm_eps": (config.norm_eps, (1e-5,)),
        "rope_base": (config.rope_base, (10000.0,)),
        "n_sinks": (config.n_sinks, (0, 1)),
        "gate": (config.gate, ("none", "elementwise")),
    }
    if config.n_sinks:
        needs |= {
            "sink_kind": (config.sink_kind, ("isolated",)),
            "sink_position": (config.sink_position, ("front",)),
            "sink_value": (config.sink_value, ("learned",)),
        }
    odd = [
        f"{key} = {value!r} has no place there, only {' or '.join(map(repr, allowed))}"
        for key, (value, allowed) in needs.items()
        if value not in allowed
    ]
    if odd:
        raise ConvertError(f"--to official: {'; '.join(odd)}")
    state = loaded.model.state_dict()
    tensors = layouts.OFFICIAL.write(state, config)
    rows = [state["embed.weight"], *([state["sinks"]] if config.n_sinks else [])]
    tensors[layouts.OFFICIAL.embed] = torch.cat(rows)
    tensors[layouts.OFFICIAL.head] = state["lm_head.weight"]
    with written_aside(destination) as aside:
        write_weights(aside, tensors)
    variant = "gate" if config.gate != "none" else "sink" if config.n_sinks else "vanilla"
    return f"official state dict ({variant}) in {WEIGHTS}"


def _untold(path: Path, config: ModelConfig) -> list[str]:
    """What of a model its official form does not tell whoever reads it again."""
    heads = {key: getattr(config, key) for key in SHAPE_KEYS}
    told = open_source(path, heads).config.to_dict()
    try:
        found = open_source(path).config
        told |= {key: getattr(found, key) for key in SHAPE_KEYS}
    except ConvertError:  # of no size of the table
        told |= dict.fromkeys(SHAPE_KEYS)
    lost = [f"{key}={value}" for key, value in config.to_dict().items() if told[key] != value]
    return [f"these weights do not tell {', '.join(lost)}: give them with --set where they are read again"] if lost else []


# -- transformers ---------------------------------------------------------------------------------------------------------------


def write_transformers(destination: Path, loaded: Loaded, *, standalone: bool) -> str:
    """The parent's own architecture for a vanilla model of such a parent; our class, registered or standalone, for all others."""
    kind = None if standalone else parent_architecture(loaded)
    with written_aside(destination) as aside:
        if kind is None:
            from sinkdlm.interop.hf import SinkDLMForMaskedLM
            from sinkdlm.interop.standalone import make_standalone

            with _no_bars():
                SinkDLMForMaskedLM.wrap(loaded.model).save_pretrained(aside)
            if standalone:
                make_standalone(aside)
        else:
            (aside / CONFIG).write_text(json.dumps(_parent_config(kind, loaded), indent=2) + "\n")
            write_weights(aside, _parent_state(kind, loaded))
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(aside)
    if kind is not None:
        return f"transformers directory ({kind})"
    return "transformers directory (sinkdlm, with its own modelling file)" if standalone else "transformers directory (sinkdlm)"


@contextmanager
def _no_bars() -> Iterator[None]:
    """transformers draws a bar even where nobody looks: into a file, or for one small shard."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def parent_architecture(loaded: Loaded) -> str | None:
    """The family that can hold this model as it is, or None."""
    config, kind = loaded.config, family_of(loaded.provenance)
    if config.n_sinks or config.gate != "none" or kind not in ("qwen2", "llama", "llada", "dream"):
        return None
    if config.embedding_rows != config.vocab_size and not config.tie_embeddings:
        return None  # a [MASK] row of its own beside an untied head: these families have as many embedding as head rows
    if kind in ("llada", "dream") and config.shift_logits != (kind == "dream"):
        return None  # their own code shifts or does not
    if kind == "llama" and config.qkv_bias:
        return None
    return kind


def _parent_state(kind: str, loaded: Loaded) -> dict[str, Tensor]:
    layout = layouts.LLADA if kind == "llada" else layouts.TRANSFORMERS
    state = loaded.model.state_dict()
    tensors = {layout.embed: state["embed.weight"], **layout.write(state, loaded.config)}
    if not loaded.config.tie_embeddings:
        tensors[layout.head] = state["lm_head.weight"]
    return tensors


def _parent_config(kind: str, loaded: Loaded) -> dict[str, Any]:
    config = loaded.config
    dtype = str(loaded.model.embed.weight.dtype).removeprefix("torch.")
    if kind == "llada":
        return {
            "model_type": "llada", "architectures": ["LLaDAModelLM"], "block_type": "llama", "layer_norm_type": "rms", "rope": True,
            "alibi": False, "include_bias": False, "include_qkv_bias": config.qkv_bias, "activation_type": "silu",
            "auto_map": {
                "AutoConfig": "configuration_llada.LLaDAConfig",
                "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
                "AutoModel": "modeling_llada.LLaDAModelLM",
            },
            "d_model": config.d_model, "n_layers": config.n_layers, "n_heads": config.n_heads, "n_kv_heads": config.n_kv_heads,
            "mlp_hidden_size": config.d_ff, "max_sequence_length": config.context_length, "rope_theta": config.rope_base,
            "rms_norm_eps": config.norm_eps, "vocab_size": config.vocab_size, "embedding_size": config.embedding_rows,
            "mask_token_id": config.mask_id, "weight_tying": config.tie_embeddings, "dtype": dtype,
            "attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0, **_token_ids(loaded.tokenizer),
        }  # fmt: skip
    names = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "dream": "DreamModel"}
    fields: dict[str, Any] = {
        "model_type": "Dream" if kind == "dream" else kind, "architectures": [names[kind]], "hidden_act": "silu",
        "vocab_size": config.embedding_rows, "hidden_size": config.d_model, "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads,
        "max_position_embeddings": config.context_length, "rope_theta": config.rope_base, "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings, "use_sliding_window": False, "dtype": dtype,
        "mask_token_id": config.mask_id, "shift_logits": config.shift_logits, **_token_ids(loaded.tokenizer),
    }  # fmt: skip
    if kind == "dream":
        fields |= {
            "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
        }
    return fields


def _token_ids(tokenizer: Any) -> dict[str, int | None]:
    """The families' defaults are other models' ids."""
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
