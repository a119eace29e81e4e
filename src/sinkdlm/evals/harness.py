"""Connect lm-evaluation-harness (the harness): its tasks make the requests, its metrics judge the answers.

Owns the harness's model class, which tasks are loaded and from where, and what is asked. Hands neutral requests to a callable and
does not know how they are answered. Everything that needs lm-eval is here.
"""

import contextlib
import difflib
import functools
import importlib.metadata
import io
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sinkdlm.errors import EvalError, first_line

try:
    import datasets
    import lm_eval.tasks
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks._yaml_loader import load_yaml
except ImportError as failure:
    raise EvalError(f"evaluation needs: pip install 'sinkdlm[eval]' ({failure})") from None

from sinkdlm.evals import gsm8k
from sinkdlm.evals.answering import Answerer, answer_sheet
from sinkdlm.evals.generating import Manner
from sinkdlm.evals.offline import BENCHMARKS, load_splits
from sinkdlm.evals.requests import GENERATE, LOGLIKELIHOOD, ROLLING, Journal, Key, Request, Response, Sheet
from sinkdlm.evals.settings import ALIASES, Settings, read_changes, settings_for
from sinkdlm.text.prompts import render_chat

Answer = Callable[[Sequence[Request]], Sequence[Response]]
_FEWSHOT_SEED = 1234  # the harness's own
# Metric -> the length of an option, by which the harness divides its value.
_LENGTHS: dict[str, Callable[[str], float]] = {
    "acc": lambda _: 1.0,
    "acc_norm": lambda choice: float(len(choice)),
    "acc_bytes": lambda choice: float(len(choice.encode())),
}


@dataclass(frozen=True)
class Plan:
    """What to evaluate. data: a folder of files; None: the hub. limit: only the first documents of each task."""

    tasks: tuple[str, ...]
    data: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    chat: bool = False
    gen_kwargs: Mapping[str, Any] | None = None
    use_cache: bool = False
    bootstrap: int = 1000  # resamplings for the error of metrics without a formula for it

    def __post_init__(self) -> None:
        if not self.tasks:
            raise EvalError(f"--tasks: name some, as in --tasks arc_easy,hellaswag; --data reads {', '.join(BENCHMARKS)}")
        if self.use_cache and self.data is not None:
            raise EvalError("--use-cache: the harness's request cache does not know where data came from; leave it out with --data")
        object.__setattr__(self, "tasks", tuple(dict.fromkeys(ALIASES.get(task, task) for task in self.tasks)))


def load_tasks(plan: Plan) -> dict[str, Any]:
    """Load the harness's tasks, from files or the hub, and set the number of examples in their prompts."""
    with _quiet():
        manager = _manager(plan)
        specs = [_spec(plan, task, manager) for task in plan.tasks]
        try:
            loaded = manager.load(specs)
        except EvalError:
            raise
        except Exception as failure:  # whatever data sets and the network raise
            cure = "" if plan.data else "; --data DIR reads the benchmarks from files"
            raise EvalError(f"{', '.join(plan.tasks)}: the harness cannot load it: {first_line(failure)}{cure}") from failure
        for name, task in loaded["tasks"].items():
            _set_examples(plan, name, task)
            if plan.gen_kwargs and task.OUTPUT_TYPE == GENERATE:
                task.set_config(key="generation_kwargs", value=dict(plan.gen_kwargs), update=True)
    return dict(loaded)


def _manager(plan: Plan) -> Any:
    """Known tasks are looked up in their own folders: indexing all tasks takes a quarter of a minute."""
    known = {name: one.folder for name, one in BENCHMARKS.items()} | dict.fromkeys(gsm8k.STAGES, "gsm8k")
    unknown = [task for task in plan.tasks if task not in known]
    if not unknown:
        home = Path(lm_eval.tasks.__file__).parent
        folders: list[str | Path] = [home / folder for folder in dict.fromkeys(known[task] for task in plan.tasks)]
        return lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
    if plan.data is not None:
        raise EvalError(f"task {unknown[0]!r}: not among those that --data reads: {', '.join([*known, *ALIASES])}")
    manager = lm_eval.tasks.TaskManager()
    for task in unknown:
        if task not in manager.all_tasks:
            close = difflib.get_close_matches(task, [*manager.all_tasks, *known], n=3)
            hint = f"; close to it are {', '.join(close)}" if close else ""
            raise EvalError(f"task {task!r}: unknown to the harness{hint}")
    return manager


def _spec(plan: Plan, task: str, manager: Any) -> Any:
    """What the harness builds a task from: its name, or, with --data, its config with rows from files."""
    staged = task in gsm8k.STAGES
    if plan.data is None:
        return _stage_task(task) if staged else task
    own = _stage_task(task) if staged else load_yaml(manager.task_index[task].yaml_path)
    splits = load_splits(Path(plan.data), "gsm8k" if staged else task)
    tables = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    found = {**own, **_absent_splits(task, tables), "custom_dataset": lambda **_: tables}
    if callable(found.get("process_docs")):
        found["process_docs"] = functools.cache(found["process_docs"])  # the harness calls it at every access
    return found


def _absent_splits(task: str, tables: Mapping[str, Any]) -> dict[str, None]:
    """Unset splits that the task's config names and the files lack: the task would load them at its start."""
    named = {"training_split": "train", "validation_split": "validation"} | ({"fewshot_split": "train"} if task == "gsm8k" else {})
    return {key: None for key, split in named.items() if split not in tables and task not in gsm8k.STAGES}


def _stage_task(task: str) -> dict[str, Any]:
    return {
        "task": task,
        "dataset_path": "openai/gsm8k",
        "dataset_name": "main",
        "output_type": GENERATE,
        "test_split": "test",
        "doc_to_text": "Question: {{question.strip()}}",
        "doc_to_target": "{{answer}}",
        "process_results": gsm8k.process_results,
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": gsm8k.generation(task),
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
    }


def _set_examples(plan: Plan, name: str, task: Any) -> None:
    """Set the number of examples as the harness's own entry does: a task with 0 keeps it."""
    default = task.get_config("num_fewshot")
    if default is None or (plan.num_fewshot is not None and default != 0):
        task.set_config(key="num_fewshot", value=plan.num_fewshot or 0)
    task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    wanted = task.get_config("num_fewshot")
    if plan.data is not None and wanted and BENCHMARKS[name].trains and "train" not in task.dataset:
        raise EvalError(f"{name}: prompts with {wanted} examples need a train file in {plan.data}: add one, or say --num-fewshot 0")


class HarnessLM(LM):
    """A model as the harness sees it. answer: maps neutral requests to responses, in their order.

    tokenizer: only for chat templates; requests are tokenised where they are answered.
    tasks: by name, to find the divisors of options.
    """

    def __init__(self, answer: Answer, *, tokenizer: Any = None, tasks: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._answer, self.tokenizer, self._tasks = answer, tokenizer, tasks or {}

    @classmethod
    def of(cls, lm: Any, *, seed: int = 0, budget: int | None = None, **changes: Any) -> "HarnessLM":
        """For lm_eval.simple_evaluate(model=HarnessLM.of(sinkdlm.load(...)), tasks=[...]). changes: Settings of every task.

        greedy=False skips the prediction of what the model itself would write, which multiple-choice tasks do not read.
        """
        if changes.get("adaptive"):
            raise EvalError("adaptive: lm-eval passes no divisors of options here; use `sinkdlm eval --adaptive`, or Evaluation")

        def answer(requests: Sequence[Request]) -> list[Response]:
            settings = {task: settings_for(task, changes) for task in {request.task for request in requests}}
            sheet = Sheet(requests, settings, seed)
            with Journal(None, {}) as journal:
                return list(answer_sheet(Answerer(lm, sheet, budget=budget), journal).values())

        return cls(answer, tokenizer=lm.tokenizer)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        found = self._answer(self._convert(LOGLIKELIHOOD, requests))
        return [(float(response.value or 0.0), bool(response.greedy)) for response in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return [float(response.value or 0.0) for response in self._answer(self._convert(ROLLING, requests))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [" ".join(response.texts) for response in self._answer(self._convert(GENERATE, requests))]

    def _convert(self, kind: str, instances: Sequence[Instance]) -> list[Request]:
        seen: Counter[tuple[Any, ...]] = Counter()
        found = []
        for instance in instances:
            name = str(instance.task_name), int(instance.doc_id or 0), int(instance.idx)
            given: dict[str, Any] = {}
            if kind == LOGLIKELIHOOD:
                given = {"continuation": instance.args[1], "divisors": self._divisors(instance)}
            elif kind == GENERATE:
                given = {"generation": instance.args[1]}
            found.append(Request(kind, *name, instance.args[0], repeat=seen[name], **given))
            seen[name] += 1
        return found

    def _divisors(self, instance: Instance) -> dict[str, float]:
        """What the harness divides an option's value by, under each metric that it reports."""
        task = self._tasks.get(str(instance.task_name))
        if task is None or task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input:
            return {}
        choices, metrics = task.doc_to_choice(instance.doc), list(task._metric_fn_list)
        if instance.idx >= len(choices) or any(metric not in _LENGTHS for metric in metrics):
            return {}
        found = {metric: _LENGTHS[metric](choices[instance.idx]) for metric in metrics}
        return found if all(found.values()) else {}

    @property
    def eot_token_id(self) -> int | None:
        return getattr(self.tokenizer, "eos_token_id", None)

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return getattr(self.tokenizer, "chat_template", None) if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise EvalError("--chat: this tokenizer has no chat template; leave --chat out, or give CKPT with one")
        assert self.tokenizer is not None
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return render_chat(self.tokenizer, chat_history, **options)
        except Exception as failure:  # templates raise what they like
            raise EvalError(f"--chat: the tokenizer's chat template fails: {first_line(failure)}") from None


class Evaluation:
    """A plan with its tasks loaded: collects all requests first, and judges once all are answered."""

    def __init__(self, plan: Plan, tokenizer: Any = None) -> None:
        self.plan, self.tokenizer = plan, tokenizer
        self._loaded = load_tasks(plan)
        self.tasks: dict[str, Any] = self._loaded["tasks"]

    def ask(self, *, changes: Mapping[str, Any] | None = None, overrides: Sequence[tuple[str, Any]] = (), seed: int = 0) -> Sheet:
        """Collect all that the harness would ask a model. changes: settings of all tasks; overrides: (task.key, value) of one."""
        own = read_changes(overrides, self.tasks)
        settings = {name: _settings(name, task, changes or {}, own.get(name)) for name, task in self.tasks.items()}
        asked: list[Request] = []

        def record(requests: Sequence[Request]) -> list[Response]:
            asked.extend(requests)
            return [Response(*request.key, value=0.0) for request in requests]  # dropped, like the harness's results

        self._run(record, bootstrap=0, log_samples=False)
        for request in asked:
            if request.kind == GENERATE:
                Manner.of(request, settings[request.task], None)  # refuse now what cannot be written
        return Sheet(asked, settings, seed, {"plan": asdict(self.plan), "gold": self._gold()})

    def _gold(self) -> dict[str, list[Any]]:
        """Task -> the right option of each document, or the expected answer; for readers without the harness."""
        found: dict[str, list[Any]] = {}
        for name, task in self.tasks.items():
            docs = list(task.eval_docs)[: self.plan.limit]
            if task.OUTPUT_TYPE == "multiple_choice" and not task.multiple_input:
                found[name] = [_right_option(task, doc) for doc in docs]
            elif name in gsm8k.STAGES:
                found[name] = [doc["answer"] for doc in docs]
            elif task.OUTPUT_TYPE == LOGLIKELIHOOD:
                found[name] = [0] * len(docs)
        return found

    def judge(self, responses: Mapping[Key, Response]) -> dict[str, Any]:
        """Return the harness's results for the responses."""

        def look_up(requests: Sequence[Request]) -> list[Response]:
            missing = [request for request in requests if request.key not in responses]
            if missing:
                raise EvalError(f"{missing[0].place}: not answered, one of {len(missing)}; run score-requests again to answer them")
            return [responses[request.key] for request in requests]

        return self._run(look_up, bootstrap=self.plan.bootstrap, log_samples=True)

    def _run(self, answer: Answer, *, bootstrap: int, log_samples: bool) -> dict[str, Any]:
        for task in self.tasks.values():
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)  # a run uses it up, and judging must see the same prompts
        with _quiet():
            found = evaluate(
                lm=HarnessLM(answer, tokenizer=self.tokenizer, tasks=self.tasks),
                task_dict=self._loaded,
                limit=self.plan.limit,
                cache_requests=self.plan.use_cache,
                bootstrap_iters=bootstrap,
                log_samples=log_samples,
                apply_chat_template=self.plan.chat,
                fewshot_as_multiturn=self.plan.chat,
            )
        assert found is not None
        return dict(found)


def _right_option(task: Any, doc: Any) -> int | None:
    """The right option, as the harness reads it: a number, or an option's text; None for none, or several."""
    target = task.doc_to_target(doc)
    if isinstance(target, str):
        choices = task.doc_to_choice(doc)
        return choices.index(target) if target in choices else None
    return target if isinstance(target, int) else None


def _settings(name: str, task: Any, changes: Mapping[str, Any], own: Mapping[str, Any] | None) -> Settings:
    """A task's settings. Greedy prediction costs a forward per token: only where a metric reads it."""
    found = settings_for(name, changes, own)
    reads = task.OUTPUT_TYPE == LOGLIKELIHOOD or "exact_match" in getattr(task, "_metric_fn_list", {})
    return found.replace(greedy=found.greedy and reads)


def version() -> str:
    return f"lm-eval {importlib.metadata.version('lm-eval')}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness: no logs, prints or progress bars, and no processes for resampling."""
    alone, level, bars = os.environ.get("DISABLE_MULTIPROC"), logging.root.manager.disable, datasets.are_progress_bars_disabled()
    os.environ["DISABLE_MULTIPROC"] = "1"
    logging.disable(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)
        if not bars:
            datasets.enable_progress_bars()
        del os.environ["DISABLE_MULTIPROC"]
        os.environ |= {} if alone is None else {"DISABLE_MULTIPROC": alone}
