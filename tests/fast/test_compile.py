import pytest
import torch

from sinkdlm import Recipe, fast
from sinkdlm.diffusion import corrupt, denoising_loss
from sinkdlm.distributed.world import World
from sinkdlm.errors import TrainError
from sinkdlm.fast import runner
from sinkdlm.fast.runner import FastRunner
from sinkdlm.training.choose import Way, settle_way
from small_models import VARIANTS, small_model, small_tokens

# The compiler's own warnings: it instantiates autograd functions, and reads .grad of block inputs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


LAYERS = {"n_layers": 2}  # a first and a later one: a third would take as long and add nothing

# Together they have every value of every flag. The slow suite compiles all variants, by the whole compiler.
FIRST = ("vanilla", "sinks-2-end-zero-gate", "gate-headwise-sink", "register", "logit", "parent")


def fast_first(n, cases):
    """The first n cases; the slow suite has the others."""
    return [*cases[:n], *(pytest.param(*([one] if isinstance(one, str) else one), marks=pytest.mark.slow) for one in cases[n:])]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_and_gradients(model, seed=0, **options):
    tokens = small_tokens(4, 13)
    noisy = corrupt(tokens, torch.arange(4), seed=seed, mask_id=model.config.mask_id)
    model.zero_grad()
    loss = denoising_loss(model, tokens, noisy, denominator=tokens.numel(), **options).total
    loss.backward()
    return loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_compiles_to_the_same(variant, backend, tolerance, path=None):
    model = small_model(dtype=torch.float32, **LAYERS, **variant)
    model.runner = FastRunner(fast.Plan(), force=path)
    expected = loss_and_gradients(model)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    found = loss_and_gradients(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert_equal_up_to(tolerance, found, expected)


def assert_equal_up_to(tolerance, found, expected):
    """Losses and gradients."""
    assert abs(found[0] / expected[0] - 1) <= tolerance
    for name, grad in found[1].items():
        assert (grad - expected[1][name]).norm() <= tolerance * expected[1][name].norm(), name


# Padded rows take every branch that whole ones take but the one for no lengths, which each kind of sink has of its own.
# Variants whose blocks are compiled below, each as one graph, come last.
OTHERS = [name for name in VARIANTS if name not in FIRST]
BROKEN = [
    *((name, True) for name in (*FIRST[2:], *FIRST[:2], *OTHERS)),
    *((name, False) for name in ("vanilla", "sink", "register", "logit")),
]


@pytest.mark.parametrize(("name", "padded"), fast_first(4, BROKEN))
def test_whole_model_has_no_graph_break(name, padded):
    model = small_model(**LAYERS, **VARIANTS[name])
    lengths = {"lengths": torch.tensor([5, 9])} if padded else {}
    explained = torch._dynamo.explain(model)(small_tokens(2, 9), **lengths)
    assert explained.graph_break_count == 0, explained.break_reasons
    assert explained.graph_count == 1


@pytest.mark.parametrize("name", fast_first(2, FIRST))
def test_compiled_blocks_give_the_eager_loss(name):
    assert_compiles_to_the_same(VARIANTS[name], "aot_eager", 1e-6)


def test_compiled_blocks_give_the_eager_loss_as_flat_tokens():
    assert_compiles_to_the_same({"n_sinks": 2, "sink_position": "end"}, "aot_eager", 1e-6, "flat")


def test_an_observer_runs_beside_compiled_blocks():
    model = small_model(dtype=torch.float32, n_sinks=1, **LAYERS)
    tokens = small_tokens(2, 9)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    seen = []
    with torch.no_grad():
        plain = model(tokens)
        observed = model(tokens, observe=lambda layer, *_: seen.append(layer))
    assert seen == [0, 1]
    torch.testing.assert_close(observed, plain)


def test_compiled_blocks_use_the_cached_lane():
    model = small_model(dtype=torch.float32, n_sinks=1, **LAYERS)
    tokens = small_tokens(2, 9)
    with torch.no_grad():
        expected = model(tokens)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    with model.inference():
        for _ in range(3):
            torch.testing.assert_close(model(tokens), expected)


@pytest.mark.slow
def test_a_scope_with_compiled_blocks_and_an_observer_closes():
    """The observed forward is eager, later ones compiled: lanes may differ by rounding, which does not count as an edit."""
    model, tokens = small_model(dtype=torch.float32, n_sinks=1), small_tokens(2, 9)
    for block in model.blocks:
        block.compile(fullgraph=True)
    with model.inference():
        observed = model(tokens, observe=lambda *_: None)
        torch.testing.assert_close(model(tokens), observed)


FLAT = [name for name, flags in VARIANTS.items() if flags.get("sink_kind") != "register"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path"), [*((name, None) for name in VARIANTS), *((name, "flat") for name in FIRST if name in FLAT)]
)
def test_inductor_gives_the_eager_loss(name, path):
    assert_compiles_to_the_same(VARIANTS[name], "inductor", 1e-4, path)


WHOLE = {
    "padded": ({"n_sinks": 2, "sink_position": "end", "gate": "elementwise"}, {"lengths": torch.tensor([13, 9, 4, 11])}),
    "documents": ({"n_sinks": 1, "shift_logits": True}, {"documents": (torch.arange(13) // 5).expand(4, 13)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_blocks_compiled_as_one_give_the_eager_loss(name):
    """Steps with other numbers of masked tokens do not recompile; a forward without gradients stays eager."""
    flags, options = WHOLE[name]
    model = small_model(dtype=torch.float32, n_layers=2, **flags)
    expected = [loss_and_gradients(model, seed, **options) for seed in range(4)]
    with torch.no_grad():
        plain = model(small_tokens(2, 9))
    fast.prepare(model, fast.Plan(compile="whole"))
    graphs, counters = [], torch._dynamo.utils.counters["stats"]
    counters.clear()
    for seed in range(4):
        assert_equal_up_to(1e-4, loss_and_gradients(model, seed, **options), expected[seed])
        graphs.append(counters["unique_graphs"])
    assert graphs == [1] * 4
    with torch.no_grad():
        assert torch.equal(model(small_tokens(2, 9)), plain)


def test_a_whole_is_for_one_process_on_a_cpu():
    world = World(torch.device("cpu"))
    world.size = 2
    with pytest.raises(TrainError, match=r"set train\.compile = 'blocks'"):
        settle_way(Recipe.resolve({"model": {"preset": "nano"}, "train": {"steps": 1, "compile": "whole"}}), world, full_rows=True)


@pytest.mark.slow
@pytest.mark.parametrize("times", ["golden", "independent"])
def test_compiled_corruption_is_the_plain_one(times):
    """The code that a GPU runs for large batches, compiled for the CPU."""
    from sinkdlm import diffusion, noise

    fused = torch.compile(diffusion.mask_rows)
    for batch, length, seed in ((4, 64, 0), (5, 100, 1), (3, 7, 2)):
        tokens, samples = small_tokens(batch, length), torch.arange(batch) + 10**12
        states = [noise.stream_state(seed, stream, tokens.device) for stream in (noise.Stream.TIME, noise.Stream.MASK)]
        maskable = torch.arange(length) > 2
        plain = corrupt(tokens, samples, seed=seed, mask_id=11, times=times, maskable=maskable)
        compiled = fused(tokens, samples, torch.arange(length), maskable, *states, 11, diffusion.LINEAR, times)
        for left, right in zip(plain[:3], compiled[:3], strict=True):
            assert torch.equal(left, right)
        torch.testing.assert_close(plain.weight, compiled.weight, rtol=1e-14, atol=0)


# -- what "auto" means ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "compiled", "flat"),
    [
        ({}, "none", True),
        ({"rows": 2}, "none", True),  # CUDA graphs capture launches
        ({"rows": 2, "train": {"graphs": "off"}}, "blocks", True),
        ({"train": {"compile": "blocks"}}, "blocks", True),
        ({"model": {"gate": "elementwise"}}, "blocks", True),
        ({"model": {"n_sinks": 1, "sink_kind": "register"}}, "blocks", False),
        ({"train": {"precision": "fp8"}}, "none", True),
        ({"rows": 8, "train": {"precision": "fp8", "graphs": "off"}}, "blocks", True),  # more launches, of faster kernels
        ({"rows": 8, "train": {"graphs": "off"}}, "none", True),
        ({"train": {"precision": "fp8"}, "model": {"qkv_bias": True}}, "blocks", True),
        ({"train": {"precision": "float32"}}, "blocks", False),
        ({"train": {"precision": "float32", "compile": "none"}}, "none", False),
        ({"train": {"runner": "plain"}}, "none", False),
        ({"train": {"anneal": 0.1}}, "blocks", True),
        ({"full_rows": False}, "blocks", False),
        ({"alone": False}, "blocks", True),
        ({"kernels": False}, "blocks", False),
        ({"length": 128}, "blocks", False),
    ],
)
def test_a_gpu_compiles_what_its_kernels_leave(changed, compiled, flat, monkeypatch):
    """The choice is made for a GPU that is only pretended."""
    world = World(torch.device("cpu"))
    world.device, world.size = torch.device("cuda"), 1 if changed.get("alone", True) else 2
    monkeypatch.setattr("sinkdlm.training.choose.importlib.util.find_spec", lambda name: name == "triton")
    monkeypatch.setattr(runner, "has_kernels", lambda: changed.get("kernels", True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    train = {"steps": 1, "batch": 64, "micro_batch": changed.get("rows", 16), **changed.get("train", {})}
    model = {"preset": "smdm-472m", **changed.get("model", {"n_sinks": 1})}
    recipe = Recipe.resolve({"model": model, "data": {"length": changed.get("length", 2048)}, "train": train})
    way = settle_way(recipe, world, full_rows=changed.get("full_rows", True))
    assert way == Way(compiled, changed.get("rows", 16), flat, flat and world.alone)
    assert way.frugal == (compiled == "blocks" or flat)
