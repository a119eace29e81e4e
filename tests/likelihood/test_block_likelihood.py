"""Likelihoods in block diffusion: against enumeration, separate forwards, and a second, plainly written model."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch

import plain_blocks
import small_models
from sinkdlm.errors import LikelihoodError
from sinkdlm.likelihood import Adaptive, document_likelihood, is_greedy, log_likelihood
from sinkdlm.likelihood.mask_draws import block_keys, draw_masks, noise_keys
from sinkdlm.likelihood.scoring import read_rows, split_targets
from sinkdlm.sampling import generate
from small_models import VARIANTS, small_tokens

small_model = functools.partial(small_models.small_model, n_layers=2)  # forwards take most of the time

# Sinks at the end and registers do not go with blocks.
BLOCKED = {name: flags for name, flags in VARIANTS.items() if "end" not in name and "register" not in name}
VOCAB, LENGTH = 3, 4


def three_words(size, **flags):
    return small_models.small_model(vocab_size=VOCAB, mask_id=VOCAB, n_sinks=1, block_size=size, **flags)


def mixed_rows(n):
    """Rows of different lengths; targets begin and end inside blocks, and some have gaps."""
    rows, scored = [], []
    for i in range(n):
        length, given = 6 + 5 * i % 11, 1 + 3 * i % 4
        rows.append(small_tokens(1, length, seed=i)[0].tolist())
        scored.append([given <= place < length - i % 3 // 2 and place % 5 != i for place in range(length)])
    return rows, scored


def plain_log_p(model, row, targets, masked, guidance=0.0):
    """log p of each masked token after the clean blocks before its own: a row at a time, dense masks, sinks among the tokens."""
    config, weights = model.config, {name: value.detach() for name, value in model.named_parameters()}
    head = weights["embed.weight"][: config.vocab_size] if config.tie_embeddings else weights["lm_head.weight"]

    def logits(clean):
        noised = torch.tensor([config.mask_id if place in masked else token for place, token in enumerate(clean)])
        return plain_blocks.hidden_states(weights, config, noised, torch.tensor(clean), config.block_size) @ head.T

    found = logits(row)
    if guidance:
        blank = logits([token if place in targets else config.mask_id for place, token in enumerate(row)])
        found = blank + (guidance + 1) * (found - blank)
    if config.mask_id < config.vocab_size:
        found[:, config.mask_id] = -math.inf
    found = found.log_softmax(-1)
    return {place: float(found[place, row[place]]) for place in masked}


def in_blocks(targets, size):
    return [list(own) for _, own in itertools.groupby(targets, key=lambda place: place // size)]


def exact_bound(model, row, targets):
    """All masks of each block, k even over 1..n, each mask of k as likely: the sum over masks weighs n / k."""
    total = 0.0
    for own in in_blocks(targets, model.config.block_size):
        for k in range(1, len(own) + 1):
            sums = [sum(plain_log_p(model, row, targets, set(masked)).values()) for masked in itertools.combinations(own, k)]
            total += len(own) / k * sum(sums) / len(sums) / len(own)
    return total


def plain_chain(model, row, targets, guidance=0.0):
    """One forward for each target."""
    blocks = in_blocks(targets, model.config.block_size)
    return sum(plain_log_p(model, row, targets, set(own[j:]), guidance)[own[j]] for own in blocks for j in range(len(own)))


def masks_of(estimator, seed, group, targets, size, draws):
    """For each block: its targets, masks (D, n) and weights (D,)."""
    for number, own in enumerate(in_blocks(targets, size)):
        key = block_keys(noise_keys(seed, [group]), torch.tensor([number]))
        masked, weight = draw_masks(estimator, key, len(own), range(8), draws // 8)
        yield np.array(own), masked[0], weight[0]


# -- enumeration -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["exact_k", "chain"])
def test_all_texts_have_probability_one_at_blocks_of_one(estimator):
    model = three_words(1)
    rows = [list(row) for row in itertools.product(range(VOCAB), repeat=LENGTH)]
    found = log_likelihood(model.denoiser(), rows, [[True] * LENGTH] * 81, mask_id=VOCAB, estimator=estimator)
    assert float(found.mean.exp().sum()) == pytest.approx(1, abs=1e-10)
    assert found.forwards.tolist() == [1] * 81
    assert not found.stderr.any()
    for row, value in zip(rows[::20], found.mean[::20], strict=True):
        assert float(value) == pytest.approx(plain_chain(model, row, range(LENGTH)), abs=1e-10)


@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_of_one_make_the_bound_the_likelihood(name):
    model = small_model(**BLOCKED[name], block_size=1)
    rows, scored = mixed_rows(7)
    bound, exact = (
        log_likelihood(model.denoiser(), rows, scored, mask_id=model.config.mask_id, draws=8, estimator=estimator)
        for estimator in ("exact_k", "chain")
    )
    assert torch.allclose(bound.mean, exact.mean, rtol=0, atol=1e-12)
    assert not bound.stderr.any()
    assert bound.forwards.tolist() == exact.forwards.tolist() == [1] * 7


@pytest.mark.parametrize("estimator", ["exact_k", "official"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_estimates_average_to_the_exact_block_bound(size, estimator):
    """400 estimates of a row, with and without a prefix; blocks of 3 leave a short last block."""
    model, n = three_words(size), 400
    for row, given in (([2, 0, 1, 2], 0), ([1, 1, 0, 2], 1)):
        scored = [place >= given for place in range(LENGTH)]
        exact = exact_bound(model, row, range(given, LENGTH))
        found = log_likelihood(
            model.denoiser(), [row] * n, [scored] * n, mask_id=VOCAB, draws=24, groups=range(n), estimator=estimator, seed=size
        )
        error = float(found.mean.std()) / math.sqrt(n)
        assert abs(float(found.mean.mean()) - exact) < max(4 * error, 1e-10)
        assert (error == 0) == (size == 1 and estimator == "exact_k")
        assert found.kind == "bound"


@pytest.mark.parametrize("size", [2, 4])
def test_all_masks_weighed_by_exact_k_are_the_exact_block_bound(size):
    """Every mask of every block is drawn; each counts as often as its chance says."""
    model, row = three_words(size), [2, 0, 1, 2]
    found = log_likelihood(model.denoiser(), [row], [[True] * LENGTH], mask_id=VOCAB, draws=512)
    assert int(found.forwards) == 2**size - 1  # one forward has a mask of each block
    means = []
    for own, masked, weight in masks_of("exact_k", 0, 0, range(LENGTH), size, 4096):
        drawn = {tuple(mask): w for mask, w in zip(masked.tolist(), weight, strict=True)}
        assert len(drawn) == 2**size - 1
        sums = {mask: sum(plain_log_p(model, row, range(LENGTH), set(own[list(mask)])).values()) for mask in drawn}
        means.append(sum(drawn[mask] * value / size / math.comb(size, sum(mask)) for mask, value in sums.items()))
    assert sum(means) == pytest.approx(exact_bound(model, row, range(LENGTH)), abs=1e-10)


# -- the plain formula, in every variant ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "guidance"), [*((name, 0.7) for name in BLOCKED), ("sink", 0.0), ("parent", 0.0)])
def test_values_are_the_plain_formula(name, guidance):
    """Guidance comes first and hides the prefix in both copies; the chain rule equals a forward for each target."""
    model = small_model(**BLOCKED[name], block_size=3)
    row, targets = small_tokens(1, 11, seed=2)[0].tolist(), [2, 3, 5, 6, 7, 10]
    scored = [place in targets for place in range(11)]
    options = {"mask_id": model.config.mask_id, "guidance": guidance}

    @functools.cache
    def plain_sum(masked):
        return sum(plain_log_p(model, row, targets, masked, guidance).values())

    found = log_likelihood(model.denoiser(), [row], [scored], estimator="chain", **options)
    assert float(found.mean) == pytest.approx(plain_chain(model, row, targets, guidance), abs=1e-10)
    assert found.kind == ("score" if guidance else "likelihood")
    assert int(found.forwards) == 2
    for estimator in ("exact_k", "official"):
        found = log_likelihood(model.denoiser(), [row], [scored], estimator=estimator, draws=8, groups=[7], seed=2, **options)
        expected = 0.0
        for own, masked, weight in masks_of(estimator, 2, 7, targets, 3, 8):
            sums = [plain_sum(frozenset(own[mask].tolist())) for mask in masked]
            expected += float((weight * sums).mean())
        assert float(found.mean) == pytest.approx(expected, abs=1e-10)
        assert found.kind == ("score" if guidance else "bound")


@pytest.mark.parametrize("name", ["vanilla", "sink-zero", "logit-gate", "parent"])
def test_one_block_is_full_attention(name):
    """Bit for bit: estimates, forwards, and what is greedy."""
    full, blocked = small_model(**BLOCKED[name]), small_model(**BLOCKED[name], block_size=16)
    rows, scored = mixed_rows(9)
    assert max(map(len, rows)) == 16
    for estimator, guidance in itertools.product(("exact_k", "official", "chain"), (0.0, 0.6)):
        options = {"mask_id": full.config.mask_id, "estimator": estimator, "guidance": guidance, "draws": 16, "budget": 200}
        ours, theirs = (log_likelihood(model.denoiser(), rows, scored, **options) for model in (blocked, full))
        assert torch.equal(ours.set_means, theirs.set_means)
        assert torch.equal(ours.forwards, theirs.forwards)
    greedy = [is_greedy(model.denoiser(), rows, scored, mask_id=full.config.mask_id) for model in (blocked, full)]
    assert greedy[0] == greedy[1]


# -- batches ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "guidance"), [("sink", 0.0), ("parent", 0.6)])
def test_same_estimate_alone_and_in_a_batch(name, guidance):
    model = small_model(**BLOCKED[name], block_size=4)
    rows, scored = mixed_rows(9)
    for estimator in ("exact_k", "official", "chain"):
        options = {"mask_id": model.config.mask_id, "estimator": estimator, "guidance": guidance, "draws": 16, "seed": 3}
        together = log_likelihood(model.denoiser(), rows, scored, **options)
        turned = log_likelihood(model.denoiser(), rows[::-1], scored[::-1], budget=60, **options)
        pairs = zip(rows, scored, strict=True)
        alone = [log_likelihood(model.denoiser(), [row], [flags], **options) for row, flags in pairs]
        for other in (turned.set_means.flip(0), torch.cat([one.set_means for one in alone])):
            assert torch.allclose(other, together.set_means, rtol=1e-12, atol=1e-12)
        assert torch.equal(turned.forwards.flip(0), together.forwards)


class Spy(type(small_model().denoiser())):
    """Records its queries."""

    def __call__(self, tokens, *, lengths=None, where=None, clean=None):
        self.__dict__.setdefault("calls", []).append((tokens.clone(), where, clean))
        return super().__call__(tokens, lengths=lengths, where=where, clean=clean)


def test_the_clean_copy_goes_along_only_where_several_blocks_are_masked():
    model = small_model(n_sinks=1, block_size=4)
    row = small_tokens(1, 16)[0].tolist()
    for first, estimator, copies in ((12, "exact_k", {1}), (12, "chain", {1}), (11, "exact_k", {1, 2}), (3, "chain", {2})):
        spy = Spy(model)
        log_likelihood(spy, [row], [[place >= first for place in range(16)]], mask_id=11, estimator=estimator, budget=64)
        assert {1 if clean is None else 2 for _, _, clean in spy.calls} == copies
        for tokens, where, clean in spy.calls:
            assert tokens.numel() * (1 if clean is None else 2) <= 64
            assert clean is None or torch.equal(clean, torch.tensor(row).expand(clean.shape))
            assert tokens.gather(1, where).eq(11).all()


def test_targets_are_split_where_the_rows_blocks_end():
    (row,) = read_rows([[0] * 10], [[0, 1, 1, 1, 0, 1, 0, 0, 0, 1]], 11)
    assert [own.tolist() for own in split_targets(row, 3)] == [[1, 2], [3, 5], [9]]
    assert [own.tolist() for own in split_targets(row, None)] == [[1, 2, 3, 5, 9]]


def test_blocks_draw_noise_of_their_own():
    drawn = list(masks_of("exact_k", 0, 5, range(24), 8, 64))
    assert len(drawn) == 3
    for (_, one, _), (_, other, _) in itertools.combinations(drawn, 2):
        assert (one == other).all(1).mean() < 0.2
    alone = draw_masks("exact_k", noise_keys(0, [5]), 8, range(8), 8)
    assert np.array_equal(drawn[0][1], alone[0][0])  # a row's first block draws what a row of one block draws


# -- greedy prediction, adaptive draws, documents ------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [0.0, 0.8])
@pytest.mark.parametrize("name", ["sink", "parent"])
def test_greedy_is_what_the_sampler_writes(name, guidance):
    model = small_model(**BLOCKED[name], block_size=4)
    mask_id, rows, scored, expected = model.config.mask_id, [], [], []
    for i in range(5):
        given, length = 1 + i, 7 + 2 * i
        prompt = small_tokens(1, given, seed=i)
        written = (
            generate(
                model.denoiser(), prompt=prompt, mask_id=mask_id, length=length, config="llada", guidance=guidance, cache="none"
            )
            .tokens[0]
            .tolist()
        )
        assert len(written) == length
        place = given + 3 * i % (length - given)
        wrong = [*written[:place], (written[place] + 1) % 10, *written[place + 1 :]]
        rows += [written, wrong]
        scored += [[at >= given for at in range(length)]] * 2
        expected += [True, False]
    for budget in (1, 40, 10_000):
        assert is_greedy(model.denoiser(), rows, scored, mask_id=mask_id, guidance=guidance, budget=budget) == expected


def test_adaptive_draws_end_at_once_where_nothing_varies():
    rows, groups = [small_tokens(1, 9, seed=i)[0].tolist() for i in range(6)], [0, 0, 0, 1, 1, 1]
    scored, adaptive = [[place >= 3 for place in range(9)]] * 6, Adaptive({"acc": [1.0] * 6})
    for size, draws in ((1, {32}), (3, {32, 48, 68, 100, 128})):
        denoiser = small_model(n_sinks=1, block_size=size).denoiser()
        found = log_likelihood(denoiser, rows, scored, mask_id=11, groups=groups, adaptive=adaptive)
        full = log_likelihood(denoiser, rows, scored, mask_id=11, groups=groups, sets=32)
        means = found.set_means
        kept = ~means.isnan()
        assert set(found.draws.tolist()) <= draws
        first = full.set_means[:, : means.shape[1]]
        assert torch.allclose(means[kept], first[kept], rtol=1e-12)


def test_documents_are_scored_in_windows():
    """Blocks count from a window's first token."""
    model, text = small_model(n_sinks=1, block_size=4), small_tokens(1, 23)[0].tolist()
    found = document_likelihood(model.denoiser(), [text], mask_id=11, window=10, prefix=[5], estimator="chain")
    expected = 0.0
    for row, n_given in (([5, *text[:9]], 1), (text[8:18], 1), (text[13:], 5)):
        expected += plain_chain(model, row, range(n_given, len(row)))
    assert float(found.nats) == pytest.approx(-expected, abs=1e-10)


def test_a_foreign_shift_is_refused():
    with pytest.raises(LikelihoodError, match="aligns its own rows; leave it out"):
        log_likelihood(small_model(block_size=2).denoiser(), [[1, 2, 3]], [[0, 1, 1]], mask_id=11, shift=True)
