"""Structured output: whether 2,000 answers fit, whether samples follow their law, and what a step costs.

    python -m benchmarks.structured --parts answers law cost --out benchmarks/results

Needs the test suite's helpers (run it in the repository) and the extra `dev`. answers: 42 schemas and regexes by every policy, with
random models of the tests and those of `--checkpoint`. law: vocabulary of 4, canvas of 5, 100,000 samples of each order against the
enumerated law. cost: time that constraints add to a step of 64 rows.
"""

import argparse
import itertools
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measuring import result, write
from sinkdlm import DiffusionLM, ModelConfig, fast, load
from sinkdlm.errors import SamplingError
from sinkdlm.sampling import generate, policy_of, start, step
from sinkdlm.sampling.constrained_drawing import fit_tokens
from sinkdlm.sampling.requests import Request
from sinkdlm.text.generate import describe
from sinkdlm.text.prompts import encode
from sinkdlm.text.schema import constraint_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))


def answers(checkpoints: list[str], n: int, length: int) -> dict[str, Any]:
    """Write n answers, each of another format and policy in turn; each must parse and validate."""
    from formats import check_text, formats  # type: ignore[import-not-found]
    from policies import POLICIES  # type: ignore[import-not-found]
    from sites import bytes_lm  # type: ignore[import-not-found]

    lms = [*(load(path) for path in checkpoints), bytes_lm(seed=0), bytes_lm(seed=1)]
    known = {name: given for name, given in POLICIES.items() if "suppressed" not in given}
    grid = list(itertools.product(formats(), known.items(), lms))
    found: Counter[str] = Counter()
    for first in range(0, n, 25):
        pairs = [(number, grid[number * 7919 % len(grid)]) for number in range(first, min(first + 25, n))]
        for lm, texts in itertools.groupby(sorted(pairs, key=lambda pair: id(pair[1][2])), key=lambda pair: pair[1][2]):
            wanted, requests = [], []
            for number, ((kind, what), (_, given), _) in texts:
                options = {"temperature": 1.0, **given, "eos_id": lm.tokenizer.eos_token_id}
                if "block" in given or given.get("config") == "fast":
                    options["steps"] = None  # one a token: a given number may be fewer than the blocks
                rule = constraint_of(lm.tokenizer, lm.config.vocab_size, **{kind: what})
                mask_id = lm.config.mask_id
                canvas = [*encode(lm.tokenizer, "it is "), *[mask_id] * length]
                policy = policy_of(options.pop("config", "llada"), **options)
                requests.append(Request(canvas, policy, mask_id, number=number, constraint=rule))
                wanted.append((kind, what))
            states = start(requests)
            with lm.model.inference():
                while step(states, lm.model.denoiser()):
                    pass
            for state, (kind, what) in zip(states, wanted, strict=True):
                text = describe(lm, state)["text"].removeprefix("it is ")
                try:
                    check_text(kind, what, text)
                    found["fit"] += 1
                except Exception as failure:  # whatever a validator raises
                    found["broken"] += 1
                    print(f"{kind} {what}: {text!r}: {failure}", file=sys.stderr)
    return {"answers": n, "combinations": len(grid), **found}


def law(n: int) -> dict[str, Any]:
    """The total variation between n samples and the enumerated law, for each kind of order."""
    from languages import (  # type: ignore[import-not-found]
        EOS,
        MASK,
        TableDenoiser,
        any_order,
        automaton_of,
        by_draw,
        by_entropy,
        distance,
        enumerate_law,
        has_text,
        some_texts,
    )

    texts, denoiser, found = some_texts(100, 4, seed=1), TableDenoiser(5), {}
    rules = {"random": (any_order, [2, 2, 1]), "entropy": (by_entropy, [3, 2]), "confidence": (by_draw, [3, 2])}
    rule = automaton_of(texts)
    for order, (orders, quotas) in rules.items():
        expected, _ = enumerate_law(denoiser, 5, quotas, orders, lambda canvas: has_text(texts, tuple(canvas)))
        counts: Counter[tuple[int, ...]] = Counter()
        for first in range(0, n, 5000):
            given: dict[str, Any] = {"mask_id": MASK, "eos_id": EOS, "temperature": 1.0, "order": order, "steps": len(quotas)}
            rows = generate(
                denoiser, prompt=[[]] * 5000, new_tokens=5, constraint=rule, numbers=range(first, first + 5000), **given
            )
            counts.update(map(tuple, rows.tokens.tolist()))
        found[order] = {"samples": n, "total_variation": distance(counts, expected), "canvases": len(expected)}
    return found


def cost(shape: str, rows: int, length: int, steps: int, temperature: float) -> dict[str, Any]:
    """Share of a step's time that constraints take: the time in `fit_tokens`, less that of waiting for the forward."""
    from formats import SCHEMAS
    from sites import bytes_lm

    tokenizer, device = bytes_lm().tokenizer, "cuda" if torch.cuda.is_available() else "cpu"
    size = max(len(tokenizer), 256)
    model = DiffusionLM(ModelConfig.preset(shape, vocab_size=size, mask_id=size)).to(device)
    fast.prepare(model, fast.Plan())
    schema, spent = SCHEMAS[26], 0.0

    def timed(*given: Any, **chosen: Any) -> None:
        nonlocal spent
        chosen["tokens"].cpu()  # waits for the forward
        began = time.perf_counter()
        fit_tokens(*given, **chosen)
        spent += time.perf_counter() - began

    rule = constraint_of(tokenizer, size, schema=schema)
    policy = policy_of("llada", steps=steps, temperature=temperature, eos_id=tokenizer.eos_token_id)
    states = start([Request([*[5] * 8, *[size] * length], policy, size, number=row, constraint=rule) for row in range(rows)])
    with patch("sinkdlm.sampling.batch.fit_tokens", timed), model.inference():
        began, n_steps = time.perf_counter(), 0
        while step(states, model.denoiser()):
            n_steps += 1
        whole = time.perf_counter() - began
    return {"shape": shape, "rows": rows, "length": length, "temperature": temperature, "steps": n_steps,
            "ms_per_step": 1e3 * whole / n_steps, "ms_of_constraints": 1e3 * spent / n_steps, "share": spent / whole}  # fmt: skip


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--parts", nargs="+", default=["answers", "law", "cost"])
    given.add_argument("--checkpoint", nargs="*", default=[])
    given.add_argument("--answers", type=int, default=2000)
    given.add_argument("--samples", type=int, default=100_000)
    given.add_argument("--length", type=int, default=48)
    given.add_argument("--shape", default="nano")
    given.add_argument("--rows", type=int, default=64)
    given.add_argument("--steps", type=int, default=None)
    given.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    asked = given.parse_args()
    found: dict[str, Any] = {}
    if "answers" in asked.parts:
        try:
            found["answers"] = answers(asked.checkpoint, asked.answers, asked.length)
        except SamplingError as failure:
            sys.exit(str(failure))
    if "law" in asked.parts:
        found["law"] = law(asked.samples)
    if "cost" in asked.parts:
        found["cost"] = [cost(asked.shape, asked.rows, asked.length, asked.steps or asked.length, heat) for heat in (0.0, 1.0)]
    settings = {key: value for key, value in vars(asked).items() if key != "out"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(result("structured", found, device=device, settings=settings), asked.out, subject="-".join(asked.parts))


if __name__ == "__main__":
    main()
