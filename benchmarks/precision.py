"""The same run in several precisions: losses, validation and tokens a second beside each other.

    python -m benchmarks.precision recipes/paper/smdm-472m-sink.toml --precisions bf16,fp8 --subject smdm-472m \\
        --set 'data.sets={"data/corpus"=1}' --set train.tokens=40e6 --set train.batch=32 --out benchmarks/results

Each is a `sinkdlm train` of its own with the same rows, noise and first weights: what differs is what products are computed in.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import record, write
from benchmarks.train import figures_of, run

_KEPT = ("train", "validation", "steps", "skipped", "tokens", "tokens_per_second", "mfu", "memory_gb")


def train(recipe: Path, out: Path, precision: str, overrides: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "sinkdlm", "train", str(recipe), "--out", str(out)]
    command += [word for override in (*overrides, f"train.precision={precision}") for word in ("--set", override)]
    seconds = run(command, out / "metrics.jsonl", None)
    found = figures_of(out, [], [0], [seconds])
    return {key: found[key] for key in _KEPT if key in found} | {"seconds": seconds}


def compare(base: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Relative: of each validation, that of the end last; and of tokens a second."""
    pairs = zip(base["validation"], other["validation"], strict=True)
    apart = [new["loss"] / old["loss"] - 1 for old, new in pairs]
    return {
        "validation_at_end": apart[-1],
        "validation_most": max(apart, key=abs),
        "tokens_per_second": other["tokens_per_second"]["p50"] / base["tokens_per_second"]["p50"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--precisions", default="bf16,fp8", help="the first is what others are compared with")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--subject", default=None, help="of the record's name; by default the recipe's")
    parser.add_argument("--out", type=Path, default=None, help="folder for the record, for example benchmarks/results")
    given = parser.parse_args()
    first, *others = given.precisions.split(",")
    with tempfile.TemporaryDirectory() as folder:
        made = {name: train(given.recipe, Path(folder) / name, name, given.overrides) for name in (first, *others)}
        resolved = (Path(folder) / first / "recipe.toml").read_text()
    figures = {"precisions": made, "compared": {f"{name} to {first}": compare(made[first], made[name]) for name in others}}
    settings = {"recipe": given.recipe.stem, "overrides": given.overrides, "precisions": given.precisions, "resolved": resolved}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(record("precision", figures, device=device, settings=settings), given.out, subject=given.subject or given.recipe.stem)


if __name__ == "__main__":
    main()
