import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

import plain_metrics
from sinkdlm.analysis import metrics
from sinkdlm.analysis.kinds import KINDS, MASK, PUNCTUATION, SPACE, WORD
from sinkdlm.analysis.metrics import QUANTITIES, Trajectory, difference, measure, paths_of, summarize

NAN = math.nan
WORDS = np.full(10, WORD, dtype=np.uint8)  # every token is one


def of_sinks(sets, *, length, n_sinks=0, number=0, tops=None, **parts) -> Trajectory:
    """A trajectory with given content sinks: sets[step][layer][head] is a set of positions; its least member is on top.

    Everything else is even: each head's attention rests on no sink of the model, every norm is 1.
    """
    n, e, h = len(sets), len(sets[0]), len(sets[0][0])
    absolute = np.zeros((n, e, h, length), dtype=bool)
    for step, layer, head in itertools.product(range(n), range(e), range(h)):
        absolute[step, layer, head, list(sets[step][layer][head])] = True
    full = {
        "number": number,
        "n_prompt": 1,
        "mask_id": 9,
        "tokens": np.full((n, length), 9, dtype=np.int32),
        "final": np.zeros(length, dtype=np.int32),
        "absolute": absolute,
        "relative": absolute.copy(),
        "top": absolute.argmax(-1).astype(np.int32) if tops is None else np.array(tops, dtype=np.int32),
        "top_received": np.where(absolute.any(-1), 0.5, 1 / length),
        "received": np.full((n, e, length), 1 / length),
        "sink_received": np.zeros((n, e, h, n_sinks)),
        "entropy": np.full((n, e, h), math.log(length)),
        "value_norm": np.ones((n, e, length)),
        "sink_value_norm": np.ones((n, e, n_sinks)),
        "output_norm": np.ones((n, e, h)),
        "bound": np.ones((n, e, h)),
        "resting": np.zeros((n, e, length)),
        "update_ratio": np.ones((n, e, length)),
    }
    return Trajectory(**{**full, **parts})


def same_everywhere(steps, *, layers=2, heads=3):
    """The same set of sinks in every head, at each step."""
    return [[[step] * heads] * layers for step in steps]


def random_trajectory(seed, *, n=7, e=2, h=3, t=6, s=2, density=0.25, holes=0.0, number=0) -> Trajectory:
    """Sinks that come and go, ties in resting, and, with holes, statistics that are not a number."""
    rng = np.random.default_rng(seed)
    absolute, relative = (rng.random((n, e, h, t)) < density for _ in range(2))
    received = rng.random((n, e, h, t)) + absolute
    floats = {
        "received": received.mean(2),
        "top_received": received.max(-1),
        "sink_received": rng.dirichlet(np.ones(s + 2), size=(n, e, h))[..., :s],
        "entropy": rng.random((n, e, h)),
        "value_norm": rng.gamma(2, 1, (n, e, t)),
        "sink_value_norm": rng.gamma(2, 1, (n, e, s)),
        "output_norm": rng.random((n, e, h)),
        "bound": 1 + rng.random((n, e, h)),
        "resting": rng.integers(0, 5, (n, e, t)) / 5,
        "update_ratio": rng.random((n, e, t)),
    }
    floats = {name: np.where(rng.random(part.shape) < holes, NAN, part) for name, part in floats.items()}
    return Trajectory(
        number=number,
        n_prompt=1,
        mask_id=9,
        tokens=rng.integers(0, 10, (n, t)).astype(np.int32),
        final=rng.integers(0, 9, t).astype(np.int32),
        absolute=absolute,
        relative=relative,
        top=received.argmax(-1).astype(np.int32),
        **floats,
    )


def totals(trajectory, **options):
    return {name: total for name, (total, _) in measure(trajectory, WORDS, **options).values.items()}


def assert_values(trajectory, **expected):
    """In total and in every layer, which are all alike."""
    found = measure(trajectory, WORDS).values
    assert {name: found[name][0] for name in expected} == pytest.approx(expected, nan_ok=True, rel=1e-12, abs=1e-12)
    for name, value in expected.items():
        assert found[name][1] == pytest.approx([value] * trajectory.n_layers, nan_ok=True, rel=1e-12, abs=1e-12), name


# -- planted truth ----------------------------------------------------------------------------------------------------------------

STILL = {"turnover": 0, "turnover_null": 0, "relative_turnover": 0, "relative_turnover_null": 0, "moved": 0, "move_rate": 0}
NONE = dict.fromkeys([*STILL, "lifetime", "content_sink_norm", "norm_ratio", "noop"], NAN)
PLAIN = {"sink_mass": 0, "lane_heads": 0, "sink_value_norm": NAN, "lane_norm_ratio": NAN, "bound_ratio": 1, "update_ratio": 1}


def test_a_sink_that_stays_is_anchored_and_lives_as_long_as_the_trajectory():
    steps = same_everywhere([{3}] * 8)
    norms = np.ones((8, 2, 10))
    norms[..., 3] = 0.25
    trajectory = of_sinks(steps, length=10, value_norm=norms)
    sizes = {"content_sinks": 1, "relative_sinks": 1, "sink_heads": 1, "lifetime": 8, "anchored": 1}
    weights = {"content_sink_norm": 0.25, "normal_norm": 1, "norm_ratio": 0.25, "entropy": math.log(10), "noop": NAN}
    assert_values(trajectory, **STILL, **sizes, **weights, **PLAIN)
    assert set(STILL) | set(sizes) | set(weights) | set(PLAIN) == set(QUANTITIES)


def test_a_sink_that_moves_by_one_turns_over_wholly():
    """Shuffling changes nothing here: no step shares a sink with any other."""
    ones = dict.fromkeys(["turnover", "turnover_null", "relative_turnover", "relative_turnover_null"], 1)
    trajectory = of_sinks(same_everywhere([{n} for n in range(2, 8)]), length=10)
    assert_values(trajectory, **ones, moved=1, move_rate=1, lifetime=1, anchored=0, content_sinks=1, sink_heads=1)


def test_heads_without_sinks_have_nothing_to_turn_over():
    trajectory = of_sinks(same_everywhere([set()] * 5), length=4)
    zero = dict.fromkeys(["content_sinks", "relative_sinks", "sink_heads", "anchored"], 0)
    assert_values(trajectory, **NONE, **zero, **PLAIN, normal_norm=1, entropy=math.log(4))
    assert set(NONE) | set(zero) | set(PLAIN) | {"normal_norm", "entropy"} == set(QUANTITIES)


def test_two_sinks_by_turns_turn_over_more_than_shuffled_ones():
    """Of 15 pairs of 6 steps, 9 hold different sinks."""
    trajectory = of_sinks(same_everywhere([{2}, {7}] * 3), length=10)
    assert_values(trajectory, turnover=1, turnover_null=9 / 15, moved=5, move_rate=1, lifetime=1, anchored=0)


def test_a_sink_that_moves_once_turns_over_less_than_shuffled_ones():
    trajectory = of_sinks(same_everywhere([{2}] * 3 + [{7}] * 3), length=10)
    assert_values(trajectory, turnover=1 / 5, turnover_null=9 / 15, moved=1, move_rate=1 / 5, lifetime=3, anchored=0)


def test_sets_that_overlap_and_steps_without_sinks():
    """{1,2,3} {2,3,4} {} {} {4}: distances 1/2, 1, none, 1; runs 1:1, 2:2, 3:2, 4:1, 4:1; one move, from 1 to 2."""
    trajectory = of_sinks(same_everywhere([{1, 2, 3}, {2, 3, 4}, set(), set(), {4}]), length=6)
    every = [1 / 2, 1, 1, 1, 1, 1, 2 / 3, 1, 1]  # of ten pairs, two empty steps are none
    assert_values(trajectory, turnover=2.5 / 3, turnover_null=sum(every) / 9, lifetime=7 / 5, moved=1, move_rate=1)
    assert_values(trajectory, content_sinks=7 / 5, sink_heads=3 / 5)


def test_the_two_rules_do_not_mix():
    trajectory = of_sinks(same_everywhere([{2}] * 4), length=6)
    moving = of_sinks(same_everywhere([{n, 5} for n in range(4)]), length=6)
    both = dataclasses.replace(trajectory, relative=moving.absolute)
    assert_values(both, turnover=0, turnover_null=0, relative_turnover=2 / 3, relative_turnover_null=2 / 3)
    assert_values(both, content_sinks=1, relative_sinks=2, lifetime=4)


@pytest.mark.parametrize(
    ("held", "same", "anchored"), [(10, 9, 1), (9, 9, 0), (10, 8, 0), (20, 18, 1), (20, 17, 0), (11, 10, 1), (11, 9, 0), (0, 0, 0)]
)
def test_an_anchor_holds_half_of_the_steps_and_nine_of_ten_of_those(held, same, anchored):
    steps = [{4} if n < same else {n % 4} if n < held else set() for n in range(20)]
    order = np.random.default_rng(0).permutation(20)
    assert_values(of_sinks(same_everywhere([steps[n] for n in order]), length=8), anchored=anchored)


def test_layers_are_told_apart_and_the_total_is_the_mean_of_those_that_have_the_quantity():
    steps = [[[{1}, {1}], [{n}, {n}], [set(), set()]] for n in range(4)]
    norms = np.ones((4, 3, 5)) * np.array([1.0, 2.0, 4.0])[:, None]
    found = measure(of_sinks(steps, length=5, value_norm=norms), WORDS).values
    assert found["turnover"][1] == pytest.approx([0, 1, NAN], nan_ok=True)
    assert found["turnover"][0] == 0.5
    assert found["content_sinks"] == (pytest.approx(2 / 3), [1, 1, 0])
    assert found["normal_norm"] == (pytest.approx(7 / 3), [1, 2, 4])
    assert found["moved"][1] == pytest.approx([0, 1, NAN], nan_ok=True)


def test_heads_are_told_apart():
    """One head's sink stays, the other's moves, the third has none."""
    measured = measure(of_sinks([[[{1}, {n}, set()]] for n in range(4)], length=5), WORDS)
    assert measured.values["turnover"][0] == 0.5
    assert measured.values["anchored"][0] == pytest.approx(1 / 3)
    assert measured.values["sink_heads"][0] == pytest.approx(2 / 3)
    assert measured.content.tolist() == [[1, 1, 0]]
    assert measured.lane.tolist() == [[0, 0, 0]]


def test_a_lane_is_measured_by_what_all_its_sinks_receive():
    """Two sinks of 0.2 together pass the threshold that neither passes alone; their values weigh a fifth of a token's."""
    received = np.zeros((3, 2, 2, 2))
    received[:, :, 0] = 0.2
    sinks = {"sink_received": received, "sink_value_norm": np.full((3, 2, 2), 0.4), "value_norm": np.full((3, 2, 5), 2.0)}
    trajectory = of_sinks(same_everywhere([set()] * 3, heads=2), length=5, n_sinks=2, **sinks)
    assert_values(trajectory, sink_mass=0.2, lane_heads=0.5, sink_value_norm=0.4, lane_norm_ratio=0.2, content_sinks=0)
    assert measure(trajectory, WORDS).lane == pytest.approx(np.array([[0.4, 0], [0.4, 0]]))
    assert totals(trajectory, threshold=0.5)["lane_heads"] == 0


def test_a_token_is_a_sink_of_its_layer_if_it_is_one_of_any_head():
    norms = np.arange(1.0, 7.0) * np.ones((2, 1, 1))
    found = totals(of_sinks([[[{0}, {2}]], [[{0}, set()]]], length=6, value_norm=norms))
    assert found["content_sink_norm"] == pytest.approx((1 + 3 + 1) / 3)
    assert found["normal_norm"] == pytest.approx((42 - 5) / 9)


def test_resting_queries_that_update_less_show_as_a_negative_noop():
    """Of eight queries the two that rest most update by 0.1, the two that rest least by 0.5."""
    resting = np.array([0.9, 0.8, 0.4, 0.4, 0.4, 0.4, 0.1, 0.0]).reshape(1, 1, 8)
    update = np.array([0.1, 0.1, 0.7, 0.2, 0.9, 0.3, 0.5, 0.5]).reshape(1, 1, 8)
    trajectory = of_sinks([[[{0}]]], length=8, resting=resting, update_ratio=update)
    assert totals(trajectory)["noop"] == pytest.approx(-0.4)
    assert math.isnan(totals(dataclasses.replace(trajectory, resting=0.5 + resting / 1000))["noop"])


def test_quarters_that_cut_through_equal_queries_do_not_depend_on_their_order():
    """One query rests; seven do not: the most resting quarter is that one and one of the seven, on average."""
    resting, update = np.zeros(8), np.arange(8.0)
    resting[0] = 1
    for order in (np.arange(8), np.arange(8)[::-1], np.random.default_rng(1).permutation(8)):
        parts = {"resting": resting[order].reshape(1, 1, 8), "update_ratio": update[order].reshape(1, 1, 8)}
        assert totals(of_sinks([[[{0}]]], length=8, **parts))["noop"] == pytest.approx((0 + 4) / 2 - 4)


# -- against loops ----------------------------------------------------------------------------------------------------------------

SHAPES = {
    "plain": {},
    "dense": {"density": 0.8},
    "sparse": {"density": 0.03, "n": 12},
    "no-sink-of-its-own": {"s": 0},
    "holes": {"holes": 0.3},
    "all-holes": {"holes": 1.0},
    "one-step": {"n": 1},
    "two-steps": {"n": 2},
    "one-token": {"t": 1},
    "one-of-all": {"n": 1, "e": 1, "h": 1, "t": 1, "s": 0},
    "long": {"n": 40, "h": 1, "e": 1, "t": 5, "density": 0.5},
    "none": {"density": 0.0},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_quantity_equals_its_definition_written_as_loops(shape):
    for seed in range(4):
        trajectory = random_trajectory(seed, **SHAPES[shape])
        found, expected = measure(trajectory, WORDS).values, plain_metrics.values(trajectory)
        assert list(found) == list(QUANTITIES)
        assert set(found) == set(expected)
        for name, (total, layers) in expected.items():
            assert found[name][0] == pytest.approx(total, nan_ok=True, rel=1e-12, abs=1e-14), name
            assert found[name][1] == pytest.approx(layers, nan_ok=True, rel=1e-12, abs=1e-14), name


def test_null_turnover_is_what_all_orders_of_the_steps_give():
    trajectory = random_trajectory(3, n=5, e=1, h=2, t=4)
    distance = pairs = 0.0
    for order in itertools.permutations(range(5)):
        shuffled = trajectory.absolute[list(order), 0]
        union = (shuffled[1:] | shuffled[:-1]).sum(-1)
        distance += sum(1 - (shuffled[1:] & shuffled[:-1]).sum(-1)[union > 0] / union[union > 0])
        pairs += (union > 0).sum()
    assert totals(trajectory)["turnover_null"] == pytest.approx(distance / pairs)


def test_a_trajectory_read_backwards_turns_over_alike():
    trajectory = random_trajectory(0, n=9)
    turned = {
        part.name: getattr(trajectory, part.name)[::-1]
        for part in dataclasses.fields(trajectory)
        if isinstance(getattr(trajectory, part.name), np.ndarray) and part.name != "final"
    }
    assert totals(dataclasses.replace(trajectory, **turned)) == pytest.approx(totals(trajectory), rel=1e-12)


def test_half_precision_statistics_are_added_up_in_double():
    norms = np.full((64, 1, 64), 1000.0, dtype=np.float16)  # their sum is far beyond float16
    trajectory = of_sinks([[[{0}]]] * 64, length=64, value_norm=norms, sink_value_norm=np.ones((64, 1, 0), dtype=np.float16))
    assert totals(trajectory)["normal_norm"] == 1000


# -- many trajectories ------------------------------------------------------------------------------------------------------------


def captured(seeds, *, prompts=None, shift=0.0, kinds=WORDS, **shape):
    """The parts of a capture, with the prompts a caller adds."""
    many = [random_trajectory(seed, number=number, **shape) for number, seed in enumerate(seeds)]
    if shift:
        many = [dataclasses.replace(one, entropy=one.entropy + shift) for one in many]
    capture = summarize([measure(one, kinds) for one in many])
    for row in capture["trajectories"]:
        row["prompt"] = f"prompt {row['number']}" if prompts is None else prompts[row["number"]]
    return capture


def test_a_summary_holds_what_a_capture_file_needs_and_is_json():
    capture = captured(range(8), kinds=np.arange(10, dtype=np.uint8) % len(KINDS), density=0.03)
    assert json.loads(json.dumps(capture, allow_nan=False)) == capture
    assert capture.keys() == {"n", "quantities", "trajectories", "kinds", "scatter", "heads"}
    assert capture["n"] == {"trajectories": 8, "forwards": 56, "tokens_seen": 336}
    assert list(capture["quantities"]) == list(QUANTITIES)
    for quantity in capture["quantities"].values():
        assert len(quantity["layers"]) == 2
        assert quantity["total"].keys() == {"mean", "low", "high", "n"}
    assert np.shape(capture["heads"]["lane"]) == np.shape(capture["heads"]["content"]) == (2, 3)
    assert [row["number"] for row in capture["trajectories"]] == list(range(8))


def test_a_summary_counts_only_trajectories_that_have_the_quantity():
    still, none = (of_sinks(same_everywhere([step] * 3), length=4) for step in ({1}, set()))
    measured = [measure(dataclasses.replace(still if n < 6 else none, number=n), WORDS) for n in range(9)]
    capture = summarize(measured)
    assert capture["quantities"]["turnover"]["total"] == {"mean": 0, "low": 0, "high": 0, "n": 6}
    assert capture["quantities"]["sink_heads"]["total"]["mean"] == pytest.approx(6 / 9)
    assert capture["quantities"]["sink_value_norm"]["total"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert capture["trajectories"][8]["values"]["turnover"] == {"total": None, "layers": [None, None]}
    assert capture["heads"]["content"] == [[pytest.approx(6 / 9)] * 3] * 2


def test_the_mean_is_over_trajectories_however_long_they_are():
    short, long = (of_sinks(same_everywhere([step] * n), length=4) for step, n in (({1}, 2), (set(), 98)))
    capture = summarize([measure(short, WORDS), measure(dataclasses.replace(long, number=1), WORDS)])
    assert capture["quantities"]["sink_heads"]["total"]["mean"] == 0.5


def test_a_summary_does_not_depend_on_the_order_of_trajectories():
    measured = [measure(random_trajectory(n, number=n, t=40, n=60), WORDS) for n in range(7)]
    first = summarize(measured)
    assert first["scatter"]["n_normal"] > metrics.SAMPLE
    for order in (measured[::-1], [*measured[3:], *measured[:3]]):
        assert json.dumps(summarize(order)) == json.dumps(first)


def test_kinds_are_counted_per_forward_by_what_it_saw():
    """Position 0 is a sink throughout: masked at first, then a comma. Position 2 is a relative sink of one head, once."""
    kinds = np.array([WORD, PUNCTUATION, SPACE, WORD, WORD, WORD, WORD, WORD, WORD, MASK], dtype=np.uint8)
    trajectory = of_sinks(
        same_everywhere([{0}] * 4), length=4, tokens=np.array([[9, 9, 9, 9]] * 3 + [[1, 0, 2, 9]], dtype=np.int32)
    )
    relative = np.zeros_like(trajectory.absolute)
    relative[3, 1, 2, 2] = True
    shares = summarize([measure(dataclasses.replace(trajectory, relative=relative), kinds)])["kinds"]
    even = dict.fromkeys(KINDS, 0)
    assert shares["all"] == {**even, "mask": 13 / 16, "punctuation": 1 / 16, "space": 1 / 16, "word": 1 / 16}
    assert shares["absolute"] == {**even, "mask": 3 / 4, "punctuation": 1 / 4}
    assert shares["relative"] == {**even, "space": 1}
    nothing = summarize([measure(of_sinks(same_everywhere([set()]), length=2), kinds)])["kinds"]
    assert nothing == {"all": {**even, "mask": 1}, "absolute": None, "relative": None}


def test_the_scatter_is_a_fair_sample_with_the_means_of_all():
    """Half of the sinks weigh 1, half 3; 4 and 6 for other tokens. Of 60,000 each, 10,000 are drawn."""
    rng = np.random.default_rng(0)
    many = []
    for number in range(4):
        sets = np.zeros((300, 2, 1, 100), dtype=bool)
        sets[..., :50] = True
        norms = np.where(sets[:, :, 0], 1.0, 4.0) + 2 * (rng.random((300, 2, 100)) < 0.5)
        base = of_sinks([[[set()], [set()]]] * 300, length=100, n_sinks=1, number=number, value_norm=norms, absolute=sets)
        many.append((base, norms))
    scatter = summarize([measure(one, WORDS) for one, _ in many])["scatter"]
    everything = np.concatenate([norms.ravel() for _, norms in many])
    assert (scatter["n_sink"], scatter["n_normal"], scatter["n_lane"]) == (120_000, 120_000, 2400)
    assert scatter["sink_mean"] == pytest.approx(everything[everything < 3.5].mean())
    assert scatter["normal_mean"] == pytest.approx(everything[everything > 3.5].mean())
    assert len(scatter["sink"]) == len(scatter["normal"]) == metrics.SAMPLE
    assert len(scatter["lane"]) == 2400
    assert set(scatter["sink"]) == {1, 3}
    assert set(scatter["normal"]) == {4, 6}
    assert np.mean(scatter["sink"]) == pytest.approx(2, abs=0.05)  # five standard errors
    assert np.mean(scatter["normal"]) == pytest.approx(5, abs=0.05)
    other = summarize([measure(one, WORDS, seed=1) for one, _ in many])["scatter"]
    assert other["sink"] != scatter["sink"]


def test_every_layer_step_and_token_may_be_drawn_and_none_twice():
    norms = np.arange(30 * 4 * 200, dtype=np.float64).reshape(30, 4, 200)
    trajectory = of_sinks([[[set()]] * 4] * 30, length=200, value_norm=norms)
    drawn = np.array(summarize([measure(trajectory, WORDS)])["scatter"]["normal"])
    assert len(set(drawn)) == metrics.SAMPLE
    for part, size in ((drawn // 800, 30), (drawn // 200 % 4, 4), (drawn % 200, 200)):
        counts = np.bincount(part.astype(int), minlength=size)
        assert counts.min() > 0.5 * counts.mean()
        assert counts.max() < 1.5 * counts.mean()


def test_trajectories_are_drawn_from_independently():
    norms = np.arange(100 * 200, dtype=np.float64).reshape(100, 1, 200)
    one, other = (
        of_sinks([[[set()]]] * 100, length=200, value_norm=norms + shift, number=number) for number, shift in ((0, 0), (1, 20_000))
    )
    drawn = np.array(summarize([measure(one, WORDS), measure(other, WORDS)])["scatter"]["normal"])
    places = [set(drawn[drawn < 20_000]), set(drawn[drawn >= 20_000] - 20_000)]
    shared = len(places[0] & places[1]) / len(places[0])
    assert shared == pytest.approx(0.25, abs=0.05)  # of a quarter of each


def test_samples_merge_in_any_order():
    rng = np.random.default_rng(0)
    parts = [metrics.Sample.of(rng.integers(0, 2**62, 6000), rng.random(6000)) for _ in range(4)]
    first = metrics.Sample.merged(parts)
    assert (first.n, len(first.values)) == (24_000, metrics.SAMPLE)
    for order in itertools.permutations(parts):
        again = metrics.Sample.merged(order)
        assert np.array_equal(again.values, first.values)
        assert again.mean == first.mean
    nested = metrics.Sample.merged([metrics.Sample.merged(parts[:2]), metrics.Sample.merged(parts[2:])])
    assert np.array_equal(nested.values, first.values)
    assert math.isnan(metrics.Sample.of(np.empty(0, dtype=np.int64), np.empty(0)).mean)


def test_paths_show_the_tallest_content_token_of_each_layer_and_step():
    received = np.full((3, 2, 4), 0.1)
    received[[0, 1, 2], 0, [1, 2, 3]] = 0.5
    received[:, 1, 0] = 0.7
    received[1, 1, 2] = NAN
    received[2, 1] = NAN
    tokens = np.array([[0, 9, 9, 9], [0, 9, 5, 9], [0, 1, 5, 9]], dtype=np.int32)
    found = paths_of(of_sinks(same_everywhere([set()] * 3), length=4, received=received, tokens=tokens, number=5), list("abcd"))
    assert found == {
        "number": 5,
        "top": [[1, 2, 3], [0, 0, None]],
        "received": [[0.5, 0.5, 0.5], [0.7, 0.7, None]],
        "masked": [[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]],
        "labels": ["a", "b", "c", "d"],
        "n_prompt": 1,
    }
    json.dumps(found, allow_nan=False)


# -- differences ------------------------------------------------------------------------------------------------------------------


def test_twins_are_compared_one_by_one_and_strangers_by_their_means():
    base, twin = captured(range(10)), captured(range(10), shift=0.25)
    found = difference(base, twin)
    assert found["paired"] is True
    for part in (found["quantities"]["entropy"]["total"], *found["quantities"]["entropy"]["layers"]):
        assert [part[name] for name in ("mean", "low", "high", "n")] == pytest.approx([0.25, 0.25, 0.25, 10])
    assert set(found["quantities"]["turnover"]["total"].items()) == {("mean", 0), ("low", 0), ("high", 0), ("n", 10)}

    for stranger in (captured(range(10), shift=0.25, prompts=["other"] * 10), captured(range(9), shift=0.25)):
        apart = difference(base, stranger)
        assert apart["paired"] is False
        total = apart["quantities"]["entropy"]["total"]
        means = [capture["quantities"]["entropy"]["total"]["mean"] for capture in (base, stranger)]
        assert total["mean"] == pytest.approx(means[1] - means[0])
        assert total["low"] < total["mean"] < total["high"]
        assert total["n"] == len(stranger["trajectories"])


def test_pairs_without_the_quantity_on_either_side_are_left_out():
    base, twin = captured(range(8)), captured(range(8))
    base["trajectories"][0]["values"]["moved"]["total"] = None
    twin["trajectories"][1]["values"]["moved"]["total"] = None
    assert difference(base, twin)["quantities"]["moved"]["total"] == {"mean": 0, "low": 0, "high": 0, "n": 6}
    assert difference(base, captured(range(8), s=0))["quantities"]["sink_value_norm"]["total"]["mean"] is None


def test_models_of_other_depth_are_compared_in_total():
    found = difference(captured(range(6)), captured(range(6), e=3))["quantities"]
    assert found["sink_mass"]["layers"] == []
    assert found["sink_mass"]["total"]["n"] == 6


def test_samples_handed_on_give_the_same_summary():
    measured = [measure(random_trajectory(seed, number=seed, t=9), WORDS) for seed in range(6)]
    whole = summarize(measured)
    kept = measured[:1]
    for one in measured[1:]:
        light, kept[0] = one.hand_norms_to(kept[0])
        assert light.norms == {}
        kept.append(light)
    found = summarize(kept)
    means = [name for name in whole["scatter"] if name.endswith("_mean")]
    for name in means:
        assert found["scatter"].pop(name) == pytest.approx(whole["scatter"].pop(name))
    assert len(means) == 3
    assert found == whole
