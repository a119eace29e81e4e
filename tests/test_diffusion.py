import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sinkdlm.diffusion import Noisy, Schedule, corrupt, denoising_loss
from sinkdlm.fast import objective
from sinkdlm.fast.objective import chunked_nll
from sinkdlm.model.visibility import Annealing
from small_models import PLAN, small_model, small_tokens

SCHEDULES = [Schedule("linear", 1e-3), Schedule("linear", 0.0), Schedule("cosine", 1e-3), Schedule("loglinear", 1e-3)]


# -- corruption -----------------------------------------------------------------------------------------------------------


def test_corruption_of_a_sample_is_the_same_alone_and_in_any_batch():
    tokens = small_tokens(32, 48)
    samples = torch.arange(32) + 10**12
    for schedule, times in itertools.product(SCHEDULES, ("golden", "independent")):
        whole = corrupt(tokens, samples, seed=5, mask_id=11, schedule=schedule, times=times)
        order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
        shuffled = corrupt(tokens[order], samples[order], seed=5, mask_id=11, schedule=schedule, times=times)
        for part, expected in zip(shuffled, whole, strict=True):
            assert torch.equal(part, expected[order])
        alone = corrupt(tokens[9:10], samples[9:10], seed=5, mask_id=11, schedule=schedule, times=times)
        for part, expected in zip(alone, whole, strict=True):
            assert torch.equal(part, expected[9:10])
        longer = corrupt(torch.cat([tokens, tokens], 1), samples, seed=5, mask_id=11, schedule=schedule, times=times)
        assert torch.equal(longer.masked[:, :48], whole.masked)
        assert torch.equal(whole.tokens == 11, whole.masked)
        assert torch.equal(whole.tokens[~whole.masked], tokens[~whole.masked])


def test_a_row_is_masked_anew_in_each_epoch_and_under_each_seed():
    row = small_tokens(1, 64)
    first = corrupt(row, torch.tensor([3]), seed=0, mask_id=11)
    second_epoch = corrupt(row, torch.tensor([3 + 1000]), seed=0, mask_id=11)
    other_seed = corrupt(row, torch.tensor([3]), seed=1, mask_id=11)
    assert not torch.equal(first.masked, second_epoch.masked)
    assert not torch.equal(first.masked, other_seed.masked)


def test_only_maskable_positions_are_masked():
    tokens = small_tokens(64, 30)
    maskable = torch.arange(30) >= 12
    noisy = corrupt(tokens, torch.arange(64), seed=0, mask_id=11, maskable=maskable)
    assert not noisy.masked[:, :12].any()
    everything = corrupt(tokens, torch.arange(64), seed=0, mask_id=11)
    assert torch.equal(noisy.masked[:, 12:], everything.masked[:, 12:])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sample", [0, 1, 2, 77])
def test_masking_rate_is_p(schedule, sample):
    noisy = corrupt(torch.zeros(1, 10**6, dtype=torch.int64), torch.tensor([sample]), seed=2, mask_id=1, schedule=schedule)
    p = schedule.probability(noisy.t).item()
    assert abs(noisy.masked.double().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / 1e6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weight_is_the_logarithmic_derivative_of_p(schedule):
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64, requires_grad=True)
    p = schedule.probability(t)
    (slope,) = torch.autograd.grad(p.sum(), t)
    torch.testing.assert_close(schedule.weight(t), slope / p)
    assert ((p > 0) & (p <= 1)).all()
    assert (slope > 0).all()


def test_cosine_is_accurate_near_zero():
    t = torch.tensor([1e-9], dtype=torch.float64)
    assert abs(Schedule("cosine", 0.0).probability(t).item() / ((math.pi / 2 * 1e-9) ** 2 / 2) - 1) < 1e-9


# -- the loss is the bound --------------------------------------------------------------------------------------------------

LENGTH, VOCAB = 4, 3


def tiny():
    model = small_model(vocab_size=VOCAB, mask_id=VOCAB, n_sinks=1)
    return model, torch.tensor([[2, 0, 1, 2]])


def loss_of_mask(model, tokens, masked, weight):
    noisy = Noisy(torch.where(masked, VOCAB, tokens), masked, torch.zeros(1), torch.tensor([weight], dtype=torch.float64))
    with torch.no_grad():
        return denoising_loss(model, tokens, noisy, denominator=1.0).total.item()


def all_masks():
    for bits in itertools.product([False, True], repeat=LENGTH):
        yield torch.tensor([bits])


def expected_loss(schedule, nodes=400, breaks=(0.0, 1.0)):
    """Expectation of our loss over t (Gauss-Legendre on each piece) and over all masks, by their probabilities."""
    model, tokens = tiny()
    unit = {tuple(mask[0].tolist()): loss_of_mask(model, tokens, mask, 1.0) for mask in all_masks()}
    x, w = np.polynomial.legendre.leggauss(nodes)
    total = 0.0
    for low, high in itertools.pairwise(breaks):
        for t, dt in zip((x + 1) / 2 * (high - low) + low, w / 2 * (high - low), strict=True):
            time = torch.tensor(t, dtype=torch.float64)
            p, weight = schedule.probability(time).item(), schedule.weight(time).item()
            for mask, value in unit.items():
                n = sum(mask)
                total += dt * p**n * (1 - p) ** (LENGTH - n) * weight * value
    return total


def cross_entropies():
    """CE of token i under mask M, straight from full logits."""
    model, tokens = tiny()
    table = {}
    for mask in all_masks():
        with torch.no_grad():
            logits = model.head(model(torch.where(mask, VOCAB, tokens)))
        table[tuple(mask[0].tolist())] = torch.nn.functional.cross_entropy(logits[0], tokens[0], reduction="none")
    return table


def test_expectation_of_the_loss_is_the_exact_bound():
    exact = 0.0
    for mask, nll in cross_entropies().items():
        n = sum(mask)
        exact += sum(nll[i].item() / (n * math.comb(LENGTH, n)) for i in range(LENGTH) if mask[i])
    assert abs(expected_loss(Schedule("linear", 0.0)) - exact) < 1e-9
    assert abs(expected_loss(Schedule("loglinear", 0.0)) - exact) < 1e-9
    assert abs(expected_loss(Schedule("cosine", 0.0)) - exact) < 1e-9  # the bound does not depend on the schedule


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_expectation_of_the_loss_is_the_integral_of_its_definition(schedule):
    """Substituting p for t: the integral over p from p(0) to p(1) of sum over M of p^(n-1) (1-p)^(L-n) CE(M)."""
    zero, one = (schedule.probability(torch.tensor(t, dtype=torch.float64)).item() for t in (0.0, 1.0))
    x, w = np.polynomial.legendre.leggauss(20)
    p = (x + 1) / 2 * (one - zero) + zero
    integral = 0.0
    for mask, nll in cross_entropies().items():
        n = sum(mask)
        if n:
            masked_nll = sum(nll[i].item() for i in range(LENGTH) if mask[i])
            integral += masked_nll * float((w / 2 * (one - zero) * p ** (n - 1) * (1 - p) ** (LENGTH - n)).sum())
    assert abs(expected_loss(schedule) - integral) < 1e-9


@pytest.mark.parametrize("times", ["golden", "independent"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_corrupted_batches_average_to_the_expectation(schedule, times):
    """The sampled loss, corruption included, within 4 standard errors; golden times lower its variance."""
    _, tokens = tiny()
    n = 20_000
    noisy = corrupt(tokens.expand(n, -1), torch.arange(n), seed=0, mask_id=VOCAB, schedule=schedule, times=times)
    table = cross_entropies()
    keys = (noisy.masked.long() * 2 ** torch.arange(LENGTH)).sum(1)
    values = torch.zeros(2**LENGTH, dtype=torch.float64)
    for mask, nll in table.items():
        values[sum(2**i for i in range(LENGTH) if mask[i])] = sum(nll[i].item() for i in range(LENGTH) if mask[i])
    losses = values[keys] * noisy.weight
    assert abs(losses.mean() - expected_loss(schedule)) < 4 * losses.std() / math.sqrt(n)


# -- cuts, chunks, shift ----------------------------------------------------------------------------------------------------


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("cut", [(8,), (1,) * 8, (3, 5), (2, 2, 4), (7, 1)])
def test_loss_ignores_how_the_batch_is_cut(variant, cut):
    model = small_model(**variant)
    tokens, samples = small_tokens(8, 13), torch.arange(8)
    maskable = torch.arange(13) >= torch.arange(8)[:, None]  # rows with different numbers of maskable positions

    def run(parts):
        model.zero_grad()
        total = 0.0
        for part in torch.arange(8).split(list(parts)):
            noisy = corrupt(tokens[part], samples[part], seed=1, mask_id=model.config.mask_id, maskable=maskable[part])
            loss = denoising_loss(model, tokens[part], noisy, denominator=int(maskable.sum()))
            loss.total.backward()
            total += loss.total.item()
        return total, gradients(model)

    expected, expected_grads = run((8,))
    total, grads = run(cut)
    assert abs(total - expected) <= 1e-10
    assert len(grads) == len(expected_grads) >= 18
    for name, grad in grads.items():
        assert (grad - expected_grads[name]).abs().max() <= 1e-10, name


@pytest.mark.parametrize("exclude", [None, 10])
@pytest.mark.parametrize("chunk", [1, 5, 37, 1000, None])
def test_chunked_head_equals_autograd_through_full_logits(chunk, exclude):
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 8, generator=generator, dtype=torch.float64).requires_grad_() for n in (37, 11))
    targets = torch.randint(0, 10, (37,), generator=generator)
    weights = torch.rand(37, generator=generator, dtype=torch.float64) * 5
    logits = hidden @ head.T
    if exclude is not None:
        logits = logits.masked_fill(torch.arange(11) == exclude, -math.inf)
    nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    expected = torch.autograd.grad((nll * weights).sum() / 7, [hidden, head])
    total, row_nll = chunked_nll(hidden, head, targets, weights, exclude=exclude, chunk=chunk)
    torch.testing.assert_close(row_nll, nll.detach(), rtol=0, atol=1e-12)
    assert not row_nll.requires_grad
    for grad, wanted in zip(torch.autograd.grad(total / 7, [hidden, head]), expected, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("sharpness", [1.0, 8.0, 15.0])
def test_half_precision_gradients_stay_exact_for_confident_tokens(sharpness):
    """p - 1 in bf16 is zero or garbage where p rounds to 1; those rows can carry the largest weights."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(64) % 10
    directions = torch.nn.functional.normalize(torch.randn(11, 32, generator=generator), dim=1)
    hidden = (sharpness * directions[targets] + 0.1 * torch.randn(64, 32, generator=generator)).bfloat16()
    head = (1.5 * directions).bfloat16()

    def gradients_of(form, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (hidden, head)]
        return torch.autograd.grad(form(*inputs), inputs)

    def chunked(h, w):
        return chunked_nll(h, w, targets, torch.ones(64))[0]

    def full(h, w):
        return torch.nn.functional.cross_entropy((h @ w.T).float(), targets, reduction="sum")

    exact = gradients_of(lambda h, w: torch.nn.functional.cross_entropy(h @ w.T, targets, reduction="sum"), torch.float64)
    for ours, plain, truth in zip(gradients_of(chunked, torch.bfloat16), gradients_of(full, torch.bfloat16), exact, strict=True):
        error, limit = ((x.double() - truth).norm() / truth.norm() for x in (ours, plain))
        assert error <= 1.5 * limit + 4e-3


def test_without_gradients_none_are_formed(monkeypatch):
    monkeypatch.setattr(objective, "_accumulate", lambda *_: pytest.fail("formed a gradient"))
    hidden, head = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    with torch.no_grad():
        chunked_nll(hidden, head, torch.zeros(4, dtype=torch.int64), torch.ones(4))


def test_corruption_refuses_what_it_would_misread():
    tokens = small_tokens(4, 5)
    for wrong in (
        {"times": "indep"},
        {"schedule": Schedule("cosin")},
        {"samples": torch.arange(1)},
        {"samples": torch.arange(4)[:, None]},
    ):
        with pytest.raises(ValueError, match=r"allowed|one index for each"):
            corrupt(tokens, **{"samples": torch.arange(4), "seed": 0, "mask_id": 11, **wrong})


def test_chunked_head_gives_only_the_gradients_that_are_asked_for():
    hidden, head = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8)
    total, _ = chunked_nll(hidden, head, torch.zeros(4, dtype=torch.int64), torch.ones(4))
    total.backward()
    assert hidden.grad is not None
    with torch.no_grad():
        total, _ = chunked_nll(hidden, head, torch.zeros(4, dtype=torch.int64), torch.ones(4))
    assert not total.requires_grad


def test_a_batch_without_masked_positions_has_zero_loss_and_gradients():
    model, tokens = small_model(n_sinks=1), small_tokens(2, 5)
    noisy = Noisy(tokens, torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2), torch.ones(2, dtype=torch.float64))
    loss = denoising_loss(model, tokens, noisy, denominator=10)
    loss.total.backward()
    assert loss.total.item() == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


@pytest.mark.parametrize("which", ["whole rows", "padded", "annealing", "none masked"])
@pytest.mark.parametrize("slots", [None, 48])
def test_every_runner_and_any_number_of_slots_give_the_same_loss_and_gradients(variant, which, slots):
    """A fast runner ends its last layer at the scored positions; a fixed number of slots repeats one of them, with weight 0."""
    tokens = small_tokens(5, 9)
    lengths = torch.tensor([9, 4, 7, 1, 9]) if which == "padded" else None
    maskable = None if lengths is None else torch.arange(9) < lengths[:, None]
    annealing = Annealing(0.5, 7) if which == "annealing" else None
    found = []
    for plan, n, nll in ((None, None, None), (PLAN, slots, chunked_nll)):
        model = small_model(plan=plan, **variant)
        noisy = corrupt(tokens, torch.arange(5), seed=2, mask_id=model.config.mask_id, maskable=maskable)
        if which == "none masked":
            noisy = noisy._replace(tokens=tokens, masked=torch.zeros_like(noisy.masked))
        loss = denoising_loss(model, tokens, noisy, denominator=45.0, lengths=lengths, annealing=annealing, slots=n, nll=nll)
        loss.total.backward()
        found.append([loss.total.detach(), loss.nll if loss.used is None else loss.nll[loss.used], gradients(model)])
    assert loss.missed is None or not loss.missed
    assert len(found[0][1]) == int(loss.scored.sum())
    for own, plain in zip(*reversed(found), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-10, atol=1e-12)


def test_positions_without_a_slot_are_counted():
    model, tokens = small_model(n_sinks=1), small_tokens(2, 5)
    noisy = corrupt(tokens, torch.arange(2), seed=0, mask_id=11)
    n_scored = int(noisy.masked.sum())
    assert denoising_loss(model, tokens, noisy, denominator=1, slots=n_scored - 1).missed == 1


def test_a_loss_prints_in_one_line():
    model, tokens = small_model(dtype=torch.float64), small_tokens(3, 40)
    noisy = corrupt(tokens, torch.arange(3), seed=0, mask_id=11)
    n = int(noisy.masked.sum())
    loss = denoising_loss(model, tokens, noisy, denominator=120)
    mean = f"{float(loss.nll.mean()):.4f} nats each"
    assert str(loss) == repr(loss) == f"Loss {loss.total.item():.4f}: {n} of 120 tokens scored, {mean}"
    assert str(denoising_loss(model, tokens, noisy, denominator=120, slots=n + 5)) == str(loss)
    missing = str(denoising_loss(model, tokens, noisy, denominator=120, slots=n - 2))
    assert missing.endswith(", 2 without a slot")
    assert f" {n - 2} of 120 tokens" in missing
    nothing = denoising_loss(model, tokens, noisy._replace(masked=torch.zeros_like(noisy.masked)), denominator=120)
    assert str(nothing) == "Loss 0.0000: 0 of 120 tokens scored"


def test_a_shifted_model_leaves_token_0_out_of_the_loss():
    model, tokens = small_model(shift_logits=True), small_tokens(2, 5)
    masked = torch.ones(2, 5, dtype=torch.bool)
    noisy = Noisy(torch.full_like(tokens, 11), masked, torch.ones(2), torch.ones(2, dtype=torch.float64))
    loss = denoising_loss(model, tokens, noisy, denominator=1)
    assert loss.nll.shape == (8,)
    assert masked.all()  # the caller's mask is not edited


def test_a_mask_row_inside_the_vocabulary_is_no_outcome():
    model, tokens = small_model(mask_id=10), small_tokens(2, 5)
    noisy = corrupt(tokens, torch.arange(2), seed=0, mask_id=10)
    loss = denoising_loss(model, tokens, noisy, denominator=1)
    with torch.no_grad():
        logits = model.head(model(noisy.tokens))[noisy.masked]
    logits[:, 10] = -math.inf
    expected = torch.nn.functional.cross_entropy(logits, tokens[noisy.masked], reduction="none")
    torch.testing.assert_close(loss.nll, expected)


def test_any_hidden_model_will_do():
    """The objective needs a call, a head weight and three facts; it never imports the model."""

    class Constant:
        config = SimpleNamespace(vocab_size=3, mask_id=3, shift_logits=False)
        head_weight = torch.eye(3)

        def __call__(self, tokens, *, lengths=None, select):
            return torch.zeros(len(select), 3)

    tokens = torch.tensor([[0, 1, 2, 0]])
    noisy = Noisy(torch.full_like(tokens, 3), torch.ones(1, 4, dtype=torch.bool), torch.ones(1), torch.ones(1))
    assert abs(denoising_loss(Constant(), tokens, noisy, denominator=4).total.item() - math.log(3)) < 1e-6


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units says so
def test_loss_runs_under_autocast():
    model, tokens = small_model(dtype=torch.float32, n_sinks=1), small_tokens(8, 13)
    noisy = corrupt(tokens, torch.arange(8), seed=0, mask_id=11)
    full = denoising_loss(model, tokens, noisy, denominator=tokens.numel())
    full.total.backward()
    expected = gradients(model)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = denoising_loss(model, tokens, noisy, denominator=tokens.numel())
    half.total.backward()
    assert abs(half.total.item() / full.total.item() - 1) < 0.02
    for name, grad in gradients(model).items():
        assert grad.dtype == torch.float32
        assert (grad - expected[name]).norm() <= 0.1 * expected[name].norm(), name


def test_equal_weights_change_the_loss_alone():
    """Masks stay; every masked token weighs 2, which is what the bound's weights come to on average over t."""
    tokens, samples = torch.zeros(512, 64, dtype=torch.int64), torch.arange(512)
    bound, equal = (corrupt(tokens, samples, seed=0, mask_id=9, schedule=Schedule(equal=equal)) for equal in (False, True))
    assert torch.equal(bound.masked, equal.masked)
    assert equal.weight.eq(2).all()
    sums = [float((noisy.masked.sum(1) * noisy.weight).sum()) / tokens.numel() for noisy in (bound, equal)]
    assert sums[0] == pytest.approx(sums[1], rel=0.02)
