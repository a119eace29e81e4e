"""A run that uses no context: what counts as one; a run says so once; a run that learns, or has made few steps, does not."""

import hashlib
import json
import math
import shutil

import numpy as np
import pytest
import torch

from runs import TINY, interrupted, metrics, recipe_of, run
from sinkdlm.training import health
from sinkdlm.training.health import LEAST_TOKENS, ContextUse, read_stuck, unigram_entropy

SIZES = {"batch": 16, "steps": 60, "lr": 2e-2, "min_lr": 2e-2, "warmup": 0.05}  # 1,024 tokens a step


def shuffled(source, folder, seed=0):
    """The same tokens in random order: nothing but their frequencies can be learned."""
    shutil.copytree(source, folder)
    index = json.loads((folder / "index.json").read_text())
    for part in index["splits"].values():
        for shard in part["shards"]:
            path = folder / shard["file"]
            path.write_bytes(np.random.default_rng(seed).permutation(np.fromfile(path, index["dtype"])).tobytes())
            shard["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def quick(folder, **train):
    unlogged = {"eval": {"every": 0}, "log": {"probe_every": 0}, "save": {"every": 52}}
    return recipe_of(folder, model=TINY, data={"length": 64}, train={**SIZES, **train}, **unlogged)


@pytest.fixture
def judged_early(monkeypatch):
    """Judge runs of a second, after a quarter of the tokens."""
    monkeypatch.setattr(health, "LEAST_TOKENS", LEAST_TOKENS // 4)


def looks(use, losses, steps=100):
    """What `use` finds over a run whose lines are losses(step, random numbers)."""
    rng = np.random.default_rng(0)
    return [found for step in range(1, steps + 1) if (found := use.look(step, losses(step, rng))) is not None]


def noisy(few, many):
    return lambda step, rng: [few + rng.normal(0, 0.2), None, None, many + rng.normal(0, 0.1)]


def test_a_flat_loss_at_the_unigram_entropy_is_found_once_at_two_fifths_of_the_run():
    use = ContextUse(100, LEAST_TOKENS, lambda: 4.0)
    assert [(found.step, found.unigram) for found in looks(use, noisy(4.0, 4.0))] == [(40, 4.0)]
    assert use.found.few == pytest.approx(4.0, abs=0.2)


@pytest.mark.parametrize(
    ("few", "many"),
    [
        (3.0, 4.0),  # context lowers it
        (3.7, 3.9),  # a little
        (2.0, 2.0),  # flat, and far below: a prompt that is always given tells as much
    ],
)
def test_a_loss_that_falls_with_the_masked_share_or_below_the_unigram_entropy_is_not_stuck(few, many):
    assert looks(ContextUse(100, LEAST_TOKENS, lambda: 4.0), noisy(few, many)) == []


def test_a_run_may_be_at_unigram_level_early_on():
    use = ContextUse(100, LEAST_TOKENS, lambda: 4.0)
    assert looks(use, lambda step, rng: noisy(4.0 if step < 20 else 2.0, 4.0)(step, rng)) == []


def test_few_tokens_noise_and_missing_shares_say_nothing():
    def never():
        raise AssertionError("asked for the entropy")

    assert looks(ContextUse(100, LEAST_TOKENS // 101, never), noisy(4.0, 4.0)) == []
    assert looks(ContextUse(100, LEAST_TOKENS, never), lambda step, rng: [None, None, None, 4.0]) == []
    assert looks(ContextUse(100, LEAST_TOKENS, lambda: 4.0), lambda step, rng: [*rng.normal(4, 2, 4)]) == []


def test_a_long_run_is_judged_after_half_a_billion_tokens():
    found = looks(ContextUse(10_000, 10**6, lambda: 4.0), noisy(4.0, 4.0), steps=1000)
    assert [one.step for one in found] == [500]


def test_the_unigram_entropy_of_a_sample_is_that_of_its_source():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1000, (5000,), generator=generator)
    assert unigram_entropy(tokens) == pytest.approx(math.log(1000), abs=0.02)  # 0.09 lower without the correction
    assert unigram_entropy(torch.zeros(9, dtype=torch.int64)) == 0


def test_a_run_on_shuffled_tokens_says_once_that_it_uses_no_context(tmp_path, token_set, monkeypatch, judged_early):
    """Also where it is interrupted after it said so."""
    recipe, out = quick(shuffled(token_set, tmp_path / "set")), tmp_path / "run"
    _, said = run(recipe, out)
    lines = [line for line in said if "uses no context" in line]
    assert len(lines) == 1
    found = read_stuck(out)
    assert found["step"] == 51  # 50,000 tokens, then a multiple of 60 / 20
    assert found["unigram"] == pytest.approx(4.1, abs=0.05)
    assert found["few"] == pytest.approx(found["many"], abs=0.15)
    assert lines[0].startswith("step 51: the model uses no context: loss 4.")
    assert metrics(out, "stuck") == [{"kind": "stuck", **found}]
    interrupted(recipe, tmp_path / "again", monkeypatch, after=55)
    _, said = run(recipe, tmp_path / "again")
    assert not any("uses no context" in line for line in said)
    assert metrics(tmp_path / "again", "stuck") == metrics(out, "stuck")


def test_a_run_at_a_rate_far_too_low_says_so_too(tmp_path, token_set, judged_early):
    _, said = run(quick(token_set, lr=1e-7, min_lr=1e-7), tmp_path / "run")
    assert sum("uses no context" in line for line in said) == 1


def test_a_run_that_learns_from_context_says_nothing(tmp_path, token_set, judged_early):
    _, said = run(quick(token_set), tmp_path / "run")
    assert not any("uses no context" in line for line in said)
    assert read_stuck(tmp_path / "run") == {}
    few, _, _, many = metrics(tmp_path / "run")[-1]["nll_by_ratio"]
    assert few < many - 0.5
