"""The demo's texts, made only from numbers in metrics.json. One place, so that terminal and page agree."""

import json
import shlex
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from sinkdlm.analysis.glossary import write_interval, write_number
from sinkdlm.analysis.report import Chapter, Grid

GREETING = (
    'Two models learn a small language of stories and two-digit sums. "vanilla" has no sink token, "sink" has one (n_sinks = 1).\n'
    "They train on the same rows, in the same order, with the same masks. 500 pairs of numbers are held out."
)


LARGER = "What does not show here is claimed of larger models: compare the recorded twins."
_LEARNED = 0.8  # share of held-out sums above which a twin has learned to add


def real_twins() -> dict[str, Any]:
    """Twins of SmolLM2-135M by layer, from the reproduction's records; benchmarks/real_twins.py writes them."""
    found: dict[str, Any] = json.loads(resources.files("sinkdlm.demo").joinpath("real_twins.json").read_text(encoding="utf-8"))
    return found


def headline(facts: Mapping[str, Any]) -> str:
    """What the twins learned, which the page and the terminal say first."""
    shares = {name: twin["exact_match"]["mean"] for name, twin in facts["twins"].items()}
    told = " and ".join(f'{write_number(share, "share")} ("{name}")' for name, share in shares.items())
    done = "Both twins learned to add" if min(shares.values()) > _LEARNED else "The twins have not both learned to add"
    return f"{done}: {told} of sums they never saw are right"


def sums_text(facts: Mapping[str, Any]) -> str:
    found, (one, other) = facts["sums"], facts["twins"]
    counts = f'{found["only_first"]} only "{one}" gets right, {found["only_second"]} only "{other}"; sign test p = {found["p"]:.2g}'
    if not found["differ"]:
        return f"Held-out sums: the twins do not differ ({counts})."
    ahead = other if found["difference"] > 0 else one
    return f'Held-out sums: "{ahead}" is ahead by {100 * abs(found["difference"]):.1f} points ({counts}). {_one_seed(facts)}'


def stories_text(facts: Mapping[str, Any]) -> str:
    found, (one, other) = facts["stories"], facts["twins"]
    gap = f"{other} \N{MINUS SIGN} {one} = {found['difference']:+.3f} \N{PLUS-MINUS SIGN} {found['stderr']:.3f} nats a token"
    if not found["differ"]:
        return f"Held-out stories: the twins do not differ by more than two standard errors ({gap})."
    return f'Held-out stories: "{other if found["difference"] < 0 else one}" has the lower loss ({gap}). {_one_seed(facts)}'


def _one_seed(facts: Mapping[str, Any]) -> str:
    """The tests are over sums or stories, and cannot tell how twins vary between seeds."""
    return f"This holds for these two models; another seed may reverse it: try --seed {facts['seed'] + 1}."


def match_text(match: Mapping[str, Any]) -> str:
    return f"{write_interval(match, 'share')}, {match['right']} of {match['n']}"


def loss_text(loss: Mapping[str, Any]) -> str:
    return f"{loss['loss']:.3f} \N{PLUS-MINUS SIGN} {loss['stderr']:.3f}"


def chapter(facts: Mapping[str, Any]) -> Chapter:
    twins = facts["twins"].values()
    rows = [
        ["held-out sums right", *(match_text(twin["exact_match"]) for twin in twins)],
        ["loss on held-out stories, nats a token", *(loss_text(twin["story_loss"]) for twin in twins)],
        ["attention on the sink token while answering sums, by layer", *(_shares(twin, "sink_share") for twin in twins)],
        ["attention on the most attended token of a sum, by layer", *(_shares(twin, "top_content_share") for twin in twins)],
        ["seconds of training", *(f"{twin['train_seconds']:.0f}" for twin in twins)],
    ]
    for answers in zip(*(twin["sums"] for twin in twins), strict=True):
        told = [f"{one['answer']}, {'right' if one['right'] else 'wrong'}" for one in answers]
        rows.append([answers[0]["question"], *told])
    rows.append(["a story", *(twin["story"] for twin in twins)])
    about = (
        f"{facts['steps']} steps each, seed {facts['seed']}. Digits of sums have fixed places (07+25=032). Training masks only the "
        "answers of sums, and any token of stories. No held-out pair was trained on, in either order."
    )
    grid = Grid("Learned", ["measured", *(f'"{name}"' for name in facts["twins"])], rows)
    notes = [sums_text(facts), stories_text(facts), about]
    return Chapter("twins", headline(facts), "What this demo's twins learned", notes, grid, facts, LARGER, real_twins())


def _shares(twin: Mapping[str, Any], name: str) -> str:
    return ", ".join(f"{layer[name]:.1%}" for layer in twin["attention_on_sums"] if name in layer) or "no sink"


def tell(found: Mapping[str, Any], out: Path, problem: str | None) -> list[str]:
    """The closing text on a terminal, before the commands. problem: why there is no report."""
    facts = found["twins"]
    told = chapter(facts)
    lines = ["", told.headline]
    for place, name in enumerate(facts["twins"], start=1):
        lines += [f'"{name}"', *(f"  {row[0]}: {row[place]}" for row in told.grid.rows)]
    lines += ["", *told.notes, "", "The paper's claims in these two models while they write stories:"]
    for judged in found["claims"]:
        lines += [f"  {claim['verdict']:14s}{claim['claim']}. {claim['evidence']}" for claim in judged["claims"]]
    lines += [LARGER, "", f"{told.shown['title']}. {' '.join(told.shown['notes'])}"]
    lines += ["", f"No report: {problem}, then run the same command again" if problem else f"report   {out / 'report.html'}"]
    return [*lines, f"numbers  {out / 'metrics.json'}", f"took     {facts['seconds']:.0f} s", "", "Try next:"]


def commands(found: Mapping[str, Any], out: Path, *, draws: bool) -> list[str]:
    question = found["twins"]["twins"]["sink"]["sums"][0]["question"]
    analyze = ["analyze", out / "sink" / "model", "--prompts", out / "openings.txt", "--length", 20]
    given = (
        ["sample", out / "sink", "--prompt", question, "--length", 3, "--watch"],
        [*analyze, "--out", out.with_name(f"{out.name}-analyze"), *([] if draws else ["--capture-only"])],
        ["train", out / "sink.toml", "--set", "model.n_sinks=4", "--out", out.with_name(f"{out.name}-sinks-4")],
    )
    return [shlex.join(map(str, [*program(), *command])) for command in given]


def program() -> list[str]:
    """How this program was called, so that the printed commands work where they are printed."""
    return [sys.executable, "-m", "sinkdlm"] if Path(sys.argv[0]).name == "__main__.py" else [sys.argv[0]]
