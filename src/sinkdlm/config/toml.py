"""TOML tables of settings: read files and `a.b=c` overrides, merge them, and word errors.

Does not know which keys there are, nor what they mean.
"""

import difflib
import json
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinkdlm.errors import ConfigError, check_regular

_shown = reprlib.Repr()  # of any value, in a line, however long or deep it is
_shown.maxstring = _shown.maxother = _shown.maxlong = 200
_shown.maxlist = _shown.maxtuple = _shown.maxdict = 20
show = _shown.repr


def read_table(path: Path) -> dict[str, Any]:
    """Read a recipe's file."""
    check_regular(path, ConfigError)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read recipe: {reason}") from None
    except (ValueError, RecursionError) as failure:  # Python refuses a whole number of more than 4300 digits by itself
        raise ConfigError(f"{path}: not valid TOML: {failure}") from None


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn {a: {b: c}} into {"a.b": c}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def parse_override(text: str) -> tuple[str, Any]:
    """Split `a.b=c` into key and value. The value is TOML, or a plain string where it is not valid TOML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: expected key=value; {f'give {key} a value' if key.strip() else 'name the key'}")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return key.strip(), value.strip()


def nest(key: str, value: Any) -> dict[str, Any]:
    """Turn a.b = c into {a: {b: c}}."""
    first, _, rest = key.partition(".")
    return {first: nest(rest, value)} if rest else {first: value}


def overlay(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge overrides: tables key by key, other values replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = overlay(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def suggest(word: Any, allowed: Sequence[str]) -> str:
    """Return the end of an error message: the closest allowed word, and all of them."""
    close = difflib.get_close_matches(str(word), allowed, n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"allowed: {', '.join(allowed)}"


def describe_mistake(error: Any) -> str:
    """Word one pydantic error as `key = value: what is allowed`, in TOML's terms."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{key}: missing; it has no default"
    reason = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    if error["type"] == "tuple_type":
        reason = f"allowed is a list, as in [{json.dumps(error['input'], default=str)}]"  # JSON and TOML write plain values alike
    elif error["type"] == "dict_type":
        names = error["input"] if isinstance(error["input"], list) else [error["input"]]
        reason = f"allowed is a table, as in {{{', '.join(f'{json.dumps(str(name))} = 1' for name in names)}}}"
    for words, ours in (("Input should be", "allowed is"), ("Tuple should have", "allowed is a list of"), ("Value error, ", "")):
        reason = reason.replace(words, ours)
    return f"{key} = {show(error['input'])}: {reason}" if key else reason
