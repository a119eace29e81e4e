"""Gradients that jump: what counts as a peak, and how looks at a sink are summed up."""

import json
from statistics import median

import pytest

from sinkdlm.data.synthetic import prepare_example
from sinkdlm.reproduce.blocks import to_markdown
from sinkdlm.reproduce.steadiness import line_of, steadiness_blocks, thirds_of
from sinkdlm.training.gradient_spikes import peaks_of, read_peaks

RECIPE = """
[model]
preset = "nano"
n_layers = 1
n_sinks = 1
[data]
length = 16
[data.sets]
"{data}" = 1
[train]
steps = 20
batch = 4
[eval]
every = 0
[log]
probe_every = 0
"""


def test_peaks_are_beyond_five_medians_once_a_run_has_settled():
    gradients = [40.0, 30.0, *[1.0] * 14, 5.5, None, 4.9, 12.0]  # the first two steps of twenty are not looked at
    peaks = peaks_of(gradients)
    assert (peaks.median, peaks.steps, peaks.largest, peaks.at) == (1.0, [17, 18, 20], 12.0, 20)


def test_a_run_of_one_step_has_a_median():
    assert peaks_of([3.0]) == (3.0, [], 1.0, 1)


def test_what_cannot_be_told_is_left_out(tmp_path):
    assert read_peaks(tmp_path) == {"count": 0}
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "grad_norm": null}\n{"kind": "validation", "loss": 1.0}\n')
    assert read_peaks(tmp_path) == {"count": 1}


def test_a_peak_has_its_step_where_not_every_step_has_a_line(tmp_path):
    lines = [{"kind": "train", "step": step, "grad_norm": 9.0 if step == 40 else 1.0} for step in range(10, 101, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_peaks(tmp_path) == {"count": 1, "largest": 9.0, "at": 40}


def test_a_run_tells_its_peaks(tmp_path, command_line):
    prepare_example(tmp_path / "set", documents=60)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(data=tmp_path / "set"))
    status, said, _ = command_line("train", recipe, "--out", tmp_path / "run", "--json")
    assert status == 0
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    norms = [line["grad_norm"] for line in lines if line["kind"] == "train"][2:]  # of twenty steps
    middle = median(norms)
    found = json.loads(said)["gradient_peaks"]
    assert found["largest"] == pytest.approx(max(norms) / middle, abs=0.01)
    assert (found["count"], found["at"]) == (sum(norm > 5 * middle for norm in norms), norms.index(max(norms)) + 3)


def test_layers_are_summed_up_by_thirds():
    assert thirds_of([1.0, 3.0, 4.0, 4.0, 4.0, 8.0]) == pytest.approx((2.0, 5.0))
    assert thirds_of([None, None, None]) is None


def test_a_training_that_was_watched_is_told_from_its_twin_with_a_longer_warm_up():
    """Both have the same label and rate. Where a sink was lost the line says it."""
    form = {"label": "DLM + sink", "lr": 0.004, "loss": [2.0] * 10, "gradient": [1.0] * 10, "looks": [0, 5]}
    short, long = ({**form, "recipe": f"[train]\nwarmup = {share}\nmin_warmup = 0\n"} for share in (0.1, 0.4))
    kept, lost = [[0.3] * 3, [0.4] * 3], [[0.3] * 3, [0.0] * 3]
    assert line_of(short | {"share": kept}).startswith("DLM + sink, lr 0.004, 10 steps, 1 to warm up: gradient norm 1.00, 0 peaks")
    assert ", 4 to warm up: " in line_of(long | {"share": kept})
    assert "lost" not in line_of(long | {"share": kept})
    assert line_of(short | {"share": lost}).endswith("; sink lost at step 5: 3 of 3 layers")


def test_the_page_says_which_warm_up_kept_a_sink():
    form = {
        "label": "DLM + sink",
        "lr": 0.004,
        "loss": [2.0] * 10,
        "gradient": [1.0] * 10,
        "looks": [0, 5],
        "norm": [[0.5] * 3] * 2,
    }
    short, long = ({**form, "recipe": f"[train]\nwarmup = {share}\nmin_warmup = 0\n"} for share in (0.1, 0.4))
    forms = {"short": short | {"share": [[0.3] * 3, [0.0] * 3]}, "long": long | {"share": [[0.3] * 3, [0.4] * 3]}}
    said = to_markdown(steadiness_blocks({"forms": forms}, {}, [], level=3))
    told = ("1: lost at step 5: 3 of 3 layers (lowest layers 30% → 0%)", "4: not lost by this rule (lowest layers 30% → 40%)")
    assert f"DLM + sink at 0.004, by how many of its 10 steps warm up: {'; '.join(told)}\n" in said
    alone = to_markdown(steadiness_blocks({"forms": {"short": forms["short"]}}, {}, [], level=3))
    assert "by how many" not in alone


def test_nothing_is_said_where_nothing_was_measured():
    assert steadiness_blocks(None, {}, [], level=3) == []
