"""What is begun while torch is loaded: for the GPU that training chooses, and without a word where there is none."""

import subprocess
import sys

import pytest
import torch

from sinkdlm import early, fusion

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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
    assert early._index(device) == index
    if index is None:
        assert early.open_device(device) is None


def test_without_a_driver_nothing_is_opened(monkeypatch):
    monkeypatch.setattr(early, "_DRIVER", "libno-such-driver.so.1")
    assert not early._retain(0)
    opened = early.open_device(None)
    assert opened is not None
    opened.join(10)
    assert not opened.is_alive()


def test_where_torch_has_no_gpu_nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fusion, "has_kernels", lambda: pytest.fail("loads kernels without a GPU"))
    opened = early.open_device(None)
    assert opened is not None
    early._load(opened, 0)


def test_the_command_line_does_not_load_torch_for_it():
    code = "import sys; from sinkdlm import early; early.open_device('cpu'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@on_gpu
def test_on_a_gpu_torch_finds_its_context_there():
    """One context: what is opened early is what torch computes in. In a process of its own, which has none yet."""
    code = """
import ctypes
from sinkdlm import early
opened = early.open_device(None)
opened.join()
flags, active = ctypes.c_uint(), ctypes.c_int()
driver = ctypes.CDLL("libcuda.so.1")
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value
import torch
from sinkdlm import fusion
early._load(opened, 0)
assert fusion._load_kernels.cache_info().currsize == 1 and fusion.has_kernels()
assert torch.ones(3, device="cuda").sum().item() == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@on_gpu
def test_a_gpu_that_is_not_there_is_not_opened():
    assert not early._retain(torch.cuda.device_count())
