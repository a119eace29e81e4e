"""Compare two models on the same texts: the paired difference in nats a token, with an interval, and what both write and attend to.

Both models see the same rows under the same masks: a mask is keyed by the seed, the document and the row, never by the model.
A document's nats are the bound that `score` computes with the same draws; in block diffusion `score` draws for each block instead,
with the same mean. The difference of two sums of nats, divided by the number of tokens, is a ratio; its interval is the bootstrap
of intervals.py over the documents (over rows, where there are too few documents), of the ratio's linear form. Takes models and rows
of tokens; knows no file of texts.

R rows, D masks of a row, U units (documents or rows).
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sinkdlm.analysis.capture import RULES, capture_noise
from sinkdlm.analysis.figures import COLOURS, FAINT, Plate, drawn, figure3, name_axes, panels
from sinkdlm.analysis.findings import OF_SINKS, sink_name, tell, total
from sinkdlm.analysis.glossary import QUANTITIES, Quantity, write_count, write_interval, write_number
from sinkdlm.analysis.intervals import MIN_TRAJECTORIES, mean_interval
from sinkdlm.analysis.kinds import classify
from sinkdlm.analysis.metrics import difference, measure, summarize
from sinkdlm.analysis.report import render
from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.errors import AnalysisError
from sinkdlm.likelihood.estimates import MIN_SETS
from sinkdlm.likelihood.estimators import roll
from sinkdlm.likelihood.mask_draws import content_key, draw_masks, noise_keys
from sinkdlm.likelihood.scoring import Query, Scorer, read_rows
from sinkdlm.sampling import Policy
from sinkdlm.text.generate import Job, write

FORMAT, VERSION = "sinkdlm-compare", 1
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # edges of the masked share
LENGTHS = (0, 64, 256, 1024, math.inf)  # edges of a document's number of tokens
NOISE = (0.75, 0.5, 0.25)  # masked shares under which attention is measured
SHOWN = ("sink_mass", "lane_heads", "sink_heads", "content_sinks", "sink_value_norm", "normal_norm")
_N_LOOKS, _LOOK_TOKENS = 16, 256  # rows whose attention is measured, and tokens of each
_PROMPT = 16  # tokens of a text that both models continue
_METHOD = (
    "Nats a token are upper bounds on minus the log-likelihood (exact_k), as sinkdlm score computes them. "
    "Differences are paired: both models see the same rows under the same masks. "
    "The 95 % interval is a bootstrap over {}s: it covers the choice of texts and masks."
)
_SEEDS = "This compares two training runs: with other seeds the difference may turn around."
_CHUNK = 8  # rows between two updates of the progress bar


class Document(NamedTuple):
    """tokens, of which the first n_given are not scored; number keys its noise."""

    tokens: Sequence[int]
    n_given: int
    number: int


class Row(NamedTuple):
    """A window of a document: what a forward sees. n_given: tokens in front that are not scored."""

    document: int
    place: int  # among the document's windows
    tokens: list[int]
    n_given: int
    key: int

    @property
    def n_scored(self) -> int:
        return len(self.tokens) - self.n_given


class Masks(NamedTuple):
    """Draws of one row: which of its scored tokens are masked (D, L), and what each draw weighs (D,)."""

    masked: np.ndarray
    weight: np.ndarray


def cut(documents: Sequence[Document], window: int, most: int) -> list[Row]:
    """Cut documents into the windows that `score` uses, in order, until `most` tokens are scored."""
    rows: list[Row] = []
    n_scored = 0
    for number, (tokens, n_given, name) in enumerate(documents):
        if not n_given < min(window, len(tokens)):
            continue  # its prompt alone fills a row
        for place, (begin, first, stop) in enumerate(roll(len(tokens), n_given, window, 1)):
            if rows and n_scored + stop - first > most:
                return rows
            part = list(tokens[begin:stop])
            rows.append(Row(number, place, part, first - begin, content_key(np.array([name, place, *part]))))
            n_scored += stop - first
    return rows


def draw(rows: Sequence[Row], draws: int, seed: int) -> list[Masks]:
    """The masks of each row, the same for every model."""
    keys, size = noise_keys(seed, [row.key for row in rows]), -(-draws // MIN_SETS)
    found = [draw_masks("exact_k", keys[i : i + 1], row.n_scored, range(MIN_SETS), size) for i, row in enumerate(rows)]
    return [Masks(masked[0], weight[0]) for masked, weight in found]


def losses(lm: Any, rows: Sequence[Row], masks: Sequence[Masks], budget: int, tick: Callable[[int], None]) -> np.ndarray:
    """(R, D) nats: minus the log-probability of each mask's tokens, given the rest of the row."""
    config, device = lm.config, lm.model.embed.weight.device
    scorer = Scorer(lm.model.denoiser(absent_ids(lm.tokenizer, config.vocab_size)), config.mask_id, 0.0, budget, False, device)
    scored = [[place >= row.n_given for place in range(len(row.tokens))] for row in rows]
    read = read_rows([row.tokens for row in rows], scored, config.mask_id)
    found = []
    for begin in range(0, len(rows), _CHUNK):
        queries = []
        for row, mask in zip(read[begin : begin + _CHUNK], masks[begin : begin + _CHUNK], strict=True):
            places = [row.targets[chosen] for chosen in mask.masked]
            queries += [Query(row, place, place) for place in places]
        with lm.model.inference():
            found.append(-scorer.sums(queries))
        tick(min(len(rows), begin + _CHUNK))
    return np.concatenate(found).reshape(len(rows), -1)


def attention(lm: Any, name: str, rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """What analyze measures on texts, of the first rows: a part of a capture."""
    config, looks = lm.config, [row.tokens[:_LOOK_TOKENS] for row in rows[:_N_LOOKS]]
    kinds = classify(lm.tokenizer, max(config.embedding_rows, config.mask_id + 1), config.mask_id)
    measured = [measure(one, kinds, seed=seed) for one in capture_noise(lm.model, looks, NOISE, seed=seed)]
    return {"name": name, "model": config.to_dict(), "settings": RULES._asdict(), **summarize(measured, seed)}


def unigram_entropy(rows: Sequence[Row]) -> float:
    """Nats a token of the scored tokens' own frequencies: what a model that ignores context cannot beat on them."""
    counts = np.unique(np.concatenate([row.tokens[row.n_given :] for row in rows]), return_counts=True)[1]
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def prompts_of(rows: Sequence[Row], count: int, tokenizer: Any, n_prefix: int) -> list[str]:
    """Beginnings of rows, in whole words, spread over them, for both models to continue; of an example, its prompt."""
    chosen = [rows[len(rows) * number // count] for number in range(min(count, len(rows)))]
    own = [row.place == 0 and row.n_given > n_prefix for row in chosen]  # examples have a prompt
    spans = [(n_prefix, row.n_given) if has else (row.n_given, row.n_given + _PROMPT) for row, has in zip(chosen, own, strict=True)]
    texts = [tokenizer.decode(row.tokens[begin:end]) for row, (begin, end) in zip(chosen, spans, strict=True)]
    return [text if has else _whole_words(text) for text, has in zip(texts, own, strict=True)]


def _whole_words(text: str) -> str:
    """Without the first word and a last one that may go on, which may be parts; at least a word."""
    behind = (text.split(maxsplit=1) or [text])[-1]
    return behind if behind[-1:].isspace() else (behind.rsplit(maxsplit=1) or [behind])[0]


def samples(lm: Any, prompts: Sequence[str], policy: Policy, length: int | None, seed: int, bos: bool | None) -> list[str]:
    """What `sample --prompts` writes, without the prompts."""
    if not prompts:
        return []
    found = write(lm, Job(prompts=list(prompts), length=length, seed=seed, bos=bos), policy)["samples"]
    return [sample["text"].removeprefix(prompt) for sample, prompt in zip(found, prompts, strict=True)]


class Sums(NamedTuple):
    """Nats of both models and the tokens they are of, for each unit: (U,) each."""

    first: np.ndarray
    second: np.ndarray
    tokens: np.ndarray

    def line(self, seed: int) -> dict[str, Any]:
        """Nats a token of both, and second minus first. The interval is of the ratio's linear form, whose mean is the ratio."""
        kept = self.tokens > 0
        gaps, tokens = (self.second - self.first)[kept], self.tokens[kept]
        n = float(tokens.sum())
        ratio = float(gaps.sum()) / n
        interval = mean_interval(ratio + (gaps - ratio * tokens) / tokens.mean(), seed=seed)
        means = {"first": float(self.first.sum()) / n, "second": float(self.second.sum()) / n}
        return {**means, "difference": {**interval, "mean": ratio}, "tokens": round(n)}


def paired(rows: Sequence[Row], masks: Sequence[Masks], nats: Sequence[np.ndarray], seed: int) -> dict[str, Any]:
    """Differences of two models' losses, in all, by masked share and by length."""
    documents = np.array([row.document for row in rows])
    names, unit_of = np.unique(documents, return_inverse=True)
    unit = "document" if len(names) >= MIN_TRAJECTORIES else "row"
    if unit == "row":
        names, unit_of = documents, np.arange(len(rows))
    weight, n_masked = np.stack([one.weight for one in masks]), np.stack([one.masked.sum(1) for one in masks])
    n_scored = np.array([row.n_scored for row in rows])

    def sums(per_row: np.ndarray) -> np.ndarray:
        return np.bincount(unit_of, per_row.astype(np.float64), len(names))

    def choose(chosen: np.ndarray) -> dict[str, Any]:
        """Of some masks (R, D): nats a masked token."""
        return Sums(*(sums((one * chosen).sum(1)) for one in (*nats, n_masked))).line(seed)

    bounds = [sums((weight * one).mean(1)) for one in nats]
    all_units = Sums(bounds[0], bounds[1], sums(n_scored))
    shares = n_masked / n_scored[:, None]
    by_share = {f"{100 * a:g} to {100 * b:g} %": (shares > a) & (shares <= b) for a, b in itertools.pairwise(SHARES)}
    lengths = all_units.tokens
    by_length = {_range(a, b): (lengths > a) & (lengths <= b) for a, b in itertools.pairwise(LENGTHS)}
    return {
        "unit": unit,
        "total": all_units.line(seed),
        "n_lower": int((bounds[1] < bounds[0]).sum()),
        "by_share": {name: choose(chosen) for name, chosen in by_share.items() if chosen.any()},
        "by_length": {name: Sums(*(x[kept] for x in all_units)).line(seed) for name, kept in by_length.items() if kept.any()},
        "units": [
            {"document": int(name), "tokens": int(n), "first": float(a), "second": float(b)}
            for name, a, b, n in zip(names, *all_units, strict=True)
        ],
    }


def _range(above: float, most: float) -> str:
    return f"more than {above:,}" if most == math.inf else f"{above + 1:,} to {most:,}"


class Side(NamedTuple):
    """What was measured of one model."""

    name: str
    source: str
    nats: np.ndarray
    attention: dict[str, Any]
    texts: list[str]


class Grid(NamedTuple):
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Comparison:
    """The second model against the first, as JSON, as a page and as text."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        rows: Sequence[Row],
        masks: Sequence[Masks],
        prompts: Sequence[str],
        settings: Mapping[str, Any],
    ) -> None:
        self.sides, self.prompts, self.settings = sides, prompts, settings
        self.found = paired(rows, masks, [side.nats for side in sides], settings["seed"])
        self.gaps = difference(sides[0].attention, sides[1].attention, settings["seed"])["quantities"]
        self.names = [side.name for side in sides]
        unit, n_units = self.found["unit"], len(self.found["units"])
        counts = [write_count(len({row.document for row in rows}), "document"), write_count(len(rows), "row")]
        counts.append(write_count(self.found["total"]["tokens"], "token"))
        counts.append(f"{masks[0].masked.shape[0]} masks a row, the same for both")
        lower = f"{self.found['n_lower']:,} of {write_count(n_units, unit)}"
        gap = write_interval(self.found["total"]["difference"], signed=True)
        self.versus = f"{self.names[1]} \N{MINUS SIGN} {self.names[0]}"
        self.lede = f"{self.versus}: {gap} nats a token. {self.names[1]} has the lower loss on {lower}. {', '.join(counts)}."
        told = []
        for side in (one for one in sides if one.attention["model"]["n_sinks"]):
            share = tell(total(side.attention, "sink_mass"), "sink_mass")
            told.append(f"{side.name} puts {share} of its attention on its {sink_name(side.attention)}.")
        self.caution = " ".join([_SEEDS, *told])
        self.unigram = unigram_entropy(rows)
        notes = [_METHOD.format(unit)]
        if unit == "row":
            notes.append(f"With fewer than {MIN_TRAJECTORIES} documents it says nothing of other documents.")
        if n_units < MIN_TRAJECTORIES:
            notes.append(f"There is none with fewer than {MIN_TRAJECTORIES} rows.")
        self.method = " ".join(notes)

    @property
    def title(self) -> str:
        first, second = self.names
        gap = self.found["total"]["difference"]
        size = f"{write_number(abs(gap['mean']))} nats a token"
        if gap["low"] is None:
            return f"{second} minus {first}: {write_interval(gap, signed=True)} nats a token, with too few texts for an interval"
        if gap["low"] <= 0 <= gap["high"]:
            return f"No difference shown between {first} and {second}"
        better, worse = (second, first) if gap["mean"] < 0 else (first, second)
        return f"{better} predicts these texts better than {worse}, by {size}"

    def to_dict(self) -> dict[str, Any]:
        keep = ("quantities", "n")
        return {
            "format": FORMAT,
            "version": VERSION,
            "models": [{"name": one.name, "source": one.source, "config": one.attention["model"]} for one in self.sides],
            "settings": dict(self.settings),
            **self.found,
            "unigram_entropy": self.unigram,
            "attention": {
                "models": [{name: one.attention[name] for name in keep} for one in self.sides],
                "difference": {name: gap["total"] for name, gap in self.gaps.items()},
            },
            "samples": [{"prompt": prompt, "first": a, "second": b} for prompt, a, b in self.written()],
        }

    def written(self) -> list[tuple[str, str, str]]:
        return list(zip(self.prompts, *(side.texts for side in self.sides), strict=True))

    def grids(self) -> Iterator[Grid]:
        head = [*self.names, self.versus, "tokens"]
        unit = self.found["unit"]
        for title, lines in (
            ("Nats a token", {"all texts": self.found["total"]}),
            ("Nats a masked token, by masked share", self.found["by_share"]),
            (f"Nats a token, by tokens of a {unit}", self.found["by_length"]),
        ):
            if lines is self.found["by_length"] and len(lines) == 1:
                continue  # all texts again
            cells = [
                [
                    f"{one['first']:.4f}",
                    f"{one['second']:.4f}",
                    write_interval(one["difference"], signed=True),
                    f"{one['tokens']:,}",
                ]
                for one in lines.values()
            ]
            found = [[name, *row] for name, row in zip(lines, cells, strict=True)]
            if lines is not self.found["by_length"]:  # what a model without context reaches
                found.append(["unigram entropy", *[f"{self.unigram:.4f}"] * 2, "", ""])
            yield Grid(title, ["", *head], found)
        rows = []
        for name in SHOWN:
            captures = [side.attention for side in self.sides]
            having = [name not in OF_SINKS or bool(one["model"]["n_sinks"]) for one in captures]
            values = [tell(total(one, name), name) if has else "none" for one, has in zip(captures, having, strict=True)]
            gap = tell(self.gaps[name]["total"], name, signed=True) if all(having) else ""
            rows += [[QUANTITIES[name].label, *values, gap]] if any(having) else []
        n_looks = self.sides[0].attention["n"]["trajectories"]
        yield Grid(f"Attention, mean over layers and over {write_count(n_looks, 'row')} under noise", ["", *head[:3]], rows)

    def quantities(self) -> list[Quantity]:
        return [QUANTITIES[name] for name in SHOWN]

    def write(self, out: Path) -> dict[str, Path]:
        """Write compare.html and compare.json into a folder."""
        paths = {name: out / f"compare.{name}" for name in ("html", "json")}
        try:
            paths["json"].write_text(self.to_json(), encoding="utf-8")
            paths["html"].write_text(self.page(), encoding="utf-8")
        except OSError as failure:
            raise AnalysisError(f"{out}: cannot be written: {failure.strerror}; choose another folder with --out") from None
        return paths

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def page(self) -> str:
        """One HTML file that needs no network."""
        plates = {"differences": draw_differences(self.found, self.names)}
        plates["layers"] = figure3([side.attention for side in self.sides])
        return render("compare", comparison=self, plates=plates)


def _with_interval(lines: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in lines.items() if one["difference"]["low"] is not None}


@drawn
def draw_differences(found: Mapping[str, Any], names: Sequence[str]) -> Plate:
    """Draw second minus first by masked share and by length, with intervals."""
    parts = [("masked share", found["by_share"]), (f"tokens of a {found['unit']}", found["by_length"])]
    parts = [(label, sure) for label, lines in parts if len(sure := _with_interval(lines)) > 1] or parts[:1]
    figure, axes = panels(["plot"] * len(parts), 2.7)
    for axis, (label, lines) in zip(axes, parts, strict=True):
        axis.axhline(0, color=FAINT, linewidth=0.8)
        for place, one in enumerate(lines.values()):
            gap = one["difference"]
            if gap["low"] is not None:
                axis.plot([place, place], [gap["low"], gap["high"]], color=COLOURS[0], linewidth=2, solid_capstyle="butt")
            axis.plot([place], [gap["mean"]], "o", color=COLOURS[0], markersize=5)
        name_axes(axis, label, "nats a masked token" if label == parts[0][0] else "nats a token", whole="")
        axis.set_xticks(range(len(lines)), [name.replace(" to ", "\N{EN DASH}").replace("more than ", ">") for name in lines])
        axis.set_xlim(-0.6, len(lines) - 0.4)
    caption = f"{names[1]} minus {names[0]}, with 95 % intervals; below 0, {names[1]} predicts better."
    return Plate(figure, caption)
