"""`sinkdlm reproduce`: find the missing runs, make them in order, stop in time, write the report.

OUT/records/     results, a small JSON file for each run (--records names another place)
OUT/report.json, report.md, report.html, figures/
OUT/data, parent, runs, parts    work files; runs and parts are removed once their results are written
OUT/settings.json                --set changes and fingerprints of the data
OUT/claims/      locks: processes with the same command share the work, each makes one run at a time
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from sinkdlm.checkpoint.durable import held
from sinkdlm.errors import BusyError, ReproduceError
from sinkdlm.evals.requests import Sheet
from sinkdlm.reproduce.claims import ANSWERS, NELBO
from sinkdlm.reproduce.inputs import NO_PARENT, Asked, Inputs, Load, Parents, given_inputs
from sinkdlm.reproduce.matrix import SCALES, SFT, TRIAL_SHARE, Job, jobs_of, select, targets_of, trials_of
from sinkdlm.reproduce.nano import nano_inputs
from sinkdlm.reproduce.report import write_report
from sinkdlm.reproduce.results import TRIAL, best_rate, find_made, read_results, write_text
from sinkdlm.reproduce.running import Bench, TimeUp, clear, recipe_of, run_job, stages_of, train_job

Say = Callable[[str], None]
_PAUSE = 1.0  # seconds between checks for results of other processes


class Planned(NamedTuple):
    """A run to make. seconds: the expected time."""

    job: Job
    stages: list[str]
    seconds: float


def reproduce(asked: Asked, load_parent: Load, say: Say) -> dict[str, Any]:
    """Make the missing runs, then write the report of all results."""
    targets = targets_of(asked.target)
    if asked.scale == "small" and asked.data is None and asked.requests is None and asked.tasks != []:
        raise ReproduceError("--data or --requests: this scale needs questions; give one of them, or --tasks '' for none")
    with open_work(asked, targets, load_parent, say) as work:
        work.run()
        with held(asked.out, "reproduction", wait=True):
            left = work.look()  # others may have gone on since
            return write_report(asked.out, targets, work.scale, work.results, left=[one.job.name for one in left])


@contextmanager
def open_work(asked: Asked, targets: Sequence[str], load_parent: Load, say: Say = lambda _: None) -> Iterator["Work"]:
    """Open the work: the results that are there, and what is missing. Makes no run, only nano's data and parent.

    Nano's forwards gain nothing from a second thread, and one thread gives the same numbers on any number of cores.
    """
    before = torch.get_num_threads()
    if asked.scale == "nano":
        torch.set_num_threads(1)
    try:
        yield Work(asked, targets, load_parent, say)
    finally:
        torch.set_num_threads(before)


class Work:
    """The requested runs, the results that are there, and the bench that makes the missing ones."""

    def __init__(self, asked: Asked, targets: Sequence[str], load_parent: Load, say: Say) -> None:
        self.asked, self.scale, self.say = asked, SCALES[asked.scale], say
        self.began = time.monotonic()
        self.jobs = select(jobs_of(targets, self.scale, asked.seeds or self.scale.seeds), asked.only)
        with held(asked.out, "reproduction", wait=True):
            inputs = self._inputs()
        self.bench = Bench(asked, inputs, Parents(load_parent, asked.out / "data" / "tokenizer"), self._sheets(inputs))
        self.look()

    def _settle(self) -> None:
        """Note the settings of this folder, or compare them: processes that share a folder must make the same runs."""
        path, data = self.asked.out / "settings.json", dict(self.bench.inputs.about)
        with held(self.asked.out, "reproduction", wait=True):
            if path.exists():
                noted = json.loads(path.read_text())
                self._compare(path, noted["changes"], noted["data"], "choose another --out")
                data = {**noted["data"], **data}
            write_text(path, json.dumps({"changes": self.asked.changes, "data": data}, indent=1) + "\n")

    def look(self) -> list[Planned]:
        """Read all results that are there now, also those of other processes; return what is missing."""
        self.results = read_results(self.asked.folder, self.scale.name)
        for result in self.results.values():
            path = self.asked.folder / f"{result.name}.json"
            self._compare(path, result.facts["changes"], result.data, "give another --records")
        return self.missing()

    def _compare(self, path: Path, changes: Mapping[str, Any], data: Mapping[str, str], cure: str) -> None:
        if changes != self.asked.changes:
            raise ReproduceError(f"{path}: made with --set {changes}, not {self.asked.changes}; give the same, or {cure}")
        given = self.bench.inputs.about
        if odd := [name for name in given if name in data and data[name] != given[name]]:
            raise ReproduceError(f"{path}: made from other data ({'; '.join(odd)}); give the same, or {cure}")

    def _inputs(self) -> Inputs:
        if self.scale.name == "nano":
            return nano_inputs(self.scale, self.asked.out)
        found = given_inputs(self.asked)
        if any(job.group == SFT for job in self.jobs) and found.sft is None:
            raise ReproduceError("--sft: fine-tuning data is needed; give GSM8K's chain-of-thought file, or a set prepared from it")
        if found.parent is None and any(job.group != "scratch" for job in self.jobs):
            raise ReproduceError(NO_PARENT)
        return found

    def _sheets(self, inputs: Inputs) -> dict[str, Sheet]:
        """The questions of each requested task that has some."""
        asked = list(self.scale.tasks) if self.asked.tasks is None else self.asked.tasks
        if unknown := [task for task in asked if task not in self.scale.tasks]:
            raise ReproduceError(f"--tasks {unknown[0]}: not among {', '.join(self.scale.tasks)}")
        return {task: sheet for task in asked if (sheet := inputs.questions(self.scale, task)) is not None}

    def missing(self) -> list[Planned]:
        found = []
        for job in self.jobs:
            stages = stages_of(job, self.bench)
            made = find_made(job, self.results, self.scale)
            if made is None or any(stage not in made.facts["seconds"] for stage in stages):
                found.append(Planned(job, stages, self._expected(job, stages)))
        return found

    def _expected(self, job: Job, stages: Sequence[str]) -> float:
        """The scale's declared seconds, times the ratio of actual to declared seconds of the group's results."""
        own = [result for result in self.results.values() if result.group == job.group]
        planned = [self._declared(job.group, result.kind == TRIAL, list(result.facts["seconds"])) for result in own]
        slower = sum(result.seconds for result in own) / sum(planned) if own else 1.0
        return slower * self._declared(job.group, job.trial is not None, stages)

    def _declared(self, group: str, is_trial: bool, stages: Sequence[str]) -> float:
        seconds, share = self.scale.seconds, TRIAL_SHARE if is_trial else 1.0
        return seconds["start"] + seconds[group] * share + sum(seconds.get(stage.split()[0], 0.0) for stage in stages)

    def run(self) -> None:
        """Make runs until all are there, time is up, or the rest is with other processes."""
        self._settle()
        left, waits = self.missing(), False
        if left:
            self.say(f"{len(left)} of {len(self.jobs)} runs are missing{about(left)}")
        while left:
            try:
                tried = self._make_one(left)
            except TimeUp as late:
                self.say(f"time is up in {late}; its weights and results so far are kept, and the same command goes on")
                return
            if tried == "nothing":
                break
            if tried == "wait":
                if not waits:
                    self.say("waiting for runs of other processes, which the next runs need")
                time.sleep(_PAUSE)
            waits = tried == "wait"
            left = self.look()
        if left and any(self._is_late(one) for one in left):
            self.say(f"time is up: {len(left)} runs are left; the same command goes on")
        elif left:
            self.say(f"{len(left)} runs are left to other processes that work in {self.asked.out}")

    def _make_one(self, left: Sequence[Planned]) -> Literal["done", "wait", "nothing"]:
        """Make the first run that no process works on, that has what it needs, and that can end in time.

        "wait": the rest needs runs that other processes make now."""
        open_ = {one.job for one in left}
        needed, busy = set[Job](), set[Job]()
        for one in left:
            first = trials_of(one.job.group, one.job.variant, self.scale) if one.job.trial is None else []
            if own := open_ & {*first, one.job.base}:
                if not self._is_late(one):
                    needed |= own
                continue
            try:
                with held(self.asked.out / "claims" / one.job.name, "process"):
                    if self._is_late(one):
                        continue
                    if one.job in {other.job for other in self.look()}:  # it may have been made since
                        self._make(one, [other.job for other in left if other is not one])
                    return "done"
            except BusyError:
                busy.add(one.job)
        return "wait" if needed & busy else "nothing"

    def _is_late(self, following: Planned | None = None) -> bool:
        limit = self.asked.time_limit
        ahead = 0.0 if following is None else following.seconds
        return limit is not None and time.monotonic() - self.began + ahead > limit

    def _make(self, planned: Planned, later: Sequence[Job]) -> None:
        job, began = planned.job, time.monotonic()
        lr, told = self._learning_rate(job)
        base = job.base
        if base is not None:
            made = self.results.get(base.name)
            rate = self._learning_rate(base)[0] if made is None else made.lr
            told = {**told, "base_lr": rate}
            if not (self.bench.folder(base) / "model").is_dir():  # removed with its result; its recipe makes it again
                train_job(recipe_of(base, self.bench, rate), self.bench.folder(base), self.bench)
        result = run_job(job, self.bench, lr, told, (lambda _: None) if self.bench.quiet else self.say, self._is_late)
        self.results[job.name] = result
        if not any(other.base == job for other in later):
            clear(job, self.bench)
        if base is not None:
            clear(base, self.bench)
        measured = result.outcomes[ANSWERS if job.group == SFT else NELBO].value
        self.say(f"{job.name}: {measured:.4f} nats a token, {time.monotonic() - began:.1f} s, {len(later)} to go")

    def _learning_rate(self, job: Job) -> tuple[float | None, dict[str, Any]]:
        """A trial's own rate; for a run the best of its variant's trials, with the trials' values."""
        rates = self.scale.lrs.get(job.group)
        if rates is None:
            return None, {}
        if job.trial is not None:
            return rates[job.trial], {}
        trials = trials_of(job.group, job.variant, self.scale)
        tried = {}
        for rate, trial in zip(rates, trials, strict=True):
            if trial.name not in self.results:
                raise ReproduceError(f"{trial.name}: missing, but the runs of {job.variant} need this trial; include it in --only")
            tried[rate] = self.results[trial.name].outcomes[NELBO].value
        return best_rate(tried), {"trials": {f"{rate:g}": round(value, 5) for rate, value in tried.items()}}


def about(left: Sequence[Planned]) -> str:
    """The expected time of all runs, as the end of a sentence."""
    seconds = sum(one.seconds for one in left)
    if not left:
        return ""
    return f", about {seconds / 60:.0f} minutes" if seconds >= 120 else f", about {seconds:.0f} s"
