"""Read batches ahead: one thread reads the rows of the next steps while this one computes; another compares checksums."""

import itertools
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import torch

from sinkdlm.data.rows import Batch, Rows
from sinkdlm.data.shards import Split

_AHEAD = 3  # batches read ahead


def prefetch(
    rows: Rows, first: int, last: int, batch: int, share: slice, device: torch.device, checked: Sequence[Split] = ()
) -> Generator[Batch, None, None]:
    """Yield this rank's share (slots of the batch) of each step first..last-1, page-locked for a GPU. Sample indices are
    step * batch + slot on any rank.

    checked: splits whose checksums are compared once, meanwhile. One that differs raises DataError."""

    def read(step: int) -> Batch:
        found = rows.batch(step * batch + np.arange(share.start, share.stop))
        return found.pinned() if device.type == "cuda" else found

    def check() -> None:
        for split in checked:
            for _ in split.verify():
                if ended.is_set():
                    return

    ended, checker = Event(), ThreadPoolExecutor(1, "sinkdlm-check")
    compared = checker.submit(check)
    steps, reader = iter(range(first, last)), ThreadPoolExecutor(1, "sinkdlm-rows")
    ready = deque(reader.submit(read, step) for step in itertools.islice(steps, _AHEAD))
    try:
        while ready:
            found = ready.popleft().result()
            ready.extend(reader.submit(read, step) for step in itertools.islice(steps, 1))
            yield found
            if compared.done():
                compared.result()
        ended.set()
        compared.result()
    finally:
        ended.set()
        checker.shutdown()
        reader.shutdown(cancel_futures=True)
