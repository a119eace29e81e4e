"""Report on each table and figure: our means and intervals, the paper's numbers, a verdict on each claim.

Reads results alone. Owns the form of report.json.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sinkdlm.analysis.figures import write_files
from sinkdlm.analysis.glossary import write_count, write_number
from sinkdlm.errors import AnalysisError
from sinkdlm.evals.paper import paper_row
from sinkdlm.reproduce.claims import (
    ANSWERS,
    CLAIMS,
    FAILS,
    FEW,
    HOLDS,
    NELBO,
    OPEN,
    OUTCOMES,
    PRIMARY,
    Claim,
    as_json,
    compare,
    judge,
    measured,
    outcome_name,
    overall,
    runs_of,
)
from sinkdlm.reproduce.figures import TWINS, Results, differences, layers
from sinkdlm.reproduce.markdown import bullets, table, to_html, to_markdown
from sinkdlm.reproduce.matrix import ADAPT, FIRST_SEED, LABELS, SFT, TARGETS, Scale, difference, jobs_of, paper_rows, rate_of
from sinkdlm.reproduce.results import TRIAL, RunResult, best_rate, write_text
from sinkdlm.reproduce.statistics import ALPHA, MIN_SEEDS, holm, over_seeds

_NANO = (
    "Nano shows the machinery. Its models have 0.2M parameters and learn generated stories for 40 steps; tasks with a "
    "benchmark's name are generated too. These verdicts say nothing about the paper's models."
)
_DIVIDED = " Ours are `acc_norm` (score divided by the option's length) where the harness has it; the paper does not say."
_SOLVED = " Ours are of few questions, hardly any solved: the verdict rests on the answers' NELBO."
_TOLD = {  # of one claim, of several
    HOLDS: (HOLDS, "hold"),
    FAILS: (FAILS, "do not hold"),
    OPEN: (OPEN, OPEN),
    FEW: (f"has {FEW}", f"have {FEW}"),
}
OFFICIAL, FIRST = "official.", "first."  # by the official settings; by ours on the same questions
# Figure -> quantities of attention that it shows.
_FIGURES = {
    "figure1": ("sink_heads", "turnover", "turnover_null", "norm_ratio"),
    "figure3": ("sink_mass", "middle_sink_times", "middle_norm_ratio"),
}


def write_report(out: Path, targets: Sequence[str], scale: Scale, results: Results, left: Sequence[str] = ()) -> dict[str, Any]:
    """report.json, report.md, report.html and figures/; what report.json holds."""
    found = findings(targets, scale, results, left)
    opening, rest = opening_blocks(found), blocks_of(found)
    try:
        plates = {"differences": differences(results, targets), "layers": layers(results)}
        files = write_files(plates, out / "figures")
        drawn = [f"![{plates[name].caption}](figures/{paths['svg'].name})" for name, paths in files.items()]
    except AnalysisError as problem:
        plates, drawn = {}, [f"No figures: {problem}."]
    write_text(out / "report.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_text(out / "report.md", to_markdown([*opening, *drawn, *rest]))
    write_text(out / "report.html", to_html("Reproduction", [*opening, *([] if plates else drawn)], plates, rest))
    return found


def findings(targets: Sequence[str], scale: Scale, results: Results, left: Sequence[str] = ()) -> dict[str, Any]:
    environments = [result.facts["environment"] for result in results.values()]
    made = {fact: sorted({str(one[fact]) for one in environments}) for fact in ("device", "commit", "torch")}
    work = {
        "records": len(results),
        "seconds": round(sum(result.seconds for result in results.values()), 1),
        "tokens": sum(result.tokens for result in results.values()),
        "devices": made["device"],
        "commits": made["commit"],
        "torch": made["torch"],
    }
    found = {target: _target(target, results) for target in targets}
    rates = _rates(targets, scale, results)
    return {"scale": scale.name, "lead": lead(found), "left": list(left), "targets": found, "rates": rates, "work": work}


def lead(targets: Mapping[str, Any]) -> list[str]:
    """The report's first sentences: the verdicts, the first measured comparison, and attention of the twins."""
    judged = [claim for one in targets.values() for claim in one["claims"]]
    counts = Counter(claim["verdict"] for claim in judged)
    parts = [
        f"{counts[verdict]} {one if counts[verdict] == 1 else many}" for verdict, (one, many) in _TOLD.items() if counts[verdict]
    ]
    told = [f"Of {len(judged)} claims of the paper {', '.join(parts)}."]
    compared = {claim.name: claim for claim in CLAIMS if claim.against}
    first = next((one for one in judged if one["claim"] in compared and one["outcomes"][0]["n"]), None)
    if first is not None:
        claim, outcome = compared[first["claim"]], first["outcomes"][0]
        subject = f"{difference(claim.variant, claim.against)}, {OUTCOMES[outcome['outcome']]}"
        told.append(f"{subject}: {outcome['figures']}, over {write_count(outcome['n'], 'seed')}.")
    rows = [row for one in targets.values() for row in one["rows"] if row["variant"] in TWINS.values() and row["seeds"]]
    rows = list({row["variant"]: row for row in rows if row["group"] == rows[0]["group"]}.values())
    shares = []
    for what, name in (("Attention on the sink", "sink_mass"), ("Heads with a content sink", "sink_heads")):
        known = [(LABELS[row["variant"]], row["values"].get(f"attention.{name}")) for row in rows]
        own = [f"{write_number(value['mean'], 'share')} ({label})" for label, value in known if value]
        shares += [f"{what}: {', '.join(own)}."] if own else []
    return told + [" ".join(shares)] * bool(shares)


def _target(target: str, results: Results) -> dict[str, Any]:
    title, runs = TARGETS[target]
    return {
        "title": title,
        "rows": [_row(results, group, name, paper_rows(target, name)) for group, variants in runs.items() for name in variants],
        "claims": [_claim(claim, results) for claim in CLAIMS if claim.target == target],
        "exploratory": _exploratory(target, results),
    }


def _row(results: Results, group: str, variant: str, paper: Sequence[str]) -> dict[str, Any]:
    own = runs_of(results, group, variant)
    names = dict.fromkeys([*PRIMARY, ANSWERS, *(name for run in own.values() for name in run.outcomes)])
    values = {name: measured(results, group, variant, name) for name in names} | _on_the_same(own.values())
    return {
        "group": group,
        "variant": variant,
        "seeds": list(own),
        "records": [run.name for run in own.values()],
        "tokens": max((run.tokens for run in own.values()), default=None),
        "seconds": round(fmean(run.seconds for run in own.values()), 1) if own else None,
        "lr": sorted({run.lr for run in own.values()}),
        "values": {name: as_json(over_seeds(found)) for name, found in values.items() if found},
        "paper": {name: paper_row(name) for name in paper},
    }


def _on_the_same(runs: Iterable[RunResult]) -> dict[str, list[float]]:
    """Score by our settings the first questions alone, which the official settings were asked: else the two do not compare."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, official in run.outcomes.items():
            plain = name.removeprefix(OFFICIAL)
            if plain != name and plain in run.outcomes:
                values = run.outcomes[plain].values[: len(official.values)]
                found.setdefault(FIRST + plain, []).append(float(values.mean()))
    return found


def _claim(claim: Claim, results: Results) -> dict[str, Any]:
    judged = judge(claim, results)
    outcomes = []
    for one in judged:
        within = {str(seed): as_json(pair) for seed, pair in one.within.items()}
        said = {"sentence": one.sentence, "figures": one.figures, "within": within}
        outcomes.append({"outcome": one.outcome, "verdict": one.verdict, **as_json(one.spread), **said})
    return {"claim": claim.name, "text": claim.text, "verdict": overall(judged), "outcomes": outcomes}


def _exploratory(target: str, results: Results) -> list[dict[str, Any]]:
    """Test all other outcomes of the target's comparisons, with Holm's correction over those that have enough seeds.

    A comparison of several targets is explored in the first of them.
    """
    found: list[dict[str, Any]] = []
    for claim in CLAIMS:
        alike = [one for one in CLAIMS if (one.group, one.variant, one.against) == (claim.group, claim.variant, claim.against)]
        if not claim.against or alike[0] is not claim or claim.target != target:
            continue
        runs = [run for variant in (claim.variant, claim.against) for run in runs_of(results, claim.group, variant).values()]
        shared = set.intersection(*(set(run.outcomes) for run in runs)) if runs else set()
        for name in sorted(shared - {outcome for one in alike for outcome in one.outcomes}):
            spread = compare(results, claim.group, claim.variant, claim.against, name).spread
            if spread.n:
                found.append({"comparison": f"{claim.variant} - {claim.against}", "outcome": name, **as_json(spread)})
    tested = [math.nan if one["p"] is None or one["n"] < MIN_SEEDS else one["p"] for one in found]
    return [{**one, "holm": None if math.isnan(p) else p} for one, p in zip(found, holm(tested), strict=True)]


def _rates(targets: Sequence[str], scale: Scale, results: Results) -> list[dict[str, Any]]:
    """The learning rate that trials chose for each variant, and whether it is the smallest or largest of those tried."""
    found: dict[tuple[str, str], dict[float, float]] = {}
    for job in jobs_of(targets, scale, 1):
        result = results.get(job.name)
        if result is not None and result.kind == TRIAL:
            found.setdefault((job.group, job.variant), {})[result.lr] = result.outcomes[NELBO].value
    rows = []
    for (group, variant), tried in found.items():
        if len(tried) == len(scale.lrs[group]):
            best, values = best_rate(tried), {f"{rate:g}": value for rate, value in tried.items()}
            edge = best in (min(tried), max(tried))
            rows.append({"group": group, "variant": variant, "chosen": best, "edge": edge, "tried": values})
    return rows


def opening_blocks(found: Mapping[str, Any]) -> list[str]:
    blocks = [f"# Reproduction at scale {found['scale']}", *found["lead"]]
    if found["scale"] == "nano":
        blocks.append(_NANO)
    if found["left"]:
        blocks.append(f"Not finished: {len(found['left'])} runs are missing, the first of them `{found['left'][0]}`.")
    return blocks


def blocks_of(found: Mapping[str, Any]) -> list[str]:
    blocks = ["## Verdicts", verdicts(found)]
    for target, one in found["targets"].items():
        blocks += target_blocks(target, one)
    return [*blocks, *rate_blocks(found), *work_blocks(found)]


def verdicts(found: Mapping[str, Any]) -> str:
    rows = []
    for target, one in found["targets"].items():
        for claim in one["claims"]:
            figures = {outcome["outcome"]: outcome["figures"] for outcome in claim["outcomes"]}
            cells = [figures.pop(name, "") for name in PRIMARY]
            seeds = min(outcome["n"] for outcome in claim["outcomes"])
            rows.append([target, claim["text"], f"**{claim['verdict']}**", *cells, " ".join(figures.values()), str(seeds)])
    return table(["", "claim", "verdict", *map(outcome_name, PRIMARY), "other quantity", "seeds"], rows)


def target_blocks(target: str, one: Mapping[str, Any]) -> list[str]:
    blocks = [f"## {one['title']}", _values_table(target, one)]
    beside = _paper_rows(one)
    if beside is not None:
        divided = _SOLVED if target == "gsm8k" else _DIVIDED
        told = f"Correct answers in %, ours (mean over seeds) and the paper's, of a larger model.{divided}"
        blocks += [told, table(*beside)]
    for claim in one["claims"]:
        blocks += [f"**{claim['text']}: {claim['verdict']}.**", bullets(outcome["sentence"] for outcome in claim["outcomes"])]
    tests = [row for row in one["exploratory"] if row["holm"] is not None]
    if tests:
        kept = [row for row in tests if row["holm"] <= ALPHA]
        told = ", ".join(f"{row['comparison']}, `{row['outcome']}` {row['mean']:+.4g}" for row in kept) or "none"
        blocks.append(f"Exploratory: {len(tests)} other comparisons. Different after Holm's correction: {told}.")
    return blocks


def _values_table(target: str, one: Mapping[str, Any]) -> str:
    names = [f"attention.{name}" for name in _FIGURES.get(target, ())]
    names = names or [name for name in (*PRIMARY, ANSWERS) if any(name in row["values"] for row in one["rows"])]
    rows = []
    for row in one["rows"]:
        label = LABELS[row["variant"]] + (", fine-tuned" if row["group"] == SFT else "")
        work = [f"{row['tokens']:,}", f"{row['seconds']:.0f}"] if row["seeds"] else ["", ""]
        rows.append([label, *(_cell(row["values"].get(name)) for name in names), *work])
    told = [OUTCOMES.get(name, outcome_name(name)) for name in names]
    return table(["mean [interval] (seeds)", *told, "tokens/run", "s/run"], rows)


def _cell(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "not measured"
    interval = "" if value["low"] is None else f" [{value['low']:.4f}, {value['high']:.4f}]"
    return f"{value['mean']:.4f}{interval} ({value['n']})"


def _paper_rows(one: Mapping[str, Any]) -> tuple[list[str], list[list[str]]] | None:
    """A table's head and rows. GSM8K is asked of fine-tuned models alone, and shown with them."""
    named = dict.fromkeys(task for row in one["rows"] for values in row["paper"].values() for task in values)
    tuned = {row["group"] == SFT for row in one["rows"]}
    tasks = [task for task in named if (task == "gsm8k") in tuned]
    if not tasks:
        return None
    rows = []
    for row in one["rows"]:
        label = LABELS[row["variant"]]
        ours, same, official = ([_accuracy(row["values"], by + task) for task in tasks] for by in ("", FIRST, OFFICIAL))
        rows.append([f"{label}, ours", *ours])
        if any(official):
            rows.append([f"{label}, ours, seed {FIRST_SEED}, same questions as the next line", *same])
            rows.append([f"{label}, ours, seed {FIRST_SEED}, official settings", *official])
        for name, values in row["paper"].items():
            rows.append([f"{label}, paper ({name})", *(f"{100 * values[task]:.2f}" for task in tasks)])
    return ["", *tasks], rows


def _accuracy(values: Mapping[str, Any], task: str) -> str:
    for metric in ("acc_norm", "acc", "greedy", "exact_match"):
        found = values.get(f"{task}.{metric}") or values.get(f"{task}_two_stage.{metric}")
        if found is not None:
            return f"{100 * found['mean']:.2f}"
    return ""


def rate_blocks(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for row in found["rates"]:
        tried = (f"{value:.4f}" for value in row["tried"].values())
        rows.append([row["group"], LABELS[row["variant"]], *tried, f"{row['chosen']:g}", "yes" if row["edge"] else ""])
    if not rows:
        return []
    told = "Validation NELBO of each variant's three trials, on a seed that no table uses."
    head = ["group", "variant", "lowest rate", "middle", "highest", "chosen", "lowest or highest"]
    return ["## Learning rates", told, table(head, rows), *_differing(found["rates"])]


def _differing(rates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Claims that compare variants whose trials chose different learning rates. Fine-tuned models count by their bases."""
    chosen = {(row["group"], row["variant"]): row["chosen"] for row in rates}
    lines = []
    for claim in CLAIMS:
        if not claim.against:
            continue
        tuned = claim.group == SFT
        group = ADAPT if tuned else claim.group
        ours, theirs = (chosen.get((group, rate_of(variant))) for variant in (claim.variant, claim.against))
        if ours is not None and theirs is not None and ours != theirs:
            both = f"{LABELS[claim.variant]} at {ours:g}, {LABELS[claim.against]} at {theirs:g}"
            lines.append(f"{claim.target}: {claim.text} ({both}{', before fine-tuning' if tuned else ''})")
    told = "These claims compare variants with different learning rates, so their differences may come from the rate:"
    return [told, bullets(lines)] if lines else []


def work_blocks(found: Mapping[str, Any]) -> list[str]:
    work = found["work"]
    text = (
        f"{work['records']} results, {work['tokens']:,} tokens trained on, {work['seconds'] / 60:.0f} minutes "
        f"on {', '.join(work['devices']) or 'nothing yet'}; torch {', '.join(work['torch']) or 'unknown'}. A run's seconds include "
        "its scoring, and runs may have shared a device: do not compare variants by them."
    )
    return ["## Work", text]
