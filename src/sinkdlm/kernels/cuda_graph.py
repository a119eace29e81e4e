"""One CUDA graph: the kernels of a run, recorded and launched all at once.

Owns what a recording must be kept from, and what is put right after one that failed. Training and sampling record by it.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

Pool = Any  # of torch.cuda.graph_pool_handle(): the memory that recordings share


def record_graph(
    run: Callable[[], None], device: torch.device, pool: Pool, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """What `run` launches, on tensors that must stay where they are. After a failure the pool is not used again."""
    graph = torch.cuda.CUDAGraph()
    now = torch.cuda.current_stream(device)
    try:
        # Other threads go on meanwhile, pin memory, wait for results and let graphs go: none of it may end the recording.
        with _no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    except BaseException:
        _end_broken(device, pool)
        raise
    finally:
        torch.cuda.set_stream(now)  # a recording that fails leaves its own behind
    return graph


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """This thread must let go of no graph while it records one, and whatever waits for the collector may hold some."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _end_broken(device: torch.device, pool: Pool) -> None:
    """Torch does not tell its allocator of a recording that broke off, which would keep the memory for it, and look for its end
    at every allocation. Where it did, the first line fails, and the second has no business."""
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        torch._C._cuda_releasePool(device.index or 0, pool)
