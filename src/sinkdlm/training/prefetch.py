"""Batches ahead of time: one thread reads the rows of the next steps while this one computes."""

import queue
import threading
from collections.abc import Iterator

import numpy as np
import torch

from sinkdlm.data.rows import Batch, Rows

_AHEAD = 2  # batches


def batches(rows: Rows, first: int, last: int, batch: int, share: slice, device: torch.device) -> Iterator[Batch]:
    """This rank's share (slots of the batch) of each step first..last-1, in memory from which the device copies fast. Sample
    numbers are step * batch + slot, whoever reads them."""
    ready: queue.Queue[Batch | Exception] = queue.Queue(maxsize=_AHEAD)
    stop = threading.Event()

    def put(item: Batch | Exception) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def read() -> None:
        for step in range(first, last):
            try:
                item = rows.batch(step * batch + np.arange(share.start, share.stop))
                item = item.pinned() if device.type == "cuda" else item
            except Exception as failure:  # handed over: raised where the batch was wanted
                put(failure)
                return
            if not put(item):
                return

    reader = threading.Thread(target=read, name="sinkdlm-rows", daemon=True)
    reader.start()
    try:
        for _ in range(first, last):
            item = ready.get()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stop.set()
        reader.join()
