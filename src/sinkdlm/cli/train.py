"""The command `train`; it warms up CUDA, Triton and cuBLAS in threads while Python loads torch and the package.

Errors of the warm-up are ignored: the foreground code raises them again. Its threads are no daemons: Python must not end while one
of them is in torch or in the driver.
"""

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

from sinkdlm.cli.loading import load_parent, load_recipe, say
from sinkdlm.cli.options import Device, Json, Overrides, RecipeFile, option

_DRIVER = "libcuda.so.1"


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: Annotated[Path | None, option("The run folder; by default runs/ and the recipe's name.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Pretrain, adapt from an AR parent, or fine-tune: what the recipe says. The same command goes on where a run stopped."""
    folder = out or Path("runs") / recipe.stem
    resolved = load_recipe(recipe, overrides, folder)
    opened = open_device(device)
    import torch  # noqa: F401  (before the next line)

    load_kernels(opened)
    from sinkdlm.training.health import read_peaks, read_sink_loss
    from sinkdlm.training.loop import train as run

    found = run(resolved, folder, load_parent=load_parent, device=device)
    if found["rank"]:
        return
    found |= {"gradient_peaks": read_peaks(folder), "sink_lost": read_sink_loss(folder)}
    say(found, f"{found['model']}: {found['tokens']:,} tokens, {found['steps']} steps", as_json)


def open_device(device: str | None) -> tuple[Thread, int] | None:
    """Open the GPU that training will choose, in a thread; None where `device`, as the command line has it, names no GPU."""
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
    with suppress(Exception):  # whatever the toolchain raises, and torch where a warning is an error
        import torch

        if index < torch.cuda.device_count():
            from sinkdlm.kernels import inference as kernels

            with torch.cuda.device(index):
                kernels.build_one()
                torch.mm(*torch.zeros(2, 16, 16, dtype=torch.bfloat16, device="cuda"))
