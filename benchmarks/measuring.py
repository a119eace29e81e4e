"""The timer and the result form of all benchmarks.

A result is one JSON object: command, commit, hardware, versions, and figures. A timed figure has p20, p50 and p80 over its repeats.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "triton", "numpy", "transformers", "sinkdlm")
_TARGET_SECONDS = 1.0


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = torch.tensor(values, dtype=torch.float64)
    p20, p50, p80 = torch.quantile(ordered, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return {"p20": p20, "p50": p50, "p80": p80, "repeats": len(values)}


def measure(run: Callable[[], Any], device: str, *, warmup: int = 3, repeats: int | None = None) -> dict[str, float]:
    """Milliseconds of one call: CUDA events on a GPU, the clock elsewhere. By default about a second's worth, 5 to 200 calls."""
    for _ in range(warmup):
        run()
    once = _time_once(run, device)
    count = repeats or int(min(200, max(5, _TARGET_SECONDS * 1000 / max(once, 1e-6))))
    return quantiles([_time_once(run, device) for _ in range(count)])


def measure_together(runs: Mapping[str, Callable[[], Any]], device: str, *, warmup: int = 3, repeats: int = 20) -> dict[str, Any]:
    """Time several forms by turns, so that their ratios do not depend on when each was measured."""
    for run in runs.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(_time_once(run, device))
    return {name: quantiles(values) for name, values in times.items()}


def _time_once(run: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)
    began = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - began)


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """Capture one call as a CUDA graph; the returned function replays its kernels without the host's work."""
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(_kept: Any = run) -> None:
        """Replay; `_kept` keeps alive what the kernels read."""
        graph.replay()

    return replay


def kernel_times(run: Callable[[], Any], device: str, repeats: int = 3) -> list[dict[str, Any]]:
    """Milliseconds and calls of each kernel of one run (on a CPU: of each operation), the slowest first."""
    on_gpu = device == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as seen:
        for _ in range(repeats):
            run()
        if on_gpu:
            torch.cuda.synchronize()
    kernels = []
    for event in seen.key_averages():
        taken = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if taken > 0 and (not on_gpu or event.device_type.name == "CUDA"):
            kernels.append({"kernel": event.key[:120], "ms": taken / 1000 / repeats, "calls": event.count / repeats})
    return sorted(kernels, key=lambda one: -one["ms"])


def peak_bytes(run: Callable[[], Any]) -> int:
    """Peak GPU memory that one call adds to what is already held."""
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def hardware(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"machine": platform.machine(), "cpu_count": os.cpu_count(), "threads": torch.get_num_threads()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
    return facts


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = str(torch.__version__)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str:
    """The measured commit, with "+changes" if the tree is not clean; SINKDLM_COMMIT overrides it."""
    given = os.environ.get("SINKDLM_COMMIT")
    if given:
        return given
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if dirty else "")


def result(name: str, figures: dict[str, Any], *, device: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "benchmark": name,
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(device),
        "versions": versions(),
        "settings": settings,
        "figures": figures,
    }


def write(entry: dict[str, Any], out: Path | None, *, subject: str = "") -> None:
    """Print the result and, with --out, write it to a file named by benchmark, subject and hardware."""
    text = json.dumps(entry, indent=2)
    print(text, flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        kind = entry["hardware"].get("gpu", f"cpu-{entry['hardware']['machine']}").lower().replace(" ", "-")
        (out / f"{entry['benchmark']}{f'-{subject}' if subject else ''}-{kind}.json").write_text(text + "\n")


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    return parser.parse_args()
