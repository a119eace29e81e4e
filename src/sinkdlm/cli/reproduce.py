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
        typer.Argument(
            help="table1 to table5, controls, short, figure1, figure3, gsm8k, all; or overlap: corpus against benchmarks; or "
            "inherited: what sinks are before training; or lengths: tokens of questions, to look at records by length; or "
            "steadiness: gradients and sinks along training."
        ),
    ],
    scale: Annotated[
        Scale, typer.Option(help="nano: minutes on a CPU; small: one GPU; paper: recipes for a cluster.")
    ] = Scale.NANO,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of the main variants; by default nano 3, small 5.")] = None,
    out: Annotated[
        Path, typer.Option(help="The folder to work in; the same command goes on there, and several at once share the work.")
    ] = Path("runs/reproduce"),
    records: Annotated[Path | None, typer.Option(help="Where records are kept; by default records/ in OUT.")] = None,
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
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="Keep the models after their records are written.")] = False,
    overrides: Overrides = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Repeat the paper's tables and figures: paired runs over seeds, intervals, and a verdict on each claim."""
    from sinkdlm.errors import ReproduceError
    from sinkdlm.reproduce.matrix import WITHOUT_RUNS

    if plan and target in WITHOUT_RUNS:
        raise ReproduceError(f"--plan: of tables and figures; with {target} leave it out")
    if target == "overlap":
        _overlap(corpus or [], data, requests, records or out / "records", scale, as_json)
        return
    if target == "lengths":
        _lengths(parent, data, requests, records or out / "records", scale, as_json)
        return
    if scale is Scale.PAPER:
        from sinkdlm.reproduce.paper import lay_out

        found = lay_out(target, out, seeds or 1)
        typer.echo(json.dumps(found, indent=1) if as_json else found["said"])
        return
    from sinkdlm.cli.loading import load_parent
    from sinkdlm.reproduce.command import Asked, inherited, run_plan, steadiness
    from sinkdlm.reproduce.command import reproduce as work
    from sinkdlm.reproduce.inputs import Given

    given = Given(parent, corpus or [], sft, data, requests)
    chosen = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    asked = Asked(
        target,
        scale.value,
        out,
        seeds,
        records,
        given,
        only or [],
        chosen,
        overrides or [],
        time_limit,
        keep_weights,
        official,
        device,
    )
    if target == "inherited":
        _say_inherited(inherited(asked, load_parent, _tell), as_json)
        return
    if plan:
        _say_plan(run_plan(asked, load_parent), as_json)
        return
    if target != "steadiness" and scale is Scale.SMALL and data is None and requests is None and chosen != []:
        raise ReproduceError("--data or --requests: which questions? --tasks '' leaves them out")
    found = (steadiness if target == "steadiness" else work)(asked, load_parent, _tell)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(_steadily(found) if target == "steadiness" else _short(found, out))


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def _say_plan(planned: list[Any], as_json: bool) -> None:
    from sinkdlm.reproduce.command import about

    if as_json:
        rows = [{"run": one.job.name, "stages": one.stages, "seconds": one.seconds} for one in planned]
        typer.echo(json.dumps(rows, indent=1))
        return
    for one in planned:
        typer.echo(f"{one.job.name:28s}{'' if one.seconds is None else f'about {one.seconds:.0f} s'}")
    typer.echo(f"{len(planned)} runs are missing{about(planned)}")


def _say_inherited(found: dict[str, Any], as_json: bool) -> None:
    from sinkdlm.reproduce.inherited import summary

    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for line in summary(found):
        typer.echo(f"{line.share:7.1%} of attention on it, value norm {line.beside:.2f} of others': {line.label}")


def _short(found: dict[str, Any], out: Path) -> str:
    lines = [
        f"{claim['verdict']:30s}{target:10s}{claim['text']}" for target, one in found["targets"].items() for claim in one["claims"]
    ]
    return "\n".join([*lines, f"report  {out / 'report.html'}"])


def _steadily(found: dict[str, Any]) -> str:
    from sinkdlm.reproduce.steadiness import line_of

    return "\n".join(map(line_of, found["forms"].values()))


def _overlap(corpus: list[str], data: Path | None, requests: Path | None, records: Path, scale: Scale, as_json: bool) -> None:
    from sinkdlm.reproduce.overlap import count_overlap

    found = count_overlap(corpus, data, requests, records, scale.value)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for task, row in found["tasks"].items():
        typer.echo(f"{task:16s}{row['documents_hit']:6d} of {row['documents']:6d} documents share a 13-gram with the corpus")


def _lengths(parent: str | None, data: Path | None, requests: Path | None, records: Path, scale: Scale, as_json: bool) -> None:
    from sinkdlm.reproduce.inputs import Given
    from sinkdlm.reproduce.lengths import count_lengths, said
    from sinkdlm.reproduce.matrix import SCALES

    found = count_lengths(Given(parent=parent, data=data, requests=requests), records, SCALES.get(scale.value, SCALES["small"]))
    typer.echo(json.dumps(found, indent=1) if as_json else "\n".join(said(found)))
