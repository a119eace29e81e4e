"""The report of one or more captures: report.html, figures, metrics.json, summary.md. One page that needs nothing beside itself.

Lays out what findings and figures give. Measures nothing.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from sinkdlm.analysis import figures
from sinkdlm.analysis.findings import OF_SINKS, Capture, Claim, Comparison, claims, compare, findings, headline, tell, total
from sinkdlm.analysis.glossary import QUANTITIES, defined, write_count, write_interval, write_number, write_value
from sinkdlm.analysis.intervals import MIN_TRAJECTORIES
from sinkdlm.analysis.recording import join_sides
from sinkdlm.errors import AnalysisError
from sinkdlm.page.bundle import build_viewer

REPORT_FORMAT, REPORT_VERSION = "sinkdlm-report", 1
_KEPT = ("name", "source", "model", "made", "settings", "n", "quantities", "kinds", "heads", "interventions", "omitted")
_GLOSSARY = {
    **{one.label: one.meaning for one in QUANTITIES.values()},
    "pp": "Percentage points: the difference of two shares.",
    "95 % interval": "Bootstrap over trajectories: percentiles of resampled means, their tails widened to those of Student's t. "
    f"With fewer than {MIN_TRAJECTORIES} trajectories there is none.",
}
_N_TEXTS = 3  # of each capture
_INSPECT = "inspect.html"


class Grid(NamedTuple):
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Chapter(NamedTuple):
    """What is known of the models beside captures: a table of the page, and its values in metrics.json."""

    key: str
    title: str
    notes: Sequence[str]
    grid: Grid
    values: Mapping[str, Any]


class Judged(NamedTuple):
    """Claims about one capture, alone or compared."""

    name: str
    note: str
    claims: list[Claim]
    cautions: list[str]


class Report:
    """Captures of different names, compared and judged, and the files and texts made of them."""

    def __init__(self, captures: Sequence[Capture], chapter: Chapter | None = None) -> None:
        self.captures, self.chapter, self.comparisons = captures, chapter, compare(captures)
        pairs = [one for one in self.comparisons if one.second["model"]["n_sinks"] and not one.first["model"]["n_sinks"]]
        told = {one.second["name"]: claims(one.second, one) for one in pairs}
        self.title = headline(captures, told)
        self.judged = [Judged(_versus(one, "against"), "", told[one.second["name"]], one.cautions) for one in pairs]
        note = "Whether content sinks become fewer and move less needs checkpoints with and without a sink token, side by side."
        self.judged = self.judged or [Judged(capture["name"], note, claims(capture), []) for capture in captures]
        self.lede = _lede(captures)

    def write(self, out: Path) -> dict[str, Any]:
        """What was written: "report", "metrics", "summary", "figures" (name -> suffix -> file), and where captures hold recordings
        "recording" and "inspect", the page that shows it."""
        figures.check_drawing()
        try:
            out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be had is told before anything is drawn
            drawn = figures.draw_all(self.captures, self.comparisons)
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
        """First trajectories side by side. A capture may bear another name by now than when it was made."""
        found = [(capture["name"], capture["recording"]) for capture in self.captures if capture.get("recording")]
        return join_sides([{**one["side"], "model": name} for name, one in found], found[0][1]["asked"]) if found else None

    def metrics(self) -> dict[str, Any]:
        """What metrics.json holds; needs nothing that draws."""
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

    def page(self, drawn: Mapping[str, figures.Plate]) -> str:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

        own = resources.files("sinkdlm.analysis")
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(own.joinpath("report.html.jinja").read_text(encoding="utf-8")).render(
            report=self,
            inspect=_INSPECT if self.recording() else None,
            style=Markup(own.joinpath("report.css").read_text(encoding="utf-8")),
            plates=[(name, plate, Markup(_inline(name, plate))) for name, plate in drawn.items()],
            tables=self._grids(),
            glossary=_GLOSSARY,
            findings=findings,
            texts=_texts,
            facts=_facts,
        )

    def short(self) -> str:
        """For a terminal: claims with their verdicts, and what was found. Evidence, interventions and tables are in the files."""
        lines = [self.title, self.lede]
        for one in self.judged:
            lines += ["", f"The paper's claims: {one.name}", *(f"  {claim.verdict:15s}{claim.claim}" for claim in one.claims)]
            lines += [f"  caution: {caution}" for caution in one.cautions]
        for capture in self.captures:
            told = findings(capture, interventions=False)
            lines += ["", f"Found in {capture['name']}", *(f"  {found.topic}: {found.text}" for found in told)]
        return "\n".join([*lines, ""])

    def summary(self) -> str:
        """The report as markdown, without figures and texts."""
        lines = [f"# {_mark(self.title)}", "", _mark(self.lede), ""]
        if self.chapter:
            lines += _section(self.chapter.title, (f"- {_mark(note)}" for note in self.chapter.notes))
            lines += [*_table(self.chapter.grid), ""]
        for one in self.judged:
            told = [f"Caution: {_mark(caution)}." for caution in one.cautions]
            told += [f"- **{claim.verdict}**: {claim.claim}. {_mark(claim.evidence)}" for claim in one.claims]
            lines += _section(f"The paper's claims: {one.name}", [*told, *(["", one.note] if one.note else [])])
        for capture in self.captures:
            lines += _section(f"Found in {capture['name']}", _items(findings(capture)))
        for grid in self._grids():
            lines += _section(grid.title, _table(grid))
        for capture in self.captures:
            lines += _section(f"Where {capture['name']} comes from", _items(_facts(capture)))
        return "\n".join(lines)

    def _grids(self) -> list[Grid]:
        """All quantities, and what interventions did."""
        rows = []
        for name, quantity in QUANTITIES.items():
            having = [one["model"]["n_sinks"] or name not in OF_SINKS for one in self.captures]
            totals = [total(one, name) if has else None for one, has in zip(self.captures, having, strict=True)]
            if any(one and defined(one["mean"]) for one in totals):
                cells = [tell(one, name) if one else "none" for one in totals]
                gaps = (one.difference["quantities"].get(name, {}).get("total", {}) for one in self.comparisons)
                rows.append([quantity.label, *cells, *(tell(gap, name, signed=True) for gap in gaps)])
        head = ["quantity", *(capture["name"] for capture in self.captures)]
        head += [_versus(one, "\N{MINUS SIGN}") for one in self.comparisons]
        pairing = ", paired by trajectory" if all(one.difference["paired"] for one in self.comparisons) else ", not paired"
        title = f"All quantities, mean over layers, with 95 % intervals{pairing if self.comparisons else ''}"
        return [Grid(title, head, rows), *(_intervention_grid(one) for one in self.captures if one["interventions"])]


def _versus(comparison: Comparison, word: str) -> str:
    return f"{comparison.second['name']} {word} {comparison.first['name']}"


def _lede(captures: Sequence[Capture]) -> str:
    parts = []
    for capture in captures:
        n, settings = capture["n"], capture["settings"]
        kind = ("trajectory", "trajectories") if settings["inputs"] == "trajectories" else ("text under noise", "texts under noise")
        counts = [write_count(n["trajectories"], *kind), write_count(n["forwards"], "forward")]
        parts.append(f"{capture['name']}: {', '.join(counts)}, {write_count(n['tokens_seen'], 'token')} seen")
    threshold = f"{captures[0]['settings']['threshold']:g}"
    return f"{'; '.join(parts)}. A content sink is a token of the text that receives more than {threshold} of a head's attention."


def _inline(name: str, plate: figures.Plate) -> str:
    """An SVG file as part of a page: without a head, sized by the page, with names that no other figure of the page has."""
    from markupsafe import escape

    if plate.figure is None:
        return ""
    head, rest = plate.svg[plate.svg.index("<svg") :].split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    prefix = re.sub(r"[^\w.-]", "_", name)
    rest = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}-", rest)
    return f'{head} role="img" aria-label="{escape(plate.caption)}">{rest}'


def _intervention_grid(capture: Capture) -> Grid:
    rows = []
    for one in capture["interventions"]:
        nelbo = one["nelbo"]
        cells = [write_number(nelbo["before"]), write_number(nelbo["after"])]
        cells += [write_interval({**nelbo, "mean": nelbo["change"]}, signed=True), write_interval(one["kl"])]
        rows.append([one["label"], *cells, write_interval(one["changed"], "share")])
    texts = f"{nelbo['n']} texts of {one['text_tokens']:.0f} tokens on average"
    title = f"{capture['name']}: interventions (NELBO and KL in nats per token; {texts})"
    return Grid(title, ["intervention", "NELBO before", "after", "change", "KL", "generated tokens that differ"], rows)


def _texts(capture: Capture) -> list[tuple[str, str]]:
    """What the first trajectories began with, and their texts; without a tokenizer there is none."""
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
    """Text that markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_|<>#$~])", r"\\\1", " ".join(text.split()))
