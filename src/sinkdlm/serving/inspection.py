"""What a model sees in a canvas: received attention, one row of attention, value norms, candidates.

Computed when it is asked for, by one more forward of the canvas that a step saw; runs in the engine's thread. Knows no HTTP.

E layers, H heads, S sinks (in front), T tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch

from sinkdlm.analysis.capture import attention_maps
from sinkdlm.analysis.recording import Seen, likeliest, look_at, statistics
from sinkdlm.errors import AnalysisError
from sinkdlm.model.model import DiffusionLM

_MOST_VALUES = 1 << 23  # numbers of one answer


def received_attention(model: DiffusionLM, tokens: list[int], layer: int | None = None) -> np.ndarray:
    """(E, H, S + T), or of one layer (1, H, S + T): the mean over queries of the attention on each key."""
    config = model.config
    n_layers = config.n_layers if layer is None else 1
    _check_place(model, layer or 0, 0)
    if n_layers * config.n_heads * (config.n_sinks + len(tokens)) > _MOST_VALUES:
        raise AnalysisError("received attention of all layers is too much for one answer; give a layer")
    chosen = slice(None) if layer is None else slice(layer, layer + 1)
    layers = statistics(model, tokens)[chosen]
    return np.stack([torch.cat([one.sink_received, one.received], dim=-1)[0].cpu().numpy() for one in layers])


def value_norms(model: DiffusionLM, tokens: list[int]) -> np.ndarray:
    """(E, S + T): of each token's value, the mean over heads. A sink logit has no value, and none here."""
    layers = statistics(model, tokens)
    return np.stack([torch.cat([one.sink_value_norm, one.value_norm], dim=-1)[0].cpu().numpy() for one in layers])


def look(model: DiffusionLM, tokens: list[int]) -> Seen:
    """Received attention, value norms and content sinks, by one forward."""
    config = model.config
    if config.n_layers * config.n_heads * (config.n_sinks + len(tokens)) > _MOST_VALUES:
        raise AnalysisError("received attention of all layers is too much for one answer; ask for one layer's")
    return look_at(model, tokens)


def attention_row(model: DiffusionLM, tokens: list[int], layer: int | None, head: int | None, position: int) -> np.ndarray:
    """(S + T,): what one token attends to, mean over all layers or heads where none is given. A sink logit has no column: the row
    adds up to less than one."""
    _check_place(model, layer or 0, position, len(tokens))
    config = model.config
    layers, heads = (
        [given] if given is not None else list(range(n)) for given, n in ((layer, config.n_layers), (head, config.n_heads))
    )
    found = attention_maps(model, tokens, [(one, other) for one in layers for other in heads], query=position)
    return torch.stack([row[0].float() for row in found.values()]).mean(0).numpy()


def candidates(model: DiffusionLM, tokens: list[int], position: int, k: int, barred: Sequence[int] = ()) -> list[tuple[int, float]]:
    """The k most likely tokens of a position and their probabilities, without [MASK] and barred ids, which are never written."""
    _check_place(model, 0, position, len(tokens))
    return likeliest(model, tokens, [position], k, barred)[0]


def _check_place(model: DiffusionLM, layer: int, position: int, length: int = 1) -> None:
    if not 0 <= layer < model.config.n_layers:
        raise AnalysisError(f"layer {layer}: this model has {model.config.n_layers}, from 0 on")
    if not 0 <= position < length:
        raise AnalysisError(f"position {position}: this canvas has {length} tokens, from 0 on")
