"""What `sinkdlm.load` gives takes text and gives text, as the commands do."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sinkdlm
from evaluated import TEXTS, save_model
from sinkdlm.cli.app import app
from sinkdlm.errors import UserError
from sinkdlm.model.observe import Watcher

PROMPTS = ["the cat ", "a dog ran home, ", "why "]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("lm") / "sunk" / "model"
    save_model(path, seed=3, bos=True)
    lm = sinkdlm.load(path)
    sinkdlm.save(path, lm.model.float(), lm.tokenizer)  # float32, in which the commands compute on a CPU
    return path


@pytest.fixture(scope="module")
def lm(checkpoint):
    return sinkdlm.load(checkpoint)


def run(*words):
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, []),
        ({"length": 9, "temperature": 1.0, "seed": 5, "stop": False}, ["--temperature", 1.0, "--seed", 5, "--no-stop"]),
        ({"length": 9, "policy": "smdm-origin", "steps": 4}, ["--policy", "smdm-origin", "--steps", 4]),
        ({"length": 9, "suffix": " end", "bos": False, "top_k": 3, "temperature": 0.7}, None),
        ({"length": 40, "until_eos": True, "block": 8, "order": "entropy"}, None),
    ],
)
def test_write_is_sample(checkpoint, lm, tmp_path, options, words):
    if words is None:
        flags = {"until_eos": ["--until-eos"], "bos": ["--no-bos"], "order": ["--set", "order=entropy"]}
        words = [word for name, value in options.items() for word in flags.get(name, [f"--{name.replace('_', '-')}", value])]
    elif options:
        words = ["--length", 9, *words]
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    shown = json.loads(run("sample", checkpoint, "--prompts", tmp_path / "prompts.txt", *words, "--json").stdout)
    expected = [sample["text"] for sample in shown["samples"]]
    assert lm.write(PROMPTS, **options) == expected
    assert lm.write(PROMPTS[0], **options) == expected[0]
    assert len(set(expected)) == 3


def test_length_counts_new_tokens_and_a_list_may_hold_one_prompt_many_times(lm):
    text = lm.write("the cat ", length=7, stop=False)
    assert text.startswith("the cat ")
    assert len(lm.tokenizer.encode(text, add_special_tokens=False)) == 8 + 7
    drawn = lm.write(["the "] * 3, length=12, temperature=1.0)
    assert len(set(drawn)) == 3
    assert lm.write([]) == lm.score([]) == []


def test_gaps_are_filled(checkpoint, lm):
    gaps = "the [___] sat on [_:5]."
    assert lm.write(infill=gaps) == run("sample", checkpoint, "--infill", gaps).stdout.removesuffix("\n")


@pytest.mark.parametrize("options", [{}, {"draws": 16, "seed": 4}, {"estimator": "chain"}, {"draws": 8, "bos": False}])
def test_score_is_score(checkpoint, lm, tmp_path, options):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = [word for name, value in options.items() for word in (["--no-bos"] if name == "bos" else [f"--{name}", value])]
    expected = json.loads(run("score", checkpoint, tmp_path / "texts.jsonl", *words, "--json").stdout)["documents"]
    assert lm.score(TEXTS, **options) == expected
    assert lm.score(TEXTS[0], **options)["nats"] == pytest.approx(expected[0]["nats"], rel=1e-5)
    assert (expected[0]["stderr"] > 0) == ("estimator" not in options)


def test_watch_shows_what_sample_shows(checkpoint, lm):
    words = ["--prompt", "the cat ", "--length", 6, "--no-stop"]
    said = run("sample", checkpoint, *words, "--watch")
    watched = lm.watch("the cat ", length=6, stop=False)
    steps = list(watched)
    assert [str(one) for one in steps] == said.stderr.splitlines()
    assert list(watched) == steps  # written once, shown again
    assert watched.text == said.stdout.removesuffix("\n") == lm.write("the cat ", length=6, stop=False)
    assert [one.seen.count(lm.config.mask_id) for one in steps] == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("options", [{"block": 8, "cache": "prefix"}, {"guidance": 0.5}, {"until_eos": True, "block": 4}])
def test_a_watched_text_is_the_written_one(lm, options):
    watched = lm.watch("the cat ", length=16, seed=2, temperature=0.8, **options)
    assert watched.text == lm.write("the cat ", length=16, seed=2, temperature=0.8, **options)


def test_a_step_tells_the_attention_of_its_forward(lm):
    for one in lm.watch("the cat ", length=3, stop=False):
        watcher = Watcher()
        with torch.no_grad():
            lm.model(torch.tensor([one.seen]), observe=watcher)
        received = torch.stack([layer.received[0].mean(0) for layer in watcher.layers]).mean(0)
        assert one.sink == pytest.approx(float(torch.stack([layer.sink_share.mean() for layer in watcher.layers]).mean()), abs=1e-6)
        assert (one.top, one.top_share) == (int(received.argmax()), pytest.approx(float(received.max()), abs=1e-6))


def test_a_watched_text_is_saved_as_a_page_and_as_a_recording(lm, tmp_path):
    watched = lm.watch("the cat ", length=6, stop=False)
    recording = json.loads(watched.save(tmp_path / "seen.json").read_text())
    (side,) = recording["sides"]
    tokens = lm.tokenizer.encode(watched.text)
    assert side["tokens"][-1] == tokens
    assert [row.count(None) for row in side["tokens"]] == [6, 5, 4, 3, 2, 1, 0]
    assert (side["model"], side["n_given"], recording["asked"]["length"]) == ("sunk", len(tokens) - 6, 6)
    assert np.prod(side["received"]["shape"]) == 7 * 2 * 2 * (1 + len(tokens))
    page = watched.save(tmp_path / "seen.html").read_text()
    assert json.dumps(recording, separators=(",", ":")).replace("<", "\\u003c") in page
    with pytest.raises(UserError, match=r"give a name that ends in \.html"):
        watched.save(tmp_path / "seen.txt")
    with pytest.raises(UserError, match="cannot be written"):
        watched.save(tmp_path / "absent" / "seen.html")


def test_a_notebook_shows_the_page_of_a_watched_text(lm, browser):
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.set_content(lm.watch("the cat ", length=4, stop=False)._repr_html_())
    shown = page.frame_locator("iframe").locator("article.side h2", has_text="sunk")
    shown.wait_for()
    assert said == []
    page.close()


def test_without_a_tokenizer_each_method_says_the_cure(lm, tmp_path):
    sinkdlm.save(tmp_path / "bare", lm.model)
    bare = sinkdlm.load(tmp_path / "bare")
    for ask in (lambda: bare.write("a"), lambda: bare.score("a"), lambda: bare.watch("a")):
        with pytest.raises(UserError, match=r"bare: has no tokenizer.*sinkdlm convert .*bare DST --tokenizer T") as caught:
            ask()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            lambda lm: lm.write("a", lenght=3),
            "option 'lenght': unknown; did you mean length? allowed: infill, suffix, chat, length",
        ),
        (lambda lm: lm.write("a", length=0), "length = 0: expected a whole number, 1 or more"),
        (lambda lm: lm.write("a", length="9"), "length = '9': expected a whole number"),
        (lambda lm: lm.write("a", seed=-1), "seed = -1: expected a whole number, 0 or more"),
        (lambda lm: lm.write("a", temperature=-1), "temperature = -1: allowed is 0 or more"),
        (lambda lm: lm.write("a", policy="lada"), "policy 'lada': unknown; there are smdm-origin"),
        (lambda lm: lm.write(["a", 5]), "prompt 2 is int, expected text"),
        (lambda lm: lm.write("a", length=999), "the model reads at most 256"),
        (lambda lm: lm.watch(["a"]), "watch: shows one text"),
        (lambda lm: lm.score("a", draw=3), "draw"),
        (lambda lm: lm.score(""), "the text is empty"),
        (lambda lm: lm.score([5]), "text 1 is int, expected text"),
        (lambda lm: lm.score("a", draws=3), "draws = 3: needs at least one for each of the 8 draw sets"),
    ],
)
def test_a_mistake_is_one_line(lm, ask, words):
    with pytest.raises(UserError) as caught:
        ask(lm)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_code_of_the_api_page_runs(checkpoint, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    shutil.copytree(checkpoint, tmp_path / "runs" / "laptop-sink" / "model")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "api.md", "exec"), {})
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("step ") for line in shown) == 20
    assert Path("seen.html").stat().st_size > 10_000
