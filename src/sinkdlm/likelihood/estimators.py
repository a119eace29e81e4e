"""Likelihood estimators: log p(target | prefix) with error bars, whole documents, greedy prediction.

Owns which queries make up a row's estimate. mask_draws.py has the draws, scoring.py the forwards, estimates.py the
statistics, ranking.py when to stop. Takes any callable that maps tokens (B, T) to logits (B, T, V); knows no model, tokenizer or
file. Noise is keyed by (seed, group, block, set, draw, target token): a row draws the same masks alone, in any batch, on any rank.

In block diffusion, a row's estimate is the sum of its blocks' own. No block sees what is masked in another, so one forward reads
them all.

N rows, T tokens, L target tokens of a row.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinkdlm.errors import LikelihoodError
from sinkdlm.kernels.cuda_graph import many_shapes
from sinkdlm.likelihood.estimates import MIN_SETS, Estimates
from sinkdlm.likelihood.mask_draws import MONTE_CARLO, block_keys, content_key, draw_masks, noise_keys
from sinkdlm.likelihood.ranking import Adaptive, expected_loss, is_settled, plan_looks
from sinkdlm.likelihood.scoring import Device, Query, Row, Scorer, read_rows, split_targets
from sinkdlm.sampling.denoiser import Denoise, DenoiserAdapter
from sinkdlm.sampling.loop import Rows, as_rows, step
from sinkdlm.sampling.requests import Request, State
from sinkdlm.sampling.unmasking import policy_of

ESTIMATORS = (*MONTE_CARLO, "chain", "causal")
_BUDGET = 1 << 14  # tokens in a forward
_WORDS = 1 << 22  # 64-bit words of noise held at once
ADAPTIVE_SETS = 32  # smaller sets, so that draws can stop early


@torch.no_grad()
def log_likelihood(
    denoiser: Denoise,
    tokens: Rows,
    scored: Rows,
    *,
    mask_id: int,
    estimator: str = "exact_k",
    draws: int = 128,
    guidance: float = 0.0,
    seed: int = 0,
    groups: Sequence[int] | None = None,
    sets: int | None = None,
    adaptive: Adaptive | None = None,
    shift: bool = False,
    budget: int = _BUDGET,
    device: Device = None,
) -> Estimates:
    """log p(scored tokens | the others) of each row of tokens (N, T), or of a list of rows of different lengths.

    estimator: "exact_k" or "official" (Monte Carlo over masks, see mask_draws.py; the variance of "official" is unbounded),
        "chain" (one forward for each target token, which is given those before it; in block diffusion, for each token of a block),
        or "causal" (one forward, for a denoiser that is an AR model: row i predicts token i + 1).
    draws: masks per row, or of each of its blocks, in `sets` independent sets of equal size (8; with adaptive 32), rounded up to
        fill them.
    guidance w: un + (w + 1)(cond - un), where un does not see the prefix; the result is then a score.
    groups: rows with the same number share their noise, as options of a question should. By default, rows with the same prefix.
    adaptive: questions (rows of one group) get no more draws once their ranking is settled.
    shift: row i of the denoiser is for token i + 1 (a foreign one; our models align their rows).
    budget: tokens in a forward, both branches of guidance counted; at most a quarter of them reach the head, unless a row has more.
    """
    rows = read_rows(tokens, scored, mask_id)
    sets = sets or (ADAPTIVE_SETS if adaptive else MIN_SETS)
    causal = estimator == "causal"
    scorer = Scorer(denoiser, mask_id, guidance, budget, shift or causal, _home(device, tokens))
    if not rows:
        raise LikelihoodError("tokens: no row to score; give at least one")
    if estimator not in ESTIMATORS:
        raise LikelihoodError(f"estimator = {estimator!r}: allowed: {', '.join(ESTIMATORS)}")
    if sets < MIN_SETS:
        raise LikelihoodError(f"sets = {sets}: a standard error needs at least {MIN_SETS} independent draw sets")
    if estimator in MONTE_CARLO and draws < sets:
        raise LikelihoodError(f"draws = {draws}: needs at least one for each of the {sets} draw sets")
    if groups is not None and len(groups) != len(rows):
        raise LikelihoodError(f"groups: {len(groups)} numbers for {len(rows)} rows; give one per row")
    if adaptive is not None:
        adaptive.check(len(rows))
        if groups is None or estimator != "exact_k":  # no test holds where the variance is unbounded
            raise LikelihoodError("adaptive: needs groups= (which rows make up a question) and estimator = 'exact_k'")
    if shift and scorer.block_size is not None and not causal:
        raise LikelihoodError("shift: a block-diffusion denoiser aligns its own rows; leave it out")
    if causal:
        return _add_up(scorer, [[query] for query in _causal_queries(rows, guidance)])
    if estimator == "chain":
        return _add_up(scorer, [_chain_queries(row, split_targets(row, scorer.block_size)) for row in rows])
    numbers = _default_groups(rows) if groups is None else list(groups)
    sampled = _Sampled(scorer, rows, noise_keys(seed, numbers), estimator, -(-draws // sets))
    if adaptive is None:
        sampled.extend(range(len(rows)), range(sets))
    else:
        _race(sampled, numbers, adaptive, sets)
    return sampled.result(sets)


def _home(device: Device, tokens: Rows) -> Device:
    """Where forwards run: as asked, else where the tokens are, else None: where the denoiser is."""
    return tokens.device if device is None and isinstance(tokens, Tensor) else device


def _causal_queries(rows: list[Row], guidance: float) -> list[Query]:
    """An AR model reads all of a row's target tokens at once, with none masked."""
    if guidance:
        raise LikelihoodError("guidance: an AR model has no [MASK] to hide a prompt behind; use guidance = 0 with 'causal'")
    if any(row.targets[0] == 0 for row in rows):
        raise LikelihoodError("estimator 'causal': token 0 has nothing before it; put a BOS or EOS in front")
    return [Query(row, row.targets[:0], row.targets) for row in rows]


def _chain_queries(row: Row, blocks: list[np.ndarray]) -> list[Query]:
    """Read the next target of every block, the later ones of its block masked."""
    return [
        Query(row, np.concatenate([own[i:] for own in blocks]), np.concatenate([own[i : i + 1] for own in blocks]))
        for i in range(max(map(len, blocks)))
    ]


def _default_groups(rows: list[Row]) -> list[int]:
    """Rows with equal prefixes share noise. Rows without a prefix get their own, so that their errors are independent."""
    given = [np.delete(row.tokens, row.targets) for row in rows]
    return [content_key(prefix if len(prefix) else row.tokens) for prefix, row in zip(given, rows, strict=True)]


def _add_up(scorer: Scorer, queries: list[list[Query]]) -> Estimates:
    """Add up each row's queries to its likelihood."""
    counts = [len(own) for own in queries]
    parts = np.split(scorer.sums(list(itertools.chain(*queries))), np.cumsum(counts)[:-1])
    kind = "score" if scorer.guidance else "likelihood"
    return Estimates.of([[part.sum()] for part in parts], counts, counts, counts, kind)


class _Mask(NamedTuple):
    """Masked targets of one block of a row. name: in bits."""

    block: int
    name: bytes
    positions: np.ndarray


class _Sampled:
    """The draws of some rows so far. A block's repeated mask is not computed again: short targets have few masks."""

    def __init__(self, scorer: Scorer, rows: list[Row], keys: Tensor, estimator: str, size: int) -> None:
        self.scorer, self.rows, self.keys, self.estimator, self.size = scorer, rows, keys, estimator, size
        self.blocks = [split_targets(row, scorer.block_size) for row in rows]
        self.set_means: list[list[float]] = [[] for _ in rows]
        self.forwards = [0] * len(rows)
        # For each block of a row: mask, in bits -> sum of log-probabilities; where nothing is masked, 0.
        self.known = [[{bytes(math.ceil(len(targets) / 8)): 0.0} for targets in own] for own in self.blocks]

    def extend(self, active: Sequence[int], sets: range) -> None:
        """Draw more sets for some rows."""
        drawn: dict[tuple[int, int], tuple[list[bytes], np.ndarray]] = {}  # (row, block) -> names and weights of its masks
        fresh: dict[int, dict[int, list[_Mask]]] = {}  # row -> block -> masks that are not known yet
        for i, b, masked, weight in self._draw(active, sets):
            names = [bits.tobytes() for bits in np.packbits(masked, axis=1)]
            drawn[i, b] = names, weight
            unique, known, targets = dict(zip(names, masked, strict=True)), self.known[i][b], self.blocks[i][b]
            fresh.setdefault(i, {})[b] = [_Mask(b, name, targets[own]) for name, own in unique.items() if name not in known]
        self._compute(fresh)
        for i in fresh:
            parts = [(*drawn[i, b], known) for b, known in enumerate(self.known[i])]
            values = np.sum([weight * [known[name] for name in names] for names, weight, known in parts], axis=0)
            self.set_means[i] += values.reshape(len(sets), self.size).mean(1).tolist()

    def _compute(self, fresh: dict[int, dict[int, list[_Mask]]]) -> None:
        """Compute masks of blocks. A forward takes the next mask of every block of a row that has one left."""
        homes = [
            (i, [mask for mask in turn if mask])
            for i, own in fresh.items()
            for turn in itertools.zip_longest(*(own[b] for b in sorted(own)))
        ]
        queries = []
        for i, masks in homes:
            positions = np.concatenate([mask.positions for mask in masks])
            queries.append(Query(self.rows[i], positions, positions))
            self.forwards[i] += 1
        for number, values in self.scorer.values(queries):
            i, masks = homes[number]
            ends = np.cumsum([len(mask.positions) for mask in masks])
            for mask, part in zip(masks, np.split(values, ends[:-1]), strict=True):
                self.known[i][mask.block][mask.name] = float(part.sum())

    def _draw(self, active: Sequence[int], sets: range) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """(row, block, masked, weight): blocks with equally many targets are drawn together, as many as fit in memory."""
        by_length: dict[int, list[tuple[int, int]]] = {}
        for i in active:
            for b, targets in enumerate(self.blocks[i]):
                by_length.setdefault(len(targets), []).append((i, b))
        for length, same in by_length.items():
            at_once = max(1, _WORDS // (len(sets) * self.size * length))
            for first in range(0, len(same), at_once):
                part = same[first : first + at_once]
                rows, blocks = torch.tensor(part).T
                found = draw_masks(self.estimator, block_keys(self.keys[rows], blocks), length, sets, self.size)
                yield from ((i, b, masked, weight) for (i, b), masked, weight in zip(part, *found, strict=True))

    def is_certain(self, row: int) -> bool:
        """Whether draws cannot vary: no block has more than one target."""
        return all(len(targets) == 1 for targets in self.blocks[row])

    def result(self, sets: int) -> Estimates:
        draws = [len(means) * self.size for means in self.set_means]
        kind = "score" if self.scorer.guidance else "bound"
        return Estimates.of(self.set_means, draws, [sets * self.size] * len(draws), self.forwards, kind)


def _race(sampled: _Sampled, groups: list[int], adaptive: Adaptive, sets: int) -> None:
    by_group: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        by_group.setdefault(group, []).append(i)
    looks, questions = plan_looks(sets), list(by_group.values())
    for done, look in itertools.pairwise([0, *looks]):
        sampled.extend([*itertools.chain(*questions)], range(done, look))
        questions = [rows for rows in questions if not _is_over(sampled, rows, adaptive, looks)]


def _is_over(sampled: _Sampled, rows: list[int], adaptive: Adaptive, looks: list[int]) -> bool:
    means = torch.tensor([sampled.set_means[i] for i in rows], dtype=torch.float64)
    certain = torch.tensor([sampled.is_certain(i) for i in rows])
    divisors = adaptive.divisors(rows)
    if is_settled(means, divisors, adaptive.error, len(looks) - 1, certain):
        return True
    return adaptive.tolerance > 0 and expected_loss(means, divisors, looks[-1]) <= adaptive.tolerance


@dataclass(frozen=True)
class Documents:
    """Estimates of whole documents. bits_per_byte needs n_bytes, which the caller gave."""

    estimates: Estimates
    n_tokens: Tensor
    n_bytes: Tensor | None

    @property
    def nats(self) -> Tensor:
        """-log p, or an upper bound on it."""
        return -self.estimates.mean

    @property
    def stderr(self) -> Tensor:
        return self.estimates.stderr

    @property
    def bits_per_byte(self) -> Tensor:
        return self.nats / self._bits()

    @property
    def bits_per_byte_stderr(self) -> Tensor:
        return self.stderr / self._bits()

    @property
    def perplexity(self) -> Tensor:
        """exp(nats / tokens): an upper bound where the estimates are bounds."""
        return (self.nats / self.n_tokens).exp()

    def _bits(self) -> Tensor:
        if self.n_bytes is None:
            raise LikelihoodError("bits per byte: give n_bytes=, the length of each document's text")
        return self.n_bytes.double() * math.log(2)  # an int64 tensor times a float would be float32


def document_likelihood(
    denoiser: Denoise,
    documents: Rows,
    *,
    mask_id: int,
    window: int,
    context: int = 1,
    prefix: Sequence[int] = (),
    n_bytes: Sequence[int] | None = None,
    numbers: Sequence[int] | None = None,
    **options: Any,
) -> Documents:
    """Score every token of each document once, in windows of at most `window` tokens.

    Each later window also reads `context` tokens before it; the last reads as many as fit (as lm-evaluation-harness does).
    prefix: tokens in front of the first window (BOS or EOS), not scored. numbers: ids of the documents, so that equal ones draw
    different noise. options: those of log_likelihood.
    """
    if not 0 <= context < window or len(prefix) >= window:
        raise LikelihoodError(
            f"window = {window}, context = {context}, {len(prefix)} tokens of prefix: give a window longer than both"
        )
    if options.get("guidance"):
        raise LikelihoodError("guidance: a guided score is no bound on a document; leave it at 0")
    texts = [[*prefix, *row] for row in as_rows(documents)]
    sizes = [len(text) - len(prefix) for text in texts]
    if not texts or min(sizes) < 1:
        raise LikelihoodError(f"document {sizes.index(min(sizes)) if texts else 0}: has no token")
    if n_bytes is not None and len(n_bytes) != len(texts):
        raise LikelihoodError(f"n_bytes: {len(n_bytes)} numbers for {len(texts)} documents; give one per document")
    windows = [roll(len(text), len(prefix), window, context) for text in texts]
    rows, scored, keys = [], [], []
    names = [[]] * len(texts) if numbers is None else [[number] for number in numbers]
    for name, text, spans in zip(names, texts, windows, strict=True):
        for number, (begin, first, stop) in enumerate(spans):
            rows.append(text[begin:stop])
            scored.append([place >= first for place in range(begin, stop)])
            # Each window has its own noise, so that errors of windows do not add up.
            keys.append(content_key(np.array([*name, number, *rows[-1]])))
    parts = log_likelihood(denoiser, rows, scored, mask_id=mask_id, groups=keys, **options)
    counts = [len(spans) for spans in windows]
    # Sum each document's windows set by set: the sums are as independent as the windows' sets.
    columns = (parts.set_means, parts.draws, parts.full_draws, parts.forwards)
    sums, draws, full, forwards = ([block.sum(0).tolist() for block in column.split(counts)] for column in columns)
    estimates = Estimates.of(sums, draws, full, forwards, parts.kind)
    return Documents(estimates, torch.tensor(sizes), None if n_bytes is None else torch.tensor(n_bytes))


def roll(length: int, given: int, window: int, context: int) -> list[tuple[int, int, int]]:
    """(start, first scored, stop) of the windows over a row whose first `given` tokens are not scored."""
    stop = min(window, length)
    found = [(0, given, stop)]
    while stop < length:
        first, stop = stop, min(stop + window - context, length)
        found.append((stop - window, first, stop))
    return found


@torch.no_grad()
def is_greedy(
    denoiser: Denoise,
    tokens: Rows,
    scored: Rows,
    *,
    mask_id: int,
    guidance: float = 0.0,
    shift: bool = False,
    causal: bool = False,
    budget: int = _BUDGET,
    device: Device = None,
) -> list[bool]:
    """Whether the denoiser itself would write the target: one token a step, the most confident first, always the likeliest.

    A row stops as soon as it writes anything else.
    causal: the denoiser is an AR model, which writes from left to right: one forward tells.
    """
    rows, home = read_rows(tokens, scored, mask_id), _home(device, tokens)
    if causal:
        hits = Scorer(denoiser, mask_id, guidance, budget, True, home).hits(_causal_queries(rows, guidance))
        return [int(n) == len(row.targets) for n, row in zip(hits, rows, strict=True)]
    policy, adapter = policy_of("llada", guidance=guidance, shift=shift), DenoiserAdapter.of(denoiser)
    found = [True] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
    while order:
        size = max(1, budget // len(rows[order[0]].tokens))
        batch, order = order[:size], order[size:]
        active = [(i, State(Request(_blank(rows[i], mask_id), policy, mask_id, block_size=adapter.block_size))) for i in batch]
        while active:
            with many_shapes:
                step([state for _, state in active], adapter, device=home or getattr(denoiser, "device", None))
            tokens_of = {state.batch: state.batch.tokens.cpu().numpy() for _, state in active}
            for i, state in active:
                written = tokens_of[state.batch][state.row, : state.length]
                found[i] = bool(((written == rows[i].tokens) | (written == mask_id)).all())
            active = [(i, state) for i, state in active if found[i] and not state.done]
    return found


def _blank(row: Row, mask_id: int) -> list[int]:
    if (row.tokens == mask_id).any():
        raise LikelihoodError(f"a prefix has [MASK] ({mask_id}) in it, which greedy prediction would fill")
    canvas = row.tokens.copy()
    canvas[row.targets] = mask_id
    return canvas.tolist()
