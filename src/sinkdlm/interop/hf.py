"""transformers classes over our checkpoint directory: AutoConfig, AutoModel and AutoModelForMaskedLM read and write it.

This file, hf_config.py and hf_generation.py also go into the standalone modelling file: they may use only noise, model/, sampling/
and ModelConfig of the package. interop/__init__.py adds the rest (speed, fingerprints) to the class.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from sinkdlm.interop.hf_config import SinkDLMConfig
from sinkdlm.interop.hf_generation import DiffusionGeneration, check_padding
from sinkdlm.model.context import Context
from sinkdlm.model.model import DiffusionLM, Norm


def run_again(model: DiffusionLM, x: Tensor, ctx: Context, select: Tensor | None = None) -> Tensor:
    """`run_plain` with activation checkpointing: the backward recomputes each block."""
    view, sinks = ctx.view(model.config, x), model.first_lane(x, ctx)
    for block in model.blocks:
        x, sinks, _ = checkpoint(block, x, sinks, view, use_reentrant=False, preserve_rng_state=False)
    x = model.norm(x)
    return x if select is None else x.flatten(0, 1)[select]


class SinkDLMForMaskedLM(DiffusionGeneration, PreTrainedModel):
    """Returns logits aligned to the token each position predicts, and with labels the cross-entropy (labels of -100 left out)."""

    config_class = SinkDLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = False

    accelerate: ClassVar[Callable[[DiffusionLM], object]] = staticmethod(lambda model: model)
    stamp: ClassVar[Callable[[Path, SinkDLMConfig], None]] = staticmethod(
        lambda folder, config: (folder / "provenance.json").unlink(missing_ok=True)  # fingerprints of the old weights
    )

    def __init__(self, config: SinkDLMConfig) -> None:
        super().__init__(config)
        self.model = DiffusionLM(config.model_config())
        type(self).accelerate(self.model)
        self.post_init()

    @classmethod
    def wrap(cls, model: DiffusionLM) -> "SinkDLMForMaskedLM":
        """Put a model behind the transformers interface, with the same weights."""
        with torch.device("meta"):
            wrapped = cls(SinkDLMConfig(**vars(model.config)))
        wrapped.model = model
        return wrapped

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise weights that a checkpoint lacks; otherwise DiffusionLM initialises its own."""
        std = (2 / (5 * self.config.d_model)) ** 0.5
        for name, weight in module.named_parameters(recurse=False):
            if getattr(weight, "_is_hf_initialized", False):
                continue
            if isinstance(module, Norm):
                nn.init.ones_(weight)
            elif name in ("bias", "sink_logit"):
                nn.init.zeros_(weight)
            else:
                nn.init.normal_(weight, std=std)

    def init_weights(self) -> None:
        pass  # post_init would draw again, from the global generator

    def _set_gradient_checkpointing(self, enable: bool = True, **_: Any) -> None:
        self._plain_runner = getattr(self, "_plain_runner", self.model.runner)
        self.model.runner = run_again if enable else self._plain_runner

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.model.runner is run_again

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: Any) -> None:
        self.model.embed = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        clean: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """attention_mask: rows may be padded on either side; positions count from a row's own first token.

        num_items_in_batch: Trainer's global count of labels; with it, the loss does not depend on how the batch is cut.
        clean: for block diffusion, input_ids without noise: each block sees the clean ones before it.
        """
        lengths = order = None
        if attention_mask is not None and not bool((mask := check_padding(attention_mask, input_ids)).all()):
            lengths = mask.sum(-1)
            order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)  # padding goes behind the tokens
            input_ids, clean = input_ids.gather(1, order), None if clean is None else clean.gather(1, order)
        hidden = self.model(input_ids, lengths=lengths, clean=clean)
        if order is not None:
            hidden = hidden.take_along_dim(order.argsort(dim=1)[..., None], dim=1)
        logits = self.model.head(hidden)
        loss = None
        if labels is not None:
            reduction = "mean" if num_items_in_batch is None else "sum"
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction=reduction)
            loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        output = MaskedLMOutput(loss=loss, logits=logits, hidden_states=(hidden,) if output_hidden_states else None)
        return output if return_dict is not False else output.to_tuple()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Under these names, or those of a checkpoint: Trainer reads its own folders back this way."""
        if not any(name.startswith("model.") for name in state_dict):
            state_dict = {f"model.{name}": value for name, value in state_dict.items()}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def save_pretrained(self, save_directory: Any, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        """Save as a sinkdlm checkpoint: same names, so that either library reads what the other wrote."""
        state = self.state_dict() if state_dict is None else state_dict
        if kwargs.get("is_main_process", True):
            for stale in [*Path(save_directory).glob("model*.safetensors"), *Path(save_directory).glob("model*.index.json")]:
                stale.unlink()  # of an earlier save, which loading might prefer
        super().save_pretrained(save_directory, state_dict={k.removeprefix("model."): v for k, v in state.items()}, **kwargs)
        if kwargs.get("is_main_process", True):
            type(self).stamp(Path(save_directory), self.config)
