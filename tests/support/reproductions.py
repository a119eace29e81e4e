"""Invented results: variants with planted effects, on items that vary far more. And a smaller nano."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sinkdlm.cli import entry as cli
from sinkdlm.demo import language
from sinkdlm.reproduce import nano, running
from sinkdlm.reproduce.matrix import SCALES
from sinkdlm.reproduce.results import RUN, TRIAL, Outcome, RunResult

ITEMS = 200
TOKENS = 10.0  # tokens of an item
FACTS = {
    "tokens": 1000,
    "steps": 10,
    "skipped": 0,
    "changes": {},
    "data": {"corpus": "x"},
    "environment": {"device": "made up", "commit": "abc", "torch": "2"},
    "norms": {"top": 2.0, "sink": {"mean": 0.5, "n": 3, "counts": [2, 1]}, "normal": {"mean": 1.5, "n": 3, "counts": [1, 2]}},
    "path": {"layer": 1, "top": [0, 3, 5], "received": [0.4, 0.5, 0.4]},
}


def result(group: str, variant: str, seed: int, effect: float, *, scale: str = "small", seeds: float = 0.001) -> RunResult:
    """effect: nats per token that the variant adds; seeds: its spread from seed to seed."""
    items = np.random.default_rng([seed, 7]).gamma(4.0, 12.0, ITEMS)  # shared by variants: hard items are hard for all
    own = np.random.default_rng([seed, *map(ord, group + variant)])
    shift = effect + seeds * own.standard_normal()
    noisy = items + TOKENS * shift + own.normal(0, 0.05, ITEMS)
    right = own.random(ITEMS) < 0.3
    outcomes = {
        name: Outcome.of_items(noisy, TOKENS * ITEMS) for name in ("nelbo", "lambada_openai.nll", "arc_easy.nll", "piqa.nll")
    }
    outcomes |= {f"{task}.acc": Outcome.of_items(right, ITEMS) for task in ("arc_easy", "piqa")}
    if group == "sft":
        outcomes = {"gsm8k.nll": Outcome.of_items(noisy, TOKENS * ITEMS)}
    values = {"turnover": 0.4, "norm_ratio": 0.5, "middle_sink_times": 20.0, "middle_norm_ratio": 0.3, "sink_mass": 0.3}
    values["sink_heads"] = 0.05 if variant.startswith("sink") else 0.4
    outcomes |= {f"attention.{name}": Outcome.of_value(value + 0.01 * own.standard_normal()) for name, value in values.items()}
    layers: dict[str, list[float | None]] = {name: [0.1, 0.2, 0.3] for name in ("sink_mass", "sink_value_norm", "normal_norm")}
    tried = {"trials": {f"{rate:g}": 1.0 for rate in SCALES[scale].lrs[group]}} if group in SCALES[scale].lrs else {}
    facts = {**FACTS, **tried, "seconds": {"train": 1.0, "validation": 1.0, "answers": 1.0, "capture": 1.0}}
    return RunResult(f"{group}-{variant}-s{seed}", RUN, scale, group, variant, seed, 4e-4, outcomes, layers, facts)


def trial(group: str, variant: str, number: int, lr: float, nelbo: float, *, scale: str = "small") -> RunResult:
    outcomes = {"nelbo": Outcome.of_items([nelbo] * 4, 4)}
    return RunResult(
        f"{group}-{variant}-lr{number}", TRIAL, scale, group, variant, 0, lr, outcomes, {}, {**FACTS, "seconds": {"train": 1.0}}
    )


def matrix(effects: dict[tuple[str, str], float], n_seeds: int = 5, **options: float) -> dict[str, RunResult]:
    """(group, variant) -> effect, for each seed."""
    made = [
        result(group, variant, seed, effect, **options)
        for (group, variant), effect in effects.items()
        for seed in range(1, n_seeds + 1)
    ]
    return {one.name: one for one in made}


CUT = ("--set", "train.steps=4", "--seeds", "1")
LESS = {"documents": 12, "trajectories": 2, "examples": 20, "tasks": {"lambada_openai": 8, "arc_easy": 5, "gsm8k_two_stage": 8}}
TIMES = ("seconds", "made", "command")


def told(found: dict) -> dict:
    """Return a report without its timings."""
    if isinstance(found, dict):
        return {key: told(value) for key, value in found.items() if key not in TIMES}
    return [told(value) for value in found] if isinstance(found, list) else found


@contextmanager
def less_of_nano() -> Iterator[None]:
    """Run nano with fewer questions and texts, and a parent that hardly learned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano, "_STEPS", 4)
        patch.setattr(language, "N_STORIES", 600)
        patch.setitem(SCALES, "nano", replace(SCALES["nano"], **LESS))
        yield


def reproduce(*words: object, whole: bool = False) -> int:
    """Run `sinkdlm reproduce`. whole: with nano at full size."""
    with pytest.MonkeyPatch.context() as patch, nullcontext() if whole else less_of_nano():
        patch.setattr(sys, "argv", ["sinkdlm", "reproduce", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
    return left.value.code or 0


def make_cut(folder: Path) -> None:
    """A small Figure 3: trials, an adapted run and its fine-tuning, stopped by Ctrl-C in mid-run and started again."""
    watch = running.watch

    def interrupt(*given: object) -> object:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "watch", interrupt)
        assert reproduce("figure3", "--out", folder / "cut", *CUT) == 130
    parts = sorted(path.stem for path in (folder / "cut" / "parts" / "adapt-sink-s1").glob("*.json"))
    (folder / "parts").write_text(json.dumps(parts))
    assert running.watch is watch
    assert reproduce("figure3", "--out", folder / "cut", *CUT) == 0
