"""Measure speculation on trained models: tokens per forward, tokens a second and how often guesses are right, beside the bound.

    python -m benchmarks.speculation --checkpoint sink=runs/sink/model blocks=runs/blocks/model --text texts.txt
    python -m benchmarks.speculation --device cpu --checkpoint nano=runs/nano-sink/model --made --texts 8 --prompt 16 --length 64

Every form writes the same texts with the same policy, one row at a time and together; `equal` is the share of tokens that are the
plain sampler's (rounding makes the rest). Acceptance: the share of guesses that are right, by place in the path, of those whose
path was right so far; and tokens per forward in each eighth of the text. The first forward of a text has no guesses and counts.

bound: tokens per forward at temperature 0 if guesses came in the right order: the next commits whose tokens are all this forward's
likeliest ("argmax"), or among its two likeliest ("top 2"). It is taken from the plain sampler's own steps.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import quantiles, result, write
from benchmarks.sampling import seconds_of
from sinkdlm import DiffusionLM, load
from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.data.synthetic import corpus
from sinkdlm.lm import LM
from sinkdlm.model.model import Denoiser
from sinkdlm.sampling import DenoiserAdapter, Policy, Request, policy_of, requests_of, start, step, stream
from sinkdlm.sampling.speculation import Tree

_MADE_SEED = 1_000_003  # texts that no nano model was trained on
_PARTS = 8  # of a text, of which tokens per forward are told
POLICIES: dict[str, dict[str, Any]] = {
    "confidence": {},
    "blocks": {"block": 32},
    "margin": {"order": "margin"},
    "entropy": {"order": "entropy"},
    "ancestral": {"order": "ancestral"},
}


class Case:
    """A model and the texts that it writes."""

    def __init__(self, lm: LM, prompts: list[list[int]], given: argparse.Namespace) -> None:
        self.model: DiffusionLM = lm.model
        self.denoiser = lm.model.denoiser(absent_ids(lm.tokenizer, lm.config.vocab_size))
        self.prompts, self.length, self.device = prompts, given.length, given.device

    def requests(self, policy: Policy) -> list[Request]:
        config = self.model.config
        if config.block_size is not None and config.block_size % (policy.block or 1):
            policy = policy_of(policy, block=None)  # the model's own
        made = {"new_tokens": self.length, "mask_id": config.mask_id, "block_size": config.block_size}
        return requests_of(self.prompts, config=policy, **made)

    def run(self, policy: Policy, rows: int, adapter: DenoiserAdapter) -> dict[str, Any]:
        """Write all texts, `rows` at a time; for each, its tokens and the plain steps before and after each of its forwards."""
        states, moves = start(self.requests(policy)), []
        for first in range(0, len(states), rows):
            running = states[first : first + rows]
            while running:
                before = [state.steps for state in running]
                step(running, adapter, device=self.device)
                moves += [(begin, state.steps - begin) for begin, state in zip(before, running, strict=True)]
                running = [state for state in running if not state.done]
        tokens = torch.stack([state.tokens for state in states]).cpu()
        return {"tokens": tokens, "forwards": sum(state.forwards for state in states), "moves": moves}


def measure(case: Case, policy: Policy, rows: int, repeats: int, plain: Tensor | None) -> tuple[dict[str, Any], Tensor]:
    """Figures of one form, after an untimed run."""
    adapter = DenoiserAdapter(case.denoiser)  # keeps what "auto" has measured
    found = case.run(policy, rows, adapter)
    written = len(case.prompts) * case.length
    taken = [seconds_of(partial(case.run, policy, rows, adapter), case.device) for _ in range(repeats)]
    figures = {
        "tokens_per_forward": written / found["forwards"],
        "tokens_per_second": quantiles([written / seconds for seconds in taken]),
    }
    if plain is not None:
        figures["equal"] = float((found["tokens"] == plain)[:, -case.length :].double().mean())
        figures["acceptance"] = acceptance(found["moves"], case.length)
    return figures, found["tokens"]


def acceptance(moves: Sequence[tuple[int, int]], length: int) -> dict[str, list[float]]:
    """Of moves (plain steps before, steps taken): how often a guess is right by its place, and tokens per forward by eighths."""
    deepest = max(taken for _, taken in moves)
    by_place = []
    for place in range(1, deepest):
        reached = [taken > place for begin, taken in moves if begin and taken >= place and begin + place < length]
        by_place.append(sum(reached) / max(1, len(reached)))
    parts = [[taken for begin, taken in moves if begin * _PARTS // length == part] for part in range(_PARTS)]
    return {"by_place": by_place, "by_part": [sum(part) / max(1, len(part)) for part in parts]}


class Recording(Denoiser):
    """A denoiser that keeps the two likeliest tokens of every position it was asked for."""

    capturable = False
    kept: Tensor | None = None  # (T, 2)

    def __call__(
        self, tokens: Tensor, *, lengths: Tensor | None = None, where: Tensor | None = None, cache: Any = None, **facts: Any
    ) -> Tensor:
        logits = super().__call__(tokens, lengths=lengths, where=where, cache=cache, **facts)
        assert where is not None
        mask_id = self.model.config.mask_id
        never = torch.tensor([*self.barred, *([mask_id] if mask_id < logits.shape[-1] else [])], dtype=torch.int64)
        best = logits.index_fill(-1, never.to(logits.device), -torch.inf).topk(2, dim=-1).indices
        self.kept = torch.full((tokens.shape[1], 2), -1, device=logits.device).index_copy_(0, where[0], best[0]).cpu()
        return logits


def bound(case: Case, policy: Policy) -> dict[str, float]:
    """Tokens per forward of guesses in the right order, from the plain sampler's steps of each text alone."""
    n_forwards, n_tokens = [0, 0], 0
    for request in case.requests(policy_of(policy, cache="none")):
        denoiser, commits = Recording(case.model, case.denoiser.barred), []
        for now in stream(denoiser, start([request]), device=case.device):
            (places,) = now.committed[0].nonzero(as_tuple=True)
            commits.append((denoiser.kept, [(int(place), int(now.tokens[0, place])) for place in places]))
        n_tokens += sum(len(new) for _, new in commits)
        for choices in (1, 2):
            at = 0
            while at < len(commits):
                kept, at = commits[at][0], at + 1
                best = {} if kept is None else dict(enumerate(kept[:, :choices].tolist()))
                while at < len(commits) and all(token in best[place] for place, token in commits[at][1]):
                    at += 1
                n_forwards[choices - 1] += 1
    return {"argmax": n_tokens / n_forwards[0], "top 2": n_tokens / n_forwards[1]}


def figures_of(case: Case, given: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in given.policies:
        for temperature in given.temperature:
            policy = policy_of(**POLICIES[name], temperature=temperature)
            found: dict[str, Any] = {"bound": bound(case, policy)} if not temperature else {}
            for rows in given.batch:
                plain, tokens = measure(case, policy, rows, given.repeats, None)
                forms: dict[str, Any] = {"plain": plain}
                for draft in ("linear", "tree"):
                    for k in (*given.k, "auto"):
                        form = policy_of(policy, speculate=k, draft=draft)
                        own, _ = measure(case, form, rows, given.repeats, tokens)
                        own["times_as_fast"] = own["tokens_per_second"]["p50"] / plain["tokens_per_second"]["p50"]
                        forms[f"{draft} {k}"] = own
                        told = f"{own['tokens_per_forward']:.2f} tokens per forward, {own['times_as_fast']:.2f} times as fast"
                        print(f"{name}, temperature {temperature}, {rows} rows, {draft} {k}: {told}", file=sys.stderr, flush=True)
                found[f"{rows} rows"] = forms
            figures[f"{name}, temperature {temperature}"] = found
    return figures


def prompts_of(lm: LM, given: argparse.Namespace) -> list[list[int]]:
    lines = corpus(8 * given.texts, seed=_MADE_SEED) if given.made else given.text.read_text().splitlines()
    rows = [lm.tokenizer(line)["input_ids"][: given.prompt] for line in lines]
    rows = [row for row in rows if len(row) == given.prompt][: given.texts]
    if len(rows) < given.texts:
        sys.exit(f"benchmarks.speculation: only {len(rows)} lines have {given.prompt} tokens; give more, or --texts {len(rows)}")
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--checkpoint", nargs="+", required=True, metavar="NAME=FOLDER", help="trained models")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, help="prompts from the lines of this file")
    source.add_argument("--made", action="store_true", help="prompts from the synthetic corpus")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--length", type=int, default=128, help="tokens to write")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], help="rows at a time")
    parser.add_argument("--k", type=int, nargs="+", default=[2, 4, 8], help="canvases of a forward")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=["confidence"])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--subject", default="")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    return parser.parse_args()


def main() -> None:
    given, figures = arguments(), {}
    for named in given.checkpoint:
        name, _, folder = named.rpartition("=")
        lm = load(folder)
        lm.model.to(given.device, torch.bfloat16 if given.device == "cuda" else torch.float32)
        case = Case(lm, prompts_of(lm, given), given)
        with torch.no_grad(), lm.model.inference():
            figures[name or folder] = figures_of(case, given)
    trees = {f"{draft} {k}": Tree.of(Policy(draft=draft), k)._asdict() for draft in ("linear", "tree") for k in given.k}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items() if key != "out"}
    entry = result("speculation", figures, device=given.device, settings={**settings, "trees": trees})
    write(entry, given.out, subject=given.subject)


if __name__ == "__main__":
    main()
