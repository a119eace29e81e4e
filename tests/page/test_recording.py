"""Recordings: their content, its agreement with the analysis, and their size limits."""

import numpy as np
import pytest

from evaluated import padded_lm, small_lm
from recordings import unpack
from sinkdlm.analysis import recording
from sinkdlm.analysis.capture import Rules, capture
from sinkdlm.analysis.recording import Recorder, likeliest, look_at, pack
from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.errors import AnalysisError
from sinkdlm.sampling import requests_of
from sites import sharp_lm
from small_models import small_model


@pytest.fixture(scope="module", params=[{"n_sinks": 0}, {}, {"sink_kind": "register"}, {"sink_kind": "logit"}])
def lm(request):
    return sharp_lm(**request.param)


def frames_of(lm, rules=None):
    ids = lm.tokenizer.encode("the cat ", add_special_tokens=False)
    requests = requests_of([ids], mask_id=lm.config.mask_id, length=28, steps=6, seed=1)
    trajectory = next(capture(lm.model, requests, **({"rules": rules} if rules else {})))
    return trajectory, [*trajectory.tokens.tolist(), trajectory.final.tolist()]


def test_a_recording_holds_what_the_analysis_saw(lm):
    rules = Rules(threshold=0.2, margin=2.0)
    trajectory, canvases = frames_of(lm, rules)
    side = Recorder(lm, "m", canvases, trajectory.n_prompt, rules=rules).record()
    steps, shape = trajectory.n_steps, (trajectory.n_layers, trajectory.n_heads, 28)
    for rule in ("absolute", "relative"):
        expected = getattr(trajectory, rule)
        found = np.zeros((steps, expected[0].size), dtype=bool)
        for step in range(steps):
            found[step, side[rule][step]] = True
        np.testing.assert_array_equal(found.reshape(steps, *shape), expected)
    assert trajectory.absolute.any()
    np.testing.assert_array_equal(np.array(side["top"])[:steps].reshape(trajectory.top.shape), trajectory.top)
    received, values = unpack(side["received"])[:steps], unpack(side["values"])[:steps]
    n_sinks = lm.config.n_sinks
    half = received.max() / 255 / 2 * 1.001
    np.testing.assert_allclose(received[..., :n_sinks], trajectory.sink_received, atol=half)
    np.testing.assert_allclose(received[..., n_sinks:].mean(2), trajectory.received, atol=half)
    np.testing.assert_allclose(values[..., -28:], trajectory.value_norm, atol=values.max() / 255 / 2 * 1.001)
    assert side["rules"] == {"threshold": 0.2, "margin": 2.0}
    assert side["tokens"][-1] == trajectory.final.tolist()
    assert side["kinds"][str(canvases[0][3])] == "space"
    assert side["pieces"][str(canvases[0][3])] == " "


def test_numbers_are_packed_to_half_a_step_of_their_frame():
    random = np.random.default_rng(0)
    frames = [random.random((2, 3, 5)) * size for size in (1, 0.01, 0)]
    packed = pack(frames)
    assert packed["shape"] == [3, 2, 3, 5]
    for frame, back, scale in zip(frames, unpack(packed), packed["scales"], strict=True):
        assert np.abs(back - frame).max() <= scale / 2 * 1.0001 if frame.any() else not back.any()


def test_what_is_too_large_is_refused_and_rows_go_first(monkeypatch):
    lm = small_lm()
    _, canvases = frames_of(lm)
    n_values = len(canvases) * 2 * 2 * 29
    monkeypatch.setattr(recording, "MOST_ROWS", n_values * 28 - 1)
    assert Recorder(lm, "m", canvases[:2], 8).record()["rows"] is not None
    side = Recorder(lm, "m", canvases, 8).record()
    assert side["rows"] is None
    assert len(side["candidates"]) == len(canvases)
    monkeypatch.setattr(recording, "MOST_VALUES", n_values)
    Recorder(lm, "m", canvases, 8)
    monkeypatch.setattr(recording, "MOST_VALUES", n_values - 1)
    with pytest.raises(AnalysisError, match="take fewer steps or tokens"):
        Recorder(lm, "m", canvases, 8)
    with pytest.raises(AnalysisError, match="grew"):
        Recorder(lm, "m", [canvases[0], canvases[0][:-1]], 8)


def test_candidates_are_what_could_be_written():
    """Ids that the tokenizer lacks are none, however likely the model finds them; the others share the probability."""
    lm = padded_lm(rows=8, context_length=64)
    mask_id, known = lm.config.mask_id, set(lm.tokenizer.get_vocab().values())
    canvas = [3, 4, *[mask_id] * 6]
    bare = likeliest(lm.model, canvas, range(8), 5)
    assert all({token for token, _ in place} - known for place in bare)
    for frame in Recorder(lm, "m", [canvas], 2).record()["candidates"]:
        assert {token for place in frame for token, _ in place} <= known
        assert all(len(place) == 5 and place[0][1] > 0 for place in frame)
    barred = absent_ids(lm.tokenizer, lm.config.vocab_size)
    (everything,) = likeliest(lm.model, canvas, [3], lm.config.vocab_size, barred)
    assert {token for token, _ in everything} == known
    assert sum(chance for _, chance in everything) == pytest.approx(1)
    (everything,) = likeliest(small_model(mask_id=10), [3, 10], [1], 11)
    assert {token for token, _ in everything} == set(range(10))


def test_looking_changes_nothing_and_needs_one_forward(monkeypatch):
    lm = sharp_lm()
    _, canvases = frames_of(lm)
    forward, calls = type(lm.model).forward, []
    monkeypatch.setattr(type(lm.model), "forward", lambda self, *given, **more: (calls.append(1), forward(self, *given, **more))[1])
    first, second = look_at(lm.model, canvases[2]), look_at(lm.model, canvases[2])
    assert len(calls) == 2
    np.testing.assert_array_equal(first.received, second.received)
