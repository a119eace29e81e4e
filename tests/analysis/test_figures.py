import re
import sys

import numpy as np
import pytest

from captures import AWKWARD, NOTHING, make_capture
from sinkdlm.analysis import figures, findings

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def pair():
    return make_capture("plain", 0), make_capture("lane", 1, seed=1)


def test_what_cannot_be_drawn_says_why(pair):
    plain, _ = pair
    empty = {"sink": [], "normal": [], "lane": []} | dict.fromkeys(("sink_mean", "normal_mean", "lane_mean"))
    nothing = plain | {"maps": [], "paths": [], "scatter": empty | dict.fromkeys(("n_sink", "n_normal", "n_lane"), 0)}
    nothing |= {"heads": {"lane": None, "content": None}, "quantities": make_capture(n_sinks=0, means=NOTHING)["quantities"]}
    one_step = make_capture(steps=1)
    unknown = {"paired": True, "quantities": {}}
    for plate, why in [
        (figures.figure1(nothing, []), "no attention map and no value norms"),
        (figures.figure3([nothing]), "no value norm was measured"),
        (figures.trajectory(nothing), "no path was captured"),
        (figures.trajectory(one_step), "only one step, and nothing can move"),
        (figures.heads(nothing), "no head was measured"),
        (figures.forest(plain, nothing, unknown), "no quantity has an interval"),
    ]:
        assert plate.figure is None
        assert why in plate.caption


def test_a_part_that_is_missing_leaves_the_rest():
    no_sinks = make_capture(n_sinks=0, means={"content_sinks": 0.0, "content_sink_norm": None})
    plate = figures.figure1(no_sinks, figures.pair_maps(no_sinks)[0])
    assert len(plate.figure.axes) == 4  # two maps, norms, a colour bar
    assert "No token of the text is a content sink" in plate.caption
    plate = figures.figure1(no_sinks, [])
    assert len(plate.figure.axes) == 1
    assert "No attention map was captured" in plate.caption
    assert "No checkpoint has a sink token" in figures.figure3([no_sinks]).caption


@pytest.mark.usefixtures("unrendered")
def test_captions_state_n_and_the_rule(pair):
    comparison = findings.compare(pair)[0]
    plates = figures.draw_all(pair, [comparison])
    assert len(plates) == 8
    for name, plate in plates.items():
        assert plate.figure is not None
        assert plate.figure.get_layout_engine() is None  # with one, matplotlib draws every file twice
        assert re.search(r"n = \d|over 288 forwards of 12 trajectories", plate.caption), name
        assert "0.3" in plate.caption or name.startswith(("paths", "difference")), name


@pytest.mark.usefixtures("unrendered")
def test_maps_of_heads_end_at_the_largest_share_of_all_models(pair):
    tops = [max(np.max(one["heads"][kind]) for one in pair) for kind in ("lane", "content")]
    found = [[axes.images[0].get_clim() for axes in figures.heads(one, pair).figure.axes if axes.images] for one in pair]
    assert found == [[(0, tops[1])], [(0, tops[0]), (0, tops[1])]]


@pytest.mark.usefixtures("unrendered")
def test_every_map_is_drawn_two_of_a_head_beside_each_other(pair):
    early, late = pair[0]["maps"]
    other = late | {"head": early["head"] + 1}
    asked = pair[0] | {"maps": [late, other, early, early | {"step": 7}]}
    plates = {name: plate for name, plate in figures.draw_all([asked], []).items() if name.startswith("maps")}
    assert len(plates) == 3
    for plate, n_axes, steps in zip(plates.values(), (4, 2, 2), ("steps 0 and 7;", "step 23;", "step 23;"), strict=True):
        assert len(plate.figure.axes) == n_axes  # maps, a colour bar, and norms in the first
        assert plate.figure.get_figwidth() > 5 or n_axes == 2  # a map alone is not stretched over the page
        assert f" at {steps}" in plate.caption
        assert plate.caption.count("Value norms") == (n_axes == 4)


def drawn_texts(figure):
    """(text, box in pixels) of everything that is drawn, ticks outside an axis left out."""
    from matplotlib.text import Text

    with figures.styled():
        figure.set_dpi(200)  # as files are written
        figure.draw_without_rendering()
        hidden = set()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                seen = {id(label) for tick in axis._update_ticks() for label in (tick.label1, tick.label2)}
                ticks = axis.get_major_ticks() + axis.get_minor_ticks()
                hidden |= {id(label) for tick in ticks for label in (tick.label1, tick.label2)} - seen
        shown = [one for one in figure.findobj(Text) if one.get_text().strip() and one.get_visible() and id(one) not in hidden]
        return [(one.get_text(), one.get_window_extent()) for one in shown]


@pytest.mark.parametrize("which", [pytest.param(name, marks=pytest.mark.slow) for name in AWKWARD])
def test_no_text_of_a_figure_is_cut_or_runs_into_another(which):
    captures = AWKWARD[which]()
    plates = figures.draw_all(captures, findings.compare(captures))
    n_drawn = 0
    for name, (figure, _, _) in plates.items():
        if figure is None:
            continue
        texts = drawn_texts(figure)
        n_drawn += len(texts)
        for place, (text, box) in enumerate(texts):
            assert box.x0 >= -1, (name, text)
            assert box.y0 >= -1, (name, text)
            assert box.x1 <= figure.bbox.x1 + 1, (name, text)
            assert box.y1 <= figure.bbox.y1 + 1, (name, text)
            for other, area in texts[:place]:
                wide = min(box.x1, area.x1) - max(box.x0, area.x0)
                high = min(box.y1, area.y1) - max(box.y0, area.y0)
                assert wide <= 2 or high <= 5, (name, text, other)
    assert n_drawn > 5


def test_figures_leave_matplotlib_as_it_was(pair, monkeypatch):
    import matplotlib

    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    with matplotlib.rc_context({"font.size": 3}):
        before = matplotlib.rcParams.copy()  # as a dict, it would look for a screen
        assert figures.figure3(pair).svg
        assert matplotlib.rcParams.copy() == before
