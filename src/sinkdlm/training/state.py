"""The state of a run on disk: written aside, synced, renamed; verified when read; the newest whole one is taken.

Tensors go through torch.distributed.checkpoint in its safetensors storage, scalars into state.json beside them. Owns the folder
`checkpoints/` of a run. Knows nothing of what the tensors mean.
"""

import hashlib
import json
import logging
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from sinkdlm.checkpoint import fingerprint, written_aside
from sinkdlm.errors import CheckpointError, TrainError

SCALARS = "state.json"
_NAME = re.compile(r"step-(\d{10})")
Say = Callable[[str], None]


class States:
    """The states of one run. `save` and `load` take the tensors by name; a load fills them in place."""

    def __init__(self, folder: Path, *, keep: int, warn: Say) -> None:
        self.folder, self.keep, self._warn = folder, keep, warn
        self._writer: threading.Thread | None = None
        self._failure: CheckpointError | None = None
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

    # -- writing --------------------------------------------------------------------------------------------------------------

    def save(self, step: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], *, background: bool = False) -> None:
        """Raises CheckpointError where it cannot be written; what was there before stays. In the background the tensors are copied
        first, and a failure is said by the next `save` or raised by `wait`."""
        try:
            self.wait()
        except CheckpointError as failure:
            self._warn(f"an earlier state was not saved: {failure}")
        if not background:
            self._write(step, tensors, scalars)
            return
        copies = self._copy(tensors)
        content = json.loads(json.dumps(scalars))
        self._writer = threading.Thread(target=self._write_quietly, args=(step, copies, content), name="sinkdlm-state")
        self._writer.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Into buffers that are made once: page-locked for a GPU, so that the copy runs at the bus's pace."""
        for name, tensor in tensors.items():
            if name not in self._staged:
                self._staged[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._staged[name].copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return self._staged

    def _write_quietly(self, step: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        try:
            self._write(step, tensors, scalars)
        except (CheckpointError, OSError) as failure:
            self._failure = CheckpointError(str(failure))

    def _write(self, step: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with written_aside(self.place(step)) as aside:
            _save_tensors(aside, tensors)
            marks = {file.name: fingerprint(file) for file in sorted(aside.iterdir())}
            content = {**scalars, "files": marks}
            (aside / SCALARS).write_text(json.dumps({**content, "sha256": _digest(content)}, indent=2) + "\n")
        self.whole.add(step)
        self._retire()

    def _retire(self) -> None:
        """Removes what is older than the newest few. A failure here costs room, not work."""
        for old in self.steps()[self.keep :]:
            retired = self.folder / f".{self.place(old).name}.old"
            try:
                self.place(old).rename(retired)  # first out of sight: a kill while it is being deleted leaves no half state
            except OSError as failure:
                self._warn(f"{self.place(old)}: cannot be removed: {failure.strerror}")
            shutil.rmtree(retired, ignore_errors=True)

    # -- reading --------------------------------------------------------------------------------------------------------------

    def load(self, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Fills the tensors from the newest whole state and returns its scalars; None where there is no state at all."""
        steps = self.steps()
        for step in steps:
            try:
                scalars = self._check(step)
                _load_tensors(self.place(step), tensors)
                self.whole.add(step)
                return scalars
            except (OSError, ValueError, KeyError, CheckpointError, CheckpointException) as failure:
                reason = str(failure).splitlines()[0]
                self._warn(f"{self.place(step)}: damaged, skipped: {reason}")
        if steps:
            raise TrainError(f"{self.folder}: no whole state among {len(steps)}; restore one, or remove the folder to begin again")
        return None

    def _check(self, step: int) -> dict[str, Any]:
        folder = self.place(step)
        scalars = json.loads((folder / SCALARS).read_text())
        digest = scalars.pop("sha256")
        if digest != _digest(scalars) or scalars["step"] != step:
            raise CheckpointError(f"{SCALARS} was changed after it was written")
        for name, mark in scalars["files"].items():
            if not (folder / name).exists():
                raise CheckpointError(f"{name} is missing")
            size = (folder / name).stat().st_size
            if size != mark["bytes"]:
                raise CheckpointError(f"{name} has {size} bytes, not {mark['bytes']}")
            if fingerprint(folder / name)["sha256"] != mark["sha256"]:
                raise CheckpointError(f"{name} has another SHA-256 than when it was written")
        return scalars


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save_state(dict(tensors), storage_writer=HuggingFaceStorageWriter(path=str(folder)), no_dist=True)
    except CheckpointException as failure:  # one process: one cause
        cause = next((error for error, _ in failure.failures.values()), failure)
        raise OSError(getattr(cause, "errno", None) or 0, getattr(cause, "strerror", None) or str(cause)) from failure


def _load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_state(dict(tensors), storage_reader=HuggingFaceStorageReader(path=str(folder)), no_dist=True)
