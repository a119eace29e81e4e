"""What a GPU's first step waits for, begun while Python loads torch and the package, which take longer: the device, Triton, cuBLAS.

Nothing here ends a command: what goes wrong, goes wrong again where it is needed, and is told there. Imports no torch by itself.
The threads are no daemons: Python must not end while one of them is in torch or in the driver.
"""

import ctypes
import os
import threading
from typing import Any

_DRIVER = "libcuda.so.1"


def open_device(device: str | None) -> threading.Thread | None:
    """Has the driver set up the GPU that this process is going to use, in a thread; nothing where that is none.

    device: as the command line has it; None: a GPU, if there is one.
    """
    index = _index(device)
    return None if index is None else _begin(_retain, index)


def load_kernels(opened: threading.Thread | None, device: str | None) -> threading.Thread | None:
    """After torch is loaded: Triton's kernels are loaded in a thread, and cuBLAS is."""
    index = _index(device)
    return None if opened is None or index is None else _begin(_load, opened, index)


def _begin(work: Any, *given: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=given)
    thread.start()
    return thread


def _index(device: str | None) -> int | None:
    """Of the GPU that training chooses (training/parallel.py)."""
    kind, _, number = (device or "cuda").partition(":")
    number = number or os.environ.get("LOCAL_RANK", "0")
    return int(number) if kind == "cuda" and number.isdecimal() else None


def _find(index: int) -> tuple[Any, ctypes.c_int] | None:
    """The driver, and its name for the device."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    place = ctypes.c_int()
    return None if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(place), index) else (driver, place)


def _retain(index: int) -> bool:
    """The context is the one that torch gets."""
    found = _find(index)
    if found is None:
        return False
    driver, place = found
    return driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), place) == 0


def _release(index: int) -> None:
    found = _find(index)
    if found is not None:
        driver, place = found
        driver.cuDevicePrimaryCtxRelease(place)


def _load(opened: threading.Thread, index: int) -> None:
    opened.join()
    try:
        import torch

        if not torch.cuda.is_available():
            _release(index)  # a CPU's torch beside a driver
        elif index < torch.cuda.device_count():
            from sinkdlm.kernels import inference as kernels

            with torch.cuda.device(index):
                kernels.build_one()
                torch.mm(*torch.zeros(2, 16, 16, dtype=torch.bfloat16, device="cuda"))
    except Exception:  # whatever the toolchain raises, and torch where a warning is an error
        return
