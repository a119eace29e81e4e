"""Compare variants whose trials chose different learning rates once more, at one rate.

Exploratory, without verdicts: which variants have runs at a second rate was decided after runs had been seen.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sinkdlm.reproduce.claims import CLAIMS, PRIMARY, compare, outcome_name, runs_of, write_interval
from sinkdlm.reproduce.inputs import Asked
from sinkdlm.reproduce.markdown import table
from sinkdlm.reproduce.matrix import ADAPT, LABELS, VARIANTS, difference
from sinkdlm.reproduce.results import RunResult, read_results
from studies.asking import run_study

Pair = tuple[str, str]  # a variant, and what it is compared with
# Variant -> the same at another's rate.
TWINS = {
    name: twin
    for twin, late in VARIANTS.items()
    for name, variant in VARIANTS.items()
    if late.rate_of and not variant.rate_of and variant.changes == late.changes
}


def equal_rate_rows(results: Mapping[str, RunResult]) -> list[list[str]]:
    runs = {variant: runs_of(results, ADAPT, variant) for variant in VARIANTS}
    rates = {variant: next(iter(own.values())).lr for variant, own in runs.items() if own}
    rows = []

    def add(label: str, pair: Pair) -> None:
        found = [compare(results, ADAPT, *pair, name).spread for name in PRIMARY]
        cells = [write_interval(spread) if spread.n else "" for spread in found]
        told = " and ".join(dict.fromkeys(f"{rates[one]:g}" for one in pair))
        rows.append([label, told, *cells, str(min(spread.n for spread in found))])

    for variant, against in dict.fromkeys((claim.variant, claim.against) for claim in CLAIMS if claim.group == ADAPT):
        if not rates.keys() >= {variant, against} or rates[variant] == rates[against]:
            continue
        # The same comparison with one side replaced by its twin at the other side's rate.
        twins = ((TWINS.get(variant, ""), against), (variant, TWINS.get(against, "")))
        if again := [one for one in twins if rates.keys() >= set(one) and rates[one[0]] == rates[one[1]]]:
            add(difference(variant, against), (variant, against))
            for one in again:
                add("the same, at one rate", one)
    for variant, twin in TWINS.items():
        if rates.keys() >= {variant, twin} and rates[variant] != rates[twin]:
            larger, smaller = sorted((variant, twin), key=lambda one: -rates[one])
            add(f"{LABELS[variant]}: larger rate \N{MINUS SIGN} smaller rate", (larger, smaller))
    return rows


def equal_rate_blocks(rows: Sequence[Sequence[str]]) -> list[str]:
    return [table(["", "learning rates", *map(outcome_name, PRIMARY), "seeds"], rows)] if rows else []


def main(words: Sequence[str] | None = None) -> None:
    def study(asked: Asked) -> dict[str, Any]:
        return {"rows": equal_rate_rows(read_results(asked.folder, asked.scale))}

    run_study(__doc__ or "", study, lambda _, found: equal_rate_blocks(found["rows"]), words)


if __name__ == "__main__":
    main()
