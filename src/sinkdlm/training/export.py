"""The checkpoints that come out of a run, and what they say of where they come from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sinkdlm.checkpoint.directory import save_weights
from sinkdlm.config.recipe import Recipe
from sinkdlm.training.optimizer import Average
from sinkdlm.training.weights import Weights


def export(
    path: Path,
    beside: Path,
    weights: Weights,
    average: Average | None,
    recipe: Recipe,
    tokenizer: Callable[[], Any],
    facts: dict[str, Any],
    **made: Any,
) -> None:
    """Writes the weights, and their average `beside` them where one is kept; all ranks call it. Raises CheckpointError on all.

    facts: those of the run's start. made: run, steps, updates. What the parent said of itself stays, where the run does not say
    otherwise.
    """
    tokens = made["steps"] * recipe.train.batch * recipe.data.length
    told = {"recipe": recipe.to_dict(), "seed": recipe.train.seed, "tokens_seen": tokens, "data": facts["data"]}
    provenance = {**facts.get("parent", {}), **told, **made}
    whole = weights.collect(weights.local)
    mean = None if average is None else weights.collect(average.weights)

    def write() -> None:
        if mean is not None:
            save_weights(beside, recipe.model, mean, tokenizer(), {**provenance, "ema": recipe.train.ema})
        save_weights(path, recipe.model, whole or {}, tokenizer(), provenance)  # last: a run that has it is finished

    weights.world.attempt_first(write)
