"""Key maps: the names of each family's tensors and config fields, and how their rows combine into ours.

Owns names and row orders, both ways, bit for bit. Knows no file format.

Ours, per block: attention.qkv (all query heads, then key heads, then value heads), mlp.gate_up (gate rows, then up rows).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

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

    embed: str
    norm: str
    head: str
    block: str  # with {} for the layer
    parts: Mapping[str, tuple[str, ...]]

    def parts_of(self, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """The block tensors that a model of this config has in this layout."""
        absent = {"attention.qkv.bias": not config.qkv_bias, "attention.gate.weight": config.gate == "none"}
        return {ours: theirs for ours, theirs in self.parts.items() if not absent.get(ours, False)}

    def rows(self, ours: str, config: ModelConfig) -> list[int]:
        """How many rows each part of one of our tensors has."""
        if ours.startswith("attention.qkv"):
            return qkv_rows(config)
        gate = config.n_heads if config.gate == "headwise" else config.d_model
        return {"mlp.gate_up.weight": [config.d_ff, config.d_ff], "attention.gate.weight": [gate]}.get(ours, [config.d_model])

    def shapes(self, ours: str, config: ModelConfig) -> list[tuple[int, ...]]:
        """The shape of each part of one of our tensors."""
        is_vector, width = ours.endswith("bias") or "norm" in ours, config.d_ff if ours == "mlp.down.weight" else config.d_model
        return [(rows,) if is_vector else (rows, width) for rows in self.rows(ours, config)]

    def join(self, ours: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, ours: str, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        return [part.contiguous() for part in tensor.split(self.rows(ours, config))]

    def read(self, get: Get, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Our blocks and final norm, tensor by tensor, each part's shape checked."""
        for layer in range(config.n_layers):
            for ours, theirs in self.parts_of(config).items():
                names = [self.block.format(layer) + name for name in theirs]
                parts = [get(name) for name in names]
                for name, part, wanted in zip(names, parts, self.shapes(ours, config), strict=True):
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
        names = [name for theirs in self.parts_of(config).values() for name in theirs]
        blocks = {self.block.format(layer) + name for layer in range(config.n_layers) for name in names}
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


def _layout(
    kind: type[Layout], prefix: str, ends: str, norms: str, qkv: str, out: str, gate_up: str, down: str, gate: str = ""
) -> Layout:
    """All names without `.weight`, with blanks between. ends: embedding, final norm, head, the beginning of a block's."""
    embed, norm, head, block = ends.split()
    attention_norm, mlp_norm = norms.split()
    theirs = {"attention_norm": attention_norm, "attention.qkv": qkv, "attention.out": out, "attention.gate": gate}
    theirs |= {"mlp_norm": mlp_norm, "mlp.gate_up": gate_up, "mlp.down": down}
    parts = {f"{ours}.weight": tuple(f"{name}.weight" for name in names.split()) for ours, names in theirs.items() if names}
    parts["attention.qkv.bias"] = tuple(f"{name}.bias" for name in qkv.split())
    return kind(f"{prefix}{embed}.weight", f"{prefix}{norm}.weight", f"{head}.weight", f"{prefix}{block}.{{}}.", parts)


TRANSFORMERS = _layout(
    Layout,
    "model.",
    "embed_tokens norm lm_head layers",
    norms="input_layernorm post_attention_layernorm",
    qkv="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    out="self_attn.o_proj",
    gate_up="mlp.gate_proj mlp.up_proj",
    down="mlp.down_proj",
)
LLADA = _layout(
    Layout,
    "model.transformer.",
    "wte ln_f model.transformer.ff_out blocks",
    norms="attn_norm ff_norm",
    qkv="q_proj k_proj v_proj",
    out="attn_out",
    gate_up="ff_proj up_proj",
    down="ff_out",
)
OFFICIAL = _layout(
    OfficialLayout,
    "transformer.",
    "wte ln_f lm_head h",
    norms="norm_1 norm_2",
    qkv="attn.attn",
    out="attn.proj",
    gate="attn.gate",
    gate_up="mlp.swiglu.w1 mlp.swiglu.w2",
    down="mlp.swiglu.w3",
)
GGUF_QWEN2, GGUF_LLAMA = (
    _layout(
        kind,
        "",
        "token_embd output_norm output blk",
        norms="attn_norm ffn_norm",
        qkv="attn_q attn_k attn_v",
        out="attn_output",
        gate_up="ffn_gate ffn_up",
        down="ffn_down",
    )
    for kind in (Layout, PermutedLayout)
)

# Names of our fields in config.json.
TRANSFORMERS_FIELDS = {
    "vocab_size": "vocab_size",
    "mask_id": "mask_token_id",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "context_length": "max_position_embeddings",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "shift_logits": "shift_logits",
}
LLADA_FIELDS = {
    "vocab_size": "embedding_size",
    "mask_id": "mask_token_id",
    "n_layers": "n_layers",
    "n_heads": "n_heads",
    "n_kv_heads": "n_kv_heads",
    "d_model": "d_model",
    "d_ff": "mlp_hidden_size",
    "context_length": "max_sequence_length",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "qkv_bias": "include_qkv_bias",
    "tie_embeddings": "weight_tying",
}
# What LLaDA's own code can do otherwise.
LLADA_SWITCHES = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "activation_type": "silu",
}
