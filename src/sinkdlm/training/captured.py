"""A micro-batch captured once and replayed: the kernels of its forward and backward as CUDA graphs, launched all at once.

Owns the fixed inputs and gradients that captures read and write, and what is done where capturing fails. Results are the same
whether kernels are replayed or launched one by one: everything random is keyed by the sample indices, which are inputs.
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
Compute = Callable[[Batch, Tensor], None]  # (batch, denominator): adds to gradients, and to sums elsewhere, and waits for no device


class Capturer:
    """Captures CUDA graphs. Warm-up and captures share a stream, on which autograd's nodes then live, and a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._pool = device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, run: Replay) -> None:
        """Runs it as it will be captured."""
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            run()
        now.wait_stream(self._stream)

    def capture(self, run: Replay) -> Replay:
        """What does the same as `run` did, on the same tensors, each time it is called. Captures are replayed one at a time."""
        gc.collect()  # a graph of autograd's that waits for it would hold nodes of another stream
        self._graphs.append(capture_graph(run, self._device, self._pool, self._stream))
        return self._graphs[-1].replay

    def close(self) -> None:
        """Gives back the memory of all captures, none of which is replayed any more."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()


def find_capturer(device: torch.device) -> Capturer | None:
    return Capturer(device) if device.type == "cuda" else None


class Captured:
    """Micro-batches of one shape: rows that are full, alike in everything but what they hold."""

    def __init__(
        self, parameters: Iterable[Tensor], like: Batch, slots: HeadSlots, capturer: Capturer, say: Callable[[str], None]
    ) -> None:
        """like: a batch of the shape, on the device, which is written to."""
        self._inputs, self.slots = like, slots
        self._parameters, self._say = list(parameters), say
        dtype = torch.promote_types(self._parameters[0].dtype, torch.float32)
        self._denominator = torch.ones((), dtype=dtype, device=like.tokens.device)
        self._capturer: Capturer | None = capturer
        self._gradients: list[tuple[Tensor, Tensor]] = []  # of each parameter that has one, in memory that stays
        self.replays: tuple[Replay, Replay] | None = None  # writing gradients, and adding to them

    def takes(self, piece: Batch, counts: Callable[[Batch], Tensor]) -> bool:
        """Whether a micro-batch is of this kind, and its masks find slots. counts: positions of its rows that may be masked."""
        same = piece.tokens.shape == self._inputs.tokens.shape and piece.lengths is None and piece.documents is None
        same &= piece.maskable is None or self._inputs.maskable is not None
        return same and self.slots.fit(piece.samples, counts(piece))

    def prepare(self, piece: Batch, denominator: float, compute: Compute) -> bool:
        """Captures what `compute` does, once, between steps, when there are no gradients. False if nothing was done."""
        if self._capturer is None or self.replays is not None:
            return False
        self._load(piece, denominator)
        why = None
        try:
            self._capture(self._capturer, lambda: compute(self._inputs, self._denominator))
        except Exception as failure:  # whatever it is, training goes on: what computes is the same either way
            why = _reason(failure.__context__ or failure)  # ending a capture that failed fails again
        if why is not None:  # here, where nobody holds the failure any more, and with it what was being computed
            self._release(f"the kernels of a step could not be captured ({why})")
        return True

    def _capture(self, capturer: Capturer, run: Replay) -> None:
        for _ in range(_WARM_UPS):
            capturer.warm_up(run)
        self._drop_gradients()
        write = capturer.capture(run)  # no gradients yet: this makes them
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
        """Adds the micro-batch's part to gradients, which may then be tensors that stay, and to sums."""
        self._load(piece, denominator)
        if self.replays is None:
            compute(self._inputs, self._denominator)
            return
        write, add = self.replays
        if all(p.grad is kept for p, kept in self._gradients):
            add()
            return
        others = [(kept, p.grad) for p, kept in self._gradients if p.grad is not None]  # what micro-batches before left elsewhere
        for p, kept in self._gradients:
            p.grad = kept
        write()
        if others:
            torch._foreach_add_(*map(list, zip(*others, strict=True)))

    def release(self) -> bool:
        """Gives back the captures' memory, for those who lack some; False if there is none. Gradients are dropped."""
        if self.replays is None:
            return False
        self._release("no room beside the captured kernels of a step")
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
        self._say(f"{why}: they are launched one by one from here on, with the same results")


def _reason(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {first_line(failure)}"
