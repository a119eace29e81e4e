"""What a model sees in a canvas: received attention, one row of attention, value norms, candidates.

Computed when it is asked for, by one more forward of the canvas that a step saw; runs in the engine's thread. Knows no HTTP.

E layers, H heads, S sinks (in front), T tokens.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkdlm.analysis.capture import attention_maps, part_registers, sink_logit_of
from sinkdlm.errors import AnalysisError
from sinkdlm.model import DiffusionLM
from sinkdlm.observe import AttentionStatistics, summarize
from sinkdlm.sampling.drawing import precise

_MOST_VALUES = 1 << 23  # numbers of one answer


def _statistics(model: DiffusionLM, tokens: list[int]) -> list[AttentionStatistics]:
    found: list[AttentionStatistics] = []

    def look(layer: int, *given: Any) -> None:
        parted = part_registers(model.config.n_registers, *given)
        found.append(summarize(*parted, sink_logit=sink_logit_of(model, layer)))

    with model.inference():
        model(_row(model, tokens), observe=look)
    return found


def _row(model: DiffusionLM, tokens: list[int]) -> Tensor:
    return torch.tensor([tokens], device=model.embed.weight.device)


def received_attention(model: DiffusionLM, tokens: list[int], layer: int | None = None) -> np.ndarray:
    """(E, H, S + T), or of one layer (1, H, S + T): the mean over queries of the attention on each key."""
    config = model.config
    n_layers = config.n_layers if layer is None else 1
    _check_place(model, layer or 0, 0)
    if n_layers * config.n_heads * (config.n_sinks + len(tokens)) > _MOST_VALUES:
        raise AnalysisError("received attention of all layers is too much for one answer; give a layer")
    chosen = slice(None) if layer is None else slice(layer, layer + 1)
    layers = _statistics(model, tokens)[chosen]
    return np.stack([torch.cat([one.sink_received, one.received], dim=-1)[0].cpu().numpy() for one in layers])


def value_norms(model: DiffusionLM, tokens: list[int]) -> np.ndarray:
    """(E, S + T): of each token's value, the mean over heads. A sink logit has no value, and none here."""
    layers = _statistics(model, tokens)
    return np.stack([torch.cat([one.sink_value_norm, one.value_norm], dim=-1)[0].cpu().numpy() for one in layers])


def attention_row(model: DiffusionLM, tokens: list[int], layer: int, head: int, position: int) -> np.ndarray:
    """(S + T,): what one token attends to in one head. A sink logit has no column: the row adds up to less than one."""
    _check_place(model, layer, position, len(tokens))
    found = attention_maps(model, tokens, [(layer, head)], query=position)
    return found[layer, head][0].float().numpy()


def candidates(model: DiffusionLM, tokens: list[int], position: int, k: int) -> list[tuple[int, float]]:
    """The k most likely tokens of a position and their probabilities, [MASK] left out."""
    _check_place(model, 0, position, len(tokens))
    config = model.config
    with model.inference():
        logits = precise(model.denoiser()(_row(model, tokens), where=torch.tensor([[position]], device=model.embed.weight.device)))
    if config.mask_id < config.vocab_size:
        logits[..., config.mask_id] = -torch.inf
    best = logits[0, 0].softmax(-1).topk(min(k, config.vocab_size))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _check_place(model: DiffusionLM, layer: int, position: int, length: int = 1) -> None:
    if not 0 <= layer < model.config.n_layers:
        raise AnalysisError(f"layer {layer}: this model has {model.config.n_layers}, from 0 on")
    if not 0 <= position < length:
        raise AnalysisError(f"position {position}: this canvas has {length} tokens, from 0 on")
