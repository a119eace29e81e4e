"""The commands that measure: eval, score-requests, score."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from sinkdlm.cli.loading import check_tokenizer, load_model
from sinkdlm.cli.options import Bos, Checkpoint, Compile, Device, Documents, Json, Precision, Seed, parse_override, say
from sinkdlm.errors import ConfigError, EvalError

Draws = Annotated[int | None, Option(min=1, help="Monte Carlo masks of a request; by default 128.")]
Causal = Annotated[bool, Option("--causal", help="Score the AR parent: causal attention, no [MASK], no sink.")]
BatchTokens = Annotated[int | None, Option(min=1, help="Tokens in a forward.")]
# Options of eval that go with --responses; the others are in its file.
_WITH_RESPONSES = {"checkpoint", "responses", "data", "out", "log_samples", "paper", "as_json"}
_WITH_RESPONSES |= {"batch_tokens", "compile_", "device", "dtype"}


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[str | None, Argument(metavar="CKPT", help="A checkpoint, or anything that `convert` reads.")] = None,
    tasks: Annotated[str, Option(help="Names of the harness's tasks, with commas; also lambada, siqa, gsm8k_two_stage.")] = "",
    data: Annotated[Path | None, Option(help="A folder of the benchmarks' files; without it the harness asks the hub.")] = None,
    limit: Annotated[int | None, Option(min=1, help="The first so many documents of each task.")] = None,
    num_fewshot: Annotated[int | None, Option(min=0, help="Examples in a prompt; by default what the task says.")] = None,
    estimator: Annotated[
        str | None, Option(help="exact_k, official, chain or causal; by default the official choice for the task.")
    ] = None,
    draws: Draws = None,
    guidance: Annotated[float | None, Option(help="Of all tasks; by default the official choice for each.")] = None,
    adaptive: Annotated[bool, Option("--adaptive", help="Draw no more once a question's ranking is settled.")] = False,
    error: Annotated[float | None, Option(help="With --adaptive: the chance of a wrong ranking; by default 0.05.")] = None,
    tolerance: Annotated[
        float | None, Option(help="With --adaptive: the agreement with another full run that a question may give up.")
    ] = None,
    causal: Causal = False,
    bos: Bos = None,
    policy: Annotated[str | None, Option(help="Of generated answers: the sampler; by default llada.")] = None,
    steps: Annotated[int | None, Option(min=1, help="Of generated answers: denoising steps.")] = None,
    block: Annotated[int | None, Option(min=1, help="Of generated answers: tokens of a block.")] = None,
    gen_kwargs: Annotated[str | None, Option(help="Of generated answers: as in max_gen_toks=128,temperature=0.5.")] = None,
    overrides: Annotated[
        list[Any] | None, Option("--set", metavar="TASK.KEY=VALUE", parser=parse_override, help="A setting of one task.")
    ] = None,
    chat: Annotated[bool, Option("--chat", help="Prompts go through the tokenizer's chat template.")] = False,
    seed: Seed = 0,
    out: Annotated[Path | None, Option(help="A folder for results.json and responses; the same command goes on there.")] = None,
    log_samples: Annotated[bool, Option("--log-samples", help="With --out: write every document with its answers.")] = False,
    paper: Annotated[str | None, Option(help="A row of the paper to stand beside, as in table1:0.5b:sink.")] = None,
    write_requests: Annotated[Path | None, Option(help="Only write down what would be asked. Needs no CKPT.")] = None,
    responses: Annotated[Path | None, Option(help="Score what score-requests has answered.")] = None,
    use_cache: Annotated[bool, Option("--use-cache", help="Keep the harness's own (pickled) cache of requests.")] = False,
    batch_tokens: BatchTokens = None,
    compile_: Compile = False,
    device: Device = None,
    dtype: Precision = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on benchmarks, with lm-evaluation-harness; in one go, or in two halves."""
    from sinkdlm.evals.paper import paper_row

    shown = Shown(out, log_samples, paper_row(paper) if paper is not None else None, as_json)
    if responses is not None:
        given = [name for name in context.params if getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"]
        if set(given) - _WITH_RESPONSES:
            raise EvalError("--responses: its file says what was asked and how; leave out all but CKPT, --data and what is shown")
        _score_responses(checkpoint, responses, data, shown)
        return
    chosen = _estimator(causal, estimator, draws)
    if adaptive and chosen not in (None, "exact_k"):
        raise EvalError(f"--adaptive: goes with estimator exact_k, not {chosen}")
    if log_samples and out is None and write_requests is None:
        raise EvalError("--log-samples: say where, with --out")
    if checkpoint is None and (write_requests is None or chat):
        raise EvalError("CKPT: which model? (--write-requests needs none, but with --chat)")
    named = {"estimator": chosen, "draws": draws, "guidance": guidance, "policy": policy}
    named |= {"steps": steps, "block": block, "adaptive": adaptive or None, "error": error, "tolerance": tolerance, "bos": bos}
    plan: dict[str, Any] = {"tasks": tuple(name.strip() for name in tasks.split(",") if name.strip()), "limit": limit, "chat": chat}
    plan |= {"data": None if data is None else str(data), "num_fewshot": num_fewshot, "use_cache": use_cache}
    query = _Query(plan | {"gen_kwargs": _generation_fields(gen_kwargs or "")}, named, overrides or [], seed)
    if write_requests is not None:
        sheet = query.ask(_read_tokenizer(checkpoint) if chat and checkpoint else None)[1]
        sheet.write(write_requests)
        found = {"wrote": str(write_requests), "requests": len(sheet.requests), "tasks": sorted(sheet.settings)}
        say(found, f"wrote {len(sheet.requests):,} requests to {write_requests}", as_json)
        return
    assert checkpoint is not None
    from sinkdlm.distributed.world import joined

    with joined(device) as world:  # rank 0 has the harness; every rank answers its share
        lm = load_model(checkpoint, world.device, dtype, compiled=compile_)
        evaluation, sheet = query.ask(lm.tokenizer) if world.first else (None, None)
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


class _Query:
    """What a command line asks, checked as far as that can be done before the harness and the model are loaded."""

    def __init__(self, plan: dict[str, Any], named: dict[str, Any], overrides: list[tuple[str, Any]], seed: int) -> None:
        from sinkdlm.evals.settings import settings_for

        self._plan, self._overrides, self._seed = plan, overrides, seed
        self._changes = {name: value for name, value in named.items() if value is not None}
        settings_for("", self._changes)
        if not any(name.rpartition(".")[2] == "adaptive" for name in (*self._changes, *dict(overrides))):
            for name in ("error", "tolerance"):
                if name in self._changes:
                    raise EvalError(f"--{name} goes with --adaptive")

    def ask(self, tokenizer: Any) -> tuple[Any, Any]:
        """The evaluation, and the sheet of its requests."""
        from sinkdlm.evals import harness
        from sinkdlm.evals.generating import ignored_cuts
        from sinkdlm.evals.requests import GENERATE
        from sinkdlm.likelihood.mask_draws import MONTE_CARLO

        evaluation = harness.Evaluation(harness.Plan(**self._plan), tokenizer)
        sheet = evaluation.ask(changes=self._changes, overrides=self._overrides, seed=self._seed)
        fields = self._plan["gen_kwargs"] or {}
        generated = [request for request in sheet.requests if request.kind == GENERATE]
        given = [name for name in ("policy", "steps", "block") if name in self._changes] + ["gen-kwargs"] * bool(fields)
        if given and not generated:
            raise EvalError(f"--{given[0]}: of generated answers, and {', '.join(sheet.settings)} ask for none; leave it out")
        if "draws" in self._changes and not any(settings.estimator in MONTE_CARLO for settings in sheet.settings.values()):
            why = ", ".join(f"{task} is scored by {settings.estimator}" for task, settings in sheet.settings.items())
            raise EvalError(f"--draws: {why}, which draws nothing; leave it out, or give --estimator exact_k")
        cuts = [name for name in ("top_k", "top_p") if name in fields]
        if cuts and all(ignored_cuts(request, sheet.settings[request.task]) for request in generated):
            raise EvalError(f"--gen-kwargs {cuts[0]}: means nothing at temperature 0; give temperature=0.7 too, or leave it out")
        return evaluation, sheet


def _generation_fields(text: str) -> dict[str, Any] | None:
    """Read `a=1,b=[2, 3],c=word`: TOML's inline table, or pairs whose words have no quotes."""
    import tomllib

    try:
        fields = tomllib.loads(f"fields = {{{text}}}")["fields"]
    except tomllib.TOMLDecodeError:
        try:
            fields = dict(parse_override(pair) for pair in text.split(",") if pair)
        except ConfigError:
            raise EvalError(f"--gen-kwargs {text}: expected key=value pairs, as in max_gen_toks=128,temperature=0.5") from None
    if "temperature" in fields:
        fields.setdefault("do_sample", bool(fields["temperature"]))  # tasks that say not to sample would drop it
    return fields or None


def score_requests(
    checkpoint: Checkpoint,
    requests: Annotated[Path, Argument(metavar="FILE", help="What `eval --write-requests` wrote.")],
    out: Annotated[Path, Option(help="The file of responses to write, or to go on with.")],
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
        lm = load_model(checkpoint, world.device, dtype, compiled=compile_)
        answers = _answer(lm, sheet, checkpoint, world, batch_tokens, out)
    if world.first:
        seconds = sum(response.seconds for response in answers.values())
        found = {"wrote": str(out), "responses": len(answers), "seconds": seconds}
        say(found, f"wrote {len(answers):,} responses to {out} ({seconds:.1f} s)", as_json)


def score(
    checkpoint: Checkpoint,
    file: Annotated[Path, Argument(metavar="FILE", help="txt, md, jsonl (also .gz, .zst), parquet, or a folder of these.")],
    field: Annotated[str, Option(help="The field of jsonl or parquet rows that holds the text.")] = "text",
    documents: Documents = "file",
    limit: Annotated[int | None, Option(min=1, help="The first so many documents.")] = None,
    estimator: Annotated[str | None, Option(help="exact_k, official, chain or causal; by default exact_k.")] = None,
    draws: Annotated[int | None, Option(min=1, help="Monte Carlo masks of each window; by default 128.")] = None,
    causal: Causal = False,
    bos: Bos = None,
    seed: Seed = 0,
    out: Annotated[Path | None, Option(help="A file of responses: the same command goes on there.")] = None,
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

    named = {"estimator": _estimator(causal, estimator, draws), "draws": draws, "greedy": False}
    settings = settings_for("", {name: value for name, value in named.items() if value is not None})
    read = texts.read_documents(file, field=field, documents=documents)
    found = read.texts[:limit]
    from sinkdlm.distributed.world import joined

    with joined(device) as world:
        lm = load_model(checkpoint, world.device, dtype)
        check_bos(lm.tokenizer, bos)
        settings = replace(settings, bos=bool(begin(lm.tokenizer, [], bos)))  # documents begin as prompts of `sample`
        answers = _answer(lm, texts.sheet_of(found, settings, seed), checkpoint, world, batch_tokens, out)
    if world.first:
        report = texts.report(found, answers, read.n_left_out)
        say(report, texts.draw_table(report), as_json)


# -- shared ---------------------------------------------------------------------------------------------------------------------


def _estimator(causal: bool, estimator: str | None, draws: int | None) -> str | None:
    """The estimator of --causal and --estimator, which must go with --draws."""
    if causal and estimator not in (None, "causal"):
        raise EvalError(f"--causal: its estimator is causal, not {estimator}; leave one of them out")
    chosen = "causal" if causal else estimator
    if draws is not None and chosen in ("chain", "causal"):
        raise EvalError(f"--draws: estimator {chosen} draws nothing, it is exact; leave one of them out")
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
    from sinkdlm.evals.responses import Journal, header_of

    answerer = Answerer(lm, sheet, budget=batch_tokens)
    arithmetic = str(lm.model.embed.weight.dtype).removeprefix("torch.")
    header = header_of(sheet, fingerprint(lm.model), tokenizer_fingerprint(lm.tokenizer), arithmetic, _facts(checkpoint, lm))
    journal = Journal(path if world.first else None, header)
    with journal if world.first else nullcontext():
        return answer_sheet(answerer, journal, world=world)


def _score_responses(checkpoint: str | None, path: Path, data: Path | None, shown: Shown) -> None:
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
    """Score the answers, write the results and print them."""
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
