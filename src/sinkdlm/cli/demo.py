"""The command `demo`."""

from pathlib import Path
from typing import Annotated

from sinkdlm.cli.loading import say
from sinkdlm.cli.options import Json, Seed, option


def demo(
    out: Annotated[Path, option("Folder for the twins, the report and the measurements.")] = Path("runs/demo"),
    steps: Annotated[int, option("Training steps of each twin.", min=1)] = 1000,
    trajectories: Annotated[int, option("Stories per twin, recorded as they are written.", min=1)] = 32,
    seed: Seed = 0,
    fresh: Annotated[bool, option("Start over instead of resuming an earlier demo.", "--fresh")] = False,
    as_json: Json = False,
) -> None:
    """Train twins with and without a sink on a small language, compare them, and write a report; takes minutes on a CPU."""
    from sinkdlm.demo.run import run_demo

    found = run_demo(out, steps=steps, seed=seed, trajectories=trajectories, fresh=fresh, as_json=as_json)
    if as_json:
        say(found, "", as_json)
