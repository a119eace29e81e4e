"""Results of runs: settings and outcomes, in files small enough to keep with the project (80 kB at most).

Values of single items are kept for paired tests, as whole multiples of a unit in base64. Owns the form of these files.
"""

import base64
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sinkdlm.checkpoint import durable
from sinkdlm.errors import ReproduceError
from sinkdlm.reproduce.matrix import Job, Scale
from sinkdlm.training.run import environment

FORMAT, VERSION = "sinkdlm-reproduction", 1
RUN, TRIAL = "run", "trial"
MAX_BYTES = 80_000
_OWN = ("name", "kind", "scale", "group", "variant", "seed", "lr")  # fields of a result; its facts stand beside them
_FIRST_UNIT = 1e-3  # nats; coarser by tens until 16 bits hold every value


@dataclass(frozen=True)
class Outcome:
    """One measured outcome: `total / units` is its value. items: the terms of the total, if it has terms.

    units: tokens for nats a token, items for shares. Rounded to the file's precision when made, so that a value is the same
    before and after it was written.
    """

    units: float
    unit: float = 0.0
    items: np.ndarray | None = None  # whole multiples of `unit`
    total: float = math.nan

    @property
    def value(self) -> float:
        return self.total / self.units

    @property
    def values(self) -> np.ndarray:
        assert self.items is not None
        return self.items.astype(np.float64) * self.unit

    @classmethod
    def of_items(cls, values: Iterable[float], units: float) -> "Outcome":
        exact = np.array(list(values), dtype=np.float64)
        if not np.isfinite(exact).all():
            raise ReproduceError("a score is not finite, so the run has no result; look at its training")
        unit, largest = _FIRST_UNIT, float(np.abs(exact).max(initial=0.0))
        if np.isin(exact, (0.0, 1.0)).all():
            unit = 1.0
        while largest / unit > np.iinfo(np.int16).max:
            unit *= 10
        items = np.rint(exact / unit).astype(np.int64)
        return cls(float(units), unit, items, float(items.sum()) * unit)

    @classmethod
    def of_value(cls, value: float) -> "Outcome":
        return cls(1.0, total=float(f"{value:.6g}"))

    def to_json(self) -> dict[str, Any]:
        if self.items is None:
            return {"value": self.total}
        shares = self.unit == 1.0 and bool(np.isin(self.items, (0, 1)).all())
        data = np.packbits(self.items.astype(bool)) if shares else self.items.astype("<i2")
        packed = base64.b64encode(data.tobytes()).decode()
        told = {"value": round(self.value, 6), "units": self.units, "n": len(self.items), "unit": self.unit}
        return {**told, "bits" if shares else "int16": packed}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "Outcome":
        if "units" not in said:
            return cls(1.0, total=float(said["value"]))
        if "bits" in said:
            items = np.unpackbits(np.frombuffer(base64.b64decode(said["bits"]), np.uint8), count=said["n"])
        else:
            items = np.frombuffer(base64.b64decode(said["int16"]), "<i2")
        if len(items) != said["n"]:
            raise ValueError(f"{len(items)} items, not {said['n']}")
        unit, items = float(said["unit"]), items.astype(np.int64)
        return cls(float(said["units"]), unit, items, float(items.sum()) * unit)


@dataclass(frozen=True)
class RunResult:
    """facts: recipe, environment, seconds and other facts. layers: quantity of attention -> a value for each layer."""

    name: str
    kind: str
    scale: str
    group: str
    variant: str
    seed: int
    lr: float
    outcomes: Mapping[str, Outcome]
    layers: Mapping[str, list[float | None]]
    facts: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        return int(self.facts["tokens"])

    @property
    def data(self) -> dict[str, str]:
        """Kind of data -> fingerprint of the data that it was made from."""
        return dict(self.facts.get("data", {}))

    @property
    def seconds(self) -> float:
        return float(sum(self.facts["seconds"].values()))

    def to_json(self) -> str:
        own = {key: getattr(self, key) for key in _OWN}
        outcomes = {name: outcome.to_json() for name, outcome in sorted(self.outcomes.items())}
        said = {"format": FORMAT, "version": VERSION, **own, **self.facts, "outcomes": outcomes, "layers": dict(self.layers)}
        return json.dumps(said, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "RunResult":
        facts = {key: value for key, value in said.items() if key not in (*_OWN, "outcomes", "layers", "format", "version")}
        outcomes = {name: Outcome.from_json(outcome) for name, outcome in said["outcomes"].items()}
        return cls(**{key: said[key] for key in _OWN}, outcomes=outcomes, layers=said["layers"], facts=facts)


def write_result(folder: Path, result: RunResult) -> Path:
    text = result.to_json()
    if len(text) > MAX_BYTES:
        raise ReproduceError(f"{result.name}: its result has {len(text):,} bytes, more than {MAX_BYTES:,}; score fewer items")
    path = folder / f"{result.name}.json"
    write_text(path, text)
    return path


def write_text(path: Path, text: str) -> None:
    durable.write_text(path, text, ReproduceError, "; choose another --out")


def read_result(path: Path) -> RunResult:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if said.get("format") != FORMAT or said.get("version") != VERSION:
            raise ReproduceError(f"{path}: is no result of a reproduction that this version reads; move it elsewhere")
        return RunResult.from_json(said)
    except OSError as failure:
        raise ReproduceError(f"{path}: cannot be read: {failure.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise ReproduceError(f"{path}: damaged ({failure}); remove it, and its run is made again") from None


def read_results(folder: Path, scale: str) -> dict[str, RunResult]:
    """Results of one scale, by name; refused if they were made from different data."""
    found = {one.name: one for path in sorted(folder.glob("*.json")) if (one := read_result(path)).scale == scale}
    first: dict[str, RunResult] = {}  # that names a kind of data
    for result in found.values():
        for what, mark in result.data.items():
            other = first.setdefault(what, result)
            if other.data[what] != mark:
                odd = f"{result.name}.json and {other.name}.json were made from other data ({what})"
                raise ReproduceError(f"{folder}: {odd}; move one of them elsewhere, and its run is made again")
    return found


def provenance(where: torch.device) -> dict[str, Any]:
    """How a file of numbers was made: time, command, environment."""
    made, started = environment(where), getattr(sys.modules["__main__"], "__spec__", None)
    program = "sinkdlm" if started is None or started.name.startswith("sinkdlm") else f"python -m {started.name}"  # a study
    told = {name: made[name] for name in _FACTS if name in made}
    return {"made": made["time"], "command": " ".join([program, *sys.argv[1:]]), "environment": told}


_FACTS = ("commit", "device", "torch", "triton", "transformers", "cuda", "python", "sinkdlm", "threads", "platform")


def best_rate(tried: Mapping[float, float]) -> float:
    """The learning rate whose trial gave the lowest value; of equal ones the smallest."""
    return min(tried, key=lambda rate: (tried[rate], rate))


def find_made(job: Job, results: Mapping[str, RunResult], scale: Scale) -> RunResult | None:
    """A job's result, unless learning rates have changed: a trial's own, those that a run chose from, or its base's."""
    found, rates = results.get(job.name), scale.lrs.get(job.group)
    if found is None:
        return None
    if job.trial is not None:
        return found if rates is not None and found.lr == rates[job.trial] else None
    if rates is not None and set(found.facts.get("trials", ())) != {f"{rate:g}" for rate in rates}:
        return None
    base = results.get(job.base.name) if job.base is not None else None
    return None if base is not None and found.facts.get("base_lr", base.lr) != base.lr else found
