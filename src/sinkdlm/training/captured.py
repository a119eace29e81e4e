"""Capture a micro-batch's forward and backward as CUDA graphs once, then replay them with a single launch.

Owns the fixed input and gradient tensors of the captures, and the fallback where capturing fails. Replaying gives the same results
as launching kernels one by one: all randomness is keyed by the sample indices, which are inputs.
"""

import gc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sinkdlm.data.rows import Batch
from sinkdlm.errors import first_line
from sinkdlm.kernels.cuda_graph import capture_graph
from sinkdlm.training.head_slots import HeadSlots

_WARM_UPS = 2  # before a capture: the first compiles and tunes kernels, the second adds to gradients that exist

Replay = Callable[[], None]
Compute = Callable[[Batch, Tensor], None]  # (batch, denominator): adds to gradients and running sums, without a host sync


class Capturer:
    """Captures CUDA graphs. Warm-up and captures share one stream, where autograd's nodes then live, and one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._pool = device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, run: Replay) -> None:
        """Run once on the stream that captures use."""
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            run()
        now.wait_stream(self._stream)

    def capture(self, run: Replay) -> Replay:
        """Return a function that repeats `run` on the same tensors. Only one capture may replay at a time."""
        gc.collect()  # autograd graphs that await collection would hold nodes of another stream
        self._graphs.append(capture_graph(run, self._device, self._pool, self._stream))
        return self._graphs[-1].replay

    def close(self) -> None:
        """Free the memory of all captures. None may be replayed afterwards."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()


def find_capturer(device: torch.device) -> Capturer | None:
    return Capturer(device) if device.type == "cuda" else None


class Captured:
    """Runs micro-batches of one shape through a captured graph. Their rows are full and differ only in content."""

    def __init__(
        self, parameters: Iterable[Tensor], like: Batch, slots: HeadSlots, capturer: Capturer, say: Callable[[str], None]
    ) -> None:
        """like: a batch of the shape, on the device; it becomes the input buffer."""
        self._inputs, self.slots = like, slots
        self._parameters, self._say = list(parameters), say
        dtype = torch.promote_types(self._parameters[0].dtype, torch.float32)
        self._denominator = torch.ones((), dtype=dtype, device=like.tokens.device)
        self._capturer: Capturer | None = capturer
        self._gradients: list[tuple[Tensor, Tensor]] = []  # (parameter, its fixed gradient tensor), where there is one
        self.replays: tuple[Replay, Replay] | None = None  # (write gradients, add to them)

    def takes(self, piece: Batch, counts: Callable[[Batch], Tensor]) -> bool:
        """Whether a micro-batch has this shape and its masks fit the head slots. counts: maskable positions of each row."""
        same = piece.tokens.shape == self._inputs.tokens.shape and piece.lengths is None and piece.documents is None
        same &= piece.maskable is None or self._inputs.maskable is not None
        return same and self.slots.fit(piece.samples, counts(piece))

    def prepare(self, piece: Batch, denominator: float, compute: Compute) -> bool:
        """Capture `compute` once, between steps, while there are no gradients. Returns False if there was nothing to do."""
        if self._capturer is None or self.replays is not None:
            return False
        self._load(piece, denominator)
        why = None
        try:
            self._capture(self._capturer, lambda: compute(self._inputs, self._denominator))
        except Exception as failure:  # whatever failed, training goes on with kernels launched one by one
            first = failure.__context__ or failure  # a failed capture also fails to end
            why = f"{type(first).__name__}: {first_line(first)}"
        if why is not None:  # after `except`, where the failure no longer keeps the step's tensors alive
            self._release(f"cannot capture the step's CUDA graphs ({why})")
        return True

    def _capture(self, capturer: Capturer, run: Replay) -> None:
        for _ in range(_WARM_UPS):
            capturer.warm_up(run)
        self._drop_gradients()
        write = capturer.capture(run)  # allocates the gradients: there are none yet
        self._gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        self.replays = write, capturer.capture(run)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None

    def _load(self, piece: Batch, denominator: float) -> None:
        self._inputs.tokens.copy_(piece.tokens, non_blocking=True)
        self._inputs.samples.copy_(piece.samples, non_blocking=True)
        if self._inputs.maskable is not None:
            if piece.maskable is None:
                self._inputs.maskable.fill_(True)
            else:
                self._inputs.maskable.copy_(piece.maskable, non_blocking=True)
        self._denominator.fill_(denominator)

    def add(self, piece: Batch, denominator: float, compute: Compute) -> None:
        """Add the micro-batch's part to gradients and sums. Gradients may then be the captures' fixed tensors."""
        self._load(piece, denominator)
        if self.replays is None:
            compute(self._inputs, self._denominator)
            return
        write, add = self.replays
        if all(p.grad is kept for p, kept in self._gradients):
            add()
            return
        others = [(kept, p.grad) for p, kept in self._gradients if p.grad is not None]  # of earlier micro-batches, uncaptured
        for p, kept in self._gradients:
            p.grad = kept
        write()
        if others:
            torch._foreach_add_(*map(list, zip(*others, strict=True)))

    def release(self) -> bool:
        """Free the captures' memory and drop the gradients. Returns False if there are no captures."""
        if self.replays is None:
            return False
        self._release("out of memory beside the step's CUDA graphs")
        return True

    def _release(self, why: str) -> None:
        capturer, self._capturer, self.replays = self._capturer, None, None
        self._gradients = []
        self._drop_gradients()
        try:
            if capturer is not None:
                capturer.close()
        except RuntimeError as failure:
            why = f"{why}; {first_line(failure)}"
        self._say(f"{why}: kernels are launched one by one from here on, with the same results")
