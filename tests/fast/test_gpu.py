"""What only a GPU can show; skipped elsewhere. test_runner.py and tests/kernels run on both."""

import pytest
import torch
from benchmarks.noise import digest
from torch.nn.functional import scaled_dot_product_attention

from engines import POLICIES, Owner, alone, request_of
from sinkdlm import DiffusionLM, ModelConfig, fast
from sinkdlm.diffusion import Schedule, corrupt, denoising_loss
from sinkdlm.fast.attention import attend_flex, attend_grouped, block_mask
from sinkdlm.fast.functions import attend_flat
from sinkdlm.fast.objective import chunked_nll, mask_compiled
from sinkdlm.kernels.cuda_graph import StepGraphs
from sinkdlm.model.attention import attend, attend_naive
from sinkdlm.model.positions import Rotation
from sinkdlm.model.visibility import Annealing, pair_bits
from sinkdlm.sampling import batch, generate
from sinkdlm.serving.engine import Engine, FairLock
from small_models import VARIANTS, small_model, small_tokens
from visibility_rules import random_rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiles(test):
    return pytest.mark.filterwarnings("ignore")(pytest.mark.usefixtures("fresh_compiler")(test))


def make_inputs(shape, dtype, n_sinks=1):
    """Make q, k, v and the sinks' k, v."""
    batch, tokens, heads, kv_heads, width = shape
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(batch, heads, tokens, width), *[(batch, kv_heads, tokens, width)] * 2, *[(1, kv_heads, n_sinks, width)] * 2]
    return [torch.randn(size, generator=generator, device="cuda").to(dtype).requires_grad_() for size in sizes]


def attend_as_flat(q, k, v, sink_k, sink_v):
    """Attend as a training step does, with sinks behind the tokens, and without rotation."""
    batch, heads, tokens, width = q.shape
    rows = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)], dim=1)
    behind = torch.cat([x[0].transpose(0, 1) for x in (q[:1, :, : sink_k.shape[2]].detach(), sink_k, sink_v)], dim=1)
    flat = torch.cat([rows, behind, rows.new_zeros(16 - len(behind), *rows.shape[1:])])
    still = [
        Rotation(q.new_ones(1, n, 1, width // 2).float(), q.new_zeros(1, n, 1, width // 2).float()) for n in (tokens, len(behind))
    ]
    return attend_flat(flat, *still, batch, heads)[: batch * tokens].unflatten(0, (batch, tokens)).transpose(1, 2)


@pytest.mark.parametrize(("shape", "n_sinks"), [((2, 2048, 10, 10, 128), 1), ((2, 1000, 14, 2, 64), 3)])
def test_fast_attention_is_as_exact_as_the_plain_kernel(shape, n_sinks):
    """Errors of output and gradients against float64 stay near those of attention without a sink."""
    inputs = make_inputs(shape, torch.bfloat16, n_sinks)
    grad = torch.randn(inputs[0].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()

    def errors(form, used):
        precise = [x.detach().double().requires_grad_() for x in used]
        results = []
        for call, given in ((form, used), (lambda *x: attend_naive(*x)[0], precise)):
            out = call(*given)
            results.append([out.detach(), *torch.autograd.grad(out, given, grad.to(out))])
        return [float((x.double() - right).norm() / right.norm()) for x, right in zip(*results, strict=True)]

    plain = errors(lambda *x: scaled_dot_product_attention(*x, enable_gqa=True), inputs[:3])
    for form in (attend_grouped, attend_as_flat):
        for error, bound in zip(errors(form, inputs), [*plain, max(plain), max(plain)], strict=True):
            assert error <= 1.5 * bound, (form, error, plain)


def test_noise_is_the_same_on_every_device():
    assert digest("cuda") == digest("cpu")


@compiles
@pytest.mark.parametrize("block_size", [None, 32])
def test_compiled_corruption_is_the_plain_one(block_size):
    tokens, samples = small_tokens(64, 1024).cuda(), torch.arange(64).cuda() + 10**12
    how = {"seed": 0, "mask_id": 11, "block_size": block_size}
    plain, compiled = (corrupt(tokens, samples, mask=mask, **how) for mask in (None, mask_compiled))
    assert all(torch.equal(one, other) for one, other in zip(plain[:3], compiled[:3], strict=True))
    torch.testing.assert_close(plain.weight, compiled.weight, rtol=1e-14, atol=0)


def test_cached_lane_is_bit_equal(variant):
    model, tokens = small_model(dtype=torch.bfloat16, **variant).cuda(), small_tokens(4, 33).cuda()
    lengths = torch.tensor([33, 4, 1, 20]).cuda()
    with torch.no_grad():
        plain, padded = model(tokens), model(tokens, lengths=lengths)
    with model.inference():
        for _ in range(2):
            assert torch.equal(model(tokens), plain)
            assert torch.equal(model(tokens, lengths=lengths), padded)


def test_a_gpu_computes_what_a_cpu_computes(variant):
    """float32, with padding, loss and gradients."""
    model = small_model(dtype=torch.float32, **variant)
    tokens, lengths = small_tokens(4, 33), torch.tensor([33, 4, 1, 20])
    inside = torch.arange(33) < lengths[:, None]
    results = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        noisy = corrupt(tokens.to(device), torch.arange(4), seed=0, mask_id=model.config.mask_id, maskable=inside.to(device))
        given = {"lengths": lengths.to(device), "nll": chunked_nll}
        loss = denoising_loss(model, tokens.to(device), noisy, denominator=10.0, **given).total
        loss.backward()
        results.append([loss.detach().cpu(), *(weight.grad.cpu().clone() for weight in model.parameters())])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert (on_cpu - on_gpu).norm() <= 2e-3 * on_cpu.norm() + 1e-6


@compiles
@pytest.mark.parametrize("name", ["sinks-2-end-zero-gate", "logit"])
def test_inductor_gives_the_eager_loss_in_bf16(name):
    model = small_model(dtype=torch.bfloat16, d_model=96, n_heads=6, **VARIANTS[name]).cuda()
    tokens = small_tokens(4, 64).cuda()
    noisy = corrupt(tokens, torch.arange(4), seed=0, mask_id=model.config.mask_id)
    eager = denoising_loss(model, tokens, noisy, denominator=tokens.numel()).total
    fast.compile_blocks(model)
    compiled = denoising_loss(model, tokens, noisy, denominator=tokens.numel()).total
    compiled.backward()
    assert abs(compiled.item() / eager.item() - 1) < 0.02
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())


# -- block diffusion -----------------------------------------------------------------------------------------------------------


def test_noise_of_blocks_is_the_same_on_every_device():
    tokens, samples = small_tokens(16, 200), torch.arange(16) + 10**12
    documents, maskable = (torch.arange(200) // 70).expand(16, -1), torch.rand(16, 200) < 0.7
    for given in ({}, {"documents": documents}, {"maskable": maskable}, {"times": "independent"}):
        found = []
        for device in ("cpu", "cuda"):
            own = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
            found.append(corrupt(tokens.to(device), samples, seed=3, mask_id=11, block_size=32, **own))
        assert torch.equal(found[0].masked, found[1].masked.cpu())
        torch.testing.assert_close(found[0].t, found[1].t.cpu(), rtol=1e-15, atol=0)


@compiles
@pytest.mark.parametrize("name", ["vanilla", "sink", "sinks-4", "sink-zero", "gate", "logit-gate", "parent"])
def test_blocks_by_flex_attention_are_the_plain_ones(name):
    """Outputs and gradients in float32, heads of 16, across FlexAttention's blocks of 128; with packed documents."""
    flags = {**VARIANTS[name], "d_model": 96, "n_heads": 6, "block_size": 24}
    fast_model, plain = small_model(dtype=torch.float32, **flags).cuda(), small_model(dtype=torch.float32, plan=None, **flags)
    tokens = small_tokens(2, 300)
    noisy = corrupt(tokens, torch.arange(2), seed=0, mask_id=plain.config.mask_id, block_size=24)
    for documents in (None, (torch.arange(300) // 110).expand(2, -1)):
        results = []
        for model, device in ((plain.double(), "cpu"), (fast_model, "cuda")):
            model.zero_grad()
            given = noisy._replace(**{name: value.to(device) for name, value in noisy._asdict().items()})
            packed = None if documents is None else documents.to(device)
            loss = denoising_loss(model, tokens.to(device), given, denominator=10.0, documents=packed).total
            loss.backward()
            grads = [w.grad for w in model.parameters() if w.grad is not None]
            results.append([loss.detach().cpu().double(), *(grad.cpu().double() for grad in grads)])
        for exact, found in zip(*results, strict=True):
            assert (exact - found).norm() <= 2e-3 * exact.norm() + 1e-6


@pytest.mark.parametrize("name", ["vanilla", "sink", "logit", "parent"])
def test_the_exact_cache_writes_the_same_on_a_gpu(name):
    """float64: tokens and steps, prompts of several lengths in one batch."""
    model = small_model(**VARIANTS[name], block_size=4).cuda()
    given = {"prompt": [[1, 2, 3, 4, 5, 6], [], [7]], "mask_id": model.config.mask_id, "length": 19, "temperature": 1.0}
    with model.inference():
        found = [generate(model.denoiser(), **given, cache=cache).rows for cache in ("none", "exact")]
    assert found[0] == found[1]


# -- documents and annealing ----------------------------------------------------------------------------------------------------


def attended(inputs, grad, rule, form):
    """Return output and gradients; four inputs are q, k, v and a sink logit."""
    batch, n_sinks = inputs[0].shape[0], 0 if len(inputs) == 4 else inputs[3].shape[2]
    visible = block_mask(rule, batch, n_sinks) if form is attend_flex else rule.dense()
    named = {"sink_logit": inputs[3]} if len(inputs) == 4 else {"sink_k": inputs[3], "sink_v": inputs[4]}
    out = form(*inputs[:3], **named, visible=visible)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@compiles
@pytest.mark.parametrize(
    ("shape", "share", "has_logit", "dtype", "floor"),
    [
        ((2, 1000, 14, 2, 64), None, False, torch.bfloat16, 2e-3),
        ((2, 1000, 14, 2, 64), 0.3, True, torch.bfloat16, 2e-3),
        ((2, 1024, 4, 4, 128), 0.0, False, torch.bfloat16, 2e-3),
        ((2, 1000, 14, 2, 64), 0.3, False, torch.float32, 5e-6),
        ((3, 33, 6, 2, 16), 0.3, True, torch.float32, 5e-6),
    ],
)
def test_flex_is_as_exact_as_the_dense_mask(dtype, floor, shape, share, has_logit):
    inputs = make_inputs(shape, dtype)
    if has_logit:
        inputs = [*inputs[:3], torch.linspace(-2, 3, shape[2], device="cuda").requires_grad_()]
    grad = torch.randn(inputs[0].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(dtype)
    rule = random_rule(shape[0], shape[1], share, padded=True, device="cuda")
    precise = [x.detach().double().requires_grad_() for x in inputs]
    exact = attended(precise, grad.double(), rule, lambda *x, **given: attend_naive(*x, **given)[0])
    masked = attended(inputs, grad, rule, attend)
    for i, (ours, theirs, right) in enumerate(zip(attended(inputs, grad, rule, attend_flex), masked, exact, strict=True)):
        errors = [float((x.double() - right).norm() / right.norm()) for x in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + floor, (i, errors)


def options(batch, n_tokens, step=0):
    generator = torch.Generator().manual_seed(step)
    ids = (torch.rand(batch, n_tokens, generator=generator) < 0.01).cumsum(1).cuda()
    annealing = Annealing(0.1 + 0.2 * step, step)
    given = {"documents": {"documents": ids}, "annealing": {"annealing": annealing}}
    return {**given, "both": given["documents"] | given["annealing"]}


@compiles
@pytest.mark.parametrize(
    ("name", "given", "dtype", "tolerance"),
    [
        ("sink", "annealing", torch.bfloat16, 0.02),
        ("sinks-2-end-zero-gate", "documents", torch.bfloat16, 0.02),
        ("logit", "both", torch.float32, 1e-3),
    ],
)
def test_compiled_blocks_take_documents_and_annealing(dtype, tolerance, name, given):
    flags = {"d_model": 96, "n_heads": 6, **VARIANTS[name]}
    plan = fast.Plan(compile="blocks")
    model, masked = (small_model(dtype=dtype, attention=form, plan=plan, **flags).cuda() for form in ("flex", "naive"))
    fast.compile_blocks(model)
    tokens = small_tokens(4, 256).cuda()
    for step in range(3):
        noisy = corrupt(tokens, torch.arange(4) + 4 * step, seed=0, mask_id=model.config.mask_id)
        given_now = options(4, 256, step)[given]
        compiled, expected = (
            denoising_loss(m, tokens, noisy, denominator=tokens.numel(), **given_now).total for m in (model, masked)
        )
        compiled.backward()
        assert abs(compiled.item() / expected.item() - 1) <= tolerance
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # new documents, shares and keys are data


def peak_growth(call):
    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@compiles
def test_flex_holds_no_tokens_by_tokens_tensor():
    tokens, share = 4096, 0.3
    inputs = make_inputs((1, tokens, 2, 2, 16), torch.bfloat16)
    grad = torch.ones_like(inputs[0])
    rule = random_rule(1, tokens, share, device="cuda")
    assert peak_growth(lambda: attended(inputs, grad, rule, attend_flex)) < tokens * tokens // 2
    assert peak_growth(lambda: attended(inputs, grad, rule, attend)) > tokens * tokens
    model = small_model(dtype=torch.bfloat16, d_model=96, n_heads=6, n_sinks=1).cuda()
    given = options(1, tokens)["both"]
    with torch.no_grad():
        assert peak_growth(lambda: model(small_tokens(1, tokens).cuda(), **given)) < tokens * tokens


@compiles
def test_pair_bits_are_the_same_in_a_compiled_kernel():
    words = torch.randint(-(2**31), 2**31, (2, 512), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    expected = pair_bits(words[0][:, None], words[1])
    assert torch.equal(torch.compile(pair_bits)(words[0].cuda()[:, None], words[1].cuda()).cpu(), expected)
    for share in (0.0, 0.3):
        assert torch.equal(random_rule(2, 300, share, device="cuda").dense().cpu(), random_rule(2, 300, share).dense())


@compiles
@pytest.mark.parametrize("compiled", [False, True])
def test_a_sharded_model_on_one_gpu_trains_as_a_plain_one(tmp_path, compiled):
    """One NCCL rank: blocks are gathered in bf16, gradients reduced, the state saved from a copy and loaded."""
    import torch.distributed as dist

    from sinkdlm import Recipe
    from sinkdlm.distributed.world import World
    from sinkdlm.planning.formulas import Layout
    from sinkdlm.training.optimizer import Optimizer
    from sinkdlm.training.state import States
    from sinkdlm.training.weights import Weights

    device = torch.device("cuda:0")
    train = Recipe.resolve({"model": {"preset": "nano", "n_sinks": 1}, "train": {"steps": 1}}).train
    config = ModelConfig.preset("smdm-6m", n_sinks=1)
    tokens = torch.randint(0, config.vocab_size, (4, 256), generator=torch.Generator().manual_seed(0)).to(device)
    noisy = corrupt(tokens, torch.arange(4, device=device), seed=0, mask_id=config.mask_id, schedule=Schedule())
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = {}
        for layout in (None, Layout(1, 1)):
            model = DiffusionLM(config)
            fast.prepare(model, fast.Plan(compile="blocks" if compiled else "none"))
            weights = Weights(model, World(device), dtype=torch.float32, layout=layout, travels_as=torch.bfloat16)
            if compiled:
                fast.compile_blocks(model)
            optimizer = Optimizer(weights.local, train)
            losses = []
            for _ in range(5):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = denoising_loss(weights.model, tokens, noisy, denominator=1024.0)
                weights.before_backward(last=True)
                loss.total.backward()
                weights.take_gradients()
                optimizer.step(1e-3)
                weights.clear_gradients()
                losses.append(float(loss.total.detach()))
            found[layout] = losses
        assert found[None][-1] < found[None][0]
        assert found[Layout(1, 1)] == pytest.approx(found[None], rel=1e-4)
        states = States(tmp_path, keep=1, warn=print, world=World(device))
        held = {name: weights.spread(name, part) for name, part in weights.local.items()}
        assert states.save_behind(5, held, {"step": 5})
        states.wait()
        expected = {name: part.clone() for name, part in weights.local.items()}
        with torch.no_grad():
            for part in weights.local.values():
                part.zero_()
        assert states.load(held)["step"] == 5
        assert all(torch.equal(expected[name], part) for name, part in weights.local.items())
    finally:
        dist.destroy_process_group()


@compiles
@pytest.mark.parametrize(("recompute", "documents"), [("selective", True), ("full", False)])
def test_recomputation_in_compiled_blocks_changes_gradients_by_rounding_alone(recompute, documents):
    config = ModelConfig.preset("smdm-6m", n_sinks=1)
    tokens = torch.randint(0, config.vocab_size, (2, 256), generator=torch.Generator().manual_seed(0)).cuda()
    ids = (torch.arange(256).cuda() // 100).expand(2, -1) if documents else None
    grads = []
    for how in ("none", recompute):
        torch._dynamo.reset()
        model = DiffusionLM(config)
        fast.prepare(model, fast.Plan(recompute=how, compile="blocks"))
        fast.compile_blocks(model.cuda())
        with torch.autocast("cuda", torch.bfloat16):
            out = model(tokens, documents=ids)
        out.float().square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 10
    for plain, again in zip(*grads, strict=True):
        assert (plain - again).norm() <= 1e-2 * plain.norm() + 1e-6


SAMPLED = [
    {"config": "smdm-greedy", "steps": 30},
    {"config": "llada", "block": 8, "temperature": 0.9},
    {"config": "fast", "block": 8, "threshold": 0.3},
    {"eos_id": 3, "block": 6, "temperature": 1.0},
    {"guidance": 0.8, "steps": 20},
    {"order": "ancestral", "remask": "rescale", "steps": 30, "temperature": 1.0},
]


@pytest.mark.parametrize("options", SAMPLED)
def test_a_gpu_samples_what_a_cpu_samples(options):
    """Shapes repeat more than twice, so steps are captured and replayed. In float64, rounding cannot change a token."""
    model = small_model(n_sinks=1)
    prompt = small_tokens(5, 4)
    with model.inference():
        expected = generate(model.denoiser([5]), prompt=prompt, length=40, mask_id=11, **options)
    model = model.cuda()
    with model.inference():
        found = generate(model.denoiser([5]), prompt=prompt.cuda(), length=40, mask_id=11, **options)
    assert not (found.tokens[:, 4:] == 5).any()
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert found.row_steps == expected.row_steps


@pytest.mark.parametrize("options", SAMPLED[1:4])
def test_captured_steps_sample_what_launched_ones_sample(options, monkeypatch):
    """With Triton kernels, which do not take float64."""
    model, prompt = small_model(dtype=torch.float32, n_sinks=1).cuda(), small_tokens(5, 4).cuda()
    captured, capture, found = [], StepGraphs._capture, []
    monkeypatch.setattr(StepGraphs, "_capture", lambda self, run: captured.append(1) or capture(self, run))
    for on in (True, False):
        monkeypatch.setattr(batch, "can_capture", lambda device, on=on: on)
        captured.clear()
        with model.inference():
            found.append(generate(model.denoiser(), prompt=prompt, length=40, mask_id=11, **options))
        assert bool(captured) == on
    assert torch.equal(found[0].tokens, found[1].tokens)


def test_an_observer_changes_rounding_alone_and_sees_what_a_cpu_sees(variant):
    """An observed forward runs plain, any other by kernels."""
    from sinkdlm.analysis.capture import Watched

    model, tokens = small_model(dtype=torch.float32, **variant), small_tokens(3, 33)
    tokens[:, 10:20] = model.config.mask_id
    lengths, where = torch.tensor([33, 20, 4]), torch.tensor([[10, 12], [11, 12], [1, 2]])
    on_host = Watched(model)
    with model.inference():
        on_host(tokens, lengths=lengths)
    model = model.cuda()
    with model.inference():
        watched = Watched(model)
        for given in ({}, {"lengths": lengths.cuda(), "where": where.cuda()}):
            plain = model.denoiser()(tokens.cuda(), **given)
            torch.testing.assert_close(watched(tokens.cuda(), **given), plain, rtol=1e-4, atol=1e-4)
        watched(tokens.cuda(), lengths=lengths.cuda())
    for here, there in zip(watched.last, on_host.last, strict=True):
        for name in ("received", "sink_received", "entropy", "value_norm", "update_ratio", "output_norm"):
            assert here[name].shape == there[name].shape
            assert abs(here[name] - there[name]).max(initial=0) <= 1e-4 * (1 + abs(there[name]).max(initial=0)), name


def test_engines_that_share_a_gpu_write_what_requests_write_alone():
    """float32, one row per shape; each engine captures CUDA graphs while the other waits."""
    models = [small_model(seed=seed, dtype=torch.float32, n_sinks=1).cuda() for seed in (1, 2)]
    requests = [request_of(name, number, n_open=20) for number, name in enumerate(POLICIES)]
    lock = FairLock()
    engines = [Engine(model, deterministic=True, lock=lock) for model in models]
    owners = [[Owner([request]) for request in requests] for _ in engines]
    for engine, asking in zip(engines, owners, strict=True):
        for owner in asking:
            engine.submit(owner.ticket)
    written = [[owner.tokens() for owner in asking] for asking in owners]
    for model, asking, texts in zip(models, owners, written, strict=True):
        for owner, request, text in zip(asking, requests, texts, strict=True):
            row = alone(model, owner.as_written(request), deterministic=True, device="cuda").rows[0]
            assert text == [row[request.canvas.index(request.mask_id) :]]
    assert all(engine.close(60) for engine in engines)


@compiles
def test_a_run_on_a_gpu_that_is_known_says_its_plan(tmp_path):
    from benchmarks.kills import write_set

    from runs import run
    from sinkdlm import Recipe
    from sinkdlm.planning.formulas import find_chip

    data = {"sets": {str(write_set(tmp_path / "data")): 1.0}, "length": 64}
    given = {"steps": 1, "batch": 2}
    recipe = Recipe.resolve({"model": {"preset": "smdm-6m"}, "data": data, "train": given, "eval": {"every": 0}})
    _, said = run(recipe, tmp_path / "run", device="cuda")
    known = find_chip(torch.cuda.get_device_name()) is not None
    assert any(line.startswith("plan: ") for line in said) == known


# -- float8 ---------------------------------------------------------------------------------------------------------------------


def needs_float8(test):
    has_it = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return pytest.mark.skipif(not has_it, reason="needs a GPU with float8 matmuls")(test)


@needs_float8
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "weight_dtype"),
    [(1025, 256, 768, torch.float32), (4096, 320, 1280, torch.bfloat16), (7, 16, 64, torch.float32)],
)
def test_float8_matmuls_are_those_of_a_cpu_and_near_the_exact_ones(tokens, inputs, outputs, weight_dtype):
    from sinkdlm.fast.float8_training import matmul, swiglu_mlp

    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(1, tokens, size, generator=generator).bfloat16() for size in (inputs, inputs))
    weight, down = (
        (torch.randn(shape, generator=generator) / 8).to(weight_dtype) for shape in ((2 * outputs, inputs), (inputs, outputs))
    )
    results = []
    for device, dtype in (("cpu", None), ("cuda", None), ("cuda", torch.float64)):
        leaves = [one.to(device, dtype or one.dtype).requires_grad_() for one in (x, weight, down)]
        if dtype is None:
            narrow = matmul(leaves[0], leaves[1], torch.bfloat16)
            out = swiglu_mlp(*leaves, torch.bfloat16)
        else:
            narrow = leaves[0] @ leaves[1].mT
            gate, up = narrow.chunk(2, -1)
            out = (torch.nn.functional.silu(gate) * up) @ leaves[2].mT
        grads = torch.autograd.grad(out + narrow[..., :inputs], leaves, grad.to(device, dtype or grad.dtype))
        results.append([one.detach().double().cpu() for one in (narrow, out, *grads)])
    for on_cpu, on_gpu, exact in zip(*results, strict=True):
        assert (on_gpu - on_cpu).norm() <= 0.05 * on_cpu.norm()  # sums have fewer bits, and ties may round the other way
        assert 1e-3 * exact.norm() < (on_gpu - exact).norm() <= 0.15 * exact.norm()


@needs_float8
@compiles
@pytest.mark.parametrize(
    ("name", "recompute", "length"), [("sink", "none", 512), ("sinks-2-end-zero-gate", "selective", 512), ("parent", "none", 501)]
)
def test_compiled_blocks_in_float8_are_the_eager_ones_and_near_bf16(name, recompute, length):
    """Rows on the flat path, and shorter rows that are not."""
    flags = {key: value for key, value in VARIANTS[name].items() if key != "mask_id"}
    config = ModelConfig.preset("smdm-6m", **flags)
    tokens = torch.randint(0, config.vocab_size - 1, (3, length), generator=torch.Generator().manual_seed(0)).cuda()
    noisy = corrupt(tokens, torch.arange(3), seed=0, mask_id=config.mask_id)
    found = {}
    for form in ("bf16", "eager", "compiled"):
        torch._dynamo.reset()
        model = DiffusionLM(config)
        compile = "none" if form == "eager" else "blocks"
        fast.prepare(model, fast.Plan(float8=form != "bf16", recompute=recompute, compile=compile))
        model.cuda()
        if form != "eager":
            fast.compile_blocks(model)
        with torch.autocast("cuda", torch.bfloat16):
            loss = denoising_loss(model, tokens, noisy, denominator=float(tokens.numel()), nll=chunked_nll).total
        loss.backward()
        found[form] = [loss.detach(), *(p.grad for p in model.parameters())]
    assert found["eager"][0] != found["bf16"][0]
    for form, of_loss, of_gradient in (("eager", 3e-3, 0.2), ("bf16", 1e-2, 0.3)):
        assert found["compiled"][0].item() == pytest.approx(found[form][0].item(), rel=of_loss)
        whole, other = (torch.cat([one.flatten() for one in found[which][1:]]) for which in ("compiled", form))
        assert (whole - other).norm() <= of_gradient * other.norm()


@needs_float8
@pytest.mark.filterwarnings("ignore")
def test_a_run_in_float8_learns_as_one_in_bf16(tmp_path):
    from benchmarks.kills import write_set

    from runs import metrics, run
    from sinkdlm import Recipe

    data = {"sets": {str(write_set(tmp_path / "data")): 1.0}, "length": 64}
    model = {"preset": "smdm-6m", "n_sinks": 1, "vocab_size": 64, "mask_id": 64}
    losses = {}
    for precision in ("bf16", "fp8"):
        train = {"steps": 20, "batch": 16, "lr": 1e-3, "precision": precision}
        recipe = Recipe.resolve({"model": model, "data": data, "train": train, "eval": {"every": 10, "draws": 32}})
        run(recipe, tmp_path / precision, device="cuda")
        losses[precision] = [line["loss"] for line in metrics(tmp_path / precision, "validation")]
    assert losses["fp8"] != losses["bf16"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.02)
