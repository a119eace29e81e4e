"""The state of a run on disk: written aside, synced, renamed; verified when read; the newest whole one is taken.

Tensors go through torch.distributed.checkpoint in its safetensors storage, scalars into state.json beside them. Every rank writes
its own parts and checks its share of the files; any number of ranks reads what any other wrote. Owns the folder `checkpoints/` of a
run. Knows nothing of what the tensors mean.
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
    """The states of one run. `save` and `load` take the tensors by name; a load fills them in place. All ranks call them."""

    def __init__(self, folder: Path, *, keep: int, warn: Say, world: World, before: Callable[[], None] = lambda: None) -> None:
        """before: what rank 0 does before a state gets its name (what the state speaks of must be on disk)."""
        self.folder, self.keep, self._warn, self.world, self._before = folder, keep, warn, world, before
        self._on_gpu = world.device.type == "cuda"
        self._pool = ThreadPoolExecutor(1, "sinkdlm-state")
        self._writing: Future[None] | None = None
        self._staged: dict[str, Tensor] = {}
        self.whole: set[int] = set()  # steps whose state this process has written, or read, to the end

    def clean(self) -> None:
        """Removes what a kill left half written. Only the one process that holds the run may call it."""
        for left in self.folder.glob(".*"):
            shutil.rmtree(left, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps that have a state, newest first."""
        found = [_NAME.fullmatch(path.name) for path in self.folder.glob("step-*")]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}"

    def save(self, step: int, tensors: Tensors, scalars: Scalars) -> None:
        """Raises CheckpointError, on every rank, where it cannot be written; what was there before stays."""
        self.wait()
        self._write(step, tensors, scalars)

    def save_behind(self, step: int, tensors: Tensors, scalars: Scalars) -> bool:
        """The same while training goes on, from a copy that is taken first: the step waits for the copy and for nothing else. False
        where the state before is still being written: this one is left out."""
        busy = self._writing is not None and not self._writing.done()
        if self.world.from_first(lambda: busy):  # the first rank ends last, with the renaming
            return False
        self.wait()
        self._writing = self._pool.submit(self._write, step, self._copy(tensors), dict(scalars))
        return True

    def prepare(self, tensors: Tensors) -> None:
        """Makes the buffers that `save_behind` copies to and loads what its thread needs: no step should wait these seconds."""
        _dcp()
        for name, tensor in tensors.items():
            part = own_part(tensor).detach()
            self._staged[name] = torch.zeros_like(part, device="cpu", pin_memory=self._on_gpu)  # touched, so that it is there

    def wait(self) -> None:
        """Until nothing is being written; says what went wrong with it."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except (CheckpointError, OSError, RuntimeError) as failure:  # the last where another rank is gone
            self._warn(f"a state could not be saved: {failure}")

    def _copy(self, tensors: Tensors) -> dict[str, Tensor]:
        """Into buffers that are made once: page-locked for a GPU, so that the copy runs at the bus's pace."""
        if not self._staged:
            self.prepare(tensors)
        parts = {name: own_part(tensor).detach() for name, tensor in tensors.items()}
        found = {name: _like(tensors[name], self._staged[name].copy_(part, non_blocking=True)) for name, part in parts.items()}
        if self._on_gpu:
            torch.cuda.synchronize()
        return found

    def _write(self, step: int, tensors: Tensors, scalars: Scalars) -> None:
        """Rank 0 makes the folder aside and, once every rank's part is in it and on disk, gives it its name."""
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
        """This rank's files, synced; the marks of everybody's. Where one rank fails, all raise."""
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
        """Removes what is older than the newest few. A failure here costs room, not work."""
        newest = max(self.whole)  # newer ones, if any, are damaged, and count for nothing
        for old in [step for step in self.steps() if step <= newest][self.keep :]:
            retired = self.folder / f".{self.place(old).name}.old"
            try:
                self.place(old).rename(retired)  # first out of sight: a kill while it is being deleted leaves no half state
            except OSError as failure:
                self._warn(f"{self.place(old)}: cannot be removed: {failure.strerror}")
            shutil.rmtree(retired, ignore_errors=True)

    def load(self, tensors: Tensors) -> dict[str, Any] | None:
        """Fills the tensors from the newest whole state and returns its scalars; None where there is no state at all."""
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
        """The scalars, and what is wrong with the state as far as this rank sees it. Ranks share the reading of the files."""
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
        except (OSError, ValueError, KeyError) as failure:
            return {}, str(failure)


def _digest(content: Scalars) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _like(tensor: Tensor, part: Tensor) -> Tensor:
    """The part on the host, knowing of the other ranks' as `tensor` does."""
    sharded = as_sharded(tensor)
    return part if sharded is None else type(sharded)(part, sharded._spec, requires_grad=False)


def _deal_to_files(tensors: Tensors) -> dict[str, int]:
    """Which file each tensor goes to, from 1. Files are small, because torch serialises one at a time in a call that keeps every
    other thread of the process waiting: training goes on between them."""
    parts = {name: own_part(tensor) for name, tensor in tensors.items()}
    sizes = {name: part.numel() * part.element_size() for name, part in parts.items()}  # rank 0's, which decides for all
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
    """torch's package for it, which is slow to load."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def _save_tensors(folder: Path, tensors: Tensors, group: Any) -> None:
    """group: of the ranks that write together; None for a process alone."""
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
    """As what went wrong with a file, whichever rank's it was; and without what torch says about being alone."""
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except _dcp().CheckpointException as failure:
        cause = next((error for error, _ in failure.failures.values()), failure)
        raise OSError(getattr(cause, "errno", None) or 0, getattr(cause, "strerror", None) or str(cause)) from failure
