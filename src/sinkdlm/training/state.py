"""Save and load a run's state: written aside, synced, renamed; verified when read; the newest whole one is used.

Tensors go through torch.distributed.checkpoint as safetensors, scalars into state.json beside them. Every rank writes its own parts
and checks its share of the files; any number of ranks can read them. Owns a run's folder `checkpoints/`. Must not know what the
tensors mean.
"""

import hashlib
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkdlm.checkpoint.directory import fingerprint, written_aside
from sinkdlm.checkpoint.durable import sync
from sinkdlm.distributed.world import World
from sinkdlm.errors import CheckpointError, TrainError
from sinkdlm.training.weights import as_sharded, own_part

SCALARS = "state.json"
_FILE_BYTES = 16 << 20
_MOST_FILES = 1000
_NAME = re.compile(r"step-(\d{10})")
Say = Callable[[str], None]
Tensors = Mapping[str, Tensor]
Scalars = Mapping[str, Any]


class States:
    """The states of one run. `save` and `load` take tensors by name; `load` fills them in place. All ranks must call them."""

    def __init__(self, folder: Path, *, keep: int, warn: Say, world: World, before: Callable[[], None] = lambda: None) -> None:
        """before: rank 0 calls it before a state gets its name, to put on disk what the state refers to."""
        self.folder, self.keep, self._warn, self.world, self._before = folder, keep, warn, world, before
        self._on_gpu = world.device.type == "cuda"
        self._pool = ThreadPoolExecutor(1, "sinkdlm-state")
        self._writing: Future[None] | None = None
        self._staged: dict[str, Tensor] = {}
        self.whole: set[int] = set()  # steps whose state this process has fully written or read

    def clean(self) -> None:
        """Remove what a kill left half written. Only the process that holds the run's lock may call it."""
        for left in self.folder.glob(".*"):
            shutil.rmtree(left, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps that have a state, newest first."""
        found = [_NAME.fullmatch(path.name) for path in self.folder.glob("step-*")]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}"

    def save(self, step: int, tensors: Tensors, scalars: Scalars) -> None:
        """Write a state. If that fails, every rank raises CheckpointError, and earlier states stay."""
        self.wait()
        self._write(step, tensors, scalars)

    def save_behind(self, step: int, tensors: Tensors, scalars: Scalars) -> bool:
        """Save a copy in the background: the step waits only for the copy. Returns False, and saves nothing, while the state before
        is still being written."""
        busy = self._writing is not None and not self._writing.done()
        if self.world.from_first(lambda: busy):  # rank 0 finishes last: it renames
            return False
        self.wait()
        self._writing = self._pool.submit(self._write, step, self._copy(tensors), dict(scalars))
        return True

    def prepare(self, tensors: Tensors) -> None:
        """Allocate the buffers of `save_behind` and import what it needs, so that no step waits seconds for that."""
        _dcp()
        for name, tensor in tensors.items():
            part = own_part(tensor).detach()
            self._staged[name] = torch.zeros_like(part, device="cpu", pin_memory=self._on_gpu)  # zeroed, so that it is allocated

    def wait(self) -> None:
        """Wait until nothing is being written; warn if that failed."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except (CheckpointError, OSError, RuntimeError) as failure:  # RuntimeError: another rank is gone
            self._warn(f"a state could not be saved: {failure}")

    def _copy(self, tensors: Tensors) -> dict[str, Tensor]:
        """Copy into buffers that are made once, page-locked for a GPU, so that the copy runs at bus speed."""
        if not self._staged:
            self.prepare(tensors)
        parts = {name: own_part(tensor).detach() for name, tensor in tensors.items()}
        found = {name: _like(tensors[name], self._staged[name].copy_(part, non_blocking=True)) for name, part in parts.items()}
        if self._on_gpu:
            torch.cuda.synchronize()
        return found

    def _write(self, step: int, tensors: Tensors, scalars: Scalars) -> None:
        """Write into a folder aside. Rank 0 makes it, and renames it once every rank's part is on disk."""
        with ExitStack() as aside:
            written = written_aside(self.place(step))
            folder = self.world.attempt_first(lambda: aside.enter_context(written), self.world.files)
            marks = self._write_part(folder, tensors)

            def finish() -> None:
                self._before()
                content = {**scalars, "files": marks}
                (folder / SCALARS).write_text(json.dumps({**content, "sha256": _digest(content)}, indent=2) + "\n")
                aside.close()

            self.world.attempt_first(finish, self.world.files)
        self.whole.add(step)
        if self.world.first:
            self._retire()

    def _write_part(self, folder: Path, tensors: Tensors) -> dict[str, Any]:
        """Write and sync this rank's files; return the fingerprints of all files. If one rank fails, all raise."""
        _save_tensors(folder, tensors, self.world.files)
        marks, problem = {}, None
        try:
            for file in sorted(folder.glob("*" if self.world.alone else f"shard-{self.world.rank + 1:05d}-*")):
                sync(file)
                marks[file.name] = fingerprint(file)
        except OSError as failure:
            problem = failure.strerror or str(failure)
        everyone = self.world.gather((marks, problem), self.world.files)
        for rank, (_, reason) in enumerate(everyone):
            if reason is not None:
                raise CheckpointError(f"rank {rank}: {reason}")
        return {name: mark for found, _ in everyone for name, mark in found.items()}

    def _retire(self) -> None:
        """Remove all but the newest `keep` states. A failure here costs space, not work."""
        newest = max(self.whole)  # newer ones, if any, are damaged and do not count
        for old in [step for step in self.steps() if step <= newest][self.keep :]:
            retired = self.folder / f".{self.place(old).name}.old"
            try:
                self.place(old).rename(retired)  # renamed first: a kill during the deletion leaves no half state
            except OSError as failure:
                self._warn(f"{self.place(old)}: cannot be removed: {failure.strerror}")
            shutil.rmtree(retired, ignore_errors=True)

    def load(self, tensors: Tensors) -> dict[str, Any] | None:
        """Fill the tensors from the newest whole state and return its scalars; None where there is no state at all."""
        steps = self.world.from_first(self.steps)
        for step in steps:
            scalars, problem = self._check(step)
            problems = [found for found in self.world.gather(problem) if found is not None]
            if not problems:
                try:
                    _load_tensors(self.place(step), tensors, self.world.words)
                    self.whole.add(step)
                    return scalars
                except (OSError, ValueError, KeyError) as failure:  # the same on every rank
                    problems = [getattr(failure, "strerror", None) or str(failure)]
            self._warn(f"{self.place(step)}: damaged, skipped: {problems[0].splitlines()[0]}")
        if steps:
            raise TrainError(f"{self.folder}: no whole state among {len(steps)}; restore one, or remove the folder to begin again")
        return None

    def _check(self, step: int) -> tuple[dict[str, Any], str | None]:
        """Return the scalars and what this rank found wrong with the state, or None. Ranks share the reading of the files."""
        folder = self.place(step)
        try:
            scalars = json.loads((folder / SCALARS).read_text())
            if scalars.pop("sha256") != _digest(scalars) or scalars["step"] != step:
                return {}, f"{SCALARS} was changed after it was written"
            for number, (name, mark) in enumerate(scalars["files"].items()):
                size = (folder / name).stat().st_size
                if size != mark["bytes"]:
                    return {}, f"{name} has {size} bytes, not {mark['bytes']}"
                if number % self.world.size == self.world.rank and fingerprint(folder / name)["sha256"] != mark["sha256"]:
                    return {}, f"{name} has another SHA-256 than when it was written"
            return scalars, None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
            return {}, str(failure)


def _digest(content: Scalars) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _like(tensor: Tensor, part: Tensor) -> Tensor:
    """The part on the host, sharded over the ranks as `tensor` is."""
    sharded = as_sharded(tensor)
    return part if sharded is None else type(sharded)(part, sharded._spec, requires_grad=False)


def _deal_to_files(tensors: Tensors) -> dict[str, int]:
    """Return the file of each tensor, from 1. Files are small, because torch holds Python's lock while it serialises one: training
    goes on between them."""
    parts = {name: own_part(tensor) for name, tensor in tensors.items()}
    sizes = {name: part.numel() * part.element_size() for name, part in parts.items()}  # rank 0's decide for all
    most = max(_FILE_BYTES, sum(sizes.values()) // _MOST_FILES)
    files: dict[str, int] = {}
    number, filled = 1, 0
    for name, size in sizes.items():
        if filled and filled + size > most:
            number, filled = number + 1, 0
        files[name] = number
        filled += size
    return files


def _dcp() -> Any:
    """torch.distributed.checkpoint, imported late because it is slow to load."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def _save_tensors(folder: Path, tensors: Tensors, group: Any) -> None:
    """group: the ranks that write together; None for a single process."""
    files = _deal_to_files(tensors)
    writer = _dcp().HuggingFaceStorageWriter(path=str(folder), fqn_to_index_mapping=files, save_distributed=group is not None)
    with _torchs_failures():
        _dcp().save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def _load_tensors(folder: Path, tensors: Tensors, group: Any) -> None:
    reader = _dcp().HuggingFaceStorageReader(path=str(folder))
    with _torchs_failures():
        _dcp().load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)


@contextmanager
def _torchs_failures() -> Iterator[None]:
    """Turn torch's failures into the OSError behind them, on any rank, and silence its warning about a single process."""
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except _dcp().CheckpointException as failure:
        cause = next((error for error, _ in failure.failures.values()), failure)
        raise OSError(getattr(cause, "errno", None) or 0, getattr(cause, "strerror", None) or str(cause)) from failure
