"""The command `plan`. Loads torch only to plan for a CPU."""

from pathlib import Path
from typing import Annotated, Any, Literal

from sinkdlm.cli.loading import load_recipe, say
from sinkdlm.cli.options import Json, Overrides, RecipeFiles, option
from sinkdlm.errors import UserError

_AUGMENTED_GSM8K = 769_240  # examples per epoch of the official SFT; other data may have more or fewer
Hardware = Literal["a100", "h100", "h200", "b200", "cpu"]


def plan(
    recipes: RecipeFiles = None,
    paper: Annotated[bool, option("Plan all runs of the paper.", "--paper")] = False,
    gpus: Annotated[int, option("Number of GPUs; more than 8 are planned as 8 per host.", min=1)] = 1,
    device: Annotated[Hardware, option("GPU, by its data sheet; or this machine's CPU.")] = "h100",
    price: Annotated[float | None, option("Price of a GPU-hour, in any currency.", min=0)] = None,
    rows: Annotated[int | None, option("Rows per epoch, for budgets in epochs; by default counted in the data.", min=1)] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Estimate what a run needs before it starts: memory and whether it fits, tokens/s, hours, cost, disk."""
    from sinkdlm.config.shipped import RECIPES
    from sinkdlm.planning.plan import describe, describe_all, make_plan

    paths = [*(recipes or []), *(sorted((RECIPES / "paper").glob("*.toml")) if paper else [])]
    if not paths:
        raise UserError("plan: no recipe given; name one or more, or add --paper")
    if device == "cpu" and gpus > 1:
        raise UserError("--gpus: goes with a GPU; a CPU is planned as one process, so leave it out")
    found = []
    for path in paths:
        recipe = load_recipe(path, overrides)
        n_rows = rows if rows is not None or recipe.train.epochs is None else _rows_of(recipe)
        if n_rows is None and paper:
            n_rows = _AUGMENTED_GSM8K
        found.append(make_plan(recipe, path.stem, _machine(device, gpus, recipe), n_rows))
    text = describe(found[0], price) if len(found) == 1 else describe_all(found, price)
    say([one.to_dict(price) for one in found], text, as_json)


def _rows_of(recipe: Any) -> int | None:
    """Count the rows of the recipe's data, where it is here."""
    if not recipe.data.sets or not all(Path(folder).is_dir() for folder in recipe.data.sets):
        return None
    from sinkdlm.data.rows import open_rows

    opened = open_rows(
        recipe.data, "train", seed=recipe.train.seed, vocab_size=recipe.model.vocab_size, mask_id=recipe.model.mask_id
    )
    return None if opened is None else opened.n_rows


def _machine(device: str, gpus: int, recipe: Any) -> Any:
    from sinkdlm.planning.plan import Machine

    if device != "cpu":
        return Machine(device, gpus)
    import torch

    from sinkdlm.distributed.world import World
    from sinkdlm.training.cpu_trial import tokens_per_second

    return Machine("cpu", 1, World(torch.device("cpu")).memory, tokens_per_second(recipe))
