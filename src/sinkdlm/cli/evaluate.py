"""Subcommands that measure: eval, score-requests, score. Like cli.py, each imports what it needs when it runs."""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from sinkdlm.cli.options import Bos, Compile, Device, Documents, Dtype, Json, Precision, Seed

_CKPT = typer.Argument(metavar="CKPT", help="A checkpoint, or anything that `convert` reads.")
Draws = Annotated[int | None, typer.Option(min=1, help="Monte Carlo masks of a request; by default 128.")]
Estimator = Annotated[
    str | None, typer.Option(help="exact_k, official, chain or causal; by default the official choice for the task.")
]
BatchTokens = Annotated[int | None, typer.Option(min=1, help="Tokens in a forward.")]


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
    app.command("score-requests")(score_requests)
    app.command("score")(score)


def evaluate(
    checkpoint: Annotated[str | None, _CKPT] = None,
    tasks: Annotated[
        str, typer.Option(help="Names of the harness's tasks, with commas; also lambada, siqa, gsm8k_two_stage.")
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="A folder of the benchmarks' files; without it the harness asks the hub.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many documents of each task.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in a prompt; by default what the task says.")] = None,
    estimator: Estimator = None,
    draws: Draws = None,
    guidance: Annotated[float | None, typer.Option(help="Of all tasks; by default the official choice for each.")] = None,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Draw no more once a question's ranking is settled.")] = False,
    error: Annotated[float | None, typer.Option(help="With --adaptive: the chance of a wrong ranking; by default 0.05.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="With --adaptive: the agreement with another full run that a question may give up.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Score the AR parent: causal attention, no [MASK], no sink.")] = False,
    bos: Bos = None,
    policy: Annotated[str | None, typer.Option(help="Of generated answers: the sampler; by default llada.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of generated answers: denoising steps.")] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Of generated answers: tokens of a block.")] = None,
    gen_kwargs: Annotated[str | None, typer.Option(help="Of generated answers: as in max_gen_toks=128,temperature=0.5.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="TASK.KEY=VALUE", help="A setting of one task.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts go through the tokenizer's chat template.")] = False,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="A folder for results.json and responses; the same command goes on there.")
    ] = None,
    log_samples: Annotated[bool, typer.Option("--log-samples", help="With --out: write every document with its answers.")] = False,
    paper: Annotated[str | None, typer.Option(help="A row of the paper to stand beside, as in table1:0.5b:sink.")] = None,
    write_requests: Annotated[Path | None, typer.Option(help="Only write down what would be asked. Needs no CKPT.")] = None,
    responses: Annotated[Path | None, typer.Option(help="Judge what score-requests has answered.")] = None,
    use_cache: Annotated[bool, typer.Option("--use-cache", help="Keep the harness's own (pickled) cache of requests.")] = False,
    batch_tokens: BatchTokens = None,
    compile_: Compile = False,
    device: Device = None,
    dtype: Precision = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on benchmarks, with lm-evaluation-harness; in one go, or in two halves."""
    from sinkdlm.errors import EvalError
    from sinkdlm.evals.paper import paper_row

    shown = Shown(out, log_samples, paper_row(paper) if paper is not None else None, as_json)
    if responses is not None:
        asking = (
            write_requests,
            tasks,
            limit,
            num_fewshot,
            estimator,
            draws,
            guidance,
            adaptive,
            error,
            tolerance,
            causal,
            bos,
            policy,
            steps,
        )
        if any(asking) or any((block, gen_kwargs, overrides, chat, seed, use_cache)) or guidance == 0 or num_fewshot == 0:
            raise EvalError("--responses: its file says what was asked and how; leave out all but CKPT, --data and what is shown")
        _judge_responses(checkpoint, responses, data, shown)
        return
    chosen = _estimator(causal, estimator)
    if adaptive and chosen not in (None, "exact_k"):
        raise EvalError(f"--adaptive: goes with estimator exact_k, not {chosen}")
    _check_draws(draws, chosen)
    if log_samples and out is None and write_requests is None:
        raise EvalError("--log-samples: say where, with --out")
    if checkpoint is None and (write_requests is None or chat):
        raise EvalError("CKPT: which model? (--write-requests needs none, but with --chat)")
    named = {"estimator": chosen, "draws": draws, "guidance": guidance, "policy": policy}
    named |= {"steps": steps, "block": block, "adaptive": adaptive or None, "error": error, "tolerance": tolerance, "bos": bos}
    plan: dict[str, Any] = {"tasks": tuple(name.strip() for name in tasks.split(",") if name.strip()), "limit": limit, "chat": chat}
    plan |= {"data": None if data is None else str(data), "num_fewshot": num_fewshot, "use_cache": use_cache}
    question = _Question(plan, named, gen_kwargs, overrides or [], seed)
    if write_requests is not None:
        sheet = question.ask(_read_tokenizer(checkpoint) if chat and checkpoint else None)[1]
        sheet.write(write_requests)
        found = {"wrote": str(write_requests), "requests": len(sheet.requests), "tasks": sorted(sheet.settings)}
        typer.echo(json.dumps(found, indent=2) if as_json else f"wrote {len(sheet.requests):,} requests to {write_requests}")
        return
    assert checkpoint is not None
    from sinkdlm.distributed.world import joined

    with joined(device) as world:  # rank 0 has the harness; every rank answers its share
        lm = load_in(checkpoint, world.device, dtype, compile_)
        evaluation, sheet = question.ask(lm.tokenizer) if world.first else (None, None)
        sheet = world.from_first(lambda: sheet)
        answers = _answer(lm, sheet, checkpoint, world, batch_tokens, None if out is None else out / "responses.jsonl")
    if world.first:
        facts = {"model": _facts(checkpoint, lm), "seed": seed, "device": str(world.device)}
        _report(evaluation, sheet.settings, answers, facts, shown)


class Shown(NamedTuple):
    """What becomes of results. paper: task -> value."""

    out: Path | None
    log_samples: bool
    paper: dict[str, float] | None
    as_json: bool


class _Question:
    """What a command line asks, checked as far as that can be done before the harness and the model are loaded."""

    def __init__(
        self, plan: dict[str, Any], named: dict[str, Any], gen_kwargs: str | None, overrides: list[str], seed: int
    ) -> None:
        from sinkdlm.config.toml import parse_override
        from sinkdlm.errors import EvalError
        from sinkdlm.evals.settings import settings_for

        self._changes = {name: value for name, value in named.items() if value is not None}
        settings_for("", self._changes)
        self._overrides = [parse_override(override) for override in overrides]
        if not any(name.rpartition(".")[2] == "adaptive" for name in (*self._changes, *dict(self._overrides))):
            for name in ("error", "tolerance"):
                if name in self._changes:
                    raise EvalError(f"--{name} goes with --adaptive")
        fields = _read_fields(gen_kwargs or "")
        if "temperature" in fields and "do_sample" not in fields:
            fields["do_sample"] = bool(fields["temperature"])  # tasks that say not to sample would drop it
        self._plan, self._seed = {**plan, "gen_kwargs": fields or None}, seed

    def ask(self, tokenizer: Any) -> tuple[Any, Any]:
        from sinkdlm.errors import EvalError
        from sinkdlm.evals import harness
        from sinkdlm.evals.generating import ignored_cuts
        from sinkdlm.evals.requests import GENERATE
        from sinkdlm.likelihood.mask_draws import MONTE_CARLO

        evaluation = harness.Evaluation(harness.Plan(**self._plan), tokenizer)
        sheet = evaluation.ask(changes=self._changes, overrides=self._overrides, seed=self._seed)
        if not any(request.kind == GENERATE for request in sheet.requests):
            given: list[str] = [name for name in ("policy", "steps", "block") if name in self._changes]
            if self._plan["gen_kwargs"] is not None:
                given.append("gen-kwargs")
            if given:
                raise EvalError(f"--{given[0]}: of generated answers, and {', '.join(sheet.settings)} ask for none; leave it out")
        if "draws" in self._changes and not any(settings.estimator in MONTE_CARLO for settings in sheet.settings.values()):
            kinds = {task: settings.estimator for task, settings in sheet.settings.items()}
            why = ", ".join(f"{task} is scored by {kind}" for task, kind in kinds.items())
            raise EvalError(f"--draws: {why}, which draws nothing; leave it out, or give --estimator exact_k")
        cuts = [name for name in ("top_k", "top_p") if name in (self._plan["gen_kwargs"] or {})]
        written = [request for request in sheet.requests if request.kind == GENERATE]
        if cuts and all(ignored_cuts(request, sheet.settings[request.task]) for request in written):
            raise EvalError(f"--gen-kwargs {cuts[0]}: means nothing at temperature 0; give temperature=0.7 too, or leave it out")
        return evaluation, sheet


def _read_fields(text: str) -> dict[str, Any]:
    """`a=1,b=[2, 3],c=word`: TOML's inline table, or pairs whose words have no quotes."""
    import tomllib

    from sinkdlm.config.toml import parse_override
    from sinkdlm.errors import ConfigError, EvalError

    try:
        return tomllib.loads(f"fields = {{{text}}}")["fields"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return dict(parse_override(pair) for pair in text.split(",") if pair)
    except ConfigError:
        raise EvalError(f"--gen-kwargs {text}: expected key=value pairs, as in max_gen_toks=128,temperature=0.5") from None


def score_requests(
    checkpoint: Annotated[str, _CKPT],
    requests: Annotated[Path, typer.Argument(metavar="FILE", help="What `eval --write-requests` wrote.")],
    out: Annotated[Path, typer.Option(help="The file of responses to write, or to go on with.")],
    batch_tokens: BatchTokens = None,
    compile_: Compile = False,
    device: Device = None,
    dtype: Precision = None,
    as_json: Json = False,
) -> None:
    """Answer requests without the harness. The same command goes on where it was interrupted."""
    from sinkdlm.evals.requests import Sheet

    sheet = Sheet.read(requests)
    from sinkdlm.distributed.world import joined

    with joined(device) as world:
        lm = load_in(checkpoint, world.device, dtype, compile_)
        answers = _answer(lm, sheet, checkpoint, world, batch_tokens, out)
    if world.first:
        seconds = sum(response.seconds for response in answers.values())
        found = {"wrote": str(out), "responses": len(answers), "seconds": seconds}
        typer.echo(json.dumps(found, indent=2) if as_json else f"wrote {len(answers):,} responses to {out} ({seconds:.1f} s)")


def score(
    checkpoint: Annotated[str, _CKPT],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="txt, md, jsonl (also .gz, .zst), parquet, or a folder of these.")],
    field: Annotated[str, typer.Option(help="The field of jsonl or parquet rows that holds the text.")] = "text",
    documents: Annotated[Documents, typer.Option(help="What one document is in a .txt or .md file.")] = Documents.FILE,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many documents.")] = None,
    estimator: Annotated[str | None, typer.Option(help="exact_k, official, chain or causal; by default exact_k.")] = None,
    draws: Annotated[int | None, typer.Option(min=1, help="Monte Carlo masks of each window; by default 128.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Score the AR parent: causal attention, no [MASK], no sink.")] = False,
    bos: Bos = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="A file of responses: the same command goes on there.")] = None,
    batch_tokens: BatchTokens = None,
    device: Device = None,
    dtype: Precision = None,
    as_json: Json = False,
) -> None:
    """Nats, bits per byte and perplexity of documents, with standard errors; upper bounds, unless by chain or causal."""
    from dataclasses import replace

    from sinkdlm.evals import documents as texts
    from sinkdlm.evals.settings import settings_for
    from sinkdlm.text.prompts import begin, check_bos

    chosen = _estimator(causal, estimator)
    _check_draws(draws, chosen)
    named = {"estimator": chosen, "draws": draws, "greedy": False}
    settings = settings_for("", {name: value for name, value in named.items() if value is not None})
    read = texts.read_documents(file, field=field, documents=documents.value)
    found = read.texts[:limit]
    from sinkdlm.distributed.world import joined

    with joined(device) as world:
        lm = load_in(checkpoint, world.device, dtype)
        check_bos(lm.tokenizer, bos)
        settings = replace(settings, bos=bool(begin(lm.tokenizer, [], bos)))  # documents begin as prompts of `sample`
        answers = _answer(lm, texts.sheet_of(found, settings, seed), checkpoint, world, batch_tokens, out)
    if world.first:
        report = texts.report(found, answers, read.n_left_out)
        typer.echo(json.dumps(report, indent=2) if as_json else texts.draw_table(report))


# -- shared ---------------------------------------------------------------------------------------------------------------------


def _estimator(causal: bool, estimator: str | None) -> str | None:
    """Of --causal and --estimator."""
    from sinkdlm.errors import EvalError

    if causal and estimator not in (None, "causal"):
        raise EvalError(f"--causal: its estimator is causal, not {estimator}; leave one of them out")
    return "causal" if causal else estimator


def _check_draws(draws: int | None, estimator: str | None) -> None:
    from sinkdlm.errors import EvalError

    if draws is not None and estimator in ("chain", "causal"):
        raise EvalError(f"--draws: estimator {estimator} draws nothing, it is exact; leave one of them out")


def load_in(checkpoint: str, device: Any, dtype: Dtype | None, compile_: bool = False) -> Any:
    import torch

    from sinkdlm.cli.app import load_with_tokenizer

    chosen = dtype or (Dtype.BFLOAT16 if device.type == "cuda" else Dtype.FLOAT32)
    lm = load_with_tokenizer(checkpoint, device, getattr(torch, chosen.value))
    if compile_:
        for part in lm.model.blocks:
            part.compile()
    return lm


def _read_tokenizer(checkpoint: str) -> Any:
    from sinkdlm.errors import EvalError
    from sinkdlm.interop import open_source
    from sinkdlm.interop.tokenizer import tokenizer_of

    found = tokenizer_of(open_source(checkpoint))
    if found is None:
        raise EvalError(f"{checkpoint}: has no tokenizer; add one with: sinkdlm convert {checkpoint} DST --tokenizer T")
    return found


def _facts(checkpoint: str, lm: Any) -> dict[str, Any]:
    provenance = {name: lm.provenance[name] for name in ("parent", "weights", "tokens_seen") if name in lm.provenance}
    return {"path": checkpoint, "config": lm.config.to_dict(), **provenance}


def _answer(lm: Any, sheet: Any, checkpoint: str, world: Any, batch_tokens: int | None, path: Path | None) -> Any:
    from contextlib import nullcontext

    from sinkdlm.evals.answering import Answerer, answer_sheet, fingerprint, tokenizer_fingerprint
    from sinkdlm.evals.responses import Journal, header_of

    answerer = Answerer(lm, sheet, budget=batch_tokens)
    arithmetic = str(lm.model.embed.weight.dtype).removeprefix("torch.")
    header = header_of(sheet, fingerprint(lm.model), tokenizer_fingerprint(lm.tokenizer), arithmetic, _facts(checkpoint, lm))
    journal = Journal(path if world.first else None, header)
    with journal if world.first else nullcontext():
        return answer_sheet(answerer, journal, world=world)


def _judge_responses(checkpoint: str | None, path: Path, data: Path | None, shown: Shown) -> None:
    from sinkdlm.errors import EvalError
    from sinkdlm.evals.requests import Sheet
    from sinkdlm.evals.responses import read_answers
    from sinkdlm.evals.settings import Settings

    header, answers = read_answers(path)
    if "plan" not in header["about"]:
        raise EvalError(f"{path}: answers no evaluation; `sinkdlm score` reads its own")
    from sinkdlm.evals import harness

    told = header["about"]["plan"] | ({} if data is None else {"data": str(data)})
    tokenizer = _read_tokenizer(checkpoint) if checkpoint is not None else None
    evaluation = harness.Evaluation(harness.Plan(**told | {"tasks": tuple(told["tasks"])}), tokenizer)
    settings = {task: Settings.of(values, task) for task, values in header["settings"].items()}
    if Sheet(evaluation.ask().requests, settings, header["seed"]).digest != header["requests"]:
        raise EvalError(f"{path}: answers other questions than the harness asks here; give the same --data, and the same version")
    _report(evaluation, settings, answers, {"model": header["model"], "seed": header["seed"], "device": "cpu"}, shown)


def _report(evaluation: Any, settings: Any, answers: Any, facts: dict[str, Any], shown: Shown) -> None:
    """Judges, writes and prints."""
    import torch

    from sinkdlm.evals import gsm8k, harness, report
    from sinkdlm.training.run import environment

    found = evaluation.judge(answers)
    samples = found.pop("samples", {})
    lines, notes = report.summarise(found, answers), report.notes_on(answers)
    own = {
        **facts,
        "plan": evaluation.plan.to_dict(),
        "settings": {task: one.to_dict() for task, one in settings.items()},
        "environment": {**environment(torch.device(facts["device"])), "harness": harness.version()},
    }
    if shown.out is not None:
        kept = {task: rows for task, rows in samples.items() if shown.log_samples or task in gsm8k.STAGES}
        report.write_results(shown.out, {**found, "sinkdlm": {**own, "table": lines, "notes": notes}}, kept)
    if shown.as_json:
        typer.echo(
            report.to_json({"table": lines, "notes": notes, "paper": shown.paper, "results": found["results"], "sinkdlm": own})
        )
        return
    typer.echo(report.draw_table(lines, shown.paper))
    for note in notes:
        typer.echo(f"note  {note}")
