"""The autograd functions of a training step against autograd, and a whole step with them against the plain one."""

import pytest
import torch

from comparing import DEVICE, random
from sinkdlm import fast
from sinkdlm.diffusion import corrupt, denoising_loss
from sinkdlm.fast import blocks, functions
from sinkdlm.fast.runner import FastRunner
from sinkdlm.kernels import ops
from sinkdlm.kernels.operator import Operator
from sinkdlm.model.attention import attend_naive
from sinkdlm.model.model import Norm
from sinkdlm.model.positions import Rotation
from small_models import VARIANTS, small_model, small_tokens


def assert_same_gradients(found, wanted, leaves_found, leaves_wanted, grads, **tolerance):
    """Compare outputs, and the leaves' gradients for given gradients of the outputs."""
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-5}
    both = [(*outs, *torch.autograd.grad(outs, leaves, [grad.to(out) for grad, out in zip(grads, outs, strict=True)]))
            for outs, leaves in ((found, leaves_found), (wanted, leaves_wanted))]  # fmt: skip
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), **tolerance)


@pytest.mark.skipif(DEVICE == "cuda", reason="cuDNN's attention is for half precision: test_gpu.py")
@pytest.mark.parametrize("sinks", [0, 1, 3, "zero", "logit"])
@pytest.mark.parametrize(("n_heads", "n_kv"), [(4, 4), (6, 2), (3, 1)])
def test_attention_of_flat_tokens_is_attention_with_sinks(n_heads, n_kv, sinks):
    """In float64, with rotary; the sinks' own rows are their values."""
    batch, tokens, width, n_sinks = 2, 7, 8, {"zero": 2, "logit": 0}.get(sinks, sinks)
    angles = random(1, tokens + n_sinks, 1, width // 2).double()
    rotation, of_sinks = (Rotation(part.cos(), part.sin()) for part in (angles[:, n_sinks:], angles[:, :n_sinks]))
    logit = random(n_heads, seed=2).double() if sinks == "logit" else None
    given = [
        random(batch * tokens + (n_sinks and n_sinks + 2), n_heads + 2 * n_kv, width, seed=1).double(),
        *([] if logit is None else [logit]),
    ]
    found, wanted = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    named = {"zero_value": sinks == "zero", "sink_logit": None if logit is None else found[1]}
    out = functions.attend_flat(found[0], rotation, of_sinks if n_sinks else None, batch, n_heads, **named)
    whole, behind = wanted[0][: batch * tokens].unflatten(0, (batch, tokens)), wanted[0][batch * tokens :][None]
    q, k, v = whole.split([n_heads, n_kv, n_kv], dim=2)
    _, sink_k, sink_v = behind[:, :n_sinks].split([n_heads, n_kv, n_kv], dim=2)
    sink_v = torch.zeros_like(sink_v) if sinks == "zero" else sink_v
    seen = [x.transpose(1, 2) for x in (rotation.apply(q), rotation.apply(k), v, of_sinks.apply(sink_k), sink_v)]
    mixed = attend_naive(*seen, sink_logit=None if logit is None else wanted[1])[0].transpose(1, 2).flatten(0, 1)
    own = sink_v[0].repeat_interleave(n_heads // n_kv, dim=1)
    expected = torch.cat([mixed, own])
    grad = random(*expected.shape, seed=3).double()
    out = out[: len(expected)]
    assert_same_gradients([out], [expected], found, wanted, [grad], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("added", [None, torch.float32, torch.bfloat16])
def test_adding_and_norming_has_autograds_gradients(added):
    """added: dtype of the update that is added to a float32 stream; in float32 too, both share one gradient."""
    given = [random(2, 3, 7), random(7, seed=2), *([] if added is None else [random(2, 3, 7, seed=1, dtype=added)])]
    mine, leaves = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    total = leaves[0] * 1 if added is None else leaves[0] + leaves[2]
    wanted = (total, torch.nn.functional.rms_norm(total, (7,), leaves[1], 1e-5))
    found = functions.add_norm(mine[0], None if added is None else mine[2], mine[1], 1e-5, torch.float32)
    near = {"rtol": 1e-2, "atol": 1e-2} if added == torch.bfloat16 else {}
    assert_same_gradients(found, wanted, mine, leaves, [random(2, 3, 7, seed=i) for i in (3, 4)], **near)


def test_the_last_norm_has_autograds_gradients():
    given = random(2, 3, 7), random(2, 3, 7, seed=1), random(7, seed=2)
    mine, leaves = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    wanted = torch.nn.functional.rms_norm(leaves[0] + leaves[1], (7,), leaves[2], 1e-5)
    assert_same_gradients([functions.add_last_norm(*mine, 1e-5, torch.float32)], [wanted], mine, leaves, [random(2, 3, 7, seed=3)])


def test_swiglu_and_its_matmul_have_autograds_gradients():
    given = random(2, 3, 20), random(6, 10, seed=1)
    mine, leaves = [x.clone().requires_grad_() for x in given], [x.double().requires_grad_() for x in given]
    gate, up = leaves[0].chunk(2, -1)
    wanted = (torch.nn.functional.silu(gate) * up) @ leaves[1].mT
    assert_same_gradients([functions.swiglu_matmul(*mine)], [wanted], mine, leaves, [random(2, 3, 6, seed=2)])


@pytest.mark.parametrize("biased", [False, True])
def test_a_matmul_has_autograds_gradients(biased):
    given = [random(2, 3, 10), random(6, 10, seed=1), *([random(6, seed=2)] if biased else [])]
    mine, leaves = [x.clone().requires_grad_() for x in given], [x.double().requires_grad_() for x in given]
    found, wanted = functions.project(*mine), torch.nn.functional.linear(*leaves)
    assert_same_gradients([found], [wanted], mine, leaves, [random(2, 3, 6, seed=3)])


def test_a_norms_weight_is_not_rounded_to_what_it_scales():
    """With a bf16 residual stream: by the module, and by the operator of a training step."""
    x, norm = random(40, 64, dtype=torch.bfloat16).cpu(), Norm(64, 1e-5)
    torch.nn.init.constant_(norm.weight, 1.0035)  # 1 in bf16
    wanted = (torch.nn.functional.rms_norm(x.double(), (64,), eps=1e-5) * 1.0035).bfloat16()
    for found in (norm(x), ops.add_norm.plain(x, None, norm.weight, 1e-5, torch.bfloat16)[1]):
        assert found.dtype == torch.bfloat16
        assert (found == wanted).float().mean() > 0.99


# -- a step -----------------------------------------------------------------------------------------------------------------------

STEPS = ["sink", "sinks-2-end-zero-gate", "logit", "vanilla"]


def flat_model(name, plan=None, **more):
    """A model that trains on the flat path, whatever its rows' length."""
    plan = plan or fast.Plan()
    model = small_model(dtype=torch.float32, plan=plan, **more, **VARIANTS[name])
    model.runner = FastRunner(plan, force="flat")
    return model


def loss_and_gradients(model, tokens, seed=0):
    noisy = corrupt(tokens, torch.arange(len(tokens)), seed=seed, mask_id=model.config.mask_id)
    loss = denoising_loss(model, tokens.to(model.embed.weight.device), noisy, denominator=10.0).total
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in STEPS), *(pytest.param(name, True, marks=pytest.mark.slow) for name in STEPS[1:3])],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_last_layer_ends_where_the_loss_looks(name, compiled, monkeypatch):
    """Loss and gradients equal the plain step's. The last layer is never compiled: its shapes change at every step."""
    monkeypatch.setattr(blocks, "_FUSED_SIZE", 0)
    tokens, model, ended = small_tokens(2, 20), flat_model(name), []
    last_norm = functions.add_last_norm
    monkeypatch.setattr("sinkdlm.fast.runner.add_last_norm", lambda x, *given: ended.append(len(x)) or last_norm(x, *given))
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    wanted = loss_and_gradients(small_model(dtype=torch.float32, plan=None, **VARIANTS[name]), tokens)
    for one, other in zip(loss_and_gradients(model, tokens), wanted, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    n_masked = int(corrupt(tokens, torch.arange(2), seed=0, mask_id=model.config.mask_id).masked.sum())
    assert ended == [n_masked]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units says so
def test_a_bf16_residual_stream_is_as_exact_by_operators_as_without(name, monkeypatch):
    """On average over steps: in a single one, rounding favours either."""
    monkeypatch.setattr(blocks, "_FUSED_SIZE", 0)
    tokens, errors, plan = small_tokens(4, 20), {"plain": 0.0, "flat": 0.0}, fast.Plan(residual=torch.bfloat16)
    for seed in range(12):
        found = {}
        for form in ("float32", *errors):
            model = flat_model(name, plan) if form == "flat" else small_model(dtype=torch.float32, plan=plan, **VARIANTS[name])
            with torch.autocast("cpu", torch.bfloat16, enabled=form != "float32"):
                found[form] = torch.cat([x.flatten() for x in loss_and_gradients(model, tokens, seed)[1:]])
        for form in errors:
            errors[form] += float((found[form] - found["float32"]).norm() / found["float32"].norm()) / 12
    assert errors["flat"] <= 1.25 * errors["plain"]
    assert max(errors.values()) < 0.1


@pytest.mark.skipif(DEVICE == "cuda", reason="test_runner.py has it there")
@pytest.mark.parametrize("name", ["sinks-2-end-zero-gate", pytest.param("sinks-4", marks=pytest.mark.slow), "vanilla"])
def test_a_step_by_kernels_is_the_plain_step(name, monkeypatch):
    """By Triton's interpreter: all kernels of a GPU's step but content attention."""
    called = set()

    def by_kernel(self, *args, **given):
        called.add(self._name)
        return self.kernel(*args, **given)

    monkeypatch.setattr(Operator, "__call__", by_kernel)
    monkeypatch.setattr(blocks, "_FUSED_SIZE", 0)
    tokens = small_tokens(1, 5)
    model, plain = flat_model(name, n_layers=1), small_model(dtype=torch.float32, plan=None, n_layers=1, **VARIANTS[name])
    for one, other in zip(*(loss_and_gradients(each, tokens) for each in (model, plain)), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    sinks = {"rotate_sinks", "merge_flat", "merge_flat_backward"} if model.sinks is not None else {"join_heads"}
    dense = {"rotate_heads", "add_norm", "add_norm_backward", "weight_gradient", "swiglu", "swiglu_backward"}
    assert called == sinks | dense


def test_an_adapter_is_not_passed_by(monkeypatch):
    """An adapted layer's own forward is called, not a fused one of its weight."""

    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    monkeypatch.setattr(blocks, "_FUSED_SIZE", 0)
    for adapted in ((), ("down",), ("gate_up", "down")):
        found = []
        for model in (flat_model("sink"), small_model(dtype=torch.float32, plan=None, n_sinks=1)):
            for block in model.blocks:
                for name in adapted:
                    getattr(block.mlp, name).__class__ = Adapted
            found.append(model(small_tokens(2, 5)))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
