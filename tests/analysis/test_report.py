import json
import re
import sys
from collections import Counter
from importlib import resources

import numpy as np
import pytest

from captures import AWKWARD, KINDS, NASTY, VANILLA, make_capture
from sinkdlm.analysis import figures, findings, glossary, metrics
from sinkdlm.analysis.kinds import KINDS as MEASURED_KINDS
from sinkdlm.analysis.metrics import Trajectory
from sinkdlm.analysis.report import Grid, Report
from sinkdlm.analysis.study import read_capture
from sinkdlm.errors import AnalysisError

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def pair():
    return make_capture("plain", 0), make_capture("lane", 1, seed=1)


# -- what it says ---------------------------------------------------------------------------------------------------------------


def test_every_kind_has_a_name():
    assert set(findings.KIND_NAMES) == set(MEASURED_KINDS) == set(KINDS)
    assert set(figures.FOREST) < set(glossary.QUANTITIES)


@pytest.mark.parametrize(
    ("estimate", "unit", "signed", "written"),
    [
        ({"mean": 0.41234, "low": 0.4, "high": 0.43}, "share", False, "41.2 % [40.0, 43.0]"),
        ({"mean": -0.061, "low": -0.07, "high": 0.0004}, "share", True, "-6.1 pp [-7.0, 0.0]"),
        ({"mean": 7.6, "low": 7.5, "high": 7.7}, "", False, "7.60 [7.50, 7.70]"),
        ({"mean": 12345.6, "low": 12000, "high": 13000}, "", False, "12,346 [12,000, 13,000]"),
        ({"mean": 0.0128, "low": -0.0267, "high": 0.03}, "", True, "+0.0128 [-0.0267, +0.0300]"),
        ({"mean": 0, "low": 0, "high": 0}, "", False, "0.00 [0.00, 0.00]"),
        ({"mean": 3.14159, "low": None, "high": None}, "", False, "3.14"),
        ({"mean": None, "low": None, "high": None}, "share", False, "n/a"),
        ({"mean": float("nan"), "low": 1, "high": 2}, "", False, "n/a"),
        ({"mean": 2e-9, "low": 1e-9, "high": 3e-9}, "", False, "2.0e-9 [1.0e-9, 3.0e-9]"),
    ],
)
def test_numbers_have_the_digits_they_deserve(estimate, unit, signed, written):
    assert glossary.write_interval(estimate, unit, signed) == written.replace("-", "\N{MINUS SIGN}")


def test_findings_state_what_was_measured(pair):
    plain, lane = pair
    told = {one.topic: one.text for one in findings.findings(lane)}
    own = lane["quantities"]
    assert f"receives {glossary.write_interval(own['sink_mass']['total'], 'share')} of attention" in told["Attention on the sink"]
    assert "even share would be 3.0 %" in told["Attention on the sink"]  # one sink among 32 tokens
    masses = [layer["mean"] for layer in own["sink_mass"]["layers"]]
    strong = int(np.argmax(masses))
    assert f"{100 * masses[strong]:.1f} % (layer {strong})" in told["Attention on the sink"]
    assert glossary.write_interval(own["content_sinks"]["total"]) in told["Content sinks"]
    assert glossary.write_interval(own["turnover_null"]["total"], "share") in told["Movement of content sinks"]
    assert "punctuation" in told["Kinds of content sinks"]
    assert "holds here" in told["Value norms"]
    assert "smaller updates" in told["Attention as a no-op"]
    assert "+0.530 [+0.510, +0.550]" in told["Intervention: without the sink token"]
    assert "does not clearly change" in told["Intervention: its value set to zero"]
    told = {one.topic: one.text for one in findings.findings(plain)}
    assert "The model has no sink token" in told["Attention on the sink"]
    assert told["Not measured"] == "interventions on the lane: the model has no sinks of its own."


@pytest.mark.parametrize(
    ("turnover", "null", "words"),
    [
        (0.2, 0.5, "move less than in random"),
        (0.5, 0.2, "move more than in random"),
        (0.3, 0.3, "move no differently than in random"),
    ],
)
def test_movement_is_judged_against_chance_order(turnover, null, words):
    told = findings.findings(make_capture(means={"turnover": turnover, "turnover_null": null}, n=16))
    assert f"Content sinks {words}" in next(one.text for one in told if one.topic == "Movement of content sinks")
    gone = dict.fromkeys(("turnover", "turnover_null"))
    told = findings.findings(make_capture(means={"relative_turnover": turnover, "relative_turnover_null": null, **gone}, n=16))
    text = next(one.text for one in told if one.topic == "Movement of content sinks")
    assert text.startswith("Movement cannot be judged")
    assert f"content sinks {words}" in text


def verdicts(plain: dict, lane: dict) -> dict[str, str]:
    (comparison,) = findings.compare([plain, lane])
    return {one.claim: one.verdict for one in findings.claims(comparison.second, comparison)}


@pytest.mark.parametrize(
    ("claim", "quantity", "where", "values"),
    [
        ("The sink token absorbs attention", "sink_mass", 1, (0.4, 0.01, 1 / 33)),
        ("Content sinks become fewer", "content_sinks", 1, (0.1, 0.9, VANILLA["content_sinks"])),
        ("Content sinks move less", "turnover", 1, (0.1, 0.4, VANILLA["turnover"])),
        ("Content sinks have low value norms", "norm_ratio", 0, (0.5, 1.5, 1.0)),
        ("The sink token has a low value norm", "lane_norm_ratio", 1, (0.5, 1.5, 1.0)),
    ],
)
def test_each_claim_follows_its_number_alone(claim, quantity, where, values):
    """A number beyond the border on either side, and one on it; every other verdict stays."""
    for value, expected in zip(values, (findings.SHOWS, findings.FAILS, findings.UNDECIDED), strict=True):
        captures = [
            make_capture(f"c{n_sinks}", n_sinks, {quantity: value} if n_sinks == where else {}, seed=3 + n_sinks)
            for n_sinks in (0, 1)
        ]
        report = Report(captures)
        (judged,) = report.judged
        found = {one.claim: one.verdict for one in judged.claims}
        assert found.pop(claim) == expected
        assert set(found.values()) == {findings.SHOWS}
        assert report.title == f'"c1": {4 + (expected == findings.SHOWS)} of 5 claims of the paper show'


def test_verdicts_do_not_depend_on_the_order_of_captures(pair):
    plain, lane = pair
    assert verdicts(plain, lane) == verdicts(lane, plain)
    (comparison,) = findings.compare([lane, plain])
    assert comparison.first is plain
    assert comparison.difference == metrics.difference(plain, lane)


def test_what_cannot_be_decided_is_not_claimed():
    """No content sinks left, and too few trajectories for an interval."""
    left = {"content_sinks": 0.0, "sink_heads": 0.0, "turnover": None, "turnover_null": None, "norm_ratio": None}
    (comparison,) = findings.compare([make_capture("plain", 0), make_capture("lane", 1, left)])
    still = next(one for one in findings.claims(comparison.second, comparison) if one.claim == "Content sinks move less")
    assert still.verdict == findings.UNDECIDED
    assert 'in "lane"' in still.evidence
    (comparison,) = findings.compare([make_capture("plain", 0, n=3), make_capture("lane", 1, n=3)])
    few = next(one for one in findings.claims(comparison.second, comparison) if one.claim == "Content sinks become fewer")
    assert few.verdict == findings.UNDECIDED
    assert "no interval with n = 3" in few.evidence


def test_a_weak_sink_is_not_glossed_over():
    weak = make_capture(means={"sink_mass": 0.08, "lane_heads": 0.0})
    told = findings.claims(weak)[0]
    assert told.verdict == findings.FAILS
    assert "more than 0.3 in 0.0 % [0.0, 0.0] of heads" in told.evidence


def test_layers_that_say_otherwise_are_told():
    capture = make_capture()
    capture["quantities"]["lane_norm_ratio"]["layers"][2]["mean"] = 1.2
    told = findings.claims(capture)[-1]
    assert told.verdict == findings.SHOWS
    assert told.evidence.endswith("The ratio is above 1 in 1 of 6 layers.")


def test_captures_that_were_not_made_alike_are_told():
    plain, lane = make_capture("plain", 0, steps=8), make_capture("lane", 1, layers=3)
    for row in lane["trajectories"]:
        row["prompt"] = "Another"
    (comparison,) = findings.compare([plain, lane])
    assert not comparison.difference["paired"]
    assert [caution.split(":")[0] for caution in comparison.cautions] == [
        "the setting steps differs",
        "the models differ in n_layers",
        "they were not given the same prompts",
    ]
    noise = [make_capture(name, n_sinks) for name, n_sinks in (("plain", 0), ("lane", 1))]
    for one, shares in zip(noise, ([0.9, 0.1], [0.5, 0.1]), strict=True):
        one["settings"] |= {"inputs": "noise", "shares": shares}
    assert findings.compare(noise)[0].cautions == ['the setting shares differs: "plain" 0.9, 0.1; "lane" 0.5, 0.1']


def test_totals_over_different_layers_are_told():
    plain, lane = make_capture("plain", 0), make_capture("lane", 1)
    assert "layers with content sinks differ" not in findings.claims(lane, findings.compare([plain, lane])[0])[2].evidence
    for name in ("turnover", "norm_ratio"):
        for layer in (0, 5):
            lane["quantities"][name]["layers"][layer]["mean"] = None
    told = findings.claims(lane, findings.compare([plain, lane])[0])[2]
    assert told.claim == "Content sinks move less"
    assert 'The layers with content sinks differ: 6 in "plain" and 4 in "lane", 4 of them in both.' in told.evidence
    norms = [next(one.text for one in findings.findings(one) if one.topic == "Value norms") for one in (plain, lane)]
    assert ["in the 4 of 6 layers that have them" in text for text in norms] == [False, True]


@pytest.mark.usefixtures("unrendered")
def test_texts_under_noise_are_given_not_written(tmp_path):
    capture = make_capture()
    capture["settings"]["inputs"] = "noise"
    page = Report([capture]).write(tmp_path)["report"].read_text()
    assert "Text 0, given" in page
    assert "Prompt of trajectory" not in page


def test_an_intervention_says_what_it_was_measured_on():
    """Its texts have other lengths than trajectories: sinks may be there that no trajectory has."""
    told = {one.topic: one.text for one in findings.findings(make_capture())}
    texts = [text for topic, text in told.items() if topic.startswith("Intervention")]
    assert texts
    assert all("texts of 24 tokens on average" in text for text in texts)


def test_the_command_can_be_copied():
    capture = make_capture()
    capture["made"]["command"] = ["sinkdlm", "analyze", "runs/a b", "--out", "x"]
    assert "command: sinkdlm analyze 'runs/a b' --out x" in Report([capture]).summary()


# -- the files ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(made_once, pair):
    return made_once("report", lambda folder: Report(pair).write(folder))


@pytest.mark.slow
def test_the_same_captures_give_the_same_bytes(written, pair, tmp_path):
    paths = Report(json.loads(json.dumps(pair))).write(tmp_path / "new" / "folder")
    assert [path.name for path in (paths["report"], paths["metrics"], paths["summary"])] == [
        "report.html",
        "metrics.json",
        "summary.md",
    ]
    files = sorted(path.relative_to(written) for path in written.rglob("*.*"))
    assert len(files) == 3 + 2 * 8
    for file in files:
        assert (written / file).read_bytes() == (tmp_path / "new" / "folder" / file).read_bytes(), file


def test_metrics_are_the_captures_own(written, pair):
    def refuse(word):
        raise AssertionError(word)

    found = json.loads((written / "metrics.json").read_text(), parse_constant=refuse)
    assert (found["format"], found["version"]) == ("sinkdlm-report", 1)
    assert [one["quantities"] for one in found["captures"]] == [one["quantities"] for one in pair]
    (gap,) = found["differences"]
    assert (gap["first"], gap["second"]) == ("plain", "lane")
    assert gap["quantities"] == metrics.difference(*pair)["quantities"]
    assert len(found["claims"][0]["claims"]) == 5


def test_the_page_needs_nothing_beside_itself(written):
    page = (written / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r"@import|\bsrc=", page)
    links = re.findall(r'(?:xlink:)?href="([^"]*)"', page)
    assert len(links) > 100
    assert all(link.startswith(("#", "data:")) for link in links)
    assert re.findall(r"url\((?!#)", page) == []
    ids = Counter(re.findall(r'\bid="([^"]+)"', page))
    assert [name for name, n in ids.items() if n > 1] == []
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)


def test_page_and_summary_say_the_same(written):
    page, summary = ((written / name).read_text() for name in ("report.html", "summary.md"))
    assert summary.startswith('# "lane": 5 of 5 claims of the paper show\n')
    assert "<h1>&#34;lane&#34;: 5 of 5 claims of the paper show</h1>" in page
    told = re.findall(r"^- \*\*(.+?)\*\*: (.+?)\.", summary, flags=re.MULTILINE)
    assert len(told) == 5
    for verdict, claim in told:
        assert re.search(rf">{verdict}</span> <b>{claim}</b>", page)


@pytest.mark.usefixtures("unrendered")
def test_names_of_models_stand_in_quotes():
    """So that a model called sink does not read as the sink token."""
    captures = [make_capture("twin-zero", 0), make_capture("twin-one", 1, seed=1)]
    report = Report(captures)
    told = [*report.short().splitlines(), *report.summary().partition("## Provenance")[0].splitlines()]
    told += [plate.caption for plate in figures.draw_all(captures, report.comparisons).values()]
    assert sum('"twin-one"' in line for line in told) > 10
    assert [line for line in told if "twin-" in line.replace('"twin-zero"', "").replace('"twin-one"', "")] == []
    assert len(report.lead) == 3


@pytest.mark.usefixtures("without_pngs")
def test_names_and_texts_are_shown_never_run(tmp_path):
    capture = make_capture(NASTY, 1, n=6)
    capture["trajectories"][0] |= {"prompt": NASTY, "text": f"{NASTY}</main>"}
    capture["omitted"] = {NASTY: NASTY}
    capture["interventions"][0]["label"] = NASTY
    capture["made"]["command"] = NASTY
    paths = Report([capture]).write(tmp_path)
    page, summary = paths["report"].read_text(), paths["summary"].read_text()
    assert "<script" not in page
    assert page.count("</main>") == 1
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;" in page
    assert "<script" not in summary.replace("\\<", "")
    assert {path.parent for path in tmp_path.rglob("*.svg")} == {tmp_path / "figures"}


@pytest.mark.usefixtures("without_pngs")
def test_a_report_of_measured_trajectories(tmp_path):
    """What metrics gives is what the report reads: one token of text in one step, and a longer one."""
    for steps, length in ((1, 1), (6, 9)):
        draw = np.random.default_rng(0)
        row = _trajectory(draw, steps, length)
        summary = metrics.summarize([metrics.measure(row, np.zeros(8, dtype=np.uint8))])
        rest = {
            part: make_capture()[part] for part in ("format", "version", "source", "made", "settings", "interventions", "omitted")
        }
        model = {"n_layers": 2, "n_heads": 3, "n_sinks": 1, "sink_kind": "isolated"}
        capture = {"name": f"measured-{steps}", "model": model, "maps": [], **rest, **summary}
        capture["paths"] = [metrics.paths_of(row, ["a"] * length)]
        for one in capture["trajectories"]:
            one |= {"prompt": "", "text": "a"}
        paths = Report([json.loads(json.dumps(capture, allow_nan=False))]).write(tmp_path / str(steps))
        assert "95 % intervals" in paths["report"].read_text()


def _trajectory(draw, steps, length, layers=2, heads=3) -> Trajectory:
    received = draw.dirichlet(np.ones(length + 1), (steps, layers, heads))
    norms = draw.random((steps, layers, length + 1))
    content = received[..., 1:]
    return Trajectory(
        number=0,
        n_prompt=0,
        mask_id=7,
        tokens=draw.integers(0, 8, (steps, length)).astype(np.int32),
        final=np.zeros(length, dtype=np.int32),
        absolute=content > 0.3,
        relative=content > 0.2,
        top=content.argmax(-1).astype(np.int32),
        top_received=content.max(-1),
        received=content.mean(2),
        sink_received=received[..., :1],
        entropy=draw.random((steps, layers, heads)),
        value_norm=norms[..., 1:],
        sink_value_norm=norms[..., :1],
        output_norm=draw.random((steps, layers, heads)),
        bound=1 + draw.random((steps, layers, heads)),
        resting=draw.random((steps, layers, length)),
        update_ratio=draw.random((steps, layers, length)),
    )


# -- mistakes -------------------------------------------------------------------------------------------------------------------


def test_mistakes_are_told_in_one_line(tmp_path, pair, monkeypatch):
    plain, _ = pair
    (tmp_path / "file").write_text("{")
    for name, found in {"else": {"format": "else"}, "list": [], "old": {"format": "sinkdlm-capture", "version": 7}}.items():
        (tmp_path / name).write_text(json.dumps(found))
    drawn = []  # what is drawn in vain takes seconds
    monkeypatch.setattr(figures, "draw_all", lambda *given, **_: drawn.append(given) or {})
    for make, words in [
        (lambda: read_capture(tmp_path / "else"), "else: not a capture"),
        (lambda: read_capture(tmp_path / "list"), "list: not a capture"),
        (lambda: read_capture(tmp_path / "old"), "old: a capture of version 7, but this sinkdlm reads version 1"),
        (lambda: Report([plain]).write(tmp_path / "file"), "file: cannot be written: File exists; choose another folder"),
        (lambda: Report([plain]).write(tmp_path / "file" / "in"), "cannot be written: Not a directory"),
    ]:
        with pytest.raises(AnalysisError, match=re.escape(words)) as told:
            make()
        assert "\n" not in str(told.value)
    assert drawn == []
    assert not (tmp_path / "x").exists()
    for module in ("matplotlib", "jinja2"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, module, None)
            with pytest.raises(AnalysisError, match=rf"need {module}: pip install 'sinkdlm\[viz\]'"):
                Report([plain]).write(tmp_path / "x")
    assert not (tmp_path / "x").exists()


# -- in a browser ---------------------------------------------------------------------------------------------------------------

OVERLAPS = """() => {
  const blocks = [...document.querySelectorAll('h1, h2, h3, p, figure svg, figcaption, dt, dd, .scroll, nav')]
    .filter(one => one.getClientRects().length).map(one => [one, one.getBoundingClientRect()]);
  const found = [];
  for (const [place, [one, a]] of blocks.entries())
    for (const [other, b] of blocks.slice(place + 1)) {
      if (one.contains(other)) continue;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 1) found.push([one.textContent.slice(0, 60), other.textContent.slice(0, 60)]);
    }
  return [blocks.length, found];
}"""
CUT = """() => [...document.querySelectorAll('h1, h2, h3, p, dt, dd, figcaption')]
  .filter(one => one.scrollWidth > one.clientWidth + 1 && one.clientWidth).map(one => one.textContent.slice(0, 60))"""
SCALES = """() => [...document.querySelectorAll('figure svg')].filter(one => one.getClientRects().length)
  .map(one => one.getBoundingClientRect().width / (one.viewBox.baseVal.width * 96 / 72))"""
SMALLEST = """() => Math.min(...[...document.querySelectorAll('h1, h2, h3, p, dt, dd, td, th, span, b, figcaption')]
  .map(one => parseFloat(getComputedStyle(one).fontSize)))"""


@pytest.mark.slow
@pytest.mark.parametrize("which", AWKWARD)
def test_an_awkward_page_reads_well_too(browser, which, tmp_path):
    Report(AWKWARD[which]()).write(tmp_path)
    check_page(browser, tmp_path / "report.html", tmp_path)


@pytest.mark.slow
def test_the_page_reads_well_on_desktop_phone_and_paper(browser, written, tmp_path):
    check_page(browser, written / "report.html", tmp_path)


def check_page(browser, html, tmp_path):
    from PIL import Image

    for width in (1280, 390, 360):
        page = browser.new_page(viewport={"width": width, "height": 900})
        said, asked = [], []
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("pageerror", lambda failure, said=said: said.append(str(failure)))
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.goto(html.as_uri())
        folded = page.evaluate("document.documentElement.scrollHeight")
        assert page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)") is None
        assert folded < 0.6 * page.evaluate("document.documentElement.scrollHeight"), width
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        n_blocks, overlapping = page.evaluate(OVERLAPS)
        assert n_blocks > 50
        assert overlapping == [], width
        assert page.evaluate(CUT) == [], width
        assert page.evaluate(SMALLEST) >= 12
        scales = page.evaluate(SCALES)
        assert len(scales) >= 1
        assert all(0.9 <= scale <= 1.3 for scale in scales), (width, scales)  # type of 8 points stays readable
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        with Image.open(tmp_path / "page.png") as shot:
            shade = np.asarray(shot.convert("L"))
        assert shade.shape[1] == width
        dark = (shade < 128).mean(axis=1)
        assert (dark > 0).mean() > 0.2  # lines of type all the way down
        assert dark.mean() < 0.5
        if width == 1280:  # paper has a width of its own
            page.pdf(path=tmp_path / "page.pdf", format="A4")
            assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
        assert said == []
        assert [url.partition(":")[0] for url in asked if not url.startswith("data:")] == ["file"]
        page.close()


def test_a_sentence_in_a_table_may_wrap_and_numbers_may_not():
    from jinja2 import Environment

    source = (resources.files("sinkdlm.analysis") / "report.html.jinja").read_text(encoding="utf-8")
    macro = source[source.index("{% macro table") : source.index("{% macro terms")]
    grid = Grid("t", ["", "a", "b"], [["a story", "word " * 20, "0.635"]])
    drawn = Environment(autoescape=True).from_string(macro + "{{ table(grid) }}").render(grid=grid)
    assert f'<td class="prose">{"word " * 20}</td><td>0.635</td>' in drawn
