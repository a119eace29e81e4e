"""Batches ahead of time: one thread reads the rows of the next steps while this one computes."""

import queue
import threading
from collections.abc import Generator

import numpy as np
import torch

from sinkdlm.data.rows import Batch, Rows

_AHEAD = 3  # batches that are read before they are asked for


def prefetch(rows: Rows, first: int, last: int, batch: int, share: slice, device: torch.device) -> Generator[Batch, None, None]:
    """This rank's share (slots of the batch) of each step first..last-1, in memory from which the device copies fast. Sample
    indices are step * batch + slot, whoever reads them."""
    ready: queue.Queue[Batch | Exception] = queue.Queue()
    room, stopped = threading.Semaphore(_AHEAD), threading.Event()

    def read() -> None:
        for step in range(first, last):
            room.acquire()
            if stopped.is_set():
                return
            try:
                found = rows.batch(step * batch + np.arange(share.start, share.stop))
                ready.put(found.pinned() if device.type == "cuda" else found)
            except Exception as failure:  # handed over: raised where the batch was wanted
                ready.put(failure)
                return

    reader = threading.Thread(target=read, name="sinkdlm-rows", daemon=True)
    reader.start()
    try:
        for _ in range(first, last):
            found = ready.get()
            room.release()
            if isinstance(found, Exception):
                raise found
            yield found
    finally:
        stopped.set()
        room.release()
        reader.join()
