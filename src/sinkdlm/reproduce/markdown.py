"""A report as blocks of markdown (headings, paragraphs, lists, tables), and the same blocks as a page of HTML. Knows no numbers."""

import html
import re
from collections.abc import Iterable, Sequence

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.25rem .75rem;text-align:left;"
    "border-bottom:1px solid #8886}.wide{overflow-x:auto}code{font-size:.9em}"
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
    body = "\n".join(map(_html, blocks))
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'


def _html(block: str) -> str:
    if block.startswith("#"):
        marks, text = block.split(" ", 1)
        return f"<h{len(marks)}>{_inline(text)}</h{len(marks)}>"
    if block.startswith("- "):
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in block.splitlines()) + "</ul>"
    if not block.startswith("| "):
        return f"<p>{_inline(block)}</p>"
    head, _, *rows = (_inline(line[2:-2]).replace("\\|", "&#124;").split(" | ") for line in block.splitlines())
    body = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr><th>{"</th><th>".join(head)}</th></tr></thead><tbody>{body}</tbody></table></div>'


def _inline(text: str) -> str:
    """Markdown's code and bold, which is all that sentences here use."""
    text = re.sub(r"`(.*?)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"\*\*(.*?)\*\*", r"<strong>\1</strong>", text)
