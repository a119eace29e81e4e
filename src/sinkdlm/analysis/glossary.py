"""What each measured quantity is called, what it means, and how it is written down. Knows no file, figure or page."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

UNDEFINED = "n/a"  # not measured, or nothing there to measure
_TRUE_MINUS = str.maketrans("-", "\N{MINUS SIGN}")


class Quantity(NamedTuple):
    label: str
    unit: str  # "share" is written in per cent; every other one as a number
    meaning: str


QUANTITIES = {
    "sink_mass": Quantity(
        "attention on the sink token", "share", "Attention that the model's own sinks receive; mean over steps and heads."
    ),
    "lane_heads": Quantity(
        "heads that use the sink token",
        "share",
        "Share of heads in which the model's own sinks receive more than the threshold; mean over steps.",
    ),
    "content_sinks": Quantity(
        "content sinks of a head",
        "tokens",
        "Tokens of the text that receive more than the threshold (Gu et al.); mean number in a head at a step.",
    ),
    "relative_sinks": Quantity(
        "relative content sinks of a head",
        "tokens",
        "Tokens of the text whose column sum exceeds the mean column sum of the others by the margin (Rulli et al.); mean number.",
    ),
    "sink_heads": Quantity(
        "heads with a content sink", "share", "Share of (step, head) with at least one content sink by the threshold."
    ),
    "turnover": Quantity(
        "turnover of content sinks",
        "share",
        "Jaccard distance between a head's content sinks at one step and the next, where either has one: "
        "0 % if all stay, 100 % if all are new.",
    ),
    "turnover_null": Quantity(
        "turnover in chance order",
        "share",
        "The same over all pairs of different steps: what steps in shuffled order give on average.",
    ),
    "relative_turnover": Quantity("turnover of relative sinks", "share", "Turnover of the content sinks of the relative rule."),
    "relative_turnover_null": Quantity(
        "turnover of relative sinks in chance order", "share", "The same over all pairs of different steps."
    ),
    "moved": Quantity(
        "distance moved", "tokens", "Tokens between a head's top content sink at one step and the next, where both have one."
    ),
    "move_rate": Quantity("top content sink moves", "share", "Share of those pairs of steps in which it is another token."),
    "lifetime": Quantity(
        "lifetime of a content sink",
        "steps",
        "Consecutive steps for which a token stays a content sink of a head; runs that an end of the trajectory cuts off "
        "count as they are.",
    ),
    "anchored": Quantity(
        "anchored heads",
        "share",
        "Share of heads with a content sink in at least half of the steps, whose top sink is one token in at least 90 % of those.",
    ),
    "sink_value_norm": Quantity("value norm of the sink token", "norm", "L2 norm of its value, mean over heads (eq. 15, 16)."),
    "content_sink_norm": Quantity(
        "value norm of content sinks", "norm", "L2 norm of the values of tokens that are content sinks of any head of the layer."
    ),
    "normal_norm": Quantity("value norm of other tokens", "norm", "L2 norm of the values of all other tokens."),
    "norm_ratio": Quantity(
        "content sinks' norm to others'",
        "ratio",
        "Value norm of content sinks over that of other tokens: below 1, sinks weigh less.",
    ),
    "lane_norm_ratio": Quantity("sink token's norm to others'", "ratio", "Value norm of the sink token over that of other tokens."),
    "entropy": Quantity("entropy of attention", "nats", "Of the attention weights of a query, content and sinks together."),
    "bound_ratio": Quantity(
        "output norm to its bound",
        "ratio",
        "What attention writes, |o|, over the most it could write with those weights, the sum of a|v| (eq. 20).",
    ),
    "update_ratio": Quantity("update to residual", "ratio", "|z| / |h|: what attention adds to the residual stream (eq. 21, 22)."),
    "noop": Quantity(
        "update when resting",
        "ratio",
        "Update ratio of the quarter of queries that rest most on sinks, less that of the quarter that rest least: "
        "if negative, resting goes with smaller updates.",
    ),
}


def defined(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def write_number(value: Any, unit: str = "", signed: bool = False) -> str:
    """Three significant digits, or tenths of a per cent; signed: a difference, of shares in percentage points."""
    if not defined(value):
        return UNDEFINED
    return _with_unit(_write(value, _decimals(value, unit), unit, signed), unit, signed)


def write_interval(estimate: Mapping[str, Any], unit: str = "", signed: bool = False) -> str:
    """`12.3 % [11.0, 13.6]`: digits that tell the ends of the interval apart. The value alone where there is none."""
    if not all(defined(estimate.get(part)) for part in ("mean", "low", "high")):
        return write_number(estimate.get("mean"), unit, signed)
    mean, low, high = (float(estimate[part]) for part in ("mean", "low", "high"))
    half = (high - low) / 2
    fine = _decimals(half, unit) - (0 if unit == "share" else 1) if half else 0
    decimals = max(_decimals(max(mean, low, high, key=abs), unit), min(fine, 6))
    value, *ends = (_write(one, decimals, unit, signed) for one in (mean, low, high))
    return f"{_with_unit(value, unit, signed)} [{', '.join(ends)}]"


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


def _with_unit(written: str, unit: str, signed: bool) -> str:
    return f"{written} {'pp' if signed else '%'}" if unit == "share" else written


def write_count(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def unit_of(name: str) -> str:
    return QUANTITIES[name].unit if name in QUANTITIES else ""


def label_of(name: str) -> str:
    return QUANTITIES[name].label if name in QUANTITIES else name.replace("_", " ")
