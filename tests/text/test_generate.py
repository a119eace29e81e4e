"""`sinkdlm sample`, as a user types it: prompts, gaps, files, chat, watching, JSON, and mistakes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import sinkdlm
from evaluated import padded_lm, small_lm
from sinkdlm.cli.app import app
from sinkdlm.cli.loading import load_model
from sinkdlm.data.encoding import Encoder
from sinkdlm.data.examples import drafts_of, encode_drafts
from sinkdlm.data.synthetic import character_tokenizer
from sinkdlm.errors import SamplingError
from sinkdlm.text.generate import parse_gaps
from sinkdlm.text.prompts import piece_of
from small_models import small_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tokenizer = character_tokenizer()
    model = small_model(seed=2, dtype=torch.float32, vocab_size=len(tokenizer), n_sinks=1)
    path = tmp_path_factory.mktemp("sampled") / "model"
    sinkdlm.save(path, model, tokenizer, provenance={})
    return str(path)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory, checkpoint):
    lm = sinkdlm.load(checkpoint)
    lm.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    path = tmp_path_factory.mktemp("chatty") / "model"
    sinkdlm.save(path, lm.model, lm.tokenizer, provenance={})
    return str(path)


def test_a_token_reads_as_within_a_text():
    """Tokenizers with SentencePiece's sign for a space drop it in front of a text, and a token alone is one."""
    words = Tokenizer(models.WordLevel({"\u2581old": 0, "\u2581man": 1, "ing": 2}, unk_token="ing"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([0]) == "old"
    assert [piece_of(tokenizer, token) for token in range(3)] == [" old", " man", "ing"]


def sample(*words):
    found = CliRunner().invoke(app, ["sample", *map(str, words)], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found


def as_json(*words):
    return json.loads(sample(*words, "--json").stdout)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_ranks_share_the_texts_and_write_the_same(checkpoint, n):
    """Three texts on two ranks; then one text, so that the second rank has nothing to do."""
    words = ["--prompt", "tom has ", "--length", 12, "-n", n, "--temperature", 1.0, "--no-stop", "--deterministic"]
    expected = as_json(checkpoint, *words)["samples"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sinkdlm"]
    command = [*launcher, "sample", checkpoint, *map(str, words), "--json", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["samples"] == expected
    assert len(expected) == n


def test_a_prompt_is_continued(checkpoint):
    out = as_json(checkpoint, "--prompt", "tom has ", "--length", 12, "--n", 3, "--temperature", 1.0, "--no-stop", "--seed", 5)
    assert len(out["samples"]) == 3
    assert len({tuple(row["tokens"]) for row in out["samples"]}) == 3
    for row in out["samples"]:
        assert row["text"].startswith("tom has ")
        assert len(row["tokens"]) == 8 + 12
        assert row["confidences"][:8] == [None] * 8
        assert all(0 < sure <= 1 for sure in row["confidences"][8:])
        assert row["steps"] == 12
    assert out["steps"] == 12
    assert out["timing"]["tokens"] == 36
    assert out["timing"]["seconds"] > 0
    assert out["policy"]["temperature"] == 1.0
    shown = sample(checkpoint, "--prompt", "tom has ", "--length", 12, "--n", 3, "--temperature", 1.0, "--no-stop", "--seed", 5)
    assert shown.stdout == "".join(row["text"] + "\n" for row in out["samples"])
    assert "copies" not in shown.stderr


def test_speculation_writes_the_same_text_in_fewer_forwards(checkpoint):
    words = (checkpoint, "--prompt", "tom has ", "--length", 16, "--no-stop", "--dtype", "float32", "--temperature", 1.0)
    plain, quick = as_json(*words), as_json(*words, "--speculate", 4, "--draft", "tree")
    (own,), (other,) = plain["samples"], quick["samples"]
    assert own["text"] == other["text"]
    assert own["steps"] == other["steps"] == own["forwards"] == other["forwards"] + other["accepted"] == 16
    assert quick["timing"]["forwards"] == other["forwards"]
    assert quick["timing"]["tokens_per_forward"] == 16 / other["forwards"]
    assert quick["policy"]["speculate"] == 4


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory):
    lm = small_lm(bos=True, context_length=64)
    return str(sinkdlm.save(tmp_path_factory.mktemp("bos") / "model", lm.model, lm.tokenizer))


def head_of(checkpoint, *words, n):
    return as_json(checkpoint, *words, "--length", 3, "--no-stop")["samples"][0]["tokens"][:n]


def test_a_prompt_begins_as_examples_of_fine_tuning_do(with_bos):
    tokenizer = sinkdlm.load(with_bos).tokenizer
    drafts = drafts_of("sft", {"prompt": "the cat", "response": "sat"}, tokenizer, "row 1")
    ((example, _),) = encode_drafts(Encoder(tokenizer), drafts, str)
    bare = tokenizer.encode("the cat", add_special_tokens=False)
    assert example == [tokenizer.bos_token_id, *bare]
    given = ["--prompt", "the cat"]
    assert head_of(with_bos, *given, n=8) == head_of(with_bos, *given, "--bos", n=8) == example
    assert head_of(with_bos, *given, "--no-bos", n=7) == bare
    assert head_of(with_bos, "--prompt", "<s>the cat", n=8) == example  # never two
    assert head_of(with_bos, n=1) == [tokenizer.bos_token_id]
    gaps = as_json(with_bos, "--infill", "a[__]b", "--no-stop")["samples"][0]
    assert gaps["tokens"][:2] == [tokenizer.bos_token_id, *tokenizer.encode("a", add_special_tokens=False)]
    assert gaps["text"].startswith("a")


def test_bos_is_the_templates_where_there_is_one(with_bos, tmp_path):
    lm = sinkdlm.load(with_bos)
    bare, heads = lm.tokenizer.encode("user:hi", add_special_tokens=False), {}
    for written in ("", "<s>"):
        lm.tokenizer.chat_template = written + "{% for m in messages %}user:{{ m['content'] }}{% endfor %}"
        path = sinkdlm.save(tmp_path / f"model{written}", lm.model, lm.tokenizer)
        heads[written] = [head_of(str(path), "--prompt", "hi", "--chat", *more, n=8) for more in ([], ["--bos"], ["--no-bos"])]
    bos = [lm.tokenizer.bos_token_id, *bare]
    assert [head[: len(bos)] for head in heads["<s>"][:2]] == [bos, bos]
    assert heads["<s>"][2][:7] == heads[""][0][:7] == heads[""][2][:7] == bare
    assert heads[""][1] == bos


def test_a_tokenizer_without_bos_gets_none(checkpoint):
    assert len(as_json(checkpoint, "--prompt", "tom", "--length", 2, "--no-stop")["samples"][0]["tokens"]) == 5
    with pytest.raises(SamplingError, match="--bos: the tokenizer has no beginning-of-sequence token"):
        sample(checkpoint, "--prompt", "tom", "--bos")


@pytest.mark.parametrize("more", [[], ["--watch"], ["--config", "fast", "--set", "block=4"], ["--temperature", "1"]], ids=str)
def test_ids_without_a_token_are_never_written(tmp_path, more):
    """Ids beyond the tokenizer's vocabulary, which was rounded up in the model."""
    lm = padded_lm()
    path = sinkdlm.save(tmp_path / "padded", lm.model, lm.tokenizer)
    tokens = torch.tensor([[5, *[lm.config.mask_id] * 8]])
    assert (lm.model.denoiser()(tokens).argmax(-1) >= len(lm.tokenizer)).all()
    (row,) = as_json(str(path), "--prompt", "a", "--length", 8, "--no-stop", *more)["samples"]
    assert max(row["tokens"]) < len(lm.tokenizer)
    assert len(row["text"]) == 9


def test_copies_are_told(checkpoint):
    shown = sample(checkpoint, "--prompt", "tom has ", "--length", 4, "--n", 2, "--no-stop")
    assert len(set(shown.stdout.splitlines())) == 1
    assert "at temperature 0 the texts of a prompt are copies" in shown.stderr


def test_on_a_cpu_weights_in_half_precision_compute_in_float32(tmp_path):
    lm = small_lm(context_length=32)
    path = sinkdlm.save(tmp_path / "half", lm.model.to(torch.bfloat16), lm.tokenizer)
    for asked, kind in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        assert load_model(str(path), torch.device("cpu"), asked).model.embed.weight.dtype == kind


@pytest.mark.parametrize("config", ["smdm-origin", "smdm-greedy", "llada", "dream", "fast"])
def test_every_named_configuration_runs(checkpoint, config):
    out = as_json(checkpoint, "--prompt", "ann ", "--config", config, "--length", 20, "--set", "block=8", "--no-stop")
    mask_id = sinkdlm.load(checkpoint).config.mask_id
    assert mask_id not in out["samples"][0]["tokens"]
    assert len(out["samples"][0]["tokens"]) == 24


def test_gaps_are_filled_and_nothing_else(checkpoint):
    lm = sinkdlm.load(checkpoint)
    out = as_json(checkpoint, "--infill", "the [____] sat on [_:7].", "--no-stop")
    tokens = out["samples"][0]["tokens"]
    assert len(tokens) == 4 + 4 + 8 + 7 + 1
    text = [lm.tokenizer.decode([token]) for token in tokens]
    assert "".join(text[:4]) == "the "
    assert "".join(text[8:16]) == " sat on "
    assert text[-1] == "."
    assert len(as_json(checkpoint, "--infill", "a[_]b[_]", "--gap", 5, "--no-stop")["samples"][0]["tokens"]) == 12
    around = as_json(checkpoint, "--prompt", "tom ", "--suffix", " end.", "--length", 6, "--no-stop")["samples"][0]
    assert around["text"].startswith("tom ")
    assert around["text"].endswith(" end.")
    assert len(around["tokens"]) == 4 + 6 + 5


def test_gaps_are_read():
    assert parse_gaps("a [___] b") == ["a ", 3, " b"]
    assert parse_gaps("[_:12]", None) == ["", 12, ""]
    with pytest.raises(SamplingError, match="zero length"):
        parse_gaps("a [] b")


def test_prompts_of_a_file_give_what_they_give_alone(checkpoint, tmp_path):
    prompts = ["tom has 3 apples", "12+", "the red cat sleeps", "ann", "eva"]
    lines, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("\n".join(prompts) + "\n\n")
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    how = ("--length", 10, "--temperature", 0.8, "--deterministic", "--no-stop")
    found = as_json(checkpoint, "--prompts", lines, "--batch", 2, *how)
    assert found["samples"] == as_json(checkpoint, "--prompts", rows, *how)["samples"]
    assert [row["text"][: len(prompt)] for row, prompt in zip(found["samples"], prompts, strict=True)] == prompts
    assert as_json(checkpoint, "--prompt", prompts[0], *how)["samples"][0] == found["samples"][0]


def test_chat_uses_the_template(chatty, checkpoint, tmp_path):
    assert sample(chatty, "--chat", "--prompt", "hello", "--length", 4).stdout.startswith("user: hello\nassistant: ")
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    assert sample(chatty, "--prompts", talk, "--length", 4).stdout.startswith("user: hi\nassistant: ")
    with pytest.raises(SamplingError, match="--chat: this tokenizer has no chat template"):
        sample(checkpoint, "--chat", "--prompt", "hello")
    with pytest.raises(SamplingError, match=r"talk\.jsonl: has chat messages, and this tokenizer has no chat template"):
        sample(checkpoint, "--prompts", talk)


def test_messages_make_no_chat_of_the_prompts_beside_them(chatty, tmp_path):
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('"tom has"\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    plain, talk = as_json(chatty, "--prompts", mixed, "--length", 4, "--no-stop")["samples"]
    assert plain["text"].startswith("tom has")
    assert talk["text"].startswith("user: hi")
    alone = as_json(chatty, "--prompt", "tom has", "--length", 4, "--no-stop")["samples"][0]
    assert plain["tokens"] == alone["tokens"]
    asked = as_json(chatty, "--prompts", mixed, "--length", 4, "--no-stop", "--chat")["samples"]
    assert asked[0]["text"].startswith("user: tom has")


def test_a_field_that_is_null_is_not_there(chatty, tmp_path):
    """Null fields, as in tables with a column for each kind of prompt."""
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    rows = [
        {"prompt": None, **talk},
        {"question": "tom has", "prompt": None, "messages": None},
        {"prompt": "12+", "messages": None},
    ]
    found = {}
    for name, lines in (("nulls", rows), ("bare", [talk, "tom has", "12+"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found[name] = as_json(chatty, "--prompts", tmp_path / f"{name}.jsonl", "--length", 4)["samples"]
    assert found["nulls"] == found["bare"]


def test_a_length_that_nobody_gave_is_what_fits(checkpoint):
    room = sinkdlm.load(checkpoint).config.context_length
    given = ["--prompt", "a" * (room - 7), "--suffix", "bb", "--no-stop"]
    assert len(as_json(checkpoint, *given)["samples"][0]["tokens"]) == room
    assert len(as_json(checkpoint, "--prompt", "a", "--no-stop")["samples"][0]["tokens"]) == min(room, 65)
    with pytest.raises(SamplingError, match=r"tokens and 64 to write.*shorten the prompt or --length"):
        sample(checkpoint, *given, "--length", 64)
    with pytest.raises(SamplingError, match=r"tokens and 1 to write.*shorten the prompt$"):
        sample(checkpoint, "--prompt", "a" * room)


def test_an_open_end_that_nothing_ends_is_refused(checkpoint):
    with pytest.raises(SamplingError, match="a text until EOS: EOS is set not to end it; leave one of the two out"):
        sample(checkpoint, "--prompt", "tom", "--until-eos", "--no-stop")


def test_an_open_end_stops_at_eos_or_the_limit(checkpoint):
    eos = sinkdlm.load(checkpoint).tokenizer.eos_token_id
    out = as_json(checkpoint, "--prompt", "tom", "--until-eos", "--length", 40, "--block", 4, "--temperature", 1.0, "--n", 12)
    lengths = [len(row["tokens"]) for row in out["samples"]]
    assert max(lengths) <= 43
    assert min(lengths) < 43
    for row in out["samples"]:
        assert (len(row["tokens"]) - 3) % 4 == 0
        assert eos in row["tokens"][-4:] or len(row["tokens"]) == 43
        assert "<eos>" not in row["text"]


def test_no_number_makes_a_canvas_that_no_memory_holds(tmp_path, command_line):
    """Also where a config promises to read anything: the canvas is laid out after it was found to fit."""
    tokenizer = character_tokenizer()
    endless = small_model(dtype=torch.float32, vocab_size=len(tokenizer), context_length=1 << 60)
    sinkdlm.save(tmp_path / "model", endless, tokenizer)
    number = 1_000_000_000
    for more, words in {
        ("--length", number): f"and {number} to write: the model reads at most {1 << 20}",
        ("--length", number, "--until-eos"): f"and {number} to write: the model reads at most {1 << 20}",
        ("--infill", f"a [_:{number}]"): f"and {number} to write",
        ("--infill", f"a [_:{'9' * 5000}]"): " to write: the model reads",
        ("--infill", "a [____]", "--gap", number): f"and {number} to write",
        ("-n", number): f"--n {number}: at most 100000 texts",
    }.items():
        status, _, said = command_line("sample", tmp_path / "model", "--device", "cpu", *more)
        assert (status, said.count("\n")) == (2, 1), more
        assert words in said


def test_watching_shows_every_step_and_the_sink(checkpoint):
    found = sample(checkpoint, "--prompt", "tom has", "--length", 6, "--watch", "--no-stop")
    steps = [line for line in found.stderr.splitlines() if line.startswith("step ")]
    assert len(steps) == 6
    assert "sink " in steps[0]
    assert "most attended: position" in steps[0]
    assert steps[0].count("░") == 5
    assert "░" not in steps[-1]
    assert found.stdout == sample(checkpoint, "--prompt", "tom has", "--length", 6, "--no-stop").stdout


MISTAKES = [
    (["--length", "500"], ["prompt of", "reads at most 64"]),
    (["--prompt", "a" * 90], ["prompt of 90", "shorten"]),
    (["--infill", "the [] sat"], ["zero length"]),
    (["--infill", "the cat sat"], ["has no gap"]),
    (["--infill", "a [_:500] b"], ["tokens and 500 to write", "shorten the text or its gaps"]),
    (["--infill", "a [_] b", "--gap", "500"], ["tokens and 500 to write", "shorten the text or --gap"]),
    (["--infill", "a [_] b", "--length", "5"], ["--length", "[_:12]", "--gap"]),
    (["--gap", "3"], ["--gap: goes with --infill"]),
    (["--policy", "best"], ["policy 'best'", "smdm-origin"]),
    (["--steps", "0"], ["steps = 0", "1 or more"]),
    (["--temperature", "-1"], ["temperature = -1.0", "0 or more"]),
    (["--prompts", "empty.txt"], ["empty.txt", "holds no prompt"]),
    (["--prompts", "none.txt"], ["none.txt", "cannot be read"]),
    (["--prompts", "bad.jsonl"], ["bad.jsonl: line 1 is not JSON"]),
    (["--prompts", "half.jsonl"], ["surrogate", "give plain text"]),
    (["--prompt", "a\udcff"], ["not UTF-8", "give plain text"]),
    (["--prompts", "talk.jsonl"], ["talk.jsonl: line 1: messages is not a list"]),
    (["--prompts", "bare.jsonl"], ["bare.jsonl: line 1: messages is not a list"]),
    (["--prompts", "null.jsonl"], ["null.jsonl: line 2: message 1 (user): content is null, expected text"]),
    (["--prompts", "number.jsonl"], ["number.jsonl: line 1: prompt is int, expected text"]),
    (["--prompts", "nothing.jsonl"], ["nothing.jsonl: line 1 has neither prompt nor question nor messages"]),
    (["--prompt", "a", "--infill", "[_]"], ["give only one of them"]),
    (["--watch", "--n", "2"], ["shows one text"]),
    (["--cache", "dual"], ["needs a block length"]),
    (["--dtype", "float8", "--device", "cpu"], ["a CPU has no float8 matmuls", "leave it out"]),
    (["--set", "colour=red"], ["option 'colour'"]),
    (["--set", "order"], ["--set order: expected key=value; give order a value\n"]),
]


def test_mistakes_get_one_line_and_status_2(checkpoint, tmp_path, monkeypatch, command_line):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "half.jsonl").write_text('{"prompt": "a\\ud800"}\n')
    (tmp_path / "talk.jsonl").write_text('{"messages": "hello"}\n')
    (tmp_path / "bare.jsonl").write_text('["hello"]\n')
    (tmp_path / "null.jsonl").write_text('"a"\n{"messages": [{"role": "user", "content": null}]}\n')
    (tmp_path / "number.jsonl").write_text('{"prompt": 3}\n')
    (tmp_path / "nothing.jsonl").write_text('{"prompt": null, "messages": null}\n')
    monkeypatch.chdir(tmp_path)
    for words, expected in MISTAKES:
        status, out, err = command_line("sample", checkpoint, *words)
        assert (status, out) == (2, ""), (words, err)
        assert err.startswith("sinkdlm: ")
        assert err.count("\n") == 1
        assert all(word in err for word in expected), err
