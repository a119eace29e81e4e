"""Sampling in blocks: the exact cache changes nothing, whatever the policy and whoever shares the forwards."""

import gc
import itertools
import weakref
from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import small_models
from sinkdlm.errors import SamplingError
from sinkdlm.kernels.cuda_graph import StepGraphs
from sinkdlm.sampling import Policy, Request, generate, start, step
from sinkdlm.sampling import batch as batch_module
from sinkdlm.sampling.prefix_cache import RowCache

small_model = partial(small_models.small_model, n_layers=2)  # forwards take most of the time
SIZE = 4
MODELS = {
    "vanilla": {},
    "sink": {"n_sinks": 1},
    "zero": {"n_sinks": 2, "sink_value": "zero", "gate": "elementwise"},
    "logit": {"n_sinks": 1, "sink_kind": "logit"},
    "shifted": {"n_sinks": 1, "qkv_bias": True, "tie_embeddings": True, "mask_id": 10, "shift_logits": True},
}
POLICIES = {
    "confidence": {},
    "margin": {"order": "margin"},
    "entropy": {"order": "entropy", "temperature": 1.0},
    "random": {"order": "random", "temperature": 0.7},
    "ancestral": {"order": "ancestral", "schedule": "timesteps", "temperature": 1.0, "steps": 9},
    "left to right": {"block": 1},
    "sub-blocks": {"block": 2, "temperature": 1.0},
    "few steps": {"steps": 5},
    "threshold": {"threshold": 0.2, "temperature": 1.0},
    "drawn order": {"order_temperature": 0.5},
    "guidance": {"guidance": 0.7, "temperature": 1.0},
    "remasking": {"order": "ancestral", "temperature": 1.0, "remask": "rescale", "remask_rate": 0.5, "steps": 16},
    "eos": {"eos_id": 3, "temperature": 1.0},
}
# Prompts of no token, inside a block, at its end and beyond; equal ones; gaps; a short last block.
PROMPTS = [[], [1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3, 4], [9, 8, 7, 6, 5, 4, 3, 2, 1], [1], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]]


def rows_of(mask_id: int) -> list[list[int]]:
    rows = [[*prompt, *[mask_id] * (15 - len(prompt))] for prompt in PROMPTS]
    gaps = [1, mask_id, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, mask_id, mask_id, 4, 5, 6]  # the second gap is three blocks later
    return [*rows, gaps, [5, mask_id, mask_id]]


def written(model, cache: str, rows, numbers=None, **policy):
    """Tokens, confidences and steps of each row, all rows in one batch."""
    given = Policy(cache=cache, **policy)
    numbers = numbers or range(len(rows))
    mask_id = model.config.mask_id
    states = start([Request(row, given, mask_id, 7, n, block_size=SIZE) for n, row in zip(numbers, rows, strict=True)])
    with model.inference():
        while step(states, model.denoiser()):
            pass
    return [(state.tokens.clone(), state.confidence.clone(), state.steps) for state in states]


def assert_same(found, expected):
    for (tokens, confidence, steps), (other, sure, n) in zip(found, expected, strict=True):
        assert torch.equal(tokens, other)
        assert torch.equal(confidence.isnan(), sure.isnan())
        assert (confidence - sure).nan_to_num().abs().max() < 1e-6  # stored in float32
        assert steps == n


CASES = [
    *(("shifted", policy) for policy in POLICIES),
    *((name, policy) for name in MODELS for policy in ("threshold", "guidance")),
]


@pytest.mark.parametrize(("name", "policy"), dict.fromkeys(CASES))
def test_the_exact_cache_changes_nothing(name, policy):
    """Alone and among others."""
    model = small_model(**MODELS[name], block_size=SIZE)
    rows = rows_of(model.config.mask_id)
    plain = written(model, "none", rows, **POLICIES[policy])
    assert_same(written(model, "exact", rows, **POLICIES[policy]), plain)
    for number in (1, 7):
        assert_same(written(model, "exact", [rows[number]], [number], **POLICIES[policy]), [plain[number]])


@pytest.mark.parametrize("name", ["sink", "shifted"])
def test_cached_logits_are_the_uncached_ones(name):
    """Every step's logits, float64."""
    model = small_model(**MODELS[name], block_size=SIZE)
    mask_id, policy = model.config.mask_id, {"temperature": 1.0}
    rows, kept = rows_of(mask_id), {}

    class Recording(type(model.denoiser())):
        def __call__(self, tokens, *, where=None, cache=None, **facts):
            logits = super().__call__(tokens, where=where, cache=cache, **facts)
            if where is not None and where.shape[1] > 0:
                kept[self.kind].append((tokens, where, cache, logits.clone()))
            return logits

    found = {}
    for kind in ("none", "exact"):
        kept[kind] = []
        denoiser = Recording(model)
        denoiser.kind = kind
        states = start([Request(rows[4], Policy(cache=kind, **policy), mask_id, 0, 0, block_size=SIZE)])
        while step(states, denoiser):
            pass
        found[kind] = kept[kind]
    steps = [call for call in found["exact"] if call[1].shape[1] > 1 or call[2].width == len(rows[4])]
    assert len(steps) == len(found["none"]) == 6
    for (_, where, _, logits), (_, places, _, expected) in zip(steps, found["none"], strict=True):
        assert where.shape == places.shape
        assert (logits - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_rows_may_join_and_leave(name):
    model = small_model(**MODELS[name], block_size=SIZE)
    mask_id = model.config.mask_id
    rows = rows_of(mask_id)
    plain = written(model, "none", rows, temperature=1.0)
    policy = Policy(temperature=1.0)
    waiting = [Request(row, policy, mask_id, 7, number, block_size=SIZE) for number, row in enumerate(rows)]
    active, done = start(waiting[:2]), {}
    waiting = waiting[2:]
    for turn in itertools.count():
        step(active, model.denoiser())
        done |= {state.request.number: state for state in active if state.done}
        active = [state for state in active if not state.done]
        if waiting and turn % 2:
            active = [*start([waiting.pop()]), *active]
        if not active and not waiting:
            break
    found = [(done[n].tokens, done[n].confidence, done[n].steps) for n in range(len(rows))]
    assert_same(found, plain)


def test_an_open_end_grows_by_blocks():
    model = small_model(n_sinks=1, block_size=SIZE)
    given = {"prompt": [[1, 2, 3], [4] * 9], "mask_id": 11, "limit": 21, "eos_id": 3, "temperature": 1.0, "seed": 5}
    for more in ({}, {"block": 2}):
        found = [generate(model.denoiser(), **given, **more, cache=cache) for cache in ("none", "exact")]
        assert found[0].rows == found[1].rows
        assert all(length % SIZE == 0 or length == 21 for length in found[0].lengths)


def test_the_cache_is_used_by_itself_and_computes_blocks():
    """A step computes the current block, and at its first step the one before; a prompt is prefilled once for equal prompts."""
    model = small_model(n_sinks=1, block_size=SIZE)
    seen, starts = [], []

    class Counting(type(model.denoiser())):
        def __call__(self, tokens, *, where=None, cache=None, **facts):
            seen.append(tuple(tokens.shape))
            starts.append(cache.start)
            return super().__call__(tokens, where=where, cache=cache, **facts)

    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    generate(Counting(model), prompt=[prompt] * 5, mask_id=11, length=16)
    assert all(isinstance(start, int) for start in starts)  # one mask for all rows
    # Two blocks of the prompt once; three open tokens of the third block; the last block, beside the third at its first step.
    assert seen == [(1, 8), *[(5, 4)] * 3, (5, 8), *[(5, 4)] * 3]


@pytest.mark.parametrize("policy", [{}, {"guidance": 0.7}])
def test_a_forward_that_failed_leaves_nothing_in_the_cache(policy):
    """As out of memory: the step is taken again, by rows alone."""
    model = small_model(**MODELS["shifted"], block_size=SIZE)
    rows = rows_of(10)[1:4]
    expected = written(model, "none", rows, temperature=1.0, **policy)

    class Failing(type(model.denoiser())):
        left = 0

        def __call__(self, tokens, *, where=None, cache=None, **facts):
            self.left -= 1
            if self.left == 0:
                raise MemoryError
            return super().__call__(tokens, where=where, cache=cache, **facts)

    for number in range(1, 10):
        denoiser = Failing(model)
        denoiser.left = number
        states = start([Request(row, Policy(temperature=1.0, **policy), 10, 7, n, block_size=SIZE) for n, row in enumerate(rows)])
        with pytest.raises(MemoryError):  # noqa: PT012
            while step(states, denoiser):
                pass
        for state in states:
            while step([state], denoiser):
                pass
        assert_same([(state.tokens, state.confidence, state.steps) for state in states], expected)


def test_mistakes_are_told_in_a_line():
    model, plain = small_model(n_sinks=1, block_size=SIZE), small_model(n_sinks=1)
    given = {"prompt": [[1]], "mask_id": 11, "length": 8}
    for denoiser, options, word in (
        (plain.denoiser(), {"cache": "exact"}, "block-diffusion"),
        (model.denoiser(), {"cache": "dual", "block": 4}, "exact"),
        (model.denoiser(), {"block": 3}, "divide"),
        (model.denoiser(), {"shift": True}, "shift"),
    ):
        with pytest.raises(SamplingError, match=word) as failure:
            generate(denoiser, **given, **options)
        assert "\n" not in str(failure.value)
    for size, deterministic in itertools.product((None, 2), (False, True)):
        states = start([Request([1, 11, 11], Policy(), 11, block_size=size)])
        with pytest.raises(SamplingError, match="block_size"):
            step(states, model.denoiser(), deterministic=deterministic)


def _replayed(run, replays):
    """A capture on a CPU: the operations of one run, which a replay repeats on the same tensors, without Python."""
    graph = make_fx(lambda: (run(), torch.zeros(()))[1])()  # runs them once
    first = itertools.count()
    return lambda: replays.append(graph()) if next(first) else None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cache"), [("shifted", "exact"), ("sink", "dual")])
def test_a_captured_step_may_be_replayed(name, cache, monkeypatch):
    """Rows at different blocks, and at every later block: a replay reads on the device where the spans lie."""
    size = SIZE if cache == "exact" else None
    model = small_model(**MODELS[name], block_size=size, n_layers=1)
    mask_id = model.config.mask_id
    policy = Policy(cache=cache, temperature=1.0, block=SIZE)
    rows = [[*range(1, n), *[mask_id] * 20] for n in (2, 7)]
    requests = [Request(row, policy, mask_id, 7, n, block_size=size) for n, row in enumerate(rows)]

    def tokens():
        states = start(requests)
        with model.inference():
            while step(states, model.denoiser()):
                pass
        return [state.tokens.tolist() for state in states]

    expected, captured, replays = tokens(), [], []
    monkeypatch.setattr(batch_module, "can_capture", lambda device: True)
    monkeypatch.setattr(StepGraphs, "_capture", lambda self, run: captured.append(run) or _replayed(run, replays))
    assert tokens() == expected
    assert len(replays) > 2 * len(captured) > 0


def test_caches_of_finished_rows_are_freed_at_once(monkeypatch):
    """Without waiting for the garbage collector, which may come late: a GPU's memory is full by then."""
    import torch._dynamo  # with which the caches keep a method out of compiled code

    made = []
    first = RowCache.__init__
    monkeypatch.setattr(RowCache, "__init__", lambda self, *given: (first(self, *given), made.append(weakref.ref(self)))[0])
    gc.disable()
    try:
        generate(
            small_model(n_sinks=1, block_size=4).denoiser(), prompt=torch.zeros(2, 3, dtype=torch.int64), length=13, mask_id=11
        )
        assert len(made) >= 1
        assert all(cache() is None for cache in made)
    finally:
        gc.enable()
