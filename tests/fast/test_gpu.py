"""What only a GPU can show. Skipped elsewhere; benchmarks/results/ holds records of the same measurements."""

import pytest
import torch
from benchmarks.attention import FORMS, make_inputs, relative_errors
from benchmarks.noise import digest

from engines import POLICIES, Owner, alone, request_of
from sinkdlm import DiffusionLM, ModelConfig
from sinkdlm.diffusion import Schedule, corrupt, denoising_loss
from sinkdlm.model.attention import attend
from sinkdlm.model.visibility import Annealing, pair_bits
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


@pytest.mark.parametrize("shape", [(2, 2048, 10, 10, 128), (2, 1000, 14, 2, 64)])
def test_fused_forms_are_as_exact_as_the_plain_kernel(shape):
    inputs = make_inputs(shape, "cuda", torch.bfloat16)
    grad = torch.randn(inputs[0].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    plain = relative_errors("plain", inputs, grad)
    worst = max(plain.values())
    for form in FORMS["cuda"]:
        for name, error in relative_errors(form, inputs, grad).items():
            assert error <= 1.5 * plain.get(name, worst), (form, name, error, plain)


def test_noise_is_the_same_on_every_device():
    assert digest("cuda") == digest("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_lane_is_bit_equal(variant, dtype):
    model, tokens = small_model(dtype=dtype, **variant).cuda(), small_tokens(4, 33).cuda()
    lengths = torch.tensor([33, 4, 1, 20]).cuda()
    with torch.no_grad():
        plain, padded = model(tokens), model(tokens, lengths=lengths)
    with model.inference():
        for _ in range(2):
            assert torch.equal(model(tokens), plain)
            assert torch.equal(model(tokens, lengths=lengths), padded)


@pytest.mark.parametrize("form", ["auto", "naive", "merge"])
def test_a_gpu_computes_what_a_cpu_computes(variant, form):
    """float32, with padding, loss and gradients."""
    model = small_model(dtype=torch.float32, attention=form, **variant)
    tokens, lengths = small_tokens(4, 33), torch.tensor([33, 4, 1, 20])
    inside = torch.arange(33) < lengths[:, None]
    results = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        noisy = corrupt(tokens.to(device), torch.arange(4), seed=0, mask_id=model.config.mask_id, maskable=inside.to(device))
        loss = denoising_loss(model, tokens.to(device), noisy, denominator=10.0, lengths=lengths.to(device)).total
        loss.backward()
        results.append([loss.detach().cpu(), *(weight.grad.cpu().clone() for weight in model.parameters())])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert (on_cpu - on_gpu).norm() <= 2e-3 * on_cpu.norm() + 1e-6


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiles(test):
    return pytest.mark.filterwarnings("ignore")(pytest.mark.usefixtures("fresh_compiler")(test))


@compiles
@pytest.mark.parametrize("name", ["vanilla", "sink", "sinks-2-end-zero-gate", "logit"])
def test_inductor_gives_the_eager_loss_in_bf16(name):
    model = small_model(dtype=torch.bfloat16, d_model=96, n_heads=6, **VARIANTS[name]).cuda()
    tokens = small_tokens(4, 64).cuda()
    noisy = corrupt(tokens, torch.arange(4), seed=0, mask_id=model.config.mask_id)
    eager = denoising_loss(model, tokens, noisy, denominator=tokens.numel()).total
    for block in model.blocks:
        block.compile(fullgraph=True)
    compiled = denoising_loss(model, tokens, noisy, denominator=tokens.numel()).total
    compiled.backward()
    assert abs(compiled.item() / eager.item() - 1) < 0.02
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())


# -- documents and openings ---------------------------------------------------------------------------------------------------


def attended(inputs, grad, rule, form):
    """Output and gradients; four inputs are q, k, v and a sink logit."""
    batch, n_sinks = inputs[0].shape[0], 0 if len(inputs) == 4 else inputs[3].shape[2]
    visible = rule.blocks(batch, n_sinks) if form == "flex" else rule.dense()
    named = {"sink_logit": inputs[3]} if len(inputs) == 4 else {"sink_k": inputs[3], "sink_v": inputs[4]}
    out = attend(*inputs[:3], **named, visible=visible, form=form)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@compiles
@pytest.mark.parametrize(
    ("shape", "share", "has_logit"),
    [
        ((2, 1000, 14, 2, 64), None, False),
        ((2, 1000, 14, 2, 64), 0.3, False),
        ((2, 1000, 14, 2, 64), 0.3, True),
        ((2, 1024, 4, 4, 128), 0.0, False),
        ((2, 1024, 4, 4, 128), None, True),
        ((3, 33, 6, 2, 16), 0.3, False),
    ],
)
@pytest.mark.parametrize(("dtype", "floor"), [(torch.bfloat16, 2e-3), (torch.float32, 5e-6)])
def test_flex_is_as_exact_as_the_dense_mask(dtype, floor, shape, share, has_logit):
    inputs = make_inputs(shape, "cuda", dtype)
    if has_logit:
        inputs = [*inputs[:3], torch.linspace(-2, 3, shape[2], device="cuda").requires_grad_()]
    grad = torch.randn(inputs[0].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(dtype)
    rule = random_rule(shape[0], shape[1], share, padded=True, device="cuda")
    exact = attended([x.detach().double().requires_grad_() for x in inputs], grad.double(), rule, "naive")
    masked = attended(inputs, grad, rule, "merge:efficient" if has_logit else "append")
    for i, (ours, theirs, right) in enumerate(zip(attended(inputs, grad, rule, "flex"), masked, exact, strict=True)):
        errors = [float((x.double() - right).norm() / right.norm()) for x in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + floor, (i, errors)


def options(batch, n_tokens, step=0, lengths=None):
    generator = torch.Generator().manual_seed(step)
    ids = (torch.rand(batch, n_tokens, generator=generator) < 0.01).cumsum(1).cuda()
    opening = Annealing(0.1 + 0.2 * step, step)
    inside = {} if lengths is None else {"lengths": lengths}
    return {
        "documents": {"documents": ids, **inside},
        "opening": {"opening": opening},
        "both": {"documents": ids, "opening": opening},
    }


@compiles
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("vanilla", "both"),
        ("sinks-4", "documents"),
        ("sinks-2-end-zero-gate", "documents"),
        ("logit", "both"),
        ("parent", "documents"),
        ("register-2-end-zero", "opening"),
    ],
)
def test_a_model_with_flex_is_the_model_with_a_mask(name, given):
    """float32, loss and gradients, without compiled blocks: attention alone is compiled."""
    tokens, lengths = small_tokens(3, 300).cuda(), torch.tensor([300, 40, 257]).cuda()
    inside = torch.arange(300, device="cuda") < lengths[:, None]
    results = []
    for form in ("naive", "auto"):
        model = small_model(dtype=torch.float32, attention=form, d_model=96, n_heads=6, **VARIANTS[name]).cuda()
        assert model.attention_choice(documents=True).form == ("naive" if form == "naive" else "flex")
        noisy = corrupt(tokens, torch.arange(3), seed=0, mask_id=model.config.mask_id, maskable=inside)
        loss = denoising_loss(model, tokens, noisy, denominator=10.0, **options(3, 300, lengths=lengths)[given]).total
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    for masked, fused in zip(*results, strict=True):
        assert (masked - fused).norm() <= 2e-3 * masked.norm() + 1e-6


@compiles
@pytest.mark.parametrize(("name", "given"), [("sink", "opening"), ("sinks-2-end-zero-gate", "documents"), ("logit", "both")])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float32, 1e-3)])
def test_compiled_blocks_take_documents_and_openings(dtype, tolerance, name, given):
    flags = {"d_model": 96, "n_heads": 6, **VARIANTS[name]}
    model, masked = (small_model(dtype=dtype, attention=form, **flags).cuda() for form in ("flex", "naive"))
    for block in model.blocks:
        block.compile(fullgraph=True)
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
@pytest.mark.parametrize("share", [None, 0.3])
def test_flex_holds_no_tokens_by_tokens_tensor(share):
    tokens = 4096
    inputs = make_inputs((1, tokens, 2, 2, 16), "cuda", torch.bfloat16)
    grad = torch.ones_like(inputs[0])
    rule = random_rule(1, tokens, share, device="cuda")
    assert peak_growth(lambda: attended(inputs, grad, rule, "flex")) < tokens * tokens // 2
    assert peak_growth(lambda: attended(inputs, grad, rule, "append")) > tokens * tokens
    model = small_model(dtype=torch.bfloat16, d_model=96, n_heads=6, n_sinks=1).cuda()
    given = options(1, tokens)["documents" if share is None else "both"]
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
    """One rank of NCCL: gathered in bf16 block by block, its gradients reduced, its state copied aside and read back."""
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
            if compiled:
                for block in model.blocks:
                    block.forward = torch.compile(block.forward)
            weights = Weights(model, World(device), dtype=torch.float32, layout=layout, travels_as=torch.bfloat16)
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
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("documents", [False, True])
def test_recomputation_in_compiled_blocks_changes_gradients_by_rounding_alone(recompute, documents):
    config = ModelConfig.preset("smdm-6m", n_sinks=1)
    tokens = torch.randint(0, config.vocab_size, (2, 256), generator=torch.Generator().manual_seed(0)).cuda()
    ids = (torch.arange(256).cuda() // 100).expand(2, -1) if documents else None
    grads = []
    for how in ("none", recompute):
        torch._dynamo.reset()
        model = DiffusionLM(config).cuda()
        model.recompute = how
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
        with torch.autocast("cuda", torch.bfloat16):
            out = model(tokens, documents=ids)
        out.float().square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 10
    for plain, again in zip(*grads, strict=True):
        assert (plain - again).norm() <= 1e-2 * plain.norm() + 1e-6


@pytest.mark.parametrize("options", [
    {"config": "smdm-greedy", "steps": 30}, {"config": "llada", "block": 8, "temperature": 0.9},
    {"config": "smdm-origin", "steps": 64}, {"threshold": 0.3, "temperature": 0.5},
    {"config": "fast", "block": 8, "threshold": 0.3}, {"eos_id": 3, "block": 6, "temperature": 1.0},
    {"guidance": 0.8, "steps": 20}, {"order": "ancestral", "remask": "rescale", "steps": 30, "temperature": 1.0},
])  # fmt: skip
def test_a_gpu_samples_what_a_cpu_samples(options):
    """Recorded and replayed steps included: shapes repeat more than twice. Float64, so that rounding is no excuse."""
    from sinkdlm.sampling import generate

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_looking_on_changes_no_bit_and_sees_what_a_cpu_sees(variant, dtype):
    """On the path of fused kernels too, where sinks lie in front of the keys."""
    from sinkdlm.analysis.capture import Watched

    model, tokens = small_model(dtype=dtype, **variant), small_tokens(3, 33)
    tokens[:, 10:20] = model.config.mask_id
    lengths, where = torch.tensor([33, 20, 4]), torch.tensor([[10, 12], [11, 12], [1, 2]])
    on_host = Watched(model)
    with model.inference():
        on_host(tokens, lengths=lengths)
    model = model.cuda()
    with model.inference():
        watched = Watched(model)
        for given in ({}, {"lengths": lengths.cuda()}, {"lengths": lengths.cuda(), "where": where.cuda()}):
            assert torch.equal(watched(tokens.cuda(), **given), model.denoiser()(tokens.cuda(), **given))
        watched(tokens.cuda(), lengths=lengths.cuda())
    tolerance = 0.1 if dtype is torch.bfloat16 else 1e-4
    for here, there in zip(watched.last, on_host.last, strict=True):
        for name in ("received", "sink_received", "entropy", "value_norm", "update_ratio", "output_norm"):
            assert here[name].shape == there[name].shape
            assert abs(here[name] - there[name]).max(initial=0) <= tolerance * (1 + abs(there[name]).max(initial=0)), name


def test_engines_that_share_a_gpu_write_what_requests_write_alone():
    """float32, each row in shapes of its own; both engines record CUDA graphs while the other waits its turn."""
    models = [small_model(seed=seed, dtype=torch.float32, n_sinks=1).cuda() for seed in (1, 2)]
    requests = [request_of(name, number, n_open=20) for number, name in enumerate(POLICIES)]
    expected = [[alone(model, request, deterministic=True, device="cuda").rows[0] for request in requests] for model in models]
    lock = FairLock()
    engines = [Engine(model, deterministic=True, lock=lock) for model in models]
    owners = [[Owner([request]) for request in requests] for _ in engines]
    for engine, asking in zip(engines, owners, strict=True):
        for owner in asking:
            engine.submit(owner.ticket)
    for asking, rows in zip(owners, expected, strict=True):
        for owner, request, row in zip(asking, requests, rows, strict=True):
            assert owner.tokens() == [row[request.canvas.index(request.mask_id) :]]
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
    return pytest.mark.skipif(not has_it, reason="needs a GPU with float8 products")(test)


@needs_float8
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1025, 256, 768), (4096, 320, 1280), (7, 16, 64)])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_float8_products_are_those_of_a_cpu_and_near_the_exact_ones(tokens, inputs, outputs, weight_dtype):
    from sinkdlm.fast.float8_training import product, swiglu_mlp

    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(1, tokens, size, generator=generator).bfloat16() for size in (inputs, inputs))
    weight, down = (
        (torch.randn(shape, generator=generator) / 8).to(weight_dtype) for shape in ((2 * outputs, inputs), (inputs, outputs))
    )
    results = []
    for device, dtype in (("cpu", None), ("cuda", None), ("cuda", torch.float64)):
        leaves = [one.to(device, dtype or one.dtype).requires_grad_() for one in (x, weight, down)]
        if dtype is None:
            narrow = product(leaves[0], leaves[1], torch.bfloat16)
            out = swiglu_mlp(*leaves, torch.bfloat16)
        else:
            narrow = leaves[0] @ leaves[1].mT
            gate, up = narrow.chunk(2, -1)
            out = (torch.nn.functional.silu(gate) * up) @ leaves[2].mT
        grads = torch.autograd.grad(out + narrow[..., :inputs], leaves, grad.to(device, dtype or grad.dtype))
        results.append([one.detach().double().cpu() for one in (narrow, out, *grads)])
    for on_cpu, on_gpu, exact in zip(*results, strict=True):
        assert (on_gpu - on_cpu).norm() <= 0.05 * on_cpu.norm()  # fewer bits in sums, and ties
        assert 1e-3 * exact.norm() < (on_gpu - exact).norm() <= 0.15 * exact.norm()


@needs_float8
@compiles
@pytest.mark.parametrize("name", ["sink", "vanilla", "sinks-2-end-zero-gate", "parent"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_blocks_in_float8_are_the_eager_ones_and_near_bf16(name, recompute):
    flags = {key: value for key, value in VARIANTS[name].items() if key != "mask_id"}
    config = ModelConfig.preset("smdm-6m", **flags)
    tokens = torch.randint(0, config.vocab_size - 1, (3, 501), generator=torch.Generator().manual_seed(0)).cuda()
    noisy = corrupt(tokens, torch.arange(3), seed=0, mask_id=config.mask_id)
    found = {}
    for form in ("bf16", "eager", "compiled"):
        torch._dynamo.reset()
        model = DiffusionLM(config).cuda()
        model.float8, model.recompute = form != "bf16", recompute
        if form != "eager":
            for block in model.blocks:
                block.forward = torch.compile(block.forward, fullgraph=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = denoising_loss(model, tokens, noisy, denominator=float(tokens.numel())).total
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
