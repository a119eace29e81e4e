"""Small models of every variant, with random weights so large that every term matters."""

import copy
import functools
import itertools

import torch

from sinkdlm import DiffusionLM, ModelConfig, fast

PLAN = fast.Plan()

SMALL = {"vocab_size": 11, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "d_model": 24, "d_ff": 20, "context_length": 64}

# As in Qwen3 and Llama 3: heads of a width of their own, with norms, and scaled rotary. Of the 16 angles some keep their speed,
# some turn more slowly, and some lie between.
BACKBONE = {"head_dim": 32, "qk_norm": True, "rope_factor": 8.0, "rope_original_context": 64}

# Every value of every flag, and combinations that could conflict.
VARIANTS = {
    "vanilla": {},
    "sink": {"n_sinks": 1},
    "sink-end": {"n_sinks": 1, "sink_position": "end"},
    "sink-zero": {"n_sinks": 1, "sink_value": "zero", "qkv_bias": True},
    "sinks-4": {"n_sinks": 4},
    "sinks-2-end-zero-gate": {"n_sinks": 2, "sink_position": "end", "sink_value": "zero", "gate": "elementwise"},
    "gate": {"gate": "elementwise"},
    "gate-headwise-sink": {"gate": "headwise", "n_sinks": 1},
    "register": {"n_sinks": 1, "sink_kind": "register"},
    "register-2-end-zero": {"n_sinks": 2, "sink_kind": "register", "sink_position": "end", "sink_value": "zero"},
    "logit": {"n_sinks": 1, "sink_kind": "logit"},
    "logit-gate": {"n_sinks": 1, "sink_kind": "logit", "gate": "headwise"},
    "parent": {"n_sinks": 1, "qkv_bias": True, "tie_embeddings": True, "mask_id": 10, "shift_logits": True},
    "backbone": {**BACKBONE, "n_sinks": 2, "sink_value": "zero", "gate": "elementwise"},
}


def small_config(**flags) -> ModelConfig:
    return ModelConfig(**{**SMALL, **flags})


def small_model(
    seed: int = 0, dtype: torch.dtype = torch.float64, attention: str = "auto", plan: fast.Plan | None = PLAN, **flags
) -> DiffusionLM:
    """Make a model with weights so large that every term matters: biases and logits not near zero, norms not near one.

    plan: of the fast runner, as `load` gives it; None: the plain runner."""
    model = copy.deepcopy(_small_model(seed, dtype, attention, tuple(flags.items())))
    if plan is not None:
        fast.prepare(model, plan)
    return model


@functools.cache
def _small_model(seed: int, dtype: torch.dtype, attention: str, given: tuple) -> DiffusionLM:
    """Make a model once; callers copy it, in less than half the time."""
    flags = dict(given)
    model = DiffusionLM(small_config(**flags), seed=seed, attention=attention).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator, dtype=dtype)
    return model


def small_tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 10, (batch, length), generator=torch.Generator().manual_seed(seed))


def grid():
    """The grid of the paper's ablations: S x position x value x gate x grouped-query ratio."""
    gates, ratios = ("none", "elementwise", "headwise"), ((2, 2), (6, 2), (7, 1))
    for n_sinks, gate, heads in itertools.product((0, 1, 2, 4), gates, ratios):
        for position, value in itertools.product(("front", "end"), ("learned", "zero")) if n_sinks else [("front", "learned")]:
            yield {
                "n_sinks": n_sinks,
                "gate": gate,
                "n_heads": heads[0],
                "n_kv_heads": heads[1],
                "d_model": heads[0] * 4,
                "sink_position": position,
                "sink_value": value,
                "qkv_bias": True,
            }
