"""Watch the ranks of a run by heartbeats in their shared store, and name the one that is lost.

A collective whose partner has died either fails without naming it (gloo) or waits forever (NCCL). Here ranks learn the name, and
end. Must not know training.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

BEAT = 1.0  # seconds between signs of life
_SILENCE = 20.0  # seconds without a beat after which a rank counts as lost
_SUSPECT = 3.0  # the same, once a collective has failed
_GRACE = 10.0  # seconds for a rank to end by itself before it is killed


class Departure(NamedTuple):
    """A rank that is gone, and why."""

    rank: int
    text: str


class Heartbeat:
    """Sends this rank's beats and checks others: rank 0 checks all, the rest check rank 0 and read its reports. A second thread
    checks the first: a store on a silent host closes no connection, and asking it waits forever."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._store.set_timeout(timedelta(seconds=_GRACE))
        self._heard: dict[int, tuple[bytes, int]] = {}  # each rank's last beat, and our own count when it came
        self._count = 0
        self._closed = threading.Event()
        self._gone: Departure | None = None
        self._first = "rank 0"
        self._beat()
        self._store.set(f"name/{rank}", f"rank {rank} ({socket.gethostname()}, process {os.getpid()})")
        self._unanswered = 0  # beats since the store last answered; no clock, which runs on while a process is suspended
        self._thread = threading.Thread(target=self._run, name="sinkdlm-watch", daemon=True)
        self._guard = threading.Thread(target=self._watch_store, name="sinkdlm-watch-store", daemon=True)

    def start(self) -> None:
        """Start checking; call it once every rank has made its heartbeat."""
        self._first = self._name(0)  # read now: a lost store cannot be asked
        self._thread.start()
        self._guard.start()

    def close(self) -> None:
        """Stop. Call it only when every rank has finished: a closed heartbeat looks like a lost rank."""
        self._closed.set()
        self._thread.join()
        self._guard.join()

    def leave(self, why: str, *, own: bool) -> None:
        """Tell the others that this rank ends. own: for its own reason, not because another rank is gone."""
        self._tell(f"left/{self.rank}", {"why": why, "own": own})

    def find(self, seconds: float) -> Departure | None:
        """After a collective has failed, wait up to `seconds` to learn which rank is gone."""
        end = time.monotonic() + seconds
        while self._gone is None and time.monotonic() < end:
            if found := self._look(range(self.size), _SUSPECT):
                return found
            time.sleep(BEAT / 2)
        return self._gone

    def left(self, rank: int) -> dict[str, Any] | None:
        """What a rank said as it left; None if it said nothing."""
        with contextlib.suppress(RuntimeError):
            return self._read(f"left/{rank}")
        return None

    def _beat(self) -> None:
        self._store.set(f"beat/{self.rank}", str(self._count))

    def _run(self) -> None:
        while not self._closed.wait(BEAT):
            self._count += 1
            try:
                self._beat()
                found = self._told()
            except RuntimeError:
                self._end(self._no_store())
                return
            if found is None and self._count % 2 == 0:
                found = self._look(range(self.size) if self.rank == 0 else [0], _SILENCE)
            if found is not None and not self._closed.is_set():
                self._end(found)
                return
            self._unanswered = 0

    def _watch_store(self) -> None:
        while not self._closed.wait(BEAT) and self._gone is None:
            self._unanswered += 1
            if self._unanswered * BEAT > _SILENCE:
                self._end(self._no_store(), tell=False)

    def _look(self, ranks: Any, silence: float) -> Departure | None:
        """Return the first of these ranks that left for its own reason, or fell silent without saying so."""
        others = [rank for rank in ranks if rank != self.rank]
        now = self._count  # no clock: it runs on while a job is suspended, and all ranks would seem silent
        try:
            if told := self._told():
                return told
            beats = self._store.multi_get([f"beat/{rank}" for rank in others])
            for rank, beat in zip(others, beats, strict=True):
                if rank not in self._heard or self._heard[rank][0] != beat:
                    self._heard[rank] = (beat, now)
                said, why = self.left(rank), None
                if said is None and (now - self._heard[rank][1]) * BEAT > silence:
                    why = "was lost"
                elif said and said["own"]:
                    why = f"ended: {said['why']}"
                if why:
                    found = Departure(rank, f"{self._name(rank)} {why}")
                    self._tell("gone", found)
                    return found
        except RuntimeError:
            return self._no_store()
        return None

    def _told(self) -> Departure | None:
        """The rank that another one reported as gone."""
        found = self._read("gone")
        return found and Departure(*found)

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _tell(self, key: str, value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: so are those who would read it
            self._store.set(key, json.dumps(value))

    def _no_store(self) -> Departure:
        return Departure(0, f"the store of {self._first} cannot be reached: that rank, its launcher or its host was lost")

    def _name(self, rank: int) -> str:
        return self._store.get(f"name/{rank}").decode()

    def _end(self, found: Departure, *, tell: bool = True) -> None:
        """Tell the others, and kill this rank if it does not end by itself: a collective on a GPU waits forever."""
        self._gone = found
        if tell:
            self._tell("gone", found)
        if not self._closed.wait(_GRACE):
            if self.rank == 0 or found.rank == 0:
                sys.stderr.write(f"sinkdlm: {found.text}; run the same command to go on from the last state\n")
                sys.stderr.flush()
            os._exit(1)
