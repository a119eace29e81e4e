"""The subcommand `plan`. Like cli.py, it imports what it needs when it runs; only plans for a CPU load torch."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sinkdlm.cli.loading import load_recipe
from sinkdlm.cli.options import Json, Overrides

_AUGMENTED_GSM8K = 769_240  # examples an epoch of the official SFT, which data of one's own need not have


class Hardware(StrEnum):
    A100, H100, H200, B200, CPU = "a100", "h100", "h200", "b200", "cpu"


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


def plan(
    recipes: Annotated[list[Path] | None, typer.Argument(metavar="RECIPE.toml...")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="All runs of the paper: recipes/paper.")] = False,
    gpus: Annotated[int, typer.Option(min=1, help="How many devices; from 9 on, 8 on each host.")] = 1,
    device: Annotated[Hardware, typer.Option(help="Of the data sheets, or this machine's CPU.")] = Hardware.H100,
    price: Annotated[float | None, typer.Option(min=0, help="Of one GPU-hour, in any currency.")] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of the data, for budgets in epochs; by default those of the data, if here.")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Say what a run takes before it is started: memory and whether it fits, tokens/s, hours, cost, disk."""
    from sinkdlm.errors import UserError
    from sinkdlm.planning.plan import describe, describe_all, make_plan

    paths = [*(recipes or []), *(_papers() if paper else [])]
    if not paths:
        raise UserError("plan: no recipe; name some, or say --paper")
    if device is Hardware.CPU and gpus > 1:
        raise UserError("--gpus: goes with a GPU; a CPU is planned for one process")
    found = []
    for path in paths:
        recipe = load_recipe(path, overrides)
        n_rows = rows if rows is not None or recipe.train.epochs is None else _rows_of(recipe)
        if n_rows is None and paper:
            n_rows = _AUGMENTED_GSM8K
        found.append(make_plan(recipe, path.stem, _machine(device, gpus, recipe), n_rows))
    if as_json:
        typer.echo(json.dumps([one.to_dict(price) for one in found], indent=2))
    else:
        typer.echo(describe(found[0], price) if len(found) == 1 else describe_all(found, price))


def _papers() -> list[Path]:
    """Beside where the command runs, or in the checkout that this file lies in."""
    from sinkdlm.errors import UserError

    for root in (Path(), Path(__file__).parents[2]):
        found = sorted((root / "recipes" / "paper").glob("*.toml"))
        if found:
            return found
    raise UserError("--paper: no recipes/paper here; run it in a checkout of sinkdlm, or name recipes")


def _rows_of(recipe: Any) -> int | None:
    """Of the recipe's data, where it is here."""
    if not recipe.data.sets or not all(Path(folder).is_dir() for folder in recipe.data.sets):
        return None
    from sinkdlm.data.rows import open_rows

    opened = open_rows(
        recipe.data, "train", seed=recipe.train.seed, vocab_size=recipe.model.vocab_size, mask_id=recipe.model.mask_id
    )
    return None if opened is None else opened.n_rows


def _machine(device: Hardware, gpus: int, recipe: Any) -> Any:
    from sinkdlm.planning.plan import Machine

    if device is not Hardware.CPU:
        return Machine(device.value, gpus)
    import torch

    from sinkdlm.distributed.world import World
    from sinkdlm.training.cpu_trial import tokens_per_second

    return Machine("cpu", 1, World(torch.device("cpu")).memory, tokens_per_second(recipe))
