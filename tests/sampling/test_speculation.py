"""Speculation: one forward takes several of the plain sampler's steps, and changes no token, order or confidence."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import small_models
from sinkdlm.errors import ModelError, SamplingError
from sinkdlm.kernels import cuda_graph
from sinkdlm.sampling import DenoiserAdapter, Policy, Request, batch, generate, requests_of, speculation, start, step, stream
from sinkdlm.sampling.speculation import BEST, OTHER_TOKEN, SECOND, SpeculativeBatch, Tree
from sinkdlm.sampling.unmasking import policy_of
from small_models import VARIANTS, small_tokens

EOS = 3
small_model = partial(small_models.small_model, n_layers=2)
POLICIES = {
    "confidence": {},
    "margin": {"order": "margin", "steps": 9},
    "dream": {"config": "dream", "steps": 9, "temperature": 0.6, "top_p": 0.9},
    "drawn-order": {"order_temperature": 0.3, "last_ids": (2, 5)},
    "random": {"order": "random", "block": 6},
    "ancestral": {"config": "smdm-origin", "steps": 12},
    "blocks": {"block": 4, "guidance": 0.6},
    "left-to-right": {"block": 1},
    "shares": {"schedule": "cosine", "steps": 6, "suppressed": (0, 7)},
    "prefix-cache": {"block": 5, "cache": "prefix", "guidance": 0.4},
    "dual-cache": {"block": 5, "cache": "dual"},
    "eos": {"eos_id": EOS, "block": 4},
}
DRAFTS = ({"speculate": 4}, {"speculate": 5, "draft": "tree"}, {"speculate": 2}, {})


def requests(options, mask_id, n, *, temperature=0.0, seed=4, **given):
    """Rows of different prompts, lengths and gaps, with one policy."""
    policy = policy_of(**{"temperature": temperature, **options})
    found = []
    for number in range(n):
        first, length = 1 + number * 5 % 7, 13 + number * 3 % 8
        row = small_tokens(1, length, seed=100 + number)[0].tolist()
        canvas = [t if p < first or (number % 3 == 1 and p > length - 3) else mask_id for p, t in enumerate(row)]
        found.append(Request(canvas, policy, mask_id, seed=seed, number=number, **given))
    return found


def speculating(rows, drafts=DRAFTS):
    """The same requests, each with another draft."""
    return [replace(row, policy=replace(row.policy, **drafts[place % len(drafts)])) for place, row in enumerate(rows)]


def written(denoiser, rows, **how):
    """Of each row: every commit with its step, the number of steps, and the tokens. Also the share of forwards that were needed."""
    states = start(rows)
    found = [[] for _ in states]
    for now in stream(denoiser, states, **how):
        for row, state in enumerate(states):
            new = now.committed[row].nonzero()[:, 0]
            if len(new):
                found[row].append((state.steps, new.tolist(), now.tokens[row, new].tolist(), now.confidence[row, new]))
    return found, *zip(*((state.steps, state.tokens.tolist(), state.forwards) for state in states), strict=True)


def assert_same(found, expected):
    assert found[1:3] == expected[1:3]
    for own, other in zip(found[0], expected[0], strict=True):
        assert [commit[:3] for commit in own] == [commit[:3] for commit in other]
        for (*_, sure), (*_, plain) in zip(own, other, strict=True):
            assert (sure - plain).abs().max() <= 1e-12


@pytest.mark.parametrize("name", list(POLICIES))
def test_tokens_order_and_confidences_are_the_plain_samplers(name):
    model = small_model(n_sinks=1, **({"shift_logits": True} if "cache" in name else {}))
    for temperature, n in ((1.0, 4), (0.0, 2)):
        if temperature == 0 and "top_p" in POLICIES[name]:
            continue
        rows = requests(POLICIES[name], model.config.mask_id, n, temperature=temperature)
        with model.inference():
            expected = written(model.denoiser(), rows)
            found = written(model.denoiser(), speculating(rows))
            assert_same(found, expected)
            assert sum(found[3]) < sum(expected[3])
            assert expected[3] == expected[1]
            own = [written(model.denoiser(), [row]) for row in speculating(rows)[:1]]
        assert [row for one in own for row in one[2]] == [*expected[2][:1]]
        assert [n for one in own for n in one[1]] == [*expected[1][:1]]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_the_law_holds_for_many_models(number):
    variant = [*VARIANTS][number]
    for seed, name in [*enumerate(POLICIES)][number % 4 :: 4]:
        if VARIANTS[variant].get("sink_kind") == "register" and "cache" in name:
            continue
        model = small_model(seed=seed, **VARIANTS[variant])
        for temperature in (0.0, 1.0):
            if temperature == 0 and "top_p" in POLICIES[name]:
                continue
            rows = requests(POLICIES[name], model.config.mask_id, 5, temperature=temperature, seed=seed)
            with model.inference():
                expected = written(model.denoiser(), rows)
                for drafts in ([{"speculate": 8, "draft": "tree"}], [{"speculate": 3}]):
                    assert_same(written(model.denoiser(), speculating(rows, drafts)), expected)


@pytest.mark.parametrize("options", [{"guidance": 0.7, "temperature": 1.0}, {"block": 2, "cache": "none"}, {"eos_id": EOS}])
def test_block_diffusion_with_its_exact_cache(options):
    """Rows at different blocks, with drafts of different widths. The check of a canvas computes its block alone."""
    model = small_model(n_sinks=1, shift_logits=True, block_size=4)
    rows = requests(options, model.config.mask_id, 6, block_size=4)
    widths = []

    class Counting(type(model.denoiser())):
        def __call__(self, tokens, *, lengths=None, where=None, cache=None, **facts):
            widths.append(tokens.shape[1])
            return super().__call__(tokens, lengths=lengths, where=where, cache=cache, **facts)

    with model.inference():
        expected = written(model.denoiser(), rows)
        found = written(Counting(model), speculating(rows))
    assert_same(found, expected)
    assert sum(found[3]) < sum(expected[3])
    if options.get("cache") != "none":
        assert sum(width <= 8 for width in widths) > len(widths) / 2


def test_rows_join_and_leave_and_keep_their_guesses():
    """As in a server: rows of all policies, also of those that cannot speculate, at every step in another batch."""
    model = small_model(n_sinks=2)
    others = [{"threshold": 0.2}, {"config": "smdm-origin", "remask": "cap", "steps": 12}, {"config": "fast", "block": 4}]
    mask_id, rows = model.config.mask_id, []
    for place, options in enumerate([*POLICIES.values(), *others]):
        (row,) = requests(options, mask_id, place + 1, temperature=1.0)[place:]
        rows.append(row if options in others else speculating([row] * 4)[place % 4])
    with model.inference():
        alone = [written(model.denoiser(), [row]) for row in rows]
        waiting, running, states = (found := start(rows)), [], list(found)
        while waiting or running:
            running += [waiting.pop(0) for _ in range(min(2, len(waiting)))]
            step(running, model.denoiser())
            running = [state for state in running if not state.done][::-1]
    assert [state.tokens.tolist() for state in states] == [one[2][0] for one in alone]
    assert [state.steps for state in states] == [one[1][0] for one in alone]
    assert [state.forwards for state in states] == [one[3][0] for one in alone]  # no guess was lost
    assert not any(isinstance(state.batch, SpeculativeBatch) for state in states if state.policy.remask != "none")


def test_log_probabilities_are_those_of_the_steps():
    model = small_model(n_sinks=1)
    rows, found = requests(POLICIES["eos"], model.config.mask_id, 3, temperature=1.0, logprobs=2), []
    for own in (rows, speculating(rows)):
        states = start(own)
        with model.inference():
            while step(states, model.denoiser()):
                pass
        found.append([state.logprobs for state in states])
    for plain, quick in zip(*found, strict=True):
        for one, other in zip(plain, quick, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12, equal_nan=True)


def test_an_open_end_grows_as_it_would():
    model = small_model(n_sinks=1)
    given = {"config": policy_of(block=4, eos_id=EOS, temperature=1.2), "mask_id": model.config.mask_id, "limit": 30}
    rows = requests_of([[1], [2, 4, 5], [7, 7]], **given)
    with model.inference():
        assert_same(written(model.denoiser(), speculating(rows)), written(model.denoiser(), rows))


@pytest.mark.parametrize("name", ["drawn-order", "ancestral"])
def test_deterministic_texts_are_bit_equal(name):
    model = small_model(dtype=torch.float32, n_sinks=1)
    rows = requests(POLICIES[name], model.config.mask_id, 4, temperature=1.0)
    with model.inference():
        expected, found = (written(model.denoiser(), own, deterministic=True) for own in (rows, speculating(rows)))
    assert found[1:] == expected[1:]
    for own, other in zip(found[0], expected[0], strict=True):
        assert all(torch.equal(a[3], b[3]) for a, b in zip(own, other, strict=True))


def test_replayed_steps_are_the_steps(monkeypatch):
    """Steps captured as on a GPU, with a function in place of the capture."""
    model, replays = small_model(n_sinks=1), []
    rows = [Request([1] + [11] * 24, policy_of(**POLICIES[name]), 11, number=3) for name in ("confidence", "drawn-order")]
    with model.inference():
        expected = written(model.denoiser(), rows)
        monkeypatch.setattr(batch, "can_capture", lambda _: True)
        monkeypatch.setattr(cuda_graph.StepGraphs, "_capture", lambda _, compute: lambda: replays.append(compute()))
        assert_same(written(model.denoiser(), speculating(rows)), expected)
    assert len(replays) > 5


def independent(tokens):
    """Predictions that no token changes: every guess is right if it is drawn with the noise of its own step."""
    noise = torch.randn(32, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return noise[: tokens.shape[1]].expand(len(tokens), -1, -1).clone()


@pytest.mark.parametrize("order", ["confidence", "entropy", "random", "ancestral"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_draw_the_noise_of_the_steps_they_are_for(order, temperature):
    """The first forward has no guesses; each later one takes four steps, over the ends of blocks too."""
    rows = requests_of([[1, 2, 3]], length=28, mask_id=9, order=order, temperature=temperature, block=5, speculate=4)
    (state,) = start(rows)
    adapter = DenoiserAdapter.of(independent)
    while not state.done:
        step([state], adapter)
    commits = len({c[0] for c in written(independent, [replace(rows[0], policy=replace(rows[0].policy, speculate=None))])[0][0]})
    assert state.steps == commits
    assert state.forwards == 1 + math.ceil((commits - 1) / 4)
    assert state.accepted == 25 - sum(plan_sizes(rows[0], commits))


def plan_sizes(request, commits):
    """Tokens of the first step of each forward."""
    quotas = [plan.quota for plan in start([replace(request, policy=replace(request.policy, block=5))])[0].ahead(commits)]
    return [quotas[0], *quotas[1::4]]


def second_place(tokens):
    """The leftmost open position is the surest, then the third, then the second; its token is 1 once it is the leftmost."""
    logits = torch.zeros(*tokens.shape, 5, dtype=torch.float64)
    for row, canvas in enumerate(tokens.tolist()):
        for rank, place in enumerate([p for p, token in enumerate(canvas) if token == 5]):
            logits[row, place, 2 if rank < 3 else 1] = {0: 9.0, 1: 4.0, 2: 5.0}.get(rank, 3.0 - rank / 8)
    return logits


def second_token(tokens):
    """Surest on the left; a token is guessed as 2 until its turn comes, when the second guess is right."""
    logits = torch.zeros(*tokens.shape, 5, dtype=torch.float64)
    for row, canvas in enumerate(tokens.tolist()):
        for rank, place in enumerate([p for p, token in enumerate(canvas) if token == 5]):
            logits[row, place, :3] = torch.tensor([0.0, 12.0, 11.0] if rank == 0 else [0.0, 7.0 - rank / 8, 8.0 - rank / 8])
    return logits


@pytest.mark.parametrize(("denoise", "steps"), [(second_place, 2), (second_token, 2)])
def test_a_tree_checks_second_choices(denoise, steps):
    rows = requests_of([[0]], length=13, mask_id=5)
    expected = written(denoise, rows)
    for draft, least in (("linear", 1), ("tree", steps)):
        found = written(denoise, speculating(rows, [{"speculate": 32, "draft": draft}]))
        assert_same(found, expected)
        assert found[3][0] <= math.ceil(12 / least) + 1
        assert draft == "tree" or found[3][0] > 8


def test_a_tree_holds_its_likeliest_canvases():
    assert Tree.of(Policy(), 4) == Tree((0, 0, 1, 2), (BEST,) * 4, (0, 1, 2, 3))
    tree = Tree.of(Policy(draft="tree"), 8)
    assert tree.depth < 7
    assert SECOND in tree.choices
    assert all(tree.depths[place] == tree.depths[parent] + 1 for place, parent in enumerate(tree.parents) if place)
    assert set(Tree.of(Policy(order="ancestral", draft="tree"), 16).choices) == {BEST, OTHER_TOKEN}  # noise alone says the places


def test_a_row_of_no_numbers_ends_and_the_others_go_on():
    model = small_model(n_sinks=1)
    rows = [Request([token, *[11] * 9], policy_of(speculate=3, suppressed=(7,)), 11, number=token) for token in (1, 7, 2)]
    with model.inference():
        alone = [written(model.denoiser(), [rows[place]])[2][0] for place in (0, 2)]
        with torch.no_grad():
            model.embed.weight[7] = math.inf
        states = start(rows)
        with pytest.raises(ModelError) as caught:
            step(states, model.denoiser())
        assert caught.value.rows == [states[1]]
        while step(states, model.denoiser()):
            pass
    assert [states[place].tokens.tolist() for place in (0, 2)] == alone


def test_a_forward_that_fails_leaves_the_row_as_it_was():
    (row,) = requests_of([[0]], length=20, mask_id=9, speculate=4)
    (state,), fails = start([row]), [False]

    def denoise(tokens):
        if fails[0]:
            raise MemoryError
        return independent(tokens)

    adapter = DenoiserAdapter.of(denoise)
    step([state], adapter)
    step([state], adapter)
    seen, fails[0] = state.tokens.clone(), True
    with pytest.raises(MemoryError):
        step([state], adapter)
    assert torch.equal(state.tokens, seen)
    assert (state.steps, state.forwards) == (5, 2)
    fails[0], others = False, start(requests_of([[1]], length=20, mask_id=9))  # in another batch
    while not state.done:
        step([state, *others], adapter)
    assert state.tokens.tolist() == written(independent, [replace(row, policy=policy_of())])[2][0]


@pytest.mark.parametrize("shared", [False, True])
def test_auto_speculates_while_a_forward_has_room(shared, monkeypatch):
    """Seconds of a forward: constant up to 16 canvases, then proportional. One row gets 8 canvases, 16 rows one each, and only
    the tries cost anything."""
    clock = [0.0]

    def denoise(tokens):
        clock[0] += max(1.0, len(tokens) / 16)
        return independent(tokens)

    monkeypatch.setattr(speculation, "_device_time", lambda _: clock[0])
    adapter = DenoiserAdapter.of(denoise)
    adapter.speculator = speculation.Speculator(shared=shared)
    for n, fewest, most in ((1, 0, 0.7), (16, 0.95, 1.05)):
        clock[0], asked = 0.0, 8 if shared else "auto"
        states = start(requests_of([[1]] * n, length=32, mask_id=9, speculate=asked) * (12 if n == 1 else 1))
        for together in [[state] for state in states] if n == 1 else [states]:
            while step(together, adapter):
                pass
        plain = 31 * (12 if n == 1 else 1)
        assert fewest <= clock[0] / plain <= most
        assert adapter.speculator._trials[n.bit_length()].best == (8 if n == 1 else 1)


def test_what_cannot_be_guessed_is_refused():
    for options in ({"threshold": 0.9}, {"order": "ancestral", "remask": "cap"}):
        with pytest.raises(SamplingError, match=r"speculate = 4: the next commits cannot be guessed with .*; leave one out"):
            Policy(speculate=4, **options)
    with pytest.raises(SamplingError, match="speculate = 'auto': a constraint is kept step by step"):
        Request([1, 11, 11], Policy(speculate="auto"), 11, constraint=object())
    for value in (0, 1000, True, "fast", 2.5):
        with pytest.raises(SamplingError, match=r"speculate = .*: allowed: auto, or 1 to 64"):
            Policy(speculate=value)
    with pytest.raises(SamplingError, match="draft = 'bush': allowed: linear, tree"):
        Policy(draft="bush")


def test_a_plain_callable_and_generate_are_enough():
    given = {"prompt": [[1, 2], [3]], "length": 20, "mask_id": 9, "temperature": 1.0}
    plain, quick = (generate(independent, **given, speculate=n) for n in (None, 4))
    assert torch.equal(plain.tokens, quick.tokens)
    assert plain.row_steps == quick.row_steps
    assert generate(independent, **given, speculate="auto").rows == plain.rows
