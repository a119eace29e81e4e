"""The held-out sums: what each twin answers and looks at, how many are right, and whether the twins differ."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import torch

from sinkdlm.demo.language import ANSWER, Problem
from sinkdlm.model.observe import Watcher
from sinkdlm.sampling import generate

LEVEL = 0.95


def answer(lm: Any, questions: Sequence[str]) -> list[str]:
    """Digit by digit, the most confident first."""
    prompts = [lm.tokenizer.encode(question) for question in questions]
    with lm.model.inference():
        out = generate(
            lm.model.denoiser(),
            prompt=prompts,
            length=[len(prompt) + ANSWER for prompt in prompts],
            mask_id=lm.config.mask_id,
            config="llada",
            steps=ANSWER,
            temperature=0.0,
        )
    return [lm.tokenizer.decode(row[len(prompt) :]) for row, prompt in zip(out.rows, prompts, strict=True)]


def attention_on_sums(lm: Any, questions: Sequence[str]) -> list[dict[str, float]]:
    """Per layer, answers masked: the share of attention on the sink, where there is one, and on the most attended token."""
    mask_id = lm.config.mask_id
    tokens = torch.tensor([[*lm.tokenizer.encode(question), *[mask_id] * ANSWER] for question in questions])
    watcher = Watcher()
    with lm.model.inference():
        lm.model(tokens, observe=watcher)
    found = []
    for layer in watcher.layers:
        facts = {"top_content_share": float(layer.received.mean(1).amax(-1).mean())}
        found.append(facts | ({"sink_share": float(layer.sink_share.mean())} if layer.sink_received.shape[-1] else {}))
    return found


def tell_story(lm: Any, opening: str, length: int, seed: int) -> str:
    prompt = lm.tokenizer.encode(opening)
    with lm.model.inference():
        out = generate(
            lm.model.denoiser(),
            prompt=[prompt],
            length=length,
            mask_id=lm.config.mask_id,
            config="llada",
            temperature=0.0,
            seed=seed,
            eos_id=lm.tokenizer.eos_token_id,
        )
    row = out.rows[0]
    eos = lm.tokenizer.eos_token_id
    return lm.tokenizer.decode(row[: row.index(eos)] if eos in row else row)


def exact_match(answers: Sequence[str], problems: Sequence[Problem]) -> dict[str, Any]:
    right = sum(given == problem.answer for given, problem in zip(answers, problems, strict=True))
    low, high = share_interval(right, len(problems))
    return {"mean": right / len(problems), "low": low, "high": high, "right": right, "n": len(problems)}


def share_interval(count: int, n: int) -> tuple[float, float]:
    """Wilson's, which is sound near 0 and 1, where these shares are."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    centre = (count + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(count * (n - count) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def compare_answers(first: Sequence[str], second: Sequence[str], problems: Sequence[Problem]) -> dict[str, Any]:
    """Sums that one twin alone gets right; the sign test on them asks whether that could be a coin's doing."""
    rights = [(a == problem.answer, b == problem.answer) for a, b, problem in zip(first, second, problems, strict=True)]
    only_first, only_second = rights.count((True, False)), rights.count((False, True))
    n = only_first + only_second
    tail = sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n
    p = min(1.0, 2 * tail)
    return {
        "difference": (only_second - only_first) / len(problems),
        "only_first": only_first,
        "only_second": only_second,
        "p": p,
        "differ": p < 1 - LEVEL,
    }
