"""Join the processes of one run: find this one's rank, exchange values, and end together.

A launcher (torchrun, Slurm, Ray) describes them in the environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Without
it a process is alone, and nothing here costs anything. Must not know models.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from sinkdlm.checkpoint.directory import find_device
from sinkdlm.distributed.heartbeat import BEAT, Departure, Heartbeat
from sinkdlm.distributed.signals import Stopped
from sinkdlm.errors import CheckpointError, TrainError, UserError

_PATIENCE = 600.0  # seconds for all ranks to arrive
_NAMING = 25.0  # seconds to wait for the name of the lost rank after a collective has failed
_Value = TypeVar("_Value")


class World:
    """This process among those of the run. Group `words` carries Python objects, `files` those of the background writer: both over
    the hosts' network, whatever the GPUs use."""

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.device, self.rank, self.size = device, rank, size
        self.words: Any = dist.new_group(backend="gloo") if size > 1 else None
        self.files: Any = dist.new_group(backend="gloo") if size > 1 else None
        self.heartbeat: Heartbeat | None = None
        hosts, memories = zip(*self.gather((socket.gethostname(), _memory_of(device))), strict=True)
        counts = {hosts.count(host) for host in hosts}
        self.local_size = counts.pop() if len(counts) == 1 else size  # ranks per host, if equal on all hosts
        known = [memory for memory in memories if memory is not None]
        sharing = 1 if device.type == "cuda" else self.local_size
        self.memory = min(known) // sharing if known else None  # bytes that every rank has at least

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    def from_first(self, make: Callable[[], _Value], group: Any = None) -> _Value:
        """Return on every rank what rank 0 makes."""
        if self.alone:
            return make()
        held: list[Any] = [make() if self.first else None]
        dist.broadcast_object_list(held, src=0, group=group or self.words)
        return held[0]

    def attempt_first(self, make: Callable[[], _Value], group: Any = None) -> _Value:
        """Return on every rank what rank 0 makes. If rank 0 cannot write, all raise CheckpointError."""

        def attempt() -> tuple[_Value | None, str | None]:
            try:
                return make(), None
            except (CheckpointError, OSError) as failure:
                return None, str(failure)

        made, problem = self.from_first(attempt, group)
        if problem is not None:
            raise CheckpointError(problem)
        return made  # type: ignore[return-value]

    def gather(self, value: _Value, group: Any = None) -> list[_Value]:
        """Return the values of all ranks, in rank order."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=group or self.words)
        return found

    def sum_(self, values: Tensor) -> Tensor:
        """Sum in place over all ranks, with the same bits on each."""
        if not self.alone:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait for every rank."""
        if not self.alone:
            dist.barrier(group=self.words)

    def share(self, n: int) -> slice:
        """This rank's part of n things: contiguous, and within one of every other's."""
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    def largest_share(self, n: int) -> int:
        return -(-n // self.size)


def _memory_of(device: torch.device) -> int | None:
    """Memory of the device in bytes; for a CPU the machine's, None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _described_world() -> tuple[int, int, int]:
    """Read (rank, size, local rank) from the launcher's environment."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return 0, 1, int(os.environ.get("LOCAL_RANK", "0"))
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        cure = "start the ranks with torchrun, or set these as it does"
        raise TrainError(f"WORLD_SIZE = {size} without {', '.join(missing)}: {cure}")
    return int(os.environ["RANK"]), size, int(os.environ["LOCAL_RANK"])


def _choose_device(wanted: str | None, local_rank: int) -> torch.device:
    name = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        if local_rank >= max(1, torch.cuda.device_count()):
            raise TrainError(
                f"local rank {local_rank}: this host has {torch.cuda.device_count()} GPUs; start at most that many ranks on it"
            )
        name = f"cuda:{local_rank}"
    device = find_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextmanager
def joined(device: str | None = None) -> Iterator[World]:
    """Join the run's processes for the length of this scope. An existing process group is used, and kept.

    If one rank fails, the others end too: they raise a TrainError that names it.
    """
    if dist.is_initialized():
        world = World(_choose_device(device, int(os.environ.get("LOCAL_RANK", "0"))), dist.get_rank(), dist.get_world_size())
        yield world
        for group in (world.words, world.files):
            if group is not None:
                dist.destroy_process_group(group)
        return
    rank, size, local_rank = _described_world()
    place = _choose_device(device, local_rank)
    if size == 1:
        yield World(place)
        return
    world = _join(place, rank, size)
    try:
        yield world
        world.wait()
    except BaseException as failure:
        ended = _explain(failure, world)
        if ended is failure:
            raise
        raise ended from None
    assert world.heartbeat is not None
    world.heartbeat.close()
    dist.destroy_process_group()


def _join(device: torch.device, rank: int, size: int) -> World:
    on_gpu = device.type == "cuda"
    try:
        store, _, _ = next(rendezvous("env://"))
        store = _meet(store, rank, size)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device if on_gpu else None)
        world = World(device, rank, size)
        world.heartbeat = Heartbeat(PrefixStore("watch", store.clone()), rank, size)
        world.wait()
        world.heartbeat.start()
        return world
    except (RuntimeError, ValueError) as failure:  # another rank may die before there is a heartbeat to name it
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(failure).splitlines()[0]
        raise TrainError(f"rank {rank}: cannot join the other ranks at {place}: {reason}") from None


def _meet(store: Any, rank: int, size: int) -> Any:
    """Rendezvous: wait for all ranks of this start; return a part of the store that no earlier start has written to.

    torchrun keeps its store over restarts, and its restart counts differ between hosts: the environment does not tell a rank which
    entries are new. So each rank brings a random word, and a roster counts only for ranks that find theirs in it.
    """
    store.set(f"meet/hello/{rank}", own := secrets.token_hex(8))
    end = time.monotonic() + _PATIENCE
    pause = 0.02 * (1 + size / 64)
    name = _lead(store, size, end, pause) if rank == 0 else _follow(store, rank, size, own, end, pause)
    return PrefixStore(f"start/{name}", store)


def _lead(store: Any, size: int, end: float, pause: float) -> str:
    """Write rosters of the ranks that said hello until all have agreed to the same one."""
    hellos = [f"meet/hello/{rank}" for rank in range(size)]
    names: list[str] = []
    name = ""
    while time.monotonic() < end:
        if store.check(hellos):
            found = [word.decode() for word in store.multi_get(hellos)]
            if found != names:
                names, name = found, secrets.token_hex(8)
            store.set("meet/roster", json.dumps({"name": name, "ranks": names}))
            if all(store.check([f"meet/agreed/{name}/{rank}"]) for rank in range(1, size)):
                store.set(f"meet/begin/{name}", "")
                return name
        time.sleep(pause)
    missing = [rank for rank in range(size) if not store.check([f"meet/agreed/{name}/{rank}"])]
    raise TrainError(f"ranks {', '.join(map(str, missing[1:9]))}: did not arrive within {_PATIENCE:g} s; see their output")


def _follow(store: Any, rank: int, size: int, own: str, end: float, pause: float) -> str:
    """Agree to every roster that has this rank's own word, until rank 0 declares one final."""
    agreed = ""
    while time.monotonic() < end:
        if agreed and store.check([f"meet/begin/{agreed}"]):
            return agreed
        if store.check(["meet/roster"]):
            roster = json.loads(store.get("meet/roster"))
            if roster["name"] != agreed and len(roster["ranks"]) == size and roster["ranks"][rank] == own:
                agreed = roster["name"]
                store.set(f"meet/agreed/{agreed}/{rank}", "")
        time.sleep(pause)
    raise TrainError(f"rank {rank}: not all ranks arrived within {_PATIENCE:g} s; see the output of rank 0")


def _explain(failure: BaseException, world: World) -> BaseException:
    """Return the failure that this rank ends with: its own, or one that names the rank whose end broke a collective."""
    heartbeat = world.heartbeat
    assert heartbeat is not None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher that sees one rank die signals the others: they end anyway
    if isinstance(failure, Stopped):  # all ranks stop after the same step; none leaves before rank 0
        failure.quiet = not world.first
        with contextlib.suppress(RuntimeError):
            world.wait()
            heartbeat.close()
        return failure
    if _lost_a_partner(failure):
        heartbeat.leave("another rank is gone", own=False)
        found = heartbeat.find(_NAMING) or Departure(-1, "a rank was lost")
        failure = TrainError(f"{found.text}; run the same command to go on from the last state")
        failure.quiet = not world.first and found.rank != 0
    else:
        heartbeat.leave(f"{type(failure).__name__}: {failure}".splitlines()[0], own=True)
        if isinstance(failure, UserError) and not world.first:
            failure.quiet = _said_by_first(failure, heartbeat)
    if world.first:  # the store may end with this rank: give the others time to read it
        time.sleep(2 * BEAT)
    return failure


def _said_by_first(failure: UserError, heartbeat: Heartbeat) -> bool:
    """Whether rank 0 ends with the same message, which is then printed once."""
    for _ in range(20):
        said = heartbeat.left(0)
        if said is not None:
            return str(failure).splitlines()[0] in said["why"]
        time.sleep(0.1)
    return False


def _lost_a_partner(failure: BaseException) -> bool:
    words = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL", "recvValue failed", "Connection was likely")
    return isinstance(failure, dist.DistError) or (
        isinstance(failure, RuntimeError) and any(word in str(failure) for word in words)
    )
