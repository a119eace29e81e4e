"""The form of a result, as `measuring.write` writes it."""

from collections.abc import Iterator
from typing import Any

_KEYS = {"benchmark", "command", "commit", "date", "hardware", "versions", "settings", "figures"}
# Peaks; one long run of each form; losses; what commands print; counts.
_UNTIMED = ("memory", "likelihood", "curves", "tutorial", "structured")


def check_result(entry: dict[str, Any]) -> None:
    assert set(entry) == _KEYS
    assert entry["command"].startswith("python -m benchmarks.")
    assert {"python", "torch"} <= set(entry["versions"])
    timed = [value for value in _walk(entry["figures"]) if isinstance(value, dict) and "p50" in value]
    assert timed or entry["benchmark"] in _UNTIMED or entry["settings"].get("agreement_only")
    for value in timed:
        assert 0 < value["p20"] <= value["p50"] <= value["p80"]


def _walk(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict):
        for inner in value.values():
            yield from _walk(inner)
