import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import cold_start, curves, measuring, page, precision, train_step
from benchmarks.check.form import check_result
from benchmarks.measuring import measure, measure_together, quantiles
from benchmarks.page import parts, read_results

from sinkdlm.data.synthetic import prepare_example
from sinkdlm.planning.formulas import training_flops

ROOT = Path(__file__).parents[2]


def test_quantiles_and_timer():
    assert quantiles([float(x) for x in range(11)]) == {"p20": 2.0, "p50": 5.0, "p80": 8.0, "repeats": 11}
    calls = []
    timed = measure(lambda: calls.append(1), "cpu", warmup=2, repeats=7)
    assert timed["repeats"] == 7
    assert len(calls) == 2 + 1 + 7
    together = measure_together({"a": lambda: sum(range(200_000)), "b": lambda: None}, "cpu", repeats=5)
    assert together["a"]["p50"] > together["b"]["p50"] >= 0


SMALL = {"sampling": ["--length", "24", "--steps", "6", "--batch", "2", "--block", "8", "--repeats", "1", "--tokens-per-step", "5"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noise", "loss", "attention", "sampling"])
def test_benchmark_writes_a_result(name, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--device", "cpu", "--out", str(tmp_path), *SMALL.get(name, [])],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "SINKDLM_COMMIT": "abc"}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == json.loads(run.stdout)
    check_result(json.loads(run.stdout))
    assert json.loads(run.stdout)["commit"] == "abc"


def test_a_timed_step_is_a_training_step_in_every_form():
    """The official form and ours begin with the same loss, go on to the same one, and learn."""
    recipe = train_step.recipe_of("nano", 32, n_sinks=1)
    losses = {}
    for form in ("official", "sink"):
        step = train_step.Step(recipe, form, 3, torch.device("cpu"))
        losses[form] = [step().item() for _ in range(4)]
    assert losses["official"] == pytest.approx(losses["sink"], rel=1e-5)
    assert len(set(losses["sink"])) == 4
    float8 = train_step.Step(recipe, "sink-fp8", 3, torch.device("cpu"))().item()
    assert float8 != losses["sink"][0]
    assert float8 == pytest.approx(losses["sink"][0], rel=0.01)
    assert train_step.flops_of(step) == 96 * training_flops(recipe.model, 32, ends_early=True)
    kinds = {
        "nvjet_hsh_128x256": "matrix products",
        "cudnn_generated_fort_native_sdpa": "attention",
        "triton_red_fused": "compiled",
    }
    assert {name: train_step.kind_of(name) for name in kinds} == kinds


_NO_FORM = "official, official-compiled, or one of vanilla, sink, gate and logit"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--forms", "sink,lane"], f"no form 'lane': {_NO_FORM}"),
        (["--forms", "sink,sink-fp16"], f"no form 'sink-fp16': {_NO_FORM}"),
        (["--forms", "official-fp8,sink"], f"no form 'official-fp8': {_NO_FORM}"),
        (["--forms", "sink,sink-whole-blocks"], "form 'sink-whole-blocks' sets train.compile twice"),
        (["--forms", "sink,sink-fp8-residual"], "form 'sink-fp8-residual' needs --device cuda"),
        (["--profile", "sink,gate"], f"no form 'sink,gate': {_NO_FORM}"),
    ],
)
def test_a_form_that_is_none_is_refused_before_anything_is_measured(given, said, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_step", "--device", "cpu", *given])
    with pytest.raises(SystemExit):
        train_step.main()
    assert said in capsys.readouterr().err


def test_a_form_may_have_several_changes():
    assert train_step.split_form("sink-fp8-residual") == ({"n_sinks": 1}, {"precision": "fp8", "residual": "bf16"})
    assert train_step.split_form("official-compiled") == ({"n_sinks": 1}, {})


def test_kernels_are_timed_one_by_one_and_shown_beside_each_other():
    x = torch.ones(64, 64)
    forms = [measuring.kernel_times(run, "cpu", repeats=2) for run in (lambda: x @ x, lambda: (x @ x).exp())]
    calls = [{one["kernel"]: one["calls"] for one in kernels} for kernels in forms]
    assert calls[0]["aten::mm"] == calls[1]["aten::mm"] == calls[1]["aten::exp"] == 1
    assert "aten::exp" not in calls[0]
    assert [one["ms"] for one in forms[1]] == sorted((one["ms"] for one in forms[1]), reverse=True)
    made = [{"kernel": "a", "ms": 1.0}, {"kernel": "b", "ms": 0.5}], [{"kernel": "b", "ms": 2.0}, {"kernel": "c", "ms": 0.25}]
    assert page.kernel_rows(*made) == [["`b`", "0.5000", "2.0000"], ["`a`", "1.0000", ""], ["`c`", "", "0.2500"]]


@pytest.mark.slow
def test_curves_of_the_fast_step_lie_closer_to_the_plain_one_than_seeds_do(tmp_path, monkeypatch, capsys):
    rows = curves.make_rows(0, steps=3, rows=2, length=50, vocab=64)
    turns = (rows[..., 1:] - 5 * rows[..., :-1] - 1) % 64
    assert set(turns.flatten().tolist()) == {97 * choice % 64 for choice in range(4)}
    assert len({tuple(row.tolist()) for row in rows.flatten(0, 1)}) == 6
    short = "--device cpu --model nano --rows 2 --length 32 --steps 40"
    monkeypatch.setattr(sys, "argv", ["curves", *short.split(), "--out", str(tmp_path)])
    curves.main()
    entry = json.loads(capsys.readouterr().out)
    check_result(entry)
    losses = entry["figures"]["losses"]
    assert {name: len(curve) for name, curve in losses.items()} == dict.fromkeys(
        ("official, seed 0", "official, seed 1", "sink, seed 0"), 40
    )
    assert entry["figures"]["sink to official"]["most"] < entry["figures"]["between_seeds"]["mean"] / 10


@pytest.mark.slow
def test_precisions_are_compared_on_the_same_run(tmp_path, monkeypatch):
    prepare_example(tmp_path / "text", documents=60)
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        f'[model]\npreset = "nano"\n[data]\nlength = 32\n[data.sets]\n"{tmp_path / "text"}" = 1\n'
        "[train]\nsteps = 24\nbatch = 4\nlr = 4e-3\n[eval]\nevery = 12\n"
    )
    words = ["precision", str(recipe), "--precisions", "float32,float64", "--start", "512", "--set", "train.compile=none"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "out")])
    precision.main()
    (path,) = (tmp_path / "out").iterdir()
    entry = json.loads(path.read_text())
    check_result(entry)
    assert entry["settings"]["start"] == 512
    assert 'from = "start/model"' in entry["settings"]["resolved"]
    made, found = entry["figures"]["precisions"], entry["figures"]["compared"]["float64 to float32"]
    assert [len(one["validation"]) for one in made.values()] == [2, 2]
    losses = [one["validation"][-1]["loss"] for one in made.values()]
    assert found["validation_at_end"] == pytest.approx(losses[1] / losses[0] - 1)
    assert 0 < abs(found["validation_at_end"]) < 1e-4
    (text,) = parts(read_results(tmp_path / "out")).values()
    assert "float64 to float32: validation" in text


@pytest.mark.slow
def test_cold_and_warm_starts_are_timed(tmp_path, monkeypatch):
    words = ["cold_start", "--model", "nano", "--rows", "2", "--length", "32", "--starts", "1", "--set", "train.compile=none"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "out"), "--profile", str(tmp_path / "profile.txt")])
    cold_start.main()
    (path,) = (tmp_path / "out").iterdir()
    entry = json.loads(path.read_text())
    check_result(entry)
    assert "(train)" in (tmp_path / "profile.txt").read_text()
    assert 0 < entry["figures"]["warm_to_cold"] < 1  # of the bytecode alone
    for kind in ("cold", "installed", "warm"):
        parts = [entry["figures"][f"seconds_to_{name}"][kind]["p50"] for name in ("folder", "weights", "first_step")]
        assert parts == sorted(parts)
