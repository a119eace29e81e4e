"""Tokenizers made from the text itself: nothing is lost, nothing depends on chance, and the model takes the vocabulary's size."""

import json

import pytest

from sinkdlm import Recipe, load
from sinkdlm.checkpoint.tokenizer import read_tokenizer
from sinkdlm.cli.loading import load_recipe
from sinkdlm.data import prepare
from sinkdlm.data.encoding import Encoder, mark_tokenizer
from sinkdlm.data.inputs import find_sources
from sinkdlm.data.own_tokenizer import EOS, make_tokenizer
from sinkdlm.data.prepare import Settings
from sinkdlm.data.shards import open_split

TEXT = f"The old man — naïve, “said” 東京 — spelled {EOS}.\r\n\n  Tabs\tand 1234 numbers; \U0001f600!\n" + "\n".join(
    f"Line {n} of a book that says the same thing again and again." for n in range(200)
)
NAMES = ("bytes", "chars", "bpe:400")


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT, newline="")
    return tmp_path / "book.txt"


def make(name, path):
    return make_tokenizer(name, find_sources([str(path)]), Settings())


@pytest.mark.parametrize("name", NAMES)
def test_a_text_comes_back_from_its_shards_to_the_letter(tmp_path, book, command_line, name):
    status, _, said = command_line("data", "prepare", book, "--tokenizer", name, "--out", tmp_path / "set")
    assert status == 0, said
    splits = [open_split(tmp_path / "set", split) for split in ("train", "validation")]
    ids = [split.read(0, split.n_tokens).tolist() for split in splits]
    tokenizer = read_tokenizer(tmp_path / "set" / "tokenizer")
    assert all(part[-1] == tokenizer.eos_token_id and part.count(part[-1]) == 1 for part in ids)
    assert tokenizer.decode([*ids[0][:-1], *ids[1][:-1]]) == TEXT
    assert len(ids[1]) - 1 == pytest.approx(0.01 * sum(map(len, ids)), abs=1)
    status, out, _ = command_line("data", "info", tmp_path / "set", "--json")
    told = json.loads(out)["tokenizer"]
    assert (told["source"], told["rows"]) == (name, len(tokenizer))
    assert len(tokenizer) == {"bytes": 257, "chars": len(set(TEXT)) + 2, "bpe:400": 400}[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_text_gives_the_same_tokenizer(tmp_path, book, name):
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in TEXT.splitlines(keepends=True)))
    assert mark_tokenizer(make(name, book))["sha256"] == mark_tokenizer(make(name, book))["sha256"]
    if name != "bpe:400":  # its words may end at a row's end
        assert mark_tokenizer(make(name, tmp_path / "two.jsonl")) == mark_tokenizer(make(name, book))


def test_an_interrupted_preparation_ends_with_the_same_bytes(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"{n} {TEXT[: 100 + n]}"}) + "\n" for n in range(300)))
    args = [str(tmp_path / "rows.jsonl")]
    prepare.prepare(args, make("bpe:400", args[0]), tmp_path / "whole", Settings(shard_tokens=2000))
    writes, write = [], prepare.Store.write

    def dying(*given, **named):
        writes.append(1)
        if len(writes) == 200:
            raise KeyboardInterrupt
        return write(*given, **named)

    monkeypatch.setattr(prepare.Store, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(args, make("bpe:400", args[0]), tmp_path / "cut", Settings(shard_tokens=2000))
    said = prepare.prepare(args, make("bpe:400", args[0]), tmp_path / "cut", Settings(shard_tokens=2000))
    assert said["resumed"]
    names = {path.name for path in (tmp_path / "whole").glob("*.*")}
    assert len(names) > 5
    assert all((tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes() for name in names)


def test_characters_that_come_later_become_one_unknown_id(book):
    tokenizer = make("chars", book)
    ids = Encoder(tokenizer).encode(["The Ω man"])[0]
    assert ids.count(tokenizer.unk_token_id) == 1
    assert tokenizer.decode(ids) == "The <unk> man"


@pytest.mark.parametrize("name", ["bpe:0", "bpe:257", "bpe:65537", "bpe:x", "bpe:", "bpe:0400", "char", "BPE:2048"])
def test_a_wrong_name_is_one_line_with_the_allowed_ones(tmp_path, book, command_line, name):
    status, out, said = command_line("data", "prepare", book, "--tokenizer", name, "--out", tmp_path / "set")
    assert (status, out) == (2, "")
    assert said.count("\n") == 1
    assert f"--tokenizer {name}: " in said
    assert "bytes, chars, or bpe:N with N from 258 to 65536" in said
    assert not (tmp_path / "set").exists()


def test_learning_from_examples_is_refused_with_the_cure(tmp_path, command_line):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    given = ("data", "prepare", tmp_path / "pairs.jsonl", "--kind", "sft", "--out", tmp_path / "set", "--tokenizer")
    status, _, said = command_line(*given, "bpe:400")
    assert status == 2
    assert "--tokenizer DIR/tokenizer" in said
    assert command_line(*given, "bytes")[0] == 0


# -- the model's vocabulary -------------------------------------------------------------------------------------------------


def test_the_vocabulary_follows_the_data_unless_it_is_set(tmp_path, book, command_line):
    for name in ("bytes", "bpe:400"):
        assert command_line("data", "prepare", book, "--tokenizer", name, "--out", tmp_path / name)[0] == 0
    for given, expected in (("bytes", 257), ("bpe:400", 400)):
        data = f'data.sets={{"{tmp_path / given}" = 1}}'
        for recipe in ("laptop", "laptop-sink", "smdm-34m"):
            model = load_recipe(find(recipe), [data]).model
            assert (model.vocab_size, model.mask_id) == (expected, expected)
        model = load_recipe(find("laptop"), [data, "model.vocab_size=500"]).model
        assert (model.vocab_size, model.mask_id) == (500, 500)
        assert load_recipe(find("laptop"), [data, "model.mask_id=3"]).model.mask_id == 3
        assert load_recipe(find("nano-sink"), [data]).model.vocab_size == 64  # set in the recipe
    assert load_recipe(find("laptop"), []).model == Recipe.load("laptop").model  # data that is not there yet
    status, _, said = command_line("train", "nano-sink", "--data", tmp_path / "bytes", "--out", tmp_path / "run")
    assert status == 2
    assert said.count("\n") == 1
    assert "model.vocab_size is 64" in said


def find(name):
    from sinkdlm.config.shipped import find_recipe

    return find_recipe(name)


@pytest.mark.parametrize("recipe", ["laptop", "laptop-sink"])
def test_the_laptop_recipes_train_on_a_text_and_resume(tmp_path, book, command_line, recipe):
    assert command_line("data", "prepare", book, "--tokenizer", "bpe:400", "--out", tmp_path / "set")[0] == 0
    changes = ("train.steps=4", "train.batch=2", "eval.every=0", "log.sample_every=4", "log.sample_length=8")
    given = [word for change in changes for word in ("--set", change)]
    status, _, said = command_line("train", recipe, "--data", tmp_path / "set", "--out", tmp_path / "run", *given)
    assert status == 0, said
    lm = load(tmp_path / "run" / "model")
    assert (lm.config.vocab_size, lm.config.mask_id, lm.config.n_sinks) == (400, 400, int(recipe == "laptop-sink"))
    assert lm.tokenizer.decode(lm.tokenizer.encode(TEXT)) == TEXT
    status, _, said = command_line("train", recipe, "--data", tmp_path / "set", "--out", tmp_path / "run", *given)
    assert status == 0
    assert "already finished" in said
