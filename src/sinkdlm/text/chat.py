"""Chat messages: what templates can write of them."""

from collections.abc import Mapping
from typing import Any


def missing_text(message: Mapping[str, Any]) -> str | None:
    """What stands where text is expected; None where there is text, or tools, of which templates know more than we do.

    Most templates write whatever content is: null as None, a list with its brackets."""
    content = message.get("content")
    if isinstance(content, str) or message.get("tool_calls") or message["role"] == "tool":
        return None
    return "missing" if "content" not in message else "null" if content is None else f"a {type(content).__name__}"
