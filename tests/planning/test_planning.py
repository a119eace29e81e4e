"""Plans: they match measurements within ten per cent, and the changes that they propose fit."""

import dataclasses
import json
import re
import shlex

import pytest
from benchmarks import calibrate
from typer.testing import CliRunner

from sinkdlm import DiffusionLM, ModelConfig, Recipe
from sinkdlm.cli.app import app
from sinkdlm.config.shipped import RECIPES
from sinkdlm.errors import UserError
from sinkdlm.planning.formulas import CHIPS, PEAK_FLOPS, Layout, find_chip, fitting_micro_batch, settle_precision, training_flops
from sinkdlm.planning.plan import Machine, changes_that_fit, describe, describe_all, line_of_run, make_plan, say_hours
from sinkdlm.planning.step_time import calibration, exchange_seconds, fitted, step_seconds

PAPER = RECIPES / "paper"
SINK = PAPER / "smdm-472m-sink.toml"
NARROW = ("--set", "train.residual=bf16")


def plan_of(path=SINK, device="h100", ranks=8, overrides=(), **more):
    return make_plan(Recipe.load(path, overrides), path.stem, Machine(device, ranks), **more)


def test_a_gate_of_another_width_is_counted_and_planned(monkeypatch):
    """A gate's width is told in one place: parameters, weights and plans follow it."""
    flags = {"vocab_size": 32, "mask_id": 32, "n_layers": 1, "n_heads": 2, "d_model": 16, "d_ff": 24, "context_length": 32}
    before, plain = ModelConfig(**flags, gate="headwise").count_parameters(), plan_of(overrides=["model.gate=headwise"])
    monkeypatch.setattr(ModelConfig, "gate_width", property(lambda config: 6 if config.gate == "headwise" else 0))
    config = ModelConfig(**flags, gate="headwise")
    model = DiffusionLM(config, seed=0)
    assert config.count_parameters().total - before.total == 16 * (6 - 2)
    assert sum(weight.numel() for weight in model.parameters()) == config.count_parameters().total
    assert plan_of(overrides=["model.gate=headwise"]).memory != plain.memory


def run(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


# -- against the records --------------------------------------------------------------------------------------------------------


def test_planned_rates_are_within_ten_per_cent_of_the_measured_ones():
    """For every record that times a whole step of ours: train-*, train_step-*, checkpoint-*."""
    steps = [step for step in calibrate.timed_steps() if step.date >= calibration()["since"]]
    assert len(steps) >= 10
    assert len({step.result for step in steps}) >= 6
    for step in steps:
        assert step.planned_seconds == pytest.approx(step.seconds, rel=0.1), f"{step.name} ({step.result})"


def test_planned_memory_is_within_ten_per_cent_of_the_measured_peaks():
    """Today's formula against peaks of a rank on an H200: train-*, train_step-*, memory-*."""
    peaks = calibrate.peaks(since=calibration()["since"])
    assert len(peaks) >= 31
    assert len({peak.result for peak in peaks}) >= 5
    for peak in peaks:
        assert peak.planned == pytest.approx(peak.measured, rel=0.1), f"{peak.name} ({peak.result})"


def test_a_plan_counts_logits_as_the_loss_makes_them():
    from sinkdlm.fast.objective import head_chunk
    from sinkdlm.planning import formulas

    for vocab in (16, 32000, 32001, 49152, 78125, 78126, 151936, 10**6):
        assert formulas.head_chunk(vocab) == head_chunk(vocab), vocab


def test_the_constants_are_those_that_the_records_give():
    """Fails until `python -m benchmarks.calibrate` has run on the current records."""
    kept, now = calibration(), calibrate.table(since=calibration()["since"])
    assert {key: now[key] for key in ("device", "records")} == {key: kept[key] for key in ("device", "records")}
    assert now["constants"] == pytest.approx(kept["constants"], rel=0.01)


def test_a_record_of_steps_is_read_in_all_its_forms(tmp_path):
    """train_step: our forms and the sweep, never the official one; a peak counts only where the model was alone in memory."""
    timed = {"ms_step": {"p50": 100.0}, "peak_gb": 20.0}
    entry = {
        "benchmark": "train_step",
        "date": "2026-11-16",
        "hardware": {"gpu": "NVIDIA H200"},
        "settings": {"model": "smdm-472m", "rows": 16, "length": 2048, "alone": False, "graphs": "auto"},
        "figures": {
            "forms": dict.fromkeys(("sink", "official", "gate", "gate-residual", "sink-fp8"), timed),
            "sweep": [{"rows": 4, "length": 512, **timed}],
        },
    }
    (tmp_path / "train_step-x.json").write_text(json.dumps(entry))
    steps = calibrate.timed_steps(tmp_path)
    found = [(step.recipe.model.n_sinks, step.recipe.model.gate, step.rows, step.peak) for step in steps]
    assert found == [(1, "none", 16, 20e9), (0, "elementwise", 16, None), (0, "elementwise", 16, None), (1, "none", 4, None)]
    assert [step.recipe.train.residual for step in steps] == ["float32", "float32", "bf16", "float32"]
    assert [step.tokens for step in steps] == [32768, 32768, 32768, 2048]
    launched = {**entry, "settings": {**entry["settings"], "graphs": "off"}}
    (tmp_path / "train_step-x.json").write_text(json.dumps(launched))
    assert calibrate.timed_steps(tmp_path) == []  # without graphs a record times the host
    assert calibrate.host_seconds(tmp_path) == pytest.approx(0.1 / 18)
    entry["settings"]["alone"] = True
    (tmp_path / "train_step-x.json").write_text(json.dumps(entry))
    assert len(calibrate.peaks(tmp_path)) == 3


# -- laws -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("aarch64", None),
    ],
)
def test_a_device_is_known_by_its_name(name, chip):
    assert find_chip(name) == (CHIPS[chip] if chip else None)
    assert chip is None or CHIPS[chip].flops == PEAK_FLOPS[chip.upper()]


def test_the_parts_of_a_plan_agree():
    plan = plan_of()
    assert plan.steps == 202_089
    assert plan.tokens == 202_089 * 256 * 2048
    assert plan.flops_per_token == training_flops(plan.recipe.model, 2048)
    assert plan.hours * 3600 * plan.tokens_per_second == pytest.approx(plan.tokens)
    assert plan.gpu_hours == 8 * plan.hours
    assert plan.rows * plan.forwards * 8 >= 256
    assert 0 < plan.mfu < 1
    assert plan.state_bytes == 3 * plan.checkpoint_bytes == 12 * plan.recipe.model.count_parameters().total
    assert plan.to_dict(price=2.5)["cost"] == pytest.approx(2.5 * plan.gpu_hours)
    assert plan.to_dict()["cost"] is None
    assert plan_of(overrides=["train.ema=0.999"]).state_bytes == 4 * plan.checkpoint_bytes


def test_faster_devices_and_more_of_them_take_less_time():
    hours = [plan_of(device=device).hours for device in ("a100", "h100", "h200", "b200")]
    assert hours == sorted(hours, reverse=True)
    rates = [plan_of(ranks=ranks).tokens_per_second for ranks in (1, 2, 8, 64)]
    assert rates == sorted(rates)
    assert rates[-1] <= 64 * rates[0] * 1.2  # fewer rows make a rank no faster


def test_recomputation_costs_time_and_saves_memory():
    plans = [plan_of(overrides=["train.micro_batch=16", f"train.recompute={how}"]) for how in ("none", "selective", "full")]
    assert [plan.memory.total for plan in plans] == sorted((plan.memory.total for plan in plans), reverse=True)
    assert [plan.hours for plan in plans] == sorted(plan.hours for plan in plans)
    assert plans[2].hours < 1.34 * plans[0].hours


def test_blocks_are_planned_for_their_hardest_step():
    """Sizes that grow to whole rows still begin with two copies; a mask and its complement are two forwards, which accumulate."""

    def planned(*overrides):
        return plan_of(SINK, ranks=1, overrides=("train.micro_batch=256", *overrides))

    whole, half = "model.block_size=2048", "model.block_size=32"
    grows = planned(whole, "blocks.sizes=[[0,4],[100,2048]]")
    assert planned(whole).memory.activations < grows.memory.activations == planned(half).memory.activations
    assert not planned(half).memory.accumulates
    both = planned(half, "blocks.complementary=true")
    assert both.memory.accumulates
    once, twice = (step_seconds(plan.recipe, 256, 1, CHIPS["h100"]) for plan in (planned(half), both))
    constants = fitted()
    assert twice.small - constants.step == pytest.approx(2 * (once.small - constants.step))


def test_ranks_that_share_weights_hold_less_and_send_more():
    whole, shared = (plan_of(overrides=[f"parallel.mode={mode}", "train.micro_batch=8"]) for mode in ("replicate", "shard"))
    assert shared.memory.state == pytest.approx(whole.memory.state / 8, rel=1e-6)
    chip = CHIPS["h100"]
    assert exchange_seconds(whole.recipe, 4, chip, Layout()) == 0
    sent = [exchange_seconds(whole.recipe, 4, chip, layout) for layout in (Layout(8, 1), Layout(1, 8), Layout(1, 16))]
    assert sent == sorted(sent)
    slow = chip._replace(link=1e9)
    assert step_seconds(whole.recipe, 32, 4, slow, Layout(8, 1)).total == pytest.approx(
        exchange_seconds(whole.recipe, 4, slow, Layout(8, 1))
    )


def test_a_last_forward_that_is_smaller_costs_less():
    """64 rows in three forwards cost as much as 64 rows, not as 3 times 22."""
    recipe = Recipe.load(SINK)
    even, odd = (step_seconds(recipe, rows, 3, CHIPS["h100"]).total for rows in (66, 64))
    assert odd == pytest.approx(even * 64 / 66, rel=0.01)
    plan = make_plan(Recipe.load(SINK, ["train.batch=64", "train.micro_batch=22"]), "x", Machine("h200"))
    assert (plan.rows, plan.forwards) == (22, 3)
    assert plan.tokens_per_second == pytest.approx(64 * 2048 / step_seconds(recipe, 64, 3, CHIPS["h200"]).total)


def test_a_step_is_never_faster_than_its_host_can_start_it():
    """Unless CUDA graphs launch its kernels without the host."""
    train = {"steps": 1, "batch": 1, "graphs": "off"}
    recipe = Recipe.resolve({"model": {"preset": "smdm-6m"}, "data": {"length": 8}, "train": train})
    seconds = step_seconds(recipe, 1, 1, CHIPS["b200"])
    assert seconds.total == seconds.launch > sum(seconds[:6])
    assert step_seconds(recipe, 1, 1, CHIPS["b200"], Layout(1, 2)).launch == seconds.launch
    recipe = Recipe.resolve({"model": {"preset": "smdm-6m"}, "data": {"length": 8}, "train": {**train, "graphs": "auto"}})
    assert step_seconds(recipe, 1, 1, CHIPS["b200"]).total == pytest.approx(sum(seconds[:6]))
    assert step_seconds(recipe, 1, 1, CHIPS["b200"], Layout(1, 2)).launch == seconds.launch


def test_what_fits_a_cpu_is_counted_in_its_precision():
    """ "auto" is float32 there: a row takes more memory than in bf16."""
    recipe = Recipe.resolve({"model": {"preset": "smdm-34m"}, "data": {"length": 1024}, "train": {"steps": 1, "batch": 64}})
    rows = [fitting_micro_batch(settle_precision(recipe, on_gpu=on_gpu), 16 * 10**9, 64) for on_gpu in (True, False)]
    assert 1 <= rows[1] < rows[0]


# -- where it does not fit --------------------------------------------------------------------------------------------------------

LARGE = ["model.preset=llada-8b"]


@pytest.mark.parametrize(
    ("ranks", "overrides", "first"),
    [
        (1, ["train.micro_batch=64"], "--set train.micro_batch="),
        (1, ["data.length=65536", "model.context_length=65536"], "--set train.recompute=selective"),
        (8, [*LARGE, "parallel.mode=replicate"], "--set parallel.mode=shard"),
        (2, LARGE, "--gpus 4 --set parallel.mode=shard"),
        (2, [*LARGE, "train.micro_batch=9"], "--gpus 4 --set parallel.mode=shard --set train.micro_batch="),
    ],
)
def test_what_is_proposed_fits(ranks, overrides, first):
    plan = plan_of(device="a100", ranks=ranks, overrides=overrides)
    assert not plan.fits
    assert plan.tokens_per_second is None
    proposed = changes_that_fit(plan)
    assert proposed[0].startswith(first)
    given = [word for override in overrides for word in ("--set", override)]
    for words in proposed:
        said = run(SINK, "--device", "a100", "--gpus", ranks, *given, *shlex.split(words), "--json")
        assert json.loads(said.stdout)[0]["fits"], words
        assert words in describe(plan)


def test_where_nothing_helps_it_says_so():
    plan = plan_of(device="a100", ranks=1, overrides=["model.preset=llada-8b", "train.batch=1"])
    assert changes_that_fit(plan) == []
    assert "no change that was tried is enough" in describe(plan)


# -- the command ------------------------------------------------------------------------------------------------------------------


def test_the_command_says_what_the_plan_holds():
    said = run(SINK, "--gpus", 8, "--device", "h200", "--price", 2, "--set", "train.tokens=1e9").stdout
    found = json.loads(run(SINK, "--gpus", 8, "--device", "h200", "--price", 2, "--set", "train.tokens=1e9", "--json").stdout)[0]
    assert f"{found['tokens_per_second']:,.0f} tokens/s" in said
    assert f"{found['memory']['peak'] / 1e9:.1f} GB of 141.0 GB" in said
    assert f"{found['gpu_hours']:.1f} GPU-hours, {found['cost']:.1f} at 2 each" in said
    assert found["fits"]
    assert found["change"] == []
    assert found["rate"].startswith("calibrated on its records")
    assert "scaled from H200 records, not measured" in run(SINK).stdout
    assert "not known: records are of bf16" in run(SINK, "--set", "train.precision=float32").stdout
    assert "not known: records are of bf16" in run(SINK, "--set", "train.precision=fp8").stdout
    for device in ("a100", "cpu"):
        refused = run(SINK, "--set", "train.precision=fp8", "--device", device)
        assert refused.exit_code != 0
        assert 'set train.precision = "bf16"' in str(refused.exception)


def test_several_recipes_give_a_table():
    said = run("--paper", "--gpus", 8, "--device", "h100").stdout.splitlines()
    assert len(said) == 1 + 22 + 1
    assert said[0].split()[0] == "recipe"
    assert said[-1].startswith("rates: scaled")
    assert not any("?" in line for line in said)
    epochs = json.loads(run("--paper", "--gpus", 8, "--json").stdout)
    assert next(one for one in epochs if one["recipe"] == "sft-gsm8k-smdm-472m-sink")["steps"] == 30048


def test_a_budget_of_passes_needs_the_rows():
    path = PAPER / "sft-gsm8k-smdm-472m.toml"
    assert "give its number of rows with --rows" in run(path).stdout
    assert json.loads(run(path, "--rows", 769_240, "--json").stdout)[0]["steps"] == 30048
    plans = [plan_of(path, ranks=1), plan_of(ranks=1)]
    assert plans[0].hours is None
    assert re.search(r"sft-gsm8k-smdm-472m .*\?.*\?.*\?", describe_all(plans))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "no recipe"),
        ([SINK, "--gpus", 999], "999 devices"),
        ([SINK, "--set", "data.length=4096"], "at most model.context_length"),
        ([SINK, "--device", "cpu", "--gpus", 2], "one process"),
        ([SINK, "--device", "cpu", *NARROW, "--set", "train.precision=auto"], "sink: train.residual = 'bf16' with .* 'auto'"),
    ],
)
def test_mistakes_are_named(words, complaint):
    with pytest.raises(UserError, match=complaint):
        CliRunner().invoke(app, ["plan", *map(str, words)], catch_exceptions=False)


def test_a_cpu_is_measured_and_large_models_are_not_tried_on_it():
    found = json.loads(run("nano-sink", "--device", "cpu", "--json").stdout)[0]
    assert found["tokens_per_second"] > 100
    assert found["rate"].startswith("measured here")
    assert found["mfu"] is None
    auto = plan_of(device="cpu", ranks=1, overrides=["train.precision=auto"]).memory
    assert auto == plan_of(device="cpu", ranks=1, overrides=["train.precision=float32"]).memory
    large = json.loads(run(SINK, "--device", "cpu", "--json").stdout)[0]
    assert large["tokens_per_second"] is None
    assert large["memory"]["peak"] > 0


# -- the line of a run ------------------------------------------------------------------------------------------------------------


def test_a_run_says_its_plan_on_devices_that_are_known():
    recipe = Recipe.load(SINK)
    given = (150 * 10**9, None, 32)
    said = line_of_run(recipe, "NVIDIA H200", *given, 1, 1000)
    plan = make_plan(
        Recipe.load(SINK, ["train.steps=1000", "train.micro_batch=32"]), "x", dataclasses.replace(Machine("h200"), memory=given[0])
    )
    rate = f"{plan.tokens_per_second:,.0f} tokens/s"
    assert said == f"plan: {plan.memory.total / 1e9:.1f} of 150 GB, about {rate} ({plan.source}), {say_hours(plan.hours)} of steps"
    assert "scaled from H200 records, not measured" in line_of_run(recipe, "NVIDIA A100-SXM4-80GB", *given, 1, 1000)
    assert "exchange between GPUs by data sheets, not measured" in line_of_run(
        recipe, "NVIDIA H200", given[0], Layout(8, 1), 32, 8, 1000
    )
    assert line_of_run(recipe, "NVIDIA GeForce RTX 4090", *given, 1, 1000) is None
    assert line_of_run(Recipe.load(SINK, ["train.compile=none"]), "NVIDIA H200", *given, 1, 1000) is None
