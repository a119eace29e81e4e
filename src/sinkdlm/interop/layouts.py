"""Key maps: the tensor names of each family, and how their rows combine into ours.

Owns names and row orders, both ways, bit for bit. Knows no file format.

Ours, per block: attention.qkv (all query heads, then key heads, then value heads), mlp.gate_up (gate rows, then up rows).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sinkdlm.config.model import ModelConfig
from sinkdlm.errors import ConvertError

Get = Callable[[str], Tensor]


def qkv_rows(config: ModelConfig) -> list[int]:
    """Rows of queries, keys and values in ours."""
    return [config.d_model, *[config.n_kv_heads * config.head_dim] * 2]


@dataclass(frozen=True)
class Layout:
    """One family's names. `parts` maps our tensor within a block to theirs, stacked along rows in this order."""

    name: str
    embed: str
    norm: str
    head: str
    block: str  # with {} for the layer
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def parts_of(self, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """The block tensors that a model of this config has in this layout."""
        absent = {"attention.qkv.bias": not config.qkv_bias, "attention.gate.weight": config.gate == "none"}
        return {ours: theirs for ours, theirs in self.parts.items() if not absent.get(ours, False)}

    def rows(self, ours: str, config: ModelConfig) -> list[int]:
        """How many rows each part of one of our tensors has."""
        if ours.startswith("attention.qkv"):
            return qkv_rows(config)
        gate = config.n_heads if config.gate == "headwise" else config.d_model
        wide = {"mlp.gate_up.weight": [config.d_ff, config.d_ff], "attention.gate.weight": [gate]}
        return wide.get(ours, [config.d_model])

    def shape(self, ours: str, rows: int, config: ModelConfig) -> tuple[int, ...]:
        if ours.endswith("bias") or "norm" in ours:
            return (rows,)
        return (rows, config.d_ff if ours == "mlp.down.weight" else config.d_model)

    def join(self, ours: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, ours: str, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        return [part.contiguous() for part in tensor.split(self.rows(ours, config))]

    def part_shapes(self, ours: str, config: ModelConfig) -> list[tuple[int, ...]]:
        return [self.shape(ours, rows, config) for rows in self.rows(ours, config)]

    def read(self, get: Get, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Our blocks and final norm, tensor by tensor, each part's shape checked."""
        for layer in range(config.n_layers):
            for ours, theirs in self.parts_of(config).items():
                names = [self.block.format(layer) + name for name in theirs]
                parts = [get(name) for name in names]
                for name, part, wanted in zip(names, parts, self.part_shapes(ours, config), strict=True):
                    check_shape(name, part, wanted)
                yield f"blocks.{layer}.{ours}", self.join(ours, parts, config)
        norm = get(self.norm)
        check_shape(self.norm, norm, (config.d_model,))
        yield "norm.weight", norm

    def write(self, state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Their names and rows for our blocks and final norm."""
        out = {}
        for layer in range(config.n_layers):
            for ours, theirs in self.parts_of(config).items():
                pieces = self.split(ours, state[f"blocks.{layer}.{ours}"], config)
                out.update({self.block.format(layer) + name: piece for name, piece in zip(theirs, pieces, strict=True)})
        out[self.norm] = state["norm.weight"]
        return out

    def all_names(self, config: ModelConfig) -> set[str]:
        blocks = [
            self.block.format(layer) + name
            for layer in range(config.n_layers)
            for theirs in self.parts_of(config).values()
            for name in theirs
        ]
        return {*blocks, self.embed, self.norm, self.head}


def check_shape(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise ConvertError(f"{name} has shape {tuple(tensor.shape)}, the model it belongs to has {wanted}")


class OfficialLayout(Layout):
    """SMDM's: query, key and value rows interleaved per key/value group: its queries, its key, its value."""

    def rows(self, ours: str, config: ModelConfig) -> list[int]:
        return [sum(qkv_rows(config))] if ours.startswith("attention.qkv") else super().rows(ours, config)

    def _groups(self, config: ModelConfig) -> tuple[int, int, int]:
        return config.n_kv_heads, config.n_heads // config.n_kv_heads, config.head_dim

    def join(self, ours: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
        if not ours.startswith("attention.qkv"):
            return super().join(ours, parts, config)
        groups, queries, width = self._groups(config)
        heads = parts[0].unflatten(0, (groups, queries + 2, width))
        q, k, v = heads[:, :queries], heads[:, queries : queries + 1], heads[:, queries + 1 :]
        return torch.cat([part.flatten(0, 2) for part in (q, k, v)])

    def split(self, ours: str, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        if not ours.startswith("attention.qkv"):
            return super().split(ours, tensor, config)
        groups, queries, width = self._groups(config)
        q, k, v = tensor.split(qkv_rows(config))
        pieces = [q.unflatten(0, (groups, queries, width)), *(part.unflatten(0, (groups, 1, width)) for part in (k, v))]
        return [torch.cat(pieces, dim=1).flatten(0, 2).contiguous()]


class PermutedLayout(Layout):
    """GGUF files of the llama architecture: query and key rows permuted for interleaved rotary pairs."""

    def join(self, ours: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
        if ours.startswith("attention.qkv"):
            half = config.head_dim // 2
            parts = [
                part.unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2) if index < 2 else part
                for index, part in enumerate(parts)
            ]
        return super().join(ours, parts, config)


def _named(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names.split())


TRANSFORMERS = Layout(
    name="transformers",
    embed="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    block="model.layers.{}.",
    parts={
        "attention_norm.weight": ("input_layernorm.weight",),
        "attention.qkv.weight": _named("self_attn.", "q_proj.weight k_proj.weight v_proj.weight"),
        "attention.qkv.bias": _named("self_attn.", "q_proj.bias k_proj.bias v_proj.bias"),
        "attention.out.weight": ("self_attn.o_proj.weight",),
        "mlp_norm.weight": ("post_attention_layernorm.weight",),
        "mlp.gate_up.weight": _named("mlp.", "gate_proj.weight up_proj.weight"),
        "mlp.down.weight": ("mlp.down_proj.weight",),
    },
)
LLADA = Layout(
    name="llada",
    embed="model.transformer.wte.weight",
    norm="model.transformer.ln_f.weight",
    head="model.transformer.ff_out.weight",
    block="model.transformer.blocks.{}.",
    parts={
        "attention_norm.weight": ("attn_norm.weight",),
        "attention.qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
        "attention.qkv.bias": ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
        "attention.out.weight": ("attn_out.weight",),
        "mlp_norm.weight": ("ff_norm.weight",),
        "mlp.gate_up.weight": ("ff_proj.weight", "up_proj.weight"),
        "mlp.down.weight": ("ff_out.weight",),
    },
)
OFFICIAL = OfficialLayout(
    name="official",
    embed="transformer.wte.weight",
    norm="transformer.ln_f.weight",
    head="lm_head.weight",
    block="transformer.h.{}.",
    parts={
        "attention_norm.weight": ("norm_1.weight",),
        "attention.qkv.weight": ("attn.attn.weight",),
        "attention.out.weight": ("attn.proj.weight",),
        "attention.gate.weight": ("attn.gate.weight",),
        "mlp_norm.weight": ("norm_2.weight",),
        "mlp.gate_up.weight": ("mlp.swiglu.w1.weight", "mlp.swiglu.w2.weight"),
        "mlp.down.weight": ("mlp.swiglu.w3.weight",),
    },
)
_GGUF_PARTS: dict[str, tuple[str, ...]] = {
    "attention_norm.weight": ("attn_norm.weight",),
    "attention.qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "attention.qkv.bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "attention.out.weight": ("attn_output.weight",),
    "mlp_norm.weight": ("ffn_norm.weight",),
    "mlp.gate_up.weight": ("ffn_gate.weight", "ffn_up.weight"),
    "mlp.down.weight": ("ffn_down.weight",),
}
_GGUF_NAMES = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight", "block": "blk.{}."}
GGUF_QWEN2 = Layout(name="gguf", parts=_GGUF_PARTS, **_GGUF_NAMES)
GGUF_LLAMA = PermutedLayout(name="gguf", parts=_GGUF_PARTS, **_GGUF_NAMES)
