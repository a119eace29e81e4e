"""Train a recipe, kill it once in the middle and resume it; record loss curve, tokens a second, MFU and sinks.

    python -m benchmarks.train smdm-34m-sink --kill-at 450 --out benchmarks/results \\
        --set 'data.sets={"data/small-llama2"=1}'

The run is `sinkdlm train`, as a user starts it. The steps between the last state and the kill are made twice, and their losses
compared.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import quantiles, result, write
from sinkdlm.config.shipped import find_recipe

_SETTLED = 20  # untimed steps after a start: compilation, caches
_POINTS = 200  # points of a curve to keep


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def run(command: list[str], metrics: Path, ends: Callable[[list[dict[str, Any]]], bool] | None = None) -> float:
    """Run a command until it ends, or kill it once `ends` is true of its metrics; return the seconds."""
    began = time.monotonic()
    process = subprocess.Popen(command)
    while process.poll() is None:
        time.sleep(0.2)
        if ends is not None and ends(lines_of(metrics)):
            process.send_signal(signal.SIGKILL)
            process.wait()
            return time.monotonic() - began
    if process.returncode:
        raise SystemExit(f"the run failed with status {process.returncode}")
    return time.monotonic() - began


def reaches(kind: str, step: int) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda lines: any(line["kind"] == kind and line["step"] >= step for line in lines)


def thin(lines: list[dict[str, Any]], keys: list[str]) -> dict[str, list[Any]]:
    stride = max(1, len(lines) // _POINTS)
    kept = [line for i, line in enumerate(lines) if i % stride == 0 or i == len(lines) - 1]
    return {key: [line[key] for line in kept] for key in keys}


def figures_of(out: Path, before: list[dict[str, Any]], starts: list[int], seconds: list[float]) -> dict[str, Any]:
    lines = lines_of(out / "metrics.jsonl")
    trained = [line for line in lines if line["kind"] == "train"]
    settled = [line for line in trained if not any(start < line["step"] <= start + _SETTLED for start in starts)] or trained
    again = {line["step"]: line["loss"] for line in trained}
    replayed = [line for line in before if line["kind"] == "train" and line["step"] > starts[-1]] if len(starts) > 1 else []
    worst = max((abs(line["loss"] - again[line["step"]]) / abs(line["loss"]) for line in replayed), default=None)
    figures: dict[str, Any] = {
        "train": thin(trained, ["step", "tokens", "loss", "grad_norm", "lr"]),
        "validation": [
            {key: line[key] for key in ("step", "loss", "stderr", "nll_by_ratio")} for line in lines if line["kind"] == "validation"
        ],
        "probe": [{key: line[key] for key in ("step", "layers")} for line in lines if line["kind"] == "probe"],
        "steps": len(trained),
        "skipped": trained[-1]["skipped"],
        "tokens": trained[-1]["tokens"],
        "tokens_per_second": quantiles([line["timing"]["tokens_per_second"] for line in settled]),
        "lives_seconds": seconds,
        "started_at_steps": starts,
        "replayed_steps": len(replayed),
        "replayed_loss_worst_relative_difference": worst,
    }
    if settled[0]["timing"].get("mfu"):
        figures["mfu"] = quantiles([line["timing"]["mfu"] for line in settled])
        figures["memory_gb"] = settled[-1]["timing"]["memory_gb"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=find_recipe)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--kill-at", type=int, default=None, help="step after which the run is killed once")
    parser.add_argument("--subject", default=None, help="part of the result's name; default: the recipe's name")
    parser.add_argument("--run", type=Path, default=None, help="keep the run folder at this path")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = given.run or Path(folder) / given.recipe.stem
        command = [sys.executable, "-m", "sinkdlm", "train", str(given.recipe), "--out", str(out)]
        command += [word for override in given.overrides for word in ("--set", override)]
        seconds, before = [], []
        if given.kill_at is not None:
            seconds.append(run(command, out / "metrics.jsonl", reaches("train", given.kill_at)))
            before = lines_of(out / "metrics.jsonl")
        seconds.append(run(command, out / "metrics.jsonl"))
        starts = [start["step"] for start in json.loads((out / "environment.json").read_text())["starts"]]
        figures = figures_of(out, before, starts, seconds)
        resolved = (out / "recipe.toml").read_text()
    settings = {"recipe": given.recipe.stem, "overrides": given.overrides, "kill_at": given.kill_at, "resolved": resolved}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(result("train", figures, device=device, settings=settings), given.out, subject=given.subject or given.recipe.stem)


if __name__ == "__main__":
    main()
