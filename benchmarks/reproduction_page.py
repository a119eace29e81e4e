"""Fills docs/reproduction.md and docs/reproduction-method.md: their tables, from the results and the declared matrix.

Their prose is kept by hand, between the parts that are written here. benchmarks/check holds its numbers against the matrix.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies import inherited, lengths, overlap, steadiness
from studies.asking import read_beside
from studies.equal_rates import equal_rate_blocks, equal_rate_rows

from benchmarks.marked import fill
from sinkdlm.config.toml import flatten
from sinkdlm.reproduce.claims import CLAIMS, FAILS, FEW, HOLDS, OPEN, PRIMARY, SAME, outcome_name
from sinkdlm.reproduce.markdown import bullets, table, to_markdown
from sinkdlm.reproduce.matrix import FIRST_SEED, LABELS, SCALES, TARGETS, VARIANTS, Job, Scale, jobs_of, seeds_of, stages_declared
from sinkdlm.reproduce.report import findings, rate_blocks, target_blocks, verdicts, work_blocks
from sinkdlm.reproduce.results import RunResult, find_made, read_results

DOCS = Path(__file__).parents[1] / "docs"
PAGE, METHOD = "reproduction.md", "reproduction-method.md"
SCALE = "small"
VERDICTS = "verdicts"
PICTURES = {  # target, VERDICTS or a study -> file and what it shows
    VERDICTS: ("reproduction-differences.svg", "Differences on each primary outcome, with intervals over seeds"),
    "short": ("reproduction-lengths.svg", "NELBO and attention output norm by row length, with and without a sink"),
    steadiness.NAME: ("reproduction-steadiness.svg", "Gradient norm and attention on the sink, step by step"),
    "figure1": ("reproduction-figure1.svg", "Value norms of content sinks and other tokens; the top content sink at each step"),
    "figure3": ("reproduction-figure3.svg", "Attention on the sink and value norms by layer, before and after fine-tuning"),
}


def declared_results(folder: Path, scale: Scale = SCALES[SCALE]) -> dict[str, RunResult]:
    """Results of the matrix. A run whose learning rate was chosen from other values than the declared ones does not count."""
    every = read_results(folder, scale.name)
    made = {job.name: find_made(job, every, scale) for job in jobs_of(list(TARGETS), scale, scale.seeds)}
    return {name: result for name, result in made.items() if result is not None}


def write_method() -> str:
    return fill((DOCS / METHOD).read_text(encoding="utf-8"), {"runs": _matrix(SCALES[SCALE]), "claims": _claims()})


def _matrix(scale: Scale) -> str:
    rows = []
    pairs = {(group, variant): None for target in TARGETS.values() for group, names in target.runs.items() for variant in names}
    for group, variant in sorted(pairs, key=lambda pair: (list(scale.tables).index(pair[0]), list(VARIANTS).index(pair[1]))):
        used = [name for name, target in TARGETS.items() if variant in target.runs.get(group, ())]
        changes = ", ".join(f"{key} = {value}" for key, value in flatten(VARIANTS[variant].changes).items())
        seeds = seeds_of(group, variant, scale, scale.seeds)
        first = Job(group, variant, FIRST_SEED).name
        names = f"`{first}`" if seeds == 1 else f"`{first}` to `-s{FIRST_SEED + seeds - 1}`"
        late = "late" if VARIANTS[variant].rate_of else ""
        rows.append([group, LABELS[variant], f"`{changes}`" if changes else "", str(seeds), names, ", ".join(used), late])
    return table(["group", "variant", "changes", "seeds", "results", "used in", "added"], rows)


def _claims() -> str:
    rows = []
    for claim in CLAIMS:
        if claim.against:
            sign = "is within the margin of" if claim.kind == SAME else "is lower than"
            said = "" if claim.outcomes == PRIMARY else f" in {', '.join(map(outcome_name, claim.outcomes))}"
            test = f"{claim.group}: {claim.variant} {sign} {claim.against}{said}"
        else:
            names = ", ".join(name.removeprefix("attention.") for name in claim.outcomes)
            test = f"{claim.group}: {names} of {claim.variant} is {claim.kind} {claim.bound:g}"
        rows.append([claim.target, claim.text, test, "late" if claim.late else ""])
    return table(["", "claim", "holds if", "added"], rows)


def write_page(folder: Path, assets: Path) -> str:
    """folder: of results. Pictures are named where `assets` has them."""
    scale = SCALES[SCALE]
    results = declared_results(folder, scale)
    jobs = jobs_of(list(TARGETS), scale, scale.seeds)
    missing = [job.name for job in jobs if job.name not in results]
    found = findings(list(TARGETS), scale, results, missing)
    equal = equal_rate_rows(results)
    before, watched = (read_beside(folder, study.NAME, scale.name) for study in (inherited, steadiness))
    targets = []
    for target, one in found["targets"].items():
        if any(row["seeds"] for row in one["rows"]):
            targets += [*target_blocks(target, one), *_picture(target, assets)]
    parts = {
        "counts": [_counts(found)],
        "confound": equal_rate_blocks(equal[:3]),
        "picture": _picture(VERDICTS, assets),
        "state": [*_missing(jobs, missing), *_unmeasured(jobs, results, scale)],
        "verdicts": [verdicts(found), *_failed(found)],
        "targets": targets,
        "rates": rate_blocks(found)[1:],
        "equal-rates": equal_rate_blocks(equal),
        "inherited": [] if before is None else inherited.inherited_blocks(before),
        "lengths": lengths.lengths_blocks(results, read_beside(folder, lengths.NAME, scale.name), scale),
        "steadiness": steadiness.steadiness_blocks(watched, results, _picture(steadiness.NAME, assets)),
        "overlap": overlap.overlap_blocks(read_beside(folder, overlap.NAME, scale.name)),
        "work": work_blocks(found)[1:],
    }
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    return fill(text, {name: to_markdown(blocks).rstrip("\n") for name, blocks in parts.items()})


def _picture(place: str, assets: Path) -> list[str]:
    name, text = PICTURES.get(place, ("", ""))
    return [f"![{text}](assets/{name})"] if name and (assets / name).exists() else []


def _counts(found: Mapping[str, Any]) -> str:
    """Claims by verdict, and how many of each target."""
    rows = []
    for verdict in (HOLDS, FAILS, OPEN, FEW):
        by_target = {name: sum(claim["verdict"] == verdict for claim in one["claims"]) for name, one in found["targets"].items()}
        named = ", ".join(f"{name} ({count})" for name, count in by_target.items() if count)
        rows.append([f"**{verdict}**", str(sum(by_target.values())), named])
    return table(["verdict", f"of {len(CLAIMS)} claims", "where"], rows)


def _failed(found: Mapping[str, Any]) -> list[str]:
    """Claims that do not hold, outcome by outcome: one that fails is enough."""
    lines = []
    for target, one in found["targets"].items():
        for claim in one["claims"]:
            if claim["verdict"] == FAILS:
                told = "; ".join(f"{outcome_name(outcome['outcome'])}: {outcome['verdict']}" for outcome in claim["outcomes"])
                lines.append(f"{target}: {claim['text']} ({told})")
    return ["One outcome that fails is enough. Claims that do not hold, by outcome:", bullets(lines)] if lines else []


def _missing(jobs: Sequence[Job], missing: list[str]) -> list[str]:
    if not missing:
        return [f"All {len(jobs)} declared runs are there, trials included."]
    return [f"{len(jobs) - len(missing)} of {len(jobs)} declared runs are there, trials included. Missing: {', '.join(missing)}."]


def _unmeasured(jobs: Sequence[Job], results: Mapping[str, RunResult], scale: Scale) -> list[str]:
    """Runs that have a result without all that was declared to be measured."""
    lines = []
    for job in jobs:
        if job.name in results:
            lacks = [stage for stage in stages_declared(job, scale) if stage not in results[job.name].facts["seconds"]]
            lines += [f"{job.name}: {', '.join(lacks)}"] if lacks else []
    return ["Not everything was measured of these runs:", bullets(lines)] if lines else []
