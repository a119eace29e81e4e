"""Map each family's tensor names, config fields and row orders to ours and back, bit for bit.

Owns names and row orders. Must not know file formats.

Ours, per block: attention.qkv (all query heads, then key heads, then value heads), mlp.gate_up (gate rows, then up rows).
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sinkdlm.config.model import ModelConfig
from sinkdlm.errors import ConvertError

Get = Callable[[str], Tensor]
_HEAD_NORMS = ("attention.q_norm.weight", "attention.k_norm.weight")


def qkv_rows(config: ModelConfig) -> list[int]:
    """Numbers of query, key and value rows in our qkv tensor."""
    return [config.attention_width, *[config.n_kv_heads * config.head_dim] * 2]


@dataclass(frozen=True)
class Layout:
    """One family's names. `parts` maps our tensor within a block to theirs, stacked along rows in this order."""

    embed: str
    norm: str
    head: str
    block: str  # with {} for the layer
    parts: Mapping[str, tuple[str, ...]]

    def blocks(self, config: ModelConfig) -> Iterator[tuple[str, str, list[str]]]:
        """Yield the block tensors of this config: our name within a block, our full name, their names."""
        absent = {"attention.qkv.bias": not config.qkv_bias, "attention.gate.weight": config.gate == "none"}
        absent |= dict.fromkeys(_HEAD_NORMS, not config.qk_norm)
        for layer in range(config.n_layers):
            for ours, theirs in self.parts.items():
                if not absent.get(ours, False):
                    yield ours, f"blocks.{layer}.{ours}", [self.block.format(layer) + name for name in theirs]

    def rows(self, ours: str, config: ModelConfig) -> list[int]:
        """How many rows each part of one of our tensors has."""
        if ours.startswith("attention.qkv"):
            return qkv_rows(config)
        found = {"mlp.gate_up.weight": [config.d_ff, config.d_ff], "attention.gate.weight": [config.gate_width]}
        found |= {name: [config.head_dim] for name in _HEAD_NORMS}
        return found.get(ours, [config.d_model])

    def shapes(self, ours: str, config: ModelConfig) -> list[tuple[int, ...]]:
        """The shape of each part of one of our tensors."""
        is_vector = ours.endswith("bias") or "norm" in ours
        width = {"mlp.down.weight": config.d_ff, "attention.out.weight": config.attention_width}.get(ours, config.d_model)
        return [(rows,) if is_vector else (rows, width) for rows in self.rows(ours, config)]

    def join(self, ours: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, ours: str, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        return [part.contiguous() for part in tensor.split(self.rows(ours, config))]

    def read(self, get: Get, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield our blocks and final norm, tensor by tensor, with each part's shape checked."""
        for ours, whole, names in self.blocks(config):
            parts = [get(name) for name in names]
            for name, part, wanted in zip(names, parts, self.shapes(ours, config), strict=True):
                check_shape(name, part, wanted)
            yield whole, self.join(ours, parts, config)
        norm = get(self.norm)
        check_shape(self.norm, norm, (config.d_model,))
        yield "norm.weight", norm

    def write(self, state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Return our blocks and final norm under their names, in their row order."""
        out: dict[str, Tensor] = {}
        for ours, whole, names in self.blocks(config):
            out.update(zip(names, self.split(ours, state[whole], config), strict=True))
        return {**out, self.norm: state["norm.weight"]}

    def all_names(self, config: ModelConfig) -> set[str]:
        blocks = (name for _, _, names in self.blocks(config) for name in names)
        return {*blocks, self.embed, self.norm, self.head}


def check_shape(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != wanted:
        raise ConvertError(f"{name} has shape {tuple(tensor.shape)}, expected {wanted} by the model's config")


class OfficialLayout(Layout):
    """SMDM's layout: rows of qkv interleaved by key/value group (its queries, its key, its value)."""

    def rows(self, ours: str, config: ModelConfig) -> list[int]:
        return [sum(qkv_rows(config))] if ours.startswith("attention.qkv") else super().rows(ours, config)

    def _order(self, config: ModelConfig) -> Tensor:
        """Positions in their qkv tensor of our query, key and value rows."""
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
    """GGUF files of the llama architecture, Mistral's too: query and key rows permuted for interleaved rotary pairs."""

    def join(self, ours: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
        if ours.startswith("attention.qkv"):
            half = config.head_dim // 2
            permuted = [part.unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2) for part in parts[:2]]
            parts = permuted + parts[2:]
        return super().join(ours, parts, config)


_NAMES = tomllib.loads((Path(__file__).parent / "layouts.toml").read_text(encoding="utf-8"))
_FAMILIES = ("TRANSFORMERS", "LLADA", "OFFICIAL", "GGUF")


def _layout(kind: type[Layout], family: str) -> Layout:
    column = _FAMILIES.index(family)
    names = {ours: theirs[column].split(",") for ours, theirs in _NAMES["tensors"].items() if theirs[column] != "-"}
    names["attention.qkv"] = list(dict.fromkeys(names["attention.qkv"][0].format(letter) for letter in "qkv"))
    embed, norm, head, block = (names.pop(end)[0] for end in ("embed", "norm", "head", "block"))
    parts = {f"{ours}.weight": tuple(f"{name}.weight" for name in theirs) for ours, theirs in names.items()}
    parts["attention.qkv.bias"] = tuple(f"{name}.bias" for name in names["attention.qkv"])
    return kind(f"{embed}.weight", f"{norm}.weight", f"{head}.weight", f"{block}.{{}}.", parts)


TRANSFORMERS, LLADA, OFFICIAL = _layout(Layout, "TRANSFORMERS"), _layout(Layout, "LLADA"), _layout(OfficialLayout, "OFFICIAL")
GGUF, GGUF_LLAMA = _layout(Layout, "GGUF"), _layout(PermutedLayout, "GGUF")
TRANSFORMERS_FIELDS, LLADA_FIELDS = (
    {ours: theirs[column] for ours, theirs in _NAMES["fields"].items() if theirs[column] != "-"} for column in (0, 1)
)
LLADA_SWITCHES = _NAMES["llada_switches"]
