"""The subcommand that looks inside: analyze. Like cli.py, it imports what it needs when it runs."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sinkdlm.cli.options import Bos, Device, Dtype, Json, PolicyOverrides, Precision, Seed

_DEFAULT = 32  # trajectories
_SHARES = "0.9,0.7,0.5,0.3,0.1"
_MODELS = typer.Argument(metavar="CKPT...", help="Checkpoints, anything that `convert` reads, or captures (.json) made before.")


def register(app: typer.Typer) -> None:
    app.command("analyze")(analyze)


def analyze(
    models: Annotated[list[str], _MODELS],
    out: Annotated[Path, typer.Option(help="A folder for report.html, figures, metrics.json, summary.md and captures.")],
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts: a line each, or .jsonl with prompt or question; else built-in ones.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's turn in the tokenizer's chat template.")] = False,
    bos: Bos = None,
    names: Annotated[
        str | None, typer.Option(help="What to call the models, with commas; by default their folders' names.")
    ] = None,
    trajectories: Annotated[
        int | None,
        typer.Option(min=1, help="Denoising trajectories of each model; by default 32, or fewer if there are fewer prompts."),
    ] = None,
    forwards: Annotated[
        int | None, typer.Option(min=1, help="Instead: as many trajectories as give so many inference steps.")
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens to write after a prompt; by default 64, if they fit.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; by default one for two tokens.")] = None,
    config: Annotated[str, typer.Option("--config", "--policy", help="smdm-origin, smdm-greedy, llada, dream or fast.")] = "llada",
    overrides: PolicyOverrides = None,
    texts: Annotated[Path | None, typer.Option(help="Instead of writing: texts, a line each, with a part of them masked.")] = None,
    shares: Annotated[str | None, typer.Option(help=f"With --texts: the masked shares; by default {_SHARES}.")] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Received attention above which a token is a sink.")] = 0.3,
    margin: Annotated[float, typer.Option(min=0, help="Column sum above the others' mean: a sink by the relative rule.")] = 3.0,
    maps: Annotated[
        list[str] | None, typer.Option("--map", metavar="STEP,LAYER,HEAD", help="An attention map of the first trajectory.")
    ] = None,
    interventions: Annotated[
        bool, typer.Option("--interventions/--no-interventions", help="Measure what removing or moving sinks does.")
    ] = True,
    capture_only: Annotated[
        bool, typer.Option("--capture-only", help="Write captures and no report: needs no matplotlib.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Trajectories at the same time.")] = 8,
    seed: Seed = 0,
    device: Device = None,
    dtype: Precision = None,
    as_json: Json = False,
) -> None:
    """Watch models denoise: where attention sinks are, how they move, what they do; as a report with figures."""
    from sinkdlm.analysis import study
    from sinkdlm.errors import AnalysisError

    called = names_of(models, names)
    if capture_only and any(Path(model).suffix == ".json" for model in models):
        raise AnalysisError("--capture-only with a capture: it is made already; leave it out")
    if shares is not None and texts is None:
        raise AnalysisError("--shares: of the texts of --texts; give them")
    if not capture_only:
        from sinkdlm.analysis.plates import check_drawing

        check_drawing()  # before hours of capture, not after them
    given = {
        "trajectories": trajectories,
        "forwards": forwards,
        "length": length,
        "steps": steps,
        "config": config,
        "overrides": overrides or [],
        "prompts": prompts,
        "chat": chat,
        "bos": bos,
        "texts": texts,
        "shares": _numbers(shares or _SHARES, "--shares", float) if texts is not None else [],
        "rules": (threshold, margin),
        "maps": [_place(text) for text in maps or []],
        "interventions": interventions,
        "batch": batch,
        "seed": seed,
    }
    asked = _Asked(given)
    try:
        (out / "captures").mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise AnalysisError(f"{out}: cannot be written: {failure.strerror}; give another --out") from None
    captures = []
    for name, model in zip(called, models, strict=True):
        if Path(model).suffix == ".json":
            captures.append(study.read_capture(Path(model)) | {"name": name})
            continue
        path = out / "captures" / f"{name}.json"
        study.write_capture(path, _capture(model, name, asked, device, dtype))
        captures.append(study.read_capture(path))
    if capture_only:
        written = {name: str(out / "captures" / f"{name}.json") for name in called}
        typer.echo(
            json.dumps({"captures": written}, indent=2) if as_json else "\n".join(f"wrote {path}" for path in written.values())
        )
        return
    from sinkdlm.analysis.report import render_short, write_report

    paths = write_report(captures, out)
    if as_json:
        typer.echo((out / "metrics.json").read_text(encoding="utf-8"), nl=False)
        return
    typer.echo(render_short(captures))
    others = [paths[name].name for name in ("summary", "metrics", "inspect") if name in paths]
    typer.echo(f"wrote {paths['report']}, {', '.join(others)} and figures/")


class _Asked:
    """What the command line asks, checked as far as that can be done before a model is loaded."""

    def __init__(self, given: dict[str, Any]) -> None:
        from sinkdlm.analysis.prompts import PROMPTS
        from sinkdlm.config.toml import parse_override
        from sinkdlm.errors import AnalysisError
        from sinkdlm.sampling.unmasking import policy_of

        self._given = given
        unused = [key for key in ("prompts", "trajectories", "forwards", "length", "steps") if given[key] is not None]
        if given["texts"] is not None and unused:
            raise AnalysisError(f"--texts: each is looked at as it is, and nothing is written; leave out --{unused[0]}")
        if given["texts"] is not None and given["bos"] is not None:
            raise AnalysisError("--texts: each is looked at as it is; leave out --bos and --no-bos, which are of prompts")
        self._policy = policy_of(given["config"], **dict(parse_override(override) for override in given["overrides"]))
        self.texts = [] if given["texts"] is None else _read_lines(given["texts"])
        self.prompts = list(PROMPTS) if given["prompts"] is None else _read_lines(given["prompts"], chat=given["chat"])

    def plan(self, lm: Any) -> Any:
        """For one model: the default length is what fits it."""
        from sinkdlm.analysis.capture import Rules
        from sinkdlm.analysis.study import Plan
        from sinkdlm.sampling.unmasking import policy_of
        from sinkdlm.text.prompts import LENGTH, begin, check_bos, encode

        given, room = self._given, lm.config.context_length
        check_bos(lm.tokenizer, given["bos"])
        bare = [encode(lm.tokenizer, self._written(lm, prompt)) for prompt in self.prompts]
        encoded = [begin(lm.tokenizer, row, given["bos"], chat=given["chat"]) for row in bare]  # as `sample` would
        length = given["length"]
        if given["prompts"] is None:  # our own are cut to what leaves room
            length = length or min(LENGTH, -(-room // 2))
            encoded = [row[: max(0, room - length)] for row in encoded]
        used = encoded if given["forwards"] is not None else encoded[: given["trajectories"] or _DEFAULT]
        length = length or max(1, min(LENGTH, room - max(map(len, used))))
        steps = given["steps"] or self._policy.steps or (None if self._policy.threshold is not None else max(1, length // 2))
        plan = Plan(
            prompts=encoded,
            policy=policy_of(self._policy, steps=steps) if steps is not None else self._policy,
            length=length,
            texts=self.texts,
            shares=given["shares"],
            seed=given["seed"],
            batch=given["batch"],
            rules=Rules(*given["rules"]),
            interventions=given["interventions"],
            maps=given["maps"],
        )
        wanted = given["trajectories"]
        if given["forwards"] is not None:
            wanted = -(-given["forwards"] // plan.n_steps)
        return plan.with_trajectories(wanted or min(_DEFAULT, plan.n_different or _DEFAULT))

    def _written(self, lm: Any, prompt: Any) -> str:
        from sinkdlm.errors import AnalysisError
        from sinkdlm.text.prompts import chat_text, has_chat_template

        if not self._given["chat"]:
            return prompt
        if not has_chat_template(lm.tokenizer):
            raise AnalysisError("--chat: this tokenizer has no chat template; leave --chat out")
        turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return chat_text(lm.tokenizer, turns)


def _capture(model: str, name: str, asked: _Asked, device: str | None, dtype: Dtype | None) -> dict[str, Any]:
    import time

    import torch

    from sinkdlm.analysis.study import count_rows, study
    from sinkdlm.checkpoint.directory import find_device
    from sinkdlm.cli.evaluate import load_in
    from sinkdlm.evals.display import Display
    from sinkdlm.training.run import environment

    place = find_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    lm = load_in(model, place, dtype)
    plan = asked.plan(lm)
    made = {**environment(place), "dtype": str(lm.model.embed.weight.dtype).removeprefix("torch.")}
    began, done = time.monotonic(), 0
    with Display(f"rows through {name}", count_rows(lm, plan)) as display:

        def tick(rows: int) -> None:
            nonlocal done
            done += rows
            display.update(done)

        found = study(lm, plan, name=name, source=model, made=made, tick=tick)
    made["seconds"] = round(time.monotonic() - began, 3)
    return found


def names_of(models: list[str], given: str | None) -> list[str]:
    """Short and different: a folder's name, with its parent's where that says more."""
    from sinkdlm.errors import AnalysisError

    if given is not None:
        found = [name.strip() for name in given.split(",")]
    else:
        found = [_short(model) for model in models]
        found = [name if found.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(found, start=1)]
    if len(found) != len(models) or len(set(found)) != len(found) or not all(found):
        raise AnalysisError(f"--names {','.join(found)}: give a different name for each of the {len(models)} models")
    for name in found:
        if "/" in name or name.startswith("."):
            raise AnalysisError(f"--names: {name!r} becomes a file's name; leave out slashes and a dot in front")
    return found


def _short(model: str) -> str:
    path = Path(model).resolve()
    return path.parent.name if path.name == "model" else path.stem if path.is_file() else path.name


def _place(text: str) -> tuple[int, int, int]:
    from sinkdlm.errors import AnalysisError

    found = _numbers(text, "--map", int)
    if len(found) != 3:
        raise AnalysisError(f"--map {text}: expected step, layer and head, as in 0,3,1")
    return found[0], found[1], found[2]


def _numbers(text: str, option: str, kind: Any) -> list[Any]:
    from sinkdlm.errors import AnalysisError

    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise AnalysisError(f"{option} {text}: expected numbers with commas between them") from None


def _read_lines(path: Path, *, chat: bool = False) -> list[Any]:
    from sinkdlm.errors import AnalysisError
    from sinkdlm.text.generate import read_prompts

    found = read_prompts(path)
    if not chat and not all(isinstance(prompt, str) for prompt in found):
        raise AnalysisError(f"{path}: has chat messages; say --chat")
    return found
