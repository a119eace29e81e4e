"""The training loop, one for pretraining, adaptation and SFT.

Owns the order of a step and the handling of failures. Randomness is keyed by the sample index, everything else is saved state: a
resumed run makes the steps of an uninterrupted one, bit for bit on the same number of threads.
"""

import math
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from sinkdlm.checkpoint.directory import save_weights
from sinkdlm.config.recipe import Recipe
from sinkdlm.data.rows import Batch, Rows
from sinkdlm.diffusion import Schedule
from sinkdlm.distributed.signals import ENDING, Signals, Stopped, noted_signals
from sinkdlm.distributed.world import World, joined
from sinkdlm.errors import CheckpointError, DataError, TrainError, UserError
from sinkdlm.fast import compile_blocks
from sinkdlm.fast.float8_training import check_training
from sinkdlm.fast.objective import read_later
from sinkdlm.model.visibility import Annealing
from sinkdlm.noise import hash_words
from sinkdlm.planning.formulas import Layout, lay_out, settle_precision
from sinkdlm.training.adapter import add_adapter
from sinkdlm.training.captured import find_capturer
from sinkdlm.training.choose import settle_runner, settle_way
from sinkdlm.training.evaluate import probe, sample_text, validate
from sinkdlm.training.gradients import Gradients, StepResult
from sinkdlm.training.health import ContextUse, SinkHealth, read_lines, unigram_entropy
from sinkdlm.training.monitor import MakeMonitor, Monitor, Pace, Silent
from sinkdlm.training.optimizer import MOMENTS, Average, Optimizer, learning_rate
from sinkdlm.training.prefetch import prefetch
from sinkdlm.training.run import RunFolder
from sinkdlm.training.setup import LoadParent, greeting, open_data, open_model, provenance_of, trains_on_examples
from sinkdlm.training.speed import speed_of
from sinkdlm.training.state import States
from sinkdlm.training.weights import Weights

_BAD_IN_A_ROW = 3  # consecutive steps without a finite loss that end a run
_SAMPLED_ROWS = 256  # rows that tell how many positions of a row may be masked
_COUNTED_TOKENS = 1 << 18  # tokens that tell the unigram entropy
_COUNTED = ("step", "updates", "skipped", "bad_in_a_row")
_Found = TypeVar("_Found")


def train(
    recipe: Recipe,
    out: Path,
    *,
    load_parent: LoadParent | None = None,
    device: str | None = None,
    console: Console | None = None,
    monitor: MakeMonitor = Monitor,
) -> dict[str, Any]:
    """Run a recipe in the folder `out`, resuming what is there, and return a summary.

    load_parent: reads `init.from` (the command line passes one that reads whatever `convert` reads). monitor: makes the object
    that reports the run.
    """
    console = console or Console(highlight=False, soft_wrap=True, markup=False, stderr=True)
    with joined(device) as world, closing(RunFolder(Path(out), recipe, world)) as folder:
        try:
            speaker = monitor(folder.path, recipe.log, console) if world.first else None
            trainer = Trainer(recipe, folder, load_parent, world, speaker)
        except UserError:
            folder.discard_if_new()
            raise
        return trainer.run()


class Trainer:
    """One run, from setup to export. Every rank makes the same steps, each with its share of the rows."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, load_parent: LoadParent | None, world: World, monitor: Monitor | None
    ) -> None:
        """monitor: for rank 0, which reports; None on the others."""
        self.recipe, self.folder, self.world, self.device = recipe, folder, world, world.device
        self.plan = recipe.train
        self.precision = settle_precision(recipe, on_gpu=self.device.type == "cuda").train.precision
        self.autocasts = self.precision in ("bf16", "fp8")
        self.dtype = torch.float64 if self.precision == "float64" else torch.float32  # of the weights
        if self.precision == "fp8":
            check_training(self.device)
        self.schedule = Schedule(self.plan.schedule, self.plan.eps)
        self.monitor: Any = monitor or Silent()
        self.say = self.monitor.say
        self.data = open_data(recipe, self.say)
        self.rows, self.validation, self.steps = self.data
        self.states = States(
            folder.path / "checkpoints", keep=recipe.save.keep, warn=self.say, world=world, before=self.monitor.metrics.sync
        )
        if world.first:
            self.states.clean()
        self.step, self.updates, self.skipped, self.bad_in_a_row = 0, 0, 0, 0
        self.weights = self._build(load_parent)
        self.model = self.weights.model
        self.optimizer = Optimizer(self.weights.local, self.plan)
        self.average = Average(self.weights.local, self.plan.ema) if self.plan.ema is not None else None
        self._resume()
        self.sinks = SinkHealth.read(folder.path) if world.first else SinkHealth()
        self.pace, self.context = Pace(self._tokens(1)), ContextUse(self.steps, self._tokens(1), self._unigram_entropy)
        for line in read_lines(folder.path, "train") if world.first else ():
            self.context.look(line["step"], line["nll_by_ratio"])
        if recipe.save.background:
            self.states.prepare(self._tensors())
        self.gradients = self._prepare_gradients()

    def _build(self, load_parent: LoadParent | None) -> Weights:
        """Open the model on its device or devices, and decide how its steps are computed."""
        resumes = self.world.from_first(lambda: bool(self.states.steps()))
        given = (self.recipe, self.folder, self.data, self.dtype, load_parent)
        model, first, self.tokenizer, self.facts = open_model(*given, resumes=resumes)
        with first or nullcontext():
            world, section = self.world, self.recipe.parallel
            layout = world.from_first(lambda: lay_out(self.recipe, world.size, world.local_size, world.memory))
            self.way = settle_way(self.recipe, world, layout, full_rows=not self.rows.counts_vary)
            self.micro_batch = self.way.micro_batch
            settle_runner(model, self.way, self.recipe, self.precision, self.say)
            self.adapter = add_adapter(model, self.recipe, self.facts.get("parent"))
            if section.gather == "bf16" and not self.autocasts:
                raise TrainError(f"parallel.gather = 'bf16': needs train.precision = 'bf16' or 'fp8', not {self.precision!r}")
            travels_as = torch.bfloat16 if self.autocasts and section.gather != "float32" else None
            weights = Weights(model, world, self.dtype, first, layout, reshard=section.reshard, travels_as=travels_as)
        if self.way.compile == "blocks":
            compile_blocks(model)
        return weights

    def _resume(self) -> None:
        scalars, metrics = self.states.load(self._tensors()), self.monitor.metrics
        if scalars is None:
            metrics.cut(0)
            return
        for name in _COUNTED:
            setattr(self, name, scalars[name])
        self.optimizer.set_updates(self.updates)
        if not metrics.cut(scalars["metrics_bytes"]):
            self.say(f"{metrics.path}: shorter than when the state was saved; earlier lines are missing")

    def _prepare_gradients(self) -> Gradients:
        chosen = (self.micro_batch, self.way.compiled, self.say)
        found = Gradients(self.recipe, self.weights, self._precision(), *chosen)
        capturer = find_capturer(self.device) if self.world.alone and self.plan.graphs != "off" else None
        if capturer is not None:
            # Always the run's first samples: what they decide must not change when a run is resumed.
            found.fix(self.rows.batch(np.arange(min(self.plan.batch, _SAMPLED_ROWS))), capturer)
        elif self.plan.graphs == "on":
            self.say('train.graphs = "on": CUDA graphs need a single process on a GPU; training goes on without')
        return found

    def run(self) -> dict[str, Any]:
        if self.step >= self.steps and self.world.from_first((self.folder.path / "model").is_dir):
            self.say(f"already finished after {self.step} steps: {self.folder.path / 'model'}")
            self.monitor.close()
            return self._summary()
        layout = (self.weights.layout or Layout()).text
        self.folder.note_start(self.step, self.device, layout)
        self.monitor.meet(self.model, self.tokenizer)
        self.monitor.begin(self.step, self.steps, {"recipe": self.recipe.to_toml()})
        given = (self.recipe, self.folder, self.data, self.model, self.way, self.weights.layout, self.precision)
        for line in greeting(*given, step=self.step):
            self.say(line)
        try:
            # Until the export is done: a signal after the last step must not keep state or model from being written.
            with noted_signals(after_failure=not self.world.alone) as signals:
                self._make_steps(signals)
                self._save_state(final=True)
                self._export(self.folder.path / "model", final=True)
        finally:
            self.states.wait()  # a state written in the background still syncs the metrics
            self.monitor.close()
        return self._summary()

    def _make_steps(self, signals: Signals) -> None:
        share = self.world.share(self.plan.batch)
        try:
            if self.step == 0:
                self._look_at_attention()
            checked = [split for rows in (self.rows, self.validation) if rows for split in rows.splits] if self.world.first else []
            with closing(prefetch(self.rows, self.step, self.steps, self.plan.batch, share, self.device, checked)) as batches:
                began = time.perf_counter()
                for batch in batches:
                    waited = time.perf_counter() - began
                    lr = learning_rate(self.step, self.steps, self.plan)
                    result = self._make_step(batch, lr, signals)
                    self.step += 1
                    self._report(result, lr, time.perf_counter() - began, waited)
                    self._look_around()
                    self._save_or_stop(signals.caught if self.world.alone else result.signal)
                    began = time.perf_counter()
        except DataError:
            if self.world.alone:  # the steps so far are good; several ranks save together or not at all
                self._save_state(final=True)
            raise
        except torch.OutOfMemoryError:
            raise TrainError(
                f"out of memory on {self.device} with {self.micro_batch} rows of {self.recipe.data.length} tokens a forward; "
                'lower train.micro_batch, or set train.recompute = "full", and run again: both may change within a run'
            ) from None

    def _make_step(self, batch: Batch, lr: float, signals: Signals) -> StepResult:
        """Run forward and backward of every micro-batch, then one update, unless something is not finite."""
        with nullcontext() if self.adapter is None else self.adapter.dropping(self.step, self.device):
            result = self._try_step(batch, lr, signals.caught)
            if result.n_missed:  # more masked positions than head slots: nothing was updated, so repeat the step
                result = self._try_step(batch, lr, signals.caught, fixed=False)
        if result.finite:
            self.updates += 1
            self.bad_in_a_row = 0
            if self.average is not None:
                self.average.update(self.updates)
        else:
            self.skipped += 1
            self.bad_in_a_row += 1
        return result

    def _try_step(self, batch: Batch, lr: float, caught: int, *, fixed: bool = True) -> StepResult:
        """Try one step. A flag on the device skips the update if numbers are not finite or head slots are too few. The host syncs
        once, after launching the update."""
        given = (self._denominator(batch), self._annealing(), self.recipe.blocks.size_at(self.step))
        found = self._gather(self.gradients.add(batch, *given, fixed=fixed), caught)
        read = read_later(found)
        norm, loss, _, missed = found[:4]
        withheld = ~(norm.isfinite() & loss.isfinite() & (missed == 0))
        self.optimizer.step(lr, norm, withheld.float())
        self.weights.clear_gradients()
        return StepResult.read(read())

    def _denominator(self, batch: Batch) -> Tensor | float:
        """Number of positions that may be scored in the whole batch, over all ranks."""
        shifted = self.recipe.model.shift_logits
        if self.world.alone:
            return float(max(1, batch.count_scored(shifted=shifted)))
        if not self.rows.counts_vary:
            return float(self.plan.batch * max(1, self.recipe.data.length - shifted))
        own = torch.tensor(batch.count_scored(shifted=shifted), dtype=torch.float64).to(self.device, non_blocking=True)
        return self.world.sum_(own).clamp_min(1).to(self.dtype)

    def _gather(self, sums: Tensor, caught: int) -> Tensor:
        """Return the gradient norm, the sums and how many ranks caught each signal: one collective, on the device."""
        gradients = self.weights.take_gradients()
        if self.world.alone:
            return torch.cat([torch.nn.utils.get_total_norm(gradients).double()[None], sums])
        flags = torch.tensor([caught == number for number in ENDING], dtype=torch.float64).to(self.device, non_blocking=True)
        end = len(sums)
        found = self.world.sum_(torch.cat([sums, self.weights.square_norm()[None], flags]))
        norm = found[end].sqrt().to(gradients[0].dtype)
        return torch.cat([norm.double()[None], found[:end], found[end + 1 :]])

    def _annealing(self) -> Annealing | None:
        """How far attention has opened from causal to full at this step; None once it is full."""
        last = self.plan.anneal * self.steps
        if self.step >= last:
            return None
        return Annealing(self.step / last, int(hash_words(self.plan.seed, self.step)) & 0x7FFFFFFF)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocasts else nullcontext()

    def _report(self, result: StepResult, lr: float, seconds: float, waited: float) -> None:
        measured = (self.step - 1, result.n_masked, seconds, waited)
        timing = speed_of(self.recipe, self.way, self.world, self.precision, *measured)
        if not result.finite:
            self.say(
                f"step {self.step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite, no update "
                f"({self.bad_in_a_row} in a row, {self.skipped} in all)"
            )
        if self.step % self.recipe.log.every == 0 or self.step == self.steps or not result.finite:
            nll_by_ratio = [_finite(value) for value in result.nll_by_ratio]
            self.monitor.line(
                {
                    "kind": "train",
                    "step": self.step,
                    "samples": self.step * self.plan.batch,
                    "tokens": self._tokens(self.step),
                    "loss": _finite(result.loss),
                    "lr": lr,
                    "grad_norm": _finite(result.grad_norm),
                    "masked": result.n_masked,
                    "nll_by_ratio": nll_by_ratio,
                    "updates": self.updates,
                    "skipped": self.skipped,
                    "timing": timing,
                }
            )
            stuck = self.context.look(self.step, nll_by_ratio) if self.world.first else None
            if stuck is not None:
                self.monitor.line({"kind": "stuck", **stuck._asdict()})
                self.say(f"step {self.step}: {stuck.text}")
        seen = self.pace.text(result.loss, seconds) + (f"  MFU {timing['mfu']:.1%}" if timing.get("mfu") else "")
        self.monitor.progress(self.step, self.steps, f"{seen}  grad {result.grad_norm:.2f}  lr {lr:.2e}")

    def _unigram_entropy(self) -> float:
        """Of the positions that are scored, in the run's first samples."""
        batch = self.rows.batch(np.arange(min(self.rows.n_rows, -(-_COUNTED_TOKENS // self.recipe.data.length))))
        return unigram_entropy(batch.tokens[batch.scored(shifted=self.recipe.model.shift_logits)])

    def _look_around(self) -> None:
        """Run validation, probe and sampling where they are due. Every rank takes part."""
        recipe, log = self.recipe, self.recipe.log
        last = self.step == self.steps
        if self.validation is not None and recipe.eval.every and (self.step % recipe.eval.every == 0 or last):
            line: dict[str, Any] = {"kind": "validation", "step": self.step, **self._validate(self.validation)}
            if self.average is not None:
                with self.average.applied():
                    line["ema"] = self._validate(self.validation)
            self.monitor.line(line)
            error = "" if line["stderr"] is None else f" ± {line['stderr']:.4f}"
            above = (
                f"; unigram entropy of the training text {self.context.unigram():.2f}"
                if last and self.recipe.init.from_ is None
                else ""
            )
            self.say(f"step {self.step}: validation loss {line['loss']:.4f}{error}{above}")
        if self.step % max(1, log.probe_every) == 0 or last:
            self._look_at_attention()
        if log.sample_every and (self.step % log.sample_every == 0 or last):
            chosen = (log.sample_prompt, log.sample_length, self.plan.seed, self._precision, self.device)
            policy = "llada" if trains_on_examples(self.rows) else "smdm-origin"  # answers; texts of a base model
            text = self._look(lambda: sample_text(self.model, self.tokenizer(), *chosen, config=policy))
            self.monitor.line({"kind": "sample", "step": self.step, "text": text})
            self.say(f"step {self.step}: {text!r}")

    def _validate(self, rows: Rows) -> dict[str, Any]:
        chosen = (self.recipe.eval.draws, self.schedule, self._precision, self.world)
        return self._look(lambda: validate(self.model, rows, *chosen))

    def _look_at_attention(self) -> None:
        log = self.recipe.log
        if not log.probe_every:
            return
        seen = (self.validation or self.rows, log.probe_rows, self.schedule, self._precision, self.device)
        layers = self._look(lambda: probe(self.model, *seen))
        self.monitor.line({"kind": "probe", "step": self.step, "layers": layers})
        lost = self.sinks.look(self.step, [layer.get("sink_share") for layer in layers])
        if lost is not None:
            self.say(f"step {self.step}: {lost.text}")

    def _look(self, forward: Callable[[], _Found]) -> _Found:
        found = self.gradients.with_room(forward)
        self.weights.settle()
        return found

    def _save_or_stop(self, caught: int) -> None:
        """caught: the signal that asks to end, or 0; all ranks see it after the same step."""
        if self.bad_in_a_row >= _BAD_IN_A_ROW:
            self._give_up()
        self.folder.check()
        if self.step == self.steps:
            return
        if self.step in self.recipe.save.milestones:
            self._export(self.folder.path / "milestones" / f"step-{self.step}")  # before the state: a kill here repeats the export
        if self.step % self.recipe.save.every == 0:
            self._save_state()
        if caught:
            self._stop(caught)

    def _save_state(self, *, final: bool = False) -> None:
        """Save the state. A failure during the run is reported, and the next due save tries again; at the end it is an error."""
        if final:
            self.states.wait()
        if self.step in self.states.whole:
            return
        try:
            if final or not self.recipe.save.background:
                self.states.save(self.step, self._tensors(), self._scalars())
            elif not self.states.save_behind(self.step, self._tensors(), self._scalars()):
                self.say(f"step {self.step}: state not saved: the previous one is still being written; raise save.every")
        except (CheckpointError, OSError) as failure:
            if final:
                kept = self.states.steps()
                last = f"the last whole state is of step {kept[0]}" if kept else "no state was written yet"
                raise TrainError(f"{failure}; {last}; make room and run the same command again") from None
            self.say(f"step {self.step}: state not saved: {failure}; next try after {self.recipe.save.every} steps")

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor of the run's state, by name; a load fills these in place."""
        kinds = {"model": self.weights.local, **{moment: self.optimizer.moments[moment] for moment in MOMENTS}}
        if self.average is not None:
            kinds["ema"] = self.average.weights
        return {f"{kind}.{name}": self.weights.spread(name, part) for kind, parts in kinds.items() for name, part in parts.items()}

    def _scalars(self) -> dict[str, Any]:
        """Numbers of the run's state. Raises CheckpointError on every rank if rank 0 cannot write its metrics."""
        return {
            **{name: getattr(self, name) for name in _COUNTED},
            "samples": self.step * self.plan.batch,
            "metrics_bytes": self.world.attempt_first(self.monitor.metrics.flush),
        }

    def _export(self, path: Path, *, final: bool = False) -> None:
        """Write a checkpoint, and the weight average beside it where one is kept."""
        run = self.folder.path.name
        provenance = provenance_of(self.recipe, self.facts, self.rows, run, steps=self.step, updates=self.updates)
        found = [(path, self.weights.collect(self.weights.local), provenance)]
        if self.average is not None:  # written first: a run that has `path` counts as finished
            beside = path.with_name("ema" if final else f"{path.name}-ema")
            found.insert(0, (beside, self.weights.collect(self.average.weights), {**provenance, "ema": self.plan.ema}))

        def write() -> None:
            if self.adapter is not None and final:
                self.adapter.save(path.with_name("adapter"), found[-1][1] or {})
            for place, whole, told in found:
                merged = whole or {} if self.adapter is None else self.adapter.merged(whole or {})
                save_weights(place, self.recipe.model, merged, self.tokenizer(), told)

        try:
            self.world.attempt_first(write)
        except CheckpointError as failure:
            if final:
                raise TrainError(f"{failure}; the state is saved: make room and run the same command again") from None
            self.say(f"step {self.step}: milestone not exported: {failure}")

    def _stop(self, number: int) -> None:
        self._save_state(final=True)
        raise Stopped(
            number,
            f"stopped by {signal.Signals(number).name} after step {self.step} of {self.steps}; state saved in "
            f"{self.states.place(self.step)}; run the same command to go on",
        )

    def _give_up(self) -> None:
        """End the run with the weights of the last good step: skipped steps do not touch them."""
        self._save_state(final=True)
        first = self.step - self.bad_in_a_row + 1
        raise TrainError(
            f"steps {first} to {self.step}: no finite loss {_BAD_IN_A_ROW} times in a row; weights of step {first - 1} are kept "
            f"in {self.states.place(self.step)}; lower train.lr or train.clip in a new run, or run again to go on after them"
        )

    def _summary(self) -> dict[str, Any]:
        return {
            "run": str(self.folder.path),
            "rank": self.world.rank,
            "model": str(self.folder.path / "model"),
            "steps": self.step,
            "updates": self.updates,
            "skipped": self.skipped,
            "tokens": self._tokens(self.step),
        }

    def _tokens(self, steps: int) -> int:
        return steps * self.plan.batch * self.recipe.data.length


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
