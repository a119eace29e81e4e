"""A report as blocks (headings, paragraphs, lists, tables), written as markdown or as a page of its own. Knows no numbers."""

import html
from collections.abc import Sequence
from typing import NamedTuple


class Heading(NamedTuple):
    level: int
    text: str


class Paragraph(NamedTuple):
    text: str


class Bullets(NamedTuple):
    lines: Sequence[str]


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Picture(NamedTuple):
    path: str
    text: str


class Code(NamedTuple):
    text: str


Block = Heading | Paragraph | Bullets | Table | Picture | Code
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.25rem .75rem;text-align:left;"
    "border-bottom:1px solid #8886}.wide{overflow-x:auto}code,pre{font-size:.9em}pre{overflow-x:auto}"
)


def to_markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Paragraph(text):
            return text
        case Bullets(points):
            return "\n".join(f"- {point}" for point in points)
        case Code(text):
            return f"```sh\n{text}\n```"
        case Picture(path, text):
            return f"![{text}]({path})"
        case Table(head, rows):
            lines: list[Sequence[str]] = [head, ["---"] * len(head), *rows]
            return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One file, without scripts and without anything from elsewhere."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    body = "\n".join(map(_html, blocks))
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{_inline(text)}</p>"
        case Bullets(lines):
            return "<ul>" + "".join(f"<li>{_inline(line)}</li>" for line in lines) + "</ul>"
        case Code(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Picture(path, text):
            return f'<img src="{html.escape(path)}" alt="{html.escape(text)}">'
        case Table(head, rows):
            cells = "".join(f"<th>{_inline(cell)}</th>" for cell in head)
            body = "".join("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows)
            return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _inline(text: str) -> str:
    """Markdown's code and bold, which is all that sentences here use."""
    parts = html.escape(text, quote=False).split("`")
    for place in range(1, len(parts), 2):
        parts[place] = f"<code>{parts[place]}</code>"
    for mark in range(0, len(parts), 2):
        pieces = parts[mark].split("**")
        parts[mark] = "".join(f"<strong>{piece}</strong>" if place % 2 else piece for place, piece in enumerate(pieces))
    return "".join(parts)
