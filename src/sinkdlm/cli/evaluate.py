"""The commands that measure: eval, score-requests, score."""

import functools
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from sinkdlm.cli.loading import check_tokenizer, given, load_on_ranks, say
from sinkdlm.cli.options import (
    Bos,
    Chat,
    Checkpoint,
    Compile,
    Device,
    Documents,
    Field,
    Json,
    Precision,
    Seed,
    Split,
    Subset,
    TaskSet,
    option,
)
from sinkdlm.errors import ConfigError, EvalError

Draws = Annotated[int | None, option("Monte Carlo masks per request or window; by default 128.", min=1)]
Causal = Annotated[bool, option("Run the model as its AR parent: causal attention, no [MASK], no sink.", "--causal")]
BatchTokens = Annotated[int | None, option("Tokens per forward; by default chosen for the device.", min=1)]
# Options of eval that go with --responses; its file fixes the others.
_WITH_RESPONSES = {"checkpoint", "responses", "data", "out", "log_samples", "paper", "as_json"}
_WITH_RESPONSES |= {"batch_tokens", "compile_", "device", "dtype"}


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[str | None, Argument(metavar="CKPT", help="A checkpoint, or anything that `convert` reads.")] = None,
    tasks: Annotated[str, option("lm-eval's tasks, comma-separated; also lambada, siqa, gsm8k_two_stage, gsm8k_one_stage.")] = "",
    data: Annotated[Path | None, option("Folder of benchmark files; by default lm-eval downloads from the hub.")] = None,
    limit: Annotated[int | None, option("Use only the first N documents of each task.", min=1)] = None,
    num_fewshot: Annotated[int | None, option("Examples per prompt; by default the task's own number.", min=0)] = None,
    estimator: Annotated[str | None, option("exact_k, official, chain or causal; by default the task's choice.")] = None,
    draws: Draws = None,
    guidance: Annotated[float | None, option("Guidance weight for all tasks; by default each task's official one.")] = None,
    adaptive: Annotated[bool, option("Stop drawing once a question's ranking is settled.", "--adaptive")] = False,
    error: Annotated[float | None, option("With --adaptive: accepted chance of a wrong ranking; by default 0.05.")] = None,
    tolerance: Annotated[float | None, option("With --adaptive: agreement with a full run that may be lost; by default 0.")] = None,
    causal: Causal = False,
    bos: Bos = None,
    policy: Annotated[str | None, option("Sampling policy of generated answers; by default the task's, else llada.")] = None,
    steps: Annotated[int | None, option("Denoising steps of generated answers.", min=1)] = None,
    block: Annotated[int | None, option("Tokens per block of generated answers.", min=1)] = None,
    gen_kwargs: Annotated[str | None, option("lm-eval's generation settings, as in max_gen_toks=128,temperature=0.5.")] = None,
    overrides: TaskSet = None,
    chat: Chat = False,
    seed: Seed = 0,
    out: Annotated[Path | None, option("Folder for results.json and responses; the same command resumes there.")] = None,
    log_samples: Annotated[bool, option("With --out: write every document with its answers.", "--log-samples")] = False,
    paper: Annotated[str | None, option("Print a row of the paper beside the results, as in table1:0.5b:sink.")] = None,
    write_requests: Annotated[Path | None, option("Only write the requests to this file; needs CKPT only with --chat.")] = None,
    responses: Annotated[Path | None, option("Compute results from this file, which score-requests wrote.")] = None,
    use_cache: Annotated[bool, option("Use lm-eval's own (pickled) cache of requests.", "--use-cache")] = False,
    batch_tokens: BatchTokens = None,
    compile_: Compile = False,
    device: Device = None,
    dtype: Precision = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on benchmarks with lm-evaluation-harness (lm-eval): in one go, or in two halves on two machines."""
    from sinkdlm.evals.paper import paper_row

    row = paper_row(paper) if paper is not None else None
    report = functools.partial(_report, out=out, log_samples=log_samples, paper=row, as_json=as_json)
    if responses is not None:
        said = [name for name in context.params if getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"]
        if set(said) - _WITH_RESPONSES:
            raise EvalError("--responses: its file fixes requests and settings; leave out all but CKPT, --data and output options")
        _score_responses(checkpoint, responses, data, report)
        return
    chosen = _estimator(causal, estimator, draws)
    if adaptive and chosen not in (None, "exact_k"):
        raise EvalError(f"--adaptive: goes with estimator exact_k, not {chosen}")
    if log_samples and out is None and write_requests is None:
        raise EvalError("--log-samples: needs a folder; add --out DIR")
    if checkpoint is None and (write_requests is None or chat):
        raise EvalError("CKPT: missing; name a model (only --write-requests without --chat needs none)")
    changes = given(estimator=chosen, draws=draws, guidance=guidance, policy=policy, steps=steps, block=block, bos=bos)
    changes |= given(adaptive=adaptive or None, error=error, tolerance=tolerance)
    plan: dict[str, Any] = {"tasks": tuple(name.strip() for name in tasks.split(",") if name.strip()), "limit": limit, "chat": chat}
    plan |= {"data": None if data is None else str(data), "num_fewshot": num_fewshot, "use_cache": use_cache}
    plan["gen_kwargs"] = _generation_fields(gen_kwargs or "")
    _check_changes(changes, overrides or [])
    ask = functools.partial(_ask, plan, changes, overrides or [], seed)
    if write_requests is not None:
        sheet = ask(_read_tokenizer(checkpoint) if chat and checkpoint else None)[1]
        sheet.write(write_requests)
        found = {"wrote": str(write_requests), "requests": len(sheet.requests), "tasks": sorted(sheet.settings)}
        say(found, f"wrote {len(sheet.requests):,} requests to {write_requests}", as_json)
        return
    assert checkpoint is not None
    # Only rank 0 loads the harness; every rank answers its share.
    with load_on_ranks(checkpoint, device, dtype, compiled=compile_) as (world, lm):
        evaluation, sheet = ask(lm.tokenizer) if world.first else (None, None)
        sheet = world.from_first(lambda: sheet)
        answers = _answer(lm, sheet, checkpoint, world, batch_tokens, None if out is None else out / "responses.jsonl")
    if world.first:
        facts = {"model": _facts(checkpoint, lm), "seed": seed, "device": str(world.device)}
        report(evaluation, sheet.settings, answers, facts)


def _check_changes(changes: dict[str, Any], overrides: list[tuple[str, Any]]) -> None:
    """Check what can be checked before the harness and the model are loaded."""
    from sinkdlm.evals.settings import settings_for

    settings_for("", changes)
    if not any(name.rpartition(".")[2] == "adaptive" for name in (*changes, *dict(overrides))):
        for name in ("error", "tolerance"):
            if name in changes:
                raise EvalError(f"--{name}: goes with --adaptive; add it, or leave this out")


def _ask(plan: dict[str, Any], changes: dict[str, Any], overrides: list[Any], seed: int, tokenizer: Any) -> tuple[Any, Any]:
    """Build the evaluation and the sheet of its requests."""
    from sinkdlm.evals import harness
    from sinkdlm.evals.generating import ignored_cuts
    from sinkdlm.evals.requests import GENERATE
    from sinkdlm.likelihood.mask_draws import MONTE_CARLO

    evaluation = harness.Evaluation(harness.Plan(**plan), tokenizer)
    sheet = evaluation.ask(changes=changes, overrides=overrides, seed=seed)
    fields = plan["gen_kwargs"] or {}
    generated = [request for request in sheet.requests if request.kind == GENERATE]
    said = [name for name in ("policy", "steps", "block") if name in changes] + ["gen-kwargs"] * bool(fields)
    if said and not generated:
        raise EvalError(f"--{said[0]}: is for generated answers, and {', '.join(sheet.settings)} ask for none; leave it out")
    if "draws" in changes and not any(settings.estimator in MONTE_CARLO for settings in sheet.settings.values()):
        why = ", ".join(f"{task} is scored by {settings.estimator}" for task, settings in sheet.settings.items())
        raise EvalError(f"--draws: {why}, which draws nothing; leave it out, or give --estimator exact_k")
    cuts = [name for name in ("top_k", "top_p") if name in fields]
    if cuts and all(ignored_cuts(request, sheet.settings[request.task]) for request in generated):
        raise EvalError(f"--gen-kwargs {cuts[0]}: has no effect at temperature 0; add temperature=0.7, or leave it out")
    return evaluation, sheet


def _generation_fields(text: str) -> dict[str, Any] | None:
    """Read `a=1,b=[2, 3],c=word`: TOML's inline table, or pairs whose words have no quotes."""
    import tomllib

    from sinkdlm.config.toml import parse_override

    try:
        fields = tomllib.loads(f"fields = {{{text}}}")["fields"]
    except tomllib.TOMLDecodeError:
        try:
            fields = dict(parse_override(pair) for pair in text.split(",") if pair)
        except ConfigError:
            raise EvalError(f"--gen-kwargs {text}: expected key=value pairs, as in max_gen_toks=128,temperature=0.5") from None
    if "temperature" in fields:
        fields.setdefault("do_sample", bool(fields["temperature"]))  # a task's do_sample = false would ignore it
    return fields or None


def score_requests(
    checkpoint: Checkpoint,
    requests: Annotated[Path, Argument(metavar="FILE", help="File that `eval --write-requests` wrote.")],
    out: Annotated[Path, option("File of responses to write; the same command resumes it.")],
    batch_tokens: BatchTokens = None,
    compile_: Compile = False,
    device: Device = None,
    dtype: Precision = None,
    as_json: Json = False,
) -> None:
    """Answer the requests of an eval; lm-eval need not be installed. After an interruption, the same command resumes."""
    from sinkdlm.evals.requests import Sheet

    sheet = Sheet.read(requests)
    with load_on_ranks(checkpoint, device, dtype, compiled=compile_) as (world, lm):
        answers = _answer(lm, sheet, checkpoint, world, batch_tokens, out)
    if world.first:
        seconds = sum(response.seconds for response in answers.values())
        found = {"wrote": str(out), "responses": len(answers), "seconds": seconds}
        say(found, f"wrote {len(answers):,} responses to {out} ({seconds:.1f} s)", as_json)


def score(
    checkpoint: Checkpoint,
    file: Annotated[
        Path, Argument(metavar="FILE", help="txt, md, jsonl (.gz, .zst), parquet, a folder, hf://owner/name, or a prepared set.")
    ],
    field: Field = "text",
    documents: Documents = "file",
    split: Split = "train",
    subset: Subset = None,
    limit: Annotated[int | None, option("Use only the first N documents.", min=1)] = None,
    estimator: Annotated[str | None, option("Estimator: exact_k, official, chain or causal; by default exact_k.")] = None,
    draws: Draws = None,
    causal: Causal = False,
    bos: Bos = None,
    seed: Seed = 0,
    out: Annotated[Path | None, option("File of responses; the same command resumes it.")] = None,
    batch_tokens: BatchTokens = None,
    device: Device = None,
    dtype: Precision = None,
    as_json: Json = False,
) -> None:
    """Print nats, bits per byte and perplexity of documents with standard errors: upper bounds; exact by chain or causal."""
    from sinkdlm.evals import documents as texts
    from sinkdlm.evals.settings import settings_for

    changes = given(estimator=_estimator(causal, estimator, draws), draws=draws)
    settings_for("", changes)  # report a wrong one before reading the model
    prepared = texts.is_prepared(file)
    read: dict[str, Any] = {"field": field, "documents": documents, "split": split, "subset": subset, "limit": limit}
    found, n_left_out = ([], 0) if prepared else texts.read_documents(file, **read)
    with load_on_ranks(checkpoint, device, dtype) as (world, lm):
        found = (texts.validation_texts(file, lm.tokenizer) if prepared else found)[:limit]
        sheet = texts.sheet_of(found, texts.scoring(lm.tokenizer, changes, bos), seed)
        answers = _answer(lm, sheet, checkpoint, world, batch_tokens, out)
    if world.first:
        report = texts.report(found, answers, n_left_out)
        say(report, texts.draw_table(report), as_json)


def _estimator(causal: bool, estimator: str | None, draws: int | None) -> str | None:
    """The estimator of --causal and --estimator, which must go with --draws."""
    if causal and estimator not in (None, "causal"):
        raise EvalError(f"--causal: uses estimator causal, not {estimator}; leave one of the two out")
    chosen = "causal" if causal else estimator
    if draws is not None and chosen in ("chain", "causal"):
        raise EvalError(f"--draws: estimator {chosen} is exact and draws nothing; leave one of the two out")
    return chosen


def _read_tokenizer(checkpoint: str) -> Any:
    from sinkdlm.interop import open_source
    from sinkdlm.interop.tokenizer import tokenizer_of

    found = tokenizer_of(open_source(checkpoint))
    check_tokenizer(found, checkpoint)
    return found


def _facts(checkpoint: str, lm: Any) -> dict[str, Any]:
    provenance = {name: lm.provenance[name] for name in ("parent", "weights", "tokens_seen") if name in lm.provenance}
    return {"path": checkpoint, "config": lm.config.to_dict(), **provenance}


def _answer(lm: Any, sheet: Any, checkpoint: str, world: Any, batch_tokens: int | None, path: Path | None) -> Any:
    from contextlib import nullcontext

    from sinkdlm.evals.answering import Answerer, answer_sheet, fingerprint, tokenizer_fingerprint
    from sinkdlm.evals.requests import Journal, header_of

    answerer = Answerer(lm, sheet, budget=batch_tokens)
    header = header_of(sheet, fingerprint(lm.model), tokenizer_fingerprint(lm.tokenizer), lm.dtype, _facts(checkpoint, lm))
    journal = Journal(path if world.first else None, header)
    with journal if world.first else nullcontext():
        return answer_sheet(answerer, journal, world=world)


def _score_responses(checkpoint: str | None, path: Path, data: Path | None, report: Any) -> None:
    from sinkdlm.evals.requests import Sheet, read_answers
    from sinkdlm.evals.settings import Settings

    header, answers = read_answers(path)
    if "plan" not in header["about"]:
        raise EvalError(f"{path}: holds no answers of `sinkdlm eval`; `sinkdlm score` reads its own files")
    from sinkdlm.evals import harness

    told = header["about"]["plan"] | ({} if data is None else {"data": str(data)})
    tokenizer = _read_tokenizer(checkpoint) if checkpoint is not None else None
    evaluation = harness.Evaluation(harness.Plan(**told | {"tasks": tuple(told["tasks"])}), tokenizer)
    settings = {task: Settings.of(values, task) for task, values in header["settings"].items()}
    if Sheet(evaluation.ask().requests, settings, header["seed"]).digest != header["requests"]:
        raise EvalError(f"{path}: its requests differ from what lm-eval asks here; use the same --data and lm-eval version")
    report(evaluation, settings, answers, {"model": header["model"], "seed": header["seed"], "device": "cpu"})


def _report(
    evaluation: Any, settings: Any, answers: Any, facts: dict[str, Any], *, out: Any, log_samples: bool, paper: Any, as_json: bool
) -> None:
    """Score the answers, write the results and print them. paper: task -> the paper's value."""
    from dataclasses import asdict

    import torch

    from sinkdlm.evals import gsm8k, harness, report
    from sinkdlm.training.run import environment

    found = evaluation.judge(answers)
    samples = found.pop("samples", {})
    lines, notes = report.summarise(found, answers), report.notes_on(answers)
    own = {
        **facts,
        "plan": asdict(evaluation.plan),
        "settings": {task: one.to_dict() for task, one in settings.items()},
        "environment": {**environment(torch.device(facts["device"])), "harness": harness.version()},
    }
    if out is not None:
        kept = {task: rows for task, rows in samples.items() if log_samples or task in gsm8k.STAGES}
        report.write_results(out, {**found, "sinkdlm": {**own, "table": lines, "notes": notes}}, kept)
    if as_json:
        results = {"table": lines, "notes": notes, "paper": paper, "results": found["results"], "sinkdlm": own}
        typer.echo(report.to_json(results))
    else:
        typer.echo("\n".join([report.draw_table(lines, paper), *(f"note  {note}" for note in notes)]))
