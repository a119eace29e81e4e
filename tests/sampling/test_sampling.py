"""The loop: what every policy keeps, and that a request gets the same tokens alone and in any batch."""

import gc
import math
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

import small_models
from plain_samplers import dream, llada, smdm_greedy
from policies import EOS, POLICIES
from sinkdlm.errors import ModelError, SamplingError
from sinkdlm.kernels import cuda_graph
from sinkdlm.sampling import DenoiserAdapter, batch, gather, generate, requests_of, step, stream
from sinkdlm.sampling.requests import Request, start
from sinkdlm.sampling.unmasking import policy_of
from small_models import VARIANTS, small_tokens

small_model = partial(small_models.small_model, n_layers=2)  # forwards take most of the time
ENDS = [*((name, None) for name in POLICIES), *((name, EOS) for name, given in POLICIES.items() if "block" in given)]


def mixed_requests(model, options, n):
    """Requests of different prompts and lengths, some with gaps and something after them, the first two always the same."""
    found = []
    for number in range(n):
        given, length = 1 + number * 5 % 7, 13 + number * 3 % 8
        row = small_tokens(1, length, seed=100 + number)[0].tolist()
        canvas = [
            token if place < given or (number % 3 == 1 and place > length - 3) else model.config.mask_id
            for place, token in enumerate(row)
        ]
        found.append(Request(canvas, policy_of(**options), model.config.mask_id, seed=4, number=number))
    return found


def run(model, requests, barred=(), **how):
    states = start(requests)
    with model.inference():
        while not all(state.done for state in states):
            step(states, model.denoiser(barred), **how)
    return [state.tokens.tolist() for state in states]


@pytest.mark.parametrize("name", list(POLICIES))
def test_same_output_alone_and_in_a_batch(name):
    model = small_model(n_sinks=1, **({"shift_logits": True} if "cache" in name else {}))
    requests = mixed_requests(model, POLICIES[name], 5)  # two of them with gaps
    alone = [run(model, [request])[0] for request in requests]
    assert run(model, requests[:2]) == alone[:2]
    assert run(model, requests) == alone
    for request, row in zip(requests, alone, strict=True):
        assert len(row) == len(request.canvas)
        assert model.config.mask_id not in row
        assert all(old == new for old, new in zip(request.canvas, row, strict=True) if old != model.config.mask_id)
        if "suppressed" in POLICIES[name]:
            written = [new for old, new in zip(request.canvas, row, strict=True) if old == model.config.mask_id]
            assert not set(written) & set(POLICIES[name]["suppressed"])


@pytest.mark.parametrize("name", list(POLICIES))
def test_barred_ids_are_never_written_and_change_nothing_else(name):
    """Barred ids act as if each policy suppressed them, in every path; the denoiser's predictions stay the same."""
    model = small_model(n_sinks=1)
    options = POLICIES[name]
    requests = mixed_requests(model, options, 5)
    often = Counter(token for row in run(model, requests) for token in row).most_common(2)
    barred = tuple(token for token, _ in often)
    suppressed = {**options, "suppressed": (*options.get("suppressed", ()), *barred)}
    found = run(model, requests, barred)
    assert found == run(model, mixed_requests(model, suppressed, 5))
    for request, row in zip(requests, found, strict=True):
        assert not {new for old, new in zip(request.canvas, row, strict=True) if old != new} & set(barred)
    tokens = small_tokens(2, 5)
    assert torch.equal(model.denoiser(barred)(tokens), model.denoiser()(tokens))


def test_requests_of_all_policies_join_and_leave_between_steps():
    """As in a server: at every step the batch has other rows, of other policies and progress, and each gets its own tokens."""
    model = small_model(n_sinks=2, sink_position="end")
    requests = [mixed_requests(model, options, i + 1)[i] for i, options in enumerate(POLICIES.values())]
    alone = [run(model, [request])[0] for request in requests]
    waiting, running, states = start(requests), [], []
    states += waiting
    sizes = []
    with model.inference():
        while waiting or running:
            running += [waiting.pop(0) for _ in range(min(2, len(waiting)))]
            moved = step(running, model.denoiser())
            sizes.append(len(moved))
            running = [state for state in running if not state.done][::-1]
    assert [state.tokens.tolist() for state in states] == alone
    assert max(sizes) > 5
    assert len(set(sizes)) > 3


@pytest.mark.parametrize("name", ["llada", "smdm-origin", "fast", "eos", "remask-conf"])
def test_deterministic_float32_is_bit_equal_in_any_batch(name):
    model = small_model(dtype=torch.float32, n_sinks=1)
    requests = mixed_requests(model, POLICIES[name], 8)
    together = start(requests)
    with model.inference():
        while not all(state.done for state in together):
            step(together, model.denoiser(), deterministic=True)
        for request, mine in zip(requests, together, strict=True):
            (alone,) = start([request])
            while not alone.done:
                step([alone], model.denoiser(), deterministic=True)
            assert torch.equal(alone.tokens, mine.tokens)
            assert torch.equal(alone.confidence.nan_to_num(-1), mine.confidence.nan_to_num(-1))


@pytest.mark.parametrize("variant", ["sink", pytest.param("sinks-2-end-zero-gate", marks=pytest.mark.slow)])
def test_deterministic_rows_share_forwards_whose_shapes_are_their_own(variant):
    """Rows of all policies join in any order: every bit of their tokens and confidences is that of the row alone."""
    model, shapes = small_model(dtype=torch.float32, **VARIANTS[variant]), []
    policies = [policy for name, policy in POLICIES.items() if "cache" not in name and name != "fast"][::3]
    requests = [mixed_requests(model, options, number + 1)[number] for number, options in enumerate(policies)]
    long = Request([1, *[11] * 40], policy_of("llada", steps=6, temperature=1.0), 11, number=77)
    requests += [long, replace(long, canvas=[1, *[11] * 70], number=78)]
    adapter = DenoiserAdapter(model.denoiser())

    def note(_, given):
        is_trial = torch.equal(given[0][0], torch.arange(given[0].shape[1]) % 2)
        shapes.extend([] if is_trial else [tuple(given[0].shape)])

    model.register_forward_pre_hook(note)

    def written(order):
        waiting, running = start([requests[number] for number in order]), []
        states = dict(zip(order, waiting, strict=True))
        with model.inference():
            while waiting or running:
                joins = 1 + len(shapes) % 4
                running, waiting = running[::-1] + waiting[:joins], waiting[joins:]
                step(running, adapter, deterministic=True)
                running = [state for state in running if not state.done]
        return {number: (state.tokens, state.confidence.nan_to_num(-1)) for number, state in states.items()}

    alone = {number: written([number])[number] for number in range(len(requests))}
    n_alone = len(shapes)
    for order in (range(0, len(requests), 2), [*range(len(requests))][::-1]):
        shapes.clear()
        for number, found in written(order).items():
            assert all(map(torch.equal, found, alone[number])), number
    if all(adapter.keeps_bits(torch.device("cpu"), 32, [16] * n) for n in (2, 3)):  # on this processor
        assert len(shapes) < n_alone / 2
    assert {width for _, width in shapes} == {32, 64, 96}


def test_deterministic_rows_are_computed_alone_where_company_changes_bits():
    """A stand-in for a processor whose matmuls add up in another order where there are several rows."""
    model, sizes = small_model(dtype=torch.float32, n_sinks=1), []

    class Uneven:
        def __call__(self, tokens, where, lengths=None):
            sizes.append(len(tokens))
            return model.denoiser()(tokens, where=where, lengths=lengths) * (1 + 1e-3 * (len(tokens) > 1))

    requests, found = mixed_requests(model, POLICIES["llada"], 3), []
    for part in ([0, 1, 2], [0], [1], [2]):
        denoiser, states = DenoiserAdapter(Uneven()), start([requests[number] for number in part])
        while step(states, denoiser, deterministic=True):
            pass
        found += [state.confidence.nan_to_num(-1) for state in states]
    assert all(torch.equal(together, alone) for together, alone in zip(found[:3], found[3:], strict=True))
    assert 3 in sizes  # tried


@pytest.mark.parametrize("small_batch", [0, 4096])
@pytest.mark.parametrize("name", ["llada", "threshold", "eos", "blocks", "guided", "smdm-origin", "remask-cap"])
def test_replayed_steps_are_the_steps(name, small_batch, monkeypatch):
    """Steps captured as on a GPU, with a function in place of the capture: same buffers, same widths of prediction."""
    model = small_model(n_sinks=1)
    long = Request([1] + [11] * 24, policy_of(**{**POLICIES[name], "steps": None}), 11)
    batches = [mixed_requests(model, POLICIES[name], 5), [long]]
    expected = [run(model, requests) for requests in batches]
    replays = []

    def capture(_, compute):
        return lambda: replays.append(compute())

    monkeypatch.setattr(cuda_graph, "_SMALL_BATCH", small_batch)
    monkeypatch.setattr(batch, "can_capture", lambda _: True)
    monkeypatch.setattr(cuda_graph.StepGraphs, "_capture", capture)
    assert [run(model, requests) for requests in batches] == expected
    assert name not in ("llada", "blocks", "smdm-greedy") or len(replays) >= 10


@pytest.mark.parametrize("most", [2, 5, 32, 252, 1000])
def test_widths_of_captured_steps(most):
    """Widths cover the positions asked for, are at most twice that, and are few."""
    widths = [cuda_graph.round_width(count, most, rows=5000) for count in range(1, most + 1)]
    for count, width in enumerate(widths, start=1):
        assert count <= width <= min(most, max(2 * count, cuda_graph._LEAST_WIDTH))
    assert len(set(widths)) <= 4 + math.log2(max(most, 2))
    assert cuda_graph.round_width(1, most, rows=4096 // most) == most


def test_a_plain_callable_is_enough():
    """A denoiser without lengths= and where=: rows are grouped by length and get the same tokens as from our own denoiser."""
    model = small_model(n_sinks=1)
    for name in ("llada", "guided", "threshold", "smdm-origin", "remask-cap", "eos"):
        requests = mixed_requests(model, POLICIES[name], 6)
        states = start(requests)
        with torch.no_grad():
            while not all(state.done for state in states):
                step(states, lambda tokens: model.head(model(tokens)))
        assert [state.tokens.tolist() for state in states] == run(model, requests)


def test_a_shift_of_foreign_logits_is_undone():
    aligned, raw = small_model(n_sinks=1, shift_logits=True), small_model(n_sinks=1)
    raw.load_state_dict(aligned.state_dict())
    prompt = small_tokens(3, 4)
    ours, theirs = (
        generate(model.denoiser(), prompt=prompt, length=15, mask_id=11, steps=6, shift=shift).tokens
        for model, shift in ((aligned, False), (raw, True))
    )
    assert torch.equal(ours, theirs)


# -- against plain references ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 12))])
def test_greedy_and_llada_are_the_plain_samplers(seed):
    """Always with a prompt: without one, all positions look alike to a model, and rounding decides which comes first."""
    flags = list(VARIANTS.values())[seed % len(VARIANTS)]
    model = small_model(seed=seed, **flags)
    mask_id = model.config.mask_id

    def predict(row):
        return model.head(model(row[None]))[0]

    shapes = (13, 1, 12, 4), (14, 2, 6, 6), (12, 4, 8, 8), (9, 1, 20, 8), (17, 1, 4, 4)
    for length, given, steps, block in (shapes[seed % 5], shapes[(seed + 2) % 5]):
        row = torch.full((length,), mask_id)
        row[:given] = small_tokens(1, length, seed=seed)[0, :given]
        prompt = row[None, :given]
        with model.inference():
            denoiser = model.denoiser()
            greedy = generate(denoiser, prompt=prompt, length=length, mask_id=mask_id, config="smdm-greedy", steps=steps)
            assert torch.equal(greedy.tokens[0], smdm_greedy(predict, row, steps, mask_id))
            if steps % ((length - given) // block) == 0 and (length - given) % block == 0:
                for guidance in (0.0, 0.7):
                    given_too = {"config": "llada", "steps": steps, "block": block, "guidance": guidance}
                    ours = generate(denoiser, prompt=prompt, length=length, mask_id=mask_id, **given_too)
                    assert torch.equal(ours.tokens[0], llada(predict, row, given, steps, block, mask_id, guidance))


@pytest.mark.parametrize("cuts", [None, (0.6, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_dream_is_the_plain_sampler(seed, cuts):
    """A foreign denoiser whose rows are for the next token, as Dream's are. Cuts change the entropies, so the order too."""
    model = small_model(seed=seed)

    def raw(tokens):
        return model.head(model(tokens))

    for length, given, steps in ((13, 1, 12), (14, 2, 5), (17, 1, 30)):
        row = torch.full((length,), 11)
        row[:given] = small_tokens(1, length, seed=seed)[0, :given]
        with model.inference():
            options = {"config": "dream", "steps": steps, "shift": True} | ({"top_p": cuts[0], "top_k": cuts[1]} if cuts else {})
            ours = generate(raw, prompt=row[None, :given], length=length, mask_id=11, **options)
            assert torch.equal(ours.tokens[0], dream(lambda tokens: raw(tokens[None])[0], row, steps, 11, cuts=cuts))


# -- what every run keeps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("steps", [None, 1, 4, 100])
def test_sampling_fills_the_canvas_and_never_edits_the_prompt(steps, temperature):
    model = small_model(n_sinks=1)
    prompt, mask_id = small_tokens(3, 5), model.config.mask_id
    with model.inference():
        out = generate(model.denoiser(), prompt=prompt, length=16, mask_id=mask_id, steps=steps, temperature=temperature, seed=1)
    assert out.steps == {None: 11, 1: 1, 4: 4, 100: 11}[steps]
    assert torch.equal(out.tokens[:, :5], prompt)
    assert out.tokens.shape == (3, 16)
    assert not bool((out.tokens == mask_id).any())
    assert bool(out.confidence[:, :5].isnan().all())
    assert bool(((out.confidence[:, 5:] > 0) & (out.confidence[:, 5:] <= 1)).all())


def test_exact_caches_change_nothing(variant):
    """The lane, the narrowed head and shared forwards, against a model that recomputes everything: bit for bit."""
    model = small_model(dtype=torch.float32, **variant)
    prompt = small_tokens(1, 3)

    def run_once(denoiser):
        return generate(denoiser, prompt=prompt, length=14, mask_id=model.config.mask_id, steps=6, temperature=0.8)

    with torch.no_grad():
        fresh = run_once(model.denoiser())
    with model.inference():
        cached = run_once(model.denoiser())
        again = run_once(model.denoiser())
    assert torch.equal(fresh.tokens, cached.tokens)
    assert torch.equal(fresh.confidence.nan_to_num(-1), cached.confidence.nan_to_num(-1))
    assert torch.equal(again.confidence.nan_to_num(-1), cached.confidence.nan_to_num(-1))


@pytest.mark.parametrize("name", ["prefix", "dual"])
@pytest.mark.parametrize("flags", [{"n_sinks": 1}, {"n_sinks": 2, "sink_position": "end"}, VARIANTS["parent"]])
def test_a_block_cache_is_exact_in_the_first_step_of_a_block(name, flags):
    """One step per block: every forward covers whole rows, so that the cache approximates nothing."""
    model = small_model(**flags)
    for steps, same in ((3, True), (12, False)):
        plain, cached = (
            generate(
                model.denoiser(),
                prompt=small_tokens(6, 3),
                length=15,
                mask_id=model.config.mask_id,
                steps=steps,
                block=4,
                cache=kind,
            )
            for kind in ("none", name)
        )
        close = torch.allclose(plain.confidence.nan_to_num(-1), cached.confidence.nan_to_num(-1), atol=1e-6)
        assert close == same  # with more steps the stale cache changes the result


def test_a_span_sees_what_the_whole_row_sees():
    """A cached step is exact while nothing outside its block has changed."""
    model = small_model(**VARIANTS["parent"])
    mask_id = model.config.mask_id
    asked = []

    class Watched:
        reach = 1

        def __call__(self, tokens, *, lengths=None, where=None, cache=None):
            got = model.denoiser()(tokens, where=where, cache=cache)
            asked.append((tokens.shape[1], where.tolist()))
            return got

    one_layer = small_model(n_layers=1, **VARIANTS["parent"])  # the outside's keys and values do not depend on the block
    model = one_layer
    ours = generate(Watched(), prompt=small_tokens(2, 3), length=12, mask_id=mask_id, block=4, cache="dual")
    exact = generate(model.denoiser(), prompt=small_tokens(2, 3), length=12, mask_id=mask_id, block=4)
    assert torch.equal(ours.tokens, exact.tokens)
    assert torch.allclose(ours.confidence.nan_to_num(-1), exact.confidence.nan_to_num(-1), atol=1e-6)
    assert [width for width, _ in asked] == [12, 5, 5, 5, 12, 5, 5, 5, 12]  # a block of 4 and one token on its left


def test_the_surest_positions_come_first():
    """A denoiser that is sure of the last position: greedy steps commit it first, and see it from then on."""
    seen = []

    def denoise(tokens):
        seen.append(tokens.clone())
        logits = torch.zeros(*tokens.shape, 4, dtype=torch.float64)
        logits[:, :, 1] = torch.arange(tokens.shape[1], dtype=torch.float64)
        return logits

    out = generate(denoise, prompt=torch.zeros(1, 1, dtype=torch.int64), length=4, mask_id=4)
    assert [row[0].tolist() for row in seen] == [[0, 4, 4, 4], [0, 4, 4, 1], [0, 4, 1, 1]]
    assert out.tokens.tolist() == [[0, 1, 1, 1]]


def test_order_holds_where_probabilities_round_to_one():
    """All three are certain to float32; the surest still comes first."""
    seen = []

    def denoise(tokens):
        seen.append(tokens.clone())
        logits = torch.zeros(1, 3, 5)
        logits[0, :, 2] = torch.tensor([30.0, 50.0, 40.0])
        return logits

    generate(denoise, prompt=[[]], length=3, mask_id=5)
    assert [row[0].tolist() for row in seen] == [[5, 5, 5], [5, 2, 5], [5, 2, 2]]


def test_a_threshold_commits_all_that_pass_and_at_least_one():
    def denoise(tokens):
        logits = torch.zeros(1, 6, 3, dtype=torch.float64)
        sure = torch.tensor([0.95, 0.2, 0.91, 0.5, 0.89, 0.99], dtype=torch.float64)
        logits[0, :, 0] = torch.log(2 * sure / (1 - sure))
        return logits

    requests = requests_of([[]], length=6, mask_id=3, threshold=0.9)
    committed = [found.committed[0].nonzero().flatten().tolist() for found in stream(denoise, start(requests))]
    assert committed == [[0, 2, 5], [4], [3], [1]]
    in_time = generate(denoise, prompt=[[]], length=6, mask_id=3, threshold=0.9, steps=2)
    assert in_time.steps == 2


def test_last_ids_are_committed_when_nothing_else_is_left():
    """However sure the model is of them, and leftmost first, so that a row ends as soon as all before its EOS is written."""

    def denoise(tokens):
        logits = torch.zeros(1, 6, 5, dtype=torch.float64)
        logits[0, :, 1] = torch.arange(6, dtype=torch.float64)
        logits[0, 3:, EOS] = torch.tensor([20.0, 30.0, 40.0], dtype=torch.float64)
        return logits

    def committed(**options):
        rows = requests_of([[]], length=6, mask_id=5, **options)
        return [found.committed[0].nonzero().flatten().tolist() for found in stream(denoise, start(rows))]

    assert committed() == [[5], [4], [3], [2], [1], [0]]
    assert committed(last_ids=[EOS]) == [[2], [1], [0], [3], [4], [5]]
    assert committed(last_ids=EOS, steps=3) == [[1, 2], [0, 3], [4, 5]]
    assert committed(last_ids=[EOS], eos_id=EOS) == [[2], [1], [0], [3]]
    assert committed(threshold=0.5) == [[2, 3, 4, 5], [1], [0]]
    assert committed(threshold=0.5, last_ids=[EOS]) == [[2], [1], [0], [3], [4], [5]]


def test_only_positions_that_can_change_reach_the_head():
    model = small_model(n_sinks=1)
    asked = []

    def denoise(tokens, *, lengths=None, where=None):
        asked.append(where.shape[1])
        return model.denoiser()(tokens, lengths=lengths, where=where)

    mask_id = model.config.mask_id
    generate(denoise, prompt=small_tokens(2, 3), length=11, mask_id=mask_id, block=4)
    assert asked == [4, 3, 2, 1, 4, 3, 2, 1]
    asked.clear()
    generate(denoise, prompt=small_tokens(2, 3), length=11, mask_id=mask_id, config="smdm-origin", steps=1000)
    assert sum(asked) <= 16  # an ancestral step predicts only what it reveals; steps that reveal nothing run no forward
    assert len(asked) <= 16


def test_stream_yields_every_step():
    model = small_model(n_sinks=1)
    requests = requests_of(small_tokens(2, 3), length=9, mask_id=11, steps=4)
    steps = list(stream(model.denoiser(), start(requests)))
    assert len(steps) == 4
    assert [int(found.committed.sum()) for found in steps] == [4, 4, 2, 2]
    tokens = torch.cat([small_tokens(2, 3), torch.full((2, 6), 11)], dim=1)
    for found in steps:
        assert torch.equal(found.tokens != tokens, found.committed)
        tokens = found.tokens
        assert torch.equal(found.confidence.isnan(), (tokens == 11) | (torch.arange(9) < 3))
    assert torch.equal(tokens, generate(model.denoiser(), prompt=small_tokens(2, 3), length=9, mask_id=11, steps=4).tokens)


def test_guidance_moves_away_from_the_blind_prediction_and_gives_no_nan():
    def denoise(tokens):
        """Strongly prefers 1 if it sees the prompt, slightly 2 in any case; [MASK], in the vocabulary, is the likeliest."""
        logits = torch.zeros(*tokens.shape, 4)
        logits[..., 3] = 50.0
        logits[..., 2] = 2.0
        logits[..., 1] += torch.where((tokens[:, :1] == 0), 1.5, 0.0)
        logits[..., 0] = -torch.inf
        return logits

    plain, guided, suppressed = (
        generate(denoise, prompt=[[0]], length=4, mask_id=3, **options)
        for options in ({}, {"guidance": 1.0}, {"guidance": 1.0, "suppressed": [1]})
    )
    assert plain.tokens.tolist() == [[0, 2, 2, 2]]
    assert guided.tokens.tolist() == [[0, 1, 1, 1]]
    assert suppressed.tokens.tolist() == [[0, 2, 2, 2]]
    for out in (plain, guided, suppressed):
        assert not bool(out.confidence[:, 1:].isnan().any())


# -- ends and gaps ---------------------------------------------------------------------------------------------------------------


def ending(at):
    """Writes 1 everywhere and EOS from position `at` on, surest on the left."""

    def denoise(tokens):
        places = torch.arange(tokens.shape[1], dtype=torch.float64)
        logits = torch.zeros(*tokens.shape, 5, dtype=torch.float64)
        logits[..., 1] = 20 - places / 10
        logits[..., EOS] = torch.where(places >= at, 40.0 - places, 0.0)
        return logits

    return denoise


@pytest.mark.parametrize(("name", "eos"), ENDS)
def test_tokens_are_not_chosen_by_what_is_no_number(name, eos):
    """Without an error, a model that overflows would write its first token everywhere."""
    options = {**POLICIES[name], "eos_id": eos}
    model = small_model(n_sinks=1)
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = math.nan
    with pytest.raises(ModelError, match="no numbers"):
        run(model, mixed_requests(model, options, 3))


@pytest.mark.parametrize(("name", "eos"), ENDS)
def test_rows_of_no_numbers_end_and_the_others_get_what_they_get_alone(name, eos):
    """One row holds a token with a NaN embedding; another row joins later, so that the broken one moves to a new batch."""
    model = small_model(n_sinks=1)
    policy = policy_of(**{**POLICIES[name], "eos_id": eos, "suppressed": (7,)})
    mask_id = model.config.mask_id
    requests = [Request([token, *[mask_id] * size], policy, mask_id, number=token) for token, size in ((1, 9), (7, 12), (2, 12))]
    alone = [run(model, [requests[place]])[0] for place in (0, 2)]
    with torch.no_grad():
        model.embed.weight[7] = math.inf
    states, lost = start(requests), []
    with model.inference():
        for n_here in (2, 3):
            running = True
            while running:
                try:
                    step(states[:n_here], model.denoiser())
                except ModelError as failure:
                    lost += failure.rows
                running = n_here == 3 and not all(state.done for state in states)
    assert lost == [states[1]]
    assert [states[place].tokens.tolist() for place in (0, 2)] == alone


def test_what_was_no_number_is_not_forgotten_where_a_row_moves():
    """Values overflow in a single step: the row moves on to another batch, and must still fail at its end."""
    calls = []

    def denoise(tokens):
        calls.append(len(tokens))
        return torch.full((*tokens.shape, 5), math.nan if len(calls) == 1 else 0.0)

    states = start(requests_of([[0], [0]], length=4, mask_id=5))
    step(states[:1], denoise)
    step(states, denoise)
    with pytest.raises(ModelError) as caught:
        step(states, denoise)
    assert caught.value.rows == [states[0]]
    assert calls == [1, 2, 2]


def test_a_row_that_has_ended_costs_nothing_more():
    calls = []

    def denoise(tokens):
        calls.append(len(tokens))
        return ending(6)(tokens)

    rows = requests_of([[0], [0, 0, 0]], length=[17, 4], mask_id=5, block=4, eos_id=EOS)
    states = start(rows)
    while not all(state.done for state in states):
        step(states, denoise)
    out = gather(states)
    assert out.rows[0] == [0, 1, 1, 1, 1, 1, *[EOS] * 11]
    assert out.row_steps == [6, 1]  # a block of 4, what is before EOS, EOS, and nothing more
    assert out.tokens[1].tolist() == [0, 0, 0, 1, *[-1] * 13]
    assert sum(calls) == 7


def test_an_open_end_grows_by_blocks_until_eos_or_the_limit():
    widths = []

    def denoise(tokens):
        widths.append(tokens.shape[1])
        return ending(6)(tokens)

    out = generate(denoise, prompt=[[0, 0]], limit=40, block=3, eos_id=EOS, mask_id=5)
    assert out.rows == [[0, 0, 1, 1, 1, 1, EOS, EOS]]
    assert widths == [5] * 3 + [8] * 2  # EOS at 6 is surest within its block, and everything before it is written then
    capped = generate(ending(99), prompt=[[0, 0]], limit=10, block=3, eos_id=EOS, mask_id=5)
    assert capped.rows == [[0, 0, *[1] * 8]]


def test_rows_of_an_open_end_share_a_batch():
    model = small_model(n_sinks=1, sink_position="end")
    prompts = [small_tokens(1, n, seed=n)[0].tolist() for n in (1, 4, 2)]
    options = {"mask_id": 11, "block": 3, "eos_id": EOS, "temperature": 1.0, "limit": [20, 30, 17]}
    together = generate(model.denoiser(), prompt=prompts, **options)
    for number, prompt in enumerate(prompts):
        alone = generate(model.denoiser(), prompt=[prompt], numbers=[number], **{**options, "limit": options["limit"][number]})
        assert alone.rows[0] == together.rows[number]


def test_gaps_and_suffixes_are_filled_around_what_is_given():
    model = small_model(n_sinks=1)
    mask_id = model.config.mask_id
    out = generate(model.denoiser(), prompt=[[1, 2, mask_id, mask_id, 5]], suffix=[[8, 9]], length=9, mask_id=mask_id, block=2)
    (row,) = out.rows
    assert row[:2] + row[4:5] + row[7:] == [1, 2, 5, 8, 9]
    assert mask_id not in row
    assert out.steps == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 2}, "whole canvas"),
        ({"length": 5, "temperature": -1.0}, "temperature = -1.0: allowed is 0 or more"),
        ({"length": 5, "temperature": math.nan}, "temperature = nan"),
        ({"length": 5, "steps": 0}, "steps = 0: allowed is 1 or more"),
        ({"length": 5, "config": "best"}, "policy 'best': unknown; there are smdm-origin, smdm-greedy, llada, dream, fast"),
        ({"length": 5, "order": "best"}, "order = 'best': allowed: confidence"),
        ({"length": 5, "tempratur": 1}, "option 'tempratur': unknown"),
        ({"length": 5, "remask": "cap"}, "goes with order = 'ancestral'"),
        ({"length": 5, "order": "random", "threshold": 0.5}, "reads predictions"),
        ({"length": 5, "threshold": 1.5}, "above 0 and at most 1"),
        ({"length": 5, "top_k": 3}, "top_k = 3: has no effect at temperature 0.*give a temperature above 0"),
        ({"length": 5, "top_p": 0.9, "config": "fast"}, "top_p = 0.9: has no effect at temperature 0"),
        ({"length": 5, "min_p": 0.1}, "min_p = 0.1: has no effect at temperature 0"),
        ({"length": 5, "min_p": 1.5}, "min_p = 1.5: allowed is above 0 and at most 1"),
        ({"length": 5, "repetition_penalty": 0}, "repetition_penalty = 0: allowed is above 0; 1 changes nothing"),
        ({"length": 5, "remask_rate": 0.1}, "remask_rate = 0.1: goes with remask"),
        ({"length": 5, "cache": "dual"}, "needs a block length"),
        ({"length": 5, "config": "fast"}, "this denoiser supports none"),
        ({"length": 9, "block": 2, "steps": 3}, "fewer than the 4 blocks"),
        ({"length": 5, "limit": 9}, "give one of length="),
        ({}, "give one of length="),
        ({"limit": 9}, "an open end needs block="),
        ({"limit": 9, "block": 2, "eos_id": 1, "suffix": [[1]]}, "an open end cannot have given text after a gap"),
        ({"length": 5, "suffix": [[1], [1]]}, "1 prompts, 2 suffixes"),
        ({"length": 5, "numbers": [3, 4]}, "1 lengths, 2 numbers: give one of each per row"),
        ({"length": 5, "suppressed": [9]}, "suppressed = .* below the vocabulary size 3"),
        ({"length": 5, "last_ids": [9]}, "last_ids = .* below the vocabulary size 3"),
        ({"length": 5, "last_ids": ["a"]}, r"last_ids = \['a'\]: expected token ids"),
        ({"length": 5, "last_ids": 1, "order": "random"}, "last_ids: goes with an order that reads predictions"),
        ({"length": 5, "order_temperature": -1}, "order_temperature = -1: allowed is 0 or more"),
        ({"length": 5, "order_temperature": 0.1, "config": "smdm-origin"}, "order_temperature: goes with an order that reads"),
        ({"length": 5, "order_temperature": 0.1, "threshold": 0.9}, "order_temperature = 0.1: .*; leave one out"),
        ({"length": 5, "suppressed": [0, 1, 2]}, "leaves none of the vocabulary's 3 tokens"),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(SamplingError, match=words):
        generate(lambda tokens: torch.zeros(*tokens.shape, 3), prompt=torch.zeros(1, 2, dtype=torch.int64), mask_id=4, **options)


def test_cuts_that_mean_something_are_taken_at_temperature_0():
    """Dream orders positions by the distribution after top_k and top_p; top_p = 1 changes nothing."""
    assert policy_of("dream", top_k=3).top_k == 3
    assert policy_of("llada", top_p=1).top_p == 1
    assert policy_of("llada", min_p=0) == policy_of("llada")


@pytest.mark.parametrize("kind", ["prefix", "dual"])
def test_a_cache_beside_a_register_is_refused(kind):
    model = small_model(n_sinks=1, sink_kind="register")
    with pytest.raises(SamplingError, match=r"register sink.*use cache = 'none'"):
        run(model, mixed_requests(model, {"block": 5, "cache": kind}, 2))


def test_a_batch_goes_when_its_requests_go():
    """A batch is freed without waiting for the garbage collector: on a GPU it holds much memory."""
    states = start(requests_of(small_tokens(2, 3), length=[9, 9], mask_id=11))
    gc.disable()
    try:
        step(states, lambda tokens: torch.zeros(*tokens.shape, 5))
        home = weakref.ref(states[0].batch)
        states[1].end()
        while not states[0].done:
            step(states, lambda tokens: torch.zeros(*tokens.shape, 5))
        assert home() is not None
        del states
        assert home() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["prefix", "dual"])
def test_rows_with_a_cache_wait_for_each_other_and_change_no_token(kind):
    """A threshold lets rows through blocks at their own pace; apart, each pace is a forward of its own."""
    model = small_model(n_sinks=1)
    mask_id, prompt = model.config.mask_id, small_tokens(6, 3)
    given = {"length": 23, "block": 5, "cache": kind, "threshold": 0.2, "steps": 20, "seed": 3, "temperature": 0.7}
    n_forwards, found = {}, {}
    for together in (False, True):
        calls = []

        class Counted:
            def __call__(self, tokens, *, where=None, cache=None, calls=calls, **rest):
                calls.append(len(tokens))
                return model.denoiser()(tokens, where=where, cache=cache, **rest)

        states = start(requests_of(prompt, mask_id=mask_id, **given))
        with model.inference():
            while any(not state.done for state in states):
                assert step(states, Counted(), together=together)
        n_forwards[together], found[together] = len(calls), gather(states)
    assert torch.equal(found[True].tokens, found[False].tokens)
    assert found[True].row_steps == found[False].row_steps
    assert len(set(found[True].row_steps)) > 1
    assert n_forwards[True] < n_forwards[False]


@pytest.mark.parametrize("prompt", ["text", ["text"], ["one", "two"]])
def test_text_is_no_prompt_of_generate(prompt):
    with pytest.raises(SamplingError, match="prompt: text; give rows of token ids"):
        generate(lambda tokens: tokens, prompt=prompt, mask_id=3, length=8)
