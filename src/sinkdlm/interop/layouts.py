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

    def blocks(self, config: ModelConfig) -> Iterator[tuple[str, str, list[str]]]:
        """The block tensors of a model of this config: our name within a block, our whole name, their names."""
        absent = {"attention.qkv.bias": not config.qkv_bias, "attention.gate.weight": config.gate == "none"}
        for layer in range(config.n_layers):
            for ours, theirs in self.parts.items():
                if not absent.get(ours, False):
                    yield ours, f"blocks.{layer}.{ours}", [self.block.format(layer) + name for name in theirs]

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
        for ours, whole, names in self.blocks(config):
            parts = [get(name) for name in names]
            for name, part, wanted in zip(names, parts, self.shapes(ours, config), strict=True):
                check_shape(name, part, wanted)
            yield whole, self.join(ours, parts, config)
        norm = get(self.norm)
        check_shape(self.norm, norm, (config.d_model,))
        yield "norm.weight", norm

    def write(self, state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Their names and rows for our blocks and final norm."""
        out: dict[str, Tensor] = {}
        for ours, whole, names in self.blocks(config):
            out.update(zip(names, self.split(ours, state[whole], config), strict=True))
        return {**out, self.norm: state["norm.weight"]}

    def all_names(self, config: ModelConfig) -> set[str]:
        blocks = (name for _, _, names in self.blocks(config) for name in names)
        return {*blocks, self.embed, self.norm, self.head}


def check_shape(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise ConvertError(f"{name} has shape {tuple(tensor.shape)}, the model it belongs to has {wanted}")


class OfficialLayout(Layout):
    """SMDM's: query, key and value rows interleaved per key/value group: its queries, its key, its value."""

    def rows(self, ours: str, config: ModelConfig) -> list[int]:
        return [sum(qkv_rows(config))] if ours.startswith("attention.qkv") else super().rows(ours, config)

    def _order(self, config: ModelConfig) -> Tensor:
        """Where our query rows, key rows and value rows stand in theirs."""
        groups = torch.arange(sum(qkv_rows(config))).unflatten(0, (config.n_kv_heads, -1, config.head_dim))
        return torch.cat([part.flatten() for part in (groups[:, :-2], groups[:, -2], groups[:, -1])])

    def join(self, ours: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
        joined = super().join(ours, parts, config)
        return joined[self._order(config)] if ours.startswith("attention.qkv") else joined

    def split(self, ours: str, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        if ours.startswith("attention.qkv"):
            tensor = tensor[self._order(config).argsort()]
        return super().split(ours, tensor, config)


class PermutedLayout(Layout):
    """GGUF files of the llama architecture: query and key rows permuted for interleaved rotary pairs."""

    def join(self, ours: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
        if ours.startswith("attention.qkv"):
            half = config.head_dim // 2
            permuted = [part.unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2) for part in parts[:2]]
            parts = permuted + parts[2:]
        return super().join(ours, parts, config)


# Their names, without `.weight`; {} stands for q, k and v; commas between the parts of one of our tensors; - for none.
_NAMES = """
                TRANSFORMERS               LLADA                     OFFICIAL                     GGUF
embed           model.embed_tokens         model.transformer.wte     transformer.wte              token_embd
norm            model.norm                 model.transformer.ln_f    transformer.ln_f             output_norm
head            lm_head                    model.transformer.ff_out  lm_head                      output
block           model.layers               model.transformer.blocks  transformer.h                blk
attention_norm  input_layernorm            attn_norm                 norm_1                       attn_norm
attention.qkv   self_attn.{}_proj          {}_proj                   attn.attn                    attn_{}
attention.out   self_attn.o_proj           attn_out                  attn.proj                    attn_output
attention.gate  -                          -                         attn.gate                    -
mlp_norm        post_attention_layernorm   ff_norm                   norm_2                       ffn_norm
mlp.gate_up     mlp.gate_proj,mlp.up_proj  ff_proj,up_proj           mlp.swiglu.w1,mlp.swiglu.w2  ffn_gate,ffn_up
mlp.down        mlp.down_proj              ff_out                    mlp.swiglu.w3                ffn_down
"""
_FAMILIES, *_TENSORS = (line.split() for line in _NAMES.strip().splitlines())


def _layout(kind: type[Layout], family: str) -> Layout:
    column = _FAMILIES.index(family)
    names = {ours: theirs[column].split(",") for ours, *theirs in _TENSORS if theirs[column] != "-"}
    names["attention.qkv"] = list(dict.fromkeys(names["attention.qkv"][0].format(letter) for letter in "qkv"))
    embed, norm, head, block = (names.pop(end)[0] for end in ("embed", "norm", "head", "block"))
    parts = {f"{ours}.weight": tuple(f"{name}.weight" for name in theirs) for ours, theirs in names.items()}
    parts["attention.qkv.bias"] = tuple(f"{name}.bias" for name in names["attention.qkv"])
    return kind(f"{embed}.weight", f"{norm}.weight", f"{head}.weight", f"{block}.{{}}.", parts)


TRANSFORMERS, LLADA, OFFICIAL = _layout(Layout, "TRANSFORMERS"), _layout(Layout, "LLADA"), _layout(OfficialLayout, "OFFICIAL")
GGUF_QWEN2, GGUF_LLAMA = _layout(Layout, "GGUF"), _layout(PermutedLayout, "GGUF")

# Names of our fields in config.json: of the transformers families, and of LLaDA.
_FIELDS = """
vocab_size      vocab_size               embedding_size
mask_id         mask_token_id            mask_token_id
n_layers        num_hidden_layers        n_layers
n_heads         num_attention_heads      n_heads
n_kv_heads      num_key_value_heads      n_kv_heads
d_model         hidden_size              d_model
d_ff            intermediate_size        mlp_hidden_size
context_length  max_position_embeddings  max_sequence_length
rope_base       rope_theta               rope_theta
norm_eps        rms_norm_eps             rms_norm_eps
qkv_bias        -                        include_qkv_bias
tie_embeddings  tie_word_embeddings      weight_tying
shift_logits    shift_logits             -
"""
TRANSFORMERS_FIELDS, LLADA_FIELDS = (
    {row[0]: row[column] for row in map(str.split, _FIELDS.strip().splitlines()) if row[column] != "-"} for column in (1, 2)
)
# What LLaDA's own code can do otherwise.
LLADA_SWITCHES = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "activation_type": "silu",
}
