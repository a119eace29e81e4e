"""`hf://owner/name` in every command that takes a model, a tokenizer or a data set. A server on loopback stands for the hub."""

import itertools
import json

import pytest

from evaluated import save_model
from sinkdlm import load
from sinkdlm.cli.loading import load_recipe
from sinkdlm.data import inputs
from sinkdlm.errors import DataError

NAME = "hf://someone/small"
SHORT = ("--no-interventions", "--trajectories", "1", "--length", "2")


@pytest.fixture
def model(hub, tmp_path):
    """The folder of a model that the hub has too."""
    folder = save_model(tmp_path / "model", context_length=512)
    hub.add("someone/small", {file.name: file.read_bytes() for file in folder.iterdir()})
    return folder


@pytest.mark.parametrize("words", [
    ("sample", "MODEL", "--prompt", "the cat", "--length", "4", "--json"),
    ("score", "MODEL", "TEXTS", "--draws", "8", "--json"),
    ("convert", "MODEL", "OUT", "--json"),
    ("compare", "MODEL", "MODEL", "TEXTS", "--names", "a,b", "--draws", "8", "--prompts", "0", "--json"),
    ("analyze", "MODEL", "--names", "a", "--out", "OUT", "--capture-only", *SHORT, "--json"),
])  # fmt: skip
def test_a_command_gives_the_same_by_either_name(model, tmp_path, command_line, words):
    (tmp_path / "texts.txt").write_text("the cat sat on the mat. a dog ran home.")
    said = []
    for name in (model, NAME):
        spelled = {"MODEL": name, "TEXTS": tmp_path / "texts.txt", "OUT": tmp_path / "out"}
        status, out, err = command_line(*(spelled.get(word, word) for word in words))
        assert not status, err
        found = json.loads(out)
        said.append(
            {key: value for key, value in found.items() if "second" not in key and key not in ("stats", "timing", "models")}
        )
    ours, theirs = (json.dumps(one).replace(str(model), NAME) for one in said)
    assert ours == theirs != "{}"


def test_a_server_and_the_page_name_a_model_by_its_last_word(hub):
    from sinkdlm.cli.loading import name_models

    assert name_models([NAME, "hf://other/model@v2"]) == ["small", "model@v2"]


def test_python_loads_by_name(model):
    lm = load(NAME)
    assert lm.write("the cat", length=4) == load(model).write("the cat", length=4)
    assert lm.path == NAME


def test_a_wrong_name_is_one_line_everywhere(hub, tmp_path, command_line):
    (tmp_path / "texts.txt").write_text("the cat")
    for words in (("sample", "hf://a/b"), ("serve", "hf://a/b", "--port", "0"), ("score", "hf://a/b", tmp_path / "texts.txt")):
        status, out, err = command_line(*words)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "hf://a/b: not there, or not for everybody, and no token is set" in err


RECIPE = """
[init]
from = "hf://someone/small"
[data.sets]
none = 1
[train]
steps = 1
batch = 1
lr = 1e-3
"""


def test_a_recipe_starts_from_a_name(hub, model, tmp_path):
    """The parent fills [model] in. A plan of a whole [model] fetches nothing."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    config = load(model).config
    assert load_recipe(tmp_path / "recipe.toml", [], tmp_path / "run").model == config
    fields = "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in config.to_dict().items() if value is not None and key != "model_type"
    )
    (tmp_path / "recipe.toml").write_text(f"[model]\n{fields}{RECIPE}")
    hub.asked.clear()
    assert load_recipe(tmp_path / "recipe.toml", []).model == config
    assert not hub.asked


def test_a_data_set_is_named_with_its_revision(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, **more: asked.append((words, more)) or [])
    found = inputs.find_sources(["hf://some/texts@v1", "hf://some/texts", "hf://datasets/other/texts"], config="en")
    assert [(one.name, one.revision) for one in found] == [("some/texts", "v1"), ("some/texts", None), ("other/texts", None)]
    assert len({one.stamp for one in found}) == 3
    inputs.open_hub(found[0])
    assert asked == [(("some/texts", "en"), {"split": "train", "revision": "v1", "streaming": True})]
    with pytest.raises(DataError, match="names a file"):
        inputs.find_sources(["hf://some/texts/part.parquet"])


def test_a_data_set_is_prepared_by_name_with_a_tokenizer_of_the_hub(hub, model, tmp_path, command_line, monkeypatch):
    import datasets

    rows = [{"text": f"the cat sat {i} times."} for i in range(40)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    asked = ("data", "prepare", "hf://some/texts@v1", "--tokenizer", NAME, "--out", tmp_path / "set", "--json")
    status, out, err = command_line(*asked)
    assert not status, err
    assert json.loads(out)["splits"]["train"]["documents"] > 30
    assert "model.safetensors" not in hub.fetched()


def test_texts_of_the_hub_are_scored_and_compared(hub, model, tmp_path, command_line, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    rows = "".join(json.dumps({"text": f"the cat sat {i} times."}) + "\n" for i in range(4))
    (tmp_path / "texts.jsonl").write_text(rows)
    hub.add("some/texts", {"train.jsonl": b'{"text": "a"}\n'}, kind="datasets")
    hub.add("some/texts", {"validation.jsonl": rows.encode()}, kind="datasets", branch="v1")
    theirs = ("hf://some/texts@v1", "--split", "validation")
    compared = ("--names", "a,b", "--draws", "8", "--prompts", "0")
    for words in (("score", model, "TEXTS", "--draws", "8"), ("compare", model, model, "TEXTS", *compared)):
        said = []
        for texts in ((tmp_path / "texts.jsonl",), theirs):
            asked = itertools.chain.from_iterable(texts if word == "TEXTS" else (word,) for word in words)
            status, out, err = command_line(*asked, "--limit", "3", "--json")
            assert not status, err
            said.append(json.loads(out.replace(str(tmp_path / "texts.jsonl"), "TEXTS").replace("hf://some/texts@v1", "TEXTS")))
        assert said[0] == said[1]
    status, _, err = command_line("score", model, "hf://some/texts@v2")
    assert status == 2
    assert err.count("\n") == 1
    assert "some/texts" in err
