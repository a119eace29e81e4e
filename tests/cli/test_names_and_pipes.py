"""What stands where a file should be: a name that no file system takes, or a pipe that nobody writes to. One line, at once."""

import os

import pytest

from sinkdlm import save
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
