import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import sinkdlm
from sinkdlm import UserError
from sinkdlm.checkpoint.directory import CONFIG, INDEX, PROVENANCE, WEIGHTS, write_weights
from sinkdlm.data.synthetic import character_tokenizer
from sinkdlm.errors import CheckpointError
from sinkdlm.interop import convert
from small_models import small_config, small_model, small_tokens


def small_tokenizer():
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "token": 2}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


@pytest.fixture
def saved(tmp_path):
    model = small_model(dtype=torch.float32, n_sinks=1, gate="headwise")
    return sinkdlm.save(tmp_path / "run", model, small_tokenizer(), provenance={"seed": 3}), model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_round_trip_is_bit_exact_for_every_variant(tmp_path, variant, dtype):
    model = small_model(dtype=dtype, **variant)
    loaded = sinkdlm.load(sinkdlm.save(tmp_path / "x", model, provenance={"note": "ü"}))
    assert loaded.config == model.config
    assert loaded.tokenizer is None
    assert loaded.provenance["note"] == "ü"
    state = loaded.model.state_dict()
    assert list(state) == list(model.state_dict())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, state[name])
        assert state[name].dtype == dtype
    assert all(weight.requires_grad for weight in loaded.model.parameters())


def test_loaded_model_computes_the_same(saved):
    path, model = saved
    loaded = sinkdlm.load(path)
    tokens = small_tokens(2, 7)
    assert torch.equal(loaded.model(tokens), model(tokens))
    assert sinkdlm.load(path, dtype=torch.bfloat16).model.embed.weight.dtype == torch.bfloat16
    assert loaded.tokenizer.convert_tokens_to_ids(["one", "token"]) == [1, 2]
    assert {"seed", "sinkdlm_version", "torch_version", "created", "weights"} <= set(loaded.provenance)


@pytest.mark.slow
def test_a_tokenizer_without_its_json_is_read_without_a_word(saved):
    """In a process without interop, where transformers does not know our model type."""
    path, _ = saved
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer", "pad_token": "b"}))
    (path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "c": 2}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    script = f"""
import sinkdlm
tokenizer = sinkdlm.load({str(path)!r}).tokenizer
print(type(tokenizer).__name__, tokenizer.pad_token, *tokenizer.encode("cab"))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("Qwen2Tokenizer b 2 0 1\n", "")


def test_parts_of_one_tensor_each_count_in_their_shard(tmp_path):
    whole = torch.arange(3000.0).reshape(3, 1000)
    write_weights(tmp_path, {"q": whole[0], "k": whole[1], "v": whole[2]}, shard_bytes=5000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert [list(load_file(shard)) for shard in shards] == [["q"], ["k"], ["v"]]


def test_large_weights_are_sharded(tmp_path):
    model = small_model(dtype=torch.float32, n_sinks=1)
    path = sinkdlm.save(tmp_path / "x", model, shard_bytes=8000)
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not (path / WEIGHTS).exists()
    for name, weight in sinkdlm.load(path).model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
    shards[1].unlink()
    refused(path, shards[1].name, "missing shard")


def test_keys_that_transformers_adds_are_ignored(saved):
    path, model = saved
    edit_json(path / CONFIG, architectures=["X"], dtype="float32", transformers_version="5.22.0")
    assert sinkdlm.load(path).config == model.config


def test_no_pickle_is_written(saved):
    names = {file.name for file in saved[0].iterdir()}
    assert names == {CONFIG, WEIGHTS, PROVENANCE, "tokenizer.json", "tokenizer_config.json"}


# -- refusals ---------------------------------------------------------------------------------------------------------------


def refused(path, *words, **kwargs):
    with pytest.raises(UserError) as failure:
        sinkdlm.load(path, **kwargs)
    message = str(failure.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def edit_json(path: Path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(path: Path, change):
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


def test_truncated_weights_are_refused(saved):
    path, _ = saved
    os.truncate(path / WEIGHTS, 500)
    refused(path, WEIGHTS, "truncated", "500 bytes")
    refused(path, WEIGHTS, "not a whole safetensors file", verify=False)
    os.truncate(path / WEIGHTS, 3)
    refused(path, WEIGHTS, "not a whole safetensors file", verify=False)


def test_tampered_weights_and_config_are_refused(saved):
    path, _ = saved
    data = bytearray((path / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (path / WEIGHTS).write_bytes(data)
    refused(path, WEIGHTS, "changed since it was written", "SHA-256")
    sinkdlm.load(path, verify=False)
    edit_json(path / CONFIG, sink_position="end")
    refused(path, CONFIG, "config was changed")


def test_a_foreign_or_changed_tokenizer_is_refused(tmp_path):
    """A tokenizer with ids beyond the vocabulary, and one with changed ids. Once removed, another can be given."""
    model = small_model(vocab_size=64, dtype=torch.float32)
    path = sinkdlm.save(tmp_path / "model", model, character_tokenizer())
    assert sinkdlm.load(path).tokenizer("ab").input_ids == character_tokenizer()("ab").input_ids
    spelling = path / "tokenizer.json"
    content = json.loads(spelling.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    spelling.write_text(json.dumps(content))
    refused(path, "tokenizer.json", "changed since it was written", "sinkdlm convert")
    character_tokenizer().save_pretrained(tmp_path / "good")
    foreign = character_tokenizer()
    foreign.add_tokens([f"word{number}" for number in range(20)])
    foreign.save_pretrained(path)
    (path / PROVENANCE).unlink()
    refused(path, "the tokenizer's ids go up to 70, the model has 64 vocabulary rows", "sinkdlm convert")
    with pytest.raises(CheckpointError, match="go up to 70"):
        sinkdlm.save(tmp_path / "other", model, foreign)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    assert sinkdlm.load(path).tokenizer is None
    convert(path, tmp_path / "mended", tokenizer=str(tmp_path / "good"))
    assert sinkdlm.load(tmp_path / "mended").tokenizer("ab").input_ids == character_tokenizer()("ab").input_ids


def test_wrong_shapes_keys_and_dtypes_are_refused(saved):
    path, _ = saved
    (path / PROVENANCE).unlink()  # as other tools write it, without fingerprints
    original = (path / WEIGHTS).read_bytes()
    cases = [
        (lambda t: t.update({"sinks": t["sinks"][:, :4].clone()}), ["sinks has shape (1, 4)", "(1, 24)"], {}),
        (lambda t: t.update({"sinks": t["sinks"].to(torch.int8)}), ["sinks is I8", "F32"], {}),
        (lambda t: t.update({"sinks": t["sinks"].bfloat16()}), ["BF16", "F32", "dtype="], {}),
        (lambda t: t.pop("sinks"), ["missing 1 tensors", "sinks"], {}),
        (lambda t: t.update({"extra": t["sinks"].clone()}), ["unexpected tensor extra"], {}),
    ]
    for change, words, kwargs in cases:
        (path / WEIGHTS).write_bytes(original)
        edit_weights(path, change)
        refused(path, WEIGHTS, *words, **kwargs)
    (path / WEIGHTS).write_bytes(original)
    edit_weights(path, lambda t: t.update({"sinks": t["sinks"].bfloat16()}))
    assert sinkdlm.load(path, dtype=torch.float32).model.sinks.dtype == torch.float32


def test_weights_that_are_not_finite_are_refused_unless_nothing_is_verified(saved):
    path, _ = saved
    (path / PROVENANCE).unlink()
    edit_weights(path, lambda t: t.update({"sinks": t["sinks"] / 0}))
    refused(path, "sinks holds NaN or infinity")
    assert not sinkdlm.load(path, verify=False).model.sinks.isfinite().any()  # so that it can be inspected


def test_foreign_and_broken_folders_are_refused(saved, tmp_path):
    path, _ = saved
    refused(tmp_path / "none", "no such folder")
    refused(path / WEIGHTS, "a file, not a checkpoint folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json", "convert")
    config = (path / CONFIG).read_text()
    edit_json(path / CONFIG, model_type="qwen2")
    refused(path, CONFIG, "model_type is 'qwen2'", "sinkdlm convert")
    (path / CONFIG).write_text(config)
    edit_json(path / CONFIG, n_sinks=-1)
    refused(path, CONFIG, "n_sinks = -1")
    edit_json(path / CONFIG, n_sinks=1, n_snks=1)
    refused(path, CONFIG, "n_snks", "unknown key")
    (path / CONFIG).write_text("{")
    refused(path, CONFIG, "not valid JSON")
    (path / CONFIG).write_text("[]")
    refused(path, CONFIG, "expected a JSON object")
    (path / CONFIG).write_text(config)
    (path / "tokenizer.json").write_text("{}")
    refused(path, "tokenizer files cannot be read", "put whole ones there", verify=False)
    (path / "tokenizer.json").unlink()
    refused(path, "tokenizer_config.json and no tokenizer.json; put that back, or remove tokenizer* to load the model without one")
    (path / "tokenizer_config.json").unlink()
    assert sinkdlm.load(path).tokenizer is None
    (path / WEIGHTS).unlink()
    refused(path, "neither model.safetensors nor model.safetensors.index.json")
    (path / INDEX).write_text('{"weight_map": {"sinks": "../../elsewhere.safetensors"}}')
    refused(path, INDEX, "no weight_map of file names")


# -- atomic writes ------------------------------------------------------------------------------------------------------------


def test_save_replaces_a_checkpoint_and_nothing_else(saved, tmp_path):
    path, model = saved
    model.sinks.data += 1
    sinkdlm.save(path, model)
    assert torch.equal(sinkdlm.load(path).model.sinks, model.sinks)
    assert sorted(tmp_path.iterdir()) == [path]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(UserError, match="no sinkdlm checkpoint"):
        sinkdlm.save(tmp_path / "notes", model)
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"
    with pytest.raises(UserError, match="provenance: weights"):
        sinkdlm.save(path, model, provenance={"weights": 1})
    with pytest.raises(UserError, match="plain JSON"):
        sinkdlm.save(path, model, provenance={"x": object()})
    assert sorted(tmp_path.iterdir()) == [tmp_path / "notes", path]


def test_a_failing_disk_leaves_the_old_checkpoint(saved, tmp_path):
    """A file size limit stands in for a full disk; Python ignores its signal."""
    path, model = saved
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(UserError, match=r"writing failed.*untouched"):
            sinkdlm.save(path, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_replacement_that_fails_halfway_is_undone(saved, monkeypatch):
    path, model = saved
    rename, calls = Path.rename, []

    def fail_second(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_second)
    with pytest.raises(UserError, match="untouched"):
        sinkdlm.save(path, model)
    monkeypatch.undo()
    sinkdlm.load(path)
    assert sorted(path.parent.iterdir()) == [path]


def test_save_follows_a_link_and_respects_the_umask(saved, tmp_path):
    path, model = saved
    (tmp_path / "link").symlink_to(path)
    sinkdlm.save(tmp_path / "link", model)
    assert (tmp_path / "link").is_symlink()
    umask = os.umask(0)
    os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o666 & ~umask}


def test_save_does_not_delete_other_files(saved):
    path, model = saved
    (path / "metrics.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        sinkdlm.save(path, model)
    assert (path / "metrics.jsonl").exists()


def test_what_load_would_refuse_is_not_saved(tmp_path):
    mixed = small_model(dtype=torch.bfloat16)
    mixed.norm.float()
    with torch.device("meta"):
        empty = sinkdlm.DiffusionLM(small_config())
    wrapped = small_model()
    wrapped.blocks[0].mlp.down = torch.nn.Sequential(wrapped.blocks[0].mlp.down)
    diverged = small_model()
    diverged.blocks[1].mlp.down.weight.data[2, 3] = float("nan")
    for model, words in (
        (mixed, "bfloat16 and float32"),
        (empty, "meta device"),
        (wrapped, "merge adapters and unwrap"),
        (diverged, "blocks.1.mlp.down.weight holds NaN or infinity"),
    ):
        with pytest.raises(UserError, match=words):
            sinkdlm.save(tmp_path / "x", model)
    assert not list(tmp_path.iterdir())
    compiled = torch.compile(small_model(), backend="eager")
    sinkdlm.load(sinkdlm.save(tmp_path / "x", compiled))


def test_a_wrong_device_or_dtype_is_named(saved):
    path, _ = saved
    refused(path, "device = 'meta'", device="meta")
    refused(path, "device = 'gpu'", device="gpu")
    refused(path, "dtype = 'bfloat16'", "torch.bfloat16", dtype="bfloat16")
    refused(path, "dtype = torch.int8", dtype=torch.int8)
    edit_json(path / PROVENANCE, weights={WEIGHTS: 3})
    refused(path, WEIGHTS, "not among the weights")


def test_a_checkpoint_from_before_a_field_existed_still_loads(saved):
    """A config as an older version wrote it: without a field that has a default, and with a fingerprint to match."""
    path, model = saved
    fields = {key: value for key, value in json.loads((path / CONFIG).read_text()).items() if value is not None}
    del fields["sink_value"]
    (path / CONFIG).write_text(json.dumps(fields))
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    refused(path, CONFIG, "config was changed")
    edit_json(path / PROVENANCE, config_sha256=digest)
    assert sinkdlm.load(path).config == model.config


def test_an_interrupted_replacement_says_where_the_former_one_is(saved):
    path, _ = saved
    path.rename(path.parent / f".{path.name}.abc.replaced")
    refused(path, "no such folder", ".run.abc.replaced", "rename it back")


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write there"):
        sinkdlm.save(tmp_path / "file" / "x", sinkdlm.DiffusionLM(small_config()))


def test_code_of_a_folder_never_runs(tmp_path):
    """Not even if stdin says yes: a tokenizer that needs its own code is refused."""
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}})
    )
    (tmp_path / "tokenizer.model").write_bytes(b"none")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    script = "import sys, pathlib; from sinkdlm.checkpoint import tokenizer; tokenizer.read_tokenizer(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", script, tmp_path], input="y\n" * 5, capture_output=True, text=True, timeout=100)
    assert "CheckpointError" in done.stderr
    assert not (tmp_path / "ran").exists()
