"""CUDA graphs: capture kernel launches once, then replay them with one call.

Protects a capture from the rest of the process and cleans up after a failed one. Training and sampling use it.
"""

import contextlib
import gc
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

Pool = Any  # a torch.cuda.graph_pool_handle(): the memory that captures share

_CAPTURE_AFTER = 1  # steps of one shape before its kernels are captured
_SMALL_BATCH = 4096  # positions up to which predicting fewer of them saves a GPU no time
_LEAST_WIDTH = 8  # least number of predicted positions per row in larger batches


def capture_graph(
    run: Callable[[], None], device: torch.device, pool: Pool, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Capture what `run` launches; its tensors must keep their addresses. After a failure, do not use the pool again."""
    graph = torch.cuda.CUDAGraph()
    now = torch.cuda.current_stream(device)
    try:
        # Other threads keep pinning memory, synchronizing and freeing graphs: none of this may break the capture.
        with _no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    except BaseException:
        _end_broken(device, pool)
        raise
    finally:
        torch.cuda.set_stream(now)  # a failed capture leaves its own stream behind
    return graph


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: this thread must not free a graph during a capture, and garbage may hold one."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _end_broken(device: torch.device, pool: Pool) -> None:
    """Tell torch's allocator that a capture failed; else it keeps the memory and checks for the end at every allocation.

    If torch has told it already, the first call raises, and the second must not run."""
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        torch._C._cuda_releasePool(device.index or 0, pool)


def can_capture(device: torch.device) -> bool:
    """Check whether kernels can be captured. Autocast caches cast weights, which a replay would not refresh."""
    return device.type == "cuda" and not torch.is_autocast_enabled("cuda")


class StepGraphs:
    """Run steps of repeating shapes; from a shape's second step on, replay a CUDA graph. The graphs share one pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Pool = None
        self._seen: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[Tensor, Callable[[], None]]] = {}

    def run(self, shape: Hashable, control: Tensor, compute: Callable[[Tensor], None]) -> None:
        """Run compute(control). What else it reads must be constant, or tensors that keep their addresses between steps."""
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] <= _CAPTURE_AFTER:
            compute(control)
            return
        if shape not in self._graphs:
            self._graphs[shape] = (control, self._capture(lambda: compute(control)))
        fixed, replay = self._graphs[shape]
        fixed.copy_(control)
        replay()

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        pool, self._pool = self._pool or torch.cuda.graph_pool_handle(), None
        graph = capture_graph(run, self._device, pool)
        self._pool = pool
        return graph.replay


def round_width(count: int, most: int, rows: int) -> int:
    """Round a count of predicted positions up to one of few widths, so that few graphs are captured.

    Widths are quarters of the block and halves of the first quarter; a small batch takes the whole block."""
    if rows * most <= _SMALL_BATCH:
        return most
    unit = -(-most // 4)
    while count <= unit // 2 and unit > _LEAST_WIDTH:
        unit = -(-unit // 2)
    return min(most, -(-count // unit) * unit)


class _CudnnAttentionOff:
    """Disable cuDNN attention while any thread is inside: the switch is process-wide."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


# For shapes that rarely repeat: cuDNN attention builds a plan for each, about 80 ms on an H200, longer than most forwards.
many_shapes = _CudnnAttentionOff()
