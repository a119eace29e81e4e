"""Draw the pictures of docs/benchmarks.md and the README from the records. Needs matplotlib (the viz extra)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.calibrate import Timed, peaks, timed_steps
from benchmarks.measuring import RESULTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for colour blindness
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "sinkdlm",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.facecolor": "white",
}
_SMOOTHED = 9  # points of a loss curve, averaged


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator["Figure"]:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        made = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(made)
        yield made
        made.savefig(path, format="svg", metadata={"Date": None})


def runs(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Figures of training runs, by recipe."""
    entries = [json.loads(path.read_text()) for path in sorted(folder.glob("train-*.json"))]
    return {entry["settings"]["recipe"]: entry["figures"] for entry in entries}


def draw_training(path: Path) -> None:
    with figure(path, 7.2, 3.0) as made:
        axes = made.subplots()
        for colour, (name, found) in zip(_COLOURS, runs().items(), strict=False):
            tokens, loss = np.array(found["train"]["tokens"]) / 1e6, np.array(found["train"]["loss"])
            smooth = np.convolve(loss, np.ones(_SMOOTHED) / _SMOOTHED, "valid")
            axes.plot(tokens[_SMOOTHED // 2 : len(tokens) - _SMOOTHED // 2], smooth, color=colour, linewidth=0.8, alpha=0.6)
            per_step = found["tokens"] / found["steps"] / 1e6
            at = [line["step"] * per_step for line in found["validation"]]
            axes.plot(at, [line["loss"] for line in found["validation"]], "o-", color=colour, markersize=3.5, label=name)
        axes.set(xlabel="million tokens", ylabel="nats/token", ylim=(3.5, 9))
        axes.legend(title="dots: validation")


def draw_sampling(path: Path) -> None:
    result = json.loads(next(iter(sorted(RESULTS.glob("sampling-nvidia*.json")))).read_text())
    name, batch = next(iter(result["figures"].items()))
    rates = {
        form.replace("_", " "): row["tokens_per_second"]["p50"]
        for form, row in batch.items()
        if isinstance(row, dict) and "tokens_per_second" in row
    }
    ordered = sorted(rates, key=lambda form: rates[form])
    with figure(path, 7.2, 3.6) as made:
        axes = made.subplots()
        colours = [_COLOURS[1] if form.startswith("official") else _COLOURS[0] for form in ordered]
        bars = axes.barh(ordered, [rates[form] for form in ordered], color=colours)
        axes.bar_label(bars, labels=[f"{rates[form]:,.0f}" for form in ordered], padding=3)
        axes.set(xlabel=f"tokens/s, {name}, {result['settings']['preset']} shape", xlim=(0, 1.15 * max(rates.values())))


def draw_memory(path: Path) -> None:
    found = [peak for peak in peaks() if peak.result.startswith("memory-smdm-472m")]
    at = np.arange(len(found))
    with figure(path, 7.2, 4.2) as made:
        axes = made.subplots()
        axes.barh(at - 0.2, [peak.measured / 1e9 for peak in found], 0.4, color=_COLOURS[0], label="measured")
        axes.barh(at + 0.2, [peak.planned / 1e9 for peak in found], 0.4, color=_COLOURS[5], label="planned")
        axes.set_yticks(at, [peak.name.removeprefix("smdm-472m, ") for peak in found])
        axes.invert_yaxis()
        axes.set(xlabel="peak GB of a rank, smdm-472m with a sink")
        axes.legend()


def swept_steps() -> list[Timed]:
    steps = [step for step in timed_steps() if step.result.startswith("train_step-smdm-472m")]
    return [step for step in steps if "sink, " in step.name]


def draw_steps(path: Path) -> None:
    """Time of a step by rows and by length, measured and planned."""
    steps = swept_steps()
    with figure(path, 7.2, 2.8) as made:
        left, right = made.subplots(1, 2)
        ways = ((left, [s for s in steps if s.recipe.data.length == 2048], lambda s: s.rows),
                (right, [s for s in steps if s.tokens == 32768], lambda s: s.recipe.data.length))  # fmt: skip
        for axes, chosen, place in ways:
            chosen = sorted(chosen, key=place)
            at = [place(step) for step in chosen]
            axes.plot(at, [1000 * step.planned_seconds for step in chosen], "-", color=_COLOURS[5], label="planned")
            axes.plot(at, [1000 * step.seconds for step in chosen], "o", color=_COLOURS[0], markersize=4, label="measured")
            axes.set(ylabel="ms/step", ylim=(0, None), xlim=(0, None))
            axes.legend()
        left.set(xlabel="rows of 2048 tokens")
        right.set(xlabel="tokens per row, 32768 in all")


def draw_sinks(path: Path, folder: Path = RESULTS) -> None:
    """Attention and value norms by layer, at the end of the deepest run with a sink; its twin without one, if there is a record."""
    seen = {name: found["probe"][-1]["layers"] for name, found in runs(folder).items() if found["probe"]}
    name = max((name for name in seen if name.endswith("-sink")), key=lambda name: len(seen[name]))
    layers, twin = seen[name], seen.get(name.removesuffix("-sink"))
    at = np.arange(len(layers))
    with figure(path, 7.6, 2.7) as made:
        left, right = made.subplots(1, 2)
        left.bar(at, [100 * layer["sink_share"] for layer in layers], color=_COLOURS[1], label="on the sink")
        top = [100 * layer["top_content_share"] for layer in layers]
        left.plot(at, top, "o-", color=_COLOURS[0], markersize=2.5, linewidth=1, label="on the top content token")
        if twin is not None:
            without = [100 * layer["top_content_share"] for layer in twin]
            left.plot(at, without, "s--", color="#222222", markersize=2.5, linewidth=1, label="the same, twin without a sink")
        left.set(xlabel="layer", ylabel="% of attention", ylim=(0, 100))
        left.legend(loc="upper left", fontsize=7.5)
        right.plot(
            at, [layer["content_value_norm"] for layer in layers], "o-", color=_COLOURS[0], markersize=3, label="content tokens"
        )
        right.plot(at, [layer["sink_value_norm"] for layer in layers], "o-", color=_COLOURS[1], markersize=3, label="the sink")
        right.set(xlabel="layer", ylabel="mean value norm", ylim=(0, None))
        right.legend(loc="upper left", fontsize=7.5)


def draw(folder: Path) -> list[Path]:
    makers = {
        "benchmarks-training": draw_training,
        "benchmarks-sampling": draw_sampling,
        "benchmarks-memory": draw_memory,
        "sinks": draw_sinks,
    }
    if len({step.rows for step in swept_steps()}) > 2:
        makers["benchmarks-steps"] = draw_steps
    for name, make in makers.items():
        make(folder / f"{name}.svg")
    return [folder / f"{name}.svg" for name in makers]
