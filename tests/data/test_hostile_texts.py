"""Texts without line breaks, bombs, and inputs that are no files: bounded memory, the same tokens, one line for what is refused."""

import gzip
import json
import os
import random
import resource
import subprocess
import sys
import time

import pytest
import zstandard
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sinkdlm.data import encoding, inputs, prepare
from sinkdlm.data.encoding import Encoder
from sinkdlm.data.shards import open_split
from sinkdlm.errors import DataError

EOS = "<|endoftext|>"
WORDS = ["the", "sink", "sees", "only", "itself", "12", "plus", "345", "naïve", "e\u0301t", "東京", "ﬁ", "", EOS, "don't", "👨‍👩‍👧"]
DIGITS = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def draw_text(symbols, n, between="", seed=0):
    draw = random.Random(seed)
    return between.join(draw.choice(symbols) for _ in range(n))


TEXTS = {
    "words": draw_text(WORDS, 3000, " "),
    "one letter": "a" * 9_001,
    "two letters": "ab" * 5_000 + "a",
    "digits": draw_text("0123456789", 9_000),
    "no spaces": draw_text("東京都に住む。、", 9_000),
    "letters": draw_text("sinketlao", 9_000),
    "spaces": " " * 9_000 + "x",
    "accents": "e\u0301\u0301" * 3000,
}


def wrap(backend, **special):
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def make_tokenizer(kind):
    corpus = [draw_text(WORDS[:13], 40, " ", seed) for seed in range(50)] + ["a" * 50, "123456" * 9]
    if kind == "words":
        backend = Tokenizer(
            models.WordLevel({word: index for index, word in enumerate([EOS, "<unk>", *WORDS[:12]])}, unk_token="<unk>")
        )
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return wrap(backend, eos_token=EOS, unk_token="<unk>")
    if kind == "unigram":
        backend, special = Tokenizer(models.Unigram()), ["<unk>", EOS]
        backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
        backend.train_from_iterator(corpus, trainer)
        return wrap(backend, eos_token=EOS, unk_token="<unk>")
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    own = {
        "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "space in front": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "three digits": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(DIGITS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        ),
        "sentencepiece": pre_tokenizers.Metaspace(prepend_scheme="first"),
    }
    backend.pre_tokenizer, backend.decoder = own[kind], decoders.ByteLevel()
    alphabet = [] if kind == "sentencepiece" else pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", EOS]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    return wrap(backend, eos_token=EOS, unk_token="<unk>")


@pytest.mark.parametrize("kind", ["bytes", "space in front", "three digits", "sentencepiece", "unigram", "words"])
def test_windows_give_the_tokens_of_the_whole_text(kind, monkeypatch):
    """Of a text's first piece, and of later ones."""
    encoder, wholly = Encoder(make_tokenizer(kind)), []
    whole = {
        name: [list(map(int, ids)) for ids in encoder.encode_pieces([(text, True), (text, False)])] for name, text in TEXTS.items()
    }
    for name, value in (("_LONG", 2000), ("_WINDOW", 2048), ("_OVERLAP", 512), ("_ALIKE", 64)):
        monkeypatch.setattr(encoding, name, value)
    encode = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda texts, **more: (wholly.extend(texts), encode(texts, **more))[1])
    for name, text in TEXTS.items():
        found = encoder.encode_pieces([(text, True), (text, False)])
        assert [list(map(int, ids)) for ids in found] == whole[name], name
    if kind not in ("unigram", "words"):  # they have no tokens for some of the texts, and take a stretch of these as one
        assert wholly == []


MEASURED = """
import resource, sys
from pathlib import Path
from sinkdlm.data.prepare import Settings, prepare
from sinkdlm.interop.tokenizer import read_tokenizer_at
tokenizer = read_tokenizer_at(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare([sys.argv[1]], tokenizer, sys.argv[3], Settings(validation=0.0))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.slow
def test_thirty_megabytes_without_a_line_break_take_little_memory(tmp_path):
    """They took 3.7 GB for each ten."""
    line = draw_text(WORDS[:9], 200_000, " ") + " "
    with (tmp_path / "a.txt").open("w", encoding="utf-8") as file:
        while file.tell() < 30_000_000:
            file.write(line)
    make_tokenizer("words").save_pretrained(tmp_path / "tokenizer")
    command = [sys.executable, "-c", MEASURED, tmp_path / "a.txt", tmp_path / "tokenizer", tmp_path / "out"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 700  # MB
    tokens = open_split(tmp_path / "out").read(0, 100_000).tolist()
    assert tokens == Encoder(make_tokenizer("words")).encode([line[:900_000]])[0][:100_000]


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("bytes")


def refused(tmp_path, tokenizer, *names, **settings):
    with pytest.raises(DataError) as caught:
        prepare.prepare(list(map(str, names)), tokenizer, tmp_path / "out", prepare.Settings(**settings))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize("ending", ["txt.gz", "txt.zst", "jsonl.gz", "jsonl.zst"])
def test_a_bomb_is_refused_after_a_little_of_it(ending, tmp_path, tokenizer, monkeypatch):
    """4 GB in 130 kB of zst, 1 GB in a megabyte of gz: read bit by bit, and given up when it is clear what they are."""
    monkeypatch.setattr(inputs, "_CHUNK", 1 << 12)
    path, zeros = tmp_path / f"bomb.{ending}", bytes(1 << 24)
    if ending.endswith("gz"):
        packed = gzip.compress(zeros)
        path.write_bytes(packed * 64)
    else:
        path.write_bytes(zstandard.compress(zeros) * 256)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert "more than of any text; if it is one all the same, unpack it first" in refused(tmp_path, tokenizer, path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10
    assert time.process_time() - began < 20


def test_a_parquet_file_whose_rows_are_one_long_text_is_refused(tmp_path, tokenizer, monkeypatch):
    """A dictionary stores a text once, however many rows have it: 4 GB in 900 bytes."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(inputs, "_CHUNK", 1 << 12)
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4096, pyarrow.int32()), pyarrow.array(["the sink " * 111_111]))
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet", compression="zstd")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = refused(tmp_path, tokenizer, tmp_path / "a.parquet")
    assert "more than of any text; if it is one all the same, unpack it first" in told
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1000 << 10


def test_a_line_without_end_is_refused(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(inputs, "_LINE_LIMIT", 1 << 20)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * (3 << 20)}))
    assert "a line of more than 1 MB" in refused(tmp_path, tokenizer, tmp_path / "a.jsonl")


def test_the_same_file_twice_is_refused(tmp_path, tokenizer):
    """By its own name, by a link, and as part of a folder that is given too."""
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.txt"
    path.write_text("the sink")
    (tmp_path / "in" / "b.txt").write_text("the sink")  # the same text in two files is not the same file
    (tmp_path / "link.txt").symlink_to(path)
    for names in ((path, path), (path, tmp_path / "link.txt"), (tmp_path / "in", path), (tmp_path / "in", tmp_path / "in")):
        assert "the same file twice, whose documents would count twice" in refused(tmp_path, tokenizer, *names)


def test_a_pipe_is_refused(tmp_path, tokenizer):
    os.mkfifo(tmp_path / "a.txt")
    assert "a pipe or a device, not a file" in refused(tmp_path, tokenizer, tmp_path / "a.txt")


def test_an_index_reads_nothing_outside_its_folder(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("the sink sees only itself")
    prepare.prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "out", prepare.Settings())
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    (shard,) = index["splits"]["train"]["shards"]
    (tmp_path / "outside.bin").write_bytes((tmp_path / "out" / shard["file"]).read_bytes())
    for name in ("../outside.bin", str(tmp_path / "outside.bin"), "..", ""):
        for key in ("file", "rows"):
            changed = {**index, "splits": {"train": {**index["splits"]["train"], "shards": [{**shard, key: name}]}}}
            (tmp_path / "out" / "index.json").write_text(json.dumps(changed))
            with pytest.raises(DataError, match=r"index\.json: damaged.*is no file of this folder"):
                open_split(tmp_path / "out")


LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% if c is string %}x{% endif %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


def test_a_chat_template_that_loops_is_ended(tmp_path, tokenizer, monkeypatch):
    from sinkdlm.errors import SamplingError
    from sinkdlm.text import prompts

    monkeypatch.setattr(prompts, "_TEMPLATE_SECONDS", 0.5)
    looping = wrap(tokenizer.backend_tokenizer, eos_token=EOS)
    looping.chat_template = LOOPS
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    told = refused(tmp_path, looping, tmp_path / "a.jsonl", kind="sft")
    assert "line 1: the tokenizer's chat template fails: it has not ended after" in told
    with pytest.raises(SamplingError, match="chat template fails: it has not ended after"):
        prompts.chat_text(looping, turns[:1])
    looping.chat_template = "{{ messages[0]['content'] }}"
    assert prompts.chat_text(looping, turns[:1]) == "a"
