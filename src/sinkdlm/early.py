"""What a GPU's first step waits for, begun while Python loads torch and the package, which take longer: the device, Triton, cuBLAS.

Nothing here can fail: what goes wrong, goes wrong again where it is needed, and is told there. Imports no torch by itself.
"""

import ctypes
import os
import threading

_DRIVER = "libcuda.so.1"


def open_device(device: str | None) -> threading.Thread | None:
    """Has the driver set up the GPU that this process is going to use, in a thread; nothing where that is none. For when torch is
    going to be loaded in any case: a process should not end while its driver begins.

    device: as the command line has it; None: a GPU, if there is one.
    """
    index = _index(device)
    if index is None:
        return None
    thread = threading.Thread(target=_retain, args=(index,), daemon=True)
    thread.start()
    return thread


def load_kernels(opened: threading.Thread | None, device: str | None) -> None:
    """After torch is loaded: Triton's kernels are loaded in a thread, and cuBLAS is."""
    index = _index(device)
    if opened is not None and index is not None:
        threading.Thread(target=_load, args=(opened, index), daemon=True).start()


def _index(device: str | None) -> int | None:
    """Of the GPU that training chooses (training/parallel.py)."""
    kind, _, number = (device or "cuda").partition(":")
    number = number or os.environ.get("LOCAL_RANK", "0")
    return int(number) if kind == "cuda" and number.isdecimal() else None


def _retain(index: int) -> bool:
    """The context is the one that torch gets; it is kept as long as the process."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    place, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(place), index):
        return False
    return driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), place) == 0


def _load(opened: threading.Thread, index: int) -> None:
    import torch

    from sinkdlm.fusion import has_kernels

    opened.join()
    try:
        if torch.cuda.is_available() and index < torch.cuda.device_count():
            with torch.cuda.device(index):
                has_kernels()
                torch.mm(*torch.zeros(2, 16, 16, dtype=torch.bfloat16, device="cuda"))
    except RuntimeError:
        return
