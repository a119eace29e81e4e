"""The report of one or more captures: report.html, figures, metrics.json, summary.md. One page that needs nothing beside itself.

Checks captures, and lays out what findings and figures give. Measures nothing.
"""

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from sinkdlm.analysis import figures, plates
from sinkdlm.analysis.findings import (
    KIND_NAMES,
    Capture,
    Claim,
    Comparison,
    change,
    claims,
    compare,
    findings,
    headline,
    tell,
    total,
)
from sinkdlm.analysis.glossary import QUANTITIES, UNDEFINED, defined, label_of, unit_of, write_count, write_interval, write_number
from sinkdlm.analysis.intervals import MIN_TRAJECTORIES
from sinkdlm.analysis.recording import join_sides
from sinkdlm.analysis.study import FORMAT, VERSION
from sinkdlm.errors import AnalysisError
from sinkdlm.page.bundle import build_viewer

REPORT_FORMAT, REPORT_VERSION = "sinkdlm-report", 1
_PARTS = (
    *("name", "source", "model", "made", "settings", "n", "quantities", "trajectories", "kinds", "scatter", "heads"),
    *("paths", "maps", "interventions", "omitted"),
)
_OWN = ("sink_mass", "lane_heads", "sink_value_norm", "lane_norm_ratio")  # of the model's own sinks
_TILES = ("sink_mass", "lane_heads", "content_sinks", "turnover", "norm_ratio", "lane_norm_ratio")
_LAYER_COLUMNS = (
    *("sink_mass", "lane_heads", "content_sinks", "turnover", "turnover_null"),
    *("sink_value_norm", "content_sink_norm", "normal_norm", "entropy"),
)
_METHOD = "Bootstrap over trajectories: percentiles of resampled means, their tails widened to those of Student's t."
_N_TEXTS = 3  # of each capture
_INSPECT = "inspect.html"
_ENLARGED = 1.25  # how far a page may enlarge a figure


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


# -- captures -------------------------------------------------------------------------------------------------------------------


def check_capture(capture: Any, where: str) -> None:
    if not isinstance(capture, Mapping) or capture.get("format") != FORMAT:
        raise AnalysisError(f"{where}: not a capture; make one with: sinkdlm analyze CKPT --out DIR")
    if capture.get("version") != VERSION:
        raise AnalysisError(
            f"{where}: a capture of version {capture.get('version')}, but this sinkdlm reads version {VERSION}; capture it again"
        )
    missing = [part for part in _PARTS if part not in capture]
    if missing:
        raise AnalysisError(f"{where}: a capture without {', '.join(missing)}; capture it again")


def _check_all(captures: Sequence[Capture]) -> None:
    if not captures:
        raise AnalysisError("no capture to report on; name at least one checkpoint")
    for place, capture in enumerate(captures):
        check_capture(capture, f"capture {place + 1}")
    names = [capture["name"] for capture in captures]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise AnalysisError(f"two captures are called {twice[0]}: give each checkpoint a name of its own")


# -- the report -----------------------------------------------------------------------------------------------------------------


def metrics_of(captures: Sequence[Capture], chapter: Chapter | None = None) -> dict[str, Any]:
    """What metrics.json holds; needs nothing that draws."""
    _check_all(captures)
    comparisons = compare(captures)
    return _metrics(captures, comparisons, _judge(captures, comparisons), chapter)


def write_report(captures: Sequence[Capture], out: Path, chapter: Chapter | None = None) -> dict[str, Any]:
    """What was written: "report", "metrics", "summary", "figures" (name -> suffix -> file), and where captures hold recordings
    "recording" and "inspect", the page that shows it."""
    _check_all(captures)
    plates.check_drawing()
    try:
        out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be had is told before anything is drawn
    except OSError as failure:
        raise _unwritable(out, failure) from None
    comparisons = compare(captures)
    judged = _judge(captures, comparisons)
    drawn = [figures.draw_all(captures, [one[:3] for one in comparisons], narrow=narrow) for narrow in (False, True)]
    page = render_page(captures, comparisons, judged, drawn[0], drawn[1], chapter)
    paths: dict[str, Any] = {"report": out / "report.html", "metrics": out / "metrics.json", "summary": out / "summary.md"}
    try:
        paths["figures"] = plates.write(drawn[0], out / "figures")
        paths["metrics"].write_text(to_json(_metrics(captures, comparisons, judged, chapter)), encoding="utf-8")
        paths["summary"].write_text(render_summary(captures, comparisons, judged, chapter), encoding="utf-8")
        paths["report"].write_text(page, encoding="utf-8")
        recording = recording_of(captures)
        if recording is not None:
            paths |= {"recording": out / "recording.json", "inspect": out / _INSPECT}
            paths["recording"].write_text(json.dumps(recording, separators=(",", ":")) + "\n", encoding="utf-8")
            paths["inspect"].write_text(build_viewer(recording), encoding="utf-8")
    except OSError as failure:
        raise _unwritable(out, failure) from None
    return paths


def _unwritable(out: Path, failure: OSError) -> AnalysisError:
    return AnalysisError(f"{out}: cannot be written: {failure.strerror}; choose another folder with --out")


def recording_of(captures: Sequence[Capture]) -> dict[str, Any] | None:
    """First trajectories side by side. A capture may bear another name by now than when it was made."""
    found = [(capture["name"], capture["recording"]) for capture in captures if capture.get("recording")]
    return join_sides([{**one["side"], "model": name} for name, one in found], found[0][1]["asked"]) if found else None


class Judged(NamedTuple):
    """Claims about one capture, alone or compared."""

    name: str
    note: str
    claims: list[Claim]
    comparison: Comparison | None


def _judge(captures: Sequence[Capture], comparisons: Sequence[Comparison]) -> list[Judged]:
    """Models with a sink against the one without; where there is no such pair, each capture alone."""
    pairs = [one for one in comparisons if one.second["model"]["n_sinks"] and not one.first["model"]["n_sinks"]]
    if pairs:
        return [Judged(_versus(one), "", claims(one.second, one), one) for one in pairs]
    note = "Whether content sinks become fewer and move less needs a checkpoint with a sink token and one without, side by side."
    return [Judged(one["name"], note, claims(one), None) for one in captures]


def _versus(comparison: Comparison) -> str:
    return f"{comparison.second['name']} against {comparison.first['name']}"


def _title(captures: Sequence[Capture], judged: Sequence[Judged]) -> str:
    return headline(captures, {one.comparison.second["name"]: one.claims for one in judged if one.comparison is not None})


def _lede(captures: Sequence[Capture]) -> str:
    parts = []
    for capture in captures:
        n, settings = capture["n"], capture["settings"]
        kind = ("trajectory", "trajectories") if settings["inputs"] == "trajectories" else ("text under noise", "texts under noise")
        counts = [write_count(n["trajectories"], *kind), write_count(n["forwards"], "forward")]
        parts.append(f"{capture['name']}: {', '.join(counts)}, {write_count(n['tokens_seen'], 'token')} seen")
    first = captures[0]["settings"]
    rules = f"A content sink is a token of the text that receives more than {first['threshold']:g} of a head's attention."
    return f"{'; '.join(parts)}. {rules}"


def render_page(
    captures: Sequence[Capture],
    comparisons: Sequence[Comparison],
    judged: Sequence[Judged],
    wide: Mapping[str, plates.Plate],
    narrow: Mapping[str, plates.Plate],
    chapter: Chapter | None = None,
) -> str:
    plates.check_drawing()
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    own = resources.files("sinkdlm.analysis")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(own.joinpath("report.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        title=_title(captures, judged),
        lede=_lede(captures),
        inspect=_INSPECT if any(capture.get("recording") for capture in captures) else None,
        style=Markup(own.joinpath("report.css").read_text(encoding="utf-8")),
        chapter=chapter,
        contents=[
            *([chapter.key] if chapter else []),
            "claims",
            "findings",
            "figures",
            "tables",
            "texts",
            "glossary",
            "provenance",
        ],
        tiles=_tiles(captures),
        verdicts=[(one.name, one.note, one.claims, one.comparison.cautions if one.comparison else []) for one in judged],
        findings=[(capture["name"], findings(capture)) for capture in captures],
        plates=[_picture(name, plate, narrow[name], Markup) for name, plate in wide.items()],
        totals=_totals(captures, comparisons),
        tables=[*_kind_grids(captures), *_intervention_grids(captures), *_layer_grids(captures)],
        texts=[(capture["name"], capture["n"]["trajectories"], _texts(capture)) for capture in captures],
        glossary=[
            *((one.label, one.meaning) for one in QUANTITIES.values()),
            ("pp", "Percentage points: the difference of two shares."),
            ("95 % interval", f"{_METHOD} With fewer than {MIN_TRAJECTORIES} trajectories there is none."),
        ],
        provenance=[(capture["name"], _facts(capture)) for capture in captures],
    )


# -- parts of the page ----------------------------------------------------------------------------------------------------------


def _tiles(captures: Sequence[Capture]) -> list[dict[str, Any]]:
    tiles = []
    for name in _TILES:
        values = []
        for capture in captures:
            if not _has(capture, name):
                values.append((capture["name"], "", "no sink token"))
                continue
            found = total(capture, name)
            bounds = tell(found, name).partition(" [")[2]
            values.append((capture["name"], write_number(found["mean"], unit_of(name)), f"[{bounds}" if bounds else ""))
        if any(value not in ("", UNDEFINED) for _, value, _ in values):
            tiles.append({"label": label_of(name), "rows": values})
    return tiles


def _has(capture: Capture, name: str) -> bool:
    return bool(capture["model"]["n_sinks"]) or name not in _OWN


def _picture(name: str, wide: plates.Plate, narrow: plates.Plate, markup: type[str]) -> dict[str, Any]:
    picture: dict[str, Any] = {"name": name, "caption": wide.caption, "wide": None, "narrow": None, "width": 0}
    if wide.figure is not None and narrow.figure is not None:
        picture["width"] = round(96 * wide.figure.get_figwidth() * _ENLARGED)
        for kind, plate in (("wide", wide), ("narrow", narrow)):
            picture[kind] = markup(_inline(plate.svg, f"{name}-{kind}", wide.caption))
    return picture


def _inline(svg: str, prefix: str, caption: str) -> str:
    """An SVG file as part of a page: without a head, sized by the page, with names that no other figure of the page has."""
    from markupsafe import escape

    body = svg[svg.index("<svg") :]
    head, rest = body.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    prefix = re.sub(r"[^\w.-]", "_", prefix)
    rest = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', rest)
    rest = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', rest)
    rest = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", rest)
    return f'{head} role="img" aria-label="{escape(caption)}">{rest}'


def _totals(captures: Sequence[Capture], comparisons: Sequence[Comparison]) -> Grid:
    names = [
        name for name in QUANTITIES if any(_has(capture, name) and defined(total(capture, name)["mean"]) for capture in captures)
    ]
    rows = []
    for name in names:
        cells = [tell(total(capture, name), name) if _has(capture, name) else "none" for capture in captures]
        cells += [tell(change(one, name), name, signed=True) for one in comparisons]
        rows.append([label_of(name), *cells])
    head = ["quantity", *(capture["name"] for capture in captures)]
    head += [f"{one.second['name']} \N{MINUS SIGN} {one.first['name']}" for one in comparisons]
    paired = (
        ""
        if not comparisons
        else ", paired by trajectory"
        if all(one.difference["paired"] for one in comparisons)
        else ", not paired"
    )
    return Grid(f"All quantities, mean over layers, with 95 % intervals{paired}", head, rows)


def _layer_grids(captures: Sequence[Capture]) -> list[Grid]:
    grids = []
    for capture in captures:
        found = {name: capture["quantities"].get(name, {}).get("layers", []) for name in _LAYER_COLUMNS}
        found = {
            name: layers for name, layers in found.items() if _has(capture, name) and any(defined(one["mean"]) for one in layers)
        }
        rows = [
            [str(layer), *(write_number(found[name][layer]["mean"], unit_of(name)) for name in found)]
            for layer in range(capture["model"]["n_layers"])
        ]
        grids.append(Grid(f"{capture['name']}: by layer (intervals are in metrics.json)", ["layer", *map(label_of, found)], rows))
    return grids


def _kind_grids(captures: Sequence[Capture]) -> list[Grid]:
    grids = []
    for capture in captures:
        kinds = capture["kinds"]
        if not kinds:
            continue
        among = {"all": "all tokens", "absolute": "content sinks", "relative": "relative sinks"}
        rows = [
            [KIND_NAMES.get(kind, kind), *(write_number((kinds.get(group) or {}).get(kind), "share") for group in among)]
            for kind in kinds["all"] or {}
        ]
        grids.append(Grid(f"{capture['name']}: kinds of tokens", ["kind", *among.values()], rows))
    return grids


def _intervention_grids(captures: Sequence[Capture]) -> list[Grid]:
    grids = []
    for capture in captures:
        rows = []
        for one in capture["interventions"]:
            nelbo = one["nelbo"]
            cells = [write_number(nelbo["before"]), write_number(nelbo["after"])]
            cells += [write_interval({**nelbo, "mean": nelbo["change"]}, signed=True), write_interval(one.get("kl") or {})]
            rows.append([one["label"], *cells, write_interval(one.get("changed") or {}, "share")])
        head = ["intervention", "NELBO before", "after", "change", "KL", "generated tokens that differ"]
        if rows:
            first = capture["interventions"][0]
            texts = f"{first['nelbo']['n']} texts of {first['text_tokens']:.0f} tokens on average"
            grids.append(Grid(f"{capture['name']}: interventions (NELBO and KL in nats per token; {texts})", head, rows))
    return grids


def _texts(capture: Capture) -> list[tuple[str, str]]:
    """What the first trajectories began with, and their texts; without a tokenizer there is none."""
    found = []
    for row in capture["trajectories"][:_N_TEXTS]:
        given = capture["settings"]["inputs"] == "noise"
        about = f"Text {row['number']}, given" if given else f"Prompt of trajectory {row['number']}: {row.get('prompt') or 'none'}"
        found.append((about, row.get("text") or "none"))
    return found


def _facts(capture: Capture) -> list[tuple[str, str]]:
    made, n = capture["made"], capture["n"]
    facts = [("checkpoint", str(capture["source"]))]
    facts += [(key, _command(value) if key == "command" else _plain(value)) for key, value in made.items() if value is not None]
    facts += [(key, _plain(value)) for key, value in capture["settings"].items()]
    facts.append(("n", ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in n.items())))
    return [*facts, ("model", _plain(capture["model"]))]


def _command(words: str | Sequence[str]) -> str:
    return words if isinstance(words, str) else shlex.join(words)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- beside the page ------------------------------------------------------------------------------------------------------------


def _metrics(
    captures: Sequence[Capture], comparisons: Sequence[Comparison], judged: Sequence[Judged], chapter: Chapter | None = None
) -> dict[str, Any]:
    kept = ("name", "source", "model", "made", "settings", "n", "quantities", "kinds", "heads", "interventions", "omitted")
    return {
        "format": REPORT_FORMAT,
        "version": REPORT_VERSION,
        **({chapter.key: chapter.values} if chapter else {}),
        "captures": [{part: capture[part] for part in kept} for capture in captures],
        "differences": [
            {"first": one.first["name"], "second": one.second["name"], "cautions": one.cautions, **one.difference}
            for one in comparisons
        ],
        "claims": [{"about": one.name, "claims": [claim._asdict() for claim in one.claims]} for one in judged],
    }


def to_json(value: Any) -> str:
    def plain(one: Any) -> Any:
        if isinstance(one, Mapping):
            return {str(key): plain(part) for key, part in one.items()}
        if isinstance(one, list | tuple):
            return [plain(part) for part in one]
        return None if isinstance(one, float) and not math.isfinite(one) else one

    return json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def render_short(captures: Sequence[Capture]) -> str:
    """For a terminal: claims with their verdicts, and what was found. Evidence, interventions and tables are in the files."""
    judged = _judge(captures, compare(captures))
    lines = [_title(captures, judged), _lede(captures)]
    for one in judged:
        lines += ["", f"The paper's claims: {one.name}"]
        lines += [f"  {claim.verdict:15s}{claim.claim}" for claim in one.claims]
        lines += [f"  caution: {caution}" for caution in (one.comparison.cautions if one.comparison else [])]
    for capture in captures:
        told = findings(capture, interventions=False)
        lines += ["", f"Found in {capture['name']}", *(f"  {found.topic}: {found.text}" for found in told)]
    return "\n".join([*lines, ""])


def render_summary(
    captures: Sequence[Capture], comparisons: Sequence[Comparison], judged: Sequence[Judged], chapter: Chapter | None = None
) -> str:
    lines = [f"# {_mark(_title(captures, judged))}", "", _mark(_lede(captures)), ""]
    if chapter:
        lines += [f"## {_mark(chapter.title)}", "", *(f"- {_mark(note)}" for note in chapter.notes), "", *_table(chapter.grid), ""]
    for one in judged:
        lines += [f"## The paper's claims: {_mark(one.name)}", ""]
        lines += [f"Caution: {_mark(caution)}." for caution in (one.comparison.cautions if one.comparison else [])]
        lines += [f"- **{claim.verdict}**: {claim.claim}. {_mark(claim.evidence)}" for claim in one.claims]
        lines += ["", one.note, ""] if one.note else [""]
    for capture in captures:
        lines += [f"## Found in {_mark(capture['name'])}", ""]
        lines += [f"- {_mark(found.topic)}: {_mark(found.text)}" for found in findings(capture)]
        lines.append("")
    for grid in (_totals(captures, comparisons), *_intervention_grids(captures)):
        lines += [f"## {_mark(grid.title)}", "", *_table(grid), ""]
    for capture in captures:
        lines += [f"## Where {_mark(capture['name'])} comes from", ""]
        lines += [f"- {_mark(key)}: {_mark(value)}" for key, value in _facts(capture)]
        lines.append("")
    return "\n".join(lines)


def _table(grid: Grid) -> list[str]:
    return [_row(grid.head), _row("-" * 3 for _ in grid.head), *map(_row, grid.rows)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell if cell == '---' else _mark(cell) for cell in cells)} |"


def _mark(text: str) -> str:
    """Text that markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_|<>#$~])", r"\\\1", " ".join(text.split()))
