"""Model files that somebody damaged, or made to do harm: an error of one line, soon, and in little memory."""

import json
import math
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from fuzzed_files import write_whole_files
from sinkdlm import checkpoint, interop
from sinkdlm.data import inspect
from sinkdlm.errors import CheckpointError, ConvertError, UserError
from sinkdlm.interop.tokenizer import read_tokenizer_at
from sinkdlm.training import setup

U8, F32, STRING, ARRAY = 0, 6, 8, 9


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def gguf_of(*facts: tuple[int, bytes], n_facts=None, n_tensors=0) -> bytes:
    body = b"".join(text(b"key%d" % number) + struct.pack("<I", kind) + value for number, (kind, value) in enumerate(facts))
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, len(facts) if n_facts is None else n_facts) + body


BOMBS = {
    "numbers": gguf_of((ARRAY, struct.pack("<IQ", U8, 1 << 60))),
    "within what the file has room for by the byte": gguf_of((ARRAY, struct.pack("<IQ", F32, 500_000) + bytes(600_000))),
    "strings": gguf_of((ARRAY, struct.pack("<IQ", STRING, 1 << 60))),
    "a long string": gguf_of((STRING, struct.pack("<Q", 1 << 60))),
    "arrays": gguf_of((ARRAY, struct.pack("<IQ", ARRAY, 1 << 60))),
    "arrays in arrays": gguf_of((ARRAY, struct.pack("<IQ", ARRAY, 1) * 100_000)),
    "facts": gguf_of(n_facts=1 << 60),
    "tensors": gguf_of(n_tensors=1 << 60),
    "a tensor of many sizes": gguf_of(n_tensors=1) + text(b"token_embd.weight") + struct.pack("<I", 1 << 31),
    "a tensor behind the end": gguf_of(n_tensors=1) + text(b"token_embd.weight") + struct.pack("<IQQIQ", 2, 8, 8, 0, 1 << 60),
    "a tensor whose size wraps": gguf_of(n_tensors=1) + text(b"x") + struct.pack("<IQQIQ", 2, 1 << 32, 1 << 32, 0, 0),
    "an unknown type": gguf_of((77, b"")),
    "another version": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "nothing": b"GGUF",
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_gguf_header_that_counts_more_than_there_is_ends_at_once(case, tmp_path):
    """gguf's own reader makes an object for each of an array's numbers, whether the file has them or not."""
    (tmp_path / "m.gguf").write_bytes(BOMBS[case])
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(ConvertError, match="not a whole GGUF file") as caught:
        interop.open_source(tmp_path / "m.gguf")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert "\n" not in str(caught.value)
    assert after.ru_maxrss - before.ru_maxrss < 100 << 10  # KiB
    assert after.ru_utime - before.ru_utime < 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    return {path.name: path for path in write_whole_files(tmp_path_factory.mktemp("whole"))}


@pytest.mark.parametrize("family", ["own", "llama", "llada"])
@pytest.mark.parametrize(
    ("ours", "value"),
    [("n_layers", 200_000), ("n_layers", 10**15), ("d_model", 1 << 40), ("d_ff", 1 << 60), ("vocab_size", 1 << 60)],
)
def test_a_config_of_another_size_is_refused_before_it_is_built(family, ours, value, whole, tmp_path):
    """Building 200,000 layers takes minutes even without memory for them; 2**60 rows overflow."""
    from sinkdlm.interop.layouts import LLADA_FIELDS, TRANSFORMERS_FIELDS

    names = {"own": {}, "llama": TRANSFORMERS_FIELDS, "llada": LLADA_FIELDS}[family]
    for file in whole[family].iterdir():
        if file.name != "provenance.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, names.get(ours, ours): value}))
    for read in (interop.load_any, *([checkpoint.directory.load] if family == "own" else [])):
        with pytest.raises(UserError, match=r"describes a model of \d+ layers.*its weights are \d+ tensors"):
            read(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "provenance.json", "model.safetensors.index.json"])
def test_json_nested_without_end_is_one_line(file, whole, tmp_path):
    for own in whole["own"].iterdir():
        (tmp_path / own.name).write_bytes(own.read_bytes())
    if "index" in file:
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / file).write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=rf"{file}: not valid JSON: maximum recursion depth"):
        checkpoint.directory.load(tmp_path)


MERGES_TO_NOTHING = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}


@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_at_which_its_library_panics_is_one_line(whole, tmp_path):
    """A merge whose result the vocabulary lacks. A panic is no Exception: no handler of ours saw it."""
    for file in whole["own"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(MERGES_TO_NOTHING))
    (tmp_path / "set" / "tokenizer").mkdir(parents=True)
    (tmp_path / "set" / "tokenizer" / "tokenizer.json").write_text(json.dumps(MERGES_TO_NOTHING))
    (tmp_path / "m.gguf").write_bytes(whole["whole.gguf"].read_bytes().replace(b"ab cd", b"ab ce"))
    reads = {
        lambda: checkpoint.directory.load(tmp_path): "tokenizer files cannot be read",
        lambda: read_tokenizer_at(tmp_path): "tokenizer cannot be read",
        lambda: interop.load_any(tmp_path / "m.gguf"): "tokenizer cannot be read",
        lambda: inspect._decoder(tmp_path / "set", {}, None): "cannot be read",
    }
    for read, words in reads.items():
        with pytest.raises(UserError, match=words) as caught:
            read()
        assert "\n" not in str(caught.value)
    assert setup._highest_id(tmp_path) == math.inf


class _Payload:
    def __reduce__(self):
        return (print, ("code ran",))


def test_a_pickle_is_never_run_whatever_its_name(whole, tmp_path, capsys):
    """Alone, and as the weights of a directory."""
    for protocol in (2, 4):
        (tmp_path / "model.safetensors").write_bytes(pickle.dumps({"x": _Payload()}, protocol=protocol))
        for path in (tmp_path / "model.safetensors", tmp_path):
            with pytest.raises(ConvertError):
                interop.open_source(path)
    for name in ("config.json",):
        (tmp_path / name).write_bytes((whole["own"] / name).read_bytes())
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        checkpoint.directory.load(tmp_path)
    assert "code ran" not in capsys.readouterr().out


def test_a_torch_file_is_no_larger_than_its_numbers(whole, tmp_path):
    """A compressed one may unpack to anything; an expanded tensor is as large as its shape says, and stored as one number."""
    with (
        zipfile.ZipFile(whole["official.pth"]) as old,
        zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as to,
    ):
        for name in old.namelist():
            to.writestr(name, old.read(name))
    with pytest.raises(ConvertError, match="a compressed zip file, which torch never writes"):
        interop.open_source(tmp_path / "packed.pth")
    torch.save({"transformer.wte.weight": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "expanded.pth")
    with pytest.raises(ConvertError, match=r"transformer\.wte\.weight is larger than the numbers"):
        interop.open_source(tmp_path / "expanded.pth")


def test_shards_outside_the_folder_are_refused(whole, tmp_path):
    outside = tmp_path / "model.safetensors"
    outside.write_bytes((whole["own"] / "model.safetensors").read_bytes())
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "config.json").write_bytes((whole["own"] / "config.json").read_bytes())
    for name in ("../model.safetensors", str(outside), "..", ""):
        (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"embed.weight": name}}))
        for read in (checkpoint.directory.load, interop.open_source):
            with pytest.raises(UserError) as caught:
                read(inside)
            assert "\n" not in str(caught.value)
            assert "no weight_map of file names" in str(caught.value)


@pytest.mark.slow
def test_two_hundred_damaged_files_are_read_or_refused_in_one_line(tmp_path):
    """Each within 10 s, all within 1 GB; what hangs ends the process."""
    script = Path(__file__).parents[1] / "support" / "fuzzed_files.py"
    ended = subprocess.run([sys.executable, script, tmp_path, "0", "200"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["failures"] == []
    assert found["read"] + found["refused"] == 200
    assert found["read"] > 3
    assert found["peak_mb"] < 1000


def test_a_state_of_a_run_is_no_model(tmp_path):
    state = tmp_path / "run" / "checkpoints" / "step-0000000002"
    state.mkdir(parents=True)
    with pytest.raises(ConvertError, match=r"a training run's state, not a model; .*save.milestones"):
        interop.open_source(state)
