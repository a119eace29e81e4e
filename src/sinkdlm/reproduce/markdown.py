"""A report as blocks of markdown (headings, paragraphs, lists, tables), and the same blocks as a page of HTML. Knows no numbers."""

import html
from collections.abc import Iterable, Sequence

from markdown_it import MarkdownIt

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{display:block;overflow-x:auto;border-collapse:collapse;font-variant-numeric:tabular-nums}code{font-size:.9em}"
    "td,th{padding:.25rem .75rem;text-align:left;border-bottom:1px solid #8886}"
)


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def to_markdown(blocks: Iterable[str]) -> str:
    return "\n\n".join(blocks) + "\n"


def to_html(title: str, blocks: Iterable[str]) -> str:
    """One file, without scripts and without anything from elsewhere."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    body = MarkdownIt("js-default").render(to_markdown(blocks))  # HTML in the text is shown, not taken
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}</body></html>\n'
