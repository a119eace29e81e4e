"""The prose of the reproduction's pages, kept by hand, says what the matrix declares and what the verdicts are."""

import re

from studies.overlap import GRAM

from benchmarks.marked import prose
from benchmarks.reproduction import RECORDS
from benchmarks.reproduction_page import DOCS, METHOD, PAGE, declared_results
from sinkdlm.reproduce.claims import CLAIMS, FAILS, FEW, HOLDS, MARGIN, NELBO, OPEN, compare, judge, overall
from sinkdlm.reproduce.matrix import ADAPT, FIRST_SEED, SCALES, SCRATCH, SFT, TRIAL_SEED, TRIAL_SHARE, VARIANTS
from sinkdlm.reproduce.statistics import ALPHA, LEVEL, MIN_SEEDS

SCALE = SCALES["small"]
_RATES = " or ".join(
    f"{', '.join(f'{rate:g}' for rate in SCALE.lrs[group])} ({words})"
    for group, words in ((ADAPT, "adapted"), (SCRATCH, "from scratch"))
)
_ASKED = ", ".join(task if most is None else f"{task} (first {most:,})" for task, most in SCALE.tasks.items())
_OFFICIAL = ", ".join(f"{task} {most}" for task, most in SCALE.official.items())
_VERDICTS = {  # what the first screen says, claim by claim
    HOLDS: "low-norm tamed share norm norm-after share-after gsm8k-sink-helps",
    FAILS: "sink-helps gate-helps sink-beats-gate sink-beats-kept-gate zero-helps value beats-logit beats-first",
    OPEN: "scratch-sink-helps scratch-gate-helps scratch-sink-beats-gate end-helps position one-enough-2 one-enough-4 "
    "beats-register beats-at-its-rate moving gsm8k-gate-helps gsm8k-sink-beats-gate",
    FEW: "beats-at-their-rate",
}


def declared() -> list[str]:
    """What the method must say, word for word."""
    adapt, scratch, sft = (SCALE.tables[group] for group in (ADAPT, SCRATCH, SFT))
    length, steps, warmup = adapt["data"]["length"], adapt["train"]["steps"], adapt["train"]["warmup"]
    tokens = {
        name: one["train"]["steps"] * one["train"]["batch"] * one["data"]["length"] / 1e6
        for name, one in SCALE.tables.items()
        if name != SFT
    }
    cut, short = VARIANTS["sink-lengths"].changes["data"]["random_lengths"], length // 8  # share of rows of random length
    left = 1 - cut + cut * (length + 1) / (2 * length)
    few = cut * short / length  # of the rows; their mean length is that of an even draw
    return [
        f"Student's {LEVEL:.0%} interval. Fewer than {MIN_SEEDS} seeds",
        f"over all of a table's, at {ALPHA:g}.",
        f"two one-sided tests at {ALPHA:g} against a margin of {MARGIN} nats: the {1 - 2 * ALPHA:.0%} interval",
        f"closer to 0 than {MARGIN} nats",
        f"from three values by validation NELBO: {_RATES}. A trial has a quarter of a run's budget and uses seed {TRIAL_SEED},",
        f"A trial has {round(warmup * steps * TRIAL_SHARE)} warm-up steps, a run {round(warmup * steps)}.",
        f"{SCALE.documents} documents of a validation split",
        f"estimator with {SCALE.draws} masks",
        f"{_ASKED}. Exact-k, {SCALE.draws} draws",
        f"twins of seed {FIRST_SEED} on the first questions of each task: {_OFFICIAL}.",
        f"{GRAM}-grams of words",
        f"cut to {', '.join(map(str, SCALE.cuts))} tokens, for adapted models of seed {FIRST_SEED}.",
        f"{left:.0%} of the tokens are left",
        f"at most {short} tokens are {few:.0%} of the rows and {few * (short + 1) / 2 / length / left:.1%} of the tokens.",
        f"{tokens[ADAPT]:.0f}M adapted and {tokens[SCRATCH]:.0f}M from scratch, in rows of {length}.",
        f"{scratch['model']['preset']} with SmolLM2's vocabulary",
        f"those from scratch {tokens[SCRATCH] / 42.3:.1f} times.",
        f"for {sft['train']['epochs']} epochs",
        f"examples over {sft['data']['length']} tokens",
        f"along {SCALE.trajectories} answers of {SCALE.written} tokens",
        f"--tasks {','.join(SCALE.tasks)} --data bench --estimator exact_k --draws {SCALE.draws} --guidance 0",
    ]


def test_the_method_says_what_the_matrix_declares() -> None:
    text = prose((DOCS / METHOD).read_text(encoding="utf-8"))
    for words in declared():
        assert words in text, f"docs/{METHOD} does not say {words!r}"


def test_the_first_screen_says_what_the_verdicts_are() -> None:
    results = declared_results(RECORDS)
    assert {claim.name: overall(judge(claim, results)) for claim in CLAIMS} == {
        name: verdict for verdict, names in _VERDICTS.items() for name in names.split()
    }
    own, equal = (compare(results, ADAPT, "sink", against, NELBO).spread for against in ("vanilla", "vanilla-sink-rate"))
    assert 0 < own.low < own.high < MARGIN
    assert equal.high < 0


def test_numbers_of_the_reproduction_stand_in_its_tables() -> None:
    """Prose kept by hand has none, but for names."""
    text = prose((DOCS / PAGE).read_text(encoding="utf-8"))
    assert set(re.findall(r"[\w.-]*\d[\w-]*", text)) == {"SmolLM2-135M", "smdm-34m", "GSM8K"}
