"""The tutorial, command by command, as it stands in docs/tutorial.md, at a size of seconds."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sinkdlm import load
from sinkdlm.cli.app import app

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
SHORT = ["--set", "train.steps=4", "--set", "eval.draws=4", "--set", "save.every=2"]


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", TUTORIAL, re.S)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("sinkdlm")]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    texts = tmp_path / "my-texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"the cat number {number} sat by the river and saw {number + 1} birds.\n" * 4)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "how many", "response": "seven."}) + "\n")
    (tmp_path / "mine.toml").write_text(re.findall(r"```toml\n(# mine\.toml.*?)```", TUTORIAL, re.S)[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(words: list[str]) -> str:
    if words[1] == "train":
        words = [*words, *SHORT]
    if words[1:3] == ["data", "example"]:
        words = [*words, "--documents", "400"]
    found = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_tutorial_runs_as_it_is_written(home):
    found = commands()
    assert len(found) == 8
    example = next(words for words in found if words[1:3] == ["data", "example"])
    call(example)
    (home / "my-tokenizer").symlink_to(home / "data" / "nano" / "tokenizer")
    for words in found:
        if words != example:
            call(words)
    written = load(home / "runs" / "mine" / "model")
    assert written.config.n_sinks == 1
    assert written.provenance["tokens_seen"] == 4 * 8 * 64
    tuned = load(home / "runs" / "sft-nano-sink" / "model")
    assert tuned.provenance["parent"]["path"].endswith("runs/mine/model")
    chat = ["sinkdlm", "data", "prepare", "chat.jsonl", "--kind", "sft", "--tokenizer", "runs/mine/model", "--out", "data/chat"]
    assert shlex.join(chat[1:]) in TUTORIAL
    call(chat)
    out = json.loads(call(["sinkdlm", "sample", "runs/mine", "--prompt", "12+34=", "--length", "3", "--n", "2", "--json"]))
    assert [len(row["tokens"]) for row in out["samples"]] == [9, 9]
    assert all(row["text"].startswith("12+34=") for row in out["samples"])
