"""Training steps captured as CUDA graphs, on a GPU. Skipped elsewhere; test_gradients.py tests what needs no GPU."""

from typing import ClassVar

import pytest
import torch
from benchmarks.kills import read_metrics, write_set

from runs import TINY, interrupted, run
from sinkdlm import DiffusionLM, ModelConfig, Recipe, load
from sinkdlm.diffusion import corrupt, denoising_loss
from sinkdlm.fast import Plan, blocks, compile_blocks, prepare, runner
from sinkdlm.training import choose, gradients, head_slots, loop
from sinkdlm.training.captured import Capturer
from small_models import VARIANTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
]


class Counted(Capturer):
    """Counts what is replayed."""

    made: ClassVar[list["Counted"]] = []

    def __init__(self, device):
        super().__init__(device)
        self.n_replays = 0
        self.made.append(self)

    def capture(self, run):
        replay = super().capture(run)

        def counted():
            self.n_replays += 1
            replay()

        return counted


class Refusing(Capturer):
    """Fails to capture, so that the same kernels are launched one by one."""

    def capture(self, run):
        raise RuntimeError("refused")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """runs(name, capturer, ...): the weights, losses and lines of a run of 20 steps, and how many micro-batches it replayed."""
    data = write_set(tmp_path / "data")

    def made(name, capturer=Counted, *, crash=None, data_more=None, model_more=None, **train):
        train = {"steps": 20, "batch": 6, "lr": 1e-3, "precision": "float64", "compile": "none", "graphs": "on", **train}
        sections = {"data": {"length": 32, "sets": {str(data): 1.0}, **(data_more or {})}, "eval": {"every": 7, "draws": 4}}
        recipe = Recipe.resolve(
            {"model": {**TINY, **(model_more or {})}, **sections, "train": train, "log": {"probe_every": 7}, "save": {"every": 7}}
        )
        Counted.made.clear()
        monkeypatch.setattr(loop, "find_capturer", capturer)
        if crash is not None:
            interrupted(recipe, tmp_path / name, monkeypatch, after=crash, device="cuda")
        _, said = run(recipe, tmp_path / name, device="cuda")
        weights = load(tmp_path / name / "model").model.state_dict()
        losses = [line["loss"] for line in read_metrics(tmp_path / name) if line["kind"] == "train"]
        assert len(losses) == 20
        return weights, losses, said, sum(one.n_replays for one in Counted.made)

    return made


def assert_same_bits(ours, theirs):
    assert ours[1] == theirs[1]
    assert ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0])


@pytest.mark.parametrize(("forwards", "recompute"), [(3, "none"), (3, "full"), (1, "selective")])
def test_captured_steps_are_those_launched_one_by_one(runs, forwards, recompute):
    """In float64, whose kernels give the same bits every time. Without a fixed number of slots the order of sums differs."""
    given = {"micro_batch": 6 // forwards, "recompute": recompute}
    captured = runs("captured", **given)
    assert captured[3] == 20 * forwards
    assert not any("cannot capture" in line for line in captured[2])
    launched = runs("launched", Refusing, **given)
    assert sum("cannot capture the step's CUDA graphs (RuntimeError: refused)" in line for line in launched[2]) == 1
    assert_same_bits(captured, launched)
    plain = runs("plain", **given, graphs="off")
    assert plain[3] == 0
    assert captured[1] == pytest.approx(plain[1], rel=1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_are_captured(runs, recompute):
    """Large enough for every kernel that a training step in bf16 has."""
    given = {"precision": "bf16", "compile": "blocks", "micro_batch": 2, "recompute": recompute, "data_more": {"length": 512}}
    given["model_more"] = {"d_model": 256, "n_heads": 4, "d_ff": 1024, "context_length": 512}
    found = []
    for graphs in ("on", "off"):
        torch._dynamo.reset()
        found.append(runs(graphs, **given, graphs=graphs))
    torch._dynamo.reset()
    assert [one[3] for one in found] == [60, 0], found[0][2]
    assert found[0][1] == pytest.approx(found[1][1], rel=0.02)


def test_a_resumed_run_captures_anew_and_ends_as_one_left_alone(runs):
    alone, resumed = runs("alone", micro_batch=3), runs("resumed", micro_batch=3, crash=9)
    assert resumed[3] == 2 * (9 + 13)  # resumed from the state of step 7
    assert_same_bits(alone, resumed)


def test_short_rows_go_another_way_in_the_same_run(runs):
    given = {"micro_batch": 2, "data_more": {"random_lengths": 0.1}}
    captured, plain = runs("captured", **given), runs("plain", **given, graphs="off")
    assert 20 < captured[3] < 60
    assert captured[1] == pytest.approx(plain[1], rel=1e-9)


def test_steps_that_lack_slots_are_made_again(runs, monkeypatch):
    plain = runs("plain", micro_batch=3, graphs="off")
    monkeypatch.setattr(head_slots, "_SURE", -1.0)
    monkeypatch.setattr(head_slots, "_MULTIPLE", 1)
    lacking = runs("lacking", micro_batch=3)
    assert lacking[3] > 0
    assert lacking[1] == pytest.approx(plain[1], rel=1e-9)


def test_a_capture_that_breaks_off_leaves_training_as_it_was(runs, monkeypatch):
    whole = runs("whole", micro_batch=3)
    loss = gradients.denoising_loss

    def waits(*arguments, **options):
        found = loss(*arguments, **options)
        if torch.cuda.is_current_stream_capturing():
            found.total.item()  # which no capture allows
        return found

    monkeypatch.setattr(gradients, "denoising_loss", waits)
    broken = runs("broken", micro_batch=3)
    assert broken[3] == 0
    assert sum("cannot capture" in line for line in broken[2]) == 1
    assert_same_bits(whole, broken)


needs_flat = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="elsewhere rows are not those of one matrix"
)


@needs_flat
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "slots", "compiled", "recompute"), [
    ("vanilla", None, False, "none"), ("sink", None, False, "selective"), ("sink", 1280, True, "none"),
    ("parent", None, False, "full"), ("sinks-2-end-zero-gate", 1280, True, "full"), ("sinks-4", 1280, False, "selective"),
])  # fmt: skip
def test_a_last_layer_ends_where_the_loss_looks_with_the_same_gradients(name, slots, compiled, recompute, monkeypatch):
    flags = {key: value for key, value in VARIANTS[name].items() if key != "mask_id"}
    config = ModelConfig.preset("smdm-6m", **flags)
    tokens = torch.randint(0, config.vocab_size - 1, (3, 512), generator=torch.Generator().manual_seed(0)).cuda()
    noisy = corrupt(tokens, torch.arange(3), seed=0, mask_id=config.mask_id)
    n_masked = int(noisy.masked[:, int(config.shift_logits) :].sum())
    found, seen, last_norm = {}, [], runner.add_last_norm
    monkeypatch.setattr(runner, "add_last_norm", lambda x, *given: seen.append(len(x)) or last_norm(x, *given))
    for form in ("float32", "whole", "early", *(["compiled"] if compiled else [])):
        torch._dynamo.reset()
        model = DiffusionLM(config).cuda()
        prepare(model, Plan(recompute=recompute, compile="blocks" if compiled else "none"))
        early = model.runner
        if compiled:
            compile_blocks(model)
        if compiled and form != "compiled":
            # A last layer that ends early is not compiled, so neither is the one compared with it: a compiled gate rounds less.
            del model.blocks[-1].forward
        if form in ("whole", "compiled"):
            model.runner = lambda model, x, ctx, select=None, run=early: run(model, x, ctx).flatten(0, 1)[select]
        with torch.autocast("cuda", torch.bfloat16, enabled=form != "float32"):
            loss = denoising_loss(model, tokens, noisy, denominator=100.0, slots=slots)
        loss.total.backward()
        assert int(loss.nll.count_nonzero()) == n_masked
        found[form] = torch.cat([p.grad.flatten() for p in model.parameters()]), loss.total.detach()
    assert seen[0] >= 3 * 512
    assert seen[1] == (slots or n_masked)
    exact = found.pop("float32")[0]
    errors = {form: float((one - exact).norm()) for form, (one, _) in found.items()}
    assert all(error <= 0.05 * exact.norm() for error in errors.values()), (errors, exact.norm())
    assert errors["early"] <= 1.1 * errors["whole"] + 1e-6  # both within rounding
    for _, loss in found.values():
        assert loss.item() == pytest.approx(found["whole"][1].item(), rel=1e-3)


@needs_flat
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_run_whose_blocks_are_left_to_kernels_is_the_compiled_one(runs, graphs, monkeypatch):
    """Includes validations, probes and the state of a resumed run."""
    monkeypatch.setattr(choose, "_AHEAD", {"bf16": 0.0, "fp8": 0.0})
    given = {"precision": "bf16", "micro_batch": 2, "graphs": graphs, "data_more": {"length": 512}}
    given["model_more"] = {"d_model": 256, "n_heads": 4, "d_ff": 1024, "context_length": 512}
    ways, settle = [], loop.settle_way
    monkeypatch.setattr(loop, "settle_way", lambda *a, **b: ways.append(settle(*a, **b)) or ways[-1])
    found = []
    for how in ("blocks", "auto"):
        torch._dynamo.reset()
        found.append(runs(how, **given, compile=how))
    resumed = runs("resumed", **given, compile="auto", crash=9)
    added, compute = set(), blocks.Block.compute
    monkeypatch.setattr(blocks.Block, "compute", lambda self, x, *rest: added.add(x.dtype) or compute(self, x, *rest))
    thin = runs("thin", **given, compile="auto", residual="bf16")
    assert added == {torch.bfloat16}
    assert [way.compile for way in ways] == ["blocks", "none", "none", "none", "none"]
    for one, how in zip(found, ("blocks", "none"), strict=True):
        assert any("runs flat (" in line and f"compiled: {how}" in line for line in one[2])
    assert found[1][3] == (60 if graphs == "on" else 0)
    assert found[0][1] == pytest.approx(found[1][1], rel=0.02)
    assert resumed[1] == pytest.approx(found[1][1], rel=0.02)  # cuDNN's backward adds up in any order
    assert thin[1] == pytest.approx(found[1][1], rel=0.02)  # bf16 residual stream
