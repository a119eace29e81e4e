"""What stands where a file should be: a name that no file system takes, or a pipe that nobody writes to; and numbers beyond any
machine. One line, at once."""

import os
import shutil

import pytest
import torch

from evaluated import save_model
from sinkdlm import save
from sinkdlm.cli import entry
from sinkdlm.data.synthetic import prepare_example
from small_models import small_model

LONG = "n" * 300
COMMANDS = {
    "sample": ("sample", "{}"),
    "score": ("score", "{model}", "{}"),
    "prompts": ("sample", "{model}", "--prompts", "{}"),
    "requests": ("score-requests", "{model}", "{}", "--out", "{out}"),
    "convert": ("convert", "{}", "{out}"),
    "train": ("train", "{}", "--out", "{out}"),
    "plan": ("plan", "{}"),
    "prepare": ("data", "prepare", "{}", "--tokenizer", "{model}", "--out", "{out}"),
    "tokenizer": ("data", "prepare", "{text}", "--tokenizer", "{}", "--out", "{out}"),
    "info": ("data", "info", "{}"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "model", small_model(vocab_size=96))


def words_of(command, given, model, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    places = {"{}": given, "{model}": model, "{out}": tmp_path / "out", "{text}": tmp_path / "text.txt"}
    return [places.get(word, word) for word in COMMANDS[command]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_of_300_characters_is_one_line(command, model, tmp_path, command_line):
    status, _, said = command_line(*words_of(command, tmp_path / f"{LONG}.txt", model, tmp_path))
    assert (status, said.count("\n")) == (2, 1)
    assert "File name too long" in said


def test_an_output_of_300_characters_is_one_line(model, tmp_path, command_line):
    status, _, said = command_line("convert", model, tmp_path / LONG)
    assert (status, said.count("\n")) == (2, 1)
    assert "File name too long" in said


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "info"])
def test_a_pipe_is_one_line_and_nobody_waits(command, model, tmp_path, command_line):
    os.mkfifo(tmp_path / "pipe.txt")
    status, _, said = command_line(*words_of(command, tmp_path / "pipe.txt", model, tmp_path))
    assert (status, said.count("\n")) == (2, 1)
    assert "pipe.txt: a pipe or a device, not a file" in said


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model with its tokenizer, a prepared set, and the folder of a run."""
    home = tmp_path_factory.mktemp("folders")
    save_model(home / "model")
    prepare_example(home / "set", documents=60)
    (home / "run").mkdir()
    for name in ("recipe.toml", "run.json", ".lock"):
        (home / "run" / name).write_text("")
    return home


TRAIN = ("train", "nano-sink", "--data", "{home}/set", "--device", "cpu", "--out", "{home}/run")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model/model.safetensors", ("sample", "{home}/model")),
        ("model/tokenizer.json", ("sample", "{home}/model")),
        ("model/chat_template.jinja", ("sample", "{home}/model", "--chat")),
        ("model/model.safetensors", ("convert", "{home}/model", "{home}/out")),
        ("model/tokenizer.json", ("data", "prepare", "{home}/a.txt", "--tokenizer", "{home}/model", "--out", "{home}/out")),
        ("set/index.json", ("data", "info", "{home}/set")),
        ("set/train-00000.bin", ("data", "info", "{home}/set")),
        ("run/run.json", TRAIN),
    ],
)
def test_a_pipe_within_a_folder_is_one_line_and_nobody_waits(file, words, folders, tmp_path, command_line):
    home = tmp_path / "home"
    shutil.copytree(folders, home)
    (home / "a.txt").write_text("some text")
    (home / file).unlink(missing_ok=True)
    os.mkfifo(home / file)
    if file.startswith("run/"):
        (home / "run" / "recipe.toml").unlink()  # this start's own is written
    status, _, said = command_line(*(word.format(home=home) for word in words))
    assert (status, said.count("\n")) == (2, 1), said
    assert f"{home / file}: a pipe or a device, not a file" in said


@pytest.mark.parametrize("command", ["score", "compare"])
def test_more_masks_than_any_estimate_needs_are_one_line(command, model, tmp_path, command_line):
    """Those of a row are in memory together."""
    (tmp_path / "a.txt").write_text("some text")
    models = [model] * (1 if command == "score" else 2)
    status, _, said = command_line(command, *models, tmp_path / "a.txt", "--draws", 10**9)
    assert (status, said.count("\n")) == (2, 1)
    assert "65536" in said


@pytest.mark.parametrize(
    "fails", [lambda: torch.empty(1 << 61, dtype=torch.int8), lambda: torch.empty(1 << 62, 1 << 62), lambda: bytes(1 << 62)]
)
def test_what_no_memory_holds_is_one_line(fails, command_line, monkeypatch):
    monkeypatch.setattr("sinkdlm.cli.app.app", lambda **_: fails())
    status, _, said = command_line("plan")
    assert (status, said.count("\n")) == (2, 1)
    assert "no memory holds this; ask for a smaller model, batch or number" in said
    assert not entry._is_of_memory(RuntimeError("a shape does not fit"))
