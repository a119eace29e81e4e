"""Training in blocks: nothing depends on how a batch is cut or a run interrupted; ranges, complements and growing blocks."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runs import TINY, interrupted, metrics, recipe_of, run
from sinkdlm import Recipe, load
from sinkdlm.diffusion import Schedule, complement, corrupt, denoising_loss
from sinkdlm.errors import ConfigError
from sinkdlm.training import cpu_trial, evaluate, speed
from small_models import small_model, small_tokens

BLOCKS = {**TINY, "block_size": 4}
QUIET = {"eval": {"every": 0}, "log": {"probe_every": 0}, "save": {"every": 1000}}


def block_recipe(token_set, **sections) -> Recipe:
    return recipe_of(token_set, model={**BLOCKS, **sections.pop("model", {})}, **sections)


@pytest.mark.parametrize("blocks", [{}, {"complementary": True}, {"sizes": [[0, 2], [3, 8], [6, 4]]}], ids=str)
def test_loss_ignores_the_micro_batch(tmp_path, token_set, blocks):
    losses = []
    for micro_batch in (1, 8):
        train = {"steps": 8, "batch": 8, "micro_batch": micro_batch, "precision": "float64"}
        recipe = block_recipe(token_set, data={"random_lengths": 0.3}, train=train, blocks=blocks, **QUIET)
        run(recipe, tmp_path / str(micro_batch))
        losses.append([line["loss"] for line in metrics(tmp_path / str(micro_batch))])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-10)


@pytest.mark.parametrize("blocks", [{}, {"complementary": True, "sizes": [[0, 2], [4, 4]]}], ids=str)
def test_a_resumed_run_is_bit_equal(tmp_path, token_set, monkeypatch, blocks):
    recipe = block_recipe(token_set, blocks=blocks, data={"random_lengths": 0.3})
    run(recipe, tmp_path / "alone")
    interrupted(recipe, tmp_path / "twice", monkeypatch, after=3)
    run(recipe, tmp_path / "twice")
    assert metrics(tmp_path / "alone") == metrics(tmp_path / "twice")
    assert metrics(tmp_path / "alone", "validation") == metrics(tmp_path / "twice", "validation")
    one, other = (load(tmp_path / name / "model").model.state_dict() for name in ("alone", "twice"))
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    assert load(tmp_path / "alone" / "model").config.block_size == 4


def test_one_block_trains_as_full_attention(tmp_path, token_set):
    for name, model in (("full", TINY), ("block", {**TINY, "block_size": 16})):
        run(recipe_of(token_set, model=model), tmp_path / name)
    assert metrics(tmp_path / "full") == metrics(tmp_path / "block")
    assert metrics(tmp_path / "full", "validation") == metrics(tmp_path / "block", "validation")


def test_block_sizes_change_at_their_steps(tmp_path, token_set, monkeypatch):
    seen = []

    def note(tokens, samples, **settings):
        if settings["seed"] != evaluate.VALIDATION_SEED:
            seen.append(settings["block_size"])
        return corrupt(tokens, samples, **settings)

    monkeypatch.setattr(evaluate, "corrupt", note)
    counted = []
    monkeypatch.setattr(speed, "training_flops", lambda config, *given, **more: counted.append(config.block_size) or 1.0)
    run(block_recipe(token_set, blocks={"sizes": [[0, 1], [2, 8], [5, 4]]}, **QUIET), tmp_path / "run")
    assert seen == counted == [1, 1, 8, 8, 8, 4]


def test_a_schedule_that_outlasts_the_run_is_told(tmp_path, token_set):
    for name, last in (("late", 6), ("timely", 5)):
        _, told = run(block_recipe(token_set, blocks={"sizes": [[0, 1], [last, 4]]}, **QUIET), tmp_path / name)
        assert any("blocks.sizes: step 6" in line for line in told) == (name == "late")


def test_a_trial_on_a_cpu_counts_both_masks(monkeypatch):
    monkeypatch.setattr(cpu_trial, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    model = {**BLOCKS, "context_length": 16}
    rates = [
        cpu_trial.tokens_per_second(Recipe.resolve({"model": model, "data": {"length": 16}, "blocks": {"complementary": both}}))
        for both in (False, True)
    ]
    assert rates[0] == 2 * rates[1]


def test_times_are_drawn_from_the_range(tmp_path, token_set, monkeypatch):
    found = {"train": [], "validation": []}

    def note(tokens, samples, **settings):
        noisy = corrupt(tokens, samples, **settings)
        found["validation" if settings["seed"] == evaluate.VALIDATION_SEED else "train"].append(noisy.t)
        return noisy

    monkeypatch.setattr(evaluate, "corrupt", note)
    run(block_recipe(token_set, blocks={"t_range": [0.45, 0.95]}, eval={"every": 3, "draws": 16}), tmp_path / "run")
    train, validation = (torch.cat(parts) for parts in found.values())
    assert train.min() >= 0.45
    assert train.max() <= 0.95
    assert validation.min() < 0.1
    assert validation.max() > 0.9


def test_a_mask_and_its_complement_cover_every_token_once():
    tokens, maskable = small_tokens(6, 12), torch.rand(6, 12, generator=torch.Generator().manual_seed(0)) < 0.8
    given = {"mask_id": 11, "maskable": maskable}
    noisy = corrupt(tokens, torch.arange(6), seed=0, block_size=4, **given)
    other = complement(tokens, noisy, **given)
    assert torch.equal(noisy.masked ^ other.masked, maskable)
    assert torch.equal(other.tokens == 11, other.masked)
    assert torch.allclose(other.t, 1 - noisy.t)
    assert torch.equal(other.weight, Schedule().weight(other.t))


def test_documents_are_masked_alike_in_trimmed_rows():
    """Packed documents, each shorter than a block, in a row that its micro-batch may cut to less than a block."""
    tokens, samples = small_tokens(1, 16), torch.tensor([5])
    documents, maskable = torch.tensor([[0] * 3 + [1] * 3 + [2] * 10]), torch.arange(16)[None] < 6
    found = []
    for width in (16, 6):
        given = {"documents": documents[:, :width], "maskable": maskable[:, :width], "block_size": 8}
        found.append(corrupt(tokens[:, :width], samples, seed=1, mask_id=11, **given))
    for whole, cut in zip(*found, strict=True):
        assert torch.equal(whole[:, :6], cut)
    assert found[0].t[0, 0] != found[0].t[0, 3]


def test_validation_is_the_block_bound(tmp_path, token_set):
    """Against a loop over draws, row by row."""
    recipe = block_recipe(token_set, eval={"every": 6, "draws": 6}, train={"precision": "float64"})
    run(recipe, tmp_path / "run")
    found = metrics(tmp_path / "run", "validation")[-1]
    model = load(tmp_path / "run" / "model").model.double()
    from sinkdlm.data.rows import open_rows

    ids = {"vocab_size": recipe.model.vocab_size, "mask_id": recipe.model.mask_id}
    rows = open_rows(recipe.data, "validation", seed=evaluate.VALIDATION_SEED, **ids)
    losses, by_ratio, counts = [], [0.0] * 4, [0] * 4
    for draw in range(6):
        batch = rows.batch(np.arange(draw, draw + 1))
        noisy = corrupt(batch.tokens, batch.samples, seed=evaluate.VALIDATION_SEED, mask_id=model.config.mask_id, block_size=4)
        with torch.no_grad():
            loss = denoising_loss(model, batch.tokens, noisy, denominator=1.0)
        losses.append(float(loss.total) / 16)
        for place, nll in zip(loss.positions.tolist(), loss.nll.tolist(), strict=True):
            bucket = min(3, int(float(Schedule().probability(noisy.t[0, place])) * 4))
            by_ratio[bucket] += nll
            counts[bucket] += 1
    assert math.isclose(found["loss"], sum(losses) / 6, rel_tol=1e-5)  # the exported weights are float32
    expected = [total / count if count else None for total, count in zip(by_ratio, counts, strict=True)]
    assert found["nll_by_ratio"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"model": TINY, "blocks": {"complementary": True}}, "model.block_size"),
        ({"model": BLOCKS, "train": {"anneal": 0.5}}, "train.anneal"),
        ({"model": BLOCKS, "blocks": {"sizes": [[0, 2]]}}, "blocks.sizes"),
        ({"model": BLOCKS, "blocks": {"sizes": [[1, 2], [3, 4]]}}, "from 0 on"),
        ({"model": BLOCKS, "blocks": {"sizes": [4, 8]}}, "pairs of a step and a block size"),
        ({"model": BLOCKS, "blocks": {"t_range": [0.8, 0.3]}}, "t_range"),
        ({"model": BLOCKS, "blocks": {"t_range": [0.3, 0.8], "complementary": True}}, "complementary"),
        ({"model": BLOCKS, "blocks": {"complementary": True}, "train": {"schedule": "cosine"}}, "train.schedule"),
    ],
)
def test_what_does_not_fit_is_refused(sections, word):
    with pytest.raises(ConfigError, match=word) as failure:
        Recipe.resolve(sections)
    assert "\n" not in str(failure.value)


def test_a_range_around_the_middle_goes_with_complements():
    given = {"t_range": [0.1, 0.9], "complementary": True}
    assert Recipe.resolve({"model": BLOCKS, "blocks": given}).blocks.t_range == (0.1, 0.9)


def test_prompts_stay_clean():
    """SFT: a block of the prompt is neither masked nor scored, and the answer sees it as it is."""
    model, tokens = small_model(n_sinks=1, block_size=4), small_tokens(3, 12)
    maskable = torch.arange(12) >= torch.tensor([[4], [6], [9]])
    noisy = corrupt(tokens, torch.arange(3), seed=0, mask_id=11, maskable=maskable, block_size=4)
    assert not (noisy.masked & ~maskable).any()
    loss = denoising_loss(model, tokens, noisy, denominator=1.0)
    assert not (loss.scored & ~maskable).any()
    for row in range(3):
        for start in range(0, 12, 4):
            here = loss.scored[row, start : start + 4]
            alone = torch.cat([tokens[row, :start], noisy.tokens[row, start : start + 4]])[None]
            logits = model.head(model(alone))[0, start : start + 4]
            nll = torch.nn.functional.cross_entropy(logits, tokens[row, start : start + 4], reduction="none")
            own = loss.nll[(loss.positions >= row * 12 + start) & (loss.positions < row * 12 + start + 4)]
            assert torch.allclose(own, nll[here].detach(), atol=1e-10)
