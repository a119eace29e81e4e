"""What is measured of a trained model: documents, questions, held-out answers, attention. Each a stage that yields outcomes.

Variants are scored on the same items under the same noise. Needs the core packages alone: a machine with a GPU has no harness.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinkdlm.analysis.study import Plan, study
from sinkdlm.data.examples import MARK
from sinkdlm.evals.answering import Answerer, answer_sheet, forward_tokens
from sinkdlm.evals.gsm8k import extract_answer, normalise
from sinkdlm.evals.requests import GENERATE, Request, Sheet, by_question
from sinkdlm.evals.responses import Journal, Response
from sinkdlm.likelihood import log_likelihood
from sinkdlm.model.attention import attend_naive
from sinkdlm.reproduce.claims import ANSWERS, NELBO
from sinkdlm.reproduce.inputs import GOLD, Inputs
from sinkdlm.reproduce.matrix import Scale
from sinkdlm.reproduce.results import Outcome
from sinkdlm.sampling import policy_of

SCORING_SEED = 20_260_127  # of every run: pairs share their masks
_LAYERS = ("sink_mass", "sink_value_norm", "normal_norm", "content_sink_norm", "sink_heads", "turnover", "update_ratio")
_OF_SINKS = ("sink_mass", "lane_heads", "middle_sink_times")
_BINS = 24
ROWS, ENDS, WRITES = "rows", "ends", "writes"  # outcomes of documents that are cut
_CUT_ROWS, _WRITTEN_ROWS = 128, 8


class Found(NamedTuple):
    """layers, told: of attention alone."""

    outcomes: Mapping[str, Outcome] = {}
    layers: Mapping[str, list[float | None]] = {}
    told: Mapping[str, Any] = {}


class Model(NamedTuple):
    """A trained run. first: the id that stood first in its training rows, which it is given here as well."""

    lm: Any
    first: int | None

    @property
    def device(self) -> torch.device:
        return self.lm.model.embed.weight.device

    def score(self, rows: list[list[int]], n_given: list[int], draws: int) -> np.ndarray:
        """Nats of what follows the given tokens of each row."""
        front = [] if self.first is None else [self.first]
        given = [len(front) + n for n in n_given]
        framed = [[*front, *row] for row in rows]
        scored = [[place >= n for place in range(len(row))] for row, n in zip(framed, given, strict=True)]
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
        return -np.asarray(found.mean, dtype=np.float64)


def score_documents(model: Model, inputs: Inputs, scale: Scale, length: int) -> Found:
    rows = inputs.documents(scale.documents, length)
    nats = model.score(rows, [0] * len(rows), scale.draws)
    return Found({NELBO: Outcome.of_items(nats, sum(map(len, rows)))})


def score_cuts(model: Model, inputs: Inputs, scale: Scale) -> Found:
    """Documents cut to several lengths, those of training the last. The whole row; its last tokens, given the others, which are the
    same tokens at every length, as options of questions are; and how much heads write."""
    longest, n_last = scale.cuts[-1], scale.cuts[0] // 2
    documents = inputs.documents(scale.documents, longest)
    full = [document for document in documents if len(document) == longest][:_CUT_ROWS]
    outcomes = {}
    for length in scale.cuts:
        rows = [document[:length] for document in documents if len(document) >= length][:_CUT_ROWS]
        if rows:
            nats = model.score(rows, [0] * len(rows), scale.draws)
            outcomes[f"{ROWS}.{length}"] = Outcome.of_items(nats, length * len(rows))
            outcomes[f"attention.{WRITES}.{length}"] = Outcome.of_value(_writes(model, rows[:_WRITTEN_ROWS]))
        if full:
            nats = model.score([row[-length:] for row in full], [length - n_last] * len(full), scale.draws)
            outcomes[f"{ENDS}.{length}"] = Outcome.of_items(nats, n_last * len(full))
    return Found(outcomes)


def _writes(model: Model, rows: list[list[int]]) -> float:
    """The norm of what a head writes, of the mean norm of the values it mixes: 0 where it writes nothing, 1 where it copies.

    A gate is part of it. Half of the tokens are masked. Mean over rows, tokens, heads and layers.
    """
    lm, shares = model.lm, list[float]()
    entered: dict[int, Tensor] = {}  # layer -> what its attention read, which its gate reads too

    def enter(module: Any, given: tuple[Any, ...]) -> None:
        entered[module.layer] = given[0]

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None, sink_v: Tensor | None) -> None:
        attention = lm.model.blocks[layer].attention
        mixed, _ = attend_naive(q, k, v, sink_k, sink_v, sink_logit=attention.sink_logit)  # (B, H, T, D)
        if attention.gate is not None:
            gate = torch.sigmoid(attention.gate(entered.pop(layer))).unflatten(-1, (attention.n_heads, -1))
            mixed = mixed * gate.transpose(1, 2)
        shares.append(float(mixed.float().norm(dim=-1).mean() / v.float().norm(dim=-1).mean()))

    hidden = torch.rand(len(rows), len(rows[0]), generator=torch.Generator().manual_seed(0)) < 0.5
    tokens = torch.tensor(rows).masked_fill(hidden, lm.config.mask_id)
    hooks = [block.attention.register_forward_pre_hook(enter) for block in lm.model.blocks if block.attention.gate is not None]
    try:
        with lm.model.inference():
            for row in tokens:  # one at a time: maps of all queries and keys are large
                framed = row if model.first is None else torch.cat([row.new_tensor([model.first]), row])
                lm.model(framed[None].to(model.device), observe=observe)
    finally:
        for hook in hooks:
            hook.remove()
    return float(np.mean(shares))


def score_answers(model: Model, inputs: Inputs, scale: Scale) -> Found:
    """Held-out examples of fine-tuning: the response, given its prompt."""
    rows, given = [one.tokens for one in inputs.examples], [one.n_prompt for one in inputs.examples]
    nats = model.score(rows, given, scale.draws)
    return Found({ANSWERS: Outcome.of_items(nats, sum(map(len, rows)) - sum(given))})


# -- questions -----------------------------------------------------------------------------------------------------------------


def ask(model: Model, sheet: Sheet, task: str) -> Found:
    if model.first is not None:  # prompts begin with what rows began with
        model.lm.tokenizer.bos_token = model.lm.tokenizer.convert_ids_to_tokens(model.first)
        sheet = replace(sheet, settings={task: replace(sheet.settings[task], bos=True)})
    with Journal(None, {}) as journal:
        answers = answer_sheet(Answerer(model.lm, sheet), journal, quiet=True)
    if sheet.requests[0].kind == GENERATE:
        return _judge_texts(sheet, answers, task)
    return _judge_options(sheet, answers, task)


def _judge_options(sheet: Sheet, answers: Mapping[Any, Response], task: str) -> Found:
    """NLL of the right option; where there are several, whether it wins, plain and by length as the harness divides."""
    nll, n_tokens, right = [], 0, dict[str, list[float]]()
    for question in by_question(sheet.requests):
        gold = sheet.about[GOLD][question[0].doc]
        if gold is None:  # a document without a right option, or with several
            continue
        own = [answers[request.key] for request in question]
        nll.append(-float(own[gold].value or 0.0))
        n_tokens += own[gold].n_tokens
        if len(own) == 1:
            right.setdefault("greedy", []).append(float(bool(own[0].greedy)))
            continue
        for metric in question[0].divisors or {"acc": 1.0}:
            right.setdefault(metric, []).append(float(_winner(question, own, metric) == gold))
    outcomes = {f"{task}.nll": Outcome.of_items(nll, n_tokens)}
    return Found(outcomes | {f"{task}.{name}": Outcome.of_items(values, len(values)) for name, values in right.items()})


def _winner(question: list[Request], own: list[Response], metric: str) -> int:
    values = [float(one.value or 0.0) / request.divisors.get(metric, 1.0) for one, request in zip(own, question, strict=True)]
    return values.index(max(values))


def _judge_texts(sheet: Sheet, answers: Mapping[Any, Response], task: str) -> Found:
    """Numbers alone are compared: the benchmark's answers are numbers, and algebra needs a package that is not here."""
    right = []
    for request in sheet.requests:
        written = answers[request.key].text
        written = extract_answer(written) if MARK in written else written
        right.append(float(_same_number(extract_answer(sheet.about[GOLD][request.doc]), written)))
    return Found({f"{task}.exact_match": Outcome.of_items(right, len(right))})


def _same_number(gold: str, written: str) -> bool:
    try:
        return float(normalise(gold)) == float(normalise(written))
    except ValueError:
        return False


# -- attention ----------------------------------------------------------------------------------------------------------------


def watch(model: Model, inputs: Inputs, scale: Scale) -> Found:
    """Trajectories of the model as it writes: every quantity of the analysis, per layer where a figure shows layers."""
    lm, front = model.lm, [] if model.first is None else [model.first]
    room = lm.config.context_length - scale.written
    prompts = [[*front, *lm.tokenizer.encode(prompt, add_special_tokens=False)][:room] for prompt in inputs.prompts]
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
    absent = () if lm.config.n_sinks else _OF_SINKS  # what a model has none of is not 0 of it
    known = {name: value for name, value in values.items() if value is not None and name not in absent}
    outcomes = {f"attention.{name}": Outcome.of_value(value) for name, value in known.items()}
    layers = {name: [_short(layer["mean"]) for layer in quantities[name]["layers"]] for name in _LAYERS}
    return Found(outcomes, layers, {"norms": _histogram(found["scatter"]), "path": _path(found["paths"])})


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def middle_layers(n: int) -> slice:
    """The middle half, where the paper looks."""
    return slice(n // 4, max(n // 4 + 1, n - n // 4))


def _middle(found: Mapping[str, Any]) -> dict[str, float]:
    """Of the middle layers: attention on the sink against an even share, its norm too."""
    quantities = found["quantities"]
    mass, ratio = ([layer["mean"] for layer in quantities[name]["layers"]] for name in ("sink_mass", "lane_norm_ratio"))
    middle = middle_layers(len(mass))
    rows = found["trajectories"]
    keys = sum(row["length"] for row in rows) / len(rows) + 1
    told = {}
    if all(value is not None for value in mass[middle]):
        told["middle_sink_times"] = float(np.mean(mass[middle])) * keys
    if all(value is not None for value in ratio[middle]):
        told["middle_norm_ratio"] = float(np.mean(ratio[middle]))
    return told


def _histogram(scatter: Mapping[str, Any]) -> dict[str, Any]:
    """Figure 1's value norms, as shares of each group in equal bins."""
    groups = {name: np.array(scatter[name]) for name in ("sink", "normal", "lane") if len(scatter[name])}
    top = max((float(values.max()) for values in groups.values()), default=1.0)
    told: dict[str, Any] = {"top": _short(top)}
    for name, values in groups.items():
        counts, _ = np.histogram(values, bins=_BINS, range=(0, top))
        told[name] = {"mean": _short(scatter[f"{name}_mean"]), "n": scatter[f"n_{name}"], "counts": counts.tolist()}
    return told


def _path(paths: list[dict[str, Any]]) -> dict[str, Any]:
    """Figure 1's moving sinks: the most attended token at each step, in the layer where attention is most concentrated."""
    first = paths[0]
    heights = [np.nanmean([math.nan if value is None else value for value in row]) for row in first["received"]]
    layer = int(np.nanargmax(heights))
    return {"layer": layer, "top": first["top"][layer], "received": [_short(value) for value in first["received"][layer]]}


Stage = Callable[[Model], Found]
