"""Is an adapted sink the parent's first token again? Measured before any training, with forwards alone.

A causal parent's first token sees only itself, and idle heads attend to it. Without the causal mask only an isolated sink sees
itself alone. Per layer and form: attention on the first token or the sink, its value norm, and that of other tokens.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median_high
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkdlm.model.attention import attend_naive
from sinkdlm.reproduce.markdown import table
from sinkdlm.reproduce.matrix import ADAPT, LABELS, TRIAL_SEED, Job
from sinkdlm.reproduce.measuring import middle_layers, short
from sinkdlm.reproduce.running import Bench, recipe_of
from studies.asking import on_bench, run_study, say, write_beside

NAME = "inherited"
_ROWS = 8
_MASKED = 0.5  # of a row's tokens, at random; the parent reads whole text


class Form(NamedTuple):
    """A variant as it is before training. causal: as its parent."""

    label: str
    variant: str
    init: Mapping[str, Any] = {}
    causal: bool = False


FORMS = {
    "parent": Form("the parent, causal: its first token", "vanilla", causal=True),
    "vanilla": Form(f"{LABELS['vanilla']}: its first token", "vanilla"),
    "sink": Form(LABELS["sink"], "sink"),
    "sink-normal": Form(f"{LABELS['sink']}, drawn at random instead of the mean embedding", "sink", {"sink_init": "normal"}),
    "sink-end": Form(LABELS["sink-end"], "sink-end"),
    "register": Form(LABELS["register"], "register"),
}


def look(form: Form, bench: Bench, rows: Tensor) -> dict[str, list[float | None]]:
    """Of every layer: attention on key 0, the norm of its value, the mean norm of all other values."""
    recipe = recipe_of(Job(ADAPT, form.variant, TRIAL_SEED), bench, None)
    recipe = recipe.replace(init={**recipe.init.to_dict(), **form.init})
    model = bench.load_parent(recipe, torch.float32).model.to(bench.where)
    if not form.causal:
        hidden = torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)) < _MASKED
        rows = rows.masked_fill(hidden, model.config.mask_id)
    found = list[tuple[float, float, float]]()

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None, sink_v: Tensor | None) -> None:
        _, weights = attend_naive(q, k, v, sink_k, sink_v, causal=form.causal)  # a sink or register lies in front
        others = slice(1 if sink_k is None else 0, None)  # a key's attention to itself is left out
        values = v if sink_v is None else torch.cat([sink_v.expand(v.shape[0], -1, -1, -1), v], dim=2)
        norms = values.norm(dim=-1).mean((0, 1))
        found.append((float(weights[:, :, others, 0].mean()), float(norms[0]), float(norms[1:].mean())))

    with model.inference():
        for row in rows:  # one at a time: maps of all queries and keys are large
            model(row[None].to(bench.where), causal=form.causal, observe=observe)
    layers = torch.tensor(found, dtype=torch.float64).view(len(rows), -1, 3).mean(0).T.tolist()
    return {name: list(map(short, line)) for name, line in zip(("share", "norm", "other"), layers, strict=True)}


def measure_inherited(bench: Bench) -> dict[str, Any]:
    """Every form on the same rows of held-out text."""
    length = bench.scale.tables[ADAPT]["data"]["length"]
    documents = bench.inputs.documents(bench.scale.documents, length)
    rows = sorted(documents, key=len, reverse=True)[:_ROWS]  # the first of full length, where there are enough
    tokens = torch.tensor([row[: len(rows[-1])] for row in rows])
    forms = {}
    for name, form in FORMS.items():
        forms[name] = {"label": form.label, **look(form, bench, tokens)}
        say(f"{len(forms)} of {len(FORMS)} forms: {form.label}")
    found = {"rows": len(rows), "length": tokens.shape[1], "masked": _MASKED, **bench.provenance(), "forms": forms}
    return write_beside(bench.asked, NAME, found)


def inherited_blocks(found: Mapping[str, Any]) -> list[str]:
    # Of attention on the first token, the mean over all later ones: token i shares it among i + 1.
    even_causal = fmean(1 / (place + 1) for place in range(1, found["length"]))
    told = (
        f"{found['rows']} rows of {found['length']} held-out tokens. An even share of attention is "
        f"{1 / (found['length'] + 1):.1%}, in the causal parent {even_causal:.1%}:"
    )
    parent = found["forms"]["parent"]["norm"]
    middle = middle_layers(len(parent))
    rows = []
    for form in found["forms"].values():
        share, norm, other = form["share"], form["norm"][middle], form["other"][middle]
        beside, as_parent = ([mine / of for mine, of in zip(norm, norms, strict=True)] for norms in (other, parent[middle]))
        shares = (f"{fmean(share):.1%}", f"{fmean(share[middle]):.1%}")
        rows.append([form["label"], *shares, f"{fmean(beside):.2f}", f"{median_high(as_parent):.2f}"])
    head = ["before any training", "attention on it", "in middle layers", "value norm / other tokens'", "value norm / the parent's"]
    return [told, table(head, rows)]


def main(words: Sequence[str] | None = None) -> None:
    run_study(__doc__ or "", on_bench(measure_inherited), lambda _, found: inherited_blocks(found), words)


if __name__ == "__main__":
    main()
