"""Batches ahead of time: one thread reads the rows of the next steps while this one computes."""

import itertools
from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from sinkdlm.data.rows import Batch, Rows

_AHEAD = 3  # batches that are read before they are asked for


def prefetch(rows: Rows, first: int, last: int, batch: int, share: slice, device: torch.device) -> Generator[Batch, None, None]:
    """This rank's share (slots of the batch) of each step first..last-1, in memory from which the device copies fast. Sample
    indices are step * batch + slot, whoever reads them."""

    def read(step: int) -> Batch:
        found = rows.batch(step * batch + np.arange(share.start, share.stop))
        return found.pinned() if device.type == "cuda" else found

    steps, reader = iter(range(first, last)), ThreadPoolExecutor(1, "sinkdlm-rows")
    ready = deque(reader.submit(read, step) for step in itertools.islice(steps, _AHEAD))
    try:
        while ready:
            found = ready.popleft().result()
            ready.extend(reader.submit(read, step) for step in itertools.islice(steps, 1))
            yield found
    finally:
        reader.shutdown(cancel_futures=True)
