"""Estimates against enumeration, against known joints, and against themselves in other batches."""

import functools
import itertools
import math
from collections import namedtuple

import numpy as np
import pytest
import torch

import small_models
from plain_likelihood import MarkovDenoiser, TableDenoiser, any_order, chain, masked_log_probs, random_joint
from plain_samplers import llada
from sinkdlm.errors import LikelihoodError, ModelError, UserError
from sinkdlm.likelihood import Adaptive, document_likelihood, is_greedy, log_likelihood
from sinkdlm.likelihood.estimates import student_cdf, student_quantile
from sinkdlm.likelihood.estimators import roll
from sinkdlm.likelihood.mask_draws import draw_masks, noise_keys
from sinkdlm.likelihood.ranking import expected_loss, is_settled, plan_looks
from sinkdlm.likelihood.scoring import Query, Scorer, plan_batches, read_rows
from small_models import VARIANTS, small_tokens

small_model = functools.partial(small_models.small_model, n_layers=2)  # forwards take most of the time
MASK = 3
LENGTH = 4


def after(given, length):
    return [place >= given for place in range(length)]


Draws = namedtuple("Draws", ["masked", "weight"])


def masks_of(estimator, seed, group, n_targets, sets, size):
    """The draws of one row."""
    return Draws(*(part[0] for part in draw_masks(estimator, noise_keys(seed, [group]), n_targets, range(sets), size)))


def repeat(denoiser, row, given, n, **options):
    """n independent estimates of one row."""
    mask_id = options.pop("mask_id", MASK)
    return log_likelihood(denoiser, [row] * n, [after(given, len(row))] * n, mask_id=mask_id, groups=range(n), **options)


# -- against enumeration ---------------------------------------------------------------------------------------------------------


def test_chain_rule_is_the_joint():
    """Vocabulary 3, length 4: all 81 targets, and every conditional of a prefix."""
    joint = random_joint(LENGTH)
    rows = [list(row) for row in itertools.product(range(3), repeat=LENGTH)]
    for given in range(LENGTH):
        found = log_likelihood(
            TableDenoiser.of_joint(joint), rows, [after(given, LENGTH)] * 81, mask_id=MASK, estimator="chain", seed=given
        )
        prefix = joint.sum(list(range(given, LENGTH)), keepdim=True)
        assert torch.allclose(found.mean.exp(), (joint / prefix).flatten(), rtol=1e-12)
        assert float(found.mean.exp().sum()) == pytest.approx(3**given, abs=1e-9)
        assert found.draws.tolist() == [LENGTH - given] * 81
        assert not found.stderr.any()
        assert found.kind == "likelihood"


def test_chain_rule_goes_from_left_to_right():
    denoiser = TableDenoiser.at_random(LENGTH)
    for row in ([0, 1, 2, 0], [2, 2, 1, 0]):
        found = log_likelihood(denoiser, [row], [after(1, LENGTH)], mask_id=MASK, estimator="chain")
        assert float(found.mean) == pytest.approx(chain(denoiser, row, [1, 2, 3], [1, 2, 3], MASK), abs=1e-12)


def test_all_masks_weighed_by_exact_k_are_all_orders():
    """The mean over k, and over masks of k tokens, of L/k times their sum is the mean over orders of the chain rule."""
    denoiser = TableDenoiser.at_random(LENGTH, seed=1)
    for tokens, scored in (([0, 1, 2, 0], [1, 1, 1, 1]), ([1, 1, 0, 2], [1, 0, 1, 1]), ([2, 0, 0, 1], [0, 0, 0, 1])):
        (row,) = read_rows([tokens], [scored], MASK)
        n = len(row.targets)
        masks = [np.array(mask, dtype=bool) for mask in itertools.product([0, 1], repeat=n) if any(mask)]
        scorer = Scorer(denoiser, MASK, guidance=0.0, budget=64, shift=False, device=None)
        sums = scorer.sums([Query(row, row.targets[mask], row.targets[mask]) for mask in masks])
        parts = [value * n / mask.sum() / n / math.comb(n, int(mask.sum())) for mask, value in zip(masks, sums, strict=True)]
        assert sum(parts) == pytest.approx(any_order(denoiser, tokens, row.targets.tolist(), MASK), abs=1e-12)


def test_exact_k_draws_are_even():
    """Within a set, k covers 1..L as evenly as b draws can; given k, every mask is as likely as another."""
    for n, size in ((4, 16), (5, 7), (64, 16), (1, 3)):
        found = masks_of("exact_k", 0, 5, n, 50, size)
        counts = found.masked.sum(1).reshape(50, size)
        assert np.array_equal(found.weight, n / counts.flatten())
        for k in range(1, n + 1):
            times = (counts == k).sum(1)
            assert times.min() >= math.floor(size / n)
            assert times.max() <= math.ceil(size / n)
    masked = masks_of("exact_k", 3, 0, LENGTH, 1000, 16).masked
    pairs = masked[masked.sum(1) == 2] @ [1, 2, 4, 8]
    counts = np.unique(pairs, return_counts=True)[1]
    assert len(counts) == 6
    assert ((counts - len(pairs) / 6) ** 2).sum() / (len(pairs) / 6) < 20.5  # 0.999 quantile at 5 degrees of freedom


def test_official_draws_are_bernoulli():
    found = masks_of("official", 0, 1, 6, 500, 16)
    times = 1 / found.weight.reshape(500, 16)
    assert np.allclose(np.sort(times, axis=1)[:, 1:] - np.sort(times, axis=1)[:, :-1], 1 / 16)  # stratified within a set
    share = found.masked.mean(1).reshape(500, 16)
    assert abs(float((share - times).mean())) < 4 * 0.5 / math.sqrt(500 * 16 * 6)


@pytest.mark.parametrize("estimator", ["exact_k", "official"])
@pytest.mark.parametrize("seed", range(3))
def test_estimates_are_unbiased(estimator, seed):
    """400 estimates: their mean is the bound within its own uncertainty; also for draws that do not fill sets evenly."""
    for denoiser, row, given, draws in (
        (TableDenoiser.at_random(LENGTH), [0, 1, 2, 0], 0, 24),
        (TableDenoiser.at_random(LENGTH), [2, 1, 1, 0], 1, 40),
        (TableDenoiser.of_joint(random_joint(LENGTH)), [1, 1, 2, 0], 2, 50),
    ):
        truth = any_order(denoiser, row, list(range(given, LENGTH)), MASK)
        found = repeat(denoiser, row, given, 400, draws=draws, estimator=estimator, seed=seed)
        z = float((found.mean.mean() - truth) / (found.mean.std() / 20))
        assert abs(z) < 4
        assert found.draws.unique().tolist() == [8 * -(-draws // 8)]
        assert found.kind == "bound"


def test_long_targets_are_unbiased():
    """64 tokens of a Markov chain after prefixes of other lengths, whose log p is known."""
    chain_, rows, given = MarkovDenoiser(), [], [0, 3, 17, 30]
    for i in range(40):
        rows.append(chain_.sample(64 + given[i % 4], seed=i))
    scored = [after(given[i % 4], len(row)) for i, row in enumerate(rows)]
    truth = torch.tensor([chain_.log_joint(row, given[i % 4]) for i, row in enumerate(rows)], dtype=torch.float64)
    found = log_likelihood(chain_, rows, scored, mask_id=chain_.mask_id, draws=32)
    z = (found.mean - truth) / found.stderr
    assert abs(float(z.mean())) < 4 * math.sqrt(7 / 5 / 40)  # the variance of Student's t with 7 degrees is 7/5
    exact = log_likelihood(chain_, rows, scored, mask_id=chain_.mask_id, estimator="chain")
    assert torch.allclose(exact.mean, truth, atol=1e-9)


# -- variance --------------------------------------------------------------------------------------------------------------------


@functools.cache
def coverage(estimator):
    denoiser, row = TableDenoiser.at_random(LENGTH), [0, 1, 2, 0]
    truth = any_order(denoiser, row, [0, 1, 2, 3], MASK)
    low, high = repeat(denoiser, row, 0, 2000, draws=128, estimator=estimator).interval(0.95)
    return float(((low <= truth) & (truth <= high)).double().mean())


def test_intervals_of_exact_k_cover_the_truth():
    assert 0.93 <= coverage("exact_k") <= 0.97


def test_intervals_of_the_official_estimator_fall_short():
    """Rare draws near t = 0 carry much of the mean: a run without one is too low, and its standard error too small."""
    assert 0.5 < coverage("official") < coverage("exact_k")


def test_exact_k_varies_less_than_official():
    chain_ = MarkovDenoiser()
    for row in (chain_.sample(64, seed=0), chain_.sample(7, seed=1)):
        ours, theirs = (
            repeat(chain_, row, 0, 60, draws=32, estimator=name, mask_id=chain_.mask_id).mean.var()
            for name in ("exact_k", "official")
        )
        assert ours < theirs


def test_strata_halve_the_variance():
    """Targets of 64 tokens, 128 draws: 8 sets of 16 against 128 sets of one."""
    chain_ = MarkovDenoiser()
    strata, independent = (
        sum(
            float(repeat(chain_, chain_.sample(64, seed), 0, 40, draws=128, sets=sets, mask_id=5).mean.var())
            for seed in range(3, 7)
        )
        for sets in (8, 128)
    )
    assert strata <= independent / 2


def test_shared_noise_lowers_the_variance_of_differences():
    """Options that differ in one word: with one key for both, much of the noise cancels. How much depends on the row."""
    chain_, n = MarkovDenoiser(), 100
    shared, apart = [], []
    for seed in range(5, 9):
        one = chain_.sample(24, seed)
        rows, scored = [one, [*one[:15], (one[15] + 1) % 5, *one[16:]]] * n, [after(8, 24)] * (2 * n)
        for variances, groups in ((shared, np.repeat(np.arange(n), 2)), (apart, np.arange(2 * n))):
            found = log_likelihood(chain_, rows, scored, mask_id=5, draws=32, groups=groups)
            variances.append(float(found.mean.view(n, 2).diff(dim=1).var()))
    assert sum(shared) < 0.8 * sum(apart)


def test_equal_prefixes_share_noise_unless_told_otherwise():
    chain_ = MarkovDenoiser()
    row = chain_.sample(20, seed=5)
    found = log_likelihood(chain_, [row, row, row[1:]], [after(8, 20), after(8, 20), after(8, 19)], mask_id=5, draws=16)
    assert found.mean[0] == found.mean[1]
    key = masks_of("exact_k", 0, 1, 12, 8, 2)
    assert not np.array_equal(key.masked, masks_of("exact_k", 0, 2, 12, 8, 2).masked)
    assert not np.array_equal(key.masked, masks_of("exact_k", 1, 1, 12, 8, 2).masked)


def test_student_is_students():
    for p, dof, t in (
        (0.975, 7, 2.364624),
        (0.975, 1, 12.706205),
        (0.95, 2, 2.919986),
        (0.995, 30, 2.749996),
        (0.9995, 8, 5.041305),
    ):
        assert student_quantile(p, dof) == pytest.approx(t, abs=2e-6)
        assert student_cdf(-t, dof) == pytest.approx(1 - p, abs=1e-7)


# -- batches ---------------------------------------------------------------------------------------------------------------------


def mixed_rows(n, words=10):
    """Rows whose prefixes and targets have different lengths, some of them scored in the middle."""
    rows, scored = [], []
    for i in range(n):
        length, given = 6 + 5 * i % 11, 1 + 3 * i % 4
        rows.append([token % words for token in small_tokens(1, length, seed=i)[0].tolist()])
        scored.append([given <= place < length - i % 3 // 2 for place in range(length)])
    return rows, scored


@pytest.mark.parametrize("estimator", ["exact_k", "official", "chain"])
@pytest.mark.parametrize("guidance", [0.0, 0.6])
def test_same_estimate_alone_and_in_a_batch(estimator, guidance):
    """Bit for bit, in float64, for a denoiser that treats rows alike: with other rows, orders or budgets, and half the rows."""
    denoiser = MarkovDenoiser()
    rows, scored = mixed_rows(14, words=5)
    options = {"mask_id": 5, "estimator": estimator, "guidance": guidance, "draws": 24, "seed": 3}
    together = log_likelihood(denoiser, rows, scored, **options).set_means
    for i, (row, flags) in enumerate(zip(rows, scored, strict=True)):
        assert torch.equal(log_likelihood(denoiser, [row], [flags], **options).set_means[0], together[i])
    assert torch.equal(log_likelihood(denoiser, rows[::-1], scored[::-1], budget=40, **options).set_means.flip(0), together)
    ranks = [log_likelihood(denoiser, rows[rank::3], scored[rank::3], **options).set_means for rank in range(3)]
    assert all(torch.equal(part, together[rank::3]) for rank, part in enumerate(ranks))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", ["sink", "sinks-2-end-zero-gate", "register-2-end-zero", "parent"])
def test_a_model_gives_a_row_the_same_in_any_batch(name, dtype, close):
    """The model's denoiser with lengths= and where= in mixed batches, a plain callable, a row alone, and any budget agree."""
    model = small_model(dtype=dtype, **VARIANTS[name])
    rows, scored = mixed_rows(7)
    options = {"mask_id": model.config.mask_id, "draws": 16, "guidance": 0.5}
    with model.inference():
        together = log_likelihood(model.denoiser(), rows, scored, **options)
        plain = log_likelihood(lambda tokens: model.head(model(tokens)), rows, scored, **options)
        tight = log_likelihood(model.denoiser(), rows, scored, budget=1, **options)
        alone = [log_likelihood(model.denoiser(), [row], [flags], **options).mean for row, flags in zip(rows, scored, strict=True)]
    for other in (plain.mean, tight.mean, torch.cat(alone)):
        assert torch.allclose(other, together.mean, rtol=close, atol=close)
    assert torch.equal(plain.forwards, together.forwards)


class Spy:
    """A denoiser that records its queries."""

    def __init__(self, denoiser):
        self.denoiser, self.calls = denoiser, []

    def __call__(self, tokens, *, lengths=None, where=None):
        self.calls.append((tokens.clone(), lengths, where))
        return self.denoiser(tokens, lengths=lengths, where=where)


def test_only_masked_targets_reach_the_head_and_batches_are_full():
    model = small_model(n_sinks=1)
    rows, scored = mixed_rows(12)
    spy = Spy(model.denoiser())
    found = log_likelihood(spy, rows, scored, mask_id=11, draws=32, guidance=0.5, budget=256)
    looks = int(found.forwards.sum())
    assert sum(len(tokens) for tokens, _, _ in spy.calls) == 2 * looks  # both branches, in one batch
    assert len(spy.calls) < looks / 4
    sizes = []
    for tokens, lengths, where in spy.calls:
        n = len(tokens) // 2
        sizes.append(tokens.numel())
        assert tokens.gather(1, where).eq(11).all()
        assert torch.equal(where[:n], where[n:])
        if lengths is not None:
            assert (where < lengths[:, None]).all()
            assert (lengths * 8 >= tokens.shape[1] * 7).all()
    assert max(sizes) <= 256
    assert any(lengths is not None for _, lengths, _ in spy.calls)


def test_forwards_are_made_without_attention_that_plans_each_shape():
    """Rows have many lengths, and cuDNN's plan for a new shape takes longer than a forward. Settings are restored afterwards."""
    allowed = []

    class Spying(Spy):
        def __call__(self, *given, **named):
            allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
            return super().__call__(*given, **named)

    spy = Spying(small_model(n_sinks=1).denoiser())
    rows, scored = mixed_rows(4)
    for before in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(before)
        try:
            log_likelihood(spy, rows, scored, mask_id=11, draws=8)
            assert torch.backends.cuda.cudnn_sdp_enabled() is before
            is_greedy(spy, rows, scored, mask_id=11)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
    assert allowed
    assert not any(allowed)


def test_batches_hold_every_look_once():
    rows = read_rows(*mixed_rows(40), 11)
    masks = [(row, row.targets[masked]) for row in rows for masked in masks_of("exact_k", 0, 1, len(row.targets), 2, 2).masked]
    looks = [Query(row, places, places) for row, places in masks]
    for room, mix in itertools.product((1, 30, 100, 10_000), (True, False)):
        batches = plan_batches(looks, room, mix)
        assert sorted(itertools.chain(*batches)) == list(range(len(looks)))
        for batch in batches:
            lengths = [looks[i].length for i in batch]
            assert len(batch) == 1 or max(lengths) * len(batch) <= room
            assert mix or len(set(lengths)) == 1


def test_few_positions_reach_the_head_in_vain():
    """Queries that read few and many positions are split into batches: padding is at most a quarter, or 256 positions."""
    (row,) = read_rows([[1] * 64], [after(4, 64)], 11)
    masks = masks_of("exact_k", 0, 0, 60, 8, 32).masked
    looks = [Query(row, row.targets[masked], row.targets[masked]) for masked in masks]
    batches = plan_batches(looks, 1 << 14, mix=True)
    assert 1 < len(batches) < 12
    for batch in batches:
        reads = [looks[i].n_read for i in batch]
        assert len(batch) * max(reads) - sum(reads) <= max(256, len(batch) * max(reads) / 4)


def test_equal_masks_are_computed_once():
    denoiser = TableDenoiser.at_random(LENGTH)
    found = repeat(denoiser, [0, 1, 2, 0], 1, 3, draws=128)
    assert found.forwards.max() <= 7
    assert found.draws.tolist() == [128] * 3


# -- guidance and models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sink", "sink-end", "parent", "register"])
@pytest.mark.parametrize("guidance", [0.0, 0.7])
def test_values_are_the_plain_formula(name, guidance):
    """Guidance comes first, then [MASK] is excluded if it has a logit, then the softmax; for shifted models and every sink."""
    model = small_model(**VARIANTS[name])
    mask_id = model.config.mask_id

    def denoise(tokens):
        return model.head(model(tokens)).detach()

    row, flags = small_tokens(1, 9, seed=2)[0].tolist(), [0, 0, 1, 1, 0, 1, 1, 1, 0]
    targets = [place for place, flag in enumerate(flags) if flag]
    options = {"mask_id": mask_id, "guidance": guidance}
    found = log_likelihood(model.denoiser(), [row], [flags], estimator="chain", **options)
    assert float(found.mean) == pytest.approx(chain(denoise, row, targets, targets, mask_id, guidance), abs=1e-10)
    assert found.kind == ("score" if guidance else "likelihood")
    for estimator in ("exact_k", "official"):
        found = log_likelihood(model.denoiser(), [row], [flags], estimator=estimator, draws=16, groups=[7], seed=2, **options)
        draws = masks_of(estimator, 2, 7, len(targets), 8, 2)
        values = [
            weight
            * sum(masked_log_probs(denoise, row, targets, [targets[i] for i in np.flatnonzero(masked)], mask_id, guidance).values())
            for masked, weight in zip(*draws, strict=True)
        ]
        assert float(found.mean) == pytest.approx(sum(values) / len(values), abs=1e-10)
        assert found.kind == ("score" if guidance else "bound")


def test_mask_is_no_outcome_even_where_it_is_likeliest():
    def denoiser(tokens):
        return torch.tensor([0.0, 0.0, 50.0, 0.0]).expand(*tokens.shape, 4).clone()

    for guidance in (0.0, 2.0):
        found = log_likelihood(denoiser, [[0, 1, 3]], [[0, 1, 1]], mask_id=2, estimator="chain", guidance=guidance)
        assert float(found.mean) == pytest.approx(-2 * math.log(3), abs=1e-6)


def test_a_shift_of_foreign_logits_is_undone():
    aligned, raw = small_model(n_sinks=1, shift_logits=True), small_model(n_sinks=1)
    raw.load_state_dict(aligned.state_dict())
    rows, scored = mixed_rows(5)
    ours, theirs = (
        log_likelihood(model.denoiser(), rows, scored, mask_id=11, draws=16, guidance=0.3, shift=shift).mean
        for model, shift in ((aligned, False), (raw, True))
    )
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_a_causal_parent_takes_one_forward():
    model = small_model(n_sinks=1, shift_logits=True)
    rows, scored = mixed_rows(6)

    def parent(tokens):
        return model.head(model(tokens, causal=True)).detach()

    found = log_likelihood(parent, rows, scored, mask_id=11, estimator="causal")
    for row, flags, value in zip(rows, scored, found.mean, strict=True):
        log_p = parent(torch.tensor([row]))[0].log_softmax(-1)
        assert float(value) == pytest.approx(sum(float(log_p[i - 1, row[i]]) for i, flag in enumerate(flags) if flag), abs=1e-10)
    assert found.draws.tolist() == [1] * 6


def test_sums_are_wider_than_half_precision():
    """A bf16 denoiser: 300 tokens of equal log p add up to what float32 gives, where bf16 would stop counting."""

    def denoiser(tokens):
        return torch.zeros(*tokens.shape, 10, dtype=torch.bfloat16)

    found = log_likelihood(denoiser, [[1] * 301], [after(1, 301)], mask_id=10, draws=8)
    assert float(found.mean) == pytest.approx(-300 * math.log(10), rel=1e-6)


def test_what_cannot_be_has_no_likelihood():
    def denoiser(tokens):
        return torch.tensor([0.0, 0.0, -math.inf]).expand(*tokens.shape, 3).clone()

    for estimator, guidance in itertools.product(("exact_k", "official", "chain"), (0.0, 0.5)):
        found = log_likelihood(denoiser, [[0, 1, 2]], [[0, 1, 1]], mask_id=3, estimator=estimator, guidance=guidance)
        assert float(found.mean) == -math.inf


# -- whole documents -------------------------------------------------------------------------------------------------------------


def test_windows_score_every_token_once():
    for length, given, window, context in itertools.product(range(1, 24), (0, 1, 2), (3, 5, 8), (0, 1, 2)):
        if length <= given or given >= window:
            continue
        spans = roll(length, given, window, context)
        assert [place for _, first, stop in spans for place in range(first, stop)] == list(range(given, length))
        assert all(stop - start <= window and start >= 0 for start, _, stop in spans)
        assert all(first - start >= context for start, first, _ in spans[1:])


def test_documents_of_a_chain_have_its_likelihood():
    """A Markov chain needs one token of context, so rolling windows lose nothing; bits, bytes and perplexity follow."""
    chain_ = MarkovDenoiser()
    texts = [chain_.sample(length, seed=length) for length in (1, 7, 50, 33)]
    truth = torch.tensor([chain_.log_joint(text) for text in texts], dtype=torch.float64)
    options = {"mask_id": 5, "window": 12, "n_bytes": [3, 20, 140, 99]}
    exact = document_likelihood(chain_, texts, estimator="chain", **options)
    assert torch.allclose(exact.nats, -truth, atol=1e-9)
    assert torch.allclose(exact.bits_per_byte, -truth / math.log(2) / torch.tensor([3, 20, 140, 99]), atol=1e-9)
    assert torch.allclose(exact.perplexity, (-truth / torch.tensor([1, 7, 50, 33])).exp(), atol=1e-9)
    drawn = document_likelihood(chain_, texts, draws=256, context=4, **options)
    assert (drawn.nats + truth).abs().le(5 * drawn.stderr + 1e-9).all()
    assert torch.allclose(drawn.bits_per_byte_stderr, drawn.stderr / torch.tensor([3, 20, 140, 99]) / math.log(2), rtol=1e-12)
    alone = document_likelihood(chain_, texts[2:3], draws=256, context=4, mask_id=5, window=12)
    assert torch.equal(alone.nats, drawn.nats[2:3])


# -- greedy prediction -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [0.0, 0.8])
@pytest.mark.parametrize("name", ["sink", "parent"])
def test_greedy_is_what_a_plain_sampler_writes(name, guidance):
    """What the model writes is greedy; with any one token changed it is not. Rows have different lengths."""
    model = small_model(**VARIANTS[name])
    mask_id, rows, scored, expected = model.config.mask_id, [], [], []

    def predict(row):
        return model.head(model(row[None]))[0].detach()

    for i in range(6):
        given, length = 1 + i % 3, 5 + i
        start = torch.full((length,), mask_id)
        start[:given] = small_tokens(1, length, seed=i)[0, :given]
        written = llada(predict, start, given, length - given, length - given, mask_id, guidance).tolist()
        wrong = list(written)
        wrong[given + i % (length - given)] = (wrong[given + i % (length - given)] + 1) % 10
        rows += [written, wrong]
        scored += [after(given, length)] * 2
        expected += [True, False]
    for budget in (1, 30, 10_000):
        assert is_greedy(model.denoiser(), rows, scored, mask_id=mask_id, guidance=guidance, budget=budget) == expected


# -- adaptive draws --------------------------------------------------------------------------------------------------------------


def questions(n, gap):
    """Four options each: a target, and others with changed words; more changes make a clearer question."""
    chain_, rows, scored, groups = MarkovDenoiser(), [], [], []
    for i in range(n):
        truth = chain_.sample(24, seed=i)
        for option in range(4):
            row = list(truth)
            for change in range(gap if option else 0):
                row[9 + (5 * option + 3 * change + i) % 14] = (option + i + change) % 5
            rows.append(row)
            scored.append(after(8, 24))
            groups.append(i)
    return chain_, rows, scored, groups


def winners(found, divisors):
    return (found.mean / torch.tensor(divisors)).view(-1, 4).argmax(1)


def test_adaptive_draws_find_the_same_winners_for_less():
    chain_, rows, scored, groups = questions(40, gap=2)
    metrics = {"acc": [1.0] * len(rows), "acc_norm": [20.0 + i % 4 for i in range(len(rows))]}
    options = {"mask_id": 5, "draws": 128, "groups": groups, "sets": 32}
    full = log_likelihood(chain_, rows, scored, **options)
    found = log_likelihood(chain_, rows, scored, adaptive=Adaptive(metrics), **options)
    for divisors in metrics.values():
        assert torch.equal(winners(found, divisors), winners(full, divisors))
    assert found.saved > 0.4
    assert found.saved == 1 - int(found.draws.sum()) / (128 * len(rows))
    assert full.saved == 0.0
    drawn = ~found.set_means.isnan()
    assert torch.equal(found.set_means[drawn], full.set_means[drawn])  # the first draws of the full run
    assert (drawn.sum(1) >= 8).all()
    assert torch.equal(found.draws, drawn.sum(1) * 4)
    assert found.draws.view(-1, 4).unique(dim=1).shape[1] == 1  # options of a question stay together


def test_adaptive_looks_at_every_metric():
    """A question is settled only by an option that leads under every metric: a tie under one keeps it open."""
    noise = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.tensor([[-8.0], [-10.0]]) + 0.01 * (noise - noise.mean(1, keepdim=True))
    ones, tied = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 1.0], [0.8, 1.0]])
    varying = torch.tensor([False, False])
    assert is_settled(values, ones, 0.05, 4, varying)
    assert not is_settled(values, tied, 0.05, 4, varying)
    still = torch.tensor([[-8.0], [-10.0]], dtype=torch.float64).expand(2, 8)
    assert not is_settled(still, ones, 0.05, 4, varying)
    assert is_settled(still, ones, 0.05, 4, ~varying)
    impossible = torch.cat([values, torch.full((1, 8), -math.inf)])
    assert is_settled(impossible, torch.ones(1, 3), 0.05, 4, torch.zeros(3, dtype=torch.bool))


@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 2, 3)])
def test_adaptive_draws_of_short_targets(lengths):
    """Single tokens cannot vary and are settled at the first look; with three tokens, later looks may compute nothing new."""
    model = small_model(n_sinks=1)
    rows = [[1, 2, 3, *small_tokens(1, length, seed=length)[0].tolist()] for length in lengths]
    adaptive = Adaptive({"acc": [1.0] * 3, "acc_norm": list(map(float, lengths))}, error=1e-12)
    found = log_likelihood(
        model.denoiser(), rows, [after(3, len(row)) for row in rows], mask_id=11, groups=[0] * 3, adaptive=adaptive
    )
    assert (found.draws == 32).all() == (lengths == (1, 1, 1))
    assert all(forwards <= 2**length - 1 for forwards, length in zip(found.forwards.tolist(), lengths, strict=True))


def settled_wrongly(n_options, n_metrics, gap, error, n_looks=None, n=1000):
    """The share of simulated questions, whose first option is best by a hair, that are settled for another, over all looks."""
    looks, wrong = plan_looks(32), 0
    values = torch.randn(n, n_options, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    values[:, 0] += gap
    divisors, varying = torch.ones(n_metrics, n_options), torch.zeros(n_options, dtype=torch.bool)
    for question in values:
        for look in looks[:-1]:
            if is_settled(question[:, :look], divisors, error, n_looks or len(looks) - 1, varying):
                wrong += int(question[:, :look].mean(1).argmax()) != 0
                break
    return wrong / n


@pytest.mark.parametrize(("n_options", "n_metrics", "gap"), [(2, 1, 0.001), (2, 2, 0.05), (4, 2, 0.02)])
def test_adaptive_errs_no_more_often_than_it_says(n_options, n_metrics, gap):
    assert settled_wrongly(n_options, n_metrics, gap, error=0.2) <= 0.2


def test_repeated_looks_are_paid_for():
    """Two nearly equal options: a test that ignores its earlier looks errs more often than its level."""
    assert settled_wrongly(2, 1, 0.001, error=0.1, n_looks=1) > 0.12
    assert 0.01 < settled_wrongly(2, 1, 0.001, error=0.1) <= 0.1
    assert plan_looks(32) == [8, 12, 17, 25, 32]
    assert plan_looks(8) == [8]


def test_every_rival_and_metric_is_paid_for():
    """A lead just beyond the bar of two options and one metric is not enough with a third option far behind, or a second metric."""
    noise = torch.tensor([-1.0, 1.0] * 4, dtype=torch.float64)
    lead = 1.02 * student_quantile(1 - 0.05 / 4, 7) * float(noise.std()) / math.sqrt(8)
    values = torch.stack([noise + lead, torch.zeros(8), torch.full((8,), -50.0)]).double()
    varying = torch.zeros(3, dtype=torch.bool)
    assert is_settled(values[:2], torch.ones(1, 2), 0.05, 4, varying[:2])
    assert not is_settled(values[:2], torch.ones(2, 2), 0.05, 4, varying[:2])
    assert not is_settled(values, torch.ones(1, 3), 0.05, 4, varying)


def simulated_run(true, seed):
    """(questions, options, 32): two sets of noise, one that options share."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(len(true), 1, 32, generator=generator, dtype=torch.float64)
    return true[..., None] + 2 * torch.randn(*true.shape, 32, generator=generator, dtype=torch.float64) + 3 * shared


def test_a_tolerance_gives_up_no_more_agreement_than_it_says():
    """Agreement with another full run over 500 questions: what early ends cost and save."""
    true = 2 * torch.randn(500, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first, others = simulated_run(true, 2), [simulated_run(true, seed).mean(2).argmax(1) for seed in range(3, 23)]
    divisors, drawn, winners_ = torch.ones(1, 3), 0, []
    for question in first:
        n = next(look for look in plan_looks(32) if expected_loss(question[:, :look], divisors, 32) <= 0.01)
        drawn += n
        winners_.append(int(question[:, :n].mean(1).argmax()))
    agreed = [
        torch.stack([chosen == other for other in others]).double().mean()
        for chosen in (torch.tensor(winners_), first.mean(2).argmax(1))
    ]
    assert agreed[1] - agreed[0] <= 0.01
    assert drawn <= 500 * 32 / 2


def test_expected_loss():
    """No loss at the end, for options that cannot win, or with a clear lead; more loss while little is known."""
    question = simulated_run(torch.tensor([[0.0, 1.0, -1.0]], dtype=torch.float64), 5)[0]
    divisors = torch.ones(1, 3)
    assert expected_loss(question, divisors, 32) == 0
    losses = [expected_loss(question[:, :n], divisors, 32) for n in (8, 17, 25)]
    assert losses == [expected_loss(question[:, :n], divisors, 32) for n in (8, 17, 25)]
    assert losses[0] > 0.01
    far = question[:, :8] + torch.tensor([[0.0], [40.0], [0.0]])
    assert expected_loss(far, divisors, 32) == 0
    assert expected_loss(far, torch.tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]]), 32) == 0
    torch.testing.assert_close(
        expected_loss(torch.cat([question[:, :8], torch.full((1, 8), -math.inf)]), torch.ones(1, 4), 32), losses[0]
    )
    alone = torch.cat([question[:1, :8], torch.full((1, 8), -math.inf)])
    assert expected_loss(alone, torch.ones(1, 2), 32) == 0


def test_a_tolerance_ends_questions_that_are_not_settled():
    chain_, rows, scored, groups = questions(20, gap=0)  # options that are all the same text
    metrics = {"acc": [1.0 + 1e-9 * (i % 4) for i in range(len(rows))]}
    options = {"mask_id": 5, "draws": 64, "groups": groups, "sets": 32}
    strict, easy = (
        log_likelihood(chain_, rows, scored, adaptive=Adaptive(metrics, tolerance=tolerance), **options)
        for tolerance in (0.0, 0.005)
    )
    assert easy.saved > strict.saved


# -- mistakes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"scored": [[0, 0, 0]]}, "row 0: no token is scored"),
        ({"tokens": [[]], "scored": [[]]}, "row 0: no token is scored"),
        ({"tokens": [], "scored": []}, "no row to score"),
        ({"scored": [[0, 1]]}, "row 0: 3 tokens, 2 of scored"),
        ({"scored": []}, "1 rows of tokens, 0 of scored"),
        ({"tokens": [[0, 3, 1]]}, "a scored token is [MASK] (3)"),
        ({"tokens": [[0, 4, 1]]}, "token 4 is scored: ids must be below the vocabulary size 3"),
        ({"tokens": [[0, 1, -1]]}, "rows of different lengths as a list"),
        ({"estimator": "magic"}, "estimator = 'magic': allowed: exact_k, official, chain, causal"),
        ({"draws": 4}, "draws = 4: needs at least one for each of the 8 draw sets"),
        ({"sets": 4}, "at least 8 independent draw sets"),
        ({"guidance": -2.0}, "guidance = -2.0: allowed is -1 or more"),
        ({"guidance": math.nan}, "guidance = nan"),
        ({"budget": 0}, "budget = 0"),
        ({"groups": [1, 2]}, "groups: 2 numbers"),
        ({"estimator": "causal", "guidance": 0.5}, "an AR model has no [MASK]"),
        ({"estimator": "causal", "scored": [[1, 1, 1]]}, "token 0 has nothing before it"),
        ({"adaptive": Adaptive({"acc": [1.0]})}, "adaptive: needs groups="),
        ({"adaptive": Adaptive({"acc": [1.0]}), "groups": [0], "estimator": "official"}, "estimator = 'exact_k'"),
        ({"adaptive": Adaptive({"acc": [1.0, 2.0]}), "groups": [0]}, "metric 'acc': 2 divisors"),
    ],
)
def test_mistakes_are_named_in_one_line(change, complaint):
    given = {"tokens": [[0, 1, 2]], "scored": [[0, 1, 1]], "mask_id": 3, **change}
    with pytest.raises(LikelihoodError) as caught:
        log_likelihood(lambda tokens: torch.zeros(*tokens.shape, 3), **given)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize("estimator", ["exact_k", "official", "chain", "causal"])
@pytest.mark.parametrize("guidance", [0.0, 0.5])
def test_what_is_no_number_ranks_nothing(estimator, guidance):
    """Without an error, a model that overflows would still rank options and report an accuracy."""
    if estimator == "causal" and guidance:
        return
    with pytest.raises(ModelError, match="no numbers"):
        log_likelihood(
            lambda tokens: torch.full((*tokens.shape, 3), math.nan), [[0, 1, 2]], [[False, True, True]],
            mask_id=MASK, estimator=estimator, guidance=guidance,
        )  # fmt: skip


def test_mistakes_elsewhere_are_named_too():
    def denoiser(tokens):
        return torch.zeros(*tokens.shape, 3)

    for call, complaint in (
        (lambda: Adaptive({}), "needs a metric"),
        (lambda: Adaptive({"acc": [1.0]}, error=1.0), "error = 1.0"),
        (lambda: Adaptive({"acc": [0.0]}), "metric 'acc'"),
        (lambda: is_greedy(denoiser, [[3, 1]], [[0, 1]], mask_id=3), "greedy prediction would fill"),
        (lambda: document_likelihood(denoiser, [[1]], mask_id=3, window=2, context=2), "window = 2"),
        (lambda: document_likelihood(denoiser, [[1], []], mask_id=3, window=4), "document 1: has no token"),
        (lambda: document_likelihood(denoiser, [], mask_id=3, window=4), "document 0"),
        (lambda: document_likelihood(denoiser, [[1]], mask_id=3, window=4, n_bytes=[1, 2]), "n_bytes: 2 numbers"),
        (lambda: document_likelihood(denoiser, [[1]], mask_id=3, window=4, guidance=1.0), "no bound on a document"),
        (lambda: document_likelihood(denoiser, [[1]], mask_id=3, window=4).bits_per_byte, "give n_bytes="),
    ):
        with pytest.raises(LikelihoodError, match=complaint):
            call()
