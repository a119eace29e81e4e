"""Tiny languages and denoisers, and the law of constrained sampling enumerated over canvases."""

import itertools
import math
from collections import defaultdict

import numpy as np
import torch

from sinkdlm.sampling import Automaton

VOCAB, MASK, EOS = 4, 4, 3


def automaton_of(texts, vocab=VOCAB):
    """The prefix tree of some texts, every token its own class."""
    nodes = {(): 0}
    for text in texts:
        for end in range(len(text) + 1):
            nodes.setdefault(tuple(text[:end]), len(nodes))
    table = np.full((len(nodes), vocab), -1)
    for prefix, state in nodes.items():
        for token in range(vocab):
            table[state, token] = nodes.get((*prefix, token), -1)
    return Automaton(table, np.arange(vocab), np.array([prefix in {tuple(text) for text in texts} for prefix in nodes]))


def some_texts(n, longest, seed, shortest=1):
    """n different texts without EOS."""
    drawn = np.random.default_rng(seed)
    every = [text for size in range(shortest, longest + 1) for text in itertools.product(range(VOCAB - 1), repeat=size)]
    return [every[index] for index in sorted(drawn.choice(len(every), min(n, len(every)), replace=False))]


def has_text(texts, canvas, eos_id=EOS):
    """Whether a canvas, open positions as MASK, can become a text, EOS and anything after it; without EOS, a text alone."""
    for text in texts:
        whole = text if eos_id is None else (*text, eos_id)
        if len(whole) > len(canvas) or (eos_id is None and len(whole) < len(canvas)):
            continue
        if all(here in (MASK, there) for here, there in zip(canvas, whole, strict=False)):
            return True
    return False


class TableDenoiser:
    """Logits that depend on the whole canvas, drawn once for each canvas."""

    def __init__(self, length, seed=0, spread=1.5):
        table = np.random.default_rng(seed).normal(size=((VOCAB + 1) ** length, length, VOCAB)) * spread
        self.table = torch.from_numpy(table)
        self.powers = torch.tensor([(VOCAB + 1) ** place for place in range(length)])

    def __call__(self, tokens):
        return self.table[(tokens * self.powers).sum(1)]

    def probabilities(self, canvas):
        return self.table[int((torch.tensor(canvas) * self.powers).sum())].softmax(-1).numpy()


def choices(p, canvas, places, fits):
    """The rule of one step: the probability of each way to fill these places, and the mass of all that fit."""
    found = {}
    for tokens in itertools.product(range(VOCAB), repeat=len(places)):
        filled = list(canvas)
        for place, token in zip(places, tokens, strict=True):
            filled[place] = token
        if fits(filled):
            found[tuple(filled)] = math.prod(p[place][token] for place, token in zip(places, tokens, strict=True))
    mass = sum(found.values())
    return {filled: value / mass for filled, value in found.items()}, mass


def finished(canvas, eos_id=EOS):
    """The canvas as the sampler leaves it: after the first EOS with nothing open before it, only EOS. None: not finished."""
    if eos_id is not None and eos_id in canvas and MASK not in canvas[: canvas.index(eos_id)]:
        end = canvas.index(eos_id)
        return (*canvas[:end], *[eos_id] * (len(canvas) - end))
    return None if MASK in canvas else tuple(canvas)


def enumerate_law(denoiser, length, quotas, orders, fits):
    """Every path: {final canvas: probability under the rule}, {final canvas: probability times weight}.

    orders(p, open places, quota): the probability of each set of places that a step may commit."""
    law, weighted = defaultdict(float), defaultdict(float)
    waiting = {((MASK,) * length, 0): [(1.0, 1.0)]}
    while waiting:
        later = defaultdict(list)
        for (canvas, step), paths in waiting.items():
            done = finished(canvas)
            if done is not None:
                law[done] += sum(q for q, _ in paths)
                weighted[done] += sum(q * w for q, w in paths)
                continue
            p = denoiser.probabilities(canvas)
            total, mean = sum(q for q, _ in paths), sum(q * w for q, w in paths)
            open_places = [place for place in range(length) if canvas[place] == MASK]
            for places, chance in orders(p, open_places, min(quotas[step], len(open_places))).items():
                law_of_step, mass = choices(p, canvas, places, fits)
                for filled, q in law_of_step.items():
                    q *= chance
                    later[filled, step + 1].append((total * q, mean * mass / total))
        waiting = later
    return dict(law), dict(weighted)


def any_order(p, open_places, quota):
    """Every set of places is as likely."""
    sets = list(itertools.combinations(open_places, quota))
    return dict.fromkeys(sets, 1 / len(sets))


def by_entropy(p, open_places, quota):
    entropy = -(p * np.log(p)).sum(1)
    return {tuple(sorted(sorted(open_places, key=lambda place: entropy[place])[:quota])): 1.0}


def by_draw(p, open_places, quota):
    """The places whose independent draws are the most probable."""
    found = defaultdict(float)
    for tokens in itertools.product(range(VOCAB), repeat=len(open_places)):
        sure = {place: p[place][token] for place, token in zip(open_places, tokens, strict=True)}
        best = sorted(open_places, key=lambda place: -sure[place])[:quota]
        found[tuple(sorted(best))] += math.prod(sure.values())
    return dict(found)


def distance(counts, law):
    """Total variation between counted canvases and a law."""
    total = sum(counts.values())
    return sum(abs(counts.get(key, 0) / total - law.get(key, 0)) for key in {*counts, *law}) / 2
