"""Write blocks of Markdown (headings, paragraphs, lists, tables), also as one page of HTML. Knows no numbers."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence

from markdown_it import MarkdownIt

from sinkdlm.analysis.figures import Plate
from sinkdlm.analysis.report import picture, style

_STYLE = "td { white-space: normal; } td, th { text-align: left; }"  # over that of all reports: cells hold sentences


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def to_markdown(blocks: Iterable[str]) -> str:
    return "\n\n".join(blocks) + "\n"


def to_html(title: str, blocks: Iterable[str], plates: Mapping[str, Plate] = {}, sections: Iterable[str] = ()) -> str:
    """One file, without scripts or outside resources: blocks, figures, and sections, which are folded after the first."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    first, pictures = _render(blocks), "".join(picture(name, plate) for name, plate in plates.items())
    open_, *rest = re.split(r"(?=<h2>)", _render(sections))[1:] or [""]
    folded = (re.sub(r"^(<h2>.*?</h2>)", r"<details><summary>\1</summary>", part) + "</details>\n" for part in rest)
    main = "".join([first, pictures, open_, *folded])
    styles = f"<style>{style()}{_STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}{styles}</head>\n<body>\n<main>\n{main}</main>\n</body></html>\n'


def _render(blocks: Iterable[str]) -> str:
    body = MarkdownIt("js-default").render(to_markdown(blocks))  # HTML in the text is escaped
    box = '<div class="scroll" tabindex="0"><table>'
    return body.replace("<table>", box).replace("</table>", "</table></div>").replace("<th></th>", "<td></td>")
