"""Write blocks of Markdown (headings, paragraphs, lists, tables), also as one page of HTML. Knows no numbers."""

import html
import re
from collections.abc import Iterable, Sequence

from markdown_it import MarkdownIt

from sinkdlm.analysis.report import style

_STYLE = "td { white-space: normal; } td, th { text-align: left; }"  # over that of all reports: cells hold sentences


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def to_markdown(blocks: Iterable[str]) -> str:
    return "\n\n".join(blocks) + "\n"


def to_html(title: str, blocks: Iterable[str]) -> str:
    """One file, without scripts or outside resources. Sections after the first are folded."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    body = MarkdownIt("js-default").render(to_markdown(blocks))  # HTML in the text is escaped
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    first, *rest = re.split(r"(?=<h2>)", body)
    folded = (re.sub(r"^(<h2>.*?</h2>)", r"<details><summary>\1</summary>", part) + "</details>\n" for part in rest[1:])
    main = "".join([first, *rest[:1], *folded])
    styles = f"<style>{style()}{_STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}{styles}</head>\n<body>\n<main>\n{main}</main>\n</body></html>\n'
