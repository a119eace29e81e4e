"""Damaged model files: small whole ones, and what becomes of them when bytes and values are changed at random.

`python tests/support/fuzzed_files.py FOLDER FIRST LAST` reads the cases FIRST..LAST-1 in a process of their own. It prints as JSON
how many were read or refused, the slowest, the peak of memory, and every failure that is no UserError of one line.
"""

import json
import random
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file

from sinkdlm import DiffusionLM, ModelConfig, UserError, checkpoint, interop
from sinkdlm.interop import layouts

SECONDS = 10
SHAPE = {"vocab_size": 24, "mask_id": 0, "n_layers": 2, "n_heads": 2, "d_model": 8, "d_ff": 12, "context_length": 32}
VALUES = [0, -1, 1, 3, 1 << 20, 200_000, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 64, 10**30, 0.5, 1e308, float("inf"), float("nan")]
VALUES += [None, True, "", "x", "9" * 5000, [], [1, 2], {}, {"type": "linear"}, [[]] * 50]

COUNTS = [0, 1, 255, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]


def write_whole_files(folder: Path) -> list[Path]:
    """A model of each form that is read."""
    config = ModelConfig(**SHAPE)
    state = DiffusionLM(config, seed=0).state_dict()
    own = checkpoint.directory.save_weights(folder / "own", config, state)
    found = [own]
    for family, layout, names in (
        ("llama", layouts.TRANSFORMERS, layouts.TRANSFORMERS_FIELDS),
        ("llada", layouts.LLADA, layouts.LLADA_FIELDS),
    ):
        path = folder / family
        path.mkdir()
        tensors = {**layout.write(state, config), layout.embed: state["embed.weight"], layout.head: state["lm_head.weight"]}
        save_file(tensors, path / "model.safetensors")
        fields = {"vocab_size": config.vocab_size} | {theirs: getattr(config, ours) for ours, theirs in names.items()}
        (path / "config.json").write_text(json.dumps({"model_type": family, **fields}))
        found.append(path)
    official = {**layouts.OFFICIAL.write(state, config), layouts.OFFICIAL.head: state["lm_head.weight"]}
    official[layouts.OFFICIAL.embed] = torch.cat([state["embed.weight"], state["embed.weight"][:1]])
    torch.save(official, folder / "official.pth")
    return [*found, folder / "official.pth", write_gguf(folder / "whole.gguf", config, state)]


def write_gguf(path: Path, config: ModelConfig, state: dict[str, torch.Tensor]) -> Path:
    import gguf

    layout, writer = layouts.GGUF, gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_array("tokenizer.ggml.tokens", [*"abcdefghijklmnop", "ab", "cd", "abc", "abcd", "<s>", "</s>", "<m>"])
    writer.add_array("tokenizer.ggml.token_type", [1] * 20 + [3] * 3)
    writer.add_array("tokenizer.ggml.merges", ["a b", "c d", "ab c", "ab cd"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0, 2.0])
    writer.add_bos_token_id(20)
    writer.add_eos_token_id(21)
    tensors = {**layout.write(state, config), layout.embed: state["embed.weight"], layout.head: state["lm_head.weight"]}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def damage(whole: Path, folder: Path, draw: random.Random) -> Path:
    """A copy of one of the whole files, changed somewhere."""
    if whole.is_dir():
        path = folder / whole.name
        path.mkdir(exist_ok=True)
        for file in whole.iterdir():
            if file.name != "provenance.json":  # else every change of a checkpoint of ours would be found by its fingerprint
                (path / file.name).write_bytes(file.read_bytes())
        config = path / "config.json"
        if draw.random() < 0.7:
            config.write_text(_changed_json(config.read_text(), draw))
        else:
            weights = path / "model.safetensors"
            weights.write_bytes(_changed_bytes(weights.read_bytes(), draw))
        return path
    path = folder / whole.name
    path.write_bytes(_changed_bytes(whole.read_bytes(), draw))
    return path


def _changed_json(text: str, draw: random.Random) -> str:
    way = draw.random()
    if way < 0.1:
        return _changed_bytes(text.encode(), draw).decode("latin-1")
    if way < 0.2:
        opened = draw.choice(["[", '{"a":', '{"n_layers":['])
        return opened * draw.randint(1, 200_000)
    fields = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(list(fields))
        if draw.random() < 0.1:
            del fields[key]
            break
        fields[key] = draw.choice(VALUES)
    return json.dumps(fields)


def _changed_bytes(content: bytes, draw: random.Random) -> bytes:
    found, near = bytearray(content), min(len(content) - 8, 1200)  # most of it is header
    way = draw.random()
    if way < 0.15:
        return bytes(found[: draw.randrange(len(found))])
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(near)
        if way < 0.5:
            found[place] = draw.randrange(256)
        elif way < 0.8:
            found[place : place + 8] = draw.choice(COUNTS).to_bytes(8, "little")
        else:
            start = draw.randrange(near)
            found[place:place] = found[start : start + draw.randint(1, 64)]
    return bytes(found)


def read_all(folder: Path, first: int, last: int) -> dict:
    """What became of the cases."""
    whole = write_whole_files(folder)
    for path in whole:
        interop.load_any(path, {"n_heads": 2} if path.suffix == ".pth" else None)
    (folder / "damaged").mkdir()
    counts: Counter[str] = Counter()
    failures, slowest = [], 0.0
    for case in range(first, last):
        draw = random.Random(case)
        path = damage(whole[case % len(whole)], folder / "damaged", draw)
        began = time.perf_counter()
        signal.alarm(SECONDS)  # ends the process
        try:
            interop.load_any(path, {"n_heads": 2} if path.suffix == ".pth" else None)
            counts["read"] += 1
        except UserError as failure:
            counts["refused"] += 1
            if "\n" in str(failure).strip():
                failures.append([case, f"several lines: {failure}"])
        except BaseException as failure:
            failures.append([case, f"{type(failure).__name__}: {failure}"[:300]])
        signal.alarm(0)
        slowest = max(slowest, time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"cases": last - first, **counts, "failures": failures, "slowest_s": round(slowest, 2), "peak_mb": peak}


if __name__ == "__main__":
    print(json.dumps(read_all(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))  # noqa: T201
