"""The checkpoints that come out of a run, and what they say of where they come from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sinkdlm.checkpoint.directory import save_weights
from sinkdlm.config.recipe import Recipe
from sinkdlm.errors import CheckpointError


def provenance_of(recipe: Recipe, facts: dict[str, Any], run: str, step: int, updates: int) -> dict[str, Any]:
    """facts: those of the run's start. What the parent said of itself stays, where the run does not say otherwise."""
    return {
        **facts.get("parent", {}),
        "recipe": recipe.to_dict(),
        "seed": recipe.train.seed,
        "steps": step,
        "updates": updates,
        "tokens_seen": step * recipe.train.batch * recipe.data.length,
        "data": facts["data"],
        "run": run,
    }


def write_model(
    path: Path,
    weights: Any,
    beside: Path,
    average: Any,
    recipe: Recipe,
    tokenizer: Callable[[], Any],
    provenance: dict[str, Any],
) -> str | None:
    """Writes the weights, and their average `beside` them where one is kept. Returns what went wrong."""
    try:
        if average is not None:
            save_weights(beside, recipe.model, average, tokenizer(), {**provenance, "ema": recipe.train.ema})
        save_weights(path, recipe.model, weights, tokenizer(), provenance)  # last: a run that has it is finished
        return None
    except CheckpointError as failure:
        return str(failure)
