"""Fills docs/benchmarks.md and the tutorials from the records, docs/howto/plan.md from the recipes: make docs-benchmarks

The pages' prose is kept by hand. Each record has a part of its own on the page, named like its file; a new one needs its markers
and a sentence there. benchmarks/plots.py draws the pictures.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.calibrate import foretold, peaks, timed_steps
from benchmarks.marked import fill
from benchmarks.measuring import RESULTS
from sinkdlm.config.recipe import Recipe
from sinkdlm.config.shipped import RECIPES
from sinkdlm.evals.paper import paper_row
from sinkdlm.planning.plan import Machine, Plan, make_plan
from sinkdlm.planning.step_time import calibration

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
PLAN_PAGE = ROOT / "docs" / "howto" / "plan.md"
LAPTOP_PAGE = ROOT / "docs" / "tutorials" / "laptop.md"
TUTORIAL_PAGE = ROOT / "docs" / "tutorial.md"
ADAPT_PAGE, GSM8K_PAGE = (ROOT / "docs" / "tutorials" / name for name in ("adapt.md", "gsm8k.md"))
_KERNELS, _NAME = 8, 70  # of a profile: kernels shown, characters of a name
_SHOWN = "16x2048x10x10x128"  # shape whose attention kernels are shown
_SFT_ROWS = 769_240  # examples an epoch of the paper's SFT
_GPU = "-nvidia-h200.json"
Result = dict[str, Any]


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """By file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(name: str, entry: Result) -> str:
    """A table's command, commit, device, versions and file."""
    hardware = entry["hardware"]
    device = hardware.get("gpu") or f"CPU ({hardware['machine']}), {hardware['threads']} of {hardware['cpu_count']} cores"
    commit = entry["commit"][:10] + ("+changes" if entry["commit"].endswith("+changes") else "")
    facts = (f"commit `{commit}`", device, f"torch {entry['versions']['torch']}", entry["date"][:10], f"`{name}`")
    return f"`{entry['command']}`  \n{' · '.join(facts)}"


def ms(timed: Result) -> str:
    """The median, with the 20th and 80th percentiles where they read differently."""
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
    yield from (source(name, entry) for name, entry in results.items())


def steps(entry: Result) -> Iterator[str]:
    given, forms = entry["settings"], entry["figures"]["forms"]
    official = forms.get("official", {}).get("tokens_per_second")
    rows = []
    for form, row in forms.items():
        mfu, memory = f"{row['mfu']:.1%}" if "mfu" in row else "", f"{row['peak_gb']:.1f} GB" if "peak_gb" in row else ""
        times = f"{row['tokens_per_second'] / official:.2f}" if official else ""
        rows.append([form, ms(row["ms_step"]), f"{row['tokens_per_second']:,.0f}", mfu, memory, times])
    where = f"{given['model']}, {given['rows']} x {given['length']}"
    yield table([where, "ms/step", "tokens/s", "MFU", "peak", "times official"], rows)
    swept = [
        [f"{row['rows']} x {row['length']}", ms(row["ms_step"]), f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}"]
        for row in entry["figures"].get("sweep", [])
        if "mfu" in row
    ]
    if swept:
        yield table(["sink, rows x length", "ms/step", "tokens/s", "MFU"], swept)
    if "profile" in entry["figures"]:
        yield from _profile(entry["figures"]["profile"])


def _profile(seen: Result) -> Iterator[str]:
    """Time of one step by kind of kernel, and its longest kernels."""
    total = seen["ms_busy"]
    kinds = sorted(seen["ms_by_kind"].items(), key=lambda item: -item[1])
    shares = [[kind.replace("matrix products", "matmuls"), f"{taken:.2f}", f"{taken / total:.1%}"] for kind, taken in kinds]
    yield table([f"{seen['form']}, kernels", "ms", "share"], [*shares, ["all", f"{total:.2f}", ""]])
    rows = [[f"`{one['kernel'][:_NAME]}`", f"{one['ms']:.2f}", f"{one['calls']:.0f}"] for one in seen["kernels"][:_KERNELS]]
    yield table([f"longest {len(rows)} kernels", "ms", "calls"], rows)


def curves(entry: Result) -> Iterator[str]:
    rows = [
        [what.replace("_", " "), *(f"{row[key]:.2%}" for key in ("mean", "most", "at_end"))]
        for what, row in entry["figures"].items()
        if what != "losses"
    ]
    given = entry["settings"]
    where = f"{given['model']}, {given['steps']} steps of {given['rows']} x {given['length']}"
    yield table([f"{where}: relative difference of losses", "mean", "largest", "at the end"], rows)


def precision(entry: Result) -> Iterator[str]:
    rows = []
    for name, found in entry["figures"]["precisions"].items():
        last = found["validation"][-1]
        mfu = f"{found['mfu']['p50']:.1%}" if "mfu" in found else ""
        seen = [f"{found['tokens'] / 1e6:.3g}M", rate(found["tokens_per_second"]), mfu]
        rows.append([name, *seen, f"{last['loss']:.4f} ± {last['stderr']:.4f}"])
    yield table([entry["settings"]["recipe"], "tokens", "tokens/s", "MFU", "validation loss"], rows)
    for pair, found in entry["figures"]["compared"].items():
        yield (
            f"{pair}: validation loss {found['validation_at_end']:+.2%} at the end and {found['validation_most']:+.2%} at most, "
            f"{found['tokens_per_second']:.2f} times the tokens/s."
        )


def planning() -> Iterator[str]:
    """The plan's rates and peaks beside all that was measured."""
    since = calibration()["since"]
    steps = [step for step in timed_steps() if step.date >= since]
    rows = []
    for step, blind in zip(steps, foretold(steps), strict=True):
        rates = [f"{step.tokens / seconds:,.0f}" for seconds in (step.seconds, step.planned_seconds)]
        misses = [f"{step.seconds / step.planned_seconds - 1:+.1%}", f"{step.seconds / blind - 1:+.0%}"]
        rows.append([step.name, *rates, *misses, f"`{step.result.removesuffix(_GPU)}`"])
    yield table(["one H200", "tokens/s", "planned", "off by", "fitted without it", "record"], rows)
    found = peaks(since=since)
    off = [peak.planned / peak.measured - 1 for peak in found]
    yield f"Peak memory: of {len(found)} measured peaks the plan is between {min(off):+.1%} and {max(off):+.1%} off."


def starts(entry: Result) -> Iterator[str]:
    stages = {name: row for name, row in entry["figures"].items() if isinstance(row, dict)}
    rows = [[name.replace("_", " "), *map(ms, row.values())] for name, row in stages.items()]
    yield table([entry["settings"]["model"], *next(iter(stages.values()))], rows)


def memory(entry: Result) -> Iterator[str]:
    given = entry["settings"]
    planned = {peak.name: peak.planned for peak in peaks() if peak.result == entry["name"]}
    rows = []
    for what, figure in entry["figures"].items():
        plan = planned[f"{given['model']}, {what}"]
        rows.append([what, f"{figure['peak'] / 1e9:.2f}", f"{plan / 1e9:.2f}", f"{plan / figure['peak'] - 1:+.1%}"])
    where = f"{given['rows']} x {given['length']}, {given['precision']}"
    yield table([f"{where}: recomputation, layout, forwards per step", "peak GB", "planned", "off by"], rows)


def attention(entry: Result) -> Iterator[str]:
    figures = entry["figures"]
    forms = list(next(iter(figures.values()))["ms_forward_backward"])
    rows = [
        [shape, *(ms(row["ms_forward_backward"][form]) if form in row["ms_forward_backward"] else "" for form in forms)]
        for shape, row in figures.items()
    ]
    yield table(["ms, forward and backward", *forms], rows)
    if all("to_plain" in row for row in figures.values()):
        rows = [
            [shape, *(f"{row['to_plain'][form]:.3f}" if form in row["to_plain"] else "" for form in forms)]
            for shape, row in figures.items()
        ]
        yield table(["time / time without a sink", *forms], rows)
    if "kernels" in figures.get(_SHOWN, {}):
        yield table([f"ms, {_SHOWN}, trained", "without a sink", "with a sink"], kernel_rows(*figures[_SHOWN]["kernels"].values()))
    rows = [
        [f"{shape}, {form}", *(f"{errors[name]:.2e}" if name in errors else "" for name in _GRADIENTS)]
        for shape, row in figures.items()
        for form, errors in row.get("relative_error", {}).items()
    ]
    yield table(["relative error against float64", *_GRADIENTS], rows)


def kernel_rows(*forms: list[dict[str, Any]]) -> list[list[str]]:
    """Kernels of several forms beside each other, longest first."""
    times = [{one["kernel"]: one["ms"] for one in kernels} for kernels in forms]
    most = {name: max(taken.get(name, 0.0) for taken in times) for name in dict.fromkeys(name for taken in times for name in taken)}
    return [
        [f"`{name[:70]}`", *(f"{taken[name]:.4f}" if name in taken else "" for taken in times)]
        for name in sorted(most, key=lambda name: -most[name])
    ]


_GRADIENTS = ("out", "dq", "dk", "dv", "dsink_k", "dsink_v")


def loss(entry: Result) -> Iterator[str]:
    rows = []
    for shape, row in entry["figures"].items():
        for form, timed in row["ms_forward_backward"].items():
            peak = f"{row['peak_bytes'][form] / 1e9:.2f}" if "peak_bytes" in row else ""
            rows.append([f"{shape}, {form.replace('_', ' ')}", ms(timed), peak])
    yield table([f"{entry['settings']['shape']}, form", "ms, forward and backward", "peak GB"], rows)


def sampling(entry: Result) -> Iterator[str]:
    batches = entry["figures"]
    if entry["settings"]["checkpoint"]:
        for batch, row in batches.items():
            yield _agreement(batch, row["agreement"])
        return
    forms = [form for form, row in next(iter(batches.values())).items() if isinstance(row, dict) and "tokens_per_second" in row]
    rows = []
    for form in forms:
        cells = [f"{rate(row[form]['tokens_per_second'])} (x {row['times_as_fast'][form]:.1f})" for row in batches.values()]
        rows.append([form.replace("_", " "), *cells])
    given = entry["settings"]
    canvas = f"{given['preset']}, {given['length']} tokens in {given['steps']} steps, blocks of {given['block']}"
    yield table([f"tokens/s (times the official loop): {canvas}", *batches], rows)


def _agreement(batch: str, forms: Result) -> str:
    rows = []
    for form, found in forms.items():
        timed = [found[key] for key in ("tokens_per_second", "tokens_per_step") if key in found]
        cells = [f"{timed[0]:,.0f}", f"{timed[1]:.2f}"] if timed else ["", ""]
        rows.append([form.replace("threshold None", "no threshold"), *cells, f"{found['equal_tokens']:.3f}",
                     f"{found['mean_confidence']:.3f}"])  # fmt: skip
    return table([batch, "tokens/s", "tokens a step", "equal tokens", "mean confidence"], rows)


def likelihood(entry: Result) -> Iterator[str]:
    figures = entry["figures"]
    if entry["settings"]["checkpoint"]:
        rows = [
            [rule, f"{row['times_fewer']:.2f}", f"{row['agreement']:.1%}", f"{row['agreement_with_own_full_run']:.1%}"]
            for rule, row in figures["curve"].items()
        ]
        yield table(
            [f"{_asked(entry)}: rule of `--adaptive`", "times fewer passes", "agreement with another full run", "with its own"],
            rows,
        )
        yield (
            f"Two full runs on different noise agree on {figures['full_agreement']:.1%} of the questions, with "
            f"{figures['full_forwards']:,} forward passes each."
        )
        return
    rows = [
        [form.replace("_", " "), f"{row['requests_per_second']:.1f}"]
        for form, row in figures.items()
        if isinstance(row, dict) and "requests_per_second" in row
    ]
    yield table([f"{_asked(entry)}, {entry['settings']['preset']}", "requests/s"], rows)


def _asked(entry: Result) -> str:
    given = entry["settings"]
    return f"{entry['figures']['requests']} requests of {given['task']}, {given['draws']} draws, guidance {given['guidance']}"


def serving(entry: Result) -> Iterator[str]:
    rows = []
    for form, row in entry["figures"].items():
        if isinstance(row, dict):
            rates = [rate(row[name]) for name in ("requests_per_second", "tokens_per_second")]
            rows.append([form.replace("_", " "), *rates, ms(row["ms_latency"]), str(row["differing"])])
    given = entry["settings"]
    yield table(
        [f"{given['clients']} clients, {given['model']}", "requests/s", "tokens/s", "latency, ms", "answers that differ"], rows
    )


def engine(entry: Result) -> Iterator[str]:
    rows = []
    for part, clients in entry["figures"].items():
        for n, row in clients.items():
            if isinstance(row, dict):
                timed = [ms(row[name]) for name in ("ms_latency", "ms_first_frame")]
                rows.append([part, n, rate({"p50": row["requests_per_second"]}), rate({"p50": row["tokens_per_second"]}), *timed])
        rows[-1].append(f"{clients['engine_to_bare']:.2f}")
    given = entry["settings"]
    shape = f"{given['model']}, {given['new']} tokens in {given['steps']} steps after {given['prompt']}"
    yield table([shape, "load", "requests/s", "tokens/s", "latency, ms", "first tokens, ms", "of the bare sampler"], rows)
    if apart := given.get("commits"):
        yield ", ".join(f"{part}: commit `{commit}`" for part, commit in apart.items())


def blocks(entry: Result) -> Iterator[str]:
    given, figures = entry["settings"], entry["figures"]
    if found := figures.get("sampling"):
        forms = [form for form, row in next(iter(found.values())).items() if isinstance(row, dict)]
        rows = [
            [
                form.replace("_", " "),
                *(
                    f"{rate(one[form]['tokens_per_second'])} ({short(one[form]['ms_per_step']['p50'])} ms)"
                    for one in found.values()
                ),
            ]
            for form in forms
        ]
        title = f"tokens/s (a step): {given['preset']}, {given['canvas']} tokens, one a step, blocks of {given['block']}"
        yield table([title, *found], rows)
    for n_rows, lengths in figures.get("prompts", {}).items():
        rows = [
            [tokens, ms(row["ms_step"]), *(short(row[name]) for name in ("ms_attention", "ms_step_less_attention"))]
            for tokens, row in lengths.items()
        ]
        yield table([f"{n_rows}: tokens of the prompt", "ms a step", "in attention", "in the rest"], rows)


def checkpoint(entry: Result) -> Iterator[str]:
    rows = [
        [way, ms(row["step_ms"]), f"{row['lost_ms_per_save']:,.0f}", f"{row['longest_step_ms']:,.0f}", f"{row['state_gb']:.2f}"]
        for way, row in entry["figures"].items()
    ]
    given = entry["settings"]
    where = f"{given['model']}, {given['rows']} x {given['length']}, every {given['every']} steps"
    yield table([where, "ms/step", "ms lost per save", "longest step, ms", "checkpoint GB"], rows)


def laptop(entry: Result) -> Iterator[str]:
    """Loss of masked tokens, by masked share, beside the entropy of single tokens."""
    for text, seen in entry["figures"].items():
        rows = [
            [
                f"`{recipe}`",
                f"{run['minutes']:.1f}",
                *(f"{share['loss']:.2f} ± {share['stderr']:.2f}" for share in run["by_masked_share"].values()),
            ]
            for recipe, run in seen["recipes"].items()
        ]
        shares = [f"loss, {float(share):.0%} masked" for share in next(iter(seen["recipes"].values()))["by_masked_share"]]
        yield table([f"{text}, {seen['bytes'] / 1e6:.1f} MB, unigram {seen['unigram']:.2f}", "minutes", *shares], rows)


def listed(entry: Result) -> Iterator[str]:
    """Every number of a record, by its keys."""
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


# Benchmark -> tables of one record; others are listed.
_TABLES: dict[str, Callable[[Result], Iterator[str]]] = {
    "train_step": steps,
    "curves": curves,
    "precision": precision,
    "cold_start": starts,
    "memory": memory,
    "attention": attention,
    "loss": loss,
    "sampling": sampling,
    "likelihood": likelihood,
    "serving": serving,
    "serving_engine": engine,
    "blocks": blocks,
    "checkpoint": checkpoint,
    "laptop": laptop,
}


def summary(results: dict[str, Result]) -> str:
    """The first screen: what a user gets, beside what it is compared with."""
    figures = {name.removesuffix(".json").removesuffix("-nvidia-h200"): entry["figures"] for name, entry in results.items()}
    forms, texts, asked = figures["train_step-smdm-472m-2048"]["forms"], figures["sampling"]["batch 64"], figures["likelihood"]
    step, official = (f"{forms[form]['tokens_per_second']:,.0f}" for form in ("sink", "official"))
    full, none = (figures["memory-smdm-472m"][f"{how}, alone 1, 1 forwards"]["peak"] / 1e9 for how in ("full", "none"))
    warm, cold = (figures["cold_start-smdm-472m"]["seconds_to_first_step"][kind]["p50"] for kind in ("warm", "cold"))
    ours, cached, loop = (rate(texts[form]["tokens_per_second"]) for form in ("ours", "blocks_cache_dual", "official"))
    in_blocks = figures["blocks-smdm-472m-sampling"]["sampling"]["64 rows"]
    exact, one_a_step = (rate(in_blocks[form]["tokens_per_second"]) for form in ("blocks_cache_exact", "official"))
    scored, alone = (rate({"p50": asked[form]["requests_per_second"]}) for form in ("ours", "plain"))
    together, single = (rate(figures["serving-cpu-aarch64"][form]["requests_per_second"]) for form in ("together", "one_by_one"))
    return f"""\
|  | sinkdlm | beside |
| --- | --- | --- |
| Training step, smdm-472m with a sink | {step} tokens/s, {forms["sink"]["mfu"]:.1%} MFU | official form: {official} |
| Training memory, smdm-472m, 8 rows | {full:.1f} GB with full recomputation | without: {none:.1f} GB |
| First training step after the command, smdm-472m | {warm:.1f} s | nothing cached: {cold:.1f} s |
| Sampling 64 texts at once, smdm-472m shape, temperature 0 | {ours} tokens/s | official loop: {loop} |
| The same in blocks with a dual cache | {cached} tokens/s | official loop, no blocks: {loop} |
| The same by block diffusion with its exact cache, temperature 0.1 | {exact} tokens/s | official loop: {one_a_step} |
| Likelihood, smdm-472m shape | {scored} requests/s | one request at a time: {alone} |
| Serving 64 clients on a CPU, nano shape | {together} requests/s | one by one: {single} |"""


def parts(results: dict[str, Result]) -> dict[str, str]:
    """Part of the page -> its text. Training runs share a table; any other record has its own."""
    trained = {name: entry for name, entry in results.items() if entry["benchmark"] == "train"}
    made = {"train": training(trained)} if trained else {}
    for name, entry in results.items():
        if name not in trained:
            tables = _TABLES.get(entry["benchmark"], listed)({**entry, "name": name})
            made[name.removesuffix(".json")] = chain(tables, [source(name, entry)])
    return {name: "\n\n".join(blocks) for name, blocks in made.items()}


def page_text() -> str:
    results = read_results()
    made = {"summary": summary(results), "plan": "\n\n".join(planning()), **parts(results)}
    return fill(PAGE.read_text(encoding="utf-8"), made)


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


def plan_text() -> str:
    return fill(PLAN_PAGE.read_text(encoding="utf-8"), {"table": paper_table()})


# -- the laptop recipes on three books -------------------------------------------------------------------------------------------


def laptop_text() -> str:
    """Nats below the entropy of single tokens, for each book and recipe, and how one of the models writes."""
    books: Result = {}
    for entry in read_results().values():
        if entry["benchmark"] == "laptop":
            books |= entry["figures"]
    rows = [
        [title(book), f"{seen['unigram']:.2f}", f"`{recipe}`", *(f"{below:.2f}" for below in run["below_unigram"].values())]
        for book, seen in books.items()
        for recipe, run in seen["recipes"].items()
    ]
    shown = books["king-james-bible"]["recipes"]["laptop-sink"]["samples"][0]
    head = ["book", "unigram entropy", "recipe", *(f"gain, {share} masked" for share in ("25 %", "50 %", "75 %"))]
    sample = "\n".join(f"> {line}  " for line in shown.splitlines())
    text = {"record": table(head, rows), "sample": sample}
    return fill(LAPTOP_PAGE.read_text(encoding="utf-8"), text)


def title(book: str) -> str:
    return book.replace("-", " ").title().replace("Moby Dick", "Moby-Dick")


# -- tutorials -------------------------------------------------------------------------------------------------------------------


def tutorial_text() -> str:
    """What the tutorial's commands print, as recorded."""
    (entry,) = (one for one in read_results().values() if one["benchmark"] == "tutorial")
    figures = entry["figures"]
    asked = figures["answers"]

    def of(part: str, command: str) -> Any:
        """Of the first command that begins so."""
        return next(value for words, value in figures[part].items() if words.startswith(command))

    ends = {run: list(losses.values())[-1] for run, losses in figures["validation"].items()}
    threads = entry["settings"]["threads"]
    cores = f"{threads} core{'s' if threads > 1 else ''} of a busy {entry['hardware']['machine']} machine"
    example, trained, written, answered = (
        f"```text\n{of('printed', words)}\n```"
        for words in ("data example", "train mine.toml", "sample runs/mine/model", "sample runs/sft-nano-sink")
    )
    took, tuning = (f"{of('seconds', command):.0f} s" for command in ("train mine.toml", "train sft-nano-sink"))
    trained += f"\n\nThis took {took} on {cores}. The loss is in nats a character."
    written += (
        "\n\nThe model knows letters, words and the forms of sentences. Sums and counts take longer. With four times the tokens "
        f"(`--set train.steps=4400` in another `--out`) validation falls from {ends['mine']:.2f} to {ends['long']:.2f}."
    )
    answered += (
        f"\n\nFine-tuning took {tuning}. Of {asked['asked']} questions, {asked['formed']} got an answer of this form and "
        f"{asked['right']} the right one: this small model has not learned to add."
    )
    parts = {"example": example, "train": trained, "sample": written, "answers": answered}
    return fill(TUTORIAL_PAGE.read_text(encoding="utf-8"), parts)


def adapt_text() -> str:
    """Loss and attention on the sink while SmolLM2-135M is adapted, with the minutes that its recorded speed gives."""
    figures = read_results()[f"train-smollm2-135m-sink{_GPU}"]["figures"]
    each, speed = figures["tokens"] / figures["steps"], figures["tokens_per_second"]["p50"]
    rows = []
    for seen, probe in zip(figures["validation"], figures["probe"], strict=True):
        shares = sorted(layer["sink_share"] for layer in probe["layers"])
        tokens = seen["step"] * each
        cells = [f"{tokens / speed / 60:.1f}", f"{seen['loss']:.2f} ± {seen['stderr']:.2f}"]
        cells += [f"{sum(shares) / len(shares):.0%}", f"{shares[-1]:.0%}"]
        rows.append([f"{tokens / 1e6:.0f}M", *cells])
    head = ["tokens", "minutes", "validation, nats a token", "attention on the sink, mean over layers", "in the strongest layer"]
    return fill(ADAPT_PAGE.read_text(encoding="utf-8"), {"record": table(head, rows)})


def gsm8k_text() -> str:
    """What fine-tuned models of the reproduction got right, beside the paper's."""
    runs = [json.loads(path.read_text()) for path in sorted((RESULTS / "reproduction").glob("sft-*-s*.json"))]
    right = [run["outcomes"]["gsm8k_two_stage.exact_match"] for run in runs]
    shares, minutes = (
        [f"{pick(values):.{digits}f}" for pick in (min, max)]
        for values, digits in (([100 * one["value"] for one in right], 1), ([run["seconds"]["train"] / 60 for run in runs], 1))
    )
    (steps,), (asked,) = {run["steps"] for run in runs}, {one["n"] for one in right}
    text = (
        f"{len(runs)} fine-tunings of SmolLM2-135M, {steps} steps each, took {' to '.join(minutes)} minutes on one H200 and got "
        f"{' to '.join(shares)} % of {asked} questions right ([reproduction](../reproduction.md#gsm8k-after-fine-tuning)). "
        f"The paper's 0.5B model with a sink gets {100 * paper_row('table1:0.5b:sink')['gsm8k']:.1f} %."
    )
    return fill(GSM8K_PAGE.read_text(encoding="utf-8"), {"record": text})


MADE = {LAPTOP_PAGE: laptop_text, TUTORIAL_PAGE: tutorial_text, ADAPT_PAGE: adapt_text, GSM8K_PAGE: gsm8k_text}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from benchmarks.plots import draw

    PAGE.write_text(page_text(), encoding="utf-8")
    PLAN_PAGE.write_text(plan_text(), encoding="utf-8")
    for path, text in MADE.items():
        path.write_text(text(), encoding="utf-8")
    for path in (PAGE, PLAN_PAGE, *MADE, *draw(ROOT / "docs" / "assets")):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
