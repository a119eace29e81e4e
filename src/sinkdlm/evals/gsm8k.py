"""GSM8K after fine-tuning: the official two-stage protocol, a one-stage protocol, and when two answers are the same.

The prompts are those of the fine-tuning examples. The first stage writes a thought, the second the answer after it; each on a
canvas of 256 tokens, prompt included, in 256 steps at temperature 0.1, without guidance. The answer is what follows the last
`####`. Answers are compared as numbers, else as algebra by a library that parses LaTeX with a grammar: nothing that a model
wrote is ever evaluated as code.
"""

import re
import warnings
from fractions import Fraction
from typing import Any

from sinkdlm.data.examples import MARK

STAGES = {"gsm8k_two_stage": 2, "gsm8k_one_stage": 1}
CANVAS = 256
_LONGEST = 200  # characters of an answer that algebra is tried on
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(/\d+)?%?")
_UNIT = re.compile(r"(?<=[\d.%])\s*(?!.*\b(?:hundred|thousand|[mb]illion|dozen|hal(?:f|ves))\b)[a-z][a-z \-]*\Z")  # of "18 dollars"
_NOISE = re.compile(r"[,$€£¥]|\\[!,;$]|\\(?=%)|\\text\{[^}]*\}")


def generation(task: str) -> dict[str, Any]:
    return {"until": [], "do_sample": True, "temperature": 0.1, "canvas": CANVAS, "stages": STAGES[task]}


def extract_answer(text: str) -> str:
    """What follows the last mark, or nothing."""
    return text.rpartition(MARK)[2].strip() if MARK in text else ""


def normalise(answer: str) -> str:
    """The right side of an equation, in lower case, without currency signs and without units after a number."""
    text = " ".join(_NOISE.sub("", answer).rpartition("=")[2].split()).rstrip(".").lower()
    return _UNIT.sub("", text)


def _numbers(text: str) -> set[Fraction]:
    """The numbers that a text may mean: 50% is a half, or 50."""
    if not _NUMBER.fullmatch(text) or ("." in text and "/" in text):
        return set()
    try:
        value = Fraction(text.rstrip("%"))
    except (ValueError, ZeroDivisionError):
        return set()
    return {value, value / 100} if text.endswith("%") else {value}


def is_same_answer(gold: str, answer: str) -> bool:
    """Whether two answers are the same number, the same text, or equal as algebra."""
    ours, theirs = normalise(gold), normalise(answer)
    if not theirs:
        return False
    if ours == theirs:
        return True
    a, b = _numbers(ours), _numbers(theirs)
    if a and b:
        return bool(a & b)
    return len(answer) <= _LONGEST and _are_equal_expressions(gold, answer)


def _are_equal_expressions(gold: str, answer: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    # Parse only boxed LaTeX: the library's reader of plain text uses sympy's, which evaluates it.
    read = [LatexExtractionConfig(boxed_match_priority=0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        boxed = [parse(rf"\boxed{{{_NOISE.sub('', text)}}}", extraction_config=read) for text in (gold, answer)]
        return bool(boxed[0] and boxed[1] and verify(boxed[0], boxed[1]))


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score what was written for a document; a hook of the harness."""
    return {"exact_match": float(is_same_answer(extract_answer(doc["answer"]), extract_answer(results[0])))}
