"""What records say about each table and figure: our means and intervals, the paper's numbers, a verdict on each claim.

Made from records alone. Owns the form of report.json.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sinkdlm.evals.paper import paper_row
from sinkdlm.reproduce.blocks import Block, Bullets, Heading, Paragraph, Table, to_html, to_markdown
from sinkdlm.reproduce.claims import (
    ANSWERS,
    CLAIMS,
    NELBO,
    OUTCOMES,
    PRIMARY,
    as_json,
    compare,
    judge,
    measured,
    outcome_name,
    overall,
    runs_of,
)
from sinkdlm.reproduce.matrix import ADAPT, FIRST_SEED, LABELS, RATE_OF, SCRATCH, SFT, TARGETS, Scale, jobs_of
from sinkdlm.reproduce.results import TRIAL, Record, write_text
from sinkdlm.reproduce.statistics import ALPHA, MIN_SEEDS, holm, over_seeds

_NANO = (
    "Nano shows the machinery. Its models have 0.2M parameters and learn generated stories for 40 steps; tasks that bear a "
    "benchmark's name are generated too. Verdicts are of these models and say nothing about the paper's."
)
_DIVIDED = "; ours with an option's score divided by its length (`acc_norm`) where the harness has that, the paper does not say"
_SOLVED = "; ours of few questions, of which hardly any are solved: the answers' NELBO is what is judged"
OFFICIAL, FIRST = "official.", "first."  # outcomes of the official settings; of the same questions by ours
# Figure -> what is shown of attention.
_FIGURES = {
    "figure1": ("sink_heads", "turnover", "turnover_null", "norm_ratio"),
    "figure3": ("sink_mass", "middle_sink_times", "middle_norm_ratio"),
}


def write_report(
    out: Path, targets: Sequence[str], scale: Scale, records: Mapping[str, Record], left: Sequence[str] = ()
) -> dict[str, Any]:
    """report.json, report.md and report.html; what report.json holds."""
    found = findings(targets, scale, records, left)
    blocks = blocks_of(found)
    write_text(out / "report.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_text(out / "report.md", to_markdown(blocks))
    write_text(out / "report.html", to_html("Reproduction", blocks))
    return found


def findings(targets: Sequence[str], scale: Scale, records: Mapping[str, Record], left: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "scale": scale.name,
        "left": list(left),
        "targets": {target: _target(target, records) for target in targets},
        "rates": _rates(targets, scale, records),
        "work": _work(records),
    }


# -- a target ---------------------------------------------------------------------------------------------------------------------


def _target(target: str, records: Mapping[str, Record]) -> dict[str, Any]:
    declared = TARGETS[target]
    rows = [
        _row(records, group, variant, declared.paper.get(variant, ()))
        for group, variants in declared.runs.items()
        for variant in variants
    ]
    return {
        "title": declared.title,
        "rows": rows,
        "claims": [_claim(claim, records) for claim in CLAIMS if claim.target == target],
        "exploratory": _exploratory(target, records),
    }


def _row(records: Mapping[str, Record], group: str, variant: str, paper: Sequence[str]) -> dict[str, Any]:
    own = runs_of(records, group, variant)
    names = dict.fromkeys(name for record in own.values() for name in record.outcomes)
    shown = [name for name in (*PRIMARY, ANSWERS, *names) if measured(records, group, variant, name)]
    values = {name: as_json(over_seeds(measured(records, group, variant, name))) for name in dict.fromkeys(shown)}
    values |= {name: as_json(over_seeds(found)) for name, found in _on_the_same(own.values()).items()}
    return {
        "group": group,
        "variant": variant,
        "seeds": list(own),
        "records": [record.name for record in own.values()],
        "tokens": max((record.tokens for record in own.values()), default=None),
        "seconds": round(fmean(record.seconds for record in own.values()), 1) if own else None,
        "lr": sorted({record.lr for record in own.values()}),
        "values": values,
        "paper": {name: paper_row(name) for name in paper},
    }


def _on_the_same(runs: Iterable[Record]) -> dict[str, list[float]]:
    """What the official settings were asked, first questions alone, by the settings of all others: else the two do not compare."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, official in run.outcomes.items():
            own = run.outcomes.get(name.removeprefix(OFFICIAL))
            if name.startswith(OFFICIAL) and own is not None:
                values = own.values[: len(official.values)]
                found.setdefault(f"{FIRST}{name.removeprefix(OFFICIAL)}", []).append(float(values.mean()))
    return found


def _claim(claim: Any, records: Mapping[str, Record]) -> dict[str, Any]:
    judged = judge(claim, records)
    outcomes = [
        {
            "outcome": one.outcome,
            "verdict": one.verdict,
            **as_json(one.spread),
            "sentence": one.sentence,
            "figures": one.figures,
            "within": {
                str(seed): {
                    "difference": pair.difference,
                    "stderr": None if math.isnan(pair.stderr) else pair.stderr,
                    "items": pair.n,
                }
                for seed, pair in one.within.items()
            },
        }
        for one in judged
    ]
    return {"claim": claim.name, "text": claim.text, "verdict": overall(judged), "outcomes": outcomes}


def _exploratory(target: str, records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Every other outcome of every comparison of the target's claims, with Holm's correction over all that have seeds enough.

    A comparison that several targets make is explored in the first of them.
    """
    found: dict[str, dict[str, Any]] = {}
    for claim in CLAIMS:
        alike = [one for one in CLAIMS if (one.group, one.variant, one.against) == (claim.group, claim.variant, claim.against)]
        if not claim.against or alike[0] is not claim or claim.target != target:
            continue
        claimed = {outcome for one in alike for outcome in one.outcomes}
        both = [runs_of(records, claim.group, variant) for variant in (claim.variant, claim.against)]
        shared = [set.intersection(*(set(one.outcomes) for one in side.values())) for side in both if side]
        names = sorted(set.intersection(*shared)) if len(shared) == 2 else []
        for name in names:
            if name in claimed:
                continue
            spread = compare(records, claim.group, claim.variant, claim.against, name).spread
            if spread.n:
                key = f"{claim.group}: {claim.variant} - {claim.against}: {name}"
                found[key] = {"comparison": f"{claim.variant} - {claim.against}", "outcome": name, **as_json(spread)}
    tested = {key: one["p"] if one["p"] is not None and one["n"] >= MIN_SEEDS else math.nan for key, one in found.items()}
    adjusted = holm(tested)
    return [{**one, "holm": None if math.isnan(adjusted[key]) else adjusted[key]} for key, one in found.items()]


def _rates(targets: Sequence[str], scale: Scale, records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """What trials gave: the chosen learning rate of each variant, and whether it lies at the end of the values tried."""
    found: dict[tuple[str, str], dict[float, float]] = {}
    for job in jobs_of(targets, scale, 1):
        record = records.get(job.name)
        if record is not None and record.kind == TRIAL:
            found.setdefault((job.group, job.variant), {})[record.lr] = record.outcomes[NELBO].value
    rows = []
    for (group, variant), tried in found.items():
        if len(tried) == len(scale.lrs[group]):
            best = min(tried, key=lambda rate: (tried[rate], rate))
            edge = best in (min(tried), max(tried))
            rows.append(
                {"group": group, "variant": variant, "chosen": best, "edge": edge, "tried": {f"{r:g}": v for r, v in tried.items()}}
            )
    return rows


def _work(records: Mapping[str, Record]) -> dict[str, Any]:
    """What everything took, and on what."""
    environments = [record.facts["environment"] for record in records.values()]
    return {
        "records": len(records),
        "seconds": round(sum(record.seconds for record in records.values()), 1),
        "tokens": sum(record.tokens for record in records.values()),
        "devices": sorted({one["device"] for one in environments}),
        "commits": sorted({str(one["commit"]) for one in environments}),
        "torch": sorted({one["torch"] for one in environments}),
    }


# -- in words ---------------------------------------------------------------------------------------------------------------------


def blocks_of(found: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = [Heading(1, f"Reproduction at scale {found['scale']}")]
    if found["scale"] == "nano":
        blocks.append(Paragraph(_NANO))
    if found["left"]:
        blocks.append(Paragraph(f"Not finished: {len(found['left'])} runs are missing, the first of them `{found['left'][0]}`."))
    blocks += [Heading(2, "Verdicts"), verdicts(found)]
    for target, one in found["targets"].items():
        blocks += target_blocks(target, one)
    return [*blocks, *rate_blocks(found), *work_blocks(found)]


def verdicts(found: Mapping[str, Any]) -> Table:
    rows = []
    for target, one in found["targets"].items():
        for claim in one["claims"]:
            by_name = {outcome["outcome"]: outcome for outcome in claim["outcomes"]}
            others = [outcome["figures"] for name, outcome in by_name.items() if name not in PRIMARY]
            cells = [by_name[name]["figures"] if name in by_name else "" for name in PRIMARY]
            seeds = min(outcome["n"] for outcome in claim["outcomes"])
            rows.append([target, claim["text"], f"**{claim['verdict']}**", *cells, " ".join(others), str(seeds)])
    return Table(["", "claim", "verdict", *map(outcome_name, PRIMARY), "other quantity", "seeds"], rows)


def target_blocks(target: str, one: Mapping[str, Any], level: int = 2) -> list[Block]:
    blocks: list[Block] = [Heading(level, one["title"]), _values_table(target, one)]
    beside = _paper_table(one)
    if beside is not None:
        divided = _SOLVED if target == "gsm8k" else _DIVIDED
        told = f"Right answers in per cent, ours (mean over seeds) and the paper's, which has a larger model{divided}:"
        blocks += [Paragraph(told), beside]
    for claim in one["claims"]:
        blocks.append(Paragraph(f"**{claim['text']}: {claim['verdict']}.**"))
        blocks.append(Bullets([outcome["sentence"] for outcome in claim["outcomes"]]))
    tests = [row for row in one["exploratory"] if row["holm"] is not None]
    if tests:
        kept = [row for row in tests if row["holm"] <= ALPHA]
        told = ", ".join(f"{row['comparison']} in {row['outcome']} ({row['mean']:+.4g})" for row in kept) or "none"
        blocks.append(Paragraph(f"Exploratory: {len(tests)} other comparisons; different after Holm's correction: {told}."))
    return blocks


def _values_table(target: str, one: Mapping[str, Any]) -> Table:
    names = [name for name in (*PRIMARY, ANSWERS) if any(name in row["values"] for row in one["rows"])]
    if target in _FIGURES:
        names = [f"attention.{name}" for name in _FIGURES[target]]
    told = [OUTCOMES.get(name, name.removeprefix("attention.").replace("_", " ")) for name in names]
    head = ["", *told, "tokens of a run", "seconds of a run"]
    rows = []
    for row in one["rows"]:
        cells = [_cell(row["values"].get(name)) for name in names]
        tokens = "" if row["tokens"] is None else f"{row['tokens']:,}"
        after = ", fine-tuned" if row["group"] == SFT else ""
        rows.append([LABELS[row["variant"]] + after, *cells, tokens, "" if row["seconds"] is None else f"{row['seconds']:.0f}"])
    return Table(head, rows)


def _cell(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "not measured"
    if value["low"] is None:
        return f"{value['mean']:.4f} ({value['n']})"
    return f"{value['mean']:.4f} [{value['low']:.4f}, {value['high']:.4f}] ({value['n']})"


def _paper_table(one: Mapping[str, Any]) -> Table | None:
    """The paper does not say whether its numbers are divided by length; ours are where the harness divides. GSM8K is asked of
    fine-tuned models alone, and stands with them."""
    named = dict.fromkeys(task for row in one["rows"] for values in row["paper"].values() for task in values)
    groups = {row["group"] for row in one["rows"]}
    tasks = [task for task in named if groups & ({SFT} if task == "gsm8k" else {ADAPT, SCRATCH})]
    if not tasks:
        return None
    rows = []
    for row in one["rows"]:
        ours = [_accuracy(row["values"], task) for task in tasks]
        rows.append([f"{LABELS[row['variant']]}, ours", *ours])
        same, official = ([_accuracy(row["values"], task, settings) for task in tasks] for settings in (FIRST, OFFICIAL))
        if any(official):
            rows.append([f"{LABELS[row['variant']]}, ours on the questions of the next line, seed {FIRST_SEED}", *same])
            rows.append([f"{LABELS[row['variant']]}, ours with the official settings, seed {FIRST_SEED}", *official])
        for name, values in row["paper"].items():
            rows.append([f"{LABELS[row['variant']]}, paper ({name})", *(f"{100 * values[task]:.2f}" for task in tasks)])
    return Table(["", *tasks], rows)


def _accuracy(values: Mapping[str, Any], task: str, settings: str = "") -> str:
    for metric in ("acc_norm", "acc", "greedy", "exact_match"):
        found = values.get(f"{settings}{task}.{metric}") or values.get(f"{settings}{task}_two_stage.{metric}")
        if found is not None:
            return f"{100 * found['mean']:.2f}"
    return ""


def rate_blocks(found: Mapping[str, Any], level: int = 2) -> list[Block]:
    rows = [
        [
            row["group"],
            LABELS[row["variant"]],
            *(f"{value:.4f}" for value in row["tried"].values()),
            f"{row['chosen']:g}",
            "yes" if row["edge"] else "",
        ]
        for row in found["rates"]
    ]
    if not rows:
        return []
    blocks: list[Block] = [
        Heading(level, "Learning rates"),
        Paragraph(
            "Validation NELBO of each variant's three trials, from the smallest rate to the largest, on a seed that no table uses."
        ),
    ]
    return [*blocks, Table(["group", "variant", "low", "middle", "high", "chosen", "at an end"], rows), *_differing(found["rates"])]


def _differing(rates: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Claims that compare variants whose trials chose different rates. Fine-tuned models have their bases'."""
    chosen = {(row["group"], row["variant"]): row["chosen"] for row in rates}
    lines = []
    for claim in CLAIMS:
        group = ADAPT if claim.group == SFT else claim.group
        ours, theirs = (chosen.get((group, RATE_OF.get(variant, variant))) for variant in (claim.variant, claim.against))
        if ours is not None and theirs is not None and ours != theirs:
            both = f"{LABELS[claim.variant]} at {ours:g}, {LABELS[claim.against]} at {theirs:g}"
            lines.append(f"{claim.target}: {claim.text} ({both}{', before fine-tuning' if claim.group == SFT else ''})")
    if not lines:
        return []
    told = "These claims compare variants whose rates differ, so that what is seen of them may be the rate's:"
    return [Paragraph(told), Bullets(lines)]


def work_blocks(found: Mapping[str, Any], level: int = 2) -> list[Block]:
    work = found["work"]
    text = (
        f"{work['records']} records, {work['tokens']:,} tokens trained on, {work['seconds'] / 60:.0f} minutes of work "
        f"on {', '.join(work['devices']) or 'nothing yet'}; torch {', '.join(work['torch']) or 'unknown'}. Seconds of a run have "
        "its scoring in them, and runs may have shared a device: they do not compare variants."
    )
    return [Heading(level, "Work"), Paragraph(text)]
