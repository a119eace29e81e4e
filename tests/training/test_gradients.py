"""A step's gradient with a fixed number of head slots, from micro-batches that are captured and replayed."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from benchmarks import kills

from runs import interrupted, metrics, recipe_of, run
from sinkdlm import ModelConfig, Recipe
from sinkdlm.data.rows import Batch
from sinkdlm.diffusion import Schedule, corrupt, denoising_loss, times_of
from sinkdlm.distributed.world import World
from sinkdlm.fast import objective
from sinkdlm.training import gradients as gradients_module
from sinkdlm.training import head_slots, loop
from sinkdlm.training.evaluate import BUCKETS, add_by_ratio
from sinkdlm.training.gradients import Gradients
from sinkdlm.training.head_slots import plan_slots
from sinkdlm.training.weights import Weights
from small_models import VARIANTS, small_model, small_tokens

CPU = torch.device("cpu")
QUIET = {"eval": {"every": 0}, "log": {"probe_every": 0}, "save": {"every": 1000}}

# -- head slots ---------------------------------------------------------------------------------------------------------------


def losses_of(model, noisy, tokens, **more):
    model.zero_grad()
    loss = denoising_loss(model, tokens, noisy, denominator=7.0, **more)
    loss.total.backward()
    return loss, [weight.grad for weight in model.parameters()]


@pytest.mark.parametrize("name", ["sink", "parent"])
def test_spare_head_slots_change_nothing(name):
    model, tokens = small_model(**VARIANTS[name]), small_tokens(5, 16)
    noisy = corrupt(tokens, torch.arange(5), seed=0, mask_id=model.config.mask_id)
    probability = Schedule().probability(noisy.t)
    plain, expected = losses_of(model, noisy, tokens)
    sums = torch.zeros(2, BUCKETS, dtype=torch.float64)
    add_by_ratio(sums, probability, plain)
    count = len(plain.nll)
    assert int(sums[1].sum()) == count == int(plain.scored.sum())
    for spare in (0, 3, 80 - count):
        loss, grads = losses_of(model, noisy, tokens, slots=count + spare)
        assert loss.nll.shape == (count + spare,)
        assert int(loss.missed) == 0
        torch.testing.assert_close(loss.total, plain.total, rtol=1e-13, atol=0)
        torch.testing.assert_close(loss.nll[loss.used], plain.nll, rtol=1e-13, atol=0)
        torch.testing.assert_close(grads, expected, rtol=1e-11, atol=1e-13)
        found = torch.zeros_like(sums)
        add_by_ratio(found, probability, loss)
        torch.testing.assert_close(found, sums, rtol=1e-13, atol=0)
    loss, _ = losses_of(model, noisy, tokens, slots=count - 3)
    assert int(loss.missed) == 3


def test_a_batch_without_masks_has_no_loss_and_no_gradient():
    model, tokens = small_model(n_sinks=1), small_tokens(2, 8)
    noisy = corrupt(tokens, torch.arange(2), seed=0, mask_id=11, maskable=torch.zeros(2, 8, dtype=torch.bool))
    loss, grads = losses_of(model, noisy, tokens, slots=4)
    assert (float(loss.total.detach()), int(loss.missed), int(loss.used.sum())) == (0.0, 0, 0)
    assert all(bool((grad == 0).all()) for grad in grads)


def train_section(**train):
    return Recipe.resolve({"model": {"preset": "nano"}, "train": {"steps": 1, **train}}).train


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("n_rows", [5, 64])
def test_consecutive_samples_always_find_slots(schedule, n_rows, monkeypatch):
    """Golden times: every run of samples fits, and those with most masked positions nearly fill what their times allow."""
    monkeypatch.setattr(head_slots, "_TOGETHER", 40)
    train, length = train_section(schedule=schedule, seed=3), 128
    found = plan_slots(train, n_rows, length, torch.tensor([length]))
    assert found.size % 256 == 0
    assert found.size < n_rows * length
    tokens, counts = torch.zeros(n_rows, length, dtype=torch.int64), torch.full((n_rows,), length)
    expected = []
    for start in range(0, 4000, 37):
        samples = torch.arange(start, start + n_rows)
        assert found.fit(samples, counts)
        noisy = corrupt(tokens, samples, seed=3, mask_id=9, schedule=Schedule(schedule))
        assert torch.equal(noisy.t, times_of(samples, seed=3))
        assert int(noisy.masked.sum()) <= found.size
        expected.append(float(Schedule(schedule).probability(noisy.t).sum()) * length)
    spread = 6 * (n_rows * length / 4) ** 0.5
    assert max(expected) > 0.9 * (found.size - 256 - spread)
    assert abs(np.mean(expected) / found.expected - 1) < 0.02


def test_samples_that_do_not_fit_are_known_beforehand():
    """Independent times, rows that differ: some micro-batches are refused, and no accepted one exceeds the slots."""
    train, length, n_rows = train_section(times="independent", seed=1), 256, 16
    counts = torch.randint(20, 257, (4000, n_rows), generator=torch.Generator().manual_seed(0))
    found = plan_slots(train, n_rows, length, counts.flatten())
    assert found.expected < found.size < 0.8 * n_rows * length
    fits, tokens = [], torch.zeros(n_rows, length, dtype=torch.int64)
    for number in range(300):
        samples, held = torch.arange(number * n_rows, (number + 1) * n_rows), counts[number]
        noisy = corrupt(tokens, samples, seed=1, mask_id=9, times="independent", maskable=torch.arange(length) < held[:, None])
        fits.append(found.fit(samples, held))
        assert not fits[-1] or int(noisy.masked.sum()) <= found.size
    assert np.mean(fits) > 0.98
    greedy = samples[noisy.t > 0.9][:1].expand(n_rows)
    assert not found.fit(greedy, torch.full((n_rows,), length))


@pytest.mark.parametrize(
    ("preset", "n_rows", "length", "pays"),
    [
        ("smollm2-135m", 64, 512, True),
        ("qwen2.5-0.5b", 8, 2048, True),
        ("smdm-6m", 64, 512, True),
        ("smdm-6m", 4, 64, False),  # few rows: twice the slots, and the head is nearly all of such a model
        ("smdm-472m", 16, 2048, False),  # each layer keeps the device busy for long
    ],
)
def test_whether_capturing_pays_is_arithmetic(preset, n_rows, length, pays):
    found = plan_slots(train_section(), n_rows, length, torch.tensor([length]))
    assert found.pay(ModelConfig.preset(preset)) is pays


# -- capturing ----------------------------------------------------------------------------------------------------------------


class Again:
    """Captures by keeping what to call. Like a graph, a replay writes the gradient tensors of its capture, whatever the parameters
    hold now: it overwrites them if there were none at capture, or adds to them."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.parameters, self.replays, self.closed = failure, [], [], False

    def warm_up(self, run):
        run()

    def capture(self, run):
        if self.failure is not None:
            raise self.failure
        parameters = self.parameters
        writes = all(p.grad is None for p in parameters)
        run()
        kept = [p.grad for p in parameters]

        def replay():
            self.replays.append("write" if writes else "add")
            now = [p.grad for p in parameters]
            for p, gradient in zip(parameters, kept, strict=True):
                p.grad = gradient.zero_() if writes else gradient
            run()
            for p, gradient in zip(parameters, now, strict=True):
                p.grad = gradient

        return replay

    def close(self):
        self.closed = True


def gradients_of(capturer=None, *, micro_batch, say=print, block_size=None, **train):
    model = {"preset": "nano", "n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 24, "n_sinks": 1}
    if block_size is not None:
        model["block_size"] = block_size
    recipe = Recipe.resolve({"model": model, "data": {"length": 16}, "train": {"steps": 1, "batch": 6, "graphs": "on", **train}})
    weights = Weights(small_model(vocab_size=64, n_sinks=1, n_layers=1), World(CPU), dtype=torch.float64)
    found = Gradients(recipe, weights, nullcontext(), micro_batch=micro_batch, compiled=True, say=say)
    if capturer is not None:
        fix(found, capturer, rows_of(0))
    return found


def fix(gradients, capturer, like):
    capturer.parameters = list(gradients.model.parameters())
    gradients.fix(like, capturer)


def rows_of(step, n_rows=6, lengths=None, prompt=0):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (n_rows, 16), generator=generator)
    held = None if lengths is None else torch.tensor(lengths)
    maskable = None if held is None else torch.arange(16) < held[:, None]
    if prompt:
        maskable = (torch.arange(16) >= prompt).expand(n_rows, -1)
    return Batch(tokens, torch.arange(step * n_rows, (step + 1) * n_rows), maskable, held)


def steps_of(gradients, batches):
    """Sums and gradients of steps, each cleared before it."""
    found = []
    for batch in batches:
        sums = gradients.add(batch, 50.0 + len(found))
        found.append([sums, *(gradient.clone() for gradient in gradients.weights.take_gradients())])
        gradients.weights.clear_gradients()
    return found


@pytest.mark.parametrize(("micro_batch", "replays"), [(6, ["write"]), (2, ["write", "add", "add"]), (4, ["write"]), (5, ["write"])])
def test_replayed_steps_are_the_plain_ones(micro_batch, replays):
    batches = [rows_of(step) for step in range(4)]
    capturer = Again()
    captured = steps_of(gradients_of(capturer, micro_batch=micro_batch), batches)
    plain = steps_of(gradients_of(micro_batch=micro_batch), batches)
    torch.testing.assert_close(captured, plain, rtol=1e-10, atol=1e-13)
    assert capturer.replays == 4 * replays  # left-over rows are launched, and add to replayed gradients
    assert captured[0][0][1] > 0
    eager = gradients_of(Again(RuntimeError("no")), micro_batch=micro_batch)
    for ours, theirs in zip(steps_of(eager, batches), captured, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))  # launched one by one: the same bits


def test_the_host_counts_slots_as_the_device_does(monkeypatch):
    """Where a last layer ends early on a GPU, the host draws the masks as well. A repeated step asks the device."""
    batches = [rows_of(step) for step in range(3)] + [rows_of(3, lengths=[16, 16, 3, 9, 1, 16]), rows_of(4, prompt=9)]
    plain = steps_of(gradients_of(micro_batch=3), batches)
    monkeypatch.setattr(objective, "_MULTIPLE", 4)
    ours, asked = gradients_of(micro_batch=3), []
    ours._counts_slots = True
    loss = gradients_module.denoising_loss

    def noted(model, tokens, noisy, *, slots, **more):
        asked.append((slots, int(noisy.masked.sum())))
        return loss(model, tokens, noisy, slots=slots, **more)

    monkeypatch.setattr(gradients_module, "denoising_loss", noted)
    torch.testing.assert_close(steps_of(ours, batches), plain, rtol=1e-10, atol=1e-13)
    assert [slots for slots, _ in asked] == [max(1, -(-masked // 4)) * 4 for _, masked in asked]
    assert len({slots for slots, _ in asked}) > 3
    ours.add(batches[0], 1.0, fixed=False)
    assert [slots for slots, _ in asked[-2:]] == [None, None]


def test_other_micro_batches_go_the_plain_way_within_the_same_step():
    """A short row in the second of three forwards, or in the first; then rows with prompts, which are never masked."""
    batches = [rows_of(0), rows_of(1, lengths=[16, 16, 16, 9, 16, 16]), rows_of(2, lengths=[7, 16, 16, 16, 16, 16])]
    batches += [rows_of(3, prompt=9), rows_of(4)]
    capturer = Again()
    maskable = Batch(torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1), torch.ones(1, 16, dtype=torch.bool))
    ours = gradients_of(micro_batch=2)
    fix(ours, capturer, maskable)
    torch.testing.assert_close(steps_of(ours, batches), steps_of(gradients_of(micro_batch=2), batches), rtol=1e-10, atol=1e-13)
    whole, short, late = ["write", "add", "add"], ["write", "add"], ["write", "add"]
    assert capturer.replays == [*whole, *short, *late, *whole, *whole]
    without = Again()
    strict = gradients_of(without, micro_batch=2)  # captured without maskable: rows that have it are launched
    torch.testing.assert_close(steps_of(strict, batches), steps_of(gradients_of(micro_batch=2), batches), rtol=1e-10, atol=1e-13)
    assert without.replays == 2 * whole


def test_what_cannot_be_captured_is_said_and_computed_all_the_same():
    said = []
    broken = Again(RuntimeError("operation not permitted when stream is capturing\nmore"))
    ours = gradients_of(broken, micro_batch=3, say=said.append)
    batches = [rows_of(step) for step in range(2)]
    torch.testing.assert_close(steps_of(ours, batches), steps_of(gradients_of(micro_batch=3), batches), rtol=1e-10, atol=1e-13)
    assert broken.closed
    (line,) = said
    assert line.startswith("cannot capture the step's CUDA graphs (RuntimeError: operation not permitted when stream is capturing)")


def test_block_diffusion_says_that_no_steps_are_captured():
    for graphs, n_lines in (("on", 1), ("auto", 0)):
        said = []
        assert gradients_of(Again(), micro_batch=2, say=said.append, block_size=4, graphs=graphs).captured is None
        assert ["block diffusion" in line for line in said] == [True] * n_lines


def test_captures_give_way_where_memory_runs_out():
    said, capturer = [], Again()
    ours = gradients_of(capturer, micro_batch=4, say=said.append)
    batches = [rows_of(step) for step in range(3)]
    first = steps_of(ours, batches[:1])
    calls = []

    def look():
        calls.append(capturer.closed)
        if not capturer.closed:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "seen"

    assert ours.with_room(look) == "seen"
    assert calls == [False, True]
    assert ["out of memory beside the step's CUDA graphs" in line for line in said] == [True]
    plain = steps_of(gradients_of(micro_batch=4), batches)
    assert capturer.replays == ["write"]
    rest = [ours.add(batch, 51.0 + number) for number, batch in enumerate(batches[1:])]
    torch.testing.assert_close([first[0][0], *rest], [sums for sums, *_ in plain], rtol=1e-10, atol=1e-13)
    capturer.closed = False
    with pytest.raises(torch.OutOfMemoryError):
        ours.with_room(look)


@pytest.mark.parametrize("off", [{"graphs": "off"}, {"graphs": "auto"}])
def test_a_recipe_says_whether_steps_are_captured(off, monkeypatch):
    monkeypatch.setattr(head_slots, "_DEAREST", -1.0)
    assert gradients_of(Again(), micro_batch=2, **off).captured is None
    assert gradients_of(Again(), micro_batch=2).captured is not None


# -- runs ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def capturer(monkeypatch):
    found, build = Again(), loop.Trainer._build

    def note(self, load_parent):
        weights = build(self, load_parent)
        found.parameters = list(weights.model.parameters())
        return weights

    monkeypatch.setattr(loop.Trainer, "_build", note)
    monkeypatch.setattr(loop, "find_capturer", lambda device: found)
    return found


def test_a_run_with_captured_steps_ends_as_one_without(tmp_path, token_set, capturer, monkeypatch):
    """In float64, with three forwards a step and random lengths; a resumed run is bit-equal."""
    train = {"steps": 8, "batch": 6, "micro_batch": 2, "precision": "float64", "ema": 0.9, "graphs": "on"}
    recipe = recipe_of(token_set, data={"random_lengths": 0.1}, train=train, **QUIET)
    plain = recipe_of(token_set, data={"random_lengths": 0.1}, train={**train, "graphs": "off"}, **QUIET)
    run(recipe, tmp_path / "captured")
    replays = len(capturer.replays)
    assert 8 < replays < 24
    run(plain, tmp_path / "plain")
    assert len(capturer.replays) == replays
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("captured", "plain")]
    np.testing.assert_allclose(*losses, rtol=1e-10)
    saving = recipe_of(token_set, data={"random_lengths": 0.1}, train=train, **{**QUIET, "save": {"every": 3}})
    interrupted(saving, tmp_path / "resumed", monkeypatch, after=5)
    run(saving, tmp_path / "resumed")
    assert kills.differences(tmp_path / "captured", tmp_path / "resumed") == []


def test_a_step_that_lacked_slots_is_made_again_before_anything_changes(tmp_path, token_set, capturer, monkeypatch):
    train = {"steps": 5, "batch": 4, "micro_batch": 2, "precision": "float64", "graphs": "on"}
    run(recipe_of(token_set, train={**train, "graphs": "off"}, **QUIET), tmp_path / "plain")
    monkeypatch.setattr(head_slots, "_SURE", -1.0)
    monkeypatch.setattr(head_slots, "_MULTIPLE", 1)
    missed, try_step = [], loop.Trainer._try_step

    def note(self, *given, **more):
        result = try_step(self, *given, **more)
        missed.append(result.n_missed)
        return result

    monkeypatch.setattr(loop.Trainer, "_try_step", note)
    run(recipe_of(token_set, train=train, **QUIET), tmp_path / "lacking")
    assert any(missed)
    assert len(missed) == 5 + sum(count > 0 for count in missed)
    first, second = (metrics(tmp_path / name) for name in ("plain", "lacking"))
    for key in ("loss", "grad_norm", "masked"):
        np.testing.assert_allclose([line[key] for line in first], [line[key] for line in second], rtol=1e-10)


def test_a_machine_that_captures_nothing_says_so_where_it_was_asked_to(tmp_path, token_set):
    _, said = run(recipe_of(token_set, train={"steps": 1, "graphs": "on"}, **QUIET), tmp_path / "run")
    assert sum("CUDA graphs need a single process on a GPU" in line for line in said) == (not torch.cuda.is_available())
