"""Detect which model a path holds, derive its config, and read its tensors under our names.

Kinds: official (SMDM and the paper's code), qwen2, qwen3, llama and mistral (AR parents, as transformers directories or GGUF),
llada, dream, fast_dllm_qwen and sdar (diffusion models), sinkdlm (our own). The content decides; the user is never asked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkdlm.checkpoint import hub
from sinkdlm.checkpoint.directory import CONFIG, check_size, read_config
from sinkdlm.checkpoint.durable import read_object
from sinkdlm.config.model import MODEL_TYPE, ModelConfig, preset_fields, preset_names
from sinkdlm.errors import ConfigError, ConvertError, check_regular, first_line
from sinkdlm.interop import layouts
from sinkdlm.interop.layouts import Layout, check_shape
from sinkdlm.interop.tensors import TensorFile, open_gguf, open_safetensors, open_torch
from sinkdlm.model.positions import frequencies

AR_KINDS = ("qwen2", "qwen3", "llama", "mistral")
GGUF_KINDS = ("qwen2", "qwen3", "llama")  # Mistral's files are of the llama architecture
FAST_DLLM = "fast_dllm_qwen"  # Fast-dLLM v2: block diffusion on Qwen2.5
SDAR = "sdar"  # block diffusion on Qwen3
SUPPORTED = (
    "official/SMDM .safetensors or .pth; Qwen2, Qwen3, Llama, Mistral, LLaDA, Dream, Fast-dLLM v2, SDAR or sinkdlm directories; "
    "GGUF of Qwen2, Qwen3, Llama or Mistral"
)
DREAM_MASK_ID = 151666  # unused in every Qwen2.5 vocabulary; Dream chose it too
SDAR_MASK_ID = 151669  # "<|MASK|>", the first id after Qwen3's tokens; SDAR chose it too
FAST_DLLM_MASK_ID = 151665  # "|<MASK>|", the first id after Qwen2.5's tokens; their code's default, which config.json leaves out
# Families of block diffusion: the key of the block size, and their code's defaults of it and of [MASK].
BLOCK_KINDS = {FAST_DLLM: ("bd_size", 32, FAST_DLLM_MASK_ID), SDAR: ("block_size", 4, SDAR_MASK_ID)}
GGUF_MARK = b"GGUF"
LLAMA3 = {  # Llama 3's rotary scaling: our fields, transformers' names
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_context": "original_max_position_embeddings",
}
_QWEN3_HEAD_DIM = 128  # Qwen3's default, whatever its width
_MISTRAL_WINDOW = 4096  # Mistral's default
_ROPE_FREQS = "rope_freqs.weight"
SPECIAL = ("bos", "eos", "pad")  # tokens whose ids config.json has
_ODD = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError)
_WRAPPERS = ("_forward_module.", "module.", "_orig_mod.")


@dataclass(frozen=True)
class Source:
    """A model found on disk. `config` is as found: an AR parent's, before it becomes a diffusion model."""

    path: Path
    kind: str
    form: str
    config: ModelConfig
    tensors: TensorFile
    layout: Layout | None  # None: our own names
    prefix: str = ""  # that a training wrapper put before every name
    has_mask: bool = True  # false for an AR parent, whose [MASK] is still to be chosen
    notes: tuple[str, ...] = ()  # on files that disagree
    special_ids: Mapping[str, int] = field(default_factory=dict)  # bos, eos, pad: as config.json has them

    def describe(self) -> str:
        config = self.config
        what = f"{config.n_layers} layers, width {config.d_model}, {config.n_heads} heads ({config.n_kv_heads} kv)"
        millions = config.count_parameters().total / 1e6
        return f"{self.kind} ({self.form}): {what}, vocabulary {config.vocab_size}, {millions:.1f}M parameters"

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under our names, one at a time."""
        if self.layout is None:
            for name in sorted(self.tensors.shapes):
                yield name, self.tensors.get(name)
            return
        try:
            yield from self._read_as(self.layout)
        except ConvertError as failure:
            raise ConvertError(f"{self.tensors.path}: {str(failure).removeprefix(f'{self.tensors.path}: ')}") from None

    def _read_as(self, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        config, names = self.config, {name.removeprefix(self.prefix) for name in self.tensors.shapes}
        # Rotary tables that older tools saved, and GGUF's precomputed frequencies.
        ignorable = {name for name in names if name.endswith(("rotary_emb.inv_freq", _ROPE_FREQS))}
        unknown = sorted(names - ignorable - layout.all_names(config))
        if unknown:
            raise ConvertError(f"unexpected tensor {unknown[0]} ({len(unknown)} in all): a variant not supported")

        def get(name: str) -> Tensor:
            if name not in names:
                raise ConvertError(f"missing tensor {name}")
            return self.tensors.get(self.prefix + name)

        embed = get(layout.embed)
        n_sinks = config.n_lane if self.kind == "official" else 0
        check_shape(layout.embed, embed, (config.embedding_rows + n_sinks, config.d_model))
        yield "embed.weight", embed[: config.embedding_rows]
        if n_sinks:
            yield "sinks", embed[config.embedding_rows :]
        yield from layout.read(get, config)
        if not config.tie_embeddings:
            head = get(layout.head)
            check_shape(layout.head, head, (config.vocab_size, config.d_model))
            yield "lm_head.weight", head
        elif layout.head in names and not torch.equal(get(layout.head).to(embed.dtype), embed):
            # Some readers would use a head that differs from its embedding, and some would not.
            switch = "weight_tying" if self.kind == "llada" else "tie_word_embeddings"
            cure = f"set {switch} there to false, or leave the tensor out"
            raise ConvertError(f"{layout.head} differs from the embedding, to which {CONFIG} ties it; {cure}")


def open_source(path: str | Path, shape: Mapping[str, Any] | None = None) -> Source:
    """Detect what a path, or a name of the hub, holds.

    shape: n_heads and n_kv_heads, for an official file whose size is not in the table."""
    path = hub.find(path)
    shape = dict(shape or {})
    if not path.exists():
        raise ConvertError(f"{path}: no such file or folder{hub.hint(path)}")
    path = model_in(path)
    check_regular(path, ConvertError)
    if path.parent.name == "checkpoints" and path.name.startswith("step-"):
        cure = "finish the run, or let it export a model on its way with --set save.milestones=[STEP]"
        raise ConvertError(f"{path}: a training run's state, not a model; {cure}")
    try:
        source = _open_folder(path, shape) if path.is_dir() else _open_file(path, shape)
    except _ODD as failure:  # values of kinds and sizes that no model has
        told = f"{type(failure).__name__}: {first_line(failure)}"
        raise ConvertError(f"{path}: its config or header is not that of a model: {told}") from None
    check_size(source.path, source.config, source.tensors.shapes.values(), ConvertError)
    if shape and source.kind != "official":
        raise ConvertError(f"{', '.join(shape)}: only an official file leaves the heads open; {source.kind} files record them")
    return source


def model_in(path: Path) -> Path:
    """Return the model of a run folder of `train`; any other path unchanged."""
    if not (path / "recipe.toml").exists() or (path / CONFIG).exists():
        return path
    if not (path / "model").is_dir():
        raise ConvertError(f"{path}: a run that has no model yet: it is written when training ends; run the same `train` to go on")
    return path / "model"


def _open_folder(path: Path, shape: dict[str, Any]) -> Source:
    if (path / CONFIG).exists():
        return _open_directory(path)
    if (path / "adapter_config.json").exists():
        raise ConvertError(f"{path}: an adapter, not a model; take model/ of its run, or merge it into its base with peft")
    files = [file for pattern in ("*.safetensors", "*.pth", "*.gguf") for file in sorted(path.glob(pattern))]
    if len(files) != 1:
        found = f"{len(files)} weight files and no {CONFIG}" if files else f"no {CONFIG} and no weight file"
        raise ConvertError(f"{path}: {found}; supported: {SUPPORTED}")
    return _open_file(files[0], shape)


def _open_file(path: Path, shape: dict[str, Any]) -> Source:
    """Open a file by its first bytes, not by its ending."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as failure:
        raise ConvertError(f"{path}: cannot be read: {failure.strerror}") from None
    if start.startswith(GGUF_MARK):
        return _open_gguf(path)
    # A safetensors header begins at the ninth byte. Its length, before it, may begin as a pickle does.
    if start[8:9] == b"{":
        return _open_official(open_safetensors(path), "safetensors", shape)
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return _open_official(open_torch(path), "torch file", shape)
    if path.suffix == ".safetensors":
        return _open_official(open_safetensors(path), "safetensors", shape)
    raise ConvertError(f"{path}: not recognised; supported: {SUPPORTED}")


def _open_official(tensors: TensorFile, form: str, shape: dict[str, Any]) -> Source:
    shapes, layout = tensors.shapes, layouts.OFFICIAL
    prefix = next((wrapper for wrapper in _WRAPPERS if wrapper + layout.embed in shapes), "")
    embed, head = prefix + layout.embed, prefix + layout.head
    block = prefix + layout.block.format(0)
    up = block + layout.parts["mlp.gate_up.weight"][0]
    for name in (embed, head, up):
        if name not in shapes:
            raise ConvertError(f"{tensors.path}: not an official state dict: {name} is missing; supported: {SUPPORTED}")
    (rows, width), vocab, d_ff = shapes[embed], shapes[head][0], shapes[up][0]
    n_layers = 1 + max(int(name.removeprefix(prefix).split(".")[2]) for name in shapes if ".h." in name)
    n_sinks = rows - vocab - 1
    if n_sinks not in (0, 1):
        raise ConvertError(
            f"{tensors.path}: {embed} has {rows} rows and {head} {vocab}: "
            f"expected one more ([MASK]: vanilla or gate) or two more ([MASK] and the sink)"
        )
    gate = "elementwise" if block + layout.parts["attention.gate.weight"][0] in shapes else "none"
    heads = _heads_of(tensors.path, n_layers, width, d_ff, shape)
    found = {"vocab_size": vocab, "n_layers": n_layers, "d_model": width, "d_ff": d_ff, "n_sinks": n_sinks, "gate": gate}
    config = _config(tensors.path, {**heads, **found})
    variant = " and ".join(["sink"] * n_sinks + ["gate"] * (gate != "none")) or "vanilla"
    return Source(tensors.path, "official", f"{variant}, {form}", config, tensors, layout, prefix)


def _heads_of(path: Path, n_layers: int, width: int, d_ff: int, shape: dict[str, Any]) -> dict[str, Any]:
    """Find the number of heads in the table of sizes, or in what the user set: a state dict does not tell it."""
    if "n_heads" in shape:
        return shape
    for name in preset_names():
        preset = preset_fields(name)
        if name.startswith("smdm-") and (preset["n_layers"], preset["d_model"], preset["d_ff"]) == (n_layers, width, d_ff):
            return {"n_heads": preset["n_heads"], **shape}
    raise ConvertError(
        f"{path}: {n_layers} layers of width {width} and feed-forward {d_ff} is not an SMDM size, and weights do not tell "
        f"the number of heads: give it with --set n_heads=N"
    )


def _config(path: Path, fields: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig(**fields)
    except ConfigError as failure:
        raise ConvertError(f"{path}: {failure}") from None


def _open_directory(path: Path) -> Source:
    fields = read_object(path / CONFIG, ConvertError)
    kind, family = fields.get("model_type"), str(fields.get("model_type")).lower()
    if kind == MODEL_TYPE:
        return Source(path, MODEL_TYPE, "own checkpoint", read_config(path), open_safetensors(path), None)
    if family not in (*AR_KINDS, "dream", "llada", *BLOCK_KINDS):
        raise ConvertError(f"{path / CONFIG}: model_type {kind!r} is not supported; supported: {SUPPORTED}")
    reader = _llada if family == "llada" else _llama_like
    try:
        config = _config(path / CONFIG, reader(path / CONFIG, family, fields))
    except KeyError as failure:
        raise ConvertError(f"{path / CONFIG}: no {failure.args[0]}") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as failure:
        raise ConvertError(f"{path / CONFIG}: a value of the wrong kind: {failure}") from None
    layout = layouts.LLADA if family == "llada" else layouts.TRANSFORMERS
    tensors = open_safetensors(path)
    # A diffusion model in its parent's architecture records its [MASK].
    has_mask = family not in AR_KINDS or fields.get("mask_token_id") is not None
    notes: tuple[str, ...] = ()
    if not config.tie_embeddings and layout.head not in tensors.shapes and family in AR_KINDS:
        config = config.replace(tie_embeddings=True)
        notes = (f"no {layout.head} among the weights: the head is tied to the embedding",)
    if family == SDAR and fields.get("block_size") is None:
        notes = (f"{CONFIG} tells no block_size: blocks have {config.block_size} tokens, as in their code; --set block_size=N",)
    special = {name: fields.get(f"{name}_token_id") for name in SPECIAL}
    ids = {name: value for name, value in special.items() if isinstance(value, int)}
    form = "transformers directory"
    return Source(path, family, form, config, tensors, layout, has_mask=has_mask, notes=notes, special_ids=ids)


def _refuse(path: Path, fields: Mapping[str, Any], **wanted: Any) -> None:
    """Refuse a config that sets a switch to anything but what our model does."""
    for key, value in wanted.items():
        if fields.get(key, value) not in (value, None):
            raise ConvertError(f"{path}: {key} = {fields[key]!r} is not supported, only {value!r}")


def _llama_like(path: Path, family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the config of a family that has Llama's field names: all but LLaDA."""
    biased, normed = family in ("qwen2", "dream", FAST_DLLM), family in ("qwen3", SDAR)
    _refuse(path, fields, hidden_act="silu", mlp_bias=False, use_sliding_window=False, partial_rotary_factor=1.0)
    _refuse(path, fields, rope_interleaved=False, **({} if biased else {"attention_bias": False}))
    if family == "mistral":
        _refuse_window(path, fields)
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    theirs = {"num_key_value_heads": heads, "rope_theta": 10000.0, "tie_word_embeddings": False}
    theirs["head_dim"] = _QWEN3_HEAD_DIM if normed else width // heads
    if family in ("dream", FAST_DLLM):  # their code knows no other width
        _refuse(path, fields, head_dim=width // heads)
    theirs["shift_logits"] = family in ("dream", FAST_DLLM)
    if family in AR_KINDS:  # an existing row, so that the table keeps its size until [MASK] is chosen
        theirs["mask_token_id"] = 0
    ours = {"qkv_bias": biased, "qk_norm": normed, **_rotary_scaling(path, fields)}
    if family in BLOCK_KINDS:
        key, size, theirs["mask_token_id"] = BLOCK_KINDS[family]
        ours["block_size"] = _given(fields).get(key, size)
    theirs |= _given(fields) | _given({"rope_theta": (fields.get("rope_parameters") or {}).get("rope_theta")})
    return _ours(layouts.TRANSFORMERS_FIELDS, theirs) | ours


def _refuse_window(path: Path, fields: Mapping[str, Any]) -> None:
    """Refuse Mistral's sliding window, unless no row is longer."""
    window, context = fields.get("sliding_window", _MISTRAL_WINDOW), fields["max_position_embeddings"]
    if window is not None and window < context:
        cure = f"for rows of up to {window} tokens, which it does not cut, set max_position_embeddings = {window} there"
        raise ConvertError(f"{path}: sliding_window = {window} is not supported; {cure}")


def _rotary_scaling(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return our fields of Llama 3's scaling, from rope_scaling or from rope_parameters, which transformers 5 writes."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    _refuse(path, scaling, partial_rotary_factor=1.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", None):
        return {}
    if kind != "llama3":
        raise ConvertError(f"{path}: rotary scaling {kind!r} is not supported, only 'default' and 'llama3'")
    missing = [name for name in LLAMA3.values() if name not in scaling]
    if missing:
        raise ConvertError(f"{path}: rotary scaling 'llama3' has no {missing[0]}")
    return {ours: scaling[name] for ours, name in LLAMA3.items()}


def _llada(path: Path, family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    off = ("attention_layer_norm", "scale_logits", "input_emb_norm", "bias_for_layer_norm")
    _refuse(path, fields, **layouts.LLADA_SWITCHES, **dict.fromkeys(off, False))
    theirs = {"n_kv_heads": fields["n_heads"], "rms_norm_eps": 1e-5, "include_qkv_bias": False, "weight_tying": True}
    theirs |= {"embedding_size": fields["vocab_size"], "mlp_hidden_size": int(fields.get("mlp_ratio", 0)) * int(fields["d_model"])}
    return _ours(layouts.LLADA_FIELDS, theirs | _given(fields))


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _ours(names: Mapping[str, str], theirs: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: theirs[name] for ours, name in names.items()}


def _open_gguf(path: Path) -> Source:
    file = open_gguf(path)
    family = file.facts.get("general.architecture")
    if family not in GGUF_KINDS:
        raise ConvertError(f"{path}: GGUF architecture {family!r} is not supported, only {', '.join(GGUF_KINDS)}")

    def fact(name: str, default: Any = None) -> Any:
        value = file.facts.get(f"{family}.{name}", default)
        if value is None:
            raise ConvertError(f"{path}: no {family}.{name}")
        return value

    if fact("rope.scaling.type", "none") != "none":
        raise ConvertError(f"{path}: rotary scaling {fact('rope.scaling.type')!r} is not supported")
    layout = layouts.GGUF_LLAMA if family == "llama" else layouts.GGUF
    if layout.embed not in file.shapes:
        raise ConvertError(f"{path}: missing tensor {layout.embed}")
    heads = int(fact("attention.head_count"))
    width = int(fact("attention.key_length", int(fact("embedding_length")) // heads))
    if int(fact("rope.dimension_count", width)) != width:
        raise ConvertError(f"{path}: partial rotary ({fact('rope.dimension_count')} of {width}) is not supported")
    counts = {"n_layers": "block_count", "d_model": "embedding_length", "d_ff": "feed_forward_length"}
    fields = {ours: int(fact(name)) for ours, name in counts.items()} | {
        "vocab_size": file.shapes[layout.embed][0],
        "mask_id": 0,
        "n_heads": heads,
        "n_kv_heads": int(fact("attention.head_count_kv", heads)),
        "head_dim": width,
        "context_length": int(fact("context_length")),
        "rope_base": float(fact("rope.freq_base", 10000.0)),
        # Stored as float32: 1e-5 comes back as 9.999999747e-06.
        "norm_eps": float(f"{float(fact('attention.layer_norm_rms_epsilon')):.6g}"),
        "qkv_bias": "blk.0.attn_q.bias" in file.shapes,
        "qk_norm": "blk.0.attn_q_norm.weight" in file.shapes,
        "tie_embeddings": layout.head not in file.shapes,
    }
    config = _config(path, fields)
    if _ROPE_FREQS in file.shapes:
        config = _scaled(path, config, file.get(_ROPE_FREQS))
    return Source(path, family, "GGUF", config, file, layout, has_mask=False)


def _scaled(path: Path, config: ModelConfig, slowdown: Tensor) -> ModelConfig:
    """Find the rotary scaling of a GGUF file, which tells how much slower each pair turns, but not the numbers behind it. Llama 3.1
    to 3.3 differ in the factor alone."""
    scaled = config.replace(rope_factor=max(1.0, float(slowdown.max())))
    wanted = frequencies(config, torch.float64) / frequencies(scaled, torch.float64)
    if slowdown.shape != wanted.shape or not torch.allclose(slowdown.double(), wanted, rtol=1e-4):
        cure = "convert the model from its transformers directory"
        raise ConvertError(f"{path}: {_ROPE_FREQS} is rotary scaling of a kind that is not supported, only Llama 3's; {cure}")
    return scaled
