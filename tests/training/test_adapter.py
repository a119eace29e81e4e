"""LoRA as a recipe's key: what trains, exact resumption, any cut of a batch, ranks, and the files that a run leaves."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import ranks
from launches import plain_ranks
from runs import TINY, interrupted, load_parent, metrics, recipe_of, run
from sinkdlm import DiffusionLM, Recipe, UserError, fast, load, save
from sinkdlm.data.rows import open_rows
from sinkdlm.diffusion import Schedule, denoising_loss
from sinkdlm.fast import functions
from sinkdlm.fast.runner import FastRunner
from sinkdlm.fast.weight_only import quantize_blocks
from sinkdlm.interop.adapt import load_any
from sinkdlm.model.model import run_plain
from sinkdlm.planning.formulas import Layout, count_held, training_memory
from sinkdlm.training.adapter import Adapter
from sinkdlm.training.evaluate import corrupt_batch
from small_models import small_model, small_tokens

pytest.importorskip("peft")

CPU = torch.device("cpu")
ALL = ("qkv", "out", "gate_up", "down")
LORA = {"kind": "lora", "rank": 3, "alpha": 6.0}
QUIET = {"eval": {"every": 0}, "log": {"probe_every": 0}}


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Path:
    """A diffusion model without a sink, in float64, whose terms all matter."""
    folder = tmp_path_factory.mktemp("parent") / "model"
    model = DiffusionLM(Recipe.resolve({"model": {**TINY, "n_sinks": 0}}).model, seed=1).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    save(folder, model)
    return folder


def lora_recipe(data: Path, parent: Path, /, **sections) -> Recipe:
    given = {"adapter": LORA, **sections}
    return recipe_of(data, init={"from": str(parent)}, **{**given, "adapter": {**LORA, **given["adapter"]}})


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder).model.state_dict()


def test_only_the_named_weights_move(tmp_path, token_set, parent):
    """And a state holds these alone, with their moments."""
    flags = {"gate": "headwise", "n_sinks": 2}
    for targets, full in ((["qkv", "down"], ["sinks"]), (["out"], ["gate"]), (["gate_up"], [])):
        chosen = {"targets": targets, "full": full}
        out = tmp_path / targets[0]
        recipe = lora_recipe(token_set, parent, adapter=chosen, model={**TINY, **flags}, **QUIET)
        run(recipe, out, load_parent=load_parent)
        before, after = load_parent(recipe, torch.float32).model.state_dict(), weights_of(out / "model")
        moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
        assert moved == {name for name in after if set(name.split(".")) & {*targets, *full}}
        (state,) = (out / "checkpoints" / "step-0000000006").glob("*.safetensors")
        with safe_open(state, "pt") as held:
            names, count = list(held.keys()), sum(held.get_tensor(name).numel() for name in held.keys())  # noqa: SIM118  (no mapping)
        assert all("lora_" in name or set(name.split(".")) & {*full} for name in names)
        assert count == 3 * count_held(recipe)[1]


def test_the_first_update_is_the_one_computed_by_hand(tmp_path, token_set, parent):
    """B starts at zero: its gradient is scale G A^T, where G is the whole weight's; A only decays."""
    lr, decay = 1e-3, 0.1
    train = {"steps": 1, "lr": lr, "min_lr": lr, "warmup": 0.0, "clip": 1e9, "precision": "float64", "weight_decay": decay}
    recipe = lora_recipe(token_set, parent, train=train, **QUIET)
    run(recipe, tmp_path / "run", load_parent=load_parent)
    model = load_parent(recipe, torch.float64).model
    rows = open_rows(recipe.data, "train", seed=recipe.train.seed, vocab_size=64, mask_id=64)
    batch = rows.batch(np.arange(recipe.train.batch))
    noisy = corrupt_batch(batch, model, Schedule(), recipe.train.seed)
    denoising_loss(model, batch.tokens, noisy, denominator=batch.count_scored(shifted=False)).total.backward()
    with safe_open(tmp_path / "run" / "adapter" / "adapter_model.safetensors", "pt") as found:
        for name in ("blocks.0.attention.qkv", "blocks.1.mlp.down"):
            layer = model.get_submodule(name)
            down, up = (found.get_tensor(f"base_model.model.model.{name}.lora_{part}.weight") for part in "AB")
            down = down / (1 - lr * decay)
            assert down.abs().max() <= layer.in_features**-0.5
            gradient = 6.0 / 3 * layer.weight.grad @ down.T
            expected = -lr * gradient / (gradient.abs() + recipe.train.adam_eps)
            torch.testing.assert_close(up, expected, rtol=1e-8, atol=1e-12)
            merged = layer.weight + 6.0 / 3 * expected @ down * (1 - lr * decay)
            torch.testing.assert_close(weights_of(tmp_path / "run" / "model")[f"{name}.weight"], merged, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("base", [None, "nf4", "int8"])
def test_a_killed_run_ends_bit_for_bit_like_an_undisturbed_one(tmp_path, token_set, parent, monkeypatch, base):
    recipe = lora_recipe(token_set, parent, adapter={"dropout": 0.3, "base": base}, train={"ema": 0.9})
    run(recipe, tmp_path / "whole", load_parent=load_parent)
    interrupted(recipe, tmp_path / "killed", monkeypatch, 3, load_parent=load_parent)
    run(recipe, tmp_path / "killed", load_parent=load_parent)
    for part in ("model", "ema"):
        found, expected = (weights_of(tmp_path / name / part) for name in ("killed", "whole"))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    one, other = ((tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("killed", "whole"))
    assert one == other


def test_a_run_goes_on_only_from_the_base_that_it_began_with(tmp_path, token_set, parent, monkeypatch):
    base = tmp_path / "base"
    loaded = load(parent)
    save(base, loaded.model)
    recipe = lora_recipe(token_set, base, **QUIET)
    interrupted(recipe, tmp_path / "run", monkeypatch, 3, load_parent=load_parent)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["base"]["path"] == str(base)
    assert len(facts["base"]["sha256"]) == 64
    with torch.no_grad():
        loaded.model.norm.weight[0] += 1e-6
    save(base, loaded.model)
    with pytest.raises(UserError, match="changed since the run began; restore it"):
        run(recipe, tmp_path / "run", load_parent=load_parent)


def test_losses_ignore_the_cut_of_the_batch_the_runner_and_recomputation(tmp_path, token_set, parent):
    """With dropout."""
    found = []
    ways = ({"micro_batch": 4}, {"micro_batch": 1}, {"micro_batch": 3, "recompute": "full"}, {"runner": "plain"})
    for number, way in enumerate(ways):
        train = {"steps": 4, "precision": "float64", **way}
        recipe = lora_recipe(token_set, parent, adapter={"dropout": 0.3}, train=train, **QUIET)
        run(recipe, tmp_path / str(number), load_parent=load_parent)
        found.append([line["loss"] for line in metrics(tmp_path / str(number))])
    dropless = lora_recipe(token_set, parent, train={"steps": 4, "precision": "float64"}, **QUIET)
    run(dropless, tmp_path / "dropless", load_parent=load_parent)
    for losses in found[1:]:
        np.testing.assert_allclose(losses, found[0], rtol=1e-10)
    assert found[0][-1] != [line["loss"] for line in metrics(tmp_path / "dropless")][-1]


def wrapped(
    *, new_mask: bool = False, dtype=torch.float32, dropout=0.0, targets=ALL, base=None, **flags
) -> tuple[DiffusionLM, Adapter]:
    """A model with an adapter whose every weight is random."""
    model = small_model(dtype=dtype, **flags)
    chosen = {**LORA, "dropout": dropout, "targets": targets, "base": base}
    table = {"model": model.config.model_dump(), "init": {"from": "base"}, "adapter": chosen}
    adapter = Adapter(model, Recipe.resolve(table), new_mask=new_mask)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=dtype)
    return model, adapter


@pytest.mark.parametrize("base", [None, "nf4", "int8"])
@pytest.mark.parametrize("new_mask", [False, True])
@pytest.mark.parametrize(
    "flags", [{"n_sinks": 1, "gate": "elementwise"}, {"qkv_bias": True, "tie_embeddings": True, "mask_id": 10}]
)
def test_a_merged_model_computes_the_same(flags, new_mask, base):
    """But for the logit of [MASK], which nothing reads. Layers without an update are quantised too."""
    model, adapter = wrapped(new_mask=new_mask, base=base, targets=("qkv", "down"), **flags)
    merged = DiffusionLM(model.config)
    merged.load_state_dict(adapter.merged(dict(model.named_parameters())))
    tokens = small_tokens(2, 9)
    tokens[:, ::2] = model.config.mask_id
    kept = [number for number in range(model.config.vocab_size) if number != model.config.mask_id]
    with torch.no_grad():
        ours, theirs = (one.head(one(tokens))[..., kept] for one in (model, merged))
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("targets", "base"), [(ALL, None), (("out",), None), (("out",), "nf4"), (ALL, "int8")])
@pytest.mark.parametrize("given", [{"force": "flat"}, {"recompute": "selective"}, {"force": "flat", "recompute": "full"}])
def test_fast_runners_equal_the_plain_one(monkeypatch, targets, base, given):
    """Outputs and gradients, with dropout. No gradient of a frozen matrix is computed."""
    runners = (run_plain, FastRunner(fast.Plan(recompute=given.get("recompute", "none")), force=given.get("force")))
    model, adapter = wrapped(dropout=0.3, targets=targets, base=base, dtype=torch.float64, n_sinks=2, gate="elementwise")
    computed, plain = [], functions.ops.weight_gradient
    monkeypatch.setattr(functions.ops, "weight_gradient", lambda *given: computed.append(1) or plain(*given))
    found = []
    for runner in runners:
        model.runner = runner
        model.zero_grad()
        with adapter.dropping(5, CPU):
            out = model(small_tokens(2, 9))
            out.square().sum().backward()
        found.append([out.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)])
    assert len(computed) == (3 if "force" in given else 0)  # of the gates, in full
    assert all(weight.grad is None for weight in model.parameters() if not weight.requires_grad)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_dropout_depends_on_seed_step_and_layer_alone():
    """Kept features grow by 1 / (1 - p); outside the scope nothing is dropped."""
    _, adapter = wrapped(dropout=0.3, n_sinks=1)
    masks = {}
    for step in (0, 1, 0):
        with adapter.dropping(step, CPU):
            found = torch.cat([layer.lora_A["default"].mask for layer in adapter._layers.values()])
            assert sorted(set(found.tolist())) == pytest.approx([0.0, 1 / 0.7])
            assert masks.setdefault(step, found.clone()).equal(found)
    assert not masks[0].equal(masks[1])
    first, second = (adapter._layers[f"blocks.{number}.attention.qkv"].lora_A["default"] for number in (0, 1))
    with adapter.dropping(7, CPU):
        assert not first.mask.equal(second.mask)
        x = torch.randn(5, 24)
        torch.testing.assert_close(first(x), torch.nn.functional.linear(x * first.mask, first.weight))
    assert (first.mask == 1).all()
    assert 0.6 < np.mean([(mask > 0).double().mean() for mask in masks.values()]) < 0.8


@pytest.mark.parametrize("kind", ["diffusion", "ar"])
def test_pefts_own_loader_reads_the_adapter_with_its_sink(tmp_path, token_set, parent, kind):
    """A parent without [MASK] gets a row for it, which trains too."""
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    from sinkdlm.interop.hf import SinkDLMForMaskedLM

    source = parent
    if kind == "ar":
        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        config = LlamaConfig(vocab_size=64, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True, **shape)
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
        source = tmp_path / "llama"
    model = {**TINY, "tie_embeddings": kind == "ar", "gate": "headwise"}
    recipe = lora_recipe(token_set, source, model=model, adapter={"dropout": 0.1}, train={"lr": 1e-2}, **QUIET)
    if kind == "ar":
        found = load_any(source, {"n_sinks": 1, "gate": "headwise"}).config
        recipe = lora_recipe(token_set, source, model=found.model_dump(), adapter={"dropout": 0.1}, train={"lr": 1e-2}, **QUIET)
    run(recipe, tmp_path / "run", load_parent=load_parent)
    trained = load(tmp_path / "run" / "model").model
    base = load_any(source, {"n_sinks": 1, "gate": "headwise"}, seed=5, dtype=torch.float32).model
    before = base.embed.weight.detach().clone()
    read = PeftModel.from_pretrained(SinkDLMForMaskedLM.wrap(base), tmp_path / "run" / "adapter").eval()
    inner = read.base_model.model.model
    assert torch.equal(inner.sinks, trained.sinks)
    moved = (before != inner.embed.weight).any(1).nonzero()[:, 0].tolist()
    assert moved == ([recipe.model.mask_id] if kind == "ar" else [])
    tokens = small_tokens(2, 9)
    tokens[:, ::2] = recipe.model.mask_id
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, trained.head(trained(tokens)), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"adapter: an adapter, not a model; take model/ of its run"):
        load_any(tmp_path / "run" / "adapter")


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"adapter": LORA}, r"adapter\.kind = 'lora': needs a parent; set init\.from"),
        ({"adapter": {"rank": 8}}, r"adapter\.kind = 'none': the other keys go with 'lora'; set it"),
        ({"adapter": {**LORA, "targets": ["q_proj"]}}, r"adapter\.targets.*q_proj.*qkv"),
        ({"adapter": {**LORA, "targets": []}}, r"adapter\.targets"),
        ({"adapter": {**LORA, "rank": 0}}, r"adapter\.rank = 0"),
        ({"adapter": {**LORA, "dropout": 1.0}}, r"adapter\.dropout = 1\.0"),
        ({"adapter": {**LORA, "base": "fp4"}}, r"adapter\.base = 'fp4'.*nf4"),
        (
            {"adapter": {**LORA, "base": "nf4"}, "train": {"precision": "fp8"}},
            r"adapter\.base = 'nf4': does not go with .*'fp8'; set",
        ),
        ({"adapter": {**LORA, "alfa": 1.0}}, r"adapter\.alfa.*did you mean alpha"),
    ],
)
def test_a_wrong_key_is_named_in_one_line(tables, told):
    init = {} if told.startswith(r"adapter\.kind = 'lora'") else {"init": {"from": "base"}}
    with pytest.raises(UserError, match=told) as failure:
        Recipe.resolve({"model": TINY, **init, **tables})
    assert "\n" not in str(failure.value)


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"adapter\.kind = 'lora': needs peft; pip install 'sinkdlm\[interop\]'"):
        wrapped()


def test_a_plan_counts_what_trains(command_line, tmp_path, token_set, parent):
    recipe = lora_recipe(token_set, parent, model={**TINY, "gate": "headwise"})
    model, _ = wrapped(n_sinks=1, gate="headwise", n_layers=2)
    held = Recipe.resolve({"model": model.config.model_dump(), "init": {"from": "base"}, "adapter": LORA})
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert count_held(held) == (sum(weight.numel() for weight in model.parameters()), trained)
    (tmp_path / "a.toml").write_text(recipe.to_toml())
    code, said, _ = command_line("plan", tmp_path / "a.toml", "--json")
    (plan,) = json.loads(said)
    assert code == 0
    assert plan["parameters"]["trained"] == count_held(recipe)[1]
    assert plan["memory"]["optimizer"] == 2 * plan["memory"]["gradients"] == 8 * count_held(recipe)[1]
    assert plan["memory"]["weights"] == 4 * count_held(recipe)[0]
    assert plan["state_bytes"] == 12 * count_held(recipe)[1]
    _, said, _ = command_line("plan", tmp_path / "a.toml")
    assert "trained     " in said
    assert "not known: records are of runs that train every weight" in said


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_quantised_base_stays_as_it_is_and_its_updates_learn(tmp_path, token_set, parent, base):
    """The run's model less the adapter's updates is the rounded parent; all else but sinks is the parent itself."""
    recipe = lora_recipe(token_set, parent, adapter={"base": base, "targets": ["qkv"]}, train={"precision": "float64"}, **QUIET)
    run(recipe, tmp_path / "run", load_parent=load_parent)
    found, model = weights_of(tmp_path / "run" / "model"), load_parent(recipe, torch.float64).model
    held = quantize_blocks(model, base)
    for name, weight in model.named_parameters():
        assert torch.equal(found[name], weight) == (name != "sinks")
    with safe_open(tmp_path / "run" / "adapter" / "adapter_model.safetensors", "pt") as adapter:
        for name, layer in held.items():
            expected = layer.dequantize(torch.float64)
            if name.endswith("qkv"):
                down, up = (adapter.get_tensor(f"base_model.model.model.{name}.lora_{part}.weight") for part in "AB")
                assert up.any()
                expected = expected + 6.0 / 3 * up @ down
            torch.testing.assert_close(found[f"{name}.weight"], expected, rtol=1e-12, atol=1e-12)


def test_a_plan_counts_the_quantised_base():
    """By the bytes that a model holds, but for a layer's table of levels."""
    shape = {"n_layers": 2, "d_model": 64, "d_ff": 128, "n_heads": 4, "n_kv_heads": 2}
    for base in ("nf4", "int8"):
        model, _ = wrapped(base=base, n_sinks=1, gate="headwise", **shape)
        table = {"model": model.config.model_dump(), "init": {"from": "base"}, "adapter": {**LORA, "base": base}}
        plan = training_memory(Recipe.resolve(table), 1)
        held = [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if not name.endswith("pairs"))]
        assert plan.weights == pytest.approx(sum(one.numel() * one.element_size() for one in held), rel=1e-3)
        quantized = sum(one.numel() for one in held if one.dtype in (torch.uint8, torch.int8))
        sharded = training_memory(Recipe.resolve(table), 1, Layout(1, 2)).weights
        assert sharded > (plan.weights + quantized) / 2  # codes are whole on every rank
    assert training_memory(Recipe.resolve({**table, "adapter": LORA}), 1).weights > 2 * plan.weights


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, "nf4", "int8"])
def test_two_ranks_equal_one(tmp_path, token_set, parent, base):
    """Sharded and in copies, with dropout; float64."""
    jobs = []
    for mode in ("shard", "replicate"):
        train = {"steps": 4, "precision": "float64", "micro_batch": 1, "ema": 0.9}
        adapter = {"dropout": 0.3, "base": base}
        flags = {"adapter": adapter, "model": {**TINY, "gate": "headwise"}, "parallel": {"mode": mode}, "train": train}
        jobs.append({"recipe": lora_recipe(token_set, parent, **flags).to_dict(), "out": str(tmp_path / mode)})
    ranks.run({**jobs[0], "out": str(tmp_path / "alone")})
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps(jobs))
    path = os.pathsep.join([str(Path(ranks.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with plain_ranks(2, [ranks.__file__, str(file)], tmp_path / "said", PYTHONPATH=path) as started:
        assert started.wait(600) == 0, started.text()[-8000:]
    expected, losses = weights_of(tmp_path / "alone" / "model"), [line["loss"] for line in metrics(tmp_path / "alone")]
    for mode in ("shard", "replicate"):
        np.testing.assert_allclose([line["loss"] for line in metrics(tmp_path / mode)], losses, rtol=1e-10)
        found = weights_of(tmp_path / mode / "model")
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)
