"""Captures made of chosen numbers, in the form that analysis reads: any quantity, with or without sinks, maps, paths."""

import numpy as np

KINDS = ("mask", "punctuation", "space", "special", "word")
WORDS = ["The", " old", " man", " looked", " at", " the", " sea", ",", " and", "\n", " it", " was", " calm", ".", "<eos>", "$x_1$"]

# Means that a vanilla model and one with a sink token could have. A quantity without a number is undefined.
VANILLA = {
    "content_sinks": 0.62,
    "relative_sinks": 1.9,
    "sink_heads": 0.55,
    "turnover": 0.21,
    "turnover_null": 0.48,
    "relative_turnover": 0.35,
    "relative_turnover_null": 0.60,
    "moved": 3.1,
    "move_rate": 0.19,
    "lifetime": 4.7,
    "anchored": 0.22,
    "content_sink_norm": 2.4,
    "normal_norm": 7.6,
    "norm_ratio": 0.32,
    "entropy": 2.1,
    "bound_ratio": 0.46,
    "update_ratio": 0.31,
    "noop": -0.08,
    "sink_mass": 0.0,
    "lane_heads": 0.0,
    "sink_value_norm": None,
    "lane_norm_ratio": None,
}
SINK = VANILLA | {
    "sink_mass": 0.41,
    "lane_heads": 0.66,
    "content_sinks": 0.07,
    "relative_sinks": 0.6,
    "sink_heads": 0.06,
    "turnover": 0.15,
    "sink_value_norm": 0.9,
    "lane_norm_ratio": 0.12,
    "anchored": 0.03,
}


def make_capture(
    name="nano-sink", n_sinks=1, means=None, *, n=12, layers=6, heads=4, steps=24, length=32, seed=0, spread=0.1, config=None
):
    """`means` are laid over those of the kind of model. `spread`: of trajectories, as a share of the mean."""
    draw = np.random.default_rng(seed)
    chosen = (SINK if n_sinks else VANILLA) | (means or {})
    profile = 1 + 0.6 * np.sin(np.linspace(0.3, 2.9, layers))
    profile /= profile.mean()
    rows = []
    for number in range(n):
        values = {}
        for quantity, mean in chosen.items():
            own = None if mean is None else profile * mean * (1 + spread * draw.standard_normal())
            values[quantity] = {
                "total": None if own is None else float(own.mean()),
                "layers": [None] * layers if own is None else own.tolist(),
            }
        text = "".join(WORDS[(number + place) % len(WORDS)] for place in range(length))
        row = {"number": number, "prompt": "The old man", "text": text, "n_steps": steps, "length": length, "values": values}
        rows.append(row)
    no_sinks = not chosen["content_sinks"]
    return {
        "format": "sinkdlm-capture",
        "version": 1,
        "name": name,
        "source": f"runs/{name}",
        "model": {"n_layers": layers, "n_heads": heads, "n_sinks": n_sinks, "d_model": 64, "vocab_size": 512, "gate": "none"}
        | {"sink_kind": "isolated", "sink_position": "front", "sink_value": "learned"}
        | (config or {}),
        "made": {"command": f"sinkdlm analyze runs/{name}", "commit": "0123abc", "versions": {"torch": "2.13.0", "sinkdlm": "0.1"}}
        | {"device": "cpu", "dtype": "float32", "seconds": 12.5, "date": "2026-01-02"},
        "settings": {"policy": {"name": "llada", "temperature": 0.0}, "length": length, "steps": steps, "seed": seed}
        | {"threshold": 0.3, "margin": 3.0, "inputs": "trajectories"},
        "n": {"trajectories": n, "forwards": n * steps, "tokens_seen": n * steps * length},
        "quantities": {quantity: _summary(rows, quantity, layers) for quantity in chosen},
        "trajectories": rows,
        "kinds": _kinds(draw, no_sinks),
        "scatter": _scatter(draw, chosen),
        "heads": {
            "lane": np.clip(chosen["sink_mass"] + 0.2 * draw.standard_normal((layers, heads)), 0, 1).tolist()
            if n_sinks
            else [[0.0] * heads] * layers,
            "content": (draw.random((layers, heads)) * chosen["sink_heads"] * 1.6).clip(0, 1).tolist(),
        },
        "paths": [_path(draw, number, layers, steps, length) for number in range(min(n, 2))],
        "maps": [_map(draw, step, n_sinks, length, no_sinks) for step in (0, steps - 1)] if steps > 1 else [],
        "interventions": _interventions() if n_sinks else [],
        "omitted": {} if n_sinks else {"interventions on the lane": "the model has no sinks of its own"},
    }


def _estimate(values):
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return {"mean": None, "low": None, "high": None, "n": 0}
    half = 1.96 * known.std(ddof=1) / np.sqrt(len(known)) if len(known) > 1 else None
    low, high = (None, None) if half is None else (float(known.mean() - half), float(known.mean() + half))
    return {"mean": float(known.mean()), "low": low, "high": high, "n": len(known)}


def _summary(rows, quantity, layers):
    own = [row["values"][quantity] for row in rows]
    return {
        "total": _estimate([one["total"] for one in own]),
        "layers": [_estimate([one["layers"][layer] for one in own]) for layer in range(layers)],
    }


def _kinds(draw, no_sinks):
    def shares():
        return dict(zip(KINDS, draw.dirichlet(np.ones(len(KINDS))).tolist(), strict=True))

    return {"all": shares(), "absolute": None if no_sinks else shares(), "relative": shares()}


def _scatter(draw, chosen, n=400):
    def norms(mean):
        return [] if mean is None else (mean * np.exp(0.2 * draw.standard_normal(n) - 0.02)).tolist()

    groups = {"sink": chosen["content_sink_norm"] if chosen["content_sinks"] else None, "normal": chosen["normal_norm"]}
    found = {group: norms(mean) for group, mean in (groups | {"lane": chosen["sink_value_norm"]}).items()}
    means = {f"{group}_mean": float(np.mean(own)) if own else None for group, own in found.items()}
    return found | means | {f"n_{group}": 50 * len(own) for group, own in found.items()}


def _path(draw, number, layers, steps, length, n_prompt=3):
    order = n_prompt + draw.permutation(length - n_prompt)
    due = np.full(length, -1)
    due[order] = np.arange(length - n_prompt) * steps // max(1, length - n_prompt)
    top = draw.integers(0, length, (layers, 1)) + np.where(
        draw.random((layers, steps)) < 0.15, draw.integers(-4, 5, (layers, steps)), 0
    )
    return {
        "number": number,
        "top": top.clip(0, length - 1).tolist(),
        "received": (0.1 + 0.4 * draw.random((layers, steps))).tolist(),
        "masked": [[int(place >= step) for place in due] for step in range(steps)],
        "labels": [WORDS[place % len(WORDS)] for place in range(length)],
        "n_prompt": n_prompt,
    }


def _map(draw, step, n_sinks, length, no_sinks):
    weights = draw.gamma(0.3, size=(length, n_sinks + length)) + 2 * np.pad(np.eye(length), ((0, 0), (n_sinks, 0)))
    weights[:, :n_sinks] += weights.sum(1, keepdims=True) * 0.6
    sinks = [] if no_sinks else sorted({2 + step % 5, (9 + step) % length})
    for place in sinks:
        weights[:, n_sinks + place] += weights.sum(1) * 0.6
    weights /= weights.sum(1, keepdims=True)
    labels = [WORDS[place % len(WORDS)] if step else "[MASK]" for place in range(length)]
    return {"number": 0, "step": step, "layer": 2, "head": 1, "labels": labels, "n_sinks": n_sinks, "sinks": sinks} | {
        "weights": np.round(weights, 4).tolist()
    }


def _interventions():
    def one(name, label, change):
        return {
            "name": name,
            "label": label,
            "text_tokens": 24.5,
            "nelbo": {
                "before": 2.31,
                "after": 2.31 + change,
                "change": change,
                "low": change - 0.02,
                "high": change + 0.02,
                "n": 32,
            },
            "kl": {"mean": abs(change) / 2, "low": abs(change) / 3, "high": abs(change)},
            "changed": {"mean": 0.4, "low": 0.31, "high": 0.48},
        }

    return [
        one("remove", "without the sink token", 0.53),
        one("zero", "its value set to zero", 0.012),
        one("ban", "top content sink banned", 0.08),
    ]


# -- captures that could trip a page or a figure --------------------------------------------------------------------------------

NASTY = '<script>alert("x")</script> & _$a$ \u4e2d/\n'
NOTHING = dict.fromkeys(VANILLA) | {"content_sinks": 0.0, "sink_heads": 0.0, "sink_mass": 0.0, "lane_heads": 0.0}


def bare() -> list[dict]:
    gone = {"content_sinks": 0.0, "sink_heads": 0.0} | dict.fromkeys(
        ("turnover", "turnover_null", "lifetime", "moved", "move_rate")
    )
    gone |= dict.fromkeys(("norm_ratio", "content_sink_norm"))
    return [make_capture("bare", 0, gone) | {"maps": [], "paths": [], "kinds": None}]


LONG = "a-name-that-goes-on-and-on-without-a-space-in-it-for-longer-than-any-phone-is-wide"
AWKWARD = {
    "nasty names": lambda: [make_capture(NASTY, 0), make_capture(NASTY + "2", 1, seed=1)],
    "long names": lambda: [make_capture(f"{LONG}-{place}", place, seed=place) for place in range(3)],
    "many heads": lambda: [make_capture("huge", 2, layers=36, heads=32, length=300, steps=64, n=6)],
    "no sinks": bare,
    "one step, one trajectory": lambda: [make_capture("unseen", 0, NOTHING, n=1, layers=1, heads=1, steps=1, length=4)],
}
