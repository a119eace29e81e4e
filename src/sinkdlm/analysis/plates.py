"""How figures of the analysis look and are kept: a plate, the style it is drawn in, panels, bars, legends and what text can show.

Figures have canvases of their own, in colours that the colour-blind can tell apart; what is drawn twice has the same bytes.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

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


class Plate(NamedTuple):
    """figure None: it cannot be drawn, and the caption says why. svg: the figure, drawn."""

    figure: "Figure | None"
    caption: str
    svg: str = ""


def check_drawing() -> None:
    """That what figures and reports need is installed."""
    for package in ("matplotlib", "jinja2"):
        try:
            __import__(package)
        except ImportError:
            raise AnalysisError(f"reports need {package}: pip install 'sinkdlm[viz]'") from None


@contextmanager
def styled() -> Iterator[None]:
    """Our settings, whatever the user's own are; theirs come back."""
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
            plate.figure.set_layout_engine(None)  # found, and kept: whatever engine there is has a file drawn twice
            return plate._replace(svg=svg)

    return in_style


def _to_svg(figure: "Figure") -> str:
    held = BytesIO()
    figure.savefig(held, format="svg", dpi=200, metadata={"Date": None, "Creator": None})
    return held.getvalue().decode()


def write(plates: Mapping[str, Plate], folder: Path) -> dict[str, dict[str, Path]]:
    """NAME.svg and NAME.png of every plate that has a figure; name -> suffix -> file."""
    written: dict[str, dict[str, Path]] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, (figure, _, svg) in plates.items():
        if figure is None:
            continue
        files = {suffix: folder / f"{name}.{suffix}" for suffix in ("svg", "png")}
        files["svg"].write_text(svg, encoding="utf-8")
        with styled():
            figure.savefig(files["png"], format="png", dpi=200)
        written[name] = files
    return written


# -- parts ----------------------------------------------------------------------------------------------------------------------


def panels(kinds: Sequence[str], height: float, *, small: bool = False) -> tuple["Figure", list["Axes"]]:
    """Panels in a row; a map is wider than a plot. small: of one panel, which would be stretched over the page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SMALL if small else _WIDTH, height), layout="constrained")
    ratios = [1.0 if kind == "map" else 0.8 for kind in kinds]
    return figure, list(figure.subplots(1, len(kinds), width_ratios=ratios, squeeze=False).flat)


def name_axes(axis: "Axes", across: str, up: str, whole: str = "xy", most: int = 8) -> None:
    """whole: axes whose marks are whole numbers, at most so many."""
    from matplotlib.ticker import MaxNLocator

    axis.set(xlabel=across, ylabel=up)
    for which in whole:
        getattr(axis, f"{which}axis").set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))


def add_bar(figure: "Figure", image: Any, axes: list["Axes"], label: str, **look: Any) -> None:
    bar = figure.colorbar(image, ax=axes, **{"pad": 0.02, "fraction": 0.05, "aspect": 30, **look})
    bar.set_label(label)
    bar.outline.set_visible(False)


def add_legend(figure: "Figure", keys: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Under the axes. Labels are set afterwards, because a legend leaves out names that begin with _ and reads $ as mathematics."""
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
    """A token or a name as a figure can show it: what has no visible form is named, what the font lacks is numbered."""
    marks = {"\n": "\N{RETURN SYMBOL}", "\t": "\N{RIGHTWARDS ARROW TO BAR}", "\r": "\N{LEFTWARDS ARROW}"}
    text = text.strip(" ") or "\N{OPEN BOX}" * len(text) or "(empty)"
    text = "".join(marks.get(letter, letter) for letter in text)
    text = "".join(letter if ord(letter) in _glyphs() and letter.isprintable() else f"\\u{ord(letter):x}" for letter in text)
    tail = (most - 1) // 2  # names often differ at their ends
    return text if len(text) <= most else f"{text[: most - 1 - tail]}\N{HORIZONTAL ELLIPSIS}{text[-tail:]}"
