"""Run the demo: data, twins, held-out sums, trajectories, report. Owns the demo's folder:

    data/         the language as token shards
    vanilla.toml  a twin's recipe, which `sinkdlm train` takes as it is; likewise sink.toml
    vanilla/      its run folder; likewise sink/
    openings.txt  first sentences of the captured stories
    captures/, figures/, report.html, summary.md, metrics.json

An interrupted demo resumes: finished parts stay, and a twin resumes from its last state. Other settings start over.
"""

import functools
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from rich.console import Console

from sinkdlm.analysis import figures
from sinkdlm.analysis.intervals import LEVEL
from sinkdlm.analysis.report import Report, to_json
from sinkdlm.analysis.study import Plan, count_rows, study, write_capture
from sinkdlm.checkpoint.directory import load
from sinkdlm.checkpoint.durable import held, replace_text
from sinkdlm.config.recipe import Recipe
from sinkdlm.data.display import ItemBar
from sinkdlm.demo import language, words
from sinkdlm.demo.screen import Screen
from sinkdlm.errors import AnalysisError, UserError
from sinkdlm.model.observe import Watcher
from sinkdlm.sampling import generate, policy_of
from sinkdlm.training.loop import train
from sinkdlm.training.run import environment

TWINS = {"vanilla": 0, "sink": 1}  # the one flag that differs: n_sinks
LENGTH = 32  # tokens of a row
WRITTEN = 20  # tokens that a captured story writes
_EXAMPLES = 3  # sums in the report
_OWN = (
    *("data", "captures", "figures", "report.html", "summary.md", "metrics.json", "openings.txt", "demo.json"),
    *TWINS,
    *(f"{twin}.toml" for twin in TWINS),
)


def recipe_of(twin: str, sets: Mapping[str, str], steps: int, seed: int) -> Recipe:
    """The recipe of a twin. eps = 0.5 masks each token with a probability of one half or more: a mask that hides no digit of the
    answer teaches nothing, and one that hides few has a large loss weight."""
    shape = {"preset": "nano", "vocab_size": len(language.vocabulary()), "context_length": 2 * LENGTH, "n_sinks": TWINS[twin]}
    train = {"seed": seed, "steps": steps, "batch": 90, "lr": 5e-3, "min_lr": 2e-4, "warmup": 0.05, "weight_decay": 0.01}
    mixture = {"sets": {sets["sums"]: 8, sets["stories"]: 1}, "validation": sets["stories"], "length": LENGTH, "padding": "ignore"}
    return Recipe.resolve(
        {
            "model": shape,
            "data": mixture,
            "train": train | {"eps": 0.5, "precision": "float32"},
            "eval": {"every": steps, "draws": 256},
            "log": {"probe_every": max(1, steps // 40)},
            "save": {"every": max(1, steps // 5), "keep": 1},
        }
    )


def run_demo(out: Path, *, steps: int, seed: int, trajectories: int, fresh: bool, as_json: bool) -> dict[str, Any]:
    """Run the whole demo; return the content of metrics.json. as_json: keep stdout free for it."""
    console = Console(stderr=as_json, highlight=False, markup=False)
    console.soft_wrap = not console.is_terminal  # a terminal breaks lines between words, a file keeps them whole
    began = time.monotonic()
    try:
        with held(out, "demo"), _one_thread():
            recipes = _settle(out, steps, seed, fresh, console)
            console.print(words.GREETING)
            for number, (twin, recipe) in enumerate(recipes.items(), start=1):
                _train(recipe, out / twin, number, console)
            console.print("measuring held-out sums, and attention while stories are written")
            models = {twin: load(out / twin / "model") for twin in TWINS}
            facts = _score(models, out, steps, seed)
            captures = [_capture(lm, twin, out, trajectories, seed) for twin, lm in models.items()]
            facts["seconds"] = round(time.monotonic() - began, 1)
            found, problem = _report(captures, facts, out)
    except OSError as failure:
        place = failure.filename or out
        raise UserError(f"{place}: cannot be written: {failure.strerror}; make room, or choose another --out") from None
    if not as_json:
        console.print("\n".join(words.tell(found, out, problem)))
        console.print("\n".join(f"  {command}" for command in words.commands(found, out, draws=problem is None)), soft_wrap=True)
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread. Forwards this small gain nothing from a second one and lose much on a busy machine. One thread also gives
    the same numbers on any number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _settle(out: Path, steps: int, seed: int, fresh: bool, console: Console) -> dict[str, Recipe]:
    """Write recipes and data, and return the recipes. Removes a demo with other settings or of another version."""
    place = out.resolve()  # so that the recipes work from anywhere
    sets = {name: str(place / "data" / name) for name in ("sums", "stories")}
    recipes = {twin: recipe_of(twin, sets, steps, seed) for twin in TWINS}
    settings = {"language": language.digest(seed), "recipes": {twin: recipe.to_toml() for twin, recipe in recipes.items()}}
    note = out / "demo.json"
    others = [entry.name for entry in out.iterdir() if entry.name not in (*_OWN, ".lock")]
    if others and not note.exists():
        raise UserError(f"{out}: holds other files ({others[0]}) but no demo; choose another --out")
    if note.exists():
        same = note.read_text() == json.dumps(settings)
        if same and not fresh:
            console.print(f"{out}: resuming the demo that is there; --fresh starts over")
        else:
            console.print(f"{out}: starting over" + ("" if same else ": the demo that is there has other settings"))
            for name in _OWN:
                shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink(missing_ok=True)
    replace_text(note, json.dumps(settings))
    language.write_sets(place / "data", seed)
    for twin, recipe in recipes.items():
        (out / f"{twin}.toml").write_text(recipe.to_toml())
    return recipes


def _train(recipe: Recipe, folder: Path, number: int, console: Console) -> None:
    seed = recipe.train.seed
    problem, opening = language.problems(seed, held_out=True)[0], language.openings(1, seed)[0]
    monitor = functools.partial(Screen, number=number, of=len(TWINS), problem=problem, opening=opening, length=LENGTH)
    train(recipe, folder, device="cpu", console=console, monitor=monitor)
    console.print(f"{folder.name:8s}trained: {recipe.train.steps} steps in {_train_seconds(folder):.0f} s")


def _read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _train_seconds(folder: Path) -> float:
    return sum(line["timing"]["seconds"] for line in _read_metrics(folder) if line["kind"] == "train")


def _score(models: Mapping[str, Any], out: Path, steps: int, seed: int) -> dict[str, Any]:
    """Score both twins: the values of the demo's chapter in the report and in metrics.json."""
    held_out = language.problems(seed, held_out=True)
    questions, opening = [problem.question for problem in held_out], language.openings(1, seed)[0]
    answers = {twin: answer(lm, questions) for twin, lm in models.items()}
    twins: dict[str, Any] = {}
    for twin, lm in models.items():
        validation = [line for line in _read_metrics(out / twin) if line["kind"] == "validation"][-1]
        examples = list(zip(held_out, answers[twin], strict=True))[:_EXAMPLES]
        twins[twin] = {
            "n_sinks": lm.config.n_sinks,
            "exact_match": exact_match(answers[twin], held_out),
            "story_loss": {key: validation[key] for key in ("loss", "stderr", "draws")},
            "train_seconds": round(_train_seconds(out / twin), 1),
            "sums": [{"question": one.question, "answer": given, "right": given == one.answer} for one, given in examples],
            "attention_on_sums": attention_on_sums(lm, questions),
            "story": tell_story(lm, opening, LENGTH),
        }
    facts = {"seed": seed, "steps": steps, "environment": environment(torch.device("cpu")), "twins": twins}
    losses, (first, second) = (twin["story_loss"] for twin in twins.values()), answers.values()
    return facts | {"sums": compare_answers(first, second, held_out), "stories": compare_losses(*losses)}


def _capture(lm: Any, twin: str, out: Path, trajectories: int, seed: int) -> dict[str, Any]:
    openings = language.openings(trajectories, seed)
    replace_text(out / "openings.txt", "\n".join(openings) + "\n")
    plan = Plan(
        prompts=[lm.tokenizer.encode(opening) for opening in openings],
        policy=policy_of("llada", steps=WRITTEN, temperature=0.0),
        length=WRITTEN,
        seed=seed,
        draws=8,
    ).with_trajectories(trajectories)
    path, source = out / "captures" / f"{twin}.json", str(out / twin / "model")
    with ItemBar(f"rows through {twin}", count_rows(lm, plan)) as display:
        made = environment(torch.device("cpu"))
        return write_capture(path, study(lm, plan, name=twin, source=source, made=made, show=display.update))


def _report(captures: list[dict[str, Any]], facts: dict[str, Any], out: Path) -> tuple[dict[str, Any], str | None]:
    """Write metrics.json, and the report if the packages that draw it are installed; else return the reason."""
    report, problem = Report(captures, words.chapter(facts)), None
    try:
        figures.check_drawing()
    except AnalysisError as missing:
        problem = str(missing)
        (out / "report.html").unlink(missing_ok=True)  # an earlier demo's report has other numbers
        (out / "metrics.json").write_text(to_json(report.metrics()), encoding="utf-8")
    else:
        report.write(out)
    return json.loads((out / "metrics.json").read_text(encoding="utf-8")), problem


def answer(lm: Any, questions: Sequence[str]) -> list[str]:
    """Answer sums one digit a step, the most confident first."""
    return [
        text[len(question) :]
        for text, question in zip(_write(lm, questions, language.ANSWER, steps=language.ANSWER), questions, strict=True)
    ]


def tell_story(lm: Any, opening: str, length: int) -> str:
    (text,) = _write(lm, [opening], length - len(lm.tokenizer.encode(opening)), eos_id=lm.tokenizer.eos_token_id)
    return text.partition(language.EOS)[0]


def _write(lm: Any, prompts: Sequence[str], n: int, **more: Any) -> list[str]:
    """Each prompt with n tokens written after it."""
    rows = [lm.tokenizer.encode(prompt) for prompt in prompts]
    with lm.model.inference():
        asked = {"prompt": rows, "length": [len(row) + n for row in rows], "mask_id": lm.config.mask_id, "config": "llada"}
        found = generate(lm.model.denoiser(), **asked, temperature=0.0, **more)
    return [lm.tokenizer.decode(row) for row in found.rows]


def attention_on_sums(lm: Any, questions: Sequence[str]) -> list[dict[str, float]]:
    """For each layer, with answers masked: attention on the sink, if there is one, and on the most attended token."""
    mask_id = lm.config.mask_id
    tokens = torch.tensor([[*lm.tokenizer.encode(question), *[mask_id] * language.ANSWER] for question in questions])
    watcher = Watcher(block_size=lm.config.block_size)
    with lm.model.inference():
        lm.model(tokens, observe=watcher)
    found = []
    for layer in watcher.layers:
        facts = {"top_content_share": float(layer.received.mean(1).amax(-1).mean())}
        found.append(facts | ({"sink_share": float(layer.sink_share.mean())} if layer.sink_received.shape[-1] else {}))
    return found


def exact_match(answers: Sequence[str], problems: Sequence[language.Problem]) -> dict[str, Any]:
    right = sum(given == problem.answer for given, problem in zip(answers, problems, strict=True))
    low, high = share_interval(right, len(problems))
    return {"mean": right / len(problems), "low": low, "high": high, "right": right, "n": len(problems)}


def share_interval(count: int, n: int) -> tuple[float, float]:
    """Wilson's interval, which is sound near 0 and 1, where these shares lie."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    centre = (count + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(count * (n - count) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def compare_answers(first: Sequence[str], second: Sequence[str], problems: Sequence[language.Problem]) -> dict[str, Any]:
    """Count the sums that only one twin gets right, with a sign test on them."""
    rights = [(a == problem.answer, b == problem.answer) for a, b, problem in zip(first, second, problems, strict=True)]
    only_first, only_second = rights.count((True, False)), rights.count((False, True))
    n = only_first + only_second
    p = min(1.0, 2 * sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n)
    found = {"difference": (only_second - only_first) / len(problems), "only_first": only_first, "only_second": only_second}
    return found | {"p": p, "differ": p < 1 - LEVEL}


def compare_losses(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two means over the same draws as if these were independent, which overestimates the error."""
    difference, stderr = second["loss"] - first["loss"], math.hypot(first["stderr"], second["stderr"])
    return {"difference": difference, "stderr": stderr, "differ": abs(difference) > 2 * stderr}
