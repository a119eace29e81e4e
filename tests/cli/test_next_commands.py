"""After training, the commands for the run's own paths; and the policy that `sample` suggests for a base model."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from runs import follow_tutorial
from sinkdlm import load, sampling
from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.data.synthetic import character_tokenizer, corpus, prepare_example
from sinkdlm.training.health import read_stuck

RECIPE = """
[model]
preset = "nano"
n_layers = 1
[data]
length = 96
[data.sets]
"{data}" = 1
[train]
steps = 2
batch = 2
[eval]
every = 0
[log]
probe_every = 0
"""
NOTE = "greedy text of a base model tends to repeat itself"


def next_of(run, folder, recipe):
    status, said, _ = run("train", recipe, "--out", folder, "--json")
    assert status == 0
    found = json.loads(said)["next"]
    status, said, _ = run("train", recipe, "--out", folder)  # already finished
    assert said.splitlines()[1:] == ["next:", *"".join(f"  {one}\n" for one in found).splitlines()]
    return [shlex.split(one) for one in found]


def recipe_in(folder: Path, data: Path) -> Path:
    (folder / "recipe.toml").write_text(RECIPE.format(data=data))
    return folder / "recipe.toml"


def test_a_base_model_is_sampled_ancestrally_scored_on_its_texts_and_analysed(tmp_path, command_line):
    folder, texts = tmp_path / "a run", tmp_path / "my texts.txt"
    texts.write_text("\n\n".join(corpus(60, seed=0)))
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    prepare = ("data", "prepare", texts, "--documents", "paragraph", "--tokenizer", tmp_path / "tokenizer")
    assert command_line(*prepare, "--out", tmp_path / "set")[0] == 0
    sample, score, analyze = next_of(command_line, folder, recipe_in(tmp_path, tmp_path / "set"))
    model = str(folder / "model")
    assert sample[:-1] == ["sinkdlm", "sample", model, "--policy", "smdm-origin", "--temperature", "0.8", "--prompt"]
    assert sample[-1] in " ".join(texts.read_text().split())
    assert score[:4] == ["sinkdlm", "score", model, str(tmp_path / "set")]
    assert analyze == ["sinkdlm", "analyze", model, "--out", str(folder / "report")]
    status, said, heard = command_line(*sample[1:], "--length", 8)
    assert (status, NOTE in heard) == (0, False)
    assert command_line(*score[1:], "--limit", 2, "--draws", 8)[0] == 0
    shutil.copytree(folder, tmp_path / "a run-sink")
    twins = [str(folder / "model"), str(tmp_path / "a run-sink" / "model")]
    for one in (folder, tmp_path / "a run-sink"):
        compare = next_of(command_line, one, recipe_in(tmp_path, tmp_path / "set"))[1]
        assert compare == ["sinkdlm", "compare", *twins, str(tmp_path / "set"), "--out", f"{folder}-compared"]
    assert command_line(*compare[1:], "--draws", 8, "--length", 4, "--tokens", 200)[0] == 0
    for options, noted in (((), True), (("--temperature", 1), False), (("--block", 4), False), (("-n", 2), True)):
        status, said, heard = command_line("sample", model, "--prompt", "tom has", "--length", 8, *options)
        assert (status, heard.count(NOTE)) == (0, int(noted))
        assert NOTE not in said


@pytest.mark.parametrize("chats", [False, True])
def test_a_fine_tuned_model_is_asked_an_example_s_question(tmp_path, command_line, chats):
    data, question = tmp_path / "set", corpus(60, 0, "sft")[0]["prompt"]
    if chats:
        tokenizer = character_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
        )
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        question = "how many?"
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": "tom has 3."}]
        (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
        prepare = ("data", "prepare", tmp_path / "chats.jsonl", "--kind", "sft", "--tokenizer", tmp_path / "tokenizer")
        assert command_line(*prepare, "--out", data, "--validation", 0)[0] == 0
    else:
        prepare_example(data, documents=60, kind="sft")
    sample = next_of(command_line, tmp_path / "run", recipe_in(tmp_path, data))[0]
    assert sample[2:-1] == [str(tmp_path / "run" / "model"), *["--chat"] * chats, "--prompt"]
    assert sample[-1] == question if chats else sample[-1] in {pair["prompt"] for pair in corpus(60, 0, "sft")}
    status, _, heard = command_line(*sample[1:], "--length", 4)
    assert (status, NOTE in heard) == (0, False)


def distinct(text: str, n: int = 8) -> float:
    """Share of different n-grams of characters within a text."""
    grams = [text[i : i + n] for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams)


@pytest.mark.slow
def test_the_nano_recipe_is_not_stuck_and_its_greedy_texts_repeat_more_than_its_ancestral_ones(
    made_once, tmp_path, monkeypatch, command_line
):
    shutil.copytree(made_once("tutorial", follow_tutorial), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    sample = next_of(command_line, Path("runs/mine"), "mine.toml")[0]
    assert read_stuck(Path("runs/mine")) == {}
    assert command_line(*sample[1:])[0] == 0
    lm = load("runs/mine/model")
    prompts = [lm.tokenizer.encode(text[:16]) for text in corpus(16, seed=9)]
    means = {}
    with lm.model.inference():
        denoiser = lm.model.denoiser(barred=absent_ids(lm.tokenizer, lm.config.vocab_size))
        for policy in ("llada", "smdm-origin"):
            out = sampling.generate(denoiser, prompt=prompts, length=128, mask_id=lm.config.mask_id, config=policy, seed=1)
            means[policy] = torch.tensor([distinct(lm.tokenizer.decode(row)) for row in out.tokens]).mean()
    assert means["smdm-origin"] > 0.98
    assert means["llada"] < means["smdm-origin"] - 0.05


def test_an_index_that_says_nothing_of_its_texts_ends_no_run(tmp_path, command_line):
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    prepare_example(tmp_path / "set", documents=60)
    index, recipe = tmp_path / "set" / "index.json", recipe_in(tmp_path, tmp_path / "set")
    whole = json.loads(index.read_text())
    for settings in (None, [], {"kind": "text"}, {"kind": "text", "field": "text", "inputs": 3}):
        index.write_text(json.dumps({**whole, "settings": settings}))
        assert next_of(command_line, tmp_path / "run", recipe)[1][:2] == ["sinkdlm", "eval"]
