"""Names and meanings of the measured quantities, and how their numbers are written. Knows no file, figure or page."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

UNDEFINED = "n/a"  # not measured, or nothing there to measure
_TRUE_MINUS = str.maketrans("-", "\N{MINUS SIGN}")


class Quantity(NamedTuple):
    label: str
    unit: str  # "share" is written in per cent; every other one as a number
    meaning: str


# "Content sink" without "relative": by the absolute rule.
_QUANTITIES = {
    "sink_mass": ("attention on the sink token", "share", "Share that the model's own sinks receive; mean over steps and heads."),
    "lane_heads": ("heads that use the sink token", "share", "Heads and steps whose own sinks receive more than the threshold."),
    "content_sinks": ("content sinks of a head", "tokens", "Tokens of the text that receive more than the threshold (Gu et al.)."),
    "relative_sinks": (
        "relative content sinks of a head",
        "tokens",
        "Tokens of the text whose column sum exceeds the other tokens' mean by more than the margin (Rulli et al.).",
    ),
    "sink_heads": ("heads with a content sink", "share", "Heads and steps with at least one content sink."),
    "turnover": (
        "turnover of content sinks",
        "share",
        "Jaccard distance between a head's sets of content sinks at consecutive steps; 0 % if all stay.",
    ),
    "turnover_null": ("turnover in random order", "share", "Turnover over all pairs of different steps."),
    "relative_turnover": ("turnover of relative sinks", "share", "Turnover of relative content sinks."),
    "relative_turnover_null": ("turnover of relative sinks in random order", "share", "Their turnover over all pairs of steps."),
    "moved": ("distance moved", "tokens", "Between a head's top content sinks at consecutive steps that both have one."),
    "move_rate": ("top content sink moves", "share", "Share of those pairs of steps in which it is another token."),
    "lifetime": ("lifetime of a content sink", "steps", "Consecutive steps for which a token stays a content sink of a head."),
    "anchored": ("anchored heads", "share", "Heads with content sinks in half of the steps, and the same top one in 90 % of them."),
    "sink_value_norm": ("value norm of the sink token", "norm", "L2 norm of its value, mean over heads (eq. 15, 16)."),
    "content_sink_norm": ("value norm of content sinks", "norm", "Mean over tokens that are content sinks of a head of the layer."),
    "normal_norm": ("value norm of other tokens", "norm", "Mean over all other tokens of the text."),
    "norm_ratio": ("norm ratio of content sinks", "ratio", "Value norm of content sinks divided by that of other tokens."),
    "lane_norm_ratio": ("norm ratio of the sink token", "ratio", "Value norm of the sink token divided by that of other tokens."),
    "entropy": ("entropy of attention", "nats", "Entropy of a query's attention weights, over tokens and sinks."),
    "bound_ratio": ("output norm / bound", "ratio", "Norm |o| of a head's output divided by its bound, the sum of a|v| (eq. 20)."),
    "update_ratio": ("update norm / residual norm", "ratio", "|z| / |h|, for attention's update z of the residual h (eq. 21, 22)."),
    "noop": ("change of update on sinks", "ratio", "|z| / |h| of the quarter of queries most on sinks, minus the quarter least."),
}
QUANTITIES = {name: Quantity(*row) for name, row in _QUANTITIES.items()}


def defined(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def write_number(value: Any, unit: str = "", signed: bool = False) -> str:
    """Three significant digits, or tenths of a per cent. signed: a difference; shares are in percentage points."""
    return write_interval({"mean": value}, unit, signed)


def write_interval(estimate: Mapping[str, Any], unit: str = "", signed: bool = False) -> str:
    """`12.3 % [11.0, 13.6]`, with digits that tell the interval's ends apart; the value alone without an interval."""
    found: list[Any] = [estimate.get(part) for part in ("mean", "low", "high")]
    if not defined(found[0]):
        return UNDEFINED
    known = [float(value) for value in found] if all(map(defined, found)) else [float(found[0])]
    decimals = _decimals(max(known, key=abs), unit)
    if len(known) == 3 and known[1] != known[2]:
        decimals = max(decimals, min(_decimals((known[2] - known[1]) / 2, unit) - (unit != "share"), 6))
    value, *ends = (_write(one, decimals, unit, signed) for one in known)
    if unit == "share":
        value += " pp" if signed else " %"
    return f"{value} [{', '.join(ends)}]" if ends else value


def _decimals(value: float, unit: str) -> int:
    if unit == "share" or not value:
        return 1 if unit == "share" else 2
    return max(0, 2 - math.floor(math.log10(abs(value))))


def _write(value: float, decimals: int, unit: str, signed: bool) -> str:
    value = 100 * value if unit == "share" else value
    sign = "+" if signed else ""
    if decimals > 6 or abs(value) >= 1e6:
        mantissa, _, exponent = f"{value:{sign}.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}".translate(_TRUE_MINUS)
    written = f"{value:{sign},.{decimals}f}"
    return (written.lstrip("+-") if not written.strip("+-0.,") else written).translate(_TRUE_MINUS)


def write_value(value: Any) -> str:
    """Write a setting, or a list or table of settings."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {write_value(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(write_value, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def quoted(capture: Mapping[str, Any]) -> str:
    """A model's name in quotes: a model may be called sink, and is no sink token."""
    return f'"{capture["name"]}"'


def write_count(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"
