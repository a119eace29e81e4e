"""Tables of settings as TOML writes them: read from a file, from `a.b=c` on the command line, laid over each other.

Owns the forms a table takes. Does not know which keys there are, nor what they mean.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinkdlm.errors import ConfigError


def read_table(path: Path, whose: str = "") -> dict[str, Any]:
    """The table of a recipe's file; `whose` ends the message where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read recipe: {reason}{whose}") from None
    except tomllib.TOMLDecodeError as failure:
        raise ConfigError(f"{path}: not valid TOML: {failure}") from None


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{a: {b: c}} as {"a.b": c}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def parse_override(text: str) -> tuple[str, Any]:
    """`a.b=c` as (key, value): the value is read as TOML, and as a plain string where it is no TOML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: expected key=value, for example --set train.lr=1e-4")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def nest(key: str, value: Any) -> dict[str, Any]:
    """a.b = c as {a: {b: c}}."""
    first, _, rest = key.partition(".")
    return {first: nest(rest, value)} if rest else {first: value}


def overlay(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides that add up: tables key by key, values replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = overlay(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
