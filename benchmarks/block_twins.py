"""Adapt an autoregressive model into block diffusion with and without a sink, alike in all else, and measure both.

    python -m benchmarks.block_twins --parent SmolLM2-135M.gguf --corpus data/corpus --requests requests.jsonl \\
        --run runs/block-twins --records runs/block-twins/records --time-limit 540 --out benchmarks/results

The runs are those of `sinkdlm reproduce`, group adapt, in blocks and with shifted logits, at one learning rate and on one seed: 39M
tokens each at --scale small. Measured: curves, the NELBO of held-out documents in blocks, LAMBADA, attention in every layer.

The same command goes on where the last one ended: within a run from its last saved state while --run is there, and a finished run
is read from --records, which is small. With --only, twins may be made on different machines. The result is written once
--records holds both, and then needs no data: give --scale and --records alone.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import result, write
from benchmarks.train import figures_of
from sinkdlm.checkpoint.directory import fingerprint
from sinkdlm.cli.loading import load_parent
from sinkdlm.errors import UserError
from sinkdlm.reproduce.claims import NELBO, pair
from sinkdlm.reproduce.command import open_work
from sinkdlm.reproduce.inputs import Asked
from sinkdlm.reproduce.matrix import ADAPT, SCALES, Job
from sinkdlm.reproduce.results import RunResult, read_results, write_text
from sinkdlm.reproduce.running import Bench, TimeUp, run_job

TWINS = ("vanilla", "sink")
SEED = 2  # not the reproduction's first, whose runs have further stages
TASK = "lambada_openai"
_CURVES = "curves"  # folder beside the results of runs
_LRS = {"nano": 2e-3, "small": 8e-4}  # small: what the reproduction's trials chose for a sink


def job_of(variant: str) -> Job:
    return Job(ADAPT, variant, SEED)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_twins(given: argparse.Namespace, asked: Asked) -> None:
    """Make the missing runs, stage by stage, until the time is up."""
    began = time.monotonic()

    def is_late() -> bool:
        return given.time_limit is not None and time.monotonic() - began > given.time_limit

    with open_work(asked, [], load_parent) as work:
        for variant in given.only or TWINS:
            job = job_of(variant)
            if job.name not in work.results:
                if is_late():
                    raise TimeUp(job.name)
                found = run_job(job, work.bench, given.lr, {}, say, is_late)
                say(f"{job.name}: {found.outcomes[NELBO].value:.4f} nats a token")
            curves = asked.folder / _CURVES / f"{job.name}.json"
            if not curves.exists():
                write_text(curves, json.dumps(curves_of(job, work.bench)) + "\n")


def curves_of(job: Job, bench: Bench) -> dict[str, Any]:
    """What benchmarks.train tells of a run, and a hash of its weights."""
    folder = bench.folder(job)
    starts = [one["step"] for one in json.loads((folder / "environment.json").read_text())["starts"]]
    found = figures_of(folder, [], starts, [])
    kept = ("train", "validation", "steps", "skipped", "tokens", "tokens_per_second", "mfu", "memory_gb", "started_at_steps")
    weights = fingerprint(next((folder / "model").glob("*.safetensors")))
    return {**{name: found[name] for name in kept if name in found}, "weights": weights["sha256"]}


def compare(runs: dict[str, RunResult]) -> dict[str, Any]:
    """The sink's twin less the other one: nats, or whatever the outcome counts, with the standard error over items."""
    apart = {}
    without, sink = (runs[variant] for variant in TWINS)
    for name in sink.outcomes:
        if (found := pair(without, sink, name)) is not None:
            error = {} if math.isnan(found.stderr) else {"stderr": found.stderr, "items": found.items}
            apart[name] = {"difference": found.difference, **error}
    return apart


def figures_from(runs: dict[str, RunResult], folder: Path) -> dict[str, Any]:
    twins = {
        variant: {
            **json.loads((folder / _CURVES / f"{run.name}.json").read_text()),
            "outcomes": {name: outcome.value for name, outcome in run.outcomes.items()},
            "layers": dict(run.layers),
            "seconds": run.facts["seconds"],
        }
        for variant, run in runs.items()
    }
    return {"twins": twins, "sink_less_none": compare(runs)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--scale", choices=list(_LRS), default="small")
    parser.add_argument("--parent", help="the autoregressive model, as `sinkdlm convert` reads it")
    parser.add_argument("--corpus", action="append", default=[], help="a prepared set, with a validation split")
    parser.add_argument("--requests", type=Path, help="what `sinkdlm eval --write-requests` wrote, with LAMBADA in it")
    parser.add_argument("--block", type=int, default=None, help="default: 32, at scale nano 8")
    parser.add_argument("--lr", type=float, default=None, help="of both twins; default: the scale's")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="as in `sinkdlm train`")
    parser.add_argument("--only", action="append", choices=TWINS, help="make this twin alone")
    parser.add_argument("--run", type=Path, default=Path("runs/block-twins"), help="work files")
    parser.add_argument("--records", type=Path, default=None, help="results of runs; default: records/ in --run")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds after which no stage begins")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    given = parser.parse_args()
    given.block = given.block or (8 if given.scale == "nano" else 32)
    given.lr = given.lr or _LRS[given.scale]
    given.records = given.records or given.run / "records"
    return given


def main() -> None:
    given = arguments()
    changes = [f"model.block_size={given.block}", "model.shift_logits=true", "eval.every=100", *given.overrides]
    asked = Asked(
        "",
        given.scale,
        given.run,
        records=given.records,
        parent=given.parent,
        corpus=given.corpus,
        requests=given.requests,
        tasks=[TASK],
        overrides=changes,
        keep_weights=True,
        device=given.device,
    )
    try:
        names = {variant: job_of(variant).name for variant in TWINS}
        if not all((given.records / f"{name}.json").exists() for name in names.values()):
            make_twins(given, asked)
        made = read_results(given.records, given.scale)
    except TimeUp as late:
        say(f"time is up in {late}; the same command goes on")
        return
    except UserError as failure:
        sys.exit(f"benchmarks.block_twins: {failure}")
    runs = {variant: made[name] for variant, name in names.items() if name in made}
    if len(runs) < len(TWINS):
        say(f"{', '.join(runs)} is made; the result is written once both twins are")
        return
    one = runs["sink"]
    settings = {"scale": given.scale, "lr": one.lr, "seed": SEED, "documents": SCALES[given.scale].documents}
    settings |= {name: one.facts[name] for name in ("changes", "data", "recipe")}
    settings["made_on"] = {variant: run.facts["environment"] for variant, run in runs.items()}
    entry = result("block_twins", figures_from(runs, given.records), device=given.device, settings=settings)
    write(entry, given.out, subject="smollm2-135m" if given.scale == "small" else given.scale)


if __name__ == "__main__":
    main()
