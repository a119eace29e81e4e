"""Write models in the official layout or as transformers directories, and convert from path to path."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

from sinkdlm.checkpoint.directory import CONFIG, WEIGHTS, Loaded, read_provenance, save, write_weights, written_aside
from sinkdlm.checkpoint.tokenizer import hushed
from sinkdlm.config.model import MODEL_TYPE, ModelConfig
from sinkdlm.errors import ConvertError
from sinkdlm.interop import layouts
from sinkdlm.interop.adapt import SHAPE_KEYS, family_of, load_any, notes_of, own_history, special_ids_of
from sinkdlm.interop.sources import BLOCK_KINDS, FAST_DLLM, FAST_DLLM_MASK_ID, LLAMA3, SDAR, SPECIAL, open_source
from sinkdlm.interop.tokenizer import named_mask

Target = Literal["sinkdlm", "official", "hf"]


def convert(
    source: str | Path, destination: str | Path, to: Target = "sinkdlm", *, standalone: bool = False, **options: Any
) -> dict[str, Any]:
    """Read any supported model and write it as `to`; return what was found and done. options: those of load_any."""
    destination = Path(destination)
    if standalone and to != "hf":
        raise ConvertError("--standalone: works only with --to hf")
    if to != "sinkdlm" and destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConvertError(f"{destination}: exists and is not empty; choose another folder or remove it")
    _check_no_run(destination)
    changes = dict(options.get("changes") or {})
    found = open_source(source, {key: value for key, value in changes.items() if key in SHAPE_KEYS})
    loaded = load_any(found, **options)
    earlier = notes_of(read_provenance(found.path)) if found.kind == MODEL_TYPE else []
    notes = notes_of(loaded.provenance)[len(earlier) :]  # without those of when the checkpoint was made
    if to == "official":
        wrote = write_official(destination, loaded)
        notes += _untold(destination, loaded.config)
    elif to == "hf":
        wrote = write_transformers(destination, loaded, standalone=standalone)
        notes += [] if standalone else _unread(loaded)
    else:
        save(destination, loaded.model, loaded.tokenizer, own_history(loaded.provenance))
        wrote = "sinkdlm checkpoint"
    return {
        "found": found.describe(),
        "notes": notes,
        "wrote": wrote,
        "path": str(destination),
        "tokenizer": type(loaded.tokenizer).__name__ if loaded.tokenizer is not None else None,
        "dtype": loaded.dtype,
        "config": loaded.config.to_dict(),
    }


def _check_no_run(destination: Path) -> None:
    """Refuse to replace what a run has trained. Other checkpoints may be overwritten."""
    place = destination.resolve()
    owned = [place.parent] if place.name in ("model", "ema") else [place.parents[1]] if place.parent.name == "milestones" else []
    if place.exists() and owned and (owned[0] / "run.json").is_file():
        raise ConvertError(f"{destination}: was trained by the run in {owned[0]}; choose another folder")


def write_official(destination: Path, loaded: Loaded) -> str:
    """Write DST/model.safetensors, with the authors' keys, shapes and embedding rows."""
    config = loaded.config
    allowed: dict[str, tuple[Any, ...]] = {
        "qkv_bias": (False,),
        "tie_embeddings": (False,),
        "shift_logits": (False,),
        "block_size": (None,),
        "mask_id": (config.vocab_size,),
        "norm_eps": (1e-5,),
        "rope_base": (10000.0,),
        "rope_factor": (1.0,),
        "head_dim": (config.d_model // config.n_heads,),
        "qk_norm": (False,),
        "n_sinks": (0, 1),
        "gate": ("none", "elementwise"),
    }
    if config.n_sinks:
        allowed |= {"sink_kind": ("isolated",), "sink_position": ("front",), "sink_value": ("learned",)}
    odd = [
        f"{key} = {getattr(config, key)!r} is not supported there, only {' or '.join(map(repr, values))}"
        for key, values in allowed.items()
        if getattr(config, key) not in values
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
    """Note the config fields that the official form does not record."""
    heads = {key: getattr(config, key) for key in SHAPE_KEYS}
    told = open_source(path, heads).config.to_dict()
    try:
        found = open_source(path).config
        told |= {key: getattr(found, key) for key in SHAPE_KEYS}
    except ConvertError:  # a size that is not in the table
        told |= dict.fromkeys(SHAPE_KEYS)
    lost = [f"{key}={value}" for key, value in config.to_dict().items() if told[key] != value]
    return [f"these weights do not tell {', '.join(lost)}: give them with --set when they are read again"] if lost else []


def _unread(loaded: Loaded) -> list[str]:
    """Note that Fast-dLLM v2's and SDAR's code trains with its config's block size, but decodes with its own unless it is told."""
    size, kind = loaded.config.block_size, parent_architecture(loaded)
    if kind is None or kind not in BLOCK_KINDS or size == BLOCK_KINDS[kind][1]:
        return []
    theirs = BLOCK_KINDS[kind][1]
    sdar, fast_dllm = (
        f"--block_length {size} to their generate.py, which takes",
        f"block_size={size} to their generate() and forward(), which take",
    )
    return [f"blocks are of {size} tokens: give {sdar if kind == SDAR else fast_dllm} {theirs}"]


def write_transformers(destination: Path, loaded: Loaded, *, standalone: bool) -> str:
    """Write a vanilla model in its parent's architecture where there is one; all others as our class, registered or standalone."""
    kind = None if standalone else parent_architecture(loaded)
    with written_aside(destination) as aside:
        if kind is None:
            from sinkdlm.interop.hf import SinkDLMForMaskedLM
            from sinkdlm.interop.standalone import make_standalone

            with hushed():
                SinkDLMForMaskedLM.wrap(loaded.model).save_pretrained(aside)
            if standalone:
                make_standalone(aside)
            card = _card(destination.name, loaded, standalone=standalone)
            (aside / "README.md").write_text(card, encoding="utf-8")
        else:
            config = _parent_config(kind, loaded)
            ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
            for name, content in ((CONFIG, config), ("generation_config.json", ids)):  # Dream's code asks for the second
                (aside / name).write_text(json.dumps(content, indent=2) + "\n")
            layout, state = layouts.LLADA if kind == "llada" else layouts.TRANSFORMERS, loaded.model.state_dict()
            head = {} if loaded.config.tie_embeddings else {layout.head: state["lm_head.weight"]}
            write_weights(aside, {layout.embed: state["embed.weight"], **layout.write(state, loaded.config), **head})
        if loaded.tokenizer is not None:
            named_mask(loaded.tokenizer, loaded.config).save_pretrained(aside)
    if kind is not None:
        return f"transformers directory ({kind})"
    return "transformers directory (sinkdlm, with its own modelling file)" if standalone else "transformers directory (sinkdlm)"


_CARD = """---
library_name: transformers
tags: [masked-diffusion, attention-sink]
---

# {name}

A masked diffusion language model, written by sinkdlm convert.

```python
{imports}

model = AutoModelForMaskedLM.from_pretrained("{name}"{trust})
{rows}
found = model.diffusion_generate(rows, max_new_tokens={new}, temperature=0.7, seed=0)
print({shown})
```
"""
_READ = """tokenizer = AutoTokenizer.from_pretrained("{name}")
rows = tokenizer("a", return_tensors="pt")["input_ids"]"""


def _card(name: str, loaded: Loaded, *, standalone: bool) -> str:
    """How to write with the model in transformers."""
    imports = [] if standalone else ["import sinkdlm.interop  # registers the class"]
    if loaded.tokenizer is None:
        imports = ["import torch", *imports, "from transformers import AutoModelForMaskedLM"]
        rows, shown = "rows = torch.tensor([[0, 1]])", "found"
    else:
        imports += ["from transformers import AutoModelForMaskedLM, AutoTokenizer"]
        rows, shown = _READ.format(name=name), "tokenizer.decode(found[0])"
    new = max(1, min(32, loaded.config.context_length // 2))
    trust = ", trust_remote_code=True" if standalone else ""
    return _CARD.format(name=name, imports="\n".join(imports), rows=rows, trust=trust, new=new, shown=shown)


_FAST_DLLM_CODE = {
    "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
    "AutoModel": "modeling.Fast_dLLM_QwenModel",
    "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
}
_SDAR_CODE = {
    "AutoConfig": "configuration_sdar.SDARConfig",
    "AutoModel": "modeling_sdar.SDARModel",
    "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
}
_LLADA_CODE = dict.fromkeys(("AutoModelForCausalLM", "AutoModel"), "modeling_llada.LLaDAModelLM")
# Kind: (model type, class, where its code is if not in transformers).
_ARCHITECTURES: dict[str, tuple[str, str, dict[str, str]]] = {
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {}),
    "llama": ("llama", "LlamaForCausalLM", {}),
    "mistral": ("mistral", "MistralForCausalLM", {}),
    "dream": ("Dream", "DreamModel", {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"}),
    "llada": ("llada", "LLaDAModelLM", {"AutoConfig": "configuration_llada.LLaDAConfig", **_LLADA_CODE}),
    FAST_DLLM: ("Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM", _FAST_DLLM_CODE),
    SDAR: ("sdar", "SDARForCausalLM", _SDAR_CODE),
}


def parent_architecture(loaded: Loaded) -> str | None:
    """The family that can hold this model unchanged: its parent's, or for one with blocks Fast-dLLM v2's (Qwen2) or SDAR's (Qwen3);
    else None."""
    config, kind = loaded.config, family_of(loaded.provenance)
    if config.block_size is not None:
        kind = {"qwen2": FAST_DLLM, "qwen3": SDAR}.get(kind or "", kind)
    if config.n_sinks or config.gate != "none" or kind not in _ARCHITECTURES:
        return None
    if config.embedding_rows != config.vocab_size and not config.tie_embeddings:
        return None  # a [MASK] row that the head lacks: these families have equally many embedding and head rows
    if kind in ("llada", "dream") and config.shift_logits != (kind == "dream"):
        return None  # Dream's own code shifts, LLaDA's does not
    if kind in ("llama", "mistral", "qwen3", SDAR) and config.qkv_bias:
        return None  # their biases are of the output projection too
    if (config.block_size is not None) != (kind in BLOCK_KINDS) or (kind == SDAR and config.shift_logits):
        return None
    # Their code shifts, has biases, and takes this id where its caller gives none.
    if kind == FAST_DLLM and (config.shift_logits, config.qkv_bias, config.mask_id) != (True, True, FAST_DLLM_MASK_ID):
        return None
    return kind


def _parent_config(kind: str, loaded: Loaded) -> dict[str, Any]:
    config = loaded.config
    names = layouts.LLADA_FIELDS if kind == "llada" else layouts.TRANSFORMERS_FIELDS
    found = {theirs: getattr(config, ours) for ours, theirs in names.items()}
    found["dtype"] = loaded.dtype
    ids = special_ids_of(loaded.provenance)
    for name in SPECIAL:  # the families' defaults are other models' ids
        own = getattr(loaded.tokenizer, f"{name}_token_id", None)
        found[f"{name}_token_id"] = ids.get(name) if own is None else own
    if kind == "llada":
        found |= {**layouts.LLADA_SWITCHES, "vocab_size": config.vocab_size, "embedding_size": config.embedding_rows}
        found |= dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.0)
    else:
        found |= {"vocab_size": config.embedding_rows, "hidden_act": "silu", "use_sliding_window": False}
    if kind == "mistral":
        found["sliding_window"] = None
    if config.rope_factor != 1:
        found["rope_scaling"] = {"rope_type": "llama3", **{name: getattr(config, ours) for ours, name in LLAMA3.items()}}
    if kind in BLOCK_KINDS:
        found[BLOCK_KINDS[kind][0]] = config.block_size
    if kind == SDAR:
        found["fuse_cross_entropy"] = True  # a switch of theirs that has no default
    model_type, architecture, code = _ARCHITECTURES[kind]
    return found | {"model_type": model_type, "architectures": [architecture]} | ({"auto_map": code} if code else {})
