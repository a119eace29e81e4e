"""One law for every runner: on every path, outputs and gradients are those of `run_plain`, for every variant.

Runs on a GPU where there is one: only there is the inference path, and the flat path in half precision.
"""

import copy
import functools
import pickle

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from sinkdlm import fast
from sinkdlm.fast.runner import FastRunner
from sinkdlm.model import model as plain
from sinkdlm.model.model import run_plain
from sinkdlm.model.visibility import Annealing
from sinkdlm.sampling.prefix_cache import BlockCache
from small_models import VARIANTS, small_model, small_tokens

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # a CPU without bf16 units says so
]

SIZES = {"d_model": 96} if ON_GPU else {}  # kernels on a GPU need heads of at least 16
BATCH, TOKENS = 3, 160 if ON_GPU else 13
EXACT = [(torch.float32, 1e-4)] if ON_GPU else [(torch.float64, 1e-12), (torch.float32, 1e-5)]

# Name -> the plan's fields, and the path that is forced.
PATHS = {
    "default": ({}, None),
    "selective": ({"recompute": "selective"}, None),
    "full": ({"recompute": "full"}, None),
    "flat": ({}, "flat"),
    "flat-selective": ({"recompute": "selective"}, "flat"),
    "flat-full": ({"recompute": "full"}, "flat"),
}
FLAT = [name for name, flags in VARIANTS.items() if flags.get("sink_kind") != "register"]
WHOLE = ("whole", "some", "each")  # the runs of whole rows, which are all that the flat path takes
# Other runs take the default path, as one shows; and what is recomputed does not depend on who sees whom.
RUNS = {**dict.fromkeys(("selective", "full"), ("each", "annealing lengths", "documents")), "flat": (*WHOLE, "annealing lengths"),
        **dict.fromkeys(("flat-selective", "flat-full"), WHOLE)}  # fmt: skip


def runs_of(config) -> dict[str, dict]:
    """Name -> arguments of a forward."""
    index = torch.arange(TOKENS)
    lengths = torch.tensor([TOKENS, 4, TOKENS - 4])
    each = torch.tensor([[0, 5, 3], [2, 2, 1], [4, 0, TOKENS - 5]])
    some = torch.tensor([0, 8, TOKENS - 1, TOKENS, TOKENS + 2, 3 * TOKENS - 5])  # rows select unequally many
    documents = torch.stack([index // 5, index // 100, (index > 2) * 7])
    annealing = Annealing(0.4, 7)
    found = {
        "whole": {},
        "each": {"select": each},
        "some": {"select": some},
        "lengths": {"lengths": lengths},
        "lengths each": {"lengths": lengths, "select": each},
        "causal": {"causal": True, "select": some},
        "annealing": {"annealing": annealing, "select": each},
        "annealing lengths": {"annealing": annealing, "lengths": lengths},
    }
    if config.sink_kind != "register":
        found |= {"documents": {"documents": documents}, "all": {"documents": documents, "annealing": annealing, "select": each}}
    return found


def on_device(given: dict) -> dict:
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def forward(model, given: dict, seed: int = 0):
    """Return the output without padding."""
    out = model(small_tokens(BATCH, TOKENS, seed).to(DEVICE), **on_device(given))
    if "lengths" in given and "select" not in given:
        out = out[torch.arange(TOKENS, device=DEVICE) < given["lengths"][:, None].to(DEVICE)]
    return out


def step(model, given: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the output and each weight's gradient."""
    model.zero_grad()
    out = forward(model, given, seed)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    (out * cotangent.to(out)).sum().backward()
    return {"out": out.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict, wanted: dict, tolerance: float, where: object) -> None:
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        far = (found[name].double() - right.double()).abs().max()
        assert far <= tolerance * max(1.0, float(right.abs().max())), (where, name, float(far))


def with_runner(path: str, dtype: torch.dtype, **flags):
    given, force = PATHS[path]
    model = small_model(dtype=dtype, plan=fast.Plan(**given), **SIZES, **flags).to(DEVICE)
    model.runner = FastRunner(fast.Plan(**given), force=force)
    return model


@pytest.fixture
def paths(monkeypatch) -> list[str]:
    """Record the path of each fast forward."""
    taken: list[str] = []
    choose = FastRunner.choose
    monkeypatch.setattr(FastRunner, "choose", lambda self, *given: taken.append(choose(self, *given)) or taken[-1])
    return taken


def plain_step(variant: str, dtype: torch.dtype, name: str) -> dict[str, torch.Tensor]:
    """The plain step of a run."""
    exact = small_model(dtype=dtype, plan=None, **SIZES, **VARIANTS[variant]).to(DEVICE)
    return step(exact, runs_of(exact.config)[name])


computed_step = functools.cache(plain_step)  # all paths are compared with the same


def assert_every_step_is_the_plain_one(path, dtype, tolerance, variant, plain_one) -> None:
    model = with_runner(path, dtype, **VARIANTS[variant])
    every = ("some", "lengths each", "annealing lengths", "documents") if (dtype, tolerance) in EXACT[1:] else runs_of(model.config)
    for name, given in runs_of(model.config).items():
        if name in RUNS.get(path, every):
            assert_same(step(model, given), plain_one(variant, dtype, name), tolerance, name)


# Every path in the most exact dtype. In the other one, both paths, and recomputed blocks.
STEPS = [(path, *EXACT[0]) for path in (["default"] if ON_GPU else PATHS)]
STEPS += [(path, *kind) for kind in EXACT[1:] for path in ("default", "flat-full")]


@pytest.mark.parametrize(
    ("name", "path", "dtype", "tolerance"),
    [(name, *given) for name in VARIANTS for given in STEPS if name in FLAT or given[0] not in ("flat-selective", "flat-full")],
)
def test_every_path_is_the_plain_one(name, path, dtype, tolerance, paths):
    assert_every_step_is_the_plain_one(path, dtype, tolerance, name, computed_step)
    if not ON_GPU:
        assert paths.count("flat") == len(WHOLE) * (path.startswith("flat") and name in FLAT)


@pytest.fixture
def trainable_flex(monkeypatch):
    """torch refuses to train FlexAttention on a CPU, although its reference code can: skip the check."""
    if not ON_GPU:
        monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# These have all that FlexAttention sees of a variant; each is compiled anew.
FLEX = ("vanilla", "sink", "sinks-2-end-zero-gate", "logit", "parent", "register-2-end-zero")


@pytest.mark.usefixtures("trainable_flex")
@pytest.mark.parametrize("name", FLEX)
def test_flex_is_the_plain_one(name, paths):
    """Forwards whose rule hides more than padding."""
    (dtype, tolerance), flags = EXACT[0], {**SIZES, **VARIANTS[name], "n_layers": 2}
    model, exact = (small_model(dtype=dtype, plan=None, **flags).to(DEVICE) for _ in range(2))
    fast.prepare(model, fast.Plan())
    model.runner = FastRunner(fast.Plan(), force="flex")
    for told, given in runs_of(model.config).items():
        if "annealing" in given or (told == "documents" and name == "sink"):
            assert_same(step(model, given), step(exact, given), tolerance, told)
    assert set(paths) == {"flex"}


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [(name, *kind) for name in VARIANTS for kind in (EXACT if name in ("sink", "logit-gate", "backbone") else EXACT[:1])],
)
def test_inference_is_the_plain_one(name, dtype, tolerance, paths):
    """Two passes in a scope: the second uses the first one's lane. Cached spans too."""
    model, exact = (small_model(dtype=dtype, plan=plan, **SIZES, **VARIANTS[name]).to(DEVICE) for plan in (fast.Plan(), None))
    tokens = small_tokens(BATCH, TOKENS).to(DEVICE)
    changed = tokens.clone()
    changed[:, 4:9] = 1
    with torch.no_grad():
        wanted = {name: forward(exact, given) for name, given in runs_of(model.config).items()}
    with model.inference():
        for _ in range(2):
            for name, given in runs_of(model.config).items():
                assert_same({"out": forward(model, given)}, {"out": wanted[name]}, tolerance, name)
    assert ("inference" in paths) == (ON_GPU and not model.config.n_registers)
    if model.config.n_registers:
        return
    with model.inference(), exact.inference():
        of_model, of_exact = BlockCache(TOKENS), BlockCache(TOKENS)
        found = model(tokens, cache=of_model)
        assert_same({"out": found}, {"out": exact(tokens, cache=of_exact)}, tolerance, "cache")
        for start in (3, torch.tensor(3, device=DEVICE)):
            of_model.start = of_exact.start = start
            span, plain_span = model(changed[:, 3:10], cache=of_model), exact(changed[:, 3:10], cache=of_exact)
            assert_same({"out": span}, {"out": plain_span}, tolerance, "span")


@pytest.mark.parametrize("shifted", [False, True])
def test_the_last_layer_leaves_out_the_clean_copy_that_nothing_reads(shifted):
    """Where positions are not selected early, as with compiled blocks: outputs and gradients are the plain model's."""
    flags = {"qkv_bias": True, "tie_embeddings": True, "mask_id": 10, "shift_logits": True} if shifted else {"gate": "elementwise"}
    tokens, clean, select = small_tokens(2, 12, seed=1), small_tokens(2, 12, seed=2), torch.tensor([1, 5, 13, 14, 23])
    found = []
    for plan in (None, fast.Plan(compile="blocks"), fast.Plan(compile="blocks", recompute="full")):
        model, widths = small_model(plan=plan, n_sinks=1, block_size=4, **flags), []
        model.blocks[-1].mlp.register_forward_hook(lambda *given, seen=widths: seen.append(given[2].shape[1]))
        outputs = [model(tokens, clean=clean), model(tokens, clean=clean, select=select)]
        sum(out.square().sum() for out in outputs).backward()
        found.append([*outputs, *(weight.grad for weight in model.parameters() if weight.grad is not None)])
        assert max(widths) == (24 if plan is None or shifted else 12)
    for other in found[1:]:
        for mine, wanted in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-10)


# -- half precision ---------------------------------------------------------------------------------------------------------------


def errors_of(models: list, exact, runs: list[dict]) -> list[dict[str, float]]:
    """Each model's relative errors of outputs, of all gradients and of the sinks' gradients, over samples of each forward."""
    totals = [dict.fromkeys(("out", "gradients", "sinks"), 0.0) for _ in models]
    for seed in range(4 if ON_GPU else 2):
        for given in runs:
            wanted = step(exact, given, seed)
            whole = ["out"], [name for name in wanted if name != "out"], [name for name in wanted if name == "sinks"]
            for model, total in zip(models, totals, strict=True):
                with torch.autocast(DEVICE, torch.bfloat16):
                    found = step(model, given, seed)
                for part, names in zip(total, whole, strict=True):
                    if names:
                        one, other = (torch.cat([x[name].double().flatten() for name in names]) for x in (found, wanted))
                        total[part] += float((one - other).square().sum() / other.square().sum())
    return [{part: value**0.5 for part, value in total.items()} for total in totals]


@pytest.mark.parametrize("path", ["default", "flat", "flat-full"] if ON_GPU else ["flat"])
def test_half_precision_is_as_exact_as_the_plain_ones(path, variant, paths):
    """The error against float64 is at most 1.5 times the plain runner's."""
    model = with_runner(path, torch.float32, **variant)
    rounded, exact = (small_model(dtype=torch.float32, plan=None, **SIZES, **variant).to(DEVICE) for _ in range(2))
    runs = runs_of(model.config)
    chosen = [runs[name] for name in (WHOLE if path.startswith("flat") else ("some", "lengths"))]
    ours, theirs = errors_of([model, rounded], exact.double(), chosen)
    for part, error in ours.items():
        assert error <= 1.5 * theirs[part], (part, error, theirs[part])
    if path.startswith("flat"):
        assert set(paths) == ({"flat"} if variant in [VARIANTS[name] for name in FLAT] else {"blocks"})


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_inference_in_half_precision_is_as_exact_as_the_plain_one(dtype, variant):
    models = [small_model(dtype=torch.float32, plan=plan, **SIZES, **variant).to(dtype).to(DEVICE) for plan in (fast.Plan(), None)]
    exact = copy.deepcopy(models[1]).double()
    for name, given in runs_of(exact.config).items():
        with torch.no_grad():
            wanted = forward(exact, given)
            errors = [float((forward(model, given).double() - wanted).norm() / wanted.norm()) for model in models]
        assert errors[0] <= 1.5 * errors[1], (name, errors)


# -- the law itself ---------------------------------------------------------------------------------------------------------------


def other_lane(self, x):
    out, lane = RUN_LANE(self, x)
    return out * 1.01, lane


def other_swiglu(self, x):
    gate, up = self.gate_up(x).chunk(2, dim=-1)
    return self.down(torch.sigmoid(gate) * up)


def other_gate(self, x, mixed):
    return FINISH(self, x, mixed.transpose(-1, -2).contiguous().view(mixed.shape))


RUN_LANE, FINISH = plain.Attention.run_lane, plain.Attention.finish
EDITS = [
    (plain.Attention, "run_lane", other_lane),
    (plain.FeedForward, "forward", other_swiglu),
    (plain.Attention, "finish", other_gate),
    (plain.Norm, "forward", lambda self, x: x * self.weight),
    (plain.DiffusionLM, "first_lane", lambda self, x, ctx: self.sinks[None].to(x) * 1.01),
]


@pytest.mark.skipif(ON_GPU, reason="the same on a CPU")
@pytest.mark.parametrize(("owner", "name", "edit"), EDITS, ids=[name for _, name, _ in EDITS])
def test_an_edit_of_a_formula_breaks_the_law(owner, name, edit, monkeypatch):
    monkeypatch.setattr(owner, name, edit)
    with pytest.raises(AssertionError):
        assert_every_step_is_the_plain_one("flat", torch.float64, 1e-12, "gate-headwise-sink", plain_step)


# -- who is given a fast runner ---------------------------------------------------------------------------------------------------


class Block(plain.Block):
    """A user's subclass."""

    def forward(self, x, sinks, view):
        x, sinks, lane = super().forward(x, sinks, view)
        return 2 * x, sinks, lane


def test_blocks_of_somebody_else_run_plain_and_it_is_said():
    model, tokens = small_model(plan=None, n_sinks=1), small_tokens(2, 7)
    unlike = model(tokens)
    model.blocks[1].__class__ = Block
    said = fast.prepare(model, fast.Plan())
    assert said == ["blocks of class Block: not sinkdlm's own, so the plain runner is used"]
    assert model.runner is run_plain
    assert type(model.blocks[1]) is Block
    assert not torch.equal(model(tokens), unlike)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_plain_and_may_be_prepared_anew(again):
    model, tokens = small_model(n_sinks=1), small_tokens(2, 7)
    assert isinstance(model.runner, FastRunner)
    copied = again(model)
    assert copied.runner is run_plain
    assert copied.scope is None
    wanted = model(tokens)
    assert (copied(tokens) - wanted).abs().max() <= 1e-12
    assert fast.prepare(copied, fast.Plan()) == []
    assert torch.equal(copied(tokens), wanted)
