"""The command `reproduce`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument

from sinkdlm.cli.loading import load_parent, say
from sinkdlm.cli.options import Device, Json, Overrides, option

_TARGET = Argument(help="table1 to table5, controls, short, figure1, figure3, gsm8k or all.")
Scale = Literal["nano", "small", "paper"]


def reproduce(
    target: Annotated[str, _TARGET],
    scale: Annotated[Scale, option("nano: minutes on a CPU; small: one GPU; paper: recipes for a cluster.")] = "nano",
    seeds: Annotated[int | None, option("Seeds of the main variants; by default nano 3, small 5.", min=1)] = None,
    out: Annotated[Path, option("Folder to work or resume in; several processes may share it.")] = Path("runs/reproduce"),
    records: Annotated[Path | None, option("Folder for results; by default records/ in --out.")] = None,
    parent: Annotated[str | None, option("small: the autoregressive parent, anything that `convert` reads.")] = None,
    corpus: Annotated[list[str] | None, option("small: a prepared set, or texts; may be repeated.")] = None,
    sft: Annotated[Path | None, option("small: GSM8K's chain-of-thought file, or a set prepared from it.")] = None,
    data: Annotated[Path | None, option("small: a folder of benchmark files; needs lm-eval.")] = None,
    requests: Annotated[Path | None, option("small: in place of --data, a file that `eval --write-requests` wrote.")] = None,
    tasks: Annotated[str | None, option("Only these tasks, comma-separated; '' for none.")] = None,
    only: Annotated[list[str] | None, option("Only these runs; VARIANT or SEED may be left out.", metavar="VARIANT,SEED")] = None,
    time_limit: Annotated[float | None, option("Start no run that would end after this time.", min=0, metavar="SECONDS")] = None,
    plan: Annotated[bool, option("Only list the runs that are missing, with estimated times.", "--plan")] = False,
    official: Annotated[bool, option("Also score table 1's twins of seed 1 with the official settings.", "--official")] = False,
    keep_weights: Annotated[bool, option("Keep the models once their results are written.", "--keep-weights")] = False,
    overrides: Overrides = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Repeat the paper's tables and figures with paired runs over seeds; print intervals and a verdict on each claim."""
    if scale == "paper":
        from sinkdlm.reproduce.paper import lay_out

        found = lay_out(target, out, seeds or 1)
        say(found, found["said"], as_json)
        return
    from sinkdlm.reproduce.command import open_work
    from sinkdlm.reproduce.command import reproduce as work_through
    from sinkdlm.reproduce.inputs import Asked
    from sinkdlm.reproduce.matrix import targets_of

    chosen = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    asked = Asked(target, scale, out, seeds, records, parent, corpus or [], sft, data, requests, only or [], chosen)
    asked = asked._replace(overrides=overrides or [], time_limit=time_limit, keep_weights=keep_weights)
    asked = asked._replace(official=official, device=device)
    if plan:
        with open_work(asked, targets_of(target), load_parent) as work:
            _say_plan(work.missing(), as_json)
        return
    found = work_through(asked, load_parent, lambda text: typer.echo(text, err=True))
    say(found, _short(found, out), as_json)


def _say_plan(planned: list[Any], as_json: bool) -> None:
    from sinkdlm.reproduce.command import about

    rows = [{"run": one.job.name, "stages": one.stages, "seconds": one.seconds} for one in planned]
    lines = [f"{one.job.name:28s}about {one.seconds:.0f} s" for one in planned]
    say(rows, "\n".join([*lines, f"{len(planned)} runs are missing{about(planned)}"]), as_json)


def _short(found: dict[str, Any], out: Path) -> str:
    lines = [
        f"{claim['verdict']:30s}{target:10s}{claim['text']}" for target, one in found["targets"].items() for claim in one["claims"]
    ]
    return "\n".join([*found["lead"], "", *lines, f"report  {out / 'report.html'}"])
