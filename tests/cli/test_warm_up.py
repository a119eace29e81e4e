"""The warm-up is for the GPU that training chooses, and is silent without one."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sinkdlm.cli import train as warm_up
from sinkdlm.cli.train import train
from sinkdlm.errors import UserError


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@pytest.mark.parametrize(
    ("device", "rank", "index"),
    [
        (None, None, 0),
        (None, "3", 3),
        ("cuda", "3", 3),
        ("cuda:1", "3", 1),
        ("cpu", None, None),
        ("mps", None, None),
        ("cuda:x", None, None),
    ],
)
def test_it_is_the_device_that_training_chooses(device, rank, index, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(warm_up, "_begin", lambda work, index: work)
    assert warm_up.open_device(device) == (None if index is None else (warm_up._retain, index))


def test_without_a_driver_nothing_is_opened(monkeypatch):
    monkeypatch.setattr(warm_up, "_DRIVER", "libno-such-driver.so.1")
    warm_up._retain(0)
    opened, _ = warm_up.open_device(None)
    opened.join(10)
    assert not opened.is_alive()


def test_what_goes_wrong_is_left_to_who_needs_it(monkeypatch):
    def fails():
        raise AssertionError("a toolchain's own words")

    monkeypatch.setattr(torch.cuda, "device_count", fails)
    warm_up._load(warm_up._begin(lambda: None), 0)


def test_training_begins_it_with_its_device(monkeypatch, tmp_path):
    said: list = []
    monkeypatch.setattr(warm_up, "open_device", lambda device: said.append(("open", device)) or "opened")
    monkeypatch.setattr(warm_up, "load_kernels", said.append)
    with pytest.raises(UserError, match="nowhere"):
        train(missing(tmp_path), out=tmp_path / "run", device="cpu")
    assert said == [("open", "cpu"), "opened"]


def test_a_command_that_fails_waits_for_what_it_began(tmp_path):
    """Python aborts if it ends while a thread is in torch."""
    code = f"""
import sys, time
from sinkdlm.cli import train as warm_up
from sinkdlm.cli import entry
def slow(opened, index):
    import torch
    x, end = torch.zeros(400, 400), time.monotonic() + 2.5
    while time.monotonic() < end:
        torch.mm(x, x)
warm_up._load = slow
sys.argv = ["sinkdlm", "train", {str(missing(tmp_path))!r}, "--out", {str(tmp_path / "run")!r}]
entry.main()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1), found.stderr
    assert "nowhere" in found.stderr


def missing(folder: Path) -> Path:
    """A recipe whose data is not there."""
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f"[model]\npreset = 'nano'\n[data]\nlength = 64\n[data.sets]\n'{folder}/nowhere' = 1\n[train]\nsteps = 1\nbatch = 2\n"
    )
    return recipe


def test_kernels_are_built_by_one_at_a_time(monkeypatch):
    from sinkdlm.kernels import inference as kernels

    within, most = 0, 0

    def build(_):
        nonlocal within, most
        within += 1
        most = max(most, within)
        time.sleep(0.05)
        within -= 1

    monkeypatch.setattr(kernels, "swiglu", build)
    threads = [warm_up._begin(kernels.build_one, "cpu") for _ in range(3)]
    for thread in threads:
        thread.join()
    assert most == 1


def test_the_command_line_does_not_load_torch_for_it():
    code = "import sys; from sinkdlm.cli import train as warm_up; warm_up.open_device('cpu'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@on_gpu
def test_on_a_gpu_torch_finds_its_context_there():
    """torch computes in the context that was opened early. In a new process, which has no context yet."""
    code = """
import ctypes
from sinkdlm.cli import train as warm_up
opened, _ = warm_up.open_device(None)
opened.join()
flags, active = ctypes.c_uint(), ctypes.c_int()
driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value
import torch
from sinkdlm.kernels import available as fusion
from sinkdlm.kernels import inference as kernels
warm_up._load(opened, 0)
assert kernels._swiglu.device_caches[0][0] and fusion.has_kernels()
assert torch.ones(3, device="cuda").sum().item() == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@on_gpu
def test_a_gpu_that_is_not_there_is_not_opened():
    warm_up._retain(torch.cuda.device_count())
    assert torch.ones(3, device="cuda").sum().item() == 3
