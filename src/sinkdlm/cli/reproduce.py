"""The subcommand that repeats the paper: reproduce. Like cli.py, it imports what it needs when it runs."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sinkdlm.cli.options import Device, Json, Overrides


class Scale(StrEnum):
    NANO, SMALL, PAPER = "nano", "small", "paper"


def reproduce(
    target: Annotated[
        str,
        typer.Argument(help="table1 to table5, controls, short, figure1, figure3, gsm8k or all."),
    ],
    scale: Annotated[
        Scale, typer.Option(help="nano: minutes on a CPU; small: one GPU; paper: recipes for a cluster.")
    ] = Scale.NANO,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of the main variants; by default nano 3, small 5.")] = None,
    out: Annotated[
        Path, typer.Option(help="The folder to work in; the same command goes on there, and several at once share the work.")
    ] = Path("runs/reproduce"),
    records: Annotated[Path | None, typer.Option(help="Where results are kept; by default records/ in OUT.")] = None,
    parent: Annotated[str | None, typer.Option(help="small: the autoregressive model, as `convert` reads it.")] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="small: a prepared set, or texts; may be given several times.")] = None,
    sft: Annotated[Path | None, typer.Option(help="small: GSM8K's chain-of-thought file, or a set prepared from it.")] = None,
    data: Annotated[Path | None, typer.Option(help="small: a folder of the benchmarks' files; needs the harness.")] = None,
    requests: Annotated[Path | None, typer.Option(help="small: instead, what `eval --write-requests` wrote.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Only these tasks, with commas; '' for none.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="VARIANT,SEED", help="Only these runs; either may be left out.")] = None,
    time_limit: Annotated[float | None, typer.Option(min=0, metavar="SECONDS", help="Begin no run that would end later.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what is missing, and about how long it takes.")] = False,
    official: Annotated[
        bool, typer.Option("--official", help="Score table 1's twins of seed 1 with the official settings too.")
    ] = False,
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="Keep the models after their results are written.")] = False,
    overrides: Overrides = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Repeat the paper's tables and figures: paired runs over seeds, intervals, and a verdict on each claim."""
    if scale is Scale.PAPER:
        from sinkdlm.reproduce.paper import lay_out

        found = lay_out(target, out, seeds or 1)
        typer.echo(json.dumps(found, indent=1) if as_json else found["said"])
        return
    from sinkdlm.cli.loading import load_parent
    from sinkdlm.reproduce.command import open_work
    from sinkdlm.reproduce.command import reproduce as work_through
    from sinkdlm.reproduce.inputs import Asked
    from sinkdlm.reproduce.matrix import targets_of

    chosen = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    asked = Asked(target, scale.value, out, seeds, records, parent, corpus or [], sft, data, requests, only or [], chosen)
    asked = asked._replace(overrides=overrides or [], time_limit=time_limit, keep_weights=keep_weights)
    asked = asked._replace(official=official, device=device)
    if plan:
        with open_work(asked, targets_of(target), load_parent) as work:
            _say_plan(work.missing(), as_json)
        return
    found = work_through(asked, load_parent, _tell)
    typer.echo(json.dumps(found, indent=1) if as_json else _short(found, out))


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def _say_plan(planned: list[Any], as_json: bool) -> None:
    from sinkdlm.reproduce.command import about

    if as_json:
        rows = [{"run": one.job.name, "stages": one.stages, "seconds": one.seconds} for one in planned]
        typer.echo(json.dumps(rows, indent=1))
        return
    for one in planned:
        typer.echo(f"{one.job.name:28s}about {one.seconds:.0f} s")
    typer.echo(f"{len(planned)} runs are missing{about(planned)}")


def _short(found: dict[str, Any], out: Path) -> str:
    lines = [
        f"{claim['verdict']:30s}{target:10s}{claim['text']}" for target, one in found["targets"].items() for claim in one["claims"]
    ]
    return "\n".join([*lines, f"report  {out / 'report.html'}"])
