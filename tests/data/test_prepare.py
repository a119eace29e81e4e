"""From texts to token shards: every input form, exact resumption, splits, examples, and the message of every mistake."""

import errno
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sinkdlm.checkpoint.durable import held
from sinkdlm.data import inputs, prepare, writing
from sinkdlm.data.encoding import Encoder, mark_tokenizer
from sinkdlm.data.inspect import read_set
from sinkdlm.data.prepare import Settings
from sinkdlm.data.shards import open_split
from sinkdlm.data.synthetic import SYMBOLS, character_tokenizer, corpus
from sinkdlm.errors import BusyError, DataError

EOS = "<|endoftext|>"
WORDS = (
    "the",
    "sink",
    "sees",
    "only",
    "itself",
    "and",
    "every",
    "token",
    "so",
    "12",
    "plus",
    "34",
    "is",
    "naïve",
    "Zürich",
    "東京",
)


def texts(n, seed=0, words=30):
    draw = random.Random(seed)
    lines = [" ".join(draw.choice(WORDS) for _ in range(draw.randint(1, words))) for _ in range(n)]
    return [f"{line}.\n{line[::-1]}\n" if place % 3 else line for place, line in enumerate(lines)]


def wrap(backend, **special):
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Byte-level BPE; its folder is the fixture's name_or_path."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts(200), trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    wrap(backend, eos_token=EOS).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def words_tokenizer(*names, bos=True, template=None):
    """One id a word, in the order given, after <s> and </s>; BOS in front of what is tokenised, as Llama's does."""
    vocabulary = {word: index for index, word in enumerate(["<s>", "</s>", "<unk>", *names])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|[^\s]+"), "removed", invert=True)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    found = wrap(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    found.chat_template = template
    return found, vocabulary


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read(folder, split="train"):
    opened = open_split(folder, split)
    return opened.read(0, opened.n_tokens)


def documents(folder, split="train"):
    tokens = read(folder, split)
    eos = open_split(folder, split).eos_id
    assert len(tokens) == 0 or tokens[-1] == eos
    return [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == eos) + 1)[:-1]]


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fails(*args, **kwargs):
    with pytest.raises(DataError) as caught:
        prepare.prepare(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- what is written --------------------------------------------------------------------------------------------------------


def test_every_input_form_gives_the_same_tokens(tmp_path, tokenizer):
    rows = [{"id": place, "text": text} for place, text in enumerate(texts(60))]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    forms = {
        name: tmp_path / name
        for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "files", "cut", "bom.jsonl")
    }
    forms["a.jsonl"].write_bytes(lines)
    forms["a.json"].write_bytes(b"\n" + lines + b"\n")
    forms["bom.jsonl"].write_bytes(b"\xef\xbb\xbf" + lines.rstrip())
    forms["a.jsonl.gz"].write_bytes(gzip.compress(lines[:999]) + gzip.compress(lines[999:]))
    forms["a.jsonl.zst"].write_bytes(zstandard.compress(lines[:999]) + zstandard.compress(lines[999:]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), forms["a.parquet"], row_group_size=7)
    for place, row in enumerate(rows):
        target = forms["files"] / f"{place // 20}" / f"{place:03d}{('.txt', '.md', '.txt.gz')[place % 3]}"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = row["text"].encode()
        target.write_bytes(gzip.compress(text) if target.suffix == ".gz" else text)
    forms["cut"].mkdir()
    (forms["cut"] / "README.md").write_text("About this set, and none of its documents.")
    for place in range(3):
        write_rows(forms["cut"] / f"{place}.jsonl", rows[20 * place : 20 * place + 20])
    found = {}
    for name, path in [*((name, str(path)) for name, path in forms.items()), ("hub", f"hf:{forms['cut']}")]:
        out = tmp_path / "out" / name
        prepare.prepare([path], tokenizer, out, Settings(validation=0.2))
        found[name] = [documents(out, split) for split in ("train", "validation")]
    assert len(found) == 9
    assert all(one == found["a.jsonl"] for one in found.values())
    marks = [{open_split(tmp_path / "out" / name, split).fingerprint for name in found} for split in ("train", "validation")]
    assert [len(mark) for mark in marks] == [1, 1]  # by content, whatever the sources are called
    assert marks[0] != marks[1]
    train, validation = found["a.jsonl"]
    assert len(train) + len(validation) == 60
    assert len(validation) > 3
    decoded = [tokenizer.decode(ids[:-1]) for ids in (*train, *validation)]
    assert sorted(decoded) == sorted(row["text"] for row in rows)


def test_lines_and_paragraphs_are_documents_when_asked(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n  \none\r\ntwo\n\n\nthree\n \nfour")
    for mode, expected in {"line": ["one", "two", "three", "four"], "paragraph": ["one\r\ntwo", "three", "four"]}.items():
        prepare.prepare([str(path)], tokenizer, tmp_path / mode, Settings(documents=mode, validation=0))
        assert [tokenizer.decode(ids[:-1]) for ids in documents(tmp_path / mode)] == expected
    prepare.prepare([str(path)], tokenizer, tmp_path / "file", Settings(validation=0))
    assert tokenizer.decode(read(tmp_path / "file")[:-1]) == path.read_bytes().decode()


def test_text_that_spells_a_special_token_does_not_become_one(tmp_path, tokenizer):
    text = f"before {EOS} after{EOS}"
    write_rows(tmp_path / "a.jsonl", [{"text": text}, {"text": "plain"}])
    before = tokenizer.backend_tokenizer.encode_special_tokens
    prepare.prepare([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "out", Settings(validation=0))
    first, second = documents(tmp_path / "out")
    assert tokenizer.decode(first[:-1]) == text
    assert tokenizer.decode(second[:-1]) == "plain"
    assert tokenizer.backend_tokenizer.encode_special_tokens is before
    assert tokenizer.encode(EOS) == [tokenizer.eos_token_id]


def test_an_end_of_document_id_that_a_vocabulary_spells_is_taken_out(tmp_path):
    found, vocabulary = words_tokenizer("a", "b")
    write_rows(tmp_path / "a.jsonl", [{"text": "a </s> b"}])
    said = prepare.prepare([str(tmp_path / "a.jsonl")], found, tmp_path / "out", Settings(validation=0))
    assert read(tmp_path / "out").tolist() == [vocabulary["a"], vocabulary["b"], 1]
    assert "end-of-document id" in said["notes"][0]


def test_the_index_says_what_is_there(tmp_path, tokenizer):
    write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts(50)])
    out = tmp_path / "out"
    prepare.prepare([str(tmp_path / "a.jsonl")], tokenizer, out, Settings(shard_tokens=300, validation=0.1), source="mine")
    index = json.loads((out / "index.json").read_text())
    assert (index["format"], index["version"], index["kind"], index["dtype"]) == ("sinkdlm-tokens", 1, "text", "uint16")
    assert index["eos_id"] == tokenizer.eos_token_id
    assert index["tokenizer"] == mark_tokenizer(PreTrainedTokenizerFast.from_pretrained(out / "tokenizer"), "mine")
    assert len(index["splits"]["train"]["shards"]) > 3
    for split, part in index["splits"].items():
        tokens = read(out, split)
        assert part["tokens"] == len(tokens) == sum(shard["tokens"] for shard in part["shards"])
        assert part["documents"] == (tokens == index["eos_id"]).sum() == sum(shard["documents"] for shard in part["shards"])
        assert part["highest_id"] == tokens.max()
        for shard in part["shards"]:
            flat = np.fromfile(out / shard["file"], "<u2")
            assert (flat[-1], (flat == index["eos_id"]).sum()) == (index["eos_id"], shard["documents"])
            assert len(flat) < 300 + 400
    assert {path.name for path in out.iterdir()} == {
        "index.json", "tokenizer", *(shard["file"] for part in index["splits"].values() for shard in part["shards"])
    }  # fmt: skip


def test_large_vocabularies_take_four_bytes(tmp_path):
    found, _ = words_tokenizer(*(f"w{index}" for index in range(70_000)))
    write_rows(tmp_path / "a.jsonl", [{"text": "w1 w69999"}])
    assert prepare.prepare([str(tmp_path / "a.jsonl")], found, tmp_path / "out", Settings(validation=0))["dtype"] == "uint32"
    assert read(tmp_path / "out").tolist() == [4, 70_002, 1]


def test_a_tokenizers_mark_ignores_padding_and_names_its_vocabulary(tokenizer):
    mark = mark_tokenizer(tokenizer)
    other = PreTrainedTokenizerFast.from_pretrained(tokenizer.name_or_path)
    other.backend_tokenizer.enable_padding(length=8)
    other.backend_tokenizer.enable_truncation(4)
    assert mark_tokenizer(other) == mark
    other.add_tokens(["new"])
    changed = mark_tokenizer(other)
    assert {key for key in mark if mark[key] != changed[key]} == {"sha256", "vocabulary_sha256", "rows"}


# -- long texts -------------------------------------------------------------------------------------------------------------


def llama_like():
    """SentencePiece's way: a mark before a text's first word, spaces as marks, no words before merging."""
    alphabet = sorted(set("".join(texts(300)).replace(" ", "▁")) | {"▁"})
    merges = [("▁", "t"), ("t", "h"), ("h", "e"), ("s", "e"), ("▁", "s"), ("i", "n")]
    vocabulary = {token: index for index, token in enumerate(["</s>", *alphabet, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return wrap(backend, eos_token="</s>")


@pytest.mark.parametrize("kind", ["bytes", "llama"])
def test_pieces_of_a_long_text_give_the_tokens_of_the_whole(tmp_path, tokenizer, kind, monkeypatch):
    used = tokenizer if kind == "bytes" else llama_like()
    whole = "\n".join(texts(300)) + "\n\n\n  \nend " + " ".join(texts(100)).replace("\n", " ")
    expected = used.backend_tokenizer.encode(whole, add_special_tokens=False).ids
    for name, value in (("PIECE", 500), ("PIECE_LIMIT", 2000), ("_CHUNK", 777)):
        monkeypatch.setattr(inputs, name, value)
    pieces = list(inputs.cut([whole]))
    assert len(pieces) > 20
    assert "".join(pieces) == whole
    for step in (1, 13, 600, 5000):
        assert list(inputs.cut(whole[place : place + step] for place in range(0, len(whole), step))) == pieces
    (tmp_path / "a.txt").write_text(whole)
    write_rows(tmp_path / "b.jsonl", [{"text": whole}])
    for name in ("a.txt", "b.jsonl"):
        prepare.prepare([str(tmp_path / name)], used, tmp_path / f"{name}.out", Settings(validation=0))
        assert read(tmp_path / f"{name}.out").tolist() == [*expected, used.eos_token_id]
    with_many = Settings(validation=0.5)
    write_rows(tmp_path / "c.jsonl", [{"text": "short"}, {"text": whole}, {"text": "also short"}])
    prepare.prepare([str(tmp_path / "c.jsonl")], used, tmp_path / "c", with_many)
    assert [*expected, used.eos_token_id] in [*documents(tmp_path / "c"), *documents(tmp_path / "c", "validation")]


# -- the split --------------------------------------------------------------------------------------------------------------


def test_documents_fall_on_one_side_by_their_text_alone(tmp_path, tokenizer):
    unique = list(dict.fromkeys(texts(400)))
    sides = {}
    for name, given in {"once": unique, "twice": [*unique, *reversed(unique)], "alone": unique[:50]}.items():
        path = write_rows(tmp_path / f"{name}.jsonl", [{"text": text} for text in given])
        prepare.prepare([str(path)], tokenizer, tmp_path / name, Settings(validation=0.25))
        sides[name] = [{tuple(ids) for ids in documents(tmp_path / name, split)} for split in ("train", "validation")]
        assert sum(len(documents(tmp_path / name, split)) for split in ("train", "validation")) == len(given)
    assert not sides["twice"][0] & sides["twice"][1]
    assert sides["twice"] == sides["once"]
    assert sides["alone"][1] <= sides["once"][1]
    assert 0.15 < len(sides["once"][1]) / len(unique) < 0.35


def test_the_last_document_is_held_out_where_chance_chose_none(tmp_path, tokenizer):
    write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts(9)])
    for shard_tokens in (1, 100, 10**6):  # the last one alone in its shard, too
        out = tmp_path / f"{shard_tokens}"
        said = prepare.prepare([str(tmp_path / "a.jsonl")], tokenizer, out, Settings(validation=1e-9, shard_tokens=shard_tokens))
        assert [tokenizer.decode(ids[:-1]) for ids in documents(out)] == texts(9)[:-1]
        assert [tokenizer.decode(ids[:-1]) for ids in documents(out, "validation")] == texts(9)[-1:]
        assert "the last one was put there" in said["notes"][0]
        index = json.loads((out / "index.json").read_text())
        assert [part["highest_id"] for part in index["splits"].values()] == [read(out, split).max() for split in index["splits"]]
    (tmp_path / "one.txt").write_text("one\ntwo\n")
    for validation, ends in ((0.01, 0), (1 - 1e-9, 1)):  # too short to be cut; then all but one token are held out
        said = prepare.prepare(
            [str(tmp_path / "one.txt")], tokenizer, tmp_path / f"one{validation}", Settings(validation=validation)
        )
        assert "--documents line" in said["notes"][0]
        assert [said["splits"][split]["documents"] for split in ("train", "validation")] == [1, ends]


# -- interruption -----------------------------------------------------------------------------------------------------------

# Loads the command line once and runs each job in a fork, which can be killed and limited like any process.
SERVER = """
import json, os, resource, select, signal, sys, time
import sinkdlm.interop, sinkdlm.cli.app, sinkdlm.cli.entry
from sinkdlm.data import prepare
prepare._BATCH_BYTES, prepare._NOTE_SECONDS = 20_000, 0.02
pipe = os.pipe()
work = prepare._Run._run
def run(self):
    os.write(pipe[1], b"!")
    return work(self)
prepare._Run._run = run
def started(seconds):
    if select.select([pipe[0]], [], [], seconds)[0]:
        os.read(pipe[0], 1)
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        if job["limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit"], job["limit"]))
        sys.argv = ["sinkdlm", *job["args"]]
        status = 70
        try:
            sinkdlm.cli.entry.main()
        except SystemExit as left:
            status = left.code or 0
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    if job["kill_after"] is not None:
        started(30)  # killed while it works, not while it starts
        time.sleep(job["kill_after"])
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
    else:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        started(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class CommandLine:
    def __init__(self, folder):
        self.log = folder / "log"
        self.process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"

    def __call__(self, *args, kill_after=None, limit=0):
        """Return the exit status and the output; on request, send SIGKILL some seconds into the work."""
        job = {"args": [str(arg) for arg in args], "log": str(self.log), "limit": limit, "kill_after": kill_after}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline()), self.log.read_text()

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    running = CommandLine(tmp_path_factory.mktemp("command"))
    yield running
    running.close()


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, tokenizer, command):
    for part in range(3):
        write_rows(tmp_path / f"{part}.jsonl", [{"text": text} for text in texts(900, seed=part)] + [{"text": " "}])
    args = ["data", "prepare", *sorted(tmp_path.glob("*.jsonl")), "--tokenizer", tokenizer.name_or_path, "--validation", "0.1"]
    args += ["--shard-tokens", "2000", "--json", "--out"]
    status, said = command(*args, tmp_path / "whole")
    assert status == 0, said
    seconds = json.loads(said)["seconds"]
    draw, kills, positions, out = random.Random(7), 0, set(), tmp_path / "killed"
    while True:
        delay = draw.uniform(0.0, 0.4) * seconds if kills < 7 else None
        status, said = command(*args, out, kill_after=delay)
        if status == 0 and kills >= 3:
            break
        if status == 0:  # faster than the first run: kill sooner
            shutil.rmtree(out)
            kills, seconds = 0, seconds / 2
            continue
        assert status == -signal.SIGKILL, said
        kills += 1
        noted = out / "progress.json"
        positions.add(tuple(json.loads(noted.read_text())["position"]) if noted.exists() else None)
        assert not (out / "index.json").exists()
        with pytest.raises(DataError, match=r"unfinished|no such folder"):
            open_split(out)
    assert len(positions) >= 2
    whole = content(tmp_path / "whole")
    assert content(tmp_path / "killed") == whole
    assert len(whole) > 20
    assert json.loads(said[said.index("{") :])["notes"] == ["3 rows without text were left out"]


@pytest.mark.parametrize("moves", ["the last document", "the end of the only document"])
def test_dying_at_every_step_of_the_writing_loses_nothing(tmp_path, tokenizer, monkeypatch, moves):
    """Stops before the nth rename, truncation or note, for every n, on a set of which something moves to validation."""
    monkeypatch.setattr(prepare, "_BATCH_BYTES", 300)
    if moves == "the last document":
        path = str(write_rows(tmp_path / "a.jsonl", [{"prompt": text, "response": "yes"} for text in texts(7)]))
        settings = Settings(kind="sft", validation=1e-9, shard_tokens=70)
    else:
        (tmp_path / "a.txt").write_text("\n".join(texts(50)))
        path, settings = str(tmp_path / "a.txt"), Settings(validation=0.1)
    prepare.prepare([path], tokenizer, tmp_path / "whole", settings)
    whole = content(tmp_path / "whole")
    assert settings.kind == "text" or len([name for name in whole if name.endswith(".rows")]) > 3

    class Died(BaseException):
        pass

    def finishes(out, steps):
        """Whether the run finishes within `steps` of these calls."""
        left = steps

        def dying(act):
            def step(*args, **kwargs):
                nonlocal left
                left -= 1
                if left < 0:
                    raise Died
                return act(*args, **kwargs)

            return step

        with monkeypatch.context() as patch:
            for owner, name in ((Path, "rename"), *((writing.GrowingFile, name) for name in ("cut_back", "finish", "discard"))):
                patch.setattr(owner, name, dying(getattr(owner, name)))
            try:
                prepare.prepare([path], tokenizer, out, settings)
            except Died:
                return False
            return True

    steps = 0
    while not finishes(tmp_path / f"{steps}", steps):
        prepare.prepare([path], tokenizer, tmp_path / f"{steps}", settings)
        assert content(tmp_path / f"{steps}") == whole, steps
        steps += 1
    assert steps > (20 if settings.kind == "sft" else 8)


@pytest.mark.parametrize("limit", [4000, 12_000])
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(tmp_path, tokenizer, command, limit):
    write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts(1500)])
    args = ["data", "prepare", tmp_path / "a.jsonl", "--tokenizer", tokenizer.name_or_path, "--shard-tokens", "20000", "--out"]
    assert command(*args, tmp_path / "whole")[0] == 0
    status, said = command(*args, tmp_path / "full", limit=limit)
    assert status == 2
    assert said.count("\n") == 1
    assert str(tmp_path / "full") in said
    assert "the same command goes on" in said
    assert command(*args, tmp_path / "full")[0] == 0
    assert content(tmp_path / "full") == content(tmp_path / "whole")


def test_no_space_is_named(tmp_path, tokenizer, monkeypatch):
    def full(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_rows(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    with monkeypatch.context() as patch:
        patch.setattr(writing.GrowingFile, "sync", full)
        assert "No space left on device" in fails([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "out")
    assert prepare.prepare([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "out")["splits"]["train"]["documents"] == 1


def test_other_settings_inputs_or_tokenizers_are_refused(tmp_path, tokenizer, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts(40)])
    unfinished, finished = tmp_path / "unfinished", tmp_path / "finished"
    base = Settings(shard_tokens=100)
    with monkeypatch.context() as patch:
        patch.setattr(writing.Store, "finish", lambda *_: (_ for _ in ()).throw(OSError("stopped")))
        fails([str(path)], tokenizer, unfinished, base)
    prepare.prepare([str(path)], tokenizer, finished, base)
    assert prepare.prepare([str(path)], tokenizer, finished, base)["already"] is True
    other = PreTrainedTokenizerFast.from_pretrained(tokenizer.name_or_path)
    other.add_tokens(["new"])
    for out, word in ((unfinished, "begun"), (finished, "prepared")):
        before = content(out)
        said = fails([str(path)], tokenizer, out, Settings(shard_tokens=100, validation=0.5))
        assert word in said
        assert "validation was 0.01, now 0.5" in said
        assert "--out" in said
        assert "tokenizer was" in fails([str(path)], other, out, base)
        stamp = path.stat().st_mtime_ns
        os.utime(path, ns=(stamp, stamp + 10**9))
        assert "inputs" in fails([str(path)], tokenizer, out, base)
        os.utime(path, ns=(stamp, stamp))
        assert content(out) == before
    with held(unfinished, "test"), pytest.raises(BusyError, match="another preparation"):
        prepare.prepare([str(path)], tokenizer, unfinished, base)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    assert "thesis.txt" in fails([str(path)], tokenizer, tmp_path / "taken", base)


# -- examples ---------------------------------------------------------------------------------------------------------------


def examples(folder, split="train"):
    opened = open_split(folder, split)
    assert opened.kind == "examples"
    return [
        (opened.read(start, start + prompt).tolist(), opened.read(start + prompt, start + total).tolist())
        for start, prompt, total in opened.example_rows().tolist()
    ]


def ids(vocabulary, *texts):
    return [vocabulary[word] for text in texts for word in text.split(" ")]


def test_prompt_and_response(tmp_path):
    words = ("two", "and", "is", "four")
    found, vocabulary = words_tokenizer(*words)
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "two and two", "response": "is four", "more": 1}])
    prepare.prepare([str(path)], found, tmp_path / "out", Settings(kind="sft", validation=0))
    assert examples(tmp_path / "out") == [(ids(vocabulary, "<s> two and two"), ids(vocabulary, "is four </s>"))]
    assert json.loads((tmp_path / "out" / "index.json").read_text())["splits"]["train"]["documents"] == 1
    for adds in (True, False):  # if set, `bos` decides, whatever the tokenizer does by itself
        for bos in (True, False):
            out = tmp_path / f"{adds}{bos}"
            prepare.prepare([str(path)], words_tokenizer(*words, bos=adds)[0], out, Settings(kind="sft", validation=0, bos=bos))
            assert examples(out)[0][0] == ids(vocabulary, "<s> two and two")[0 if bos else 1 :]


CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ ' </s>' if m.role == 'assistant' else '' }} \n {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def chat_words():
    return ("[user]", "[assistant]", "[system]", "\n", "hi", "ho", "he", "hu")


def test_each_assistant_turn_is_an_example(tmp_path):
    found, vocabulary = words_tokenizer(*chat_words(), template=CHAT)
    turns = [("user", "hi"), ("assistant", "ho"), ("user", "he he"), ("assistant", "hu")]
    messages = [{"role": role, "content": text} for role, text in turns]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages}])
    prepare.prepare([str(path)], found, tmp_path / "out", Settings(kind="sft", validation=0))
    first = "[user] hi \n [assistant]"
    assert examples(tmp_path / "out") == [
        (ids(vocabulary, first), ids(vocabulary, "ho </s>")),
        (ids(vocabulary, first, "ho </s> \n [user] he he \n [assistant]"), ids(vocabulary, "hu </s>")),
    ]


def test_a_chat_template_that_cannot_be_split_is_refused(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path = str(write_rows(tmp_path / "a.jsonl", [{"messages": messages}]))
    other = CHAT.replace("[assistant] {% endif", "[system] {% endif")
    broken = "{{ raise_exception('no system turn') }}"
    for template, words in ((other, "not a prefix of the whole"), (None, "no chat template"), (broken, "no system turn")):
        found, _ = words_tokenizer(*chat_words(), template=template)
        said = fails([path], found, tmp_path / "out", Settings(kind="sft"))
        assert words in said
        assert "a.jsonl: line 1" in said
    assert not (tmp_path / "out").exists()
    for messages, words in (("hi", "not a list"), ([{"role": "user", "content": "hi"}], "no response")):
        write_rows(tmp_path / "a.jsonl", [{"messages": messages}])
        assert words in fails([path], words_tokenizer(template=CHAT)[0], tmp_path / "out", Settings(kind="sft"))


@pytest.mark.parametrize(
    ("content", "words"),
    [({}, "missing"), ({"content": None}, "null"), ({"content": [{"type": "text", "text": "hi"}]}, "a list")],
    ids=["missing", "null", "list"],
)
def test_messages_without_text_are_refused(content, words, tmp_path):
    """A template would write None, or a list with brackets, and a model would learn it. Tool messages are up to the template."""
    found, vocabulary = words_tokenizer(*chat_words(), template=CHAT.replace("m.content", "m.content or 'he'"))
    asked, answered = {"role": "user", "content": "hi"}, {"role": "assistant", **content}
    path = str(write_rows(tmp_path / "a.jsonl", [{"messages": [asked, answered]}]))
    said = fails([path], found, tmp_path / "out", Settings(kind="sft", validation=0))
    assert f"a.jsonl: line 1: message 2 (assistant): content is {words}, expected text" in said
    if not content.get("content"):
        write_rows(tmp_path / "a.jsonl", [{"messages": [asked, answered | {"tool_calls": [{"name": "f"}]}]}])
        prepare.prepare([path], found, tmp_path / "out", Settings(kind="sft", validation=0))
        assert examples(tmp_path / "out")[0][1] == ids(vocabulary, "he </s>")


def test_characters_that_a_tokenizer_does_not_have_are_counted(tmp_path, tokenizer):
    """In texts and in examples; the share is of all tokens. GSM8K's answers need their mark."""
    (tmp_path / "a.txt").write_text("ab \u6f22\u5b57 ?\n")
    spelled = character_tokenizer()
    (note,) = [one for one in prepare.prepare([str(tmp_path / "a.txt")], spelled, tmp_path / "a")["notes"] if "lost" in one]
    assert note == "2 tokens (22.2%) stand for characters that the tokenizer does not have; these are lost"
    assert not any("lost" in one for one in prepare.prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "b")["notes"])
    (tmp_path / "g.txt").write_text("tom has 3 eggs \u2014 and gets 2.||3+2=5 #### 5\n" * 2)
    two = Settings(kind="gsm8k-two-stage", validation=0)
    found = prepare.prepare([str(tmp_path / "g.txt")], spelled, tmp_path / "g", two)
    assert any(one.startswith("4 tokens") for one in found["notes"])
    split = open_split(tmp_path / "g", "train")
    written = spelled.decode(np.asarray(split.read(0, split.n_tokens)).tolist())
    assert "Question: tom has 3 eggs" in written
    assert "#### 5" in written
    no_mark = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    said = fails([str(tmp_path / "g.txt")], wrap(no_mark, eos_token="</s>", unk_token="<unk>"), tmp_path / "h", two)
    assert "begin with ####, which the tokenizer cannot encode" in said


def test_gsm8k_in_two_stages_and_in_one(tmp_path):
    words = ("Question:", "Answer:", "####", "how", "many?", "two", "plus", "2", "3", "\n", "one", "1")
    found, vocabulary = words_tokenizer(*words)
    lines, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    lines.write_text("how many?||two plus two #### 2 3\nhow many?||one #### 1")
    write_rows(rows, [{"question": "how many?", "answer": "two plus\ntwo\n#### 3"}])
    asked = "<s> Question: how many?"
    expected = {
        ("two", lines): [
            (asked, "<s> Answer: two plus two </s>"),
            (f"{asked} <s> Answer: two plus two", "<s> #### 2 3 \n </s>"),
            (asked, "<s> Answer: one </s>"),
            (f"{asked} <s> Answer: one", "<s> #### 1 </s>"),
        ],
        ("one", lines): [(asked, "<s> Answer: two plus two #### 2 3 \n </s>"), (asked, "<s> Answer: one #### 1 </s>")],
        ("two", rows): [(asked, "<s> Answer: two plus \n two </s>"), (f"{asked} <s> Answer: two plus \n two", "<s> #### 3 </s>")],
        ("one", rows): [(asked, "<s> Answer: two plus \n two #### 3 </s>")],
    }
    for (stages, path), pairs in expected.items():
        out = tmp_path / f"{stages}{path.suffix}"
        prepare.prepare([str(path)], found, out, Settings(kind=f"gsm8k-{stages}-stage", validation=0))
        assert examples(out) == [(ids(vocabulary, prompt), ids(vocabulary, rest)) for prompt, rest in pairs]


def test_gsm8k_rows_are_those_of_the_official_code_to_the_letter(tmp_path):
    """By its sft/gsm8k_data.py: a line is cut at its marks, white space stays, BOS begins each of three segments."""
    (tmp_path / "train.txt").write_text(
        "How many?||<<2+3=5>> So 5. #### 5\nTwo  gaps? || 1 + 1 ####2\n1||2||3 #### 4\nA?||b #### 1 #### 2\nLast?||x #### 7"
    )
    expected = [
        ("<s>Question: How many?", "<s>Answer: <<2+3=5>> So 5. </s>"),
        ("<s>Question: How many?<s>Answer: <<2+3=5>> So 5. ", "<s>#### 5\n</s>"),
        ("<s>Question: Two  gaps? ", "<s>Answer:  1 + 1 </s>"),
        ("<s>Question: Two  gaps? <s>Answer:  1 + 1 ", "<s>####2\n</s>"),
        ("<s>Question: Last?", "<s>Answer: x </s>"),
        ("<s>Question: Last?<s>Answer: x ", "<s>#### 7</s>"),
    ]
    letters = {token: index for index, token in enumerate(["<s>", "</s>", *map(chr, range(32, 127)), "\n"])}
    spelled = Tokenizer(models.WordLevel(letters))
    spelled.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    spelled.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = wrap(spelled, bos_token="<s>", eos_token="</s>")
    two = Settings(kind="gsm8k-two-stage", validation=0)
    made = prepare.prepare([str(tmp_path / "train.txt")], tokenizer, tmp_path / "out", two)
    names = list(letters)
    found = [tuple("".join(names[index] for index in part) for part in pair) for pair in examples(tmp_path / "out")]
    assert found == expected
    assert made["notes"] == ["2 lines with more than one || or #### were left out, as by the official code"]
    # A row whose second stage is too long loses its first stage, too.
    longest = sum(len(part.replace("<s>", "B").replace("</s>", "E")) for part in expected[1])
    short = prepare.prepare([str(tmp_path / "train.txt")], tokenizer, tmp_path / "short", two.replace(length=longest - 1))
    assert short["splits"]["train"]["documents"] == 4
    assert "2 examples longer than" in short["notes"][0]


def test_long_examples_are_left_out_and_counted(tmp_path, tokenizer):
    given = [{"prompt": "ask", "response": "x " * n} for n in (1, 50, 2, 60)]
    path = str(write_rows(tmp_path / "a.jsonl", given))
    said = prepare.prepare([path], tokenizer, tmp_path / "out", Settings(kind="sft", validation=0, length=20))
    assert said["splits"]["train"]["documents"] == 2
    assert said["notes"] == ["2 examples longer than 20 tokens were left out"]
    assert max(len(prompt) + len(rest) for prompt, rest in examples(tmp_path / "out")) <= 20
    assert "all 4 examples are longer" in fails([path], tokenizer, tmp_path / "none", Settings(kind="sft", length=2))


def test_both_stages_of_a_row_and_all_answers_to_a_question_stay_together(tmp_path, tokenizer):
    lines = [f"{question}||{thought} #### {thought}\n" for question in range(60) for thought in range(3)]
    (tmp_path / "a.txt").write_text("".join(lines))
    settings = Settings(kind="gsm8k-two-stage", validation=0.3, shard_tokens=500)
    prepare.prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "out", settings)
    sides = [
        [tokenizer.decode(prompt).split("Answer")[0] for prompt, _ in examples(tmp_path / "out", split)]
        for split in ("train", "validation")
    ]
    assert sum(map(len, sides)) == 60 * 3 * 2
    assert not set(sides[0]) & set(sides[1])
    assert all(side.count(question) == 6 for side in sides for question in side)
    assert len(set(sides[1])) > 5


# -- looking at sets --------------------------------------------------------------------------------------------------------


def test_info_counts_shows_and_finds_a_flipped_byte(tmp_path, tokenizer, command_line):
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts(80)])
    out = tmp_path / "out"
    prepare.prepare([str(path)], tokenizer, out, Settings(shard_tokens=1000, validation=0.1))
    found = read_set(out, samples=3)
    assert found["splits"]["train"]["documents"] + found["splits"]["validation"]["documents"] == 80
    assert len(found["samples"]) == 6
    assert all(sample["text"].removesuffix(EOS) in texts(80) for sample in found["samples"])
    status, said, _ = command_line("data", "info", out, "--samples", "1")
    assert status == 0
    assert "checksums compared" in said
    files = sorted(out.glob("*.bin"))
    assert len(files) > 3
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        status, _, said = command_line("data", "info", out)
        assert status == 2
        assert str(file) in said
        file.write_bytes(whole)


@pytest.mark.parametrize(("cut", "cure"), [("file", "line or paragraph"), ("paragraph", "line splits"), ("line", None)])
def test_the_cure_for_few_documents_is_not_what_was_done_already(tmp_path, tokenizer, cut, cure):
    (tmp_path / "one.txt").write_text("one\n")
    for number in range(2):
        (tmp_path / "some" / f"{number}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "some" / f"{number}.txt").write_text(f"tom has {number}\n")
    for name in ("one.txt", "some"):
        made = prepare.prepare([str(tmp_path / name)], tokenizer, tmp_path / f"out-{name}", Settings(documents=cut))
        assert f"--documents {cure}" in made["notes"][-1] if cure else "more rows" in made["notes"][-1], made["notes"]


def test_info_shows_each_of_few_examples_once(tmp_path, tokenizer):
    path = tmp_path / "train.txt"
    path.write_text("".join(f"q{n}||{n} #### {n}\n" for n in range(2)))
    made = prepare.prepare([str(path)], tokenizer, tmp_path / "out", Settings(kind="gsm8k-two-stage"))
    assert not any("--documents" in note for note in made["notes"])  # --documents cuts text files, not rows
    shown = [(sample["split"], sample["prompt"], sample["response"]) for sample in read_set(tmp_path / "out", samples=3)["samples"]]
    assert len(shown) == len(set(shown)) == 4


def test_info_reads_datatrove_and_packed_files(tmp_path, tokenizer):
    encoded = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts(20)]
    flat = np.array([token for row in encoded for token in row], "<u2")
    packed, trove = tmp_path / "packed", tmp_path / "trove"
    packed.mkdir(), trove.mkdir()
    header = b"LITPKDS" + (1).to_bytes(8, "little") + bytes([8]) + len(flat).to_bytes(8, "little")
    (packed / "train_0.bin").write_bytes(header + flat.tobytes())
    (trove / "00000_unshuffled.ds").write_bytes(flat.tobytes())
    (trove / "00000_unshuffled.ds.index").write_bytes(np.cumsum([len(row) for row in encoded]).astype("<u8").tobytes())
    (trove / "00000_unshuffled.ds.metadata").write_text(f"any|2\n{len(flat)}\n1 kT")
    found = read_set(packed, tokenizer, samples=1)
    assert (found["format"], found["splits"]["train"]["tokens"]) == ("packed (LITPKDS)", len(flat))
    assert found["samples"][0]["text"] == tokenizer.decode(flat[:128])
    found = read_set(trove, tokenizer, samples=2)
    assert (found["format"], found["splits"]["train"]["documents"]) == ("datatrove", 20)
    assert found["samples"][0]["text"] == texts(20)[0] + EOS
    assert found["samples"][1]["text"].removesuffix(EOS) in texts(20)[5:]
    assert "--tokenizer" in read_set(trove)["notes"][0]


# -- datatrove --------------------------------------------------------------------------------------------------------------


def dealt(tmp_path):
    names = []
    for part in range(3):
        names.append(str(write_rows(tmp_path / f"{part}.jsonl", [{"text": f"{text}{EOS}"} for text in texts(20, seed=part)])))
    (tmp_path / "z.txt").write_text("a text file\n")
    return [*names, str(tmp_path / "z.txt")]


def test_datatrove_writes_the_tokens_that_we_do(tmp_path, tokenizer, command_line):
    names = dealt(tmp_path)
    prepare.prepare(names, tokenizer, tmp_path / "ours", Settings(validation=0))
    args = ["data", "prepare", *names, "--tokenizer", tokenizer.name_or_path, "--executor", "datatrove"]
    args += ["--tasks", "2", "--workers", "1", "--out", tmp_path / "theirs"]
    status, said, log = command_line(*args)
    assert status == 0, log
    assert "wrote 2 files" in said
    eos = tokenizer.eos_token_id
    tokens = np.concatenate([np.fromfile(path, "<u2") for path in sorted((tmp_path / "theirs").glob("*.ds"))])
    parts = [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == eos) + 1)[:-1]]
    assert len(parts) == 61
    assert sorted(parts) == sorted(documents(tmp_path / "ours"))
    opened = open_split(tmp_path / "theirs")
    assert (opened.n_documents, opened.eos_id, opened.tokenizer) == (
        61,
        eos,
        open_split(tmp_path / "ours").tokenizer | {"source": opened.tokenizer["source"]},
    )
    assert len(read_set(tmp_path / "theirs", samples=2)["samples"]) == 2
    status, _, said = command_line(*args, "--field", "body")
    assert status == 2
    assert "field was 'text', now 'body'" in said


SBATCH = """#!/bin/bash
script="${@: -1}"
if grep -q "array=0-1" "$script"; then
    for task in 0 1; do SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=here RUN_OFFSET=0 bash "$script" > /dev/null 2>&1; done
fi
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == -n ]] && shift; shift; done
exec "$@"
"""


@pytest.mark.slow
def test_slurm_tasks_write_the_same_files(tmp_path, tokenizer):
    """With stand-ins for Slurm's commands, which run what is submitted."""
    names = dealt(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, script in {"sbatch": SBATCH, "srun": SRUN, "scontrol": "#!/bin/bash\necho here\n"}.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    shared = [sys.executable, "-m", "sinkdlm", "data", "prepare", *names, "--tokenizer", tokenizer.name_or_path, "--tasks", "2"]
    for executor, more in {"datatrove": ["--workers", "2"], "slurm": ["--partition", "cpu"]}.items():
        command = [*shared, "--executor", executor, "--out", str(tmp_path / executor), *more]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
    found = [{path.name: path.read_bytes() for path in (tmp_path / name).glob("*.ds")} for name in ("datatrove", "slurm")]
    assert len(found[0]) == 2
    assert found[0] == found[1]


# -- the made-up corpus -----------------------------------------------------------------------------------------------------


def check_line(line):
    if "+" in line:
        left, right = line.split("=")
        return sum(map(int, left.split("+"))) == int(right)
    if line.startswith(("copy", "reverse")):
        kind, word, answer = line.replace(":", "").split()
        return answer == (word if kind == "copy" else word[::-1])
    if " has " in line:
        words = line.replace(".", "").split()
        change = int(words[6]) * (1 if words[5] == "gets" else -1)
        answer = words[-4:]
        return answer == [words[0], "has", str(int(words[2]) + change), words[3]]
    return line.startswith("the ")


def test_the_example_corpus_is_right_small_and_the_same_again(tmp_path, command_line):
    found = corpus(500, seed=3)
    lines = [line for text in found for line in text.split("\n")]
    assert len(lines) > 1500
    assert all(map(check_line, lines))
    assert set("".join(found)) <= set(SYMBOLS)
    assert corpus(500, seed=3) == found != corpus(500, seed=4)
    assert corpus(100, seed=3) == found[:100]
    for kind in ("text", "sft"):
        for name in ("a", "b"):
            args = ["data", "example", "--documents", "300", "--kind", kind, "--out", tmp_path / kind / name]
            assert command_line(*args)[0] == 0
        assert content(tmp_path / kind / "a") == content(tmp_path / kind / "b")
        assert all(read(tmp_path / kind / "a", split).max() < 63 for split in ("train", "validation"))
    shown = read_set(tmp_path / "text" / "a", samples=50)["samples"]
    assert len(shown) > 50
    assert all(check_line(line) for sample in shown for line in sample["text"].removesuffix("<eos>").split("\n"))
    asked = read_set(tmp_path / "sft" / "a", samples=20)["samples"]
    assert all(sample["prompt"].endswith("have?") for sample in asked)
    assert all(check_line(sample["prompt"].split(". how")[0] + ". " + sample["response"].removesuffix("<eos>")) for sample in asked)


# -- mistakes ---------------------------------------------------------------------------------------------------------------


MISTAKES = {
    "no file": (["none.jsonl"], ["none.jsonl", "no such file"]),
    "no folder": (["no/such/place"], ["no/such/place", "no such file"]),
    "no file of a folder": (["folder/none"], ["folder/none", "no such file", "hf://folder/none"]),
    "no file by its dot": (["./none"], ["./none", "no such file"]),
    "no file by its ending": (["none.doc"], ["none.doc", "no such file"]),
    "no hub name": (["a/none-"], ["a/none-", "no such file"]),
    "unknown ending": (["a.doc"], ["a.doc", ".jsonl", ".parquet"]),
    "empty file": (["empty.jsonl"], ["empty.jsonl", "no documents"]),
    "blank text": (["blank.txt"], ["blank.txt", "no documents"]),
    "empty folder": (["folder"], ["folder", "empty"]),
    "folder without text": (["settings"], ["settings: no file in it can be read", ".txt, .md, .jsonl", ".parquet"]),
    "wrong field": (["good.jsonl", "--field", "body"], ["good.jsonl: line 1", "body", "the fields are id, text", "--field"]),
    "wrong column": (["good.parquet", "--field", "body"], ["good.parquet", "body", "the fields are id, text"]),
    "number": (["good.jsonl", "--field", "id"], ["line 1", "field id is int"]),
    "broken line": (["broken.jsonl"], ["broken.jsonl: line 3", "not JSON"]),
    "list": (["list.json"], ["list.json: line 1", "jq"]),
    "not UTF-8 rows": (["latin.jsonl"], ["latin.jsonl: line 2", "not UTF-8", "iconv"]),
    "not UTF-8 text": (["latin.txt"], ["latin.txt", "byte 2", "not UTF-8"]),
    "surrogate": (["half.jsonl"], ["half.jsonl: line 1", "surrogate"]),
    "truncated gz": (["cut.jsonl.gz"], ["cut.jsonl.gz", "truncated"]),
    "truncated zst": (["cut.jsonl.zst"], ["cut.jsonl.zst", "truncated"]),
    "no zst": (["not.jsonl.zst"], ["not.jsonl.zst", "damaged"]),
    "no parquet": (["not.parquet"], ["not.parquet", "parquet"]),
    "hub": (["hf:folder"], ["folder", "--split"]),
    "no eos": (["good.jsonl", "--tokenizer", "no-eos"], ["no end-of-document token", "--eos ID"]),
    "bad eos": (["good.jsonl", "--eos", "99999"], ["--eos 99999", "0 to"]),
    "no tokenizer": (["good.jsonl", "--tokenizer", "nowhere"], ["nowhere", "no such tokenizer"]),
    "text for a tokenizer": (["good.jsonl", "--tokenizer", "a.doc"], ["a.doc: holds no tokenizer", "tokenizer.json", "GGUF"]),
    "bos of text": (["good.jsonl", "--bos"], ["bos = True", "examples only"]),
    "no bos": (["half-pair.jsonl", "--kind", "sft", "--bos"], ["--bos", "no beginning-of-text token"]),
    "length of text": (["good.jsonl", "--length", "9"], ["length = 9", "examples only"]),
    "shard tokens": (["good.jsonl", "--shard-tokens", "many"], ["many", "100M"]),
    "no shard tokens": (["good.jsonl", "--shard-tokens", "0"], ["shard_tokens = 0"]),
    "share": (["good.jsonl", "--validation", "1"], ["--validation"]),
    "sft fields": (["good.jsonl", "--kind", "sft"], ["line 1", "prompt and response or messages", "id, text"]),
    "sft half": (["half-pair.jsonl", "--kind", "sft"], ["line 1", "response"]),
    "sft lines": (["latin-free.txt", "--kind", "sft"], ["latin-free.txt: line 1", "prompt and response"]),
    "sft surrogate": (["half-pair-2.jsonl", "--kind", "sft"], ["line 1", "surrogate"]),
    "gsm8k bars": (["latin-free.txt", "--kind", "gsm8k-two-stage"], ["line 1", "||"]),
    "gsm8k mark": (["bars.txt", "--kind", "gsm8k-one-stage"], ["line 1", "####"]),
    "datatrove examples": (["good.jsonl", "--kind", "sft", "--executor", "datatrove"], ["sft", "--executor local"]),
    "slurm partition": (["good.jsonl", "--executor", "slurm"], ["--partition"]),
    "no slurm": (["good.jsonl", "--executor", "slurm", "--partition", "p"], ["sbatch"]),
    "no ray": (["good.jsonl", "--executor", "ray"], ["pip install ray"]),
}


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("wrong")
    rows = [{"id": 1, "text": "one"}, {"id": 2, "text": "two"}]
    write_rows(folder / "good.jsonl", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "good.parquet")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(50)).encode()
    plain = {
        "a.doc": b"x",
        "empty.jsonl": b"",
        "blank.txt": b" \n\n",
        "broken.jsonl": b'{"text": "a"}\n\n{"text": \n',
        "list.json": b'[{"text": "a"},\n{"text": "b"}]\n',
        "latin.jsonl": b'{"text": "a"}\n{"text": "caf\xe9"}\n',
        "latin.txt": b"a \xe9 b",
        "half.jsonl": b'{"text": "\\ud800"}\n',
        "cut.jsonl.gz": gzip.compress(lines)[:-9],
        "cut.jsonl.zst": zstandard.compress(lines)[:-9],
        "not.jsonl.zst": b"plain text, whatever its name says",
        "not.parquet": b"no parquet",
        "half-pair.jsonl": b'{"prompt": "a"}\n',
        "half-pair-2.jsonl": b'{"prompt": "a", "response": "\\ud800"}\n',
        "latin-free.txt": b"a question without bars\n",
        "bars.txt": b"question||thought\n",
    }
    for name, text in plain.items():
        (folder / name).write_bytes(text)
    (folder / "folder").mkdir()
    (folder / "settings").mkdir()
    (folder / "settings" / "task.toml").write_text("a = 1\n")
    wrap(Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())).save_pretrained(folder / "no-eos")
    return folder


def test_names_that_may_be_data_sets_of_the_hub_go_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["imdb", "HuggingFaceFW/fineweb", "allenai/c4.en-1", "hf:any.thing"]
    assert [source.form for source in inputs.find_sources(names)] == ["hub"] * 4
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "a.csv.gz").write_bytes(b"")
    assert inputs.find_sources(["table"])[0].form == "hub"  # datasets reads it


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(case, wrong_files, tmp_path, tokenizer, monkeypatch, command_line):
    args, words = MISTAKES[case]
    monkeypatch.chdir(wrong_files)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "ray", None)
    given = [] if "--tokenizer" in args else ["--tokenizer", tokenizer.name_or_path]
    status, out, said = command_line("data", "prepare", *args, *given, "--out", tmp_path / "out")
    assert (status, out) == (2, "")
    assert said.count("\n") == 1
    for word in words:
        assert word in said
    assert "data set that can be opened" not in said  # nobody asked the hub
    assert not list(tmp_path.glob("out/*.bin*"))
    assert not (tmp_path / "out" / "progress.json").exists()


@pytest.mark.parametrize(
    ("module", "name"), [("zstandard", "cut.jsonl.zst"), ("pyarrow", "good.parquet"), ("datasets", "hf:folder")]
)
def test_an_extra_that_is_missing_is_named(module, name, wrong_files, tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(wrong_files)
    monkeypatch.setitem(sys.modules, module, None)
    assert "pip install 'sinkdlm[data]'" in fails([name], tokenizer, tmp_path / "out")


def test_json_on_stdout_and_the_rest_on_stderr(tmp_path, tokenizer, command_line):
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts(30)])
    args = ["data", "prepare", path, "--tokenizer", tokenizer.name_or_path, "--out", tmp_path / "out", "--json"]
    status, said, _ = command_line(*args)
    found = json.loads(said)
    assert status == 0
    assert found["splits"]["train"]["documents"] + found["splits"]["validation"]["documents"] == 30
    assert found["already"] is False
    assert json.loads(command_line(*args)[1])["already"] is True
    found = json.loads(command_line("data", "info", tmp_path / "out", "--json")[1])
    assert found["settings"]["validation"] == 0.01


def test_tokenizers_are_read_from_wherever_they_lie(tmp_path, tokenizer, command_line):
    (tmp_path / "a.txt").write_text("some text\nmore text\n")
    marks = set()
    for place, name in enumerate((tokenizer.name_or_path, f"{tokenizer.name_or_path}/tokenizer.json")):
        out = tmp_path / f"{place}"
        assert command_line("data", "prepare", tmp_path / "a.txt", "--tokenizer", name, "--out", out)[0] == 0
        marks.add(json.loads((out / "index.json").read_text())["tokenizer"]["sha256"])
    assert len(marks) == 1


def test_encoder_uses_all_it_is_given_and_keeps_order(tokenizer):
    given = texts(50)
    assert Encoder(tokenizer).encode(given) == [tokenizer.encode(text, add_special_tokens=False) for text in given]
