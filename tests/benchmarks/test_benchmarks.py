import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import cold_start, curves, measuring, page, precision, train_step
from benchmarks.measuring import RESULTS, measure, measure_together, quantiles
from benchmarks.page import page_text

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
def test_benchmark_writes_a_record(name, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--device", "cpu", "--out", str(tmp_path), *SMALL.get(name, [])],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "SINKDLM_COMMIT": "abc"}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == json.loads(run.stdout)
    check_record(json.loads(run.stdout))
    assert json.loads(run.stdout)["commit"] == "abc"


def check_record(entry):
    assert {"benchmark", "command", "commit", "date", "hardware", "versions", "settings", "figures"} == set(entry)
    assert entry["command"].startswith("python -m benchmarks.")
    assert {"python", "torch"} <= set(entry["versions"])
    timed = [value for value in walk(entry["figures"]) if isinstance(value, dict) and "p50" in value]
    untimed = entry["benchmark"] in ("memory", "likelihood", "curves") or entry["settings"].get("agreement_only")
    assert timed or untimed  # peaks; one long run of each form; losses
    for value in timed:
        assert 0 < value["p20"] <= value["p50"] <= value["p80"]


def walk(value):
    yield value
    if isinstance(value, dict):
        for inner in value.values():
            yield from walk(inner)


def test_every_committed_record_has_the_form():
    paths = sorted(RESULTS.glob("*.json"))
    assert len(paths) == 32
    for path in paths:
        entry = json.loads(path.read_text())
        check_record(entry)
        assert ("gpu" in entry["hardware"]) != ("-cpu-" in path.name)


def test_a_cpu_trains_faster_than_the_plain_form_where_blocks_are_one():
    paths = sorted(RESULTS.glob("train_step-nano-*.json"))
    assert len(paths) == 2
    for number, path in enumerate(paths, start=1):
        record = json.loads(path.read_text())
        assert record["hardware"]["threads"] == number
        assert record["figures"]["to_official"]["sink-whole"] >= 1.3  # the official form has a sink too


def test_checkpoints_behind_cost_a_fraction_of_those_before():
    (path,) = RESULTS.glob("checkpoint-*.json")
    figures = json.loads(path.read_text())["figures"]
    assert figures["behind"]["saves"] == figures["before"]["saves"] > 1
    assert figures["behind"]["lost_ms_per_save"] < 0.2 * figures["before"]["lost_ms_per_save"]


def test_the_serving_record_shows_what_a_server_promises():
    (path,) = RESULTS.glob("serving-*.json")
    figures = json.loads(path.read_text())["figures"]
    assert figures["together_to_one_by_one"] >= 3
    assert figures["deterministic"]["differing"] == 0
    for form in ("together", "one_by_one", "deterministic"):
        assert figures[form]["broken"] == 0
        assert set(figures[form]["refused"]) <= {"429"}
        assert figures[form]["requests"] > 100


def test_gpu_records_show_what_the_core_promises():
    """The figures that CI cannot measure, as a GPU measured them."""
    names = ("loss", "noise", "attention")
    loss, noise, attention = (json.loads((RESULTS / f"{name}-nvidia-h200.json").read_text())["figures"] for name in names)
    big = loss["8192x896x151936"]
    assert big["peak_bytes"]["chunked"] <= big["peak_bytes"]["full_logits"] / 5
    assert big["ms_forward_backward"]["chunked"]["p50"] <= big["ms_forward_backward"]["full_logits"]["p50"]
    assert noise["equal_to_cpu"]
    assert noise["ms_corrupt"]["p50"] < 0.2
    checked = 0
    for row in attention.values():
        errors = row.get("relative_error", {})
        for form, of_form in errors.items():
            for name, error in of_form.items():
                limit = errors["plain"].get(name, max(errors["plain"].values()))
                assert error <= 1.5 * limit, (form, name)
                checked += 1
    assert checked == 2 * (4 + 5 * 6)


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


_NO_FORM = "official, official-compiled, or one of vanilla, sink and gate"


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
    check_record(entry)
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
    check_record(entry)
    assert entry["settings"]["start"] == 512
    assert 'from = "start/model"' in entry["settings"]["resolved"]
    made, found = entry["figures"]["precisions"], entry["figures"]["compared"]["float64 to float32"]
    assert [len(one["validation"]) for one in made.values()] == [2, 2]
    losses = [one["validation"][-1]["loss"] for one in made.values()]
    assert found["validation_at_end"] == pytest.approx(losses[1] / losses[0] - 1)
    assert 0 < abs(found["validation_at_end"]) < 1e-4
    text = page_text(tmp_path / "out")
    assert "## The same run in several precisions" in text
    assert "float64 to float32: validation" in text


@pytest.mark.slow
def test_cold_and_warm_starts_are_timed(tmp_path, monkeypatch):
    words = ["cold_start", "--model", "nano", "--rows", "2", "--length", "32", "--starts", "1", "--set", "train.compile=none"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "out"), "--profile", str(tmp_path / "profile.txt")])
    cold_start.main()
    (path,) = (tmp_path / "out").iterdir()
    entry = json.loads(path.read_text())
    check_record(entry)
    assert "(train)" in (tmp_path / "profile.txt").read_text()
    assert 0 < entry["figures"]["warm_to_cold"] < 1  # of the bytecode alone
    for kind in ("cold", "installed", "warm"):
        parts = [entry["figures"][f"seconds_to_{name}"][kind]["p50"] for name in ("folder", "weights", "first_step")]
        assert parts == sorted(parts)
