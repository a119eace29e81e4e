"""Measure a trained model: documents, questions, held-out answers, attention. Each measurement is a stage of a run.

Variants are scored on the same items with the same noise. Needs the core packages alone: a GPU machine may have no harness.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinkdlm.analysis.study import Plan, study
from sinkdlm.data.examples import MARK
from sinkdlm.evals.answering import Answerer, answer_sheet, forward_tokens
from sinkdlm.evals.gsm8k import extract_answer, normalise
from sinkdlm.evals.requests import GENERATE, Journal, Response, Sheet, by_question
from sinkdlm.evals.settings import settings_for
from sinkdlm.likelihood import log_likelihood
from sinkdlm.reproduce.claims import ANSWERS, NELBO
from sinkdlm.reproduce.inputs import GOLD, Inputs
from sinkdlm.reproduce.matrix import Scale
from sinkdlm.reproduce.results import Outcome
from sinkdlm.sampling import policy_of

SCORING_SEED = 20_260_127  # the same for every run, so that pairs share their masks
_LAYERS = ("sink_mass", "sink_value_norm", "normal_norm", "content_sink_norm", "sink_heads", "turnover", "update_ratio")
_OF_SINKS = ("sink_mass", "lane_heads", "middle_sink_times")
_BINS = 24
ROWS, ENDS, WRITES = "rows", "ends", "writes"  # outcomes of cut documents; "writes": see `_writes`
_CUT_ROWS, _WRITTEN_ROWS = 128, 8


class Found(NamedTuple):
    """What a stage found. layers and told: of attention alone."""

    outcomes: Mapping[str, Outcome] = {}
    layers: Mapping[str, list[float | None]] = {}
    told: Mapping[str, Any] = {}


class Model(NamedTuple):
    """A trained model. first: the id that began its training rows, and that begins its rows here as well."""

    lm: Any
    first: int | None

    @property
    def device(self) -> torch.device:
        return self.lm.model.embed.weight.device

    @property
    def front(self) -> list[int]:
        return [] if self.first is None else [self.first]

    def score(self, rows: list[list[int]], n_given: list[int], draws: int) -> Outcome:
        """NLL in nats of the tokens after the first `n_given` of each row."""
        framed = [[*self.front, *row] for row in rows]
        scored = [[place >= len(self.front) + n for place in range(len(row))] for row, n in zip(framed, n_given, strict=True)]
        with self.lm.model.inference():
            found = log_likelihood(
                self.lm.model.denoiser(),
                framed,
                scored,
                estimator="exact_k",
                draws=draws,
                mask_id=self.lm.config.mask_id,
                seed=SCORING_SEED,
                groups=list(range(len(rows))),
                budget=forward_tokens(self.device, self.lm.config.vocab_size),
                device=self.device,
            )
        return Outcome.of_items((-found.mean).tolist(), sum(map(len, rows)) - sum(n_given))


def score_documents(model: Model, inputs: Inputs, scale: Scale, length: int) -> Found:
    rows = inputs.documents(scale.documents, length)
    return Found({NELBO: model.score(rows, [0] * len(rows), scale.draws)})


def score_cuts(model: Model, inputs: Inputs, scale: Scale) -> Found:
    """Score documents cut to several lengths, the training length last: whole rows; the last tokens given the others, which are
    the same tokens at every length; and the norm of heads' outputs relative to that of the values (`_writes`)."""
    longest, n_last = scale.cuts[-1], scale.cuts[0] // 2
    documents = inputs.documents(scale.documents, longest)
    full = [document for document in documents if len(document) == longest][:_CUT_ROWS]
    outcomes = {}
    for length in scale.cuts:
        rows = [document[:length] for document in documents if len(document) >= length][:_CUT_ROWS]
        if rows:
            outcomes[f"{ROWS}.{length}"] = model.score(rows, [0] * len(rows), scale.draws)
            outcomes[f"attention.{WRITES}.{length}"] = Outcome.of_value(_writes(model, rows[:_WRITTEN_ROWS]))
        if full:
            ends = [row[-length:] for row in full]
            outcomes[f"{ENDS}.{length}"] = model.score(ends, [length - n_last] * len(full), scale.draws)
    return Found(outcomes)


def _writes(model: Model, rows: list[list[int]]) -> float:
    """The norm of a head's output, after any gate, relative to the layer's mean value norm: 0 for no output, 1 for a copied value.

    Half of the tokens are masked. Mean over rows, tokens, heads and layers.
    """
    lm, wrote, values = model.lm, list[float](), list[float]()

    def keep(module: Any, given: tuple[Tensor]) -> None:
        if given[0].shape[1] >= len(rows[0]):  # skip the lane's own output
            wrote.append(float(given[0].unflatten(-1, (lm.config.n_heads, -1)).float().norm(dim=-1).mean()))

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None, sink_v: Tensor | None) -> None:
        values.append(float(v.float().norm(dim=-1).mean()))

    hidden = torch.rand(len(rows), len(rows[0]), generator=torch.Generator().manual_seed(0)) < 0.5
    tokens = torch.tensor(rows).masked_fill(hidden, lm.config.mask_id)
    hooks = [block.attention.out.register_forward_pre_hook(keep) for block in lm.model.blocks]
    try:
        with lm.model.inference():
            for row in tokens.tolist():  # one at a time: maps of all queries and keys are large
                lm.model(torch.tensor([[*model.front, *row]], device=model.device), observe=observe)
    finally:
        for hook in hooks:
            hook.remove()
    return float(np.mean(np.array(wrote) / np.array(values)))


def score_answers(model: Model, inputs: Inputs, scale: Scale) -> Found:
    """Score the responses of held-out fine-tuning examples, given their prompts."""
    rows, given = [one.tokens for one in inputs.examples], [one.n_prompt for one in inputs.examples]
    return Found({ANSWERS: model.score(rows, given, scale.draws)})


def ask(model: Model, sheet: Sheet, task: str) -> Found:
    if model.first is not None:  # prompts begin as training rows did
        model.lm.tokenizer.bos_token = model.lm.tokenizer.convert_ids_to_tokens(model.first)
        sheet = replace(sheet, settings={task: sheet.settings[task].replace(bos=True)})
    with Journal(None, {}) as journal:
        answers = answer_sheet(Answerer(model.lm, sheet), journal, quiet=True)
    if sheet.requests[0].kind == GENERATE:
        return _judge_texts(sheet, answers, task)
    return _judge_options(sheet, answers, task)


def ask_officially(model: Model, sheet: Sheet, task: str, most: int) -> Found:
    """Score the first questions with the official estimator and guidance. Guided values are no NLLs: only their ranking is kept."""
    settings = {task: settings_for(task, {}).replace(greedy=sheet.settings[task].greedy)}
    first = [request for request in sheet.requests if request.doc < most]
    kept = ask(model, replace(sheet, requests=first, settings=settings), task).outcomes
    return Found({f"official.{name}": one for name, one in kept.items() if not name.endswith(".nll")})


def _judge_options(sheet: Sheet, answers: Mapping[Any, Response], task: str) -> Found:
    """NLL of the right option; with several options also whether it wins, plain and divided by length as in the harness."""
    nll, n_tokens, right = [], 0, dict[str, list[float]]()
    for question in by_question(sheet.requests):
        gold = sheet.about[GOLD][question[0].doc]
        if gold is None:  # a document without a right option, or with several
            continue
        own = [answers[request.key] for request in question]
        scores = [float(one.value or 0.0) for one in own]
        nll.append(-scores[gold])
        n_tokens += own[gold].n_tokens
        if len(own) == 1:
            right.setdefault("greedy", []).append(float(bool(own[0].greedy)))
            continue
        for metric in question[0].divisors or {"acc": 1.0}:
            values = [score / request.divisors.get(metric, 1.0) for score, request in zip(scores, question, strict=True)]
            right.setdefault(metric, []).append(float(values.index(max(values)) == gold))
    outcomes = {f"{task}.nll": Outcome.of_items(nll, n_tokens)}
    return Found(outcomes | {f"{task}.{name}": Outcome.of_items(values, len(values)) for name, values in right.items()})


def _judge_texts(sheet: Sheet, answers: Mapping[Any, Response], task: str) -> Found:
    """Compare numbers only: the benchmark's answers are numbers, and algebra would need another package."""
    right = []
    for request in sheet.requests:
        written = answers[request.key].text
        found = extract_answer(written) if MARK in written else written
        right.append(float(_number(extract_answer(sheet.about[GOLD][request.doc])) == _number(found)))
    return Found({f"{task}.exact_match": Outcome.of_items(right, len(right))})


def _number(answer: str) -> float:
    try:
        return float(normalise(answer))
    except ValueError:
        return math.nan  # equals nothing


def watch(model: Model, inputs: Inputs, scale: Scale) -> Found:
    """Analyse trajectories of the model: every quantity of the analysis, per layer where a figure shows layers."""
    lm = model.lm
    room = lm.config.context_length - scale.written
    prompts = [[*model.front, *lm.tokenizer.encode(prompt, add_special_tokens=False)][:room] for prompt in inputs.prompts]
    plan = Plan(
        prompts=prompts,
        policy=policy_of("llada", steps=scale.written, temperature=0.0),
        length=scale.written,
        interventions=False,
        batch=16,
    ).with_trajectories(min(scale.trajectories, len(prompts)))
    found = study(lm, plan, name="run", source="run", made={})
    quantities = found["quantities"]
    values = {name: one["total"]["mean"] for name, one in quantities.items()} | _middle(found)
    absent = () if lm.config.n_sinks else _OF_SINKS  # undefined without a sink, not 0
    known = {name: value for name, value in values.items() if value is not None and name not in absent}
    outcomes = {f"attention.{name}": Outcome.of_value(value) for name, value in known.items()}
    layers = {name: [short(layer["mean"]) for layer in quantities[name]["layers"]] for name in _LAYERS}
    return Found(outcomes, layers, {"norms": _histogram(found["scatter"]), "path": _path(found["paths"])})


def short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def middle_layers(n: int) -> slice:
    """The middle half, where the paper looks."""
    return slice(n // 4, max(n // 4 + 1, n - n // 4))


def _middle(found: Mapping[str, Any]) -> dict[str, float]:
    """In the middle layers: attention on the sink in even shares, and its norm ratio; left out where a layer has no value."""
    rows = found["trajectories"]
    keys = sum(row["length"] for row in rows) / len(rows) + 1
    told = {}
    for name, quantity, times in (("middle_sink_times", "sink_mass", keys), ("middle_norm_ratio", "lane_norm_ratio", 1.0)):
        layers = [layer["mean"] for layer in found["quantities"][quantity]["layers"]]
        middle = layers[middle_layers(len(layers))]
        if None not in middle:
            told[name] = float(np.mean(middle)) * times
    return told


def _histogram(scatter: Mapping[str, Any]) -> dict[str, Any]:
    """Figure 1's value norms, as shares of each group in equal bins."""
    groups = {name: np.array(scatter[name]) for name in ("sink", "normal", "lane") if len(scatter[name])}
    top = max((float(values.max()) for values in groups.values()), default=1.0)
    told: dict[str, Any] = {"top": short(top)}
    for name, values in groups.items():
        counts, _ = np.histogram(values, bins=_BINS, range=(0, top))
        told[name] = {"mean": short(scatter[f"{name}_mean"]), "n": scatter[f"n_{name}"], "counts": counts.tolist()}
    return told


def _path(paths: list[dict[str, Any]]) -> dict[str, Any]:
    """Figure 1's moving sinks: the most attended token at each step, in the layer where attention is most concentrated."""
    first = paths[0]
    layer = int(np.nanargmax(np.nanmean(np.array(first["received"], dtype=float), axis=1)))
    return {"layer": layer, "top": first["top"][layer], "received": [short(value) for value in first["received"][layer]]}
