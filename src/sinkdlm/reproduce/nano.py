"""Inputs of the nano scale: the demo's small language, an autoregressive parent trained on it, and questions about it.

Questions take the benchmarks' places: the last words of stories for LAMBADA, stories with four endings for the choice tasks,
held-out sums for GSM8K. Takes minutes on one CPU thread; it shows the machinery, not the paper's effect.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from sinkdlm.checkpoint.directory import save
from sinkdlm.config.model import ModelConfig
from sinkdlm.config.recipe import DataSection
from sinkdlm.data.examples import MARK
from sinkdlm.data.rows import Rows, open_rows
from sinkdlm.demo import language
from sinkdlm.evals.requests import GENERATE, LOGLIKELIHOOD, Request, Sheet
from sinkdlm.evals.settings import Settings
from sinkdlm.model.model import DiffusionLM
from sinkdlm.noise import random_bits
from sinkdlm.reproduce.inputs import GOLD, Example, Inputs
from sinkdlm.reproduce.matrix import Scale

_SEED = 0  # of the language and the parent: data do not change with a run's seed
_KEY = 0x656E64696E67  # "ending": the noise key of options
_LENGTH, _BATCH, _STEPS, _LR = 32, 32, 150, 4e-3
_OPTIONS = 4
_WRITTEN = 200  # sums that are answered by sampling


def nano_inputs(scale: Scale, out: Path) -> Inputs:
    place = out.resolve()
    sets = language.write_sets(place / "data", _SEED)
    shape = {"vocab_size": len(language.vocabulary()), "context_length": 2 * _LENGTH}
    parent, tokenizer = place / "parent", language.word_tokenizer()
    if not parent.is_dir():
        save(parent, train_parent(ModelConfig.preset("nano", **shape), Path(sets["stories"])), tokenizer)
    held_out = language.problems(_SEED, held_out=True)[: scale.examples]
    examples = [Example(tokenizer.encode(one.question + one.answer), len(tokenizer.encode(one.question))) for one in held_out]
    return Inputs(
        Path(sets["stories"]),
        str(parent),
        Path(sets["sums"]),
        questions(),
        language.openings(max(scale.trajectories, 1), _SEED),
        examples,
        shape,
        {"corpus": language.digest(_SEED)},
    )


def train_parent(config: ModelConfig, folder: Path) -> DiffusionLM:
    """Train a causal model of the same shape by next-token prediction, which the diffusion loop lacks."""
    model = DiffusionLM(config, seed=_SEED)
    section = DataSection(sets={str(folder): 1.0}, length=_LENGTH)
    rows = open_rows(section, "train", seed=_SEED, vocab_size=config.vocab_size, mask_id=config.mask_id)
    assert isinstance(rows, Rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.01)
    for step in range(_STEPS):
        tokens = rows.batch(np.arange(step * _BATCH, (step + 1) * _BATCH)).tokens
        logits = model.head(model(tokens, causal=True))[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = _LR * (1 - step / _STEPS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def questions() -> Sheet:
    """Questions about stories and sums that are not trained on."""
    later = language.stories(language.N_STORIES + 400, _SEED)[language.N_STORIES :]
    texts = list(dict.fromkeys(later))[:200]
    requests: list[Request] = []
    gold: dict[str, list[Any]] = {"lambada_openai": [], "arc_easy": [], "gsm8k_two_stage": []}
    draws = random_bits(31, _SEED, _KEY, torch.arange(len(texts))[:, None], torch.arange(2)[None]).tolist()
    for number, text in enumerate(texts):
        context, _, last = text.removesuffix(".").rpartition(" ")
        requests.append(Request(LOGLIKELIHOOD, "lambada_openai", number, 0, context, f" {last}"))
        gold["lambada_openai"].append(0)
        place = draws[number][0] % _OPTIONS
        cut = text.rindex(". ") + 1
        start, last = text[:cut], text[cut:]
        colour = next(word for word in language.COLOURS if f" {word} " in last)  # the story so far decides which one is right
        rest = [word for word in language.COLOURS if word != colour]
        others = (rest[(draws[number][1] + turn) % len(rest)] for turn in range(_OPTIONS - 1))
        endings = [last.replace(f" {colour} ", f" {other} ") for other in others]
        endings.insert(place, last)
        for index, ending in enumerate(endings):
            divisors = {"acc": 1.0, "acc_norm": float(len(ending))}
            requests.append(Request(LOGLIKELIHOOD, "arc_easy", number, index, start, ending, divisors=divisors))
        gold["arc_easy"].append(place)
    for number, problem in enumerate(language.problems(_SEED, held_out=True)[:_WRITTEN]):
        generation = {"max_gen_toks": language.ANSWER, "temperature": 0.0}
        requests.append(Request(GENERATE, "gsm8k_two_stage", number, 0, problem.question, generation=generation))
        gold["gsm8k_two_stage"].append(f"{MARK} {problem.answer}")
    return Sheet(requests, {task: Settings(steps=language.ANSWER) for task in gold}, about={GOLD: gold})
