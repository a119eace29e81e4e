"""What the demo says: of numbers that metrics.json holds, and nothing else. One place, so that terminal and page agree."""

import math
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinkdlm.analysis.glossary import write_interval
from sinkdlm.analysis.report import Chapter, Grid

GREETING = (
    "Two models that differ in one flag, n_sinks, learn a small language: stories and two-digit sums.\n"
    "They read the same rows in the same order under the same masks. 500 pairs of numbers are never shown."
)


def compare_losses(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Of two means over the same draws, taken as if those were independent: the error is an upper estimate."""
    difference = second["loss"] - first["loss"]
    stderr = math.hypot(first["stderr"], second["stderr"])
    return {"difference": difference, "stderr": stderr, "differ": abs(difference) > 2 * stderr}


def sums_text(facts: Mapping[str, Any]) -> str:
    found = facts["sums"]
    one, other = facts["twins"]
    counts = f"{found['only_first']} only {one} gets right, {found['only_second']} only {other}; sign test p = {found['p']:.2g}"
    if not found["differ"]:
        return f"Held-out sums: the twins do not differ ({counts})."
    ahead = other if found["difference"] > 0 else one
    return f"Held-out sums: {ahead} is ahead by {100 * abs(found['difference']):.1f} points ({counts}). {_one_seed(facts)}"


def stories_text(facts: Mapping[str, Any]) -> str:
    found = facts["stories"]
    one, other = facts["twins"]
    gap = f"{other} \N{MINUS SIGN} {one} = {found['difference']:+.3f} \N{PLUS-MINUS SIGN} {found['stderr']:.3f} nats a token"
    if not found["differ"]:
        return f"Held-out stories: the twins do not differ by more than two standard errors ({gap})."
    return f"Held-out stories: {other if found['difference'] < 0 else one} has the lower loss ({gap}). {_one_seed(facts)}"


def _one_seed(facts: Mapping[str, Any]) -> str:
    """Tests over sums or stories know nothing of how twins scatter from training to training."""
    return f"That is so of these two models; another training may turn it round: --seed {facts['seed'] + 1}."


def match_text(match: Mapping[str, Any]) -> str:
    return f"{write_interval(match, 'share')}, {match['right']} of {match['n']}"


def loss_text(loss: Mapping[str, Any]) -> str:
    return f"{loss['loss']:.3f} \N{PLUS-MINUS SIGN} {loss['stderr']:.3f}"


def chapter(facts: Mapping[str, Any]) -> Chapter:
    twins = facts["twins"].values()
    rows = [
        ["held-out sums right", *(match_text(twin["exact_match"]) for twin in twins)],
        ["loss on held-out stories, nats a token", *(loss_text(twin["story_loss"]) for twin in twins)],
        ["attention on the sink while answering sums, by layer", *(_shares(twin, "sink_share") for twin in twins)],
        ["on the most attended token of a sum, by layer", *(_shares(twin, "top_content_share") for twin in twins)],
        ["seconds of training", *(f"{twin['train_seconds']:.0f}" for twin in twins)],
    ]
    for number, example in enumerate(next(iter(twins))["sums"]):
        rows.append([example["question"], *(_judged(twin["sums"][number]) for twin in twins)])
    rows.append(["a story", *(twin["story"] for twin in twins)])
    head = ["", *facts["twins"]]
    notes = [
        sums_text(facts),
        stories_text(facts),
        f"{facts['steps']} steps each, seed {facts['seed']}. Sums have their digits in fixed places (07+25=032). In training, "
        "only the answers of sums are ever masked, stories everywhere. No held-out pair was trained on, in either order.",
    ]
    return Chapter("twins", "What the twins learned", notes, Grid("Learned", head, rows), facts)


def _shares(twin: Mapping[str, Any], name: str) -> str:
    return ", ".join(f"{layer[name]:.1%}" for layer in twin["attention_on_sums"] if name in layer) or "no sink"


def _judged(example: Mapping[str, Any]) -> str:
    return f"{example['answer']}, {'right' if example['right'] else 'wrong'}"


def tell(found: Mapping[str, Any], out: Path, problem: str | None) -> list[str]:
    """The last words on a terminal, before the commands. problem: why there is no page."""
    facts = found["twins"]
    lines = [""]
    for name, twin in facts["twins"].items():
        examples = "  ".join(f"{one['question']}{_judged(one)}" for one in twin["sums"])
        lines += [
            f"{name:8s}held-out sums right: {match_text(twin['exact_match'])}",
            f"{'':8s}{examples}",
            f"{'':8s}story loss {loss_text(twin['story_loss'])}: {twin['story']}",
        ]
    resting = _shares(facts["twins"]["sink"], "sink_share")
    lines += ["", sums_text(facts), stories_text(facts), f"Attention on the sink while answering sums, by layer: {resting}."]
    lines += ["", "The paper's claims, in these two models as they write stories:"]
    for judged in found["claims"]:
        lines += [f"  {claim['verdict']:14s}{claim['claim']}. {claim['evidence']}" for claim in judged["claims"]]
    lines += ["", f"No page: {problem}, then run the same command again" if problem else f"report   {out / 'report.html'}"]
    return [*lines, f"numbers  {out / 'metrics.json'}", f"took     {facts['seconds']:.0f} s", "", "Try next:"]


def commands(found: Mapping[str, Any], out: Path, *, draws: bool) -> list[str]:
    question = found["twins"]["twins"]["sink"]["sums"][0]["question"]
    analyze = ["analyze", out / "sink" / "model", "--prompts", out / "openings.txt", "--length", 20]
    analyze += ["--out", out.with_name(f"{out.name}-analyze"), *([] if draws else ["--capture-only"])]
    sinks = out.with_name(f"{out.name}-sinks-4")
    return [
        shlex.join(map(str, [*program(), *command]))
        for command in (
            ["sample", out / "sink", "--prompt", question, "--length", 3, "--watch"],
            analyze,
            ["train", out / "sink.toml", "--set", "model.n_sinks=4", "--out", sinks],
        )
    ]


def program() -> list[str]:
    """How this program was called, so that what is printed works where it is printed."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return [sys.executable, "-m", "sinkdlm"]
    found = shutil.which("sinkdlm")
    return ["sinkdlm"] if found is not None and Path(found).resolve() == called.resolve() else [sys.argv[0]]
