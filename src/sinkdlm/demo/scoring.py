"""The held-out sums: what each twin answers and looks at, how many are right, and whether the twins differ."""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import torch

from sinkdlm.analysis.intervals import LEVEL
from sinkdlm.demo.language import ANSWER, EOS, Problem
from sinkdlm.model.observe import Watcher
from sinkdlm.sampling import generate


def answer(lm: Any, questions: Sequence[str]) -> list[str]:
    """Digit by digit, the most confident first."""
    return [text[len(question) :] for text, question in zip(_write(lm, questions, ANSWER, steps=ANSWER), questions, strict=True)]


def tell_story(lm: Any, opening: str, length: int) -> str:
    (text,) = _write(lm, [opening], length - len(lm.tokenizer.encode(opening)), eos_id=lm.tokenizer.eos_token_id)
    return text.partition(EOS)[0]


def _write(lm: Any, prompts: Sequence[str], n: int, **more: Any) -> list[str]:
    """Each prompt, and n tokens after it."""
    rows = [lm.tokenizer.encode(prompt) for prompt in prompts]
    with lm.model.inference():
        asked = {"prompt": rows, "length": [len(row) + n for row in rows], "mask_id": lm.config.mask_id, "config": "llada"}
        found = generate(lm.model.denoiser(), **asked, temperature=0.0, **more)
    return [lm.tokenizer.decode(row) for row in found.rows]


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
    p = min(1.0, 2 * sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n)
    found = {"difference": (only_second - only_first) / len(problems), "only_first": only_first, "only_second": only_second}
    return found | {"p": p, "differ": p < 1 - LEVEL}


def compare_losses(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Of two means over the same draws, taken as if those were independent: the error is an upper estimate."""
    difference, stderr = second["loss"] - first["loss"], math.hypot(first["stderr"], second["stderr"])
    return {"difference": difference, "stderr": stderr, "differ": abs(difference) > 2 * stderr}
