"""Constrained sampling: every answer is in its language, and the rule has the law and the weights that it says."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from languages import (
    EOS,
    MASK,
    VOCAB,
    TableDenoiser,
    any_order,
    automaton_of,
    by_draw,
    by_entropy,
    choices,
    distance,
    enumerate_law,
    finished,
    has_text,
    some_texts,
)
from policies import POLICIES
from sinkdlm.errors import SamplingError
from sinkdlm.sampling import constraint as rule
from sinkdlm.sampling import generate, requests_of, start, step, stream
from small_models import small_model

LENGTH = 5
TEXTS = some_texts(12, 4, seed=1)
ORDERS = {
    "random": ({"order": "random", "steps": 3}, any_order, [2, 2, 1]),
    "entropy": ({"order": "entropy", "steps": 2}, by_entropy, [3, 2]),
    "confidence": ({"order": "confidence", "steps": 2}, by_draw, [3, 2]),
}


def fits(canvas):
    return has_text(TEXTS, tuple(canvas))


def draw(denoiser, n, *, texts=TEXTS, temperature=1.0, first=0, **options):
    given = {"mask_id": MASK, "eos_id": EOS, "constraint": automaton_of(texts), "temperature": temperature} | options
    return generate(denoiser, prompt=[[]] * n, new_tokens=LENGTH, numbers=range(first, first + n), **given)


@pytest.mark.parametrize("name", ORDERS)
def test_law_times_weight_is_the_models_conditional(name):
    """Enumerated over every path; and the sampler's own weights are those of the paths it takes."""
    options, orders, quotas = ORDERS[name]
    denoiser = TableDenoiser(LENGTH)
    law, weighted = enumerate_law(denoiser, LENGTH, quotas, orders, fits)
    plain, _ = enumerate_law(denoiser, LENGTH, quotas, orders, lambda canvas: True)
    total, possible = sum(weighted.values()), {text: chance for text, chance in plain.items() if fits(text)}
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert law.keys() == possible.keys()
    for text, chance in possible.items():
        assert weighted[text] / total == pytest.approx(chance / sum(possible.values()), abs=1e-10)

    given = {"mask_id": MASK, "eos_id": EOS, "constraint": automaton_of(TEXTS), "temperature": 1.0, "new_tokens": LENGTH}
    states = start(requests_of([[]] * 20, **given, **options))
    before, weights = [(MASK,) * LENGTH] * 20, [0.0] * 20
    for now in stream(denoiser, states):
        for row, committed in enumerate(now.committed.tolist()):
            places = tuple(place for place in range(LENGTH) if committed[place])
            if places:
                found, mass = choices(denoiser.probabilities(before[row]), before[row], places, fits)
                canvas = list(before[row])
                for place in places:
                    canvas[place] = int(now.tokens[row, place])
                assert any(finished(filled) == finished(canvas) for filled in found)
                weights[row] += math.log(mass)
            before[row] = tuple(now.tokens[row].tolist())
    np.testing.assert_allclose([state.log_weight for state in states], weights, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_samples_follow_the_law(name):
    options, orders, quotas = ORDERS[name]
    denoiser = TableDenoiser(LENGTH)
    law, _ = enumerate_law(denoiser, LENGTH, quotas, orders, fits)
    counts = Counter()
    for first in range(0, 20_000, 4000):
        counts.update(map(tuple, draw(denoiser, 4000, first=first, **options).tokens.tolist()))
    assert distance(counts, law) < 0.02


@pytest.mark.parametrize("eos_id", [EOS, None])
def test_tokens_of_a_step_are_the_likeliest_together(eos_id):
    """At temperature 0, against all ways to fill the places; all places in one step, and a few."""
    texts = some_texts(30, LENGTH, seed=4, shortest=LENGTH if eos_id is None else 1)
    for seed, steps in itertools.product(range(6), (1, 2)):
        denoiser = TableDenoiser(LENGTH, seed=seed)
        states = start(
            requests_of([[]], mask_id=MASK, eos_id=eos_id, constraint=automaton_of(texts), new_tokens=LENGTH, steps=steps)
        )
        canvas = (MASK,) * LENGTH
        for now in stream(denoiser, states):
            places = tuple(place for place in range(LENGTH) if now.committed[0, place])
            options, _ = choices(
                denoiser.probabilities(canvas), canvas, places, lambda filled: has_text(texts, tuple(filled), eos_id)
            )
            best = max(options, key=options.__getitem__)
            canvas = tuple(now.tokens[0].tolist())
            assert finished(best, eos_id) in (canvas, None)
            if finished(best, eos_id) is None:
                assert best == canvas


def test_cut_sums_keep_the_weights_exact(monkeypatch):
    """Where too many sets of states arise, tokens are drawn in parts; weights are then those of the law that draws them."""
    denoiser, texts = TableDenoiser(LENGTH), some_texts(25, 4, seed=2)
    whole = draw(denoiser, 400, texts=texts, order="random", steps=1)
    monkeypatch.setattr(rule, "MOST_SETS", 1)
    cut = draw(denoiser, 400, texts=texts, order="random", steps=1)
    assert whole.log_weights != cut.log_weights
    assert all(has_text(texts, tuple(row)) for row in cut.tokens.tolist())
    mean, error = np.exp(cut.log_weights).mean(), np.exp(cut.log_weights).std() / 20
    assert abs(mean - math.exp(whole.log_weights[0])) < 4 * error
    assert len({round(weight, 9) for weight in whole.log_weights}) == 1  # all in one step: the mass of the language


def test_a_language_of_all_texts_changes_nothing():
    """Where the order does not hang on draws, the same noise draws the same tokens."""
    every = rule.Automaton(np.zeros((1, 1), dtype=np.int64), np.zeros(VOCAB, dtype=np.int64), np.array([True]))
    denoiser = TableDenoiser(LENGTH)
    for options in ({"order": "random", "temperature": 1.0}, {"order": "margin", "temperature": 0.7, "steps": 2}, {"steps": 3}):
        given = {"prompt": [[]] * 40, "new_tokens": LENGTH, "mask_id": MASK, **options}
        free, kept = generate(denoiser, **given), generate(denoiser, constraint=every, **given)
        assert torch.equal(free.tokens, kept.tokens)
        np.testing.assert_allclose(kept.log_weights, 0, atol=1e-9)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_the_language(name):
    """Rows of two languages and of none share batches; answers are the same alone."""
    model = small_model(seed=5, n_layers=2)
    options = {"eos_id": 3, **POLICIES[name]}
    automata = [automaton_of(texts, vocab=11) for texts in ([(1, 4, 1, 5), (9, 2)], [(8,) * n for n in range(2, 9)])]
    wanted = [automata[row % 3] if row % 3 < 2 else None for row in range(6)]
    given = {"prompt": [[row % 7, 2] for row in range(6)], "new_tokens": 10, "mask_id": model.config.mask_id, "seed": 3}
    with model.inference():
        found = generate(model.denoiser(), constraint=wanted, **given, **options)
        free = generate(model.denoiser(), **given, **options)
        again = generate(model.denoiser(), constraint=wanted, **given, **options, deterministic=True)
    assert found.rows == again.rows
    for row, tokens in enumerate(found.rows):
        written = tokens[2:]
        if wanted[row] is None:
            assert found.rows[row] == free.rows[row]
            assert found.log_weights[row] is None
            continue
        text = written[: written.index(3)]
        assert text in ([[1, 4, 1, 5], [9, 2]] if row % 3 == 0 else [[8] * n for n in range(2, 9)])
        assert found.log_weights[row] <= 1e-9


def test_valid_greedy_answers_stay_the_same():
    """At temperature 0, for policies without remasking."""
    seen = 0
    for seed, steps in itertools.product(range(20), (1, 2, 5)):
        denoiser = TableDenoiser(LENGTH, seed=seed)
        texts = some_texts(60, 4, seed=seed)
        given = {"prompt": [[]], "new_tokens": LENGTH, "mask_id": MASK, "eos_id": EOS, "steps": steps}
        free = generate(denoiser, **given)
        if has_text(texts, tuple(free.tokens[0].tolist())):
            seen += 1
            kept = generate(denoiser, constraint=automaton_of(texts), **given)
            assert torch.equal(free.tokens, kept.tokens)
            assert kept.log_weights == [0.0]
    assert seen >= 6


def test_a_row_with_a_constraint_takes_one_step_a_forward():
    """Beside a row without one that takes several."""
    denoiser, given = TableDenoiser(LENGTH, seed=3), {"new_tokens": LENGTH, "mask_id": MASK, "eos_id": EOS, "temperature": 1.0}
    plain = draw(denoiser, 4)
    rows = requests_of([[]] * 4, constraint=automaton_of(TEXTS), **given)
    states = start([*rows, *requests_of([[]], speculate=4, numbers=[9], **given)])
    while step(states, denoiser):
        pass
    assert [state.tokens.tolist() for state in states[:4]] == plain.tokens.tolist()
    assert [state.forwards for state in states[:4]] == [state.steps for state in states[:4]]


def test_a_row_that_has_ended_is_not_masked_again():
    model = small_model(seed=5, n_layers=1)
    given = {"order": "ancestral", "remask": "cap", "remask_rate": 0.4, "steps": 12, "temperature": 1.0, "eos_id": 3}
    with model.inference():
        mask_id = model.config.mask_id
        found = generate(model.denoiser(), prompt=[[row % 7, 2] for row in range(40)], new_tokens=10, mask_id=mask_id, **given)
    assert not any(mask_id in row for row in found.rows)
    assert any(3 in row for row in found.rows)


def test_what_cannot_be_written_is_refused():
    texts, given = [(1, 1, 1)], {"prompt": [[]], "mask_id": MASK, "eos_id": EOS}
    denoiser = TableDenoiser(LENGTH)
    with pytest.raises(SamplingError, match="its shortest text takes 4 tokens, and 3 may be written; give 4"):
        generate(denoiser, **given, new_tokens=3, constraint=automaton_of(texts))
    with pytest.raises(SamplingError, match="no text of it has 5 tokens, and without EOS"):
        generate(denoiser, **given | {"eos_id": None}, new_tokens=5, constraint=automaton_of(texts))
    with pytest.raises(SamplingError, match="no text of it can be written"):
        generate(denoiser, **given, new_tokens=5, constraint=automaton_of(texts), suppressed=[1])
    with pytest.raises(SamplingError, match="for one gap"):
        generate(denoiser, **given | {"prompt": [[MASK, 1, MASK]]}, length=5, constraint=automaton_of([(1,)]))
    with pytest.raises(SamplingError, match="2 of them and 1 prompts"):
        generate(denoiser, **given, new_tokens=5, constraint=[None, None])
    with pytest.raises(SamplingError, match="made for another vocabulary"):
        generate(denoiser, **given, new_tokens=5, temperature=1.0, constraint=automaton_of(texts, vocab=9))


def test_an_open_end_grows_within_the_language():
    denoiser = TableDenoiser(LENGTH)
    found = generate(
        lambda tokens: denoiser(torch.nn.functional.pad(tokens, (0, LENGTH - tokens.shape[1]), value=MASK))[:, : tokens.shape[1]],
        prompt=[[]] * 20, limit=LENGTH, block=2, mask_id=MASK, eos_id=EOS, temperature=1.0, constraint=automaton_of(TEXTS),
    )  # fmt: skip
    assert all(fits(row) for row in found.rows)
    assert {len(row) for row in found.rows} > {4}
