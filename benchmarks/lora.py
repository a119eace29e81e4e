"""Continue a trained model on text that it has not seen: all weights against LoRA, each at the best of three learning rates.

    python -m benchmarks.lora smollm2-135m-sink --set init.from=SmolLM2-135M.gguf --seen data/seen --unseen data/unseen \\
        --run runs/lora --time-limit 540 --out benchmarks/results

The recipe makes the base, unless --base names one. Each rate is tried on a share of the tokens; the best one trains on all of them.
Every run is a `sinkdlm train` with the same rows, noise and forwards. Loss is that of the unseen text's validation split after the
last step, with the same masks for all; memory is the peak of the whole run.

The same command goes on where the last one ended: a finished run is read from --run, an unfinished one resumes.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import result, write
from benchmarks.precision import train
from sinkdlm.config.shipped import find_recipe

KINDS = ("full", "lora")
_LAST = "eval.every=1000000"  # validation after the last step alone
_KEPT = ("train", "validation", "steps", "skipped", "tokens", "tokens_per_second", "mfu", "memory_gb", "seconds")


class Late(Exception):  # noqa: N818  (no error: it was asked for)
    """The time is up; what is made is kept."""


class Runs:
    """The runs of one folder: made once each."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self._began, self._longest = given, time.monotonic(), 0.0

    def make(self, name: str, changes: list[str], *, to_end: bool = False) -> dict[str, Any]:
        """Return a run's figures; train it first if there are none. to_end: keep its model."""
        path = self.given.run / f"{name}.json"
        if path.exists():
            return dict(json.loads(path.read_text()))
        limit, spent = self.given.time_limit, time.monotonic() - self._began
        if limit is not None and spent + self._longest > limit:
            raise Late(name)
        folder = self.given.run / name
        common = [*self.given.overrides, f"train.micro_batch={self.given.micro_batch}", "log.probe_every=0"]
        found = train(self.given.recipe, folder, "auto", [*common, *changes], to_end=to_end)
        found = {key: found[key] for key in _KEPT if key in found}
        path.write_text(json.dumps(found) + "\n")
        if not to_end:
            shutil.rmtree(folder)
        self._longest = max(self._longest, found["seconds"])
        print(f"{name}: {found['seconds']:.0f} s", file=sys.stderr, flush=True)
        return found

    def base(self) -> str:
        if self.given.base is not None:
            return str(self.given.base)
        changes = [f'data.sets={{"{self.given.seen}"=1}}', f"train.tokens={self.given.base_tokens}", "eval.every=0"]
        self.make("base", changes, to_end=True)
        return str(self.given.run / "base" / "model")

    def continued(self, base: str, kind: str, rate: float, tokens: float) -> dict[str, Any]:
        given = self.given
        changes = [f"init.from={base}", f'data.sets={{"{given.unseen}"=1}}', f"train.tokens={tokens}", _LAST]
        changes += [f"eval.draws={given.draws}", f"train.lr={rate}", f"train.min_lr={rate / 10}", "train.weight_decay=0"]
        if kind == "lora":
            changes += ["adapter.kind=lora", f"adapter.rank={given.rank}", f"adapter.alpha={2 * given.rank}"]
        return self.make(f"{kind}-{rate:g}-{tokens:g}", changes)


def loss_of(run: dict[str, Any]) -> float:
    return float(run["validation"][-1]["loss"])


def measure(given: argparse.Namespace) -> dict[str, Any]:
    runs = Runs(given)
    base = runs.base()
    figures: dict[str, Any] = {}
    for kind in KINDS:
        rates = given.rates if kind == "full" else given.lora_rates
        trials = {rate: runs.continued(base, kind, rate, given.tokens * given.share) for rate in rates}
        best = min(trials, key=lambda rate: loss_of(trials[rate]))
        losses = {f"{rate:g}": loss_of(run) for rate, run in trials.items()}
        figures[kind] = {"trials": losses, "best": best, **runs.continued(base, kind, best, given.tokens)}
    full, lora = (figures[kind] for kind in KINDS)
    figures["lora_to_full"] = {
        "loss": loss_of(lora) / loss_of(full) - 1,
        "tokens_per_second": lora["tokens_per_second"]["p50"] / full["tokens_per_second"]["p50"],
    }
    if "memory_gb" in full:
        figures["lora_to_full"]["memory"] = lora["memory_gb"] / full["memory_gb"]
    return figures


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=find_recipe)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="of every run")
    parser.add_argument("--seen", type=Path, default=Path("data/seen"), help="a prepared set, for the base")
    parser.add_argument("--base-tokens", type=float, default=40e6, help="tokens that the base trains on")
    parser.add_argument("--base", type=Path, default=None, help="a trained model, instead of one that the recipe makes")
    parser.add_argument("--unseen", type=Path, required=True, help="a prepared set with a validation split")
    parser.add_argument("--tokens", type=float, default=20e6, help="tokens of a run on the unseen text")
    parser.add_argument("--share", type=float, default=0.25, help="share of these tokens that a trial of a rate has")
    parser.add_argument("--rates", type=numbers, default=[1e-4, 3e-4, 1e-3], help="learning rates that all weights try")
    parser.add_argument("--lora-rates", type=numbers, default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--rank", type=int, default=64, help="alpha is twice as much")
    parser.add_argument("--micro-batch", type=int, default=32, help="rows of a forward, of every run")
    parser.add_argument("--draws", type=int, default=512, help="Monte Carlo draws of the validation")
    parser.add_argument("--run", type=Path, default=Path("runs/lora"), help="work files, and what is made")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds in which no run begins that would not end")
    parser.add_argument("--subject", default=None, help="part of the result's name; default: the recipe's name")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    given = parser.parse_args()
    given.run.mkdir(parents=True, exist_ok=True)
    try:
        figures = measure(given)
    except Late as late:
        print(f"time is up before {late}; the same command goes on", file=sys.stderr)
        return
    left_out = ("out", "run", "recipe", "subject", "time_limit")
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items() if key not in left_out}
    settings["recipe"] = given.recipe.stem
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(result("lora", figures, device=device, settings=settings), given.out, subject=given.subject or given.recipe.stem)


if __name__ == "__main__":
    main()
