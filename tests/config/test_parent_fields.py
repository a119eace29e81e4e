"""Recipes that take their shape from a parent: filled in, refused if they contradict it, complete in the run folder."""

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from benchmarks import kills
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from sinkdlm import DiffusionLM, ModelConfig, load, save
from sinkdlm.cli.app import app
from sinkdlm.cli.loading import load_recipe
from sinkdlm.config.recipe import Recipe
from sinkdlm.data.synthetic import character_tokenizer
from sinkdlm.errors import UserError

SHAPE = {"vocab_size": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_model": 16, "d_ff": 24, "context_length": 48}


@pytest.fixture
def parent(tmp_path):
    flags = {"n_sinks": 2, "sink_position": "end", "rope_base": 5000.0, "mask_id": 62, "shift_logits": True}
    model = DiffusionLM(ModelConfig(**SHAPE, **flags), seed=1)
    save(tmp_path / "parent", model)
    return model.config


def recipe_of(tmp_path, model: str = "", parent: str = "parent"):
    path = tmp_path / "child.toml"
    path.write_text(
        f'{model}\n[init]\nfrom = "{tmp_path / parent}"\n[data]\nlength = 16\n[data.sets]\n"{tmp_path / "set"}" = 1\n'
        '[train]\nsteps = 4\nbatch = 4\nprecision = "float32"\n[eval]\nevery = 0\n[log]\nprobe_every = 0\n[save]\nevery = 2\n'
    )
    return path


@pytest.mark.parametrize("model", ["", "[model]", "[model]\nn_layers = 2", "[model]\nn_heads = 2\nsink_position = 'end'"])
def test_what_a_recipe_leaves_out_is_the_parents(tmp_path, parent, model):
    assert load_recipe(recipe_of(tmp_path, model), None).model == parent


def test_the_vocabulary_of_a_preset_gives_way_to_that_of_a_diffusion_model(tmp_path):
    """A model from scratch takes its vocabulary from the data, so the same recipe must go on from what it made."""
    save(tmp_path / "parent", DiffusionLM(ModelConfig.preset("nano", vocab_size=51, mask_id=51)))
    assert load_recipe(recipe_of(tmp_path, '[model]\npreset = "nano"'), None).model == ModelConfig.preset("nano", vocab_size=51)
    with pytest.raises(UserError, match=r"has vocab_size = 51, model\.vocab_size is 64"):
        load_recipe(recipe_of(tmp_path, '[model]\npreset = "nano"\nvocab_size = 64'), None)


def test_what_the_documentation_says_of_python_is_so(tmp_path, parent, monkeypatch):
    """Recipe.load does not read the parent; the page's code does what the commands do."""
    monkeypatch.chdir(tmp_path)
    kills.write_set(tmp_path / "set")
    recipe_of(tmp_path).rename("adapt.toml")
    with pytest.raises(UserError, match=r"adapt\.toml\.model"):
        Recipe.load("adapt.toml")
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "recipes.md", "exec"), {})
    found = load("runs/adapt/model")
    assert found.config == parent
    assert found.provenance["recipe"]["train"]["lr"] == 1e-4


def test_what_weights_leave_free_may_be_given(tmp_path, parent):
    found = load_recipe(recipe_of(tmp_path, "[model]\ncontext_length = 32"), ["model.sink_value=zero"]).model
    assert found == parent.replace(context_length=32, sink_value="zero")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("d_ff = 32", ["has d_ff = 24, model.d_ff is 32", "leave out of [model]"]),
        ("n_heads = 3", ["has n_heads = 2, model.n_heads is 3"]),
        ("n_sinks = 1\nrope_base = 10000.0", ["rope_base = 5000.0, model.rope_base is 10000.0", "n_sinks = 2, model.n_sinks is 1"]),
        ("preset = 'nano'", ["n_layers = 2, model.n_layers is 3", "d_model = 16, model.d_model is 64"]),
    ],
)
def test_what_contradicts_the_parent_is_named_with_both(tmp_path, parent, model, words):
    with pytest.raises(UserError) as failure:
        load_recipe(recipe_of(tmp_path, f"[model]\n{model}"), None)
    assert str(failure.value).startswith(f"init.from = '{tmp_path / 'parent'}': has ")
    assert all(word in str(failure.value) for word in words), failure.value


def test_an_ar_parent_gives_its_shape_and_mask_is_chosen_as_by_convert(tmp_path):
    tokenizer = character_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    rows = len(tokenizer) + 5
    LlamaForCausalLM(LlamaConfig(vocab_size=rows, max_position_embeddings=64, **shape)).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "llama"), str(tmp_path / "converted"), "--set", "n_sinks=1"])
    assert done.exit_code == 0, done.output
    path = recipe_of(tmp_path, "[model]\nn_sinks = 1", "llama")
    found = load_recipe(path, None).model
    assert found == load(tmp_path / "converted").config
    assert found.mask_id == len(tokenizer)
    assert load_recipe(path, [f"model.vocab_size={rows}"]).model.mask_id == rows  # [MASK] follows a vocabulary that is given


def test_a_parent_that_is_not_here_is_asked_for_only_where_it_must_be(tmp_path):
    whole = recipe_of(tmp_path, "[model]\npreset = 'nano'")
    assert load_recipe(whole, None).model == ModelConfig.preset("nano")
    with pytest.raises(UserError, match=r"\[model\] leaves out vocab_size, .*d_ff.*no such file or folder.*or a preset"):
        load_recipe(recipe_of(tmp_path, "[model]\nn_layers = 2"), None)


def test_convert_never_replaces_what_a_run_has_trained(tmp_path, parent):
    kills.write_set(tmp_path / "set")
    out = tmp_path / "run"
    more = ["--device", "cpu", "--set", "save.milestones=[2]", "--set", "train.ema=0.9"]
    assert CliRunner().invoke(app, ["train", str(recipe_of(tmp_path)), "--out", str(out), *more]).exit_code == 0
    for place in ("model", "ema", "milestones/step-2"):
        with pytest.raises(UserError, match=r"was trained by the run in .*run; choose another folder"):
            CliRunner().invoke(app, ["convert", str(tmp_path / "parent"), str(out / place)], catch_exceptions=False)
    for place in (tmp_path / "model", tmp_path / "model", out / "mine"):  # convert replaces its own output
        assert CliRunner().invoke(app, ["convert", str(out), str(place)], catch_exceptions=False).exit_code == 0


def test_a_mask_that_text_uses_is_refused_by_the_name_that_it_has_in_a_recipe(tmp_path):
    kills.write_set(tmp_path / "set")
    tokenizer = character_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **shape)).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    path = recipe_of(tmp_path, "[model]\nmask_id = 9", "llama")
    for command in (["train", str(path), "--out", str(tmp_path / "run")], ["recipe", "show", str(path)], ["plan", str(path)]):
        with pytest.raises(UserError, match=r"^model\.mask_id=9: the tokenizer uses it"):
            CliRunner().invoke(app, command, catch_exceptions=False)
    for free in (len(tokenizer), 64):
        assert load_recipe(path, [f"model.mask_id={free}"]).model.mask_id == free
    (tmp_path / "llama").rename(tmp_path / "elsewhere")  # a parent that is gone is not read
    whole = [f"model.{key}={value}" for key, value in SHAPE.items()]
    assert load_recipe(path, whole).model.mask_id == 9


def test_a_line_taken_out_of_a_recipe_is_another_recipe_while_the_parent_can_be_asked(tmp_path):
    kills.write_set(tmp_path / "set")
    save(tmp_path / "parent", DiffusionLM(ModelConfig(**SHAPE), seed=1))
    out = tmp_path / "run"

    def train(model):
        command = ["train", str(recipe_of(tmp_path, model)), "--out", str(out), "--device", "cpu"]
        return CliRunner().invoke(app, command, catch_exceptions=False)

    assert train("[model]\nn_sinks = 1").exit_code == 0
    with pytest.raises(UserError, match=r"holds a run of another recipe: model\.n_sinks = 0, not 1"):
        train("[model]")
    assert train("[model]\nn_sinks = 1").exit_code == 0  # already finished
    shutil.rmtree(tmp_path / "parent")
    save(tmp_path / "parent", DiffusionLM(ModelConfig(**SHAPE, n_sinks=2), seed=1))  # another parent, which is not read
    assert train("[model]\nn_sinks = 1").exit_code == 0


def test_a_run_keeps_its_recipe_whole_and_goes_on_without_the_parent(tmp_path, parent):
    kills.write_set(tmp_path / "set")
    path, out = recipe_of(tmp_path), tmp_path / "run"

    def train(*more):
        return CliRunner().invoke(app, ["train", str(path), "--out", str(out), "--device", "cpu", *more], catch_exceptions=False)

    assert train().exit_code == 0
    assert Recipe.load(out / "recipe.toml").model == parent
    shutil.rmtree(tmp_path / "parent")
    for made in ("model", "checkpoints/step-0000000004"):
        shutil.rmtree(out / made)
    assert train().exit_code == 0
    assert load(out / "model").config == parent
    with pytest.raises(UserError, match=r"holds a run of another recipe: model\.context_length = 32, not 48"):
        train("--set", "model.context_length=32")


@pytest.mark.parametrize("name", ["run", "a run"])
def test_a_finished_run_that_is_to_be_longer_is_told_a_cure_that_works(tmp_path, parent, command_line, name):
    kills.write_set(tmp_path / "set")
    given, out = ("train", recipe_of(tmp_path), "--device", "cpu"), tmp_path / name
    assert command_line(*given, "--out", out)[0] == 0
    status, _, err = command_line(*given, "--out", out, "--set", "train.steps=6")
    assert status == 2
    assert "train.steps = 6, not 4; choose another --out; add --set " in err
    cure = shlex.split(re.search("--set .*model'?", err)[0])
    slow = ("--set", "train.lr=1e-12", "--set", "train.min_lr=0")
    status, said, err = command_line(*given, "--out", tmp_path / "longer", "--set", "train.steps=6", *slow, *cure)
    assert (status, "6 steps" in said) == (0, True), err
    found, before = load(tmp_path / "longer" / "model"), load(out / "model")
    assert found.provenance["steps"] == 6
    for one, other in zip(found.model.parameters(), before.model.parameters(), strict=True):  # the learning rate was almost 0
        assert (one - other).abs().max() < 1e-6
    shutil.copytree(tmp_path / "parent", tmp_path / "other")
    for other in ("model.context_length=32", f"init.from={tmp_path / 'other'}"):
        assert command_line(*given, "--out", out, "--set", other)[2].endswith("; choose another --out\n")


def test_the_launcher_for_ray_asks_the_parent_too(tmp_path, parent, monkeypatch):
    launcher = Path(__file__).parents[2] / "launch" / "ray_train.py"
    path = recipe_of(tmp_path, "[model]\nd_ff = 32")
    monkeypatch.setattr(sys, "argv", [str(launcher), str(path), "--out", str(tmp_path / "run"), "--workers", "1", "--cpu"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(launcher), run_name="__main__")
    said = f"sinkdlm: init.from = '{tmp_path / 'parent'}': has d_ff = 24, model.d_ff is 32"  # Python exits with status 1
    assert str(left.value.code).startswith(said)
