"""The command `train`."""

from pathlib import Path
from typing import Annotated

from sinkdlm.cli import warm_up
from sinkdlm.cli.loading import load_parent, load_recipe
from sinkdlm.cli.options import Device, Json, Overrides, RecipeFile, option
from sinkdlm.cli.output import say


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: Annotated[Path | None, option("The run folder; by default runs/ and the recipe's name.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Pretrain, adapt from an AR parent, or fine-tune: what the recipe says. The same command goes on where a run stopped."""
    folder = out or Path("runs") / recipe.stem
    resolved = load_recipe(recipe, overrides, folder)
    opened = warm_up.open_device(device)
    import torch  # noqa: F401  (before the next line)

    warm_up.load_kernels(opened)
    from sinkdlm.training.health import read_peaks, read_sink_loss
    from sinkdlm.training.loop import train as run

    found = run(resolved, folder, load_parent=load_parent, device=device)
    if found["rank"]:
        return
    found |= {"gradient_peaks": read_peaks(folder), "sink_lost": read_sink_loss(folder)}
    say(found, f"{found['model']}: {found['tokens']:,} tokens, {found['steps']} steps", as_json)
