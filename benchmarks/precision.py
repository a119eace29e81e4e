"""Train the same run in several precisions, and compare losses, validation and tokens a second.

    python -m benchmarks.precision smdm-472m-sink --precisions bf16,fp8 --subject smdm-472m \\
        --set 'data.sets={"data/corpus"=1}' --set train.tokens=40e6 --set train.batch=32 --out benchmarks/results

Each precision is a `sinkdlm train` with the same rows, noise and initial weights: only the matmuls' precision differs.

--start 20e6: begin with weights trained on that many tokens (in another order) in the first precision, at a constant rate. From
random weights, a model first learns only token frequencies and stays on this plateau for a while; when it leaves it may depend on
rounding alone. The effect of a precision on learning shows after the plateau.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import result, write
from benchmarks.train import figures_of, reaches, run
from sinkdlm.cli.loading import load_recipe
from sinkdlm.config.shipped import find_recipe

_KEPT = ("train", "validation", "steps", "skipped", "tokens", "tokens_per_second", "mfu", "memory_gb")


def train(recipe: Path, out: Path, precision: str, overrides: list[str], *, to_end: bool = False) -> dict[str, Any]:
    """Train in one precision and return its figures. to_end: keep the trained model; else end after the last validation."""
    command = [sys.executable, "-m", "sinkdlm", "train", str(recipe), "--out", str(out)]
    command += [word for override in (*overrides, f"train.precision={precision}") for word in ("--set", override)]

    def is_validated(lines: list[dict[str, Any]]) -> bool:
        facts = out / "run.json"
        return facts.exists() and reaches("validation", json.loads(facts.read_text())["steps"])(lines)

    seconds = run(command, out / "metrics.jsonl", None if to_end else is_validated)
    found = figures_of(out, [], [0], [seconds])
    return {key: found[key] for key in _KEPT if key in found} | {"seconds": seconds}


def starting(recipe: Path, overrides: list[str], tokens: float) -> list[str]:
    """Overrides of the run that makes the initial weights: another seed, and a constant rate after warm-up."""
    given = load_recipe(recipe, overrides).train
    return [*overrides, f"train.tokens={tokens}", f"train.seed={given.seed + 1}", f"train.min_lr={given.lr}", "eval.every=0"]


def compare(base: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Relative differences of the validation losses and of tokens a second."""
    pairs = zip(base["validation"], other["validation"], strict=True)
    apart = [new["loss"] / old["loss"] - 1 for old, new in pairs]
    return {
        "validation_at_end": apart[-1],
        "validation_most": max(apart, key=abs),
        "tokens_per_second": other["tokens_per_second"]["p50"] / base["tokens_per_second"]["p50"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=find_recipe)
    parser.add_argument("--precisions", default="bf16,fp8", help="the first one is the baseline")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--start", type=float, default=0, help="pretrain the initial weights on this many tokens")
    parser.add_argument("--subject", default=None, help="part of the result's name; default: the recipe's name")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    given = parser.parse_args()
    first, *others = given.precisions.split(",")
    with tempfile.TemporaryDirectory() as folder:
        if given.start:
            train(given.recipe, Path(folder) / "start", first, starting(given.recipe, given.overrides, given.start), to_end=True)
        begun = [f"init.from={folder}/start/model"] if given.start else []
        made = {name: train(given.recipe, Path(folder) / name, name, [*given.overrides, *begun]) for name in (first, *others)}
        resolved = (Path(folder) / first / "recipe.toml").read_text().replace(f"{folder}/", "")
    figures = {"precisions": made, "compared": {f"{name} to {first}": compare(made[first], made[name]) for name in others}}
    settings = {key: getattr(given, key) for key in ("overrides", "precisions", "start")}
    settings |= {"recipe": given.recipe.stem, "resolved": resolved}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(result("precision", figures, device=device, settings=settings), given.out, subject=given.subject or given.recipe.stem)


if __name__ == "__main__":
    main()
