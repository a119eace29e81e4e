"""Read the measured numbers of README.md, and compute them anew from the records it links.

A statement is a table row, list item or paragraph that links one of LABELS, as in `[record][step]`. All numbers of a statement are
compared, in order. Words with digits in them (`smdm-472m`, `H200`) must stand in the record.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from benchmarks.measuring import RESULTS
from benchmarks.reproduction_page import declared_results
from sinkdlm.reproduce.claims import CLAIMS, FAILS, FEW, HEADS, HOLDS, LAMBADA, NELBO, OPEN, compare, judge, measured, overall
from sinkdlm.reproduce.matrix import ADAPT
from sinkdlm.reproduce.statistics import LEVEL, over_seeds

ROOT = RESULTS.parents[1]
_UNITS = "tokens/s|requests/s|%|ms|s|GB|MB|nats|times|seconds|minutes|hours"
_MEASURED = re.compile(rf"\d[kM]?\s*(?:{_UNITS}|\N{{MULTIPLICATION SIGN}})(?!\w)")


# -- what README says -------------------------------------------------------------------------------------------------------------


def units(text: str) -> Iterator[str]:
    """Rows of tables, items of lists and paragraphs, without code blocks and definitions of links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    text = re.sub(r"^(#.*|\[[\w-]+\]: .*)$", "", text, flags=re.M)
    yield from (unit for unit in re.split(r"\n\s*\n|\n(?=[|-])", text) if unit.strip())


def definitions(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", text, re.M))


def label_of(unit: str) -> str | None:
    found = re.search(r"\]\[([\w-]+)\]", unit)
    return found[1] if found else None


def words_with_digits(unit: str) -> tuple[list[str], list[str]]:
    """Numbers of a statement, and its names that have digits."""
    words = [word.strip("*()[].,;:`") for word in re.sub(r"\]\[.*?\]", "", unit).replace("|", " ").split()]
    words = [word for word in words if re.search(r"\d", word)]
    return ([word for word in words if re.match(r"[+-]?\d", word)], [word for word in words if not re.match(r"[+-]?\d", word)])


# -- what the records say ---------------------------------------------------------------------------------------------------------


def _picture(record: Any) -> list[str]:
    figures = record["figures"]
    shares = [layer["sink_share"] for layer in figures["probe"][-1]["layers"]]
    first = 1 + max(layer for layer, share in enumerate(shares) if share < 0.2)
    shown = [100 * share for share in shares[first:]]
    minutes = sum(figures["lives_seconds"]) / 60
    return [f"{figures['tokens'] / 1e6:.0f}M", f"{minutes:.0f}", str(first), f"{min(shown):.0f}", f"{max(shown):.0f}"]


def _step(record: Any, forms: tuple[str, ...] = ("sink", "vanilla", "official")) -> list[str]:
    settings = record["settings"]
    rates = [record["figures"]["forms"][form]["tokens_per_second"] for form in forms]
    return [str(settings["rows"]), str(settings["length"]), *(f"{rate / 1000:.0f}k" for rate in rates)]


def _cost(record: Any) -> list[str]:
    return _step(record, ("sink", "vanilla"))


def _sampling(record: Any) -> list[str]:
    settings, rows = record["settings"], max(record["settings"]["batch"])
    figures = record["figures"][f"batch {rows}"]
    temperature = "0.1"
    rates = [figures[f"{who}_temperature_{temperature}"]["tokens_per_second"]["p50"] for who in ("ours", "official")]
    return [str(settings["length"]), str(settings["steps"]), str(rows), temperature, *(f"{rate:,.0f}" for rate in rates)]


def _likelihood(record: Any) -> list[str]:
    figures = record["figures"]
    rates = [f"{figures[form]['requests_per_second']:.1f}" for form in ("ours", "plain")]
    return [str(figures["requests"]), str(record["settings"]["draws"]), *rates]


def _exact(test: str) -> list[str]:
    return _found(r"def test_whole_model_equals_masked_reference.*?\*expected, (1e-\d+)\)", test)


def _resume(test: str) -> list[str]:
    return _found(r"def test_fifty_kills_change_nothing.*?kills\.run\((\d+)", test)


def _found(pattern: str, text: str) -> list[str]:
    found = re.search(pattern, text, re.S)
    assert found, f"the test that README names is not as it was: {pattern}"
    return [found[1]]


def _claims(page: str) -> list[str]:
    """The row's count of verdicts, then the paragraph on adapted twins. Computed from the runs' own records, not from the page."""
    results = declared_results(RESULTS / "reproduction")
    verdicts = [overall(judge(claim, results)) for claim in CLAIMS]
    counts = [len(verdicts), *(verdicts.count(verdict) for verdict in (HOLDS, FAILS, OPEN, FEW))]

    def mean(variant: str, name: str) -> float:
        return over_seeds(measured(results, ADAPT, variant, name)).mean

    change = compare(results, ADAPT, "sink", "vanilla", NELBO).spread
    lambada = [f"{mean(variant, LAMBADA):.2f}" for variant in ("vanilla", "sink")]
    heads = [f"{100 * mean(variant, HEADS):.0f}" for variant in ("vanilla", "sink")]
    at_its_rate, at_theirs = (
        [compare(results, ADAPT, *twins, name).spread for name in (LAMBADA, NELBO)]
        for twins in (("sink", "vanilla-sink-rate"), ("sink-dlm-rate", "vanilla"))
    )
    equal = [
        f"{spread.mean:+.{digits}f}" for spreads in (at_its_rate, at_theirs) for spread, digits in zip(spreads, (2, 4), strict=True)
    ]
    equal.insert(2, str(at_theirs[0].n))
    spread = [f"{value:+.4f}" for value in (change.mean, change.low, change.high)]
    return [*map(str, counts), f"{100 * LEVEL:.0f}", *spread, str(change.n), *lambada, *equal, *heads]


# Label -> the record, and the numbers that README takes from it, in the order in which it says them.
LABELS: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
    "picture": ("benchmarks/results/train-smollm2-135m-sink-nvidia-h200.json", _picture),
    "exact": ("tests/model/test_model.py", _exact),
    "step": ("benchmarks/results/train_step-smdm-472m-2048-nvidia-h200.json", _step),
    "sampling": ("benchmarks/results/sampling-nvidia-h200.json", _sampling),
    "resume": ("tests/training/test_training.py", _resume),
    "claims": ("docs/reproduction.md", _claims),
    "likelihood": ("benchmarks/results/likelihood-nvidia-h200.json", _likelihood),
    "cost": ("benchmarks/results/train_step-smollm2-135m-512-nvidia-h200.json", _cost),
}


@cache
def expected(label: str) -> tuple[list[str], str]:
    """A record's numbers, and its text in lower case."""
    path, numbers = LABELS[label]
    text = (ROOT / path).read_text(encoding="utf-8")
    return numbers(json.loads(text) if path.endswith(".json") else text), f"{path} {text}".lower()


# -- the two, compared ------------------------------------------------------------------------------------------------------------


def faults(text: str) -> list[str]:
    """What README says and its records do not."""
    said: dict[str, list[str]] = {}
    found = []
    results = text.partition("\n## Results\n")[2].partition("\n## ")[0]
    for unit in units(text):
        label = label_of(unit)
        if label not in LABELS:
            outside = unit in results and re.search(r"\d", unit)
            found += [f"a number without a record: {unit}"] if outside or _MEASURED.search(unit) else []
            continue
        numbers, names = words_with_digits(unit)
        said.setdefault(label, []).extend(numbers)
        found += [f"{label}: {name} does not stand in its record" for name in names if name.lower() not in expected(label)[1]]
    found += [
        f"{label}: {said.get(label)}, its record {expected(label)[0]}" for label in LABELS if said.get(label) != expected(label)[0]
    ]
    linked = {label: path for label, path in definitions(text).items() if label in LABELS}
    return found + [f"[{label}] is not {path}" for label, (path, _) in LABELS.items() if linked.get(label) != path]
