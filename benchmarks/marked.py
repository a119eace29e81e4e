"""Pages that people write, with parts that scripts write. A part stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

import re
from collections.abc import Mapping

_PART = re.compile(r"<!-- ([\w.-]+): begin -->.*?<!-- \1: end -->", re.S)


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Put each part between its markers. The page must have exactly these parts."""
    found = _PART.findall(text)
    if sorted(found) != sorted(parts):
        raise ValueError(f"the page has markers for {sorted(found)}; the script writes {sorted(parts)}")
    return _PART.sub(lambda part: f"<!-- {part[1]}: begin -->\n\n{parts[part[1]]}\n\n<!-- {part[1]}: end -->", text)


def prose(text: str) -> str:
    """What people wrote: the page without its parts."""
    return _PART.sub("", text)
