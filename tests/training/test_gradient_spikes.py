"""Gradient spikes: what counts as one, and where a run reports them."""

import json
from statistics import median

import pytest

from sinkdlm.data.synthetic import prepare_example
from sinkdlm.training.health import peaks_of, read_peaks

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
    gradients = [40.0, 30.0, *[1.0] * 14, 5.5, None, 4.9, 12.0]  # the first two steps of twenty are not checked
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
    found = json.loads(said)["gradient_spikes"]
    assert found["largest"] == pytest.approx(max(norms) / middle, abs=0.01)
    assert (found["count"], found["at"]) == (sum(norm > 5 * middle for norm in norms), norms.index(max(norms)) + 3)
