"""Sinks that are lost during a run: what counts as lost; a run reports it once, and `train --json` keeps it."""

import json
import re
import shutil

import pytest
import torch

from runs import TINY, load_parent, recipe_of, run
from sinkdlm import DiffusionLM, save
from sinkdlm.data.synthetic import prepare_example
from sinkdlm.training.health import SinkHealth, read_sink_loss

RECIPE = """
[model]
preset = "nano"
n_sinks = 1
[data]
length = 16
[data.sets]
"{data}" = 1
[train]
steps = 6
batch = 4
lr = 1e-4
min_lr = 1e-5
[eval]
every = 0
[log]
probe_every = 2
[save]
every = 2
keep = 3
"""


def test_a_sink_is_lost_where_over_a_quarter_of_the_layers_have_a_tenth_of_what_they_had():
    health = SinkHealth()
    assert health.look(0, [0.01, 0.2, 0.3, 0.5, 0.2]) is None  # the first layer never rested on it
    assert health.look(2, [0.0, 0.019, 0.029, 0.5, 0.2]) is None  # two layers are few
    assert health.look(4, [0.0, 0.3, 0.4, 0.6, 0.2]) is None
    found = health.look(6, [0.0, 0.029, 0.039, 0.059, 0.2])  # of their highest share, not of the first
    assert found == health.loss == (6, 4, 3, 5)
    assert health.look(8, [0.0] * 5) is None  # reported once


def test_a_few_layers_of_many_may_leave_a_sink():
    for n_lost, expected in ((4, None), (5, (1, 0, 5, 16))):
        health = SinkHealth()
        assert health.look(0, [0.4] * 16) is None
        assert health.look(1, [0.03] * n_lost + [0.4] * (16 - n_lost)) == expected


def test_layers_that_leave_a_sink_while_others_rest_on_it_have_not_lost_it():
    """A nano run from scratch, with shifted logits and a zero-value sink, whose loss keeps falling."""
    health = SinkHealth()
    looks = [[0.030, 0.029, 0.043], [0.032, 0.168, 0.042], [0.049, 0.071, 0.107], [0.277, 0.018, 0.037], [0.265, 0.016, 0.004]]
    assert [health.look(step, shares) for step, shares in enumerate(looks)] == [None] * 5
    assert health.look(5, [0.02, 0.016, 0.004]) == (5, 4, 3, 3)  # the last one has left it too


@pytest.mark.parametrize("shares", [[], [None, None], [0.01, 0.02]])
def test_without_a_sink_that_is_rested_on_nothing_is_lost(shares):
    health = SinkHealth()
    assert [health.look(step, [share and share / (step + 1) for share in shares]) for step in (0, 50, 100)] == [None] * 3


@pytest.mark.parametrize(("lr", "n_said"), [(1e-3, 0), (2.0, 1)])
def test_steps_that_are_too_large_lose_a_sink_and_the_run_says_so_once(tmp_path, token_set, lr, n_said):
    """A parent with a third of its attention on the sink, trained without warm-up."""
    model = {**TINY, "n_layers": 4, "sink_kind": "logit"}
    start = {"init": {"from": str(tmp_path / "parent")}, "train": {"steps": 8, "lr": lr, "min_lr": lr / 10, "warmup": 0.0}}
    recipe = recipe_of(token_set, model=model, **start, log={"probe_every": 1}, eval={"every": 0})
    parent = DiffusionLM(recipe.model, seed=0)
    with torch.no_grad():
        for block in parent.blocks:
            block.attention.sink_logit.fill_(2.0)
    save(tmp_path / "parent", parent)
    _, said = run(recipe, tmp_path / "run", load_parent=load_parent)
    lost = [line for line in said if "have lost their sink" in line]
    assert len(lost) == n_said
    assert all("half the train.lr, or with train.warmup = 0.2" in line for line in lost)
    assert bool(read_sink_loss(tmp_path / "run")) == bool(n_said)


def test_a_run_says_that_it_lost_its_sink(tmp_path, command_line):
    """The probes before the interruption are edited to show a sink with nearly all of attention."""
    prepare_example(tmp_path / "set", documents=60)
    recipe, out = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(data=tmp_path / "set"))
    status, said, heard = command_line("train", recipe, "--out", out, "--json")
    assert status == 0
    assert "have lost" not in heard
    assert json.loads(said)["sink_lost"] == {}
    for gone in ("model", "checkpoints/step-0000000006"):
        shutil.rmtree(out / gone)
    lines = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").write_text(re.sub(r'"sink_share": 0\.\d', '"sink_share": 0.9', lines))  # as long as before
    status, said, heard = command_line("train", recipe, "--out", out, "--json")
    assert status == 0
    layers = len(json.loads(lines.splitlines()[0])["layers"])
    assert f"step 6: {layers} of {layers} layers have lost their sink since step 4:" in heard
    assert json.loads(said)["sink_lost"] == {"step": 6, "layers": layers, "of": layers}
