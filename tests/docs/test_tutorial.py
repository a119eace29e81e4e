"""The tutorial, command by command, as it stands in docs/tutorial.md: at a size of seconds; slow: whole, with what it prints."""

import json
import re
import shlex
from pathlib import Path

import pytest
from benchmarks import page, tutorial
from typer.testing import CliRunner

from runs import follow_tutorial
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


@pytest.mark.slow
def test_the_whole_tutorial_prints_what_the_page_says(made_once):
    """Counts to the digit, losses within 0.15 nats, texts by their form. The twin run of four times the steps is a record alone."""
    made = json.loads((made_once("tutorial", follow_tutorial) / "printed.json").read_text())
    (entry,) = (one for one in page.read_results().values() if one["benchmark"] == "tutorial")
    said = entry["figures"]["printed"]
    assert set(said) - set(made["printed"]) == {shlex.join(tutorial.LONG)}
    for command, text in made["printed"].items():
        if command.startswith("sample"):
            prompt = shlex.split(command)[3]
            for written in (text, said[command]):
                assert written.startswith(prompt), command
                assert 1 <= len(written) - len(prompt) <= 40
            answers = [one[len(prompt) :].strip() for one in (text, said[command])]
            assert "sft" not in command or all(map(tutorial.ANSWER.fullmatch, answers)), answers
        else:
            ours, theirs = (re.sub(r"loss [\d.]+ . [\d.]+", "loss", one) for one in (text, said[command]))
            assert ours == theirs, command
    for run, losses in made["validation"].items():
        assert losses == pytest.approx(entry["figures"]["validation"][run], abs=0.15), run
    assert made["answers"]["formed"] >= 0.75 * made["answers"]["asked"] == 75
