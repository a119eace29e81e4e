"""The arithmetic of policies: quotas, blocks, remasking, draws; and that ancestral sampling gives the model's own joint."""

import itertools
import math

import pytest
import torch

from plain_samplers import kept, llada
from sinkdlm.noise import Stream, hash_words
from sinkdlm.sampling import generate, requests_of, stream
from sinkdlm.sampling.drawing import add_noise, cut, draw, gumbel, log_odds_, margin, negative_entropy, penalise
from sinkdlm.sampling.requests import Request, start
from sinkdlm.sampling.unmasking import (
    NAMED,
    REMASKS,
    SCHEDULES,
    cut_blocks,
    exchanges,
    masked_shares,
    policy_of,
    quotas,
    split_steps,
)

MASK = 3  # of a vocabulary of 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_quotas_add_up_to_the_canvas(schedule):
    for n in range(1, 65):
        for steps in range(1, 65):
            found = quotas(n, steps, schedule)
            assert len(found) == steps
            assert sum(found) == n
            assert min(found) >= 0
            if schedule == "linear":
                assert max(found) - min(found) <= 1
                assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("options", [{"config": name} for name in NAMED if name != "fast"] + [
    {"schedule": "cosine"}, {"block": 5}, {"block": 7, "config": "smdm-greedy"}, {"order": "random", "block": 3},
    {"block": 64, "config": "smdm-origin"}, {"config": "smdm-origin", "block": 6, "schedule": "cosine"},
])  # fmt: skip
def test_every_plan_commits_every_position_once(options):
    """The plans of a request, without a denoiser: within blocks, in the steps given, with the right sums, for sizes up to 64."""
    for n in (*range(1, 34), 48, 63, 64):
        for steps in (None, *range(max(1, -(-n // options.get("block", 64))), 65, 7)):
            policy = policy_of(**{**options, "steps": steps})
            (state,) = start([Request([0] + [MASK] * n, policy, MASK, number=n)])
            per_block, last = {}, -1
            while not state.done:
                plan = state.plan
                per_block[plan.start] = per_block.get(plan.start, 0) + plan.quota
                assert last < plan.step < (steps or n) * len(state.request.blocks)
                assert plan.first == (per_block[plan.start] == plan.quota)
                assert 0 < plan.quota <= plan.n_predicted
                last = plan.step
                state.advance(plan.quota)
            assert per_block == {start: stop - start for start, stop in state.request.blocks}


def test_blocks_tile_and_steps_are_dealt_to_them():
    assert cut_blocks(3, 14, 4) == [(3, 7), (7, 11), (11, 14)]
    assert cut_blocks(3, 14, None) == [(3, 14)]
    assert split_steps([4, 4, 3], 8) == [3, 3, 2]
    assert split_steps([4, 4, 3], None) == [4, 4, 3]
    assert split_steps([2, 4, 4], 9) == [2, 4, 3]  # a prompt that ends inside a block leaves it fewer positions
    assert split_steps([2, 4, 4], 9, spare=False) == [3, 3, 3]
    assert split_steps([2, 4, 1], 7) == split_steps([2, 4, 1], 50) == [2, 4, 1]


def test_greedy_counts_as_the_original_does():
    """Float32 times, truncation, and everything in the last step: 256 steps for 256 tokens begin with an empty one."""
    found = quotas(256, 256, "timesteps")
    assert found[0] == 0
    assert sum(found) == 256
    assert quotas(10, 4, "timesteps") == [2, 2, 2, 4]


# -- draws -----------------------------------------------------------------------------------------------------------------------


def keys_of(n, seed=0):
    return hash_words(seed, int(Stream.SAMPLING), torch.arange(n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperature_one_draws_from_the_softmax(dtype):
    logits = torch.tensor([1.0, -2.0, 0.5, 3.0, -4.0, 0.0, 2.5, -1.0], dtype=dtype)
    n = 200_000
    counts = torch.bincount(draw(logits.expand(n, -1), keys_of(n)), minlength=8).double()
    expected = n * logits.double().softmax(0)
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3  # 0.999 quantile at 7 degrees of freedom


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generate_at_temperature_matches_softmax_frequencies(dtype):
    logits, n, temperature = torch.tensor([0.3, -1.0, 1.4], dtype=dtype), 30_000, 0.7
    out = generate(
        lambda tokens: logits.expand(*tokens.shape, 3).clone(), prompt=torch.zeros(n // 30, 0, dtype=torch.int64), length=30,
        mask_id=3, steps=1, temperature=temperature, seed=11,
    )  # fmt: skip
    counts = torch.bincount(out.tokens.flatten(), minlength=3).double()
    assert int(counts.sum()) == n
    expected = n * (logits.double() / temperature).softmax(0)
    assert float(((counts - expected) ** 2 / expected).sum()) < 13.8  # 0.999 quantile at 2 degrees of freedom


def test_noise_has_the_tail_that_a_float32_uniform_cuts_off():
    """The largest noise of a float32 uniform is 16.6; here float32 agrees with float64 as far as 43."""
    words = torch.tensor([0, 2, 1 << 20, 1 << 44, -(1 << 62)])
    single, double = gumbel(words, torch.float32), gumbel(words, torch.float64)
    assert float(double[0]) > 43
    assert torch.allclose(single.double(), double, rtol=1e-6)
    assert torch.isfinite(gumbel(torch.tensor([-1, -2, (1 << 63) - 1]), torch.float32)).all()


def test_cut_keeps_the_top_tokens():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 2.0]])
    assert torch.isfinite(cut(logits, 2, None)).tolist() == [[True, False, False, False, True]]
    assert torch.isfinite(cut(logits, 1, None)).tolist() == [[True, False, False, False, True]]  # all that are as likely
    probabilities = logits.softmax(-1)
    assert torch.isfinite(cut(logits, None, float(probabilities[0, 0]) + 0.01)).sum() == 2
    assert torch.isfinite(cut(logits, None, 1e-9)).sum() == 1
    assert torch.equal(cut(logits, 5, 1.0), logits)


def test_both_cuts_together_are_dreams():
    """First p, then k. Half of the rows hold equal logits; the other order would keep other tokens in most of them."""
    generator, n_other = torch.Generator().manual_seed(0), 0
    for case in range(16):
        logits = 2 * torch.randn(40, generator=generator, dtype=torch.float64)
        logits = logits.round() if case % 2 else logits
        top_p, top_k = 0.5 + 0.03 * case, 2 + case % 7
        found = torch.isfinite(cut(logits[None], top_k, top_p))[0].nonzero().flatten().tolist()
        assert set(found) == kept(logits, top_p, top_k)
        turned = torch.isfinite(cut(cut(logits[None], top_k, None), None, top_p))[0].nonzero().flatten().tolist()
        n_other += turned != found
    assert n_other > 4


def test_min_p_keeps_a_share_of_the_likeliest():
    """Against the definition, in float64, beside the other cuts too: they rescale probabilities and keep their ratios."""
    for seed in range(8):
        logits = 2 * torch.randn(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        chances = [math.exp(float(value)) for value in logits]
        expected = {token for token, chance in enumerate(chances) if chance >= 0.1 * max(chances)}
        assert set(torch.isfinite(cut(logits[None], None, None, 0.1))[0].nonzero().flatten().tolist()) == expected
        both = set(torch.isfinite(cut(logits[None], 9, 0.8, 0.1))[0].nonzero().flatten().tolist())
        assert both == expected & kept(logits, 0.8, 9)


@pytest.mark.parametrize("mask_id", [4, 12])
def test_a_penalty_is_what_its_formula_says(mask_id):
    """Every step of a greedy sampler, and every bit, against the formula by hand; [MASK] and EOS (here never likely) have none."""
    generator, eos_id, penalty = torch.Generator().manual_seed(0), 2, 1.7
    table = torch.randn(14, 9, 12, generator=generator, dtype=torch.float64)
    table[..., eos_id] = -30

    def predict(row):
        return table[len(row) - 5 + (row != mask_id).sum() % 3]

    def by_hand(row):
        logits = predict(row).clone()
        for token in {int(token) for token in row} - {mask_id, eos_id}:
            for own in logits[: len(row)]:
                own[token] = own[token] / penalty if own[token] > 0 else own[token] * penalty
        return logits

    row = torch.tensor([1, 7, 2, *[mask_id] * 6])
    expected = llada(by_hand, row, given=3, steps=6, block=6, mask_id=mask_id)
    options = {"length": 9, "mask_id": mask_id, "eos_id": eos_id, "block": 6}

    def denoiser(rows):
        return torch.stack([predict(row) for row in rows])

    found, plain = (generate(denoiser, prompt=row[None, :3], repetition_penalty=value, **options) for value in (penalty, 1))
    assert found.rows == [expected.tolist()]
    assert found.rows != plain.rows
    alone = penalise(predict(row)[None], row[None], penalty, [mask_id, eos_id])
    assert torch.equal(alone[0], by_hand(row))


@pytest.mark.parametrize("order", ["confidence", "margin", "entropy"])
def test_positions_are_drawn_in_proportion(order):
    """Two of four positions, drawn one after the other by softmax(confidence / order_temperature), against the exact chances."""
    logits = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [0.0, 3.0, 1.0], [0.2, 0.0, 0.1]], dtype=torch.float64)
    p, temperature, n = logits.softmax(-1), 0.4, 3_000
    ordered = p.sort(-1, descending=True).values
    sure = {"confidence": ordered[:, 0], "margin": ordered[:, 0] - ordered[:, 1], "entropy": (p * p.log()).sum(-1)}[order]
    weight = (sure / temperature).softmax(0)
    pairs = list(itertools.combinations(range(4), 2))
    expected = [n * float(weight[a] * weight[b] * (1 / (1 - weight[a]) + 1 / (1 - weight[b]))) for a, b in pairs]
    options = {"order": order, "order_temperature": temperature, "steps": 2}
    states = start(requests_of(torch.zeros(n, 0, dtype=torch.int64), length=4, mask_id=3, **options))
    first = next(iter(stream(lambda tokens: logits.expand(len(tokens), 4, 3).clone(), states))).committed
    counts = [int((first[:, a] & first[:, b]).sum()) for a, b in pairs]
    assert sum(counts) == n
    spread = sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))
    assert spread < 20.5  # 0.999 quantile at 5 degrees of freedom


def test_named_policies_draw_as_their_authors_do():
    """diff_sample draws at 1; LLaDA's generate, Dream's config and Fast-dLLM's generate take the likeliest token."""
    assert {name: policy.temperature for name, policy in NAMED.items()} == {
        "smdm-origin": 1.0, "smdm-greedy": 0.0, "llada": 0.0, "dream": 0.0, "fast": 0.0,
    }  # fmt: skip
    assert not any(policy.guidance or policy.order_temperature or policy.last_ids for policy in NAMED.values())


def test_sureness_is_that_of_the_softmax():
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = logits.softmax(-1)
    tokens = torch.arange(6)
    ordered = p.sort(-1, descending=True).values
    assert torch.allclose(margin(logits), ordered[:, 0] - ordered[:, 1])
    assert torch.allclose(negative_entropy(logits), (p * p.log()).sum(-1))
    assert torch.allclose(log_odds_(logits.clone(), tokens).sigmoid(), p.gather(-1, tokens[:, None])[:, 0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_compiled_draws_are_the_plain_ones():
    """What a GPU runs for large batches, compiled here for the CPU."""
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))
    given = logits, keys_of(64), torch.arange(500)
    fused = torch.compile(lambda *given: add_noise(*given).argmax(-1), dynamic=True)
    assert torch.equal(fused(*given), add_noise(*given).argmax(-1))


# -- the joint -------------------------------------------------------------------------------------------------------------------


def correlated_joint():
    """P(x) over 3 words at 3 places: mostly three alike, or 0 1 2."""
    joint = torch.full((3, 3, 3), 0.004, dtype=torch.float64)
    for word, weight in enumerate((0.4, 0.25, 0.15)):
        joint[word, word, word] = weight
    joint[0, 1, 2] = 0.1
    return joint / joint.sum()


def exact_denoiser(joint):
    """log P(x_i | what is committed), for every place of every canvas, from the joint."""

    def denoise(tokens):
        given = [
            torch.cat([torch.eye(3), torch.ones(1, 3)]).double()[tokens[:, place]] for place in range(3)
        ]  # (B, 3) allowed words
        mass = torch.einsum("abc,na,nb,nc->nabc", joint, *given)
        marginals = [mass.sum([axis for axis in (1, 2, 3) if axis != place + 1]) for place in range(3)]
        return torch.stack(marginals, dim=1).log()

    return denoise


def total_variation(tokens, joint):
    index = tokens[:, 0] * 9 + tokens[:, 1] * 3 + tokens[:, 2]
    return float((torch.bincount(index, minlength=27).double() / len(tokens) - joint.flatten()).abs().sum() / 2)


def sample_joint(n, batches, **options):
    joint = correlated_joint()
    rows = [
        generate(
            exact_denoiser(joint),
            prompt=torch.zeros(n, 0, dtype=torch.int64),
            length=3,
            mask_id=MASK,
            temperature=1.0,
            seed=batch,
            **options,
        ).tokens
        for batch in range(batches)
    ]
    return total_variation(torch.cat(rows), joint)


@pytest.mark.slow
def test_ancestral_sampling_reproduces_the_joint():
    """512 steps, and so many samples that those of the joint itself lie within a third of the bound. Drawing all places in one step
    ignores that they depend on each other."""
    assert sample_joint(10_000, 4, config="smdm-origin", steps=512) < 0.02
    assert sample_joint(5_000, 1, config="smdm-origin", steps=1) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in REMASKS if kind != "none"])
def test_remasking_keeps_the_joint(kind):
    """ReMDM gives the same joint. There are few samples: the bound is the error of 4,000 draws of the joint itself."""
    rate = {"cap": 0.05, "rescale": 0.05, "conf": 0.3, "loop": 0.05}[kind]
    found = sample_joint(2000, 2, order="ancestral", schedule="timesteps", steps=48, remask=kind, remask_rate=rate)
    assert found < 0.06


@pytest.mark.parametrize("kind", [kind for kind in REMASKS if kind != "none"])
def test_exchange_keeps_the_share_that_is_revealed(kind):
    """Iterating a plan's probabilities gives the schedule's shares, ends with everything revealed, and does remask."""
    policy = policy_of(order="ancestral", remask=kind, remask_rate=0.1)
    found = exchanges(policy, 40)
    shares = masked_shares(40, "linear")
    revealed = 0.0
    for step, (reveal, remask) in enumerate(found):
        assert 0 <= reveal <= 1
        assert 0 <= remask <= 1
        drained = 0.0 if kind == "conf" else remask
        revealed = revealed * (1 - drained) + (1 - revealed) * reveal
        if kind != "loop":
            assert revealed == pytest.approx(1 - shares[step + 1])
    assert revealed == pytest.approx(1.0)
    assert max(remask for _, remask in found) > 0
    assert found[-1] == (1.0, 0.0)


def test_remasking_edits_what_was_committed():
    """Tokens are masked again and written anew, at positions that were open at first and nowhere else."""
    options = {"order": "ancestral", "remask": "rescale", "remask_rate": 0.5, "steps": 30, "temperature": 1.0}
    states = start(requests_of(torch.zeros(4, 2, dtype=torch.int64), length=12, mask_id=MASK, **options))
    seen = [found.tokens for found in stream(lambda tokens: torch.zeros(*tokens.shape, 3), states)]
    again = sum(int(((before != MASK) & (after == MASK)).sum()) for before, after in itertools.pairwise(seen))
    assert again > 10
    assert all(bool((tokens[:, :2] == 0).all()) for tokens in seen)
    assert not bool((seen[-1] == MASK).any())
