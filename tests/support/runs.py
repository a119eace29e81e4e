"""Training runs of about a second, interrupted ones too."""

import json
from contextlib import chdir
from pathlib import Path

import pytest
from benchmarks import kills, tutorial
from rich.console import Console
from typer.testing import CliRunner

from sinkdlm import Recipe
from sinkdlm.training import loop

TINY = {"preset": "nano", "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24, "n_sinks": 1, "context_length": 64}


def recipe_of(folder: Path, /, **sections) -> Recipe:
    """Make a recipe that runs for a second: sections are merged over small defaults."""
    tables = {
        "model": TINY,
        "data": {"length": 16, "sets": {str(folder): 1.0}},
        "train": {"steps": 6, "batch": 4, "lr": 1e-3, "min_lr": 1e-4, "precision": "float32"},
        "eval": {"every": 3, "draws": 4},
        "log": {"probe_every": 3},
        "save": {"every": 2},
    }
    merged = {name: {**tables.get(name, {}), **sections.get(name, {})} for name in {*tables, *sections}}
    return Recipe.resolve(merged)


def run(recipe: Recipe, out: Path, **more):
    lines: list[str] = []

    class Listening(Console):
        def print(self, *objects, **_):
            lines.append(" ".join(map(str, objects)))

    result = loop.train(recipe, out, console=Listening(), **{"device": "cpu", **more})
    return result, lines


def metrics(out: Path, kind: str = "train") -> list[dict]:
    return [line for line in kills.read_metrics(out) if line["kind"] == kind]


def interrupted(recipe: Recipe, out: Path, monkeypatch, after: int, **more) -> None:
    """Run a recipe that crashes before step after + 1."""
    make_step = loop.Trainer._make_step

    def die(self, batch, lr, signals):
        if self.step == after:
            raise RuntimeError("a crash")
        return make_step(self, batch, lr, signals)

    with monkeypatch.context() as patched:
        patched.setattr(loop.Trainer, "_make_step", die)
        with pytest.raises(RuntimeError, match="a crash"):
            run(recipe, out, **more)


def load_parent(recipe, dtype):
    from sinkdlm.cli.loading import load_parent

    return load_parent(recipe, dtype)


def follow_tutorial(folder: Path) -> None:
    """Follow docs/tutorial.md at its real size, a minute: what was made, and printed.json."""

    def call(words: list[str]) -> str:
        from sinkdlm.cli.app import app

        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, (words, done.output)
        return done.output if words[0] == "train" else done.stdout

    with chdir(folder):
        Path("printed.json").write_text(json.dumps(tutorial.follow(call)))
