"""Writes docs/benchmarks.md from the results, and the table of docs/howto/plan.md from the recipes: make docs-benchmarks

Text comes from the results alone, so that a test can hold the pages against them; pictures are drawn by benchmarks/plots.py. A
benchmark that has no section of its own gets its figures listed.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.calibrate import foretold, peaks, timed_steps
from benchmarks.measuring import RESULTS
from sinkdlm.config.recipe import Recipe
from sinkdlm.config.shipped import RECIPES
from sinkdlm.planning.plan import Machine, Plan, make_plan
from sinkdlm.planning.step_time import calibration

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
PLAN_PAGE = ROOT / "docs" / "howto" / "plan.md"
_KERNELS, _NAME = 20, 70  # of a profile that are listed, and how much of their names
_MARKS = ("<!-- table: begin -->", "<!-- table: end -->")
_SFT_ROWS = 769_240  # examples an epoch of the paper's SFT
Result = dict[str, Any]


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """By file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(name: str, entry: Result) -> str:
    """Where a table's numbers come from."""
    hardware = entry["hardware"]
    device = hardware.get("gpu") or f"CPU ({hardware['machine']}), {hardware['threads']} of {hardware['cpu_count']} cores"
    commit = entry["commit"][:10] + ("+changes" if entry["commit"].endswith("+changes") else "")
    facts = (f"commit `{commit}`", device, f"torch {entry['versions']['torch']}", entry["date"][:10], f"`{name}`")
    return f"`{entry['command']}`  \n{' · '.join(facts)}"


def ms(timed: Result) -> str:
    """The median, and the middle 60 % where they do not read the same."""
    low, middle, high = (short(timed[key]) for key in ("p20", "p50", "p80"))
    return middle if low == high else f"{middle} ({low} to {high})"


def short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def rate(timed: Result) -> str:
    return f"{timed['p50']:,.0f}" if timed["p50"] >= 100 else f"{timed['p50']:.1f}"


# -- sections -------------------------------------------------------------------------------------------------------------------


def training(results: dict[str, Result]) -> Iterator[str]:
    rows = []
    for entry in results.values():
        figures = entry["figures"]
        last = figures["validation"][-1]
        mfu = f"{figures['mfu']['p50']:.1%}" if "mfu" in figures else ""
        memory = f"{figures['memory_gb']:.1f} GB" if "memory_gb" in figures else ""
        seen = [f"{figures['tokens'] / 1e6:.0f}M", rate(figures["tokens_per_second"]), mfu, memory]
        rows.append([entry["settings"]["recipe"], *seen, f"{last['loss']:.3f} ± {last['stderr']:.3f}"])
    yield table(["recipe", "tokens", "tokens/s", "MFU", "peak", "validation loss"], rows)
    yield (
        "Runs of `sinkdlm train`, killed once and resumed where their command says `--kill-at`. One seed each: a difference "
        "between twins is not one between methods."
    )
    yield "![Training loss and validation loss of each run over tokens.](assets/benchmarks-training.svg)"
    yield "![Attention on the sink and value norms by layer, at the end of a run.](assets/sinks.svg)"


def steps(results: dict[str, Result]) -> Iterator[str]:
    for entry in sorted(results.values(), key=lambda entry: "gpu" not in entry["hardware"]):  # a CPU's come last
        given, forms, hardware = entry["settings"], entry["figures"]["forms"], entry["hardware"]
        official = forms.get("official", {}).get("tokens_per_second")
        rows = []
        for form, row in forms.items():
            mfu, memory = f"{row['mfu']:.1%}" if "mfu" in row else "", f"{row['peak_gb']:.1f} GB" if "peak_gb" in row else ""
            times = f"{row['tokens_per_second'] / official:.2f}" if official else ""
            rows.append([form, ms(row["ms_step"]), f"{row['tokens_per_second']:,.0f}", mfu, memory, times])
        where = "" if "gpu" in hardware else f", {given['precision']}, a CPU with {hardware['threads']} of its threads"
        yield f"**{given['model']}**, {given['rows']} rows of {given['length']}{where}:"
        yield table(["form", "ms a step", "tokens/s", "MFU", "peak", "times official"], rows)
        swept = [
            [f"{row['rows']} x {row['length']}", ms(row["ms_step"]), f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}"]
            for row in entry["figures"].get("sweep", [])
            if "mfu" in row
        ]
        if swept:
            yield table(["sink, rows x length", "ms a step", "tokens/s", "MFU"], swept)
        if "profile" in entry["figures"]:
            yield from _profile(entry["figures"]["profile"])
    if any("sweep" in entry["figures"] for entry in results.values()):
        yield "![Time of a step by rows and by length, measured and by the plan's formulas.](assets/benchmarks-steps.svg)"


def _profile(seen: Result) -> Iterator[str]:
    """Where one step's time goes, kind by kind and kernel by kernel."""
    total = seen["ms_busy"]
    kinds = sorted(seen["ms_by_kind"].items(), key=lambda item: -item[1])
    yield f"Kernels of one step, {seen['form']}: {total:.1f} ms in all."
    yield table(["kind", "ms", "share"], [[kind, f"{taken:.2f}", f"{taken / total:.1%}"] for kind, taken in kinds])
    rows = [[f"`{one['kernel'][:_NAME]}`", f"{one['ms']:.2f}", f"{one['calls']:.0f}"] for one in seen["kernels"][:_KERNELS]]
    yield table(["kernel", "ms", "calls"], rows)


def curves(results: dict[str, Result]) -> Iterator[str]:
    for entry in results.values():
        given, figures = entry["settings"], entry["figures"]
        rows = [
            [what.replace("_", " "), *(f"{row[key]:.2%}" for key in ("mean", "most", "at_end"))]
            for what, row in figures.items()
            if what != "losses"
        ]
        yield f"**{given['model']}**, {given['steps']} steps of {given['rows']} x {given['length']} tokens that can be learned:"
        yield table(["relative difference of losses, 20 steps at a time", "mean", "largest", "at the end"], rows)


def precision(results: dict[str, Result]) -> Iterator[str]:
    for entry in results.values():
        rows = []
        for name, found in entry["figures"]["precisions"].items():
            last = found["validation"][-1]
            mfu = f"{found['mfu']['p50']:.1%}" if "mfu" in found else ""
            seen = [f"{found['tokens'] / 1e6:.3g}M", rate(found["tokens_per_second"]), mfu]
            rows.append([name, *seen, f"{last['loss']:.4f} ± {last['stderr']:.4f}"])
        yield f"**{entry['settings']['recipe']}**, the same rows, noise and first weights:"
        yield table(["precision", "tokens", "tokens/s", "MFU", "validation loss"], rows)
        for pair, found in entry["figures"]["compared"].items():
            yield (
                f"{pair}: validation {found['validation_at_end']:+.2%} at the end and {found['validation_most']:+.2%} at most, "
                f"{found['tokens_per_second']:.2f} times the tokens a second."
            )


def planning(results: dict[str, Result]) -> Iterator[str]:
    """Needs no result of its own: plans beside all that can be held against them."""
    since = calibration()["since"]
    steps = [step for step in timed_steps() if step.date >= since]
    rows = []
    for step, blind in zip(steps, foretold(steps), strict=True):
        rates = [f"{step.tokens / seconds:,.0f}" for seconds in (step.seconds, step.planned_seconds)]
        misses = [f"{step.seconds / step.planned_seconds - 1:+.1%}", f"{step.seconds / blind - 1:+.0%}"]
        rows.append([step.name, *rates, *misses, f"`{step.result}`"])
    yield table(["one H200", "tokens/s", "planned", "off by", "fitted without it", "result"], rows)
    found = peaks(since=since)
    off = [peak.planned / peak.measured - 1 for peak in found]
    yield (
        "The constants of the rates are fitted to these results; the last column but one says how far off a result is by constants "
        f"fitted without it. Peak memory comes by formulas without fitted constants: of {len(found)} measured peaks the plan is "
        f"between {min(off):+.1%} and {max(off):+.1%} off."
    )


def memory(results: dict[str, Result]) -> Iterator[str]:
    planned = {(peak.result, peak.name): peak.planned for peak in peaks()}
    for name, entry in results.items():
        given = entry["settings"]
        rows = []
        for what, figure in entry["figures"].items():
            plan = planned[name, f"{given['model']}, {what}"]
            rows.append([what, f"{figure['peak'] / 1e9:.2f}", f"{plan / 1e9:.2f}", f"{plan / figure['peak'] - 1:+.1%}"])
        yield f"**{given['model']}** with a sink, {given['rows']} rows of {given['length']}, {given['precision']}, compiled:"
        yield table(["recomputation, layout, forwards a step", "peak GB", "planned", "off by"], rows)
    yield (
        "One GPU in the place of one rank of many, by torch's fake process group: what is computed is worthless, what is allocated "
        "is what such a rank allocates."
    )
    yield "![Peak memory of a rank by layout and recomputation, measured and planned.](assets/benchmarks-memory.svg)"


def attention(results: dict[str, Result]) -> Iterator[str]:
    for entry in results.values():
        figures = entry["figures"]
        forms = list(next(iter(figures.values()))["ms_forward_backward"])
        rows = [
            [shape, *(ms(row["ms_forward_backward"][form]) if form in row["ms_forward_backward"] else "" for form in forms)]
            for shape, row in figures.items()
        ]
        yield f"Milliseconds, forward and backward, {entry['settings']['n_sinks']} sink ({entry['settings']['shape']}):"
        yield table(["shape", *forms], rows)
        if all("to_plain" in row for row in figures.values()):
            rows = [
                [shape, *(f"{row['to_plain'][form]:.3f}" if form in row["to_plain"] else "" for form in forms)]
                for shape, row in figures.items()
            ]
            yield "Times the plain kernel; of attention as a training step computes it, times the same without a sink:"
            yield table(["shape", *forms], rows)
        for shape, row in figures.items():
            if "kernels" in row and "relative_error" not in row:
                yield f"Kernels of {shape} as a training step computes it, ms:"
                yield table(["kernel", "without a sink", "with it"], kernel_rows(*row["kernels"].values()))
        checked = {shape: row["relative_error"] for shape, row in figures.items() if "relative_error" in row}
        rows = [
            [f"{shape}, {form}", *(f"{errors.get(name, float('nan')):.2e}" if name in errors else "" for name in _GRADIENTS)]
            for shape, of_form in checked.items()
            for form, errors in of_form.items()
        ]
        yield "Relative error against float64:"
        yield table(["shape, form", *_GRADIENTS], rows)


def kernel_rows(*forms: list[dict[str, Any]]) -> list[list[str]]:
    """Of several forms beside each other, those that take most first."""
    times = [{one["kernel"]: one["ms"] for one in kernels} for kernels in forms]
    most = {name: max(taken.get(name, 0.0) for taken in times) for name in dict.fromkeys(name for taken in times for name in taken)}
    return [
        [f"`{name[:70]}`", *(f"{taken[name]:.4f}" if name in taken else "" for taken in times)]
        for name in sorted(most, key=lambda name: -most[name])
    ]


_GRADIENTS = ("out", "dq", "dk", "dv", "dsink_k", "dsink_v")


def loss(results: dict[str, Result]) -> Iterator[str]:
    for entry in results.values():
        rows = []
        for shape, row in entry["figures"].items():
            for form, timed in row["ms_forward_backward"].items():
                peak = f"{row['peak_bytes'][form] / 1e9:.2f}" if "peak_bytes" in row else ""
                rows.append([f"{shape}, {form.replace('_', ' ')}", ms(timed), peak])
        yield table([f"{entry['settings']['shape']}, form", "ms, forward and backward", "peak GB"], rows)


def sampling(results: dict[str, Result]) -> Iterator[str]:
    for entry in results.values():
        given, batches = entry["settings"], entry["figures"]
        canvas = f"{given['length']} tokens in {given['steps']} steps, blocks of {given['block']}"
        if given["checkpoint"]:
            yield f"`{given['checkpoint']}`, trained: {canvas}. Equal tokens: the share that the exact loop writes too."
            for batch, row in batches.items():
                yield _agreement(batch, row["agreement"])
            continue
        yield f"**{given['preset']}** shape, {canvas}:"
        forms = [form for form, row in next(iter(batches.values())).items() if isinstance(row, dict) and "tokens_per_second" in row]
        rows = []
        for form in forms:
            cells = [f"{rate(row[form]['tokens_per_second'])} (x {row['times_as_fast'][form]:.1f})" for row in batches.values()]
            rows.append([form.replace("_", " "), *cells])
        yield table(["tokens/s (times the official loop)", *batches], rows)
    yield (
        "Times are against the official loop of the same policy (`origin`, else `greedy`) at the same temperature. The caches are "
        "approximate: they change the text ([how to sample](howto/sample.md#caches))."
    )
    yield "![Tokens a second of each way to sample, 64 rows.](assets/benchmarks-sampling.svg)"


def _agreement(batch: str, forms: Result) -> str:
    rows = []
    for form, found in forms.items():
        timed = [found[key] for key in ("tokens_per_second", "tokens_per_step") if key in found]
        cells = [f"{timed[0]:,.0f}", f"{timed[1]:.2f}"] if timed else ["", ""]
        rows.append([form.replace("threshold None", "no threshold"), *cells, f"{found['equal_tokens']:.3f}",
                     f"{found['mean_confidence']:.3f}"])  # fmt: skip
    return table([batch, "tokens/s", "tokens a step", "equal tokens", "mean confidence"], rows)


def likelihood(results: dict[str, Result]) -> Iterator[str]:
    for entry in results.values():
        given, figures = entry["settings"], entry["figures"]
        asked = f"{figures['requests']} requests of {given['task']}, {given['draws']} draws, guidance {given['guidance']}"
        if given["checkpoint"]:
            yield (
                f"`{given['checkpoint']}`, trained: {asked}. Two full runs on noise of their own rank "
                f"{figures['full_agreement']:.1%} of questions alike, with {figures['full_forwards']:,} forward passes each."
            )
            rows = [
                [rule, f"{row['times_fewer']:.2f}", f"{row['agreement']:.1%}", f"{row['agreement_with_own_full_run']:.1%}"]
                for rule, row in figures["curve"].items()
            ]
            yield table(["rule of `--adaptive`", "times fewer passes", "agreement with another full run", "with its own"], rows)
            continue
        rows = [
            [form.replace("_", " "), f"{row['requests_per_second']:.1f}"]
            for form, row in figures.items()
            if isinstance(row, dict) and "requests_per_second" in row
        ]
        yield f"{asked}, **{given['preset']}** shape:"
        yield table(["form", "requests/s"], rows)
    yield "Forms run in this order, and the first meets every shape for the first time: see the [log](log.md) before you compare."


def serving(results: dict[str, Result]) -> Iterator[str]:
    for entry in results.values():
        figures, given = entry["figures"], entry["settings"]
        rows = []
        for form, row in figures.items():
            if isinstance(row, dict):
                rates = [rate(row[name]) for name in ("requests_per_second", "tokens_per_second")]
                rows.append([form.replace("_", " "), *rates, ms(row["ms_latency"]), str(row["differing"])])
        yield f"{given['clients']} clients, {given['model']}:"
        yield table(["form", "requests/s", "tokens/s", "latency, ms", "answers that differ"], rows)


def checkpoint(results: dict[str, Result]) -> Iterator[str]:
    for entry in results.values():
        given = entry["settings"]
        rows = [
            [way, ms(row["step_ms"]), f"{row['lost_ms_per_save']:,.0f}", f"{row['longest_step_ms']:,.0f}", f"{row['state_gb']:.2f}"]
            for way, row in entry["figures"].items()
        ]
        yield f"**{given['model']}**, {given['rows']} rows of {given['length']}, a state every {given['every']} steps:"
        yield table(["written", "ms a step", "ms lost a save", "longest step, ms", "state GB"], rows)


def listed(results: dict[str, Result]) -> Iterator[str]:
    """Every number of a result, by its place."""
    for entry in results.values():
        yield table(["figure", "value"], [[f"`{name}`", value] for name, value in _numbers(entry["figures"])])


def _numbers(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and "p50" in value:
        yield place, ms(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, bool):
        yield place, "yes" if value else "no"
    elif isinstance(value, int | float):
        yield place, short(value)


# Benchmark -> (title, its section).
SECTIONS: dict[str, tuple[str, Callable[[dict[str, Result]], Iterator[str]]]] = {
    "train": ("Training runs", training),
    "train_step": ("A training step", steps),
    "curves": ("Losses by the fast and the plain path", curves),
    "precision": ("The same run in several precisions", precision),
    "cold_start": ("From the command to the first step", listed),
    "plan": ("Plans against measurements", planning),
    "memory": ("Memory of a rank", memory),
    "attention": ("Attention with a sink", attention),
    "loss": ("The head and its loss", loss),
    "sampling": ("Sampling", sampling),
    "likelihood": ("Likelihoods", likelihood),
    "serving": ("Serving", serving),
    "checkpoint": ("Saving states", checkpoint),
    "loader": ("Reading rows", listed),
    "noise": ("Keyed noise", listed),
}


def page_text(folder: Path = RESULTS) -> str:
    results = read_results(folder)
    parts = [
        "# Benchmarks",
        "Made from the results in `benchmarks/results` by `make docs-benchmarks`. A timed figure is the median of its repeats, "
        "with the 20th and 80th percentiles behind it where they differ. `make bench` measures your machine.",
    ]
    kinds = dict.fromkeys([*SECTIONS, *(entry["benchmark"] for entry in results.values())])
    for kind in kinds:
        own = {name: entry for name, entry in results.items() if entry["benchmark"] == kind}
        if own or (kind == "plan" and results):
            title, section = SECTIONS.get(kind, (kind.replace("_", " ").capitalize(), listed))
            parts += [f"## {title}", *section(own), *(source(name, entry) for name, entry in own.items())]
    return "\n\n".join(parts) + "\n"


# -- the paper's runs, planned -------------------------------------------------------------------------------------------------


def paper_plans(device: str, ranks: int) -> list[Plan]:
    found = []
    for path in sorted((RECIPES / "paper").glob("*.toml")):
        recipe = Recipe.load(path)
        found.append(make_plan(recipe, path.stem, Machine(device, ranks), None if recipe.train.epochs is None else _SFT_ROWS))
    return found


def paper_table(ranks: int = 8) -> str:
    devices = ("h100", "a100")
    rows = []
    for plans in zip(*(paper_plans(device, ranks) for device in devices), strict=True):
        first = plans[0]
        count, tokens = first.recipe.model.count_parameters().total, first.tokens or 0
        cells = [f"`{first.name}`", f"{count / 1e6:,.0f}M", f"{tokens / 1e9:.1f}G"]
        for plan in plans:
            assert plan.hours is not None
            assert plan.gpu_hours is not None
            cells += [f"{plan.memory.total / 1e9:.0f}", f"{plan.hours:.1f}", f"{plan.gpu_hours:,.0f}"]
        rows.append(cells)
    head = ["recipe", "parameters", "tokens"]
    head += [f"{ranks} {device}: {what}" for device in devices for what in ("GB each", "hours", "GPU-hours")]
    return table(head, rows)


def with_table(text: str, made: str) -> str:
    begin, end = _MARKS
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if not pattern.search(text):
        raise SystemExit(f"{PLAN_PAGE}: no place for the table: {begin} ... {end}")
    return pattern.sub(lambda _: f"{begin}\n\n{made}\n\n{end}", text)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from benchmarks.plots import draw

    PAGE.write_text(page_text())
    PLAN_PAGE.write_text(with_table(PLAN_PAGE.read_text(), paper_table()))
    for path in (PAGE, PLAN_PAGE, *draw(ROOT / "docs" / "assets")):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
