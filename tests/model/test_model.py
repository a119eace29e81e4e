import copy
import warnings
from itertools import cycle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference import hidden_states
from sinkdlm import DiffusionLM, ModelConfig, fast
from sinkdlm.config.model import preset_names
from sinkdlm.model.model import run_plain
from sinkdlm.sampling.prefix_cache import BlockCache
from small_models import VARIANTS, grid, small_config, small_model, small_tokens

GRID = list(grid())


def reference_run(model, tokens, grad):
    """Compute outputs and gradients of the masked reference with the model's weights."""
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    out = torch.stack([hidden_states(weights, model.config, row) for row in tokens])
    (out * grad).sum().backward()
    return out, {name: weight.grad for name, weight in weights.items()}


def assert_equals_reference(model, tokens, tolerance):
    grad = torch.randn(*tokens.shape, model.config.d_model, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = reference_run(model.double() if tolerance <= 1e-10 else copy.deepcopy(model).double(), tokens, grad)
    assert_gives(model, tokens, grad, *expected, tolerance)


def assert_gives(model, tokens, grad, expected, expected_grads, tolerance):
    model.zero_grad()
    out = model(tokens)
    (out * grad.to(out.dtype)).sum().backward()
    assert (out - expected).abs().max() <= tolerance
    compared = 0
    for name, weight in model.named_parameters():
        if weight.grad is None:
            assert expected_grads[name] is None, name
            continue
        compared += 1
        assert (weight.grad - expected_grads[name]).abs().max() <= tolerance, name
    assert compared >= 6 * model.config.n_layers


def test_grid_is_whole():
    assert len(GRID) == 3 * 3 * (1 + 3 * 4)


@pytest.mark.parametrize("part", range(27))
def test_whole_model_equals_masked_reference(part):
    """As it runs, and in a form of its own or by the plain runner, with the same weights."""
    tokens = small_tokens(2, 7)
    for number, flags in enumerate(GRID[part::27], start=part):
        grad = torch.randn(2, 7, flags["d_model"], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        other = {"attention": "naive"} if number % 2 else {"plan": None}
        models = [small_model(n_layers=2, **given, **flags) for given in ({}, other)]
        expected = reference_run(models[0], tokens, grad)
        for model in models:
            assert_gives(model, tokens, grad, *expected, 1e-10)


@pytest.mark.parametrize("form", ["auto", "naive"])
def test_every_variant_equals_masked_reference(variant, form):
    assert_equals_reference(small_model(attention=form, **variant), small_tokens(2, 9), 1e-10)


def test_float32_stays_within_1e_4_of_float64(variant):
    """With the official initialisation, and with half the weights of the other tests."""
    assert_equals_reference(DiffusionLM(small_config(**variant), seed=0), small_tokens(2, 9), 1e-4)
    model = small_model(dtype=torch.float32, **variant)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 0.5
    assert_equals_reference(model, small_tokens(2, 9), 1e-4)


def test_float32_is_as_exact_as_the_masked_form(variant):
    """With unhalved weights gradients reach 130: their rounding exceeds 1e-4, as the masked reference's does."""
    model, tokens = small_model(dtype=torch.float32, **variant), small_tokens(2, 9)
    grad = torch.randn(2, 9, model.config.d_model, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    exact, exact_grads = reference_run(copy.deepcopy(model).double(), tokens, grad)
    masked, masked_grads = reference_run(model, tokens, grad.float())
    out = model(tokens)
    (out * grad.float()).sum().backward()
    names = [name for name, weight in model.named_parameters() if weight.grad is not None]
    weights = dict(model.named_parameters())
    ours = max([(out - exact).abs().max(), *((weights[n].grad - exact_grads[n]).abs().max() for n in names)])
    theirs = max([(masked - exact).abs().max(), *((masked_grads[n] - exact_grads[n]).abs().max() for n in names)])
    assert ours <= 3 * theirs


# -- the lane -------------------------------------------------------------------------------------------------------------


def lanes_seen(model, tokens, **kwargs):
    seen = []
    with torch.no_grad():
        model(tokens, observe=lambda layer, q, k, v, sink_k, sink_v: seen.append((sink_k, sink_v)), **kwargs)
    assert len(seen) == model.config.n_layers
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("flags", [VARIANTS[name] for name in ("sink", "sinks-4", "gate-headwise-sink", "sink-zero")])
def test_sink_states_depend_on_weights_alone(flags, dtype):
    model = small_model(dtype=dtype, **flags)
    expected = lanes_seen(model, small_tokens(1, 5))
    for batch, length, seed in ((1, 5, 1), (3, 5, 2), (17, 31, 3), (2, 1, 4)):
        for (k, v), (other_k, other_v) in zip(expected, lanes_seen(model, small_tokens(batch, length, seed)), strict=True):
            assert torch.equal(k, other_k)
            assert torch.equal(v, other_v)


def test_zero_value_overrides_the_bias():
    for _, v in lanes_seen(small_model(**VARIANTS["sink-zero"]), small_tokens(1, 5)):
        assert torch.count_nonzero(v) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cached_lane_gives_bit_equal_output(variant, dtype):
    model = small_model(dtype=dtype, **variant)
    tokens, lengths = small_tokens(4, 13), torch.tensor([13, 4, 1, 9])
    with torch.no_grad():
        plain, padded = model(tokens), model(tokens, lengths=lengths)
    with model.inference():
        for _ in range(2):
            assert torch.equal(model(tokens), plain)
            assert torch.equal(model(tokens, lengths=lengths), padded)


def test_gradients_inside_the_scope_are_those_outside():
    model, tokens = small_model(n_sinks=1), small_tokens(2, 5)
    model(tokens).square().sum().backward()
    expected = model.sinks.grad.clone()
    model.zero_grad()
    with model.inference():
        model(tokens)
        with torch.enable_grad():
            model(tokens).square().sum().backward()
    assert torch.equal(model.sinks.grad, expected)


def step_optimizer(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.enable_grad():
        model(small_tokens(2, 5)).square().sum().backward()
    optimizer.step()


def load_other_weights(model):
    model.load_state_dict(small_model(seed=9, n_sinks=1).state_dict())


def swap_ema(model):
    for weight, other in zip(model.parameters(), small_model(seed=9, n_sinks=1).parameters(), strict=True):
        weight.data = other.data


def replace_parameter(model):
    model.sinks = torch.nn.Parameter(model.sinks.detach() + 1)


def merge_lora(model):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["qkv", "out"], init_lora_weights=False))
    wrapped.merge_and_unload()


def edit_data(model):
    model.blocks[0].attention.qkv.weight.data.mul_(1.5)


CHANGES = [step_optimizer, load_other_weights, swap_ema, replace_parameter, merge_lora, edit_data]
# peft merges through `.data +=`, which cannot be detected, like an edit by hand.
TRACELESS = (merge_lora, edit_data)


@pytest.mark.parametrize("change", CHANGES)
def test_no_weight_change_between_scopes_meets_a_stale_cache(change):
    model, tokens = small_model(n_sinks=1), small_tokens(2, 5)
    with model.inference():
        before = model(tokens)
    change(model)
    fresh = copy.deepcopy(model)
    with model.inference():
        after = model(tokens)
        assert torch.equal(model(tokens), after)
    with torch.no_grad():
        assert torch.equal(fresh(tokens), after)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("change", [change for change in CHANGES if change not in TRACELESS])
def test_a_change_inside_the_scope_is_seen_at_once(change):
    model, tokens = small_model(n_sinks=1), small_tokens(2, 5)
    with model.inference():
        before = model(tokens)
        change(model)
        after = model(tokens)
        assert torch.equal(copy.deepcopy(model)(tokens), after)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("change", TRACELESS)
def test_a_traceless_change_inside_the_scope_is_refused(change):
    model = small_model(n_sinks=1)

    def run():
        with model.inference():
            model(small_tokens(2, 5))
            change(model)

    with pytest.raises(RuntimeError, match="edited in place inside"):
        run()
    with model.inference():  # and the scope is closed
        model(small_tokens(2, 5))


def test_weights_that_are_no_numbers_are_not_taken_for_edited_ones():
    model = small_model(n_sinks=1)
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[0, 0] = torch.nan
    with model.inference():
        model(small_tokens(2, 5))
        model(small_tokens(2, 5))


def test_an_edit_is_found_under_autocast_and_before_a_recomputation():
    def edit_under_autocast(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(small_tokens(2, 5))
        edit_data(model)

    def edit_then_bump(model):
        model(small_tokens(2, 5))
        edit_data(model)
        model.norm.weight.mul_(1)
        model(small_tokens(2, 5))

    for use in (edit_under_autocast, edit_then_bump):
        model = small_model(dtype=torch.float32, n_sinks=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "mkldnn_matmul failed")
            with pytest.raises(RuntimeError, match="edited in place inside"), model.inference():
                use(model)


def test_a_copy_made_inside_a_scope_is_outside_it():
    model = small_model(n_sinks=1)
    with model.inference():
        model(small_tokens(2, 5))
        copied = copy.deepcopy(model)
        edit_data(copied)
        assert torch.equal(copied(small_tokens(2, 5)), copy.deepcopy(copied)(small_tokens(2, 5)))
    assert copied.scope is None
    assert copied.runner is run_plain


def test_adapters_that_switch_inside_a_scope_are_seen():
    peft = pytest.importorskip("peft")
    model, tokens = small_model(n_sinks=1), small_tokens(2, 5)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False))
    with torch.no_grad():
        on = model(tokens)
        with wrapped.disable_adapter():
            off = model(tokens)
    assert not torch.equal(on, off)
    with model.inference():
        assert torch.equal(model(tokens), on)
        with wrapped.disable_adapter():
            assert torch.equal(model(tokens), off)
        assert torch.equal(model(tokens), on)


# -- lengths, shift, causal, cache, denoiser --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["auto", "naive"])
def test_padded_row_equals_the_row_alone(variant, form):
    model = small_model(attention=form, **variant)
    lengths = torch.tensor([11, 1, 6, 10])
    tokens = small_tokens(4, 11)
    garbage = torch.where(torch.arange(11) < lengths[:, None], tokens, torch.tensor(-(10**6)))
    with torch.no_grad():
        together, dirty = model(tokens, lengths=lengths), model(garbage, lengths=lengths)
        for row, length in enumerate(lengths.tolist()):
            alone = model(tokens[row : row + 1, :length])[0]
            assert (together[row, :length] - alone).abs().max() <= 1e-12
    assert torch.equal(together, dirty)


def test_shifted_rows_come_from_the_token_before():
    model = small_model(shift_logits=True)
    plain = DiffusionLM(model.config.replace(shift_logits=False)).double()
    plain.load_state_dict(model.state_dict())
    tokens = small_tokens(2, 7)
    shifted, aligned = model(tokens), plain(tokens)
    assert torch.equal(shifted[:, 1:], aligned[:, :-1])
    assert torch.equal(shifted[:, 0], aligned[:, 0])


def test_causal_is_the_parent_without_sinks(variant):
    model = small_model(**variant)
    tokens = small_tokens(2, 9)
    with torch.no_grad():
        whole = model(tokens, causal=True)
        for length in (1, 4, 8):
            assert (model(tokens[:, :length], causal=True) - whole[:, :length]).abs().max() <= 1e-12
    parent = DiffusionLM(model.config.replace(n_sinks=0)).double()
    parent.load_state_dict({name: weight for name, weight in model.state_dict().items() if "sink" not in name})
    assert torch.equal(parent(tokens, causal=True), whole)


def test_causal_rows_may_be_padded(variant):
    model, tokens = small_model(**variant), small_tokens(3, 9)
    lengths = torch.tensor([9, 4, 1])
    with torch.no_grad():
        together = model(tokens, lengths=lengths, causal=True)
        for row, length in enumerate(lengths.tolist()):
            assert (together[row, :length] - model(tokens[row : row + 1, :length], causal=True)[0]).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["vanilla", "sink", "sink-end", "sinks-2-end-zero-gate", "logit"])
def test_a_cache_of_unchanged_tokens_changes_nothing(name):
    model = small_model(**VARIANTS[name])
    tokens = small_tokens(2, 12)
    cache = BlockCache(12)
    with model.inference():
        whole = model(tokens, cache=cache)
        assert (model(tokens) - whole).abs().max() <= 1e-12
        cache.place(4)
        assert (model(tokens[:, 4:9], cache=cache) - whole[:, 4:9]).abs().max() <= 1e-12


def test_a_cache_refuses_what_it_cannot_serve():
    with pytest.raises(ValueError, match="register"):
        small_model(**VARIANTS["register"])(small_tokens(1, 4), cache=BlockCache(4))


def test_observing_changes_nothing(variant):
    model = small_model(dtype=torch.float32, **variant)
    tokens = small_tokens(2, 9)
    with torch.no_grad():
        plain = model(tokens)
        lanes_seen(model, tokens)
        assert torch.equal(model(tokens, observe=lambda *_: None), plain)


def test_denoiser_gives_raw_logits_where_asked(variant):
    model = small_model(**variant)
    tokens = small_tokens(3, 8)
    where = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) < 0.4
    with model.inference():
        logits = model.denoiser()(tokens)
        some = model.denoiser()(tokens, where=where)
    assert logits.shape == (3, 8, model.config.vocab_size)
    assert not logits.requires_grad
    torch.testing.assert_close(some, logits[where], rtol=0, atol=1e-12)
    assert torch.isfinite(logits).all()


# -- building -------------------------------------------------------------------------------------------------------------

# Non-embedding parameters in millions, as SMDM's model names count them.
OFFICIAL_MILLIONS = {
    "smdm-6m": 6.294784,
    "smdm-19m": 18.880896,
    "smdm-34m": 33.563136,
    "smdm-472m": 471.90656,
    "smdm-2121m": 2121.39328,
}


def test_every_preset_builds_on_meta_with_the_parameters_it_counts():
    names = preset_names()
    assert len(names) == 2 + 30 + 10
    variants = ({}, {"n_sinks": 2, "gate": "headwise"}, {"n_sinks": 1, "sink_kind": "logit", "gate": "elementwise"})
    for name, flags in zip(names, cycle(variants), strict=False):
        config = ModelConfig.preset(name, **flags)
        with torch.device("meta"):
            model = DiffusionLM(config)
        assert sum(weight.numel() for weight in model.parameters()) == config.count_parameters().total
        assert all(weight.is_meta for weight in model.parameters())


def test_parameter_counts_are_the_official_ones():
    for name, millions in OFFICIAL_MILLIONS.items():
        assert ModelConfig.preset(name).count_parameters().non_embedding == round(millions * 1e6)
    for name in preset_names():
        if name.startswith("smdm-"):
            count = ModelConfig.preset(name).count_parameters().non_embedding
            assert abs(count / 1e6 - int(name[5:-1])) <= 1, name


def test_initialisation_is_official():
    config = ModelConfig.preset("smdm-6m", n_sinks=1, gate="elementwise", vocab_size=2000, mask_id=2000)
    model = DiffusionLM(config, seed=1)
    narrow, wide = 1 / 256**0.5 / 6, (2 / (5 * 256)) ** 0.5
    expected = {"embed.weight": wide, "lm_head.weight": wide}
    for layer in range(6):
        for name, std in {
            "attention.qkv": wide,
            "attention.gate": wide,
            "attention.out": narrow,
            "mlp.gate_up": wide,
            "mlp.down": narrow,
        }.items():
            expected[f"blocks.{layer}.{name}.weight"] = std
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
        elif name != "sinks":
            assert abs(weight.std().item() / expected.pop(name) - 1) < 0.02, name
            assert abs(weight.mean().item()) < 0.02 * wide
    assert not expected


def test_twins_share_what_they_share():
    plain = DiffusionLM(small_config(), seed=5).state_dict()
    fancy = DiffusionLM(small_config(n_sinks=2, gate="elementwise"), seed=5).state_dict()
    other = DiffusionLM(small_config(), seed=6).state_dict()
    assert len(fancy) == len(plain) + 1 + 3
    for name, weight in plain.items():
        assert torch.equal(weight, fancy[name])
        assert "norm" in name or not torch.equal(weight, other[name])


def test_initial_weights_do_not_depend_on_defaults():
    expected = DiffusionLM(small_config(n_sinks=1), seed=3)
    try:
        torch.set_default_dtype(torch.float64)
        wide = DiffusionLM(small_config(n_sinks=1), seed=3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a.double(), b) for a, b in zip(expected.parameters(), wide.parameters(), strict=True))


def test_recomputing_blocks_changes_nothing(variant):
    tokens, results = small_tokens(2, 7), []
    for how in ("none", "selective", "full"):
        model = small_model(plan=fast.Plan(recompute=how), **variant)
        out = model(tokens)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for plain, some, everything in zip(*results, strict=True):
        assert torch.equal(plain, some)
        assert torch.equal(plain, everything)


def test_selective_recomputation_keeps_products_and_runs_the_rest_again():
    tokens, counts = small_tokens(2, 7), []
    for how in ("none", "selective", "full"):
        model = small_model(plan=fast.Plan(recompute=how), n_sinks=1)
        with CountOperations() as counted:
            model(tokens).square().sum().backward()
        counts.append((counted.of("aten.mm"), counted.of("aten.silu.")))
    (mm, silu), (mm_selective, silu_selective), (mm_full, silu_full) = counts
    assert mm_selective == mm < mm_full
    assert silu < silu_selective == silu_full


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> int:
        return sum(seen.startswith(name) for seen in self.seen)


def test_building_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    DiffusionLM(small_config(n_sinks=1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_weights_can_be_made_after_building_on_meta():
    with torch.device("meta"):
        model = DiffusionLM(small_config(n_sinks=1))
    model.to_empty(device="cpu").init_weights(seed=3)
    built = DiffusionLM(small_config(n_sinks=1), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), built.parameters(), strict=True))


def test_a_form_of_attention_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="attention form 'merge': allowed: auto, naive, append, flex"):
        small_model(attention="merge")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_the_scope_may_close_outside_the_autocast_that_it_ran_under():
    model = small_model(dtype=torch.float32, n_sinks=1)
    with model.inference(), torch.autocast("cpu", torch.bfloat16):
        first = model(small_tokens(1, 5))
        second = model(small_tokens(1, 5))
    assert torch.equal(first, second)


@pytest.mark.parametrize("padded", [False, True])
def test_wanted_positions_are_those_of_the_whole(variant, padded):
    model, tokens = small_model(**variant), small_tokens(3, 9)
    wanted = torch.tensor([[0, 5, 3], [2, 2, 1], [4, 0, 8]])
    lengths = torch.tensor([9, 6, 9]) if padded else None
    with model.inference():
        whole = model(tokens, lengths=lengths)
        some = model(tokens, lengths=lengths, select=wanted)
        expected = torch.stack([row[places] for row, places in zip(whole, wanted, strict=True)])
        assert (some - expected).abs().max() <= 1e-12
        assert torch.equal(model.denoiser()(tokens, lengths=lengths, where=wanted), model.head(some))
        spread = torch.tensor([0, 8, 9, 11, 26])  # rows select unequally many
        some = model(tokens, lengths=lengths, select=spread)
        assert (some - whole.flatten(0, 1)[spread]).abs().max() <= 1e-12
        whole, some = (model(tokens, lengths=lengths, causal=True, select=places) for places in (None, wanted))
        expected = torch.stack([row[places] for row, places in zip(whole, wanted, strict=True)])
        assert (some - expected).abs().max() <= 1e-12
