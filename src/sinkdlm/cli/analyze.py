"""The command `analyze`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from sinkdlm.cli.loading import choose_device, given, load_model, name_models, say
from sinkdlm.cli.options import Bos, Chat, Device, Json, PolicySet, Precision, Sampler, Seed, option
from sinkdlm.errors import AnalysisError

_DEFAULT = 32  # trajectories
_SHARES = "0.9,0.7,0.5,0.3,0.1"
_MODELS = Argument(metavar="CKPT...", help="Checkpoints, anything that `convert` reads, or captures (.json) made before.")


def analyze(
    models: Annotated[list[str], _MODELS],
    out: Annotated[Path, option("Folder for report.html, figures, metrics.json, summary.md and captures.")],
    prompts: Annotated[Path | None, option("File of prompts: lines, or .jsonl with prompt or question; default: built-in.")] = None,
    chat: Chat = False,
    bos: Bos = None,
    names: Annotated[str | None, option("Names of the models, comma-separated; by default their folders' names.")] = None,
    trajectories: Annotated[int | None, option("Trajectories per model; by default 32, or one per prompt.", min=1)] = None,
    forwards: Annotated[int | None, option("Inference steps per model, in place of --trajectories.", min=1)] = None,
    length: Annotated[int | None, option("Tokens to write after a prompt; by default 64, or as many as fit.", min=1)] = None,
    steps: Annotated[int | None, option("Denoising steps; by default one per two tokens.", min=1)] = None,
    config: Sampler = "llada",
    overrides: PolicySet = None,
    texts: Annotated[Path | None, option("File of texts, one per line: mask a part of each, write nothing.")] = None,
    shares: Annotated[str | None, option(f"With --texts: shares to mask, comma-separated; by default {_SHARES}.")] = None,
    threshold: Annotated[float, option("Received attention above which a token is a sink.", min=0, max=1)] = 0.3,
    margin: Annotated[float, option("Relative rule: by how much a sink's column sum exceeds the mean.", min=0)] = 3.0,
    maps: Annotated[list[str] | None, option("Draw this map of the first trajectory.", "--map", metavar="STEP,LAYER,HEAD")] = None,
    interventions: Annotated[bool, option("Measure what removing sinks does.", "--interventions/--no-interventions")] = True,
    capture_only: Annotated[bool, option("Write captures but no report; needs no matplotlib.", "--capture-only")] = False,
    batch: Annotated[int, option("Number of trajectories at the same time.", min=1)] = 8,
    seed: Seed = 0,
    device: Device = None,
    dtype: Precision = None,
    as_json: Json = False,
) -> None:
    """Record models while they denoise; report, with figures, where attention sinks are, how they move and what they do."""
    from sinkdlm.analysis import study
    from sinkdlm.analysis.capture import Rules
    from sinkdlm.analysis.prompts import PROMPTS
    from sinkdlm.sampling.unmasking import policy_of
    from sinkdlm.text.prompts import check_bos, encode_prompt

    called = name_models(models, names)
    if capture_only and any(Path(model).suffix == ".json" for model in models):
        raise AnalysisError("--capture-only: one of the models is a capture already; leave it out")
    if shares is not None and texts is None:
        raise AnalysisError("--shares: goes with --texts; add --texts FILE")
    if not capture_only:
        from sinkdlm.analysis.figures import check_drawing

        check_drawing()  # before hours of capture, not after them
    written = given(prompts=prompts, trajectories=trajectories, forwards=forwards, length=length, steps=steps)
    if texts is not None and written:
        raise AnalysisError(f"--texts: texts are measured as they are, nothing is written; leave out --{next(iter(written))}")
    if texts is not None and bos is not None:
        raise AnalysisError("--texts: texts are measured as they are; leave out --bos and --no-bos, which go with prompts")
    plan = study.Plan(
        prompts=[],
        policy=policy_of(config, **dict(overrides or [])),
        texts=[] if texts is None else _read_lines(texts),
        shares=[] if texts is None else _numbers(shares or _SHARES, "--shares", float),
        seed=seed,
        batch=batch,
        rules=Rules(threshold, margin),
        interventions=interventions,
        maps=[_step_layer_head(text) for text in maps or []],
    )
    asked = None if prompts is None else _read_lines(prompts, chat=chat)
    try:
        (out / "captures").mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise AnalysisError(f"{out}: cannot be written: {failure.strerror}; give another --out") from None
    captures = []
    for name, model in zip(called, models, strict=True):
        if Path(model).suffix == ".json":
            captures.append(study.read_capture(Path(model)) | {"name": name})
            continue
        path, place = out / "captures" / f"{name}.json", choose_device(device)
        lm = load_model(model, place, dtype)
        n_used = None if forwards is not None else trajectories or _DEFAULT
        check_bos(lm.tokenizer, bos)
        encoded = [encode_prompt(lm.tokenizer, prompt, bos, chat=chat) for prompt in asked or PROMPTS]  # as `sample` does
        room, size = lm.config.context_length, lm.config.block_size
        fitted = _fit(plan, encoded, room, asked is None, n_used, length, steps, size)
        count = trajectories if forwards is None else -(-forwards // fitted.n_steps)
        fitted = fitted.with_trajectories(count or min(_DEFAULT, fitted.n_different or _DEFAULT))
        captures.append(study.write_capture(path, _capture(lm, fitted, name, model, place)))
    if capture_only:
        paths = {name: str(out / "captures" / f"{name}.json") for name in called}
        say({"captures": paths}, "\n".join(f"wrote {path}" for path in paths.values()), as_json)
        return
    from sinkdlm.analysis.report import Report

    report = Report(captures)
    files = report.write(out)
    if as_json:
        typer.echo((out / "metrics.json").read_text(encoding="utf-8"), nl=False)
        return
    typer.echo(report.short())
    others = [files[name].name for name in ("summary", "metrics", "inspect") if name in files]
    typer.echo(f"wrote {files['report']}, {', '.join(others)} and figures/")


def _fit(
    plan: Any,
    prompts: Any,
    room: int,
    own: bool,
    n_used: int | None,
    length: int | None,
    steps: int | None,
    block_size: int | None,
) -> Any:
    """Fit the plan to a model: its prompts as tokens and, by default, a length that leaves room for them.

    own: the prompts are the built-in ones, which may be cut. n_used: how many prompts the length must fit; None: all. block_size:
    the model's."""
    from dataclasses import replace

    from sinkdlm.sampling.unmasking import policy_of
    from sinkdlm.text.prompts import LENGTH

    if own:
        length = length or min(LENGTH, -(-room // 2))
        prompts = [prompt[: max(0, room - length)] for prompt in prompts]
    length = length or max(1, min(LENGTH, room - max(map(len, prompts[:n_used]))))
    policy = plan.policy
    block = policy.block or block_size
    n_blocks = 0 if block is None else -(-length // block) + 1  # at most; each takes a step
    steps = steps or policy.steps or (None if policy.threshold is not None else max(1, length // 2, n_blocks))
    return replace(plan, prompts=prompts, length=length, policy=policy if steps is None else policy_of(policy, steps=steps))


def _capture(lm: Any, plan: Any, name: str, source: str, device: Any) -> dict[str, Any]:
    from sinkdlm.analysis.study import count_rows, study
    from sinkdlm.data.display import ItemBar
    from sinkdlm.training.run import environment

    made = {**environment(device), "dtype": lm.dtype}
    with ItemBar(f"rows through {name}", count_rows(lm, plan)) as display:
        return study(lm, plan, name=name, source=source, made=made, show=display.update)


def _step_layer_head(text: str) -> tuple[int, int, int]:
    found = _numbers(text, "--map", int)
    if len(found) != 3:
        raise AnalysisError(f"--map {text}: expected step, layer and head, as in 0,3,1")
    return found[0], found[1], found[2]


def _numbers(text: str, option: str, kind: Any) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise AnalysisError(f"{option} {text}: expected numbers, comma-separated") from None


def _read_lines(path: Path, *, chat: bool = False) -> list[Any]:
    from sinkdlm.text.generate import read_prompts

    found = read_prompts(path)
    if not chat and not all(isinstance(prompt, str) for prompt in found):
        raise AnalysisError(f"{path}: has chat messages; say --chat")
    return found
