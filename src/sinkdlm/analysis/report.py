"""Write the report of captures: report.html (self-contained), figures, metrics.json, summary.md.

Lays out what findings and figures give. Measures nothing.
"""

import html
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from sinkdlm.analysis import figures
from sinkdlm.analysis.findings import OF_SINKS, Capture, Claim, Comparison, claims, compare, findings, headline, lead, tell, total
from sinkdlm.analysis.glossary import QUANTITIES, defined, quoted, write_count, write_interval, write_number, write_value
from sinkdlm.analysis.intervals import MIN_TRAJECTORIES
from sinkdlm.analysis.recording import join_sides
from sinkdlm.errors import AnalysisError
from sinkdlm.page.bundle import build_viewer

REPORT_FORMAT, REPORT_VERSION = "sinkdlm-report", 1
_KEPT = ("name", "source", "model", "made", "settings", "n", "quantities", "kinds", "heads", "interventions", "omitted")
_GLOSSARY = {
    **{one.label: one.meaning for one in QUANTITIES.values()},
    "pp": "Percentage points: the difference of two shares.",
    "95 % interval": "Bootstrap over trajectories: percentiles of resampled means, with tails widened to those of Student's t. "
    f"There is none with fewer than {MIN_TRAJECTORIES} trajectories.",
}
_N_TEXTS = 3  # of each capture
_N_FIRST = 2  # figures before everything else
_INSPECT = "inspect.html"


class Grid(NamedTuple):
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Chapter(NamedTuple):
    """What a report tells beside its captures: its headline, a section of notes and a table, and their values in metrics.json.

    claims: said after the sentence that counts claims. shown: captures of other models with the note that tells them apart, which
    the report shows first; they hold only what figure 3 draws."""

    key: str
    headline: str
    title: str
    notes: Sequence[str]
    grid: Grid
    values: Mapping[str, Any]
    claims: str
    shown: Mapping[str, Any]


class Judged(NamedTuple):
    """Claims about one capture, alone or compared."""

    name: str
    note: str
    claims: list[Claim]
    cautions: list[str]


class Report:
    """Compare and judge captures of different names; write the files and texts about them."""

    def __init__(self, captures: Sequence[Capture], chapter: Chapter | None = None) -> None:
        self.captures, self.chapter, self.comparisons = captures, chapter, compare(captures)
        pairs = [one for one in self.comparisons if one.second["model"]["n_sinks"] and not one.first["model"]["n_sinks"]]
        told = {one.second["name"]: claims(one.second, one) for one in pairs}
        self.title = chapter.headline if chapter else headline(captures, told)
        self.judged = [Judged(_versus(one, "against"), "", told[one.second["name"]], one.cautions) for one in pairs]
        note = "To judge whether content sinks become fewer and move less, analyse models with and without a sink token together."
        self.judged = self.judged or [Judged(quoted(capture), note, claims(capture), []) for capture in captures]
        self.lead = lead(captures, [one.claims for one in self.judged])
        if chapter:
            self.lead[-1] += f" {chapter.claims}"
        self.lede = _lede(captures)

    def write(self, out: Path) -> dict[str, Any]:
        """Write all files and return their paths: "report", "metrics", "summary", "figures" (name -> suffix -> file), and where
        captures hold recordings "recording" and "inspect", the page that shows it."""
        figures.check_drawing()
        try:
            out.mkdir(parents=True, exist_ok=True)  # fail before drawing, which takes seconds
            drawn = self._draw_shown() | figures.draw_all(self.captures, self.comparisons)
            texts = {"report.html": self.page(drawn), "metrics.json": to_json(self.metrics()), "summary.md": self.summary()}
            if recording := self.recording():
                texts |= {"recording.json": json.dumps(recording, separators=(",", ":")) + "\n", _INSPECT: build_viewer(recording)}
            paths: dict[str, Any] = {"figures": figures.write_files(drawn, out / "figures")}
            for name, text in texts.items():
                paths[Path(name).stem] = out / name
                paths[Path(name).stem].write_text(text, encoding="utf-8")
        except OSError as failure:
            raise AnalysisError(f"{out}: cannot be written: {failure.strerror}; choose another folder with --out") from None
        return paths

    def recording(self) -> dict[str, Any] | None:
        """First trajectories side by side, under the captures' present names, which --names may have changed."""
        found = [(capture["name"], capture["recording"]) for capture in self.captures if capture.get("recording")]
        return join_sides([{**one["side"], "model": name} for name, one in found], found[0][1]["asked"]) if found else None

    def metrics(self) -> dict[str, Any]:
        """The content of metrics.json; needs no drawing packages."""
        return {
            "format": REPORT_FORMAT,
            "version": REPORT_VERSION,
            **({self.chapter.key: self.chapter.values} if self.chapter else {}),
            "captures": [{part: capture[part] for part in _KEPT} for capture in self.captures],
            "differences": [
                {"first": one.first["name"], "second": one.second["name"], "cautions": one.cautions, **one.difference}
                for one in self.comparisons
            ],
            "claims": [{"about": one.name, "claims": [claim._asdict() for claim in one.claims]} for one in self.judged],
        }

    def _draw_shown(self) -> dict[str, figures.Plate]:
        if self.chapter is None:
            return {}
        shown = self.chapter.shown
        return {"shown": figures.figure3(shown["captures"])._replace(caption=shown["caption"])}

    def page(self, drawn: Mapping[str, figures.Plate]) -> str:
        names = list(drawn)
        return render(
            "report",
            report=self,
            inspect=_INSPECT if self.recording() else None,
            plates=drawn,
            first=names[:_N_FIRST],
            more=names[_N_FIRST:],
            tables=self._grids(),
            quoted=quoted,
            glossary=_GLOSSARY,
            findings=findings,
            texts=_texts,
            facts=_facts,
        )

    def short(self) -> str:
        """A short text for a terminal: verdicts and findings. Evidence, interventions and tables are in the files."""
        lines = [self.title, " ".join(self.lead[:2]), self.lede]
        for one in self.judged:
            lines += ["", f"The paper's claims: {one.name}", *(f"  {claim.verdict:15s}{claim.claim}" for claim in one.claims)]
            lines += [f"  caution: {caution}" for caution in one.cautions]
        for capture in self.captures:
            told = findings(capture, interventions=False)
            lines += ["", f"Findings in {quoted(capture)}", *(f"  {found.topic}: {found.text}" for found in told)]
        return "\n".join([*lines, ""])

    def summary(self) -> str:
        """The report as markdown, without figures and texts."""
        lines = [f"# {_mark(self.title)}", "", *map(_mark, self.lead), "", _mark(self.lede), ""]
        if self.chapter:
            lines += _section(self.chapter.shown["title"], (f"- {_mark(note)}" for note in self.chapter.shown["notes"]))
            lines += _section(self.chapter.title, (f"- {_mark(note)}" for note in self.chapter.notes))
            lines += [*_table(self.chapter.grid), ""]
        for one in self.judged:
            told = [f"Caution: {_mark(caution)}." for caution in one.cautions]
            told += [f"- **{claim.verdict}**: {claim.claim}. {_mark(claim.evidence)}" for claim in one.claims]
            lines += _section(f"The paper's claims: {one.name}", [*told, *(["", one.note] if one.note else [])])
        for capture in self.captures:
            lines += _section(f"Findings in {quoted(capture)}", _items(findings(capture)))
        for grid in self._grids():
            lines += _section(grid.title, _table(grid))
        for capture in self.captures:
            lines += _section(f"Provenance of {quoted(capture)}", _items(_facts(capture)))
        return "\n".join(lines)

    def _grids(self) -> list[Grid]:
        """Tables of all quantities, and of each model's interventions."""
        rows = []
        for name, quantity in QUANTITIES.items():
            having = [one["model"]["n_sinks"] or name not in OF_SINKS for one in self.captures]
            totals = [total(one, name) if has else None for one, has in zip(self.captures, having, strict=True)]
            if any(one and defined(one["mean"]) for one in totals):
                cells = [tell(one, name) if one else "none" for one in totals]
                gaps = (one.difference["quantities"].get(name, {}).get("total", {}) for one in self.comparisons)
                rows.append([quantity.label, *cells, *(tell(gap, name, signed=True) for gap in gaps)])
        head = ["quantity", *map(quoted, self.captures)]
        head += [_versus(one, "\N{MINUS SIGN}") for one in self.comparisons]
        pairing = ", paired by trajectory" if all(one.difference["paired"] for one in self.comparisons) else ", not paired"
        title = f"All quantities, mean over layers, with 95 % intervals{pairing if self.comparisons else ''}"
        return [Grid(title, head, rows), *(_intervention_grid(one) for one in self.captures if one["interventions"])]


def _versus(comparison: Comparison, word: str) -> str:
    return f"{quoted(comparison.second)} {word} {quoted(comparison.first)}"


def style() -> str:
    """The style sheet of all reports."""
    return resources.files("sinkdlm.analysis").joinpath("report.css").read_text(encoding="utf-8")


def render(template: str, *, plates: Mapping[str, figures.Plate], **values: Any) -> str:
    """A page from a template of this folder, which gets its figures as HTML."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = resources.files("sinkdlm.analysis").joinpath(f"{template}.html.jinja").read_text(encoding="utf-8")
    pictures = {name: Markup(picture(name, plate)) for name, plate in plates.items()}
    return environment.from_string(text).render(style=Markup(style()), pictures=pictures, **values)


def _lede(captures: Sequence[Capture]) -> str:
    parts = []
    for capture in captures:
        n, settings = capture["n"], capture["settings"]
        kind = ("trajectory", "trajectories") if settings["inputs"] == "trajectories" else ("text under noise", "texts under noise")
        counts = [write_count(n["trajectories"], *kind), write_count(n["forwards"], "forward")]
        parts.append(f"{quoted(capture)}: {', '.join(counts)}, {write_count(n['tokens_seen'], 'token')} seen")
    threshold = f"{captures[0]['settings']['threshold']:g}"
    return f"{'; '.join(parts)}. A content sink is a token of the text that receives more than {threshold} of a head's attention."


def picture(name: str, plate: figures.Plate) -> str:
    """HTML of a figure: an SVG without XML head, sized by the page, with ids that no other figure of the page has."""
    caption = html.escape(plate.caption)
    if plate.figure is None:
        return f'<p class="absent">Not drawn. {caption}</p>\n'
    head, rest = plate.svg[plate.svg.index("<svg") :].split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    rest = re.sub(r'id="image[^"]*"', "", rest)  # nothing refers to them, and equal colour bars share one
    prefix = re.sub(r"[^\w.-]", "_", name)
    rest = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}-", rest)
    box = f'<div class="drawn" tabindex="0"><div style="--natural: {plate.figure.get_figwidth()}in">'
    svg = f'{head} role="img" aria-label="{caption}">{rest}'
    return f'<figure id="{html.escape(name)}">\n{box}{svg}</div></div>\n<figcaption>{caption}</figcaption>\n</figure>\n'


def _intervention_grid(capture: Capture) -> Grid:
    rows = []
    for one in capture["interventions"]:
        nelbo = one["nelbo"]
        cells = [write_number(nelbo["before"]), write_number(nelbo["after"])]
        cells += [write_interval({**nelbo, "mean": nelbo["change"]}, signed=True), write_interval(one["kl"])]
        rows.append([one["label"], *cells, write_interval(one["changed"], "share")])
    texts = f"{nelbo['n']} texts of {one['text_tokens']:.0f} tokens on average"
    title = f"{quoted(capture)}: interventions (NELBO and KL in nats per token; {texts})"
    return Grid(title, ["intervention", "NELBO before", "after", "change", "KL", "generated tokens that differ"], rows)


def _texts(capture: Capture) -> list[tuple[str, str]]:
    """Prompts and texts of the first trajectories; "none" without a tokenizer."""
    found = []
    for row in capture["trajectories"][:_N_TEXTS]:
        given = capture["settings"]["inputs"] == "noise"
        about = f"Text {row['number']}, given" if given else f"Prompt of trajectory {row['number']}: {row.get('prompt') or 'none'}"
        found.append((about, row.get("text") or "none"))
    return found


def _facts(capture: Capture) -> list[tuple[str, str]]:
    made = {key: value for key, value in capture["made"].items() if value is not None}
    if isinstance(made.get("command"), list):
        made["command"] = shlex.join(made["command"])
    counts = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in capture["n"].items())
    facts = {"checkpoint": capture["source"], **made, **capture["settings"], "n": counts, "model": capture["model"]}
    return [(key, write_value(value)) for key, value in facts.items()]


def to_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _section(title: str, lines: Iterable[str]) -> list[str]:
    return [f"## {_mark(title)}", "", *lines, ""]


def _items(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"- {_mark(key)}: {_mark(value)}" for key, value in pairs]


def _table(grid: Grid) -> list[str]:
    head, *rows = ([_mark(cell) for cell in cells] for cells in (grid.head, *grid.rows))
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _mark(text: str) -> str:
    """Escape text for markdown, on one line."""
    return re.sub(r"([\\`*_|<>#$~])", r"\\\1", " ".join(text.split()))
