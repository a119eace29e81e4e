"""What of a difference is the learning rate's: variants whose trials chose different rates, compared once more at one rate.

Exploratory: which variants have runs at a second rate was decided after runs had been seen. Gives no verdicts.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sinkdlm.reproduce.blocks import Block, Heading, Paragraph, Table
from sinkdlm.reproduce.claims import CLAIMS, PRIMARY, compare, outcome_name, runs_of, write_interval
from sinkdlm.reproduce.matrix import ADAPT, LABELS, RATE_OF, VARIANTS
from sinkdlm.reproduce.results import Record

# Variant -> the same at another's rate.
TWINS = {
    variant: twin for twin in RATE_OF for variant in VARIANTS if variant not in RATE_OF and VARIANTS[variant] == VARIANTS[twin]
}


class Pair(NamedTuple):
    variant: str
    against: str


def rates_of(records: Mapping[str, Record]) -> dict[str, float]:
    """Of adapted variants that have runs."""
    found = {variant: runs_of(records, ADAPT, variant) for variant in VARIANTS}
    return {variant: next(iter(runs.values())).lr for variant, runs in found.items() if runs}


def at_one_rate(pair: Pair, rates: Mapping[str, float]) -> Iterator[Pair]:
    """The same comparison with one side's twin, where that has the other's rate."""
    for one in (pair._replace(variant=TWINS.get(pair.variant, "")), pair._replace(against=TWINS.get(pair.against, ""))):
        if rates.keys() >= set(one) and rates[one.variant] == rates[one.against]:
            yield one


def equal_rate_blocks(records: Mapping[str, Record], level: int) -> list[Block]:
    rates = rates_of(records)
    rows = []
    for pair in dict.fromkeys(Pair(claim.variant, claim.against) for claim in CLAIMS if claim.against and claim.group == ADAPT):
        if not rates.keys() >= set(pair) or rates[pair.variant] == rates[pair.against]:
            continue
        again = list(at_one_rate(pair, rates))
        if again:
            told = f"{LABELS[pair.variant]} \N{MINUS SIGN} {LABELS[pair.against]}"
            rows += [_row(told, pair, rates, records), *(_row("", one, rates, records) for one in again)]
    for variant, twin in TWINS.items():
        if rates.keys() >= {variant, twin} and rates[variant] != rates[twin]:
            larger = Pair(*sorted((variant, twin), key=lambda one: -rates[one]))
            rows.append(_row(f"{LABELS[variant]}: the larger rate \N{MINUS SIGN} the smaller", larger, rates, records))
    if not rows:
        return []
    told = (
        "Comparisons of variants whose trials chose different rates, and under each the same where both have one rate; at the end "
        "what the rate alone does. Exploratory, without verdicts: that some variants were trained at a second rate was decided "
        "after runs had been seen, and intervals of two seeds say little:"
    )
    head = ["", "rates", *map(outcome_name, PRIMARY), "seeds"]
    return [Heading(level, "Examined: what of it is the learning rate's"), Paragraph(told), Table(head, rows)]


def _row(label: str, pair: Pair, rates: Mapping[str, float], records: Mapping[str, Record]) -> list[str]:
    found = [compare(records, ADAPT, pair.variant, pair.against, name).spread for name in PRIMARY]
    both = " and ".join(dict.fromkeys(f"{rates[one]:g}" for one in pair))
    cells = [write_interval(spread) if spread.n else "" for spread in found]
    return [label or "the same", both, *cells, str(min(spread.n for spread in found))]
