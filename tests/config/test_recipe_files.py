import tomllib
from pathlib import Path

import pytest
import torch

from runs import load_parent, metrics, run
from sinkdlm import DiffusionLM, Recipe, load, save
from sinkdlm.config.shipped import RECIPES
from sinkdlm.planning.formulas import budget_steps

PATHS = sorted(path for path in RECIPES.glob("*/*.toml") if path.parent.name != "parts")
SCALES = {"paper": 22, "small": 23, "nano": 13, "laptop": 2}


def test_every_run_of_the_paper_has_a_recipe():
    assert {scale: sum(path.parent.name == scale for path in PATHS) for scale in SCALES} == SCALES
    assert len({path.stem for path in PATHS}) == len(PATHS) == 60  # a run folder is named after its recipe


def shrink(recipe: Recipe, data: Path, parent: Path) -> Recipe:
    """Shrink a recipe to seconds: one narrow layer, one step."""
    model = recipe.model
    inside = model.mask_id < model.vocab_size
    small = model.replace(
        n_layers=1,
        d_model=4 * model.n_heads,
        d_ff=8,
        vocab_size=64,
        mask_id=62 if inside else 64,
        context_length=64,
        rope_base=1e4,
    )
    table = recipe.to_dict()
    table["model"] = small.model_dump()
    table["data"] |= {
        "sets": {str(data): 1.0},
        "length": 16,
        "stride": 17 if recipe.data.stride == recipe.data.length + 1 else None,
    }
    budget = {"steps": 1, "tokens": None, "epochs": None, "flops": None}
    table["train"] |= {**budget, "batch": 2, "micro_batch": None, "precision": "float32"}
    table["eval"]["draws"] = 2
    table["log"]["sample_every"] = 0  # the set has no tokenizer
    if recipe.init.from_ is not None:
        adapts = not recipe.init.from_.startswith("runs/")
        bare = small.replace(n_sinks=0, gate="none") if adapts else small
        save(parent, DiffusionLM(bare))
        table["init"]["from"] = str(parent)
    return Recipe.resolve(table)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (number % 3 > 0)) for number, path in enumerate(PATHS)],
    ids=[f"{path.parent.name}/{path.stem}" for path in PATHS],
)
def test_a_recipe_resolves_builds_and_takes_a_step(tmp_path, token_set, path):
    recipe = Recipe.load(path)
    with torch.device("meta"):
        DiffusionLM(recipe.model)
    assert budget_steps(recipe.train, recipe.model, recipe.data.length, n_rows=10_000) >= 100
    assert recipe.data.sets
    assert recipe.data.length <= recipe.model.context_length
    _, said = run(shrink(recipe, token_set, tmp_path / "parent"), tmp_path / "run", load_parent=load_parent)
    assert len(metrics(tmp_path / "run")) == 1
    assert metrics(tmp_path / "run")[0]["updates"] == 1
    found = load(tmp_path / "run" / "model").config
    flags = ("n_sinks", "sink_kind", "sink_position", "sink_value", "gate", "tie_embeddings", "qkv_bias")
    assert {flag: getattr(found, flag) for flag in flags} == {flag: getattr(recipe.model, flag) for flag in flags}
    assert any("1 steps of 2 rows" in line for line in said)
    assert not any(line.startswith("plan:") for line in said)  # a CPU has no data sheet


def test_twins_differ_in_their_flags_alone():
    for scale, base in (
        ("paper", "smdm-472m"),
        ("paper", "qwen2.5-0.5b"),
        ("paper", "qwen2.5-1.5b"),
        ("small", "smdm-34m"),
        ("nano", "nano"),
    ):
        vanilla, sink, gate = (Recipe.load(RECIPES / scale / f"{base}{tail}.toml") for tail in ("", "-sink", "-gate"))
        assert sink.differences(vanilla) == ["model.n_sinks = 1, not 0"]
        assert gate.differences(vanilla) == ["model.gate = 'elementwise', not 'none'"]
    assert len(tomllib.loads((RECIPES / "paper" / "smdm-472m-sink.toml").read_text())) == 2  # a base and a flag


def test_the_papers_numbers():
    scratch, small, large = (
        Recipe.load(RECIPES / "paper" / f"{name}.toml") for name in ("smdm-472m", "qwen2.5-0.5b", "qwen2.5-1.5b")
    )
    sft = Recipe.load(RECIPES / "paper" / "sft-gsm8k-smdm-472m-sink.toml")
    assert (scratch.train.steps, scratch.train.batch, scratch.data.length, scratch.data.stride) == (202089, 256, 2048, 2049)
    assert (scratch.train.lr, scratch.train.min_lr, scratch.train.betas, scratch.train.weight_decay) == (
        2e-4,
        2e-5,
        (0.9, 0.95),
        0.1,
    )
    assert (small.train.tokens, small.train.batch, small.train.lr, small.train.min_lr) == (30e9, 512, 1e-4, 1e-5)
    assert (large.train.tokens, large.train.batch) == (100e9, 4096)
    assert (sft.train.epochs, sft.train.batch, sft.data.length, sft.data.padding) == (10, 256, 256, "train")
    assert (sft.model.n_sinks, sft.init.from_) == (1, "runs/smdm-472m-sink/model")
    assert budget_steps(sft.train, sft.model, 256, 769_240) == 30048
