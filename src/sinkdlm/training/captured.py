"""A micro-batch recorded once and replayed: the kernels of its forward and backward as CUDA graphs, launched all at once.

Owns the fixed inputs and gradients that recordings read and write, and what is done where recording fails. What is computed it is
given, and it is the same whether kernels are replayed or launched one by one. Everything random is keyed by the samples' numbers,
which are inputs.
"""

import gc
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from sinkdlm.data.rows import Batch
from sinkdlm.kernels.cuda_graph import capture_graph

_WARM = 2  # runs before a recording: one compiles and chooses kernels, the other, which adds to gradients, finds everything made

Replay = Callable[[], None]
Compute = Callable[[Batch, Tensor], None]  # (batch, denominator): adds to gradients, and to sums elsewhere, and waits for no device


class Recorder(Protocol):
    """What records: CUDA graphs, or in tests whatever calls again."""

    def warm_up(self, run: Replay) -> None:
        """Runs it as it will be recorded."""

    def record(self, run: Replay) -> Replay:
        """What does the same as `run` did, on the same tensors, each time it is called. Recordings are replayed one at a time."""

    def close(self) -> None:
        """Gives back the memory of all recordings, none of which is replayed any more."""


class CudaRecorder:
    """Warm-up and recordings share a stream, on which autograd's nodes then live, and a pool of memory: what one recording has let
    go the next may use."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._pool = device, torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, run: Replay) -> None:
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            run()
        now.wait_stream(self._stream)

    def record(self, run: Replay) -> Replay:
        gc.collect()  # a graph of autograd's that waits for it would hold nodes of another stream
        self._graphs.append(capture_graph(run, self._device, self._pool, self._stream))
        return self._graphs[-1].replay

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()


def find_recorder(device: torch.device) -> Recorder | None:
    return CudaRecorder(device) if device.type == "cuda" else None


class Recorded:
    """Micro-batches of one shape: rows that are full, alike in everything but what they hold."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        like: Batch,
        recorder: Recorder,
        *,
        dtype: torch.dtype,
        say: Callable[[str], None],
    ) -> None:
        """like: a batch of the shape, on the device, which is written to. dtype: of the denominator."""
        self._inputs = like
        self._denominator = torch.ones((), dtype=dtype, device=like.tokens.device)
        self._parameters, self._say = list(parameters), say
        self._recorder: Recorder | None = recorder
        self._gradients: list[tuple[Tensor, Tensor]] = []  # of each parameter that has one, in memory that stays
        self._replays: tuple[Replay, Replay] | None = None  # writing gradients, and adding to them

    def takes(self, piece: Batch) -> bool:
        """Whether a micro-batch is of this kind."""
        same = piece.tokens.shape == self._inputs.tokens.shape and piece.lengths is None and piece.documents is None
        return same and (piece.maskable is None or self._inputs.maskable is not None)

    @property
    def replays(self) -> bool:
        """Whether there are recordings, which are replayed."""
        return self._replays is not None

    def prepare(self, piece: Batch, denominator: float, compute: Compute) -> bool:
        """Records what `compute` does with a piece that is taken, where that is still to be done; between steps, when there are no
        gradients. False if nothing was done: sums are as they were."""
        if self._recorder is None or self._replays is not None:
            return False
        self._load(piece, denominator)
        why = None
        try:
            self._record(self._recorder, lambda: compute(self._inputs, self._denominator))
        except Exception as failure:  # whatever it is, training goes on: what computes is the same either way
            why = _reason(failure)
        if why is not None:  # here, where nobody holds the failure any more, and with it what was being computed
            self._release(f"the kernels of a step could not be recorded ({why})")
        return True

    def _record(self, recorder: Recorder, run: Replay) -> None:
        for _ in range(_WARM):
            recorder.warm_up(run)
        self._drop_gradients()
        write = recorder.record(run)  # no gradients yet: this makes them
        self._gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        self._replays = write, recorder.record(run)
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
        """Adds the micro-batch's part to gradients and sums, by replaying what `compute` did or by doing it. Gradients may then be
        tensors that stay from step to step."""
        self._load(piece, denominator)
        if self._replays is None:
            compute(self._inputs, self._denominator)
            return
        write, add = self._replays
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
        """Gives back the recordings' memory, for those who lack some; False if there is none. Gradients are dropped."""
        if self._replays is None:
            return False
        self._release("no room beside the recorded kernels of a step")
        return True

    def _release(self, why: str) -> None:
        recorder, self._recorder, self._replays = self._recorder, None, None
        self._gradients = []
        self._drop_gradients()
        try:
            if recorder is not None:
                recorder.close()
        except RuntimeError as failure:
            why = f"{why}; {str(failure).splitlines()[0]}"
        self._say(f"{why}: they are launched one by one from here on, with the same results")


def _reason(failure: Exception) -> str:
    first = failure.__context__ or failure  # ending a recording that failed fails again
    words = (str(first).strip() or "no reason given").splitlines()[0]
    return f"{type(first).__name__}: {words}"
