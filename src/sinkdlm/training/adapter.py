"""LoRA on a frozen base: which weights train, their dropout, the adapter's files, and the merged checkpoint.

peft makes the layers. What a retrofit adds (sinks, sink logits, gates, a new [MASK] row) trains in full beside them. The base may
be quantised, as in QLoRA. Must not know steps' order, ranks or a run's folder.
"""

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sinkdlm.checkpoint.directory import written_aside
from sinkdlm.config.recipe import Recipe
from sinkdlm.errors import TrainError
from sinkdlm.fast.weight_only import quantize_blocks
from sinkdlm.model.model import DiffusionLM, Embedding
from sinkdlm.noise import Stream, uniform

_NAME = "default"  # of peft's adapter
_PREFIX = "base_model.model.model."  # of every weight, where peft wraps our transformers class
_MASK_ROW = "embed.mask_row"


class DropoutLinear(nn.Linear):
    """The first matrix of a LoRA layer, with dropout: a feature of the input that is dropped for every row is a column less."""

    mask: Tensor | None = None  # (in_features,), set by `Adapter.dropping`

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.mask is None else self.weight * self.mask.to(self.weight.dtype)
        return nn.functional.linear(x, weight)


class MaskEmbedding(Embedding):
    """A frozen embedding but for the row of [MASK], a parameter of its own. As a head it needs no such row: no loss, sampler or
    estimator reads the logit of [MASK]."""

    mask_id: int
    mask_row: nn.Parameter

    def forward(self, x: Tensor, project_to: int | None = None) -> Tensor:
        found = super().forward(x, project_to)
        return found if project_to is not None else torch.where((x == self.mask_id)[..., None], self.mask_row, found)


class Adapter:
    """The trained part of a model. Only its parameters require gradients."""

    def __init__(self, model: DiffusionLM, recipe: Recipe, *, new_mask: bool = False) -> None:
        """Wrap a model on the host in place, after `fast.prepare`. new_mask: its parent had no [MASK]."""
        peft, section = _peft(), recipe.adapter
        self._seed, self._section = recipe.train.seed, section
        self._mask_id, self._dtype = recipe.model.mask_id, model.embed.weight.dtype
        self.config = peft.LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            target_modules=list(section.targets),
            base_model_name_or_path=recipe.init.from_,
            inference_mode=True,  # of who reads it
        )
        peft.inject_adapter_in_model(self.config, model, _NAME, low_cpu_mem_usage=True)  # draws no weights
        self.config.lora_dropout, self.config.target_modules = section.dropout, list(section.targets)  # as they are saved
        model.requires_grad_(False)
        lora = peft.tuners.lora.LoraLayer
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, lora)}
        for name, layer in self._layers.items():
            self._begin(name, layer)
        self._quantized = quantize_blocks(model, section.base) if section.base else {}
        if new_mask and "mask" in section.full:
            model.embed.__class__ = MaskEmbedding
            embed = cast(MaskEmbedding, model.embed)
            embed.mask_id = self._mask_id
            embed.mask_row = nn.Parameter(embed.weight[self._mask_id].detach().clone())
        for name, weight in model.named_parameters():
            parts = name.split(".")
            weight.requires_grad_(weight.requires_grad or any(kind in parts for kind in section.full))
        self._trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self._masks: Tensor | None = None

    def _begin(self, name: str, layer: Any) -> None:
        """Draw A from (seed, name), with peft's distribution; B is zero, so that the first step sees the base."""
        base = layer.get_base_layer()
        down, up = layer.lora_A[_NAME], layer.lora_B[_NAME]
        drawn = uniform(self._seed, Stream.WEIGHTS, *f"{name}.lora_A".encode(), torch.arange(down.weight.numel()))
        first = ((2 * drawn - 1) * base.in_features**-0.5).view(down.weight.shape)
        down.weight = nn.Parameter(first.to(base.weight.dtype))
        up.weight = nn.Parameter(torch.zeros(up.weight.shape, dtype=base.weight.dtype))
        layer.cast_input_dtype_enabled = False  # autocast does it
        down.__class__ = DropoutLinear

    @contextmanager
    def dropping(self, step: int, device: torch.device) -> Iterator[None]:
        """Within this scope, drop the features that (seed, step, layer, feature) decide."""
        chance, widths = self._section.dropout, [layer.in_features for layer in self._layers.values()]
        if not chance:
            yield
            return
        if self._masks is None:  # one tensor at a fixed address: captures read it
            self._masks = torch.ones(sum(widths), dtype=self._dtype, device=device)
            for layer, part in zip(self._layers.values(), self._masks.split(widths), strict=True):
                layer.lora_A[_NAME].mask = part
        kept = uniform(self._seed, Stream.DROPOUT, step, torch.arange(sum(widths), device=device)) >= chance
        self._masks.copy_(kept / (1 - chance))
        try:
            yield
        finally:
            self._masks.fill_(1)

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of the model without an adapter that computes the same. weights: all, by their names here."""
        found = {name.replace(".base_layer.", "."): weight for name, weight in weights.items() if ".lora_" not in name}
        found |= {f"{name}.weight": layer.dequantize(self._dtype).cpu() for name, layer in self._quantized.items()}
        for name, layer in self._layers.items():
            down, up = (weights[f"{name}.{part}.{_NAME}.weight"] for part in ("lora_A", "lora_B"))
            found[f"{name}.weight"] = found[f"{name}.weight"] + layer.scaling[_NAME] * (up @ down)
        if _MASK_ROW in found:
            del found[_MASK_ROW]
            found["embed.weight"] = self._embedding(weights)
        return found

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the adapter in peft's form, for `PeftModel.from_pretrained` over the base in our transformers class. With a new
        [MASK] row it holds the whole embedding, because peft cannot load a single row here."""
        names = {name.replace(f".{_NAME}.", "."): name for name in self._trained if name != _MASK_ROW}
        tensors = {f"{_PREFIX}{plain}": weights[name].contiguous() for plain, name in names.items()}
        if _MASK_ROW in self._trained:
            tensors[f"{_PREFIX}embed.weight"] = self._embedding(weights)
        with written_aside(folder) as aside:
            self.config.save_pretrained(aside)
            save_file(tensors, aside / "adapter_model.safetensors", metadata={"format": "pt"})

    def _embedding(self, weights: Mapping[str, Tensor]) -> Tensor:
        table = weights["embed.weight"].clone()
        table[self._mask_id] = weights[_MASK_ROW]
        return table


def add_adapter(model: DiffusionLM, recipe: Recipe, parent: Mapping[str, Any] | None = None) -> Adapter | None:
    """Wrap a model as the recipe says. parent: provenance of what `load_parent` returned, which tells whether it had a [MASK]."""
    if recipe.adapter.kind == "none":
        return None
    return Adapter(model, recipe, new_mask="new_mask" in (parent or {}).get("parent", {}))


def mark_base(model: nn.Module) -> str:
    """Return the SHA-256 of a model's weights, on the host."""

    def mark(item: tuple[str, Tensor]) -> bytes:
        name, weight = item
        return name.encode() + hashlib.sha256(weight.detach().contiguous().numpy().data).digest()

    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(mark, sorted(model.state_dict().items())))).hexdigest()


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise TrainError("adapter.kind = 'lora': needs peft; pip install 'sinkdlm[interop]'") from None
    return peft
