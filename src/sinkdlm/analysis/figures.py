"""Figures of captures: the paper's Figure 1 and Figure 3, paths of the top token, heads by layers, differences.

Each function returns a Plate: a figure and its caption, or no figure and a sentence that says why. Colours suit colour-blind
readers; drawing the same capture twice gives the same bytes. Knows captures as dictionaries.

N steps, E layers, H heads, T tokens, S sinks of the model.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import numpy as np

from sinkdlm.analysis.findings import OF_SINKS, Capture, Comparison, layers_of
from sinkdlm.analysis.glossary import QUANTITIES, defined, quoted, write_count, write_interval, write_number
from sinkdlm.errors import AnalysisError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_P = ParamSpec("_P")

_WIDTH, _SMALL = 7.2, 3.7  # inches: a page's column, and half of it
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
SINK, NORMAL, LANE = "#D55E00", "#0072B2", "#009E73"
INK, FAINT = "#222222", "#8a8a8a"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "path",  # the same shapes on every machine, whatever fonts it has
    "svg.hashsalt": "sinkdlm",  # names inside a file depend on its content alone
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7.5),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
}
_GROUPS = {"sink": ("content sinks", SINK), "normal": ("other tokens", NORMAL), "lane": ("sink token", LANE)}  # of value norms
_NORMS = {  # quantity -> name, line and marker
    "sink_value_norm": ("sink token", "-", "o"),
    "content_sink_norm": ("content sinks", "--", "^"),
    "normal_norm": ("other tokens", ":", "s"),
}
_SHARES = ("sink_mass", "sink_heads")  # by layer in figure 3
_HEADS = {"lane": "attention on the sink token", "content": "share of steps with a content sink"}
_BELOW: dict[str, Any] = {"orientation": "horizontal", "format": "{x:.2g}", "shrink": 0.6}
FOREST = (
    *("sink_mass", "content_sinks", "relative_sinks", "sink_heads", "turnover", "relative_turnover", "move_rate", "lifetime"),
    *("anchored", "norm_ratio", "entropy", "bound_ratio", "update_ratio", "noop"),
)


class Plate(NamedTuple):
    """figure None: nothing to draw, and the caption says why. svg: the drawn figure."""

    figure: "Figure | None"
    caption: str
    svg: str = ""


def check_drawing() -> None:
    """Raise unless the packages that draw are installed."""
    for package in ("matplotlib", "jinja2"):
        try:
            __import__(package)
        except ImportError:
            raise AnalysisError(f"reports need {package}: pip install 'sinkdlm[viz]'") from None


@contextmanager
def styled() -> Iterator[None]:
    """Draw with our matplotlib settings; the user's own are restored."""
    check_drawing()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def drawn(draw: Callable[_P, Plate]) -> Callable[_P, Plate]:
    @functools.wraps(draw)
    def in_style(*args: _P.args, **kwargs: _P.kwargs) -> Plate:
        with styled():
            plate = draw(*args, **kwargs)
            if plate.figure is None:
                return plate
            svg = _to_svg(plate.figure)
            plate.figure.set_layout_engine(None)  # keep the layout found for the SVG; an engine would lay the PNG out again
            return plate._replace(svg=svg)

    return in_style


def _to_svg(figure: "Figure") -> str:
    held = BytesIO()
    figure.savefig(held, format="svg", dpi=200, metadata={"Date": None, "Creator": None})
    return held.getvalue().decode()


def pair_maps(capture: Capture) -> list[list[dict[str, Any]]]:
    """All maps in lists of at most two for a figure: maps of one head side by side, in the order of steps."""
    ordered = sorted(capture["maps"], key=itemgetter("number", "layer", "head", "step"))
    of_heads = [list(own) for _, own in groupby(ordered, key=itemgetter("number", "layer", "head"))]
    return [own[begin : begin + 2] for own in of_heads for begin in range(0, len(own), 2)]


@drawn
def figure1(capture: Capture, maps: Sequence[Mapping[str, Any]], *, norms: bool = True) -> Plate:
    """Draw attention maps at one or two steps with their sink columns, and value norms of sinks and other tokens."""
    scatter = capture["scatter"]
    groups = [
        (label, colour, scatter[group], scatter[f"{group}_mean"], scatter[f"n_{group}"])
        for group, (label, colour) in _GROUPS.items()
        if norms and scatter[group]
    ]
    if not maps and not groups:
        return Plate(None, f"Figure 1 of {quoted(capture)}: no attention map and no value norms were captured.")
    kinds = ["map"] * len(maps) + ["plot"] * bool(groups)
    figure, axes = panels(kinds, 3.5, small=kinds == ["map"])
    captions = []
    if maps:
        limit = max(np.max(one["weights"]) for one in maps)
        for axis, one in zip(axes, maps, strict=False):
            image = _draw_map(axis, one, limit)
        marks = [mark for mark in (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1) if mark <= limit]
        add_bar(figure, image, axes[: len(maps)], "attention", ticks=marks, **_BELOW)
        first = maps[0]
        captions.append(
            f"Attention of layer {first['layer']}, head {first['head']} in trajectory {first['number']} at "
            f"{'step' if len(maps) == 1 else 'steps'} {' and '.join(str(one['step']) for one in maps)}; "
            f"triangles mark content sinks (more than {_threshold(capture)}) and the sink token. The colour scale is a square root."
        )
    else:
        captions.append("No attention map was captured.")
    if groups:
        _draw_norms(axes[-1], groups)
        means = "; ".join(f"{label} {write_number(mean)} (n = {n:,})" for label, _, _, mean, n in groups)
        captions.append(f"Value norms (eq. 16), mean: {means}.")
        if any(n > len(values) for _, _, values, _, n in groups):
            captions.append(f"At most {max(len(values) for _, _, values, _, _ in groups):,} points of each kind are drawn.")
    if norms and not scatter["sink"]:
        captions.append(f"No token of the text is a content sink: none receives more than {_threshold(capture)}.")
    return Plate(figure, f"{quoted(capture)}. {' '.join(captions)}")


def _draw_map(axis: "Axes", one: Mapping[str, Any], limit: float) -> Any:
    from matplotlib.colors import PowerNorm

    weights = np.asarray(one["weights"])
    length, n_sinks = weights.shape[0], one["n_sinks"]
    image = axis.imshow(
        weights,
        norm=PowerNorm(0.5, vmin=0, vmax=limit),
        cmap="cividis",
        aspect="auto",  # panels are nearly square; a fixed aspect would leave the layout no room for names above them
        extent=(-n_sinks - 0.5, length - 0.5, length - 0.5, -0.5),
        interpolation="none" if length <= 256 else "auto",
    )
    if n_sinks:
        axis.axvline(-0.5, color="white", linewidth=0.8)
    above = axis.get_xaxis_transform()
    marks = [(float(-(n_sinks + 1) / 2), "sink token" if n_sinks == 1 else "sink tokens", LANE)] if n_sinks else []
    marks += [(float(place), shown(one["labels"][place]), SINK) for place in one["sinks"]]
    upright: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "bottom", "size": 7, "parse_math": False}
    last = -length
    for place, label, colour in marks:
        axis.plot([place], [1.02], "v", markersize=4, color=colour, transform=above, clip_on=False)
        if place - last >= 0.05 * length:  # leave out names that would overlap
            axis.text(place, 1.05, label, color=colour, transform=above, **upright)
            last = place
    name_axes(axis, f"step {one['step']}: key", "query", most=5)
    axis.set_xlim(-n_sinks - 0.5, length - 0.5)
    return image


def _draw_norms(axis: "Axes", groups: Sequence[tuple[str, str, list[float], float | None, int]]) -> None:
    for place, (_, colour, values, mean, _) in enumerate(groups):
        across = place + 0.7 * ((np.arange(len(values)) * 0.6180339887) % 1 - 0.5)  # spread evenly, the same each time
        faint = min(0.5, max(0.1, 400 / len(values)))
        axis.plot(across, values, ".", markersize=2.2, markeredgewidth=0, color=colour, alpha=faint, rasterized=True)
        if mean is not None:
            axis.plot([place - 0.42, place + 0.42], [mean, mean], color=INK, linewidth=1.2)
            box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
            above: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "va": "bottom"}
            axis.annotate(write_number(mean), (place, mean), size=8, weight="bold", bbox=box, **above)
    axis.set_xticks(range(len(groups)), [f"{label.replace(' ', chr(10))}\nn =\n{n:,}" for label, _, _, _, n in groups])
    axis.set(ylabel="value norm", ylim=(0, None), xlim=(-0.55, len(groups) - 0.45))


@drawn
def figure3(captures: Sequence[Capture]) -> Plate:
    """Draw per layer: the share of attention on the model's own sinks, how many heads have a content sink, and value norms."""
    norms = [(c, name) for c in captures for name in _NORMS if layers_of(c, name)]
    shares = {name: [c for c in captures if c["model"]["n_sinks"] or name not in OF_SINKS] for name in _SHARES}
    shares = {name: [c for c in having if layers_of(c, name)] for name, having in shares.items()}
    shares = {name: having for name, having in shares.items() if having}
    if not norms:
        return Plate(None, "Figure 3: no value norm was measured.")
    from matplotlib.ticker import PercentFormatter

    figure, axes = panels(["plot"] * (1 + len(shares)), 2.7)
    colours = {c["name"]: COLOURS[place % len(COLOURS)] for place, c in enumerate(captures)}
    for axis, (name, having) in zip(axes, shares.items(), strict=False):
        for c in having:
            _draw_layers(axis, c["quantities"][name]["layers"], colours[c["name"]], "-", "o")
        axis.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    for c, name in norms:
        _draw_layers(axes[-1], c["quantities"][name]["layers"], colours[c["name"]], *_NORMS[name][1:])
    for axis, label in zip(axes, [*(QUANTITIES[name].label for name in shares), "value norm"], strict=True):
        name_axes(axis, "layer", label, whole="x")
        axis.set_ylim(0, None)
    keys = [(quoted(c), {"color": colours[c["name"]], "linewidth": 3}) for c in captures]
    looks = [look for name, look in _NORMS.items() if any(name == own for _, own in norms)]
    keys += [(label, {"color": FAINT, "linestyle": line, "marker": marker}) for label, line, marker in looks]
    add_legend(figure, keys)
    caption = "" if "sink_mass" in shares else "No checkpoint has a sink token. "
    caption += f"By layer: {', '.join(QUANTITIES[name].label for name in shares)}, value norms (eq. 16). "
    caption += f"{_sizes(captures)} Bands are 95 % intervals over trajectories. "
    caption += f"Content sinks receive more than {_threshold(captures[0])}."
    return Plate(figure, caption)


def _draw_layers(axis: "Axes", layers: Sequence[Mapping[str, Any]], colour: str, line: str, marker: str) -> None:
    mean, low, high = (np.array([np.nan if one[part] is None else one[part] for one in layers]) for part in ("mean", "low", "high"))
    axis.fill_between(range(len(layers)), low, high, color=colour, alpha=0.18, linewidth=0)
    axis.plot(range(len(layers)), mean, color=colour, linestyle=line, marker=marker, markersize=3, linewidth=1.2)


@drawn
def trajectory(capture: Capture) -> Plate:
    """Draw the token that receives most attention in each layer at each step, over what is still [MASK]."""
    name = f"Path of the most attended token in {quoted(capture)}"
    if not capture["paths"]:
        return Plate(None, f"{name}: no path was captured.")
    path = capture["paths"][0]
    top, received = (np.asarray(path[part], dtype=float) for part in ("top", "received"))  # (E, N); null is not a number
    n_layers, n_steps = top.shape
    if n_steps < 2:
        return Plate(None, f"{name}: the trajectory has only one step, and nothing can move.")
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    masked = np.asarray(path["masked"]).T  # (T, N)
    clear = "text" if capture["settings"]["inputs"] == "noise" else "written"
    grounds = {"given": "#d7e6f2", clear: "#ffffff", "[MASK]": "#dcdcdc"}
    ground = np.where(masked, 2, 1)
    ground[: path["n_prompt"]] = 0
    figure, (axis,) = panels(["plot"], 4.0)
    axis.imshow(
        ground, cmap=ListedColormap(list(grounds.values())), vmin=0, vmax=2, aspect="auto", interpolation="nearest", rasterized=True
    )
    colours = ListedColormap(colormaps["viridis"](np.linspace(0, 0.88, n_layers)))  # the brightest would vanish on white
    offsets = (np.arange(n_layers) - (n_layers - 1) / 2) / max(1, n_layers) * 0.8  # lines on one token side by side
    steps = np.arange(n_steps)
    for layer in range(n_layers):
        axis.plot(steps, top[layer] + offsets[layer], color=colours(layer), linewidth=0.8, alpha=0.8)
        axis.scatter(steps, top[layer] + offsets[layer], s=90 * np.nan_to_num(received[layer]), color=colours(layer), linewidths=0)
    norm = BoundaryNorm(np.arange(n_layers + 1) - 0.5, n_layers)
    ticks = np.unique(np.linspace(0, n_layers - 1, 9).round())
    add_bar(figure, ScalarMappable(norm, colours), [axis], "layer", aspect=35, ticks=ticks)
    name_axes(axis, "step", "position in the row")
    there = [label for place, label in enumerate(grounds) if (ground == place).any()]
    patch = {"marker": "s", "markersize": 8, "markeredgecolor": FAINT, "markeredgewidth": 0.5, "linestyle": "none"}
    add_legend(figure, [(label, {"color": grounds[label], **patch}) for label in there])
    return Plate(
        figure,
        f"{quoted(capture)}. The token that receives most attention in each layer (mean over heads) at each of {n_steps} steps of "
        f"trajectory {path['number']} (n = 1 of {capture['n']['trajectories']}); the area of a dot shows how much it receives. "
        "Layers on the same token are drawn side by side.",
    )


def _heads_of(capture: Capture) -> dict[str, Any]:
    """Kind of share -> (E, H), for the kinds that the model has."""
    kinds = [kind for kind in _HEADS if capture["heads"].get(kind) and (kind != "lane" or capture["model"]["n_sinks"])]
    return {kind: np.asarray(capture["heads"][kind], dtype=float) for kind in kinds}


@drawn
def heads(capture: Capture, together: Sequence[Capture] = ()) -> Plate:
    """Draw how much each head attends to the model's own sinks, and how often it has a content sink. The colour scales end at the
    largest share of all the captures that are shown together."""
    found = _heads_of(capture)
    if not found:
        return Plate(None, f"Heads of {quoted(capture)}: no head was measured.")
    n_layers, n_heads = next(iter(found.values())).shape
    figure, axes = panels(["plot"] * len(found), min(5.0, max(2.2, 0.2 * n_layers + 1.2)), small=len(found) == 1)
    for axis, (kind, shares) in zip(axes, found.items(), strict=True):
        shown_with = [_heads_of(one).get(kind, shares) for one in (capture, *together)]
        top = max(float(np.nanmax(one, initial=0)) for one in shown_with) or 1.0
        image = axis.imshow(shares, vmin=0, vmax=top, cmap="cividis", aspect="auto", origin="lower", interpolation="none")
        axis.set_title(_HEADS[kind])
        name_axes(axis, "head", "layer")
        add_bar(figure, image, [axis], "share", ticks=[0, top / 2, top], **_BELOW)
        for (layer, head), share in np.ndenumerate(shares) if n_heads <= 8 and n_layers <= 16 else ():
            colour = "white" if share < 0.55 * top else "black"
            axis.text(head, layer, f"{share:.2f}", ha="center", va="center", size=6.5, color=colour)
    seen = f"{write_count(capture['n']['forwards'], 'forward')} of "
    seen += write_count(capture["n"]["trajectories"], "trajectory", "trajectories")
    caption = f"{quoted(capture)}. Every head of every layer, mean over {seen}. A colour scale ends at the largest share. "
    caption += "" if "lane" in found else "The model has no sink token. "
    return Plate(figure, f"{caption}A content sink is a token of the text that receives more than {_threshold(capture)}.")


@drawn
def forest(first: Capture, second: Capture, difference: Mapping[str, Any]) -> Plate:
    """Draw second minus first, quantity by quantity, with 95 % intervals."""
    totals = {name: difference["quantities"].get(name, {}).get("total", {}) for name in FOREST}
    totals = {name: one for name, one in totals.items() if all(defined(one.get(part)) for part in ("mean", "low", "high"))}
    title = f"{quoted(second)} minus {quoted(first)}"
    if not totals:
        return Plate(None, f"{title}: no quantity has an interval in both.")
    figure, (axis,) = panels(["plot"], 0.24 * len(totals) + 0.7)
    axis.axvline(0, color=FAINT, linewidth=0.8)
    for place, (name, one) in enumerate(totals.items()):
        scale = max(abs(one["low"]), abs(one["high"])) or 1.0
        sure = one["low"] > 0 or one["high"] < 0
        colour = NORMAL if sure else FAINT
        axis.plot([one["low"] / scale, one["high"] / scale], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
        axis.plot([one["mean"] / scale], [place], "o", markersize=5, color=colour, markerfacecolor=colour if sure else "white")
        value = write_interval(one, QUANTITIES[name].unit, signed=True)
        axis.text(1.02, place, value, ha="left", va="center", transform=axis.get_yaxis_transform(), size=7.5)
    axis.set_ylim(len(totals) - 0.5, -0.5)
    axis.set_yticks(range(len(totals)), [QUANTITIES[name].label for name in totals])
    axis.set_xticks([-1, 0, 1], ["less", "no difference", "more"])
    axis.set_xlim(-1.1, 1.1)
    axis.spines[["left"]].set_visible(False)
    axis.tick_params(left=False)
    pairing = "paired by trajectory" if difference["paired"] else "trajectories not paired"
    return Plate(
        figure,
        f"{title}: differences with 95 % intervals, {pairing}. Each row has its own scale; pp are "
        f"percentage points. Filled dots: the interval excludes zero. {_sizes((first, second))}",
    )


def draw_all(captures: Sequence[Capture], compared: Sequence[Comparison]) -> dict[str, Plate]:
    """Draw every figure of a report; name -> plate."""
    plates = {"layers": figure3(captures)}
    plates |= {f"difference-{file_name(one.second['name'])}": forest(*one[:3]) for one in compared}
    for capture in captures:
        own = file_name(capture["name"])
        first, *more = pair_maps(capture) or [[]]
        plates[f"maps-{own}"] = figure1(capture, first)
        for place, maps in enumerate(more, start=2):
            plates[f"maps-{own}~{place}"] = figure1(capture, maps, norms=False)
        plates[f"paths-{own}"] = trajectory(capture)
        plates[f"heads-{own}"] = heads(capture, captures)
    return plates


def file_name(name: str) -> str:
    """Letters, digits and -_. as they are, every other character as its code, so that different names stay different."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else f"~{ord(letter):x}" for letter in name)


def write_files(plates: Mapping[str, Plate], folder: Path) -> dict[str, dict[str, Path]]:
    """Write NAME.svg and NAME.png of every plate that has a figure; name -> suffix -> file."""
    written: dict[str, dict[str, Path]] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, (figure, _, svg) in plates.items():
        if figure is not None:
            written[name] = {suffix: folder / f"{name}.{suffix}" for suffix in ("svg", "png")}
            written[name]["svg"].write_text(svg, encoding="utf-8")
            with styled():
                figure.savefig(written[name]["png"], format="png", dpi=200)
    return written


def panels(kinds: Sequence[str], height: float, *, small: bool = False) -> tuple["Figure", list["Axes"]]:
    """A figure with panels in a row; a map is wider than a plot. small: half as wide, for a single panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SMALL if small else _WIDTH, height), layout="constrained")
    ratios = [1.0 if kind == "map" else 0.8 for kind in kinds]
    return figure, list(figure.subplots(1, len(kinds), width_ratios=ratios, squeeze=False).flat)


def name_axes(axis: "Axes", across: str, up: str, whole: str = "xy", most: int = 8) -> None:
    """Label both axes. whole: axes whose ticks are whole numbers, at most `most` of them."""
    from matplotlib.ticker import MaxNLocator

    axis.set(xlabel=across, ylabel=up)
    for which in whole:
        getattr(axis, f"{which}axis").set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))


def add_bar(figure: "Figure", image: Any, axes: list["Axes"], label: str, **look: Any) -> None:
    bar = figure.colorbar(image, ax=axes, **{"pad": 0.02, "fraction": 0.05, "aspect": 30, **look})
    bar.set_label(label)
    bar.outline.set_visible(False)


def add_legend(figure: "Figure", keys: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Add a legend under the axes. Labels are set last: a legend drops names that begin with _ and reads $ as mathematics."""
    from matplotlib.lines import Line2D

    names = [shown(name, 30) for name, _ in keys]
    columns = max(1, min(len(keys), 96 // (max(map(len, names)) + 7)))  # letters that fit beside each other
    handles = [Line2D([], [], **look) for _, look in keys]
    legend = figure.legend(handles, ["x"] * len(keys), loc="outside lower center", ncols=columns, handlelength=2.4)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


@functools.cache
def _glyphs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def shown(text: str, most: int = 14) -> str:
    """A token or a name as a figure can show it: signs for invisible characters, codes for those that the font lacks."""
    marks = {"\n": "\N{RETURN SYMBOL}", "\t": "\N{RIGHTWARDS ARROW TO BAR}", "\r": "\N{LEFTWARDS ARROW}"}
    text = text.strip(" ") or "\N{OPEN BOX}" * len(text) or "(empty)"
    text = "".join(marks.get(letter, letter) for letter in text)
    text = "".join(letter if ord(letter) in _glyphs() and letter.isprintable() else f"\\u{ord(letter):x}" for letter in text)
    tail = (most - 1) // 2  # names often differ at their ends
    return text if len(text) <= most else f"{text[: most - 1 - tail]}\N{HORIZONTAL ELLIPSIS}{text[-tail:]}"


def _threshold(capture: Capture) -> str:
    return f"{capture['settings']['threshold']:g}"


def _sizes(captures: Sequence[Capture]) -> str:
    counts = [f"{write_count(c['n']['trajectories'], 'trajectory', 'trajectories')} ({quoted(c)})" for c in captures]
    return f"n = {', '.join(counts)}."
