"""The command `train`; it warms up CUDA, Triton and cuBLAS in threads while Python loads torch and the package.

Errors of the warm-up are ignored: the foreground code raises them again. Its threads are not daemons: Python must not end while one
of them is in torch or in the driver.
"""

import ctypes
import json
import os
import shlex
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

from sinkdlm.cli.loading import load_parent, load_recipe, say
from sinkdlm.cli.options import Device, Json, Overrides, RecipeFile, option
from sinkdlm.cli.sample import BASE_POLICY
from sinkdlm.errors import UserError

_DRIVER = "libcuda.so.1"


def train(
    recipe: RecipeFile,
    data: Annotated[Path | None, option("Folder of a prepared set to train on, in place of the recipe's.")] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, option("Run folder; by default runs/ plus the recipe's name.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Pretrain, adapt an AR parent or fine-tune, as the recipe says. The same command resumes a run that stopped."""
    folder = out or Path("runs") / recipe.stem
    given = [] if data is None else [f"data.sets={{{json.dumps(str(data))} = 1}}"]  # a JSON string is a TOML key
    resolved = load_recipe(recipe, [*given, *(overrides or [])], folder)
    opened = open_device(device)
    import torch  # noqa: F401  (before the next line)

    load_kernels(opened)
    from sinkdlm.training.health import read_peaks, read_sink_loss, read_stuck
    from sinkdlm.training.loop import train as run

    found = run(resolved, folder, load_parent=load_parent, device=device)
    if found["rank"]:
        return
    found |= {"gradient_spikes": read_peaks(folder), "sink_lost": read_sink_loss(folder), "stuck": read_stuck(folder)}
    found["next"] = next_commands(folder, resolved)
    lines = [
        f"{found['model']}: {found['tokens']:,} tokens, {found['steps']} steps",
        "next:",
        *(f"  {one}" for one in found["next"]),
    ]
    say(found, "\n".join(lines), as_json)


def next_commands(folder: Path, recipe: Any) -> list[str]:
    """Commands that use what a run made: write a text, measure the model or compare it with its twin, look at its attention."""
    from sinkdlm.checkpoint.durable import read_object
    from sinkdlm.checkpoint.tokenizer import read_tokenizer
    from sinkdlm.data.shards import INDEX, open_split

    model, data = folder / "model", Path(next(iter(recipe.data.sets)))
    tokenizer = read_tokenizer(model)
    if tokenizer is None:
        return [_command("convert", model, folder / "with-tokenizer", "--tokenizer", "TOKENIZER")]
    split = open_split(data, "validation")
    held_out = split.n_tokens > 0
    split = split if held_out else open_split(data)
    settings = read_object(data / INDEX, UserError).get("settings") if (data / INDEX).exists() else None
    written = [*BASE_POLICY, *_base_prompt(split, tokenizer)] if split.kind == "text" else _example_prompt(split, tokenizer)
    return [
        _command("sample", model, *written),
        _command(*(_compare(folder, data, held_out) or _measure(model, folder, settings, data, held_out))),
        _command("analyze", model, "--out", folder / "report"),
    ]


def _command(*words: object) -> str:
    return shlex.join(["sinkdlm", *map(str, words)])


def _base_prompt(split: Any, tokenizer: Any) -> list[str]:
    """The first whole words of the held-out text, which may begin within a word."""
    text = tokenizer.decode(split.read(0, min(64, split.n_tokens)).tolist(), skip_special_tokens=True)
    words = text[:60].split()
    return ["--prompt", " ".join(words[1:6] or words)]


def _example_prompt(split: Any, tokenizer: Any) -> list[str]:
    """The first example's prompt; of a chat, what the user says."""
    from sinkdlm.text.prompts import chat_text, has_chat_template

    start, prompt, _ = split.example_rows()[0].tolist()
    ids = split.read(start, start + prompt).tolist()
    if has_chat_template(tokenizer):
        whole, said = tokenizer.decode(ids), "QUESTION"
        before, _, after = chat_text(tokenizer, [{"role": "user", "content": said}]).partition(said)
        if whole.startswith(before) and whole.endswith(after):
            return ["--chat", "--prompt", whole[len(before) : len(whole) - len(after)]]
    return ["--prompt", tokenizer.decode(ids, skip_special_tokens=True)]


def _compare(folder: Path, data: Path, held_out: bool) -> list[object] | None:
    """Compare twins that stand beside each other, as runs/laptop and runs/laptop-sink."""
    plain = folder.with_name(folder.name.removesuffix("-sink"))
    twins = [plain / "model", plain.with_name(f"{plain.name}-sink") / "model"]
    return (
        ["compare", *twins, data, "--out", plain.with_name(f"{plain.name}-compared")]
        if held_out and all(map(Path.is_dir, twins))
        else None
    )


def _measure(model: Path, folder: Path, settings: Any, data: Path, held_out: bool) -> list[object]:
    """Score held-out texts, or a part of the texts that were prepared; else ask a benchmark."""
    try:
        kind, named = str(settings["kind"]), settings["field"]
        texts = next((name for name in settings["inputs"]["names"] if kind == "text" and Path(name).exists()), None)
    except (KeyError, TypeError):  # of an index that says nothing of its texts
        kind, texts = "", None
    if kind == "text" and held_out:
        return ["score", model, data, "--limit", 20]
    if texts is not None:
        field = [] if named == "text" else ["--field", named]
        return ["score", model, texts, *field, "--documents", "paragraph", "--limit", 20]
    task = kind.replace("-", "_") if kind.startswith("gsm8k") else "arc_easy"
    return ["eval", model, "--tasks", task, "--limit", 100, "--out", folder / "eval"]


def open_device(device: str | None) -> tuple[Thread, int] | None:
    """Open the GPU that training will use, in a thread; None if `device`, as on the command line, names no GPU."""
    kind, _, number = (device or "cuda").partition(":")
    number = number or os.environ.get("LOCAL_RANK", "0")
    return (_begin(_retain, int(number)), int(number)) if kind == "cuda" and number.isdecimal() else None


def load_kernels(opened: tuple[Thread, int] | None) -> None:
    """Load Triton's kernels and cuBLAS for an opened GPU, in a thread. torch must be imported by now."""
    if opened is not None:
        _begin(_load, *opened)


def _begin(work: Any, *given: Any) -> Thread:
    thread = Thread(target=work, args=given)
    thread.start()
    return thread


def _retain(index: int) -> None:
    """Retain the primary context of the device: the one that torch computes in."""
    place = ctypes.c_int()
    with suppress(OSError):
        driver = ctypes.CDLL(_DRIVER)
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(place), index):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), place)


def _load(opened: Thread, index: int) -> None:
    opened.join()
    with suppress(Exception):  # whatever the toolchain raises, or torch if warnings are errors
        import torch

        if index < torch.cuda.device_count():
            from sinkdlm.kernels import inference as kernels

            with torch.cuda.device(index):
                kernels.build_one()
                torch.mm(*torch.zeros(2, 16, 16, dtype=torch.bfloat16, device="cuda"))
