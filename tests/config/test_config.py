import json
import re
from pathlib import Path

import jsonschema
import pytest
import torch

from sinkdlm import DiffusionLM, ModelConfig, Recipe, UserError
from sinkdlm.config.model import preset_names
from sinkdlm.config.shipped import RECIPES
from sinkdlm.config.toml import parse_override
from small_models import small_config


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"n_sink": 1}, ["n_sink = 1", "unknown key", "did you mean n_sinks?", "sink_position"]),
        ({"n_sinks": -1}, ["n_sinks = -1", "greater than or equal to 0"]),
        ({"n_sinks": True}, ["n_sinks = True", "integer"]),
        ({"n_layers": 2.0}, ["n_layers = 2.0", "integer"]),
        ({"n_layers": "2"}, ["n_layers = '2'", "integer"]),
        ({"sink_position": "middle"}, ["sink_position = 'middle'", "'front' or 'end'"]),
        ({"sink_kind": "moving"}, ["sink_kind = 'moving'", "'isolated', 'register' or 'logit'"]),
        ({"gate": "all"}, ["gate = 'all'", "'none', 'elementwise' or 'headwise'"]),
        ({"n_heads": 5}, ["n_heads = 5", "d_model = 24"]),
        ({"n_kv_heads": 4}, ["n_kv_heads = 4", "n_heads = 6"]),
        ({"mask_id": 12}, ["mask_id = 12", "below 11", "or 11"]),
        ({"n_sinks": 2, "sink_kind": "logit"}, ["n_sinks = 2", "0 or 1"]),
        ({"norm_eps": 0.0}, ["norm_eps = 0.0", "greater than 0"]),
        ({"rope_base": float("inf")}, ["rope_base = inf", "finite"]),
    ],
)
def test_a_wrong_key_or_value_names_itself_and_what_is_allowed(flags, words):
    with pytest.raises(UserError) as failure:
        small_config(**flags)
    message = str(failure.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_config_is_frozen_and_replaced_with_validation():
    config = small_config()
    with pytest.raises(Exception, match="frozen"):
        config.n_sinks = 1
    assert config.replace(n_sinks=1).n_sinks == 1
    assert config.n_sinks == 0
    with pytest.raises(UserError, match="n_sinks = -1"):
        config.replace(n_sinks=-1)


def test_missing_fields_are_named_once():
    with pytest.raises(UserError) as failure:
        ModelConfig(vocab_size=3)
    message = str(failure.value)
    assert "n_layers: missing" in message
    assert "n_kv_heads" not in message  # follows from n_heads


def test_presets_are_named_and_suggested():
    assert len(preset_names()) == 42
    for name in ("nano", "smdm-6m", "smdm-2121m", "qwen2.5-0.5b", "qwen2.5-1.5b", "smollm2-135m", "llada-8b", "dream-7b"):
        assert ModelConfig.preset(name, n_sinks=1).n_sinks == 1
    with pytest.raises(UserError, match="did you mean smdm-34m"):
        ModelConfig.preset("smdm34m")


def test_derived_fields():
    config = ModelConfig.preset("smdm-34m")
    assert (config.mask_id, config.n_kv_heads, config.embedding_rows) == (32000, 8, 32001)
    parent = ModelConfig.preset("qwen2.5-0.5b")
    assert (parent.mask_id, parent.n_kv_heads, parent.embedding_rows, parent.head_dim) == (151666, 2, 151936, 64)


def test_a_field_that_follows_another_follows_its_change():
    config = ModelConfig.preset("nano")
    assert config.replace(vocab_size=100).mask_id == 100
    assert config.replace(n_heads=8).n_kv_heads == 8
    assert config.replace(vocab_size=100, mask_id=7).mask_id == 7
    parent = ModelConfig.preset("qwen2.5-0.5b")
    assert parent.replace(vocab_size=152064).mask_id == 151666
    assert parent.replace(n_heads=16, d_model=1024).n_kv_heads == 2


def test_a_preset_set_later_replaces_one_set_earlier(tmp_path):
    path = write(tmp_path, "a.toml", '[model]\npreset = "nano"\nn_sinks = 2\n')
    resolved = write(tmp_path, "b.toml", Recipe.load(path).to_toml())
    for start in (path, resolved):
        recipe = Recipe.load(start, ["model.preset=smdm-34m"])
        assert recipe.model == ModelConfig.preset("smdm-34m", n_sinks=2)
        assert Recipe.load(start, ["model.vocab_size=100"]).model.mask_id == 100


# -- recipes ----------------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_base_and_overrides_build_on_each_other(tmp_path):
    write(tmp_path, "base.toml", '[model]\npreset = "nano"\nn_sinks = 2\n[train]\nlr = 1e-3\nbatch = 8\n')
    path = write(tmp_path, "mine.toml", 'base = "base.toml"\n[model]\nn_sinks = 1\n[init]\nfrom = "a/b c"\n')
    recipe = Recipe.load(path, ["train.lr=2e-3", "model.sink_position=end", "data.sets={'x.y'=0.5, z=2}", "train.betas=[0.8, 0.9]"])
    assert recipe.model == ModelConfig.preset("nano", n_sinks=1, sink_position="end")
    assert (recipe.train.lr, recipe.train.batch, recipe.train.betas) == (2e-3, 8, (0.8, 0.9))
    assert recipe.init.from_ == "a/b c"
    assert recipe.data.sets == {"x.y": 0.5, "z": 2.0}


def test_shares_of_a_mixture_add_up_over_overrides(tmp_path):
    path = write(tmp_path, "a.toml", '[model]\npreset = "nano"\n[data.sets]\n"old" = 1\n')
    assert Recipe.load(path, ["data.sets.a=0.7", "data.sets.b=0.3"]).data.sets == {"a": 0.7, "b": 0.3}


def test_a_resolved_recipe_reloads_unchanged(tmp_path):
    path = write(
        tmp_path,
        "a.toml",
        '[model]\npreset = "dream-7b"\nn_sinks = 1\n[init]\nfrom = "Überfluß \\"x\\" \\u007f"\n[data.sets]\n"a b" = 1\n',
    )
    recipe = Recipe.load(path, ["train.steps=10", "train.lr=1.2345678901234567e-4"])
    dumped = write(tmp_path, "b.toml", recipe.to_toml())
    assert Recipe.load(dumped) == recipe
    assert Recipe.load(dumped).to_toml() == recipe.to_toml()


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (
            '[model]\npreset = "nano"\n[train]\nlr = -1.0\nbetas = [0.9, 2.0]\n',
            [],
            ["a.toml.train.lr = -1.0", "train.betas.1 = 2.0"],
        ),
        ('[model]\npreset = "nan"\n', [], ["model.preset = 'nan'", "did you mean nano"]),
        ('[model]\npreset = "nano"\n[init]\nform = "x"\n', [], ["init.form", "did you mean from", "from, sink_init, gate_init"]),
        ('[modle]\npreset = "nano"\n', [], ["modle", "did you mean model"]),
        ("model = 3\n", [], ["model = 3", "a table"]),
        ("[train]\n", [], ["model: missing"]),
        ('[model]\npreset = "nano"\n', ["train.lr"], ["--set train.lr", "key=value"]),
        ('[model]\npreset = "nano"\n', ["train.lr.x=1"], ["train.lr"]),
        ('[model]\npreset = "nano"\n', ["log.trackers=wandb"], ["log.trackers = 'wandb': allowed is a list, as in [\"wandb\"]"]),
        ('[model]\npreset = "nano"\n', ["data.sets=data/nano"], ["data.sets = 'data/nano'", 'a table, as in {"data/nano" = 1}']),
        ('[model]\npreset = "nano"\n', ["train.betas=[0.1, 0.2, 0.3]"], ["allowed is a list of at most 2 items"]),
        ('base = "none.toml"\n', [], ["none.toml", "No such file", "base of"]),
        ('base = "a.toml"\n', [], ["own base"]),
        ("base = 3\n", [], ["base = 3", "a list of paths"]),
        ('[model]\npreset = "nano"\n', ["train.min_lr=1.0"], ["train.min_lr = 1.0", "at most lr"]),
        (
            '[model]\npreset = "nano"\n',
            ["train.residual=bf16", "train.precision=float32"],
            ["residual = 'bf16'", "precision = 'bf16' or 'fp8', not 'float32'"],
        ),
        ('[model]\npreset = "nano"\n', ["train.micro_batch=512"], ["train.micro_batch = 512", "at most batch = 256"]),
        ('[model]\npreset = "nano"\n[init]\nfrom = ""\n', [], ["init.from", "at least 1 character"]),
        ("[model\n", [], ["a.toml", "not valid TOML"]),
        (f"[train]\nsteps = {'9' * 5000}\n", [], ["a.toml", "not valid TOML", "4300 digits"]),
        ("[train]\n", [f"train.steps={'9' * 5000}"], ["train.steps", "9..."]),
        (f"[train]\n{'a.' * 900}b = 1\n", [], ["train.a = {'a': {'a':", "unknown key"]),
    ],
)
def test_a_wrong_recipe_names_the_place(tmp_path, text, overrides, words):
    path = write(tmp_path, "a.toml", text)
    with pytest.raises(UserError) as failure:
        Recipe.load(path, overrides)
    message = str(failure.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1e-4", 1e-4),
        ("a=true", True),
        ("a=end", "end"),
        ("a=/x/y z", "/x/y z"),
        ('a="1"', "1"),
        ("a=[1, 2]", [1, 2]),
    ],
)
def test_override_values_are_toml_or_plain_text(text, value):
    parsed = parse_override(text)
    assert parsed == ("a", value)
    assert type(parsed[1]) is type(value)


def test_an_override_without_a_value_is_told_as_itself(tmp_path):
    """An override is on the command line, not in the file."""
    path = write(tmp_path, "a.toml", '[model]\npreset = "nano"\n')
    for text, message in (
        ("train.lr", "--set train.lr: expected key=value; give train.lr a value"),
        ("=3", "--set =3: expected key=value; name the key"),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
            Recipe.load(path, [text])


def test_every_recipe_resolves_builds_and_fits_the_schema():
    import tomllib

    schema = Recipe.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    paths = sorted(RECIPES.glob("*/*.toml"))
    assert len(paths) == 65
    for path in paths:
        check.validate(tomllib.loads(path.read_text()))
        if path.parent.name == "parts":
            continue
        recipe = Recipe.load(path)
        check.validate(json.loads(json.dumps(tomllib.loads(recipe.to_toml()))))
        with torch.device("meta"):
            DiffusionLM(recipe.model)
    assert not check.is_valid({"model": {"preset": "nano", "n_sinks": -1}})
    assert not check.is_valid({"model": {"preset": "none"}})
    assert not check.is_valid({"modle": {}})
