"""The loop: one for pretraining, adaptation and SFT. Everything random is keyed by the sample's number, everything else is state.

Owns the order of things in a step and what happens when something goes wrong. A resumed run makes the steps that an uninterrupted
one would have made, bit for bit on the same number of threads.
"""

import math
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from sinkdlm.attention import Opening
from sinkdlm.checkpoint import Loaded, find_device, read_tokenizer, save, write_tokenizer, written_aside
from sinkdlm.config import Recipe
from sinkdlm.data.rows import Batch, Rows, open_rows, tokenizer_folder
from sinkdlm.diffusion import Schedule, corrupt, denoising_loss
from sinkdlm.errors import CheckpointError, DataError, TrainError, UserError
from sinkdlm.model import DiffusionLM
from sinkdlm.noise import hash_words
from sinkdlm.planning import budget_steps, fitting_micro_batch, peak_flops, training_flops
from sinkdlm.training.evaluate import VALIDATION_SEED, BucketedLoss, probe, sample_text, validate
from sinkdlm.training.feed import batches
from sinkdlm.training.monitor import Monitor
from sinkdlm.training.optimizer import Average, Optimizer, learning_rate
from sinkdlm.training.run import RunFolder, host_memory
from sinkdlm.training.sameness import check_parent, mark_sets
from sinkdlm.training.signals import Signals, Stopped, noted_signals
from sinkdlm.training.state import States

_BAD_IN_A_ROW = 3  # steps without a finite loss that end a run

LoadParent = Callable[[Recipe, torch.dtype], Loaded]


class StepResult(NamedTuple):
    loss: float
    grad_norm: float
    n_masked: int
    nll_by_ratio: list[float | None]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train(
    recipe: Recipe, out: Path, *, load_parent: LoadParent | None = None, device: str | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Runs a recipe in the folder `out`, from where an earlier start left it, and returns what came of it.

    load_parent: reads `init.from` (the command line passes one that reads whatever `convert` reads).
    """
    console = console or Console(highlight=False, soft_wrap=True, markup=False, stderr=True)
    folder = RunFolder(Path(out), recipe)
    try:
        try:
            place = find_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            trainer = Trainer(recipe, folder, load_parent, place, console)
        except UserError:
            folder.discard_if_new()
            raise
        return trainer.run()
    finally:
        folder.close()


class Trainer:
    """One run, from its opening to its export."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, load_parent: LoadParent | None, device: torch.device, console: Console
    ) -> None:
        self.recipe, self.folder, self.device = recipe, folder, device
        self.plan = recipe.train
        on_gpu = device.type == "cuda"
        self.precision = ("bf16" if on_gpu else "float32") if self.plan.precision == "auto" else self.plan.precision
        self.schedule = Schedule(self.plan.schedule, self.plan.eps)
        self.monitor = Monitor(folder.path, recipe.log, console)
        self.rows, self.validation = self._open_data()
        self.steps = budget_steps(self.plan, recipe.model, recipe.data.length, self.rows.n_rows)
        self.states = States(folder.path / "checkpoints", keep=recipe.save.keep, warn=self.monitor.say)
        self.states.clean()
        self.step, self.updates, self.skipped, self.bad_in_a_row = 0, 0, 0, 0
        self.facts = self._settle_facts()
        self.tokenizer: Any = None
        self.model, self.parent = self._build(load_parent)
        self.optimizer = Optimizer(self.model, self.plan)
        self.average = Average(self.model, self.plan.ema) if self.plan.ema is not None else None
        self._resume()
        self.micro_batch = self._micro_batch()
        self._prepare_forward()

    # -- the start ------------------------------------------------------------------------------------------------------------

    def _open_data(self) -> tuple[Rows, Rows | None]:
        config, section = self.recipe.model, self.recipe.data
        if section.length > config.context_length:
            raise TrainError(f"data.length = {section.length}: allowed is at most model.context_length = {config.context_length}")
        ids = {"vocab_size": config.vocab_size, "mask_id": config.mask_id}
        rows = open_rows(section, "train", seed=self.plan.seed, **ids)
        assert rows is not None
        validation = open_rows(section, "validation", seed=VALIDATION_SEED, **ids)
        if rows.n_too_long:
            self.monitor.say(f"{rows.n_too_long} examples are longer than data.length = {section.length} and are left out")
        if validation is None and self.recipe.eval.every:
            self.monitor.say("no validation split among data.sets: no validation (data.validation names another folder)")
        return rows, validation

    def _settle_facts(self) -> dict[str, Any]:
        """What the first start found, kept: a resumed run on other data would be another run."""
        marks = {part: mark_sets(rows) for part, rows in (("data", self.rows), ("validation", self.validation)) if rows is not None}
        facts = self.folder.facts()
        if facts is None:
            facts = {"steps": self.steps, **marks}
            self.folder.write_facts(facts)
        before = [(part, name, mark) for part in ("data", "validation") for name, mark in facts.get(part, {}).items()]
        for part, name, mark in before:
            now = marks.get(part, {}).get(name, {})
            if now.get("tokenizer") != mark["tokenizer"]:
                raise TrainError(f"{name}: prepared with another tokenizer since the run began; restore it or choose another --out")
            if now != mark:
                raise TrainError(f"{name}: changed since the run began; restore it or choose another --out")
        return facts

    def _build(self, load_parent: LoadParent | None) -> tuple[DiffusionLM, dict[str, Any]]:
        """The model with its first weights: the parent's, the official random ones, or empty ones that a state will fill."""
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        resumes = bool(self.states.steps())
        if not resumes and (self.folder.path / "model").is_dir():
            raise TrainError(
                f"{self.folder.path}: has its model/ and no state to resume from: the run is over; "
                "choose another --out, or remove model/ to train it again"
            )
        parent: dict[str, Any] = {}
        if self.recipe.init.from_ is not None and not resumes:
            if load_parent is None:
                raise TrainError("init.from: no loader was given for it; use the command line, or pass load_parent=")
            loaded = load_parent(self.recipe, dtype)
            check_parent(self.recipe, self.rows, loaded)
            model, parent = loaded.model, dict(loaded.provenance)
            self._settle_tokenizer(loaded.tokenizer)
            self.facts = {**self.facts, "parent": parent}
            self.folder.write_facts(self.facts)
        else:
            with torch.device("meta") if resumes else nullcontext():
                model = DiffusionLM(self.recipe.model, seed=self.plan.seed)
            if resumes:
                model.to_empty(device="cpu")
            model.to(dtype)
            self._settle_tokenizer(None)
            parent = self.facts.get("parent", {})
        return model.to(self.device), parent

    def _settle_tokenizer(self, given: Any) -> None:
        """The tokenizer that the exported checkpoints carry: the parent's, or the data's."""
        kept = self.folder.path / "tokenizer"
        if not kept.is_dir():
            source = tokenizer_folder(self.rows.splits)
            given = given if given is not None else (read_tokenizer(source) if source is not None else None)
            if given is not None:
                with written_aside(kept) as aside:
                    write_tokenizer(aside, given)
        self.tokenizer = read_tokenizer(kept) if kept.is_dir() else None
        log, most = self.recipe.log, self.recipe.model.context_length
        if log.sample_every and self.tokenizer is None:
            raise TrainError(
                "log.sample_every: neither the data nor the parent brings a tokenizer to write texts with; set it to 0"
            )
        if log.sample_every and len(self.tokenizer.encode(log.sample_prompt)) + log.sample_length > most:
            raise TrainError(f"log.sample_length = {log.sample_length}: with the prompt allowed is model.context_length = {most}")

    def _resume(self) -> None:
        scalars = self.states.load(self._tensors())
        if scalars is None:
            self.monitor.metrics.cut(0)
            return
        self.step, self.updates = scalars["step"], scalars["updates"]
        self.skipped, self.bad_in_a_row = scalars["skipped"], scalars["bad_in_a_row"]
        self.optimizer.set_updates(self.updates)
        if not self.monitor.metrics.cut(scalars["metrics_bytes"]):
            self.monitor.say(f"{self.monitor.metrics.path}: shorter than when the state was saved; earlier lines are missing")

    def _micro_batch(self) -> int:
        if self.plan.micro_batch is not None:
            return self.plan.micro_batch
        on_gpu = self.device.type == "cuda"
        memory = torch.cuda.get_device_properties(self.device).total_memory if on_gpu else host_memory()
        return fitting_micro_batch(self.recipe, memory, self.plan.batch)

    def _prepare_forward(self) -> None:
        self.model.recompute = self.plan.recompute
        wanted = self.plan.compile
        if wanted == "blocks" or (wanted == "auto" and self.device.type == "cuda" and _has_triton()):
            for block in self.model.blocks:
                block.compile()

    # -- the loop -------------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        if self.step >= self.steps and (self.folder.path / "model").is_dir():
            self.monitor.say(f"finished before, after {self.step} steps: {self.folder.path / 'model'}")
            self.monitor.close()
            return self._summary()
        self.folder.note_start(self.step, self.device)
        self.monitor.begin(self.step, self.steps, self._settings())
        self._greet()
        try:
            with noted_signals() as signals:
                self._loop(signals)
            self._save_state(final=True)
            self._export(self.folder.path / "model", final=True)
        finally:
            self.monitor.close()
            self._finish_writing()
        return self._summary()

    def _greet(self) -> None:
        state = f"resumed at step {self.step}" if self.step else "from the beginning"
        tokens = self.steps * self.plan.batch * self.recipe.data.length
        sets = ", ".join(f"{split.folder} ({share:g})" for split, share in zip(self.rows.splits, self.rows.shares, strict=True))
        self.monitor.say(
            f"{self.folder.path}: {state}, {self.steps} steps of {self.plan.batch} rows ({self.micro_batch} a forward), "
            f"{tokens:,} tokens; {self.rows.n_rows} rows in {sets}; {self.precision} on {self.device.type}; "
            f"attention: {self.model.attention_choice()}"
        )
        if self.precision == "bf16" and self.device.type == "cpu":
            self.monitor.say('train.precision = "bf16" is slow on most CPUs; "float32" or "auto" is the cure')

    def _loop(self, signals: Signals) -> None:
        feed = batches(self.rows, self.step, self.steps, self.plan.batch, self.device)
        try:
            began = time.perf_counter()
            for batch in feed:
                waited = time.perf_counter() - began
                lr = learning_rate(self.step, self.steps, self.plan)
                result = self._make_step(batch, lr)
                self.step += 1
                self._report(result, lr, time.perf_counter() - began, waited)
                self._look_around()
                if self.bad_in_a_row >= _BAD_IN_A_ROW:
                    self._give_up()
                if self.step in self.recipe.save.milestones and self.step < self.steps:
                    self._export(self.folder.path / "milestones" / f"step-{self.step}")  # before the state: a kill here repeats it
                if self.step % self.recipe.save.every == 0 and self.step < self.steps:
                    self._save_state()
                if signals.caught is not None and self.step < self.steps:
                    self._stop(signals.caught)
                began = time.perf_counter()
        except DataError:
            self._save_state(final=True)  # the steps made so far are good
            raise
        except torch.OutOfMemoryError:
            raise TrainError(
                f"out of memory on {self.device} with {self.micro_batch} rows of {self.recipe.data.length} tokens a forward; "
                "lower train.micro_batch, or set train.recompute = true, and run again: both may change within a run"
            ) from None
        finally:
            feed.close()  # type: ignore[attr-defined]

    def _make_step(self, batch: Batch, lr: float) -> StepResult:
        """Forward and backward of every micro-batch, then one update, unless something is not finite."""
        result = self._accumulate(batch)
        if result.finite:
            self.optimizer.step(lr)
            self.updates += 1
            self.bad_in_a_row = 0
            if self.average is not None:
                self.average.update(self.model, self.updates)
        else:
            self.skipped += 1
            self.bad_in_a_row += 1
        self.optimizer.clear()
        return result

    def _accumulate(self, batch: Batch) -> StepResult:
        denominator = float(max(1, batch.count_scored(shifted=self.recipe.model.shift_logits)))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        masked = torch.zeros((), dtype=torch.float64, device=self.device)
        buckets = BucketedLoss(self.device)
        opening = self._opening()
        for start in range(0, batch.tokens.shape[0], self.micro_batch):
            piece = batch.rows(slice(start, start + self.micro_batch)).to(self.device)  # cut and counted on the host: no wait
            noisy = corrupt(
                piece.tokens,
                piece.samples,
                seed=self.plan.seed,
                mask_id=self.recipe.model.mask_id,
                schedule=self.schedule,
                times=self.plan.times,
                maskable=piece.maskable,
            )
            with self._precision():
                loss = denoising_loss(
                    self.model,
                    piece.tokens,
                    noisy,
                    denominator=denominator,
                    lengths=piece.lengths,
                    documents=piece.documents,
                    opening=opening,
                )
            loss.total.backward()
            total += loss.total.detach().double()
            masked += noisy.masked.sum()
            buckets.add(self.schedule.probability(noisy.t), loss.scored, loss.nll)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        # One read of everything: the only time in a step that the host waits for the device.
        values = torch.cat([torch.stack([total, norm.double(), masked]), buckets.sums.flatten()]).tolist()
        half = (len(values) - 3) // 2
        return StepResult(values[0], values[1], int(values[2]), BucketedLoss.means([values[3 : 3 + half], values[3 + half :]]))

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def _opening(self) -> Opening | None:
        """How far attention has opened from causal to full at this step; None when it is open."""
        last = self.plan.anneal * self.steps
        if self.step >= last:
            return None
        return Opening(self.step / last, int(hash_words(self.plan.seed, self.step)) & 0x7FFFFFFF)

    # -- what is said and kept --------------------------------------------------------------------------------------------------

    def _report(self, result: StepResult, lr: float, seconds: float, waited: float) -> None:
        """seconds: of the whole step, the wait for its rows included."""
        tokens = self.plan.batch * self.recipe.data.length
        config = self.recipe.model
        flops = tokens * training_flops(config, self.recipe.data.length, result.n_masked / tokens)
        timing: dict[str, Any] = {
            "seconds": seconds,
            "data_seconds": waited,
            "tokens_per_second": tokens / seconds,
            "flops_per_second": flops / seconds,
        }
        if self.device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(self.device))
            timing |= {
                "mfu": flops / seconds / peak if peak and self.precision == "bf16" else None,
                "memory_gb": torch.cuda.max_memory_allocated(self.device) / 1e9,
            }
        if not result.finite:
            self.monitor.say(
                f"step {self.step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite, no update "
                f"({self.bad_in_a_row} in a row, {self.skipped} in all)"
            )
        if self.step % self.recipe.log.every == 0 or self.step == self.steps or not result.finite:
            self.monitor.line(
                {
                    "kind": "train",
                    "step": self.step,
                    "samples": self.step * self.plan.batch,
                    "tokens": self.step * tokens,
                    "loss": result.loss if math.isfinite(result.loss) else None,
                    "lr": lr,
                    "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
                    "masked": result.n_masked,
                    "nll_by_ratio": [value if value is None or math.isfinite(value) else None for value in result.nll_by_ratio],
                    "updates": self.updates,
                    "skipped": self.skipped,
                    "timing": timing,
                }
            )
        mfu = f"  MFU {timing['mfu']:.1%}" if timing.get("mfu") else ""
        rate = f"{timing['tokens_per_second']:,.0f} tokens/s{mfu}"
        self.monitor.progress(self.step, self.steps, f"loss {result.loss:.4f}  grad {result.grad_norm:.2f}  lr {lr:.2e}  {rate}")

    def _look_around(self) -> None:
        """Validation, attention and samples, where they are due."""
        recipe, log = self.recipe, self.recipe.log
        last = self.step == self.steps
        if self.validation is not None and recipe.eval.every and (self.step % recipe.eval.every == 0 or last):
            arguments = (self.validation, recipe.eval.draws, self.micro_batch, self.schedule, self._precision)
            line: dict[str, Any] = {"kind": "validation", "step": self.step, **validate(self.model, *arguments)}
            if self.average is not None:
                with self.average.applied(self.model):
                    line["ema"] = validate(self.model, *arguments)
            self.monitor.line(line)
            self.monitor.say(f"step {self.step}: validation loss {line['loss']:.4f}" + _plus_minus(line["stderr"]))
        looks = self.validation or self.rows
        if log.probe_every and (self.step % log.probe_every == 0 or last):
            layers = probe(self.model, looks, log.probe_rows, self.schedule, self._precision)
            self.monitor.line({"kind": "probe", "step": self.step, "layers": layers})
        if log.sample_every and (self.step % log.sample_every == 0 or last):
            text = sample_text(self.model, self.tokenizer, log.sample_prompt, log.sample_length, self.plan.seed, self._precision)
            self.monitor.line({"kind": "sample", "step": self.step, "text": text})
            self.monitor.say(f"step {self.step}: {text!r}")

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor of the run's state, by name; a load fills these in place."""
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        tensors |= dict(self.optimizer.tensors())
        return tensors | dict(self.average.tensors()) if self.average is not None else tensors

    def _scalars(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "updates": self.updates,
            "skipped": self.skipped,
            "bad_in_a_row": self.bad_in_a_row,
            "samples": self.step * self.plan.batch,
            "metrics_bytes": self.monitor.metrics.sync(),
        }

    def _save_state(self, *, final: bool = False) -> None:
        """A failure in the middle of a run is said and tried again at the next turn; at the end it is an error."""
        if final:
            self._finish_writing()
        if self.step in self.states.whole:
            return
        try:
            self.states.save(self.step, self._tensors(), self._scalars(), background=self.recipe.save.background and not final)
        except (CheckpointError, OSError) as failure:
            if final:
                kept = self.states.steps()
                last = f"the last whole state is of step {kept[0]}" if kept else "no state was written yet"
                raise TrainError(f"{failure}; {last}; make room and run the same command again") from None
            self.monitor.say(f"step {self.step}: state not saved: {failure}; next try after {self.recipe.save.every} steps")

    def _finish_writing(self) -> None:
        try:
            self.states.wait()
        except CheckpointError as failure:
            self.monitor.say(f"a state could not be saved: {failure}")

    def _stop(self, number: int) -> None:
        self._save_state(final=True)
        raise Stopped(
            number,
            f"stopped by {signal.Signals(number).name} after step {self.step} of {self.steps}; state saved in "
            f"{self.states.place(self.step)}; run the same command to go on",
        )

    def _give_up(self) -> None:
        """The weights are still those of the last good step: skipped steps do not touch them."""
        self._save_state(final=True)
        first = self.step - self.bad_in_a_row + 1
        raise TrainError(
            f"steps {first} to {self.step}: no finite loss {_BAD_IN_A_ROW} times in a row; weights of step {first - 1} are kept "
            f"in {self.states.place(self.step)}; lower train.lr or train.clip in a new run, or run again to go on behind them"
        )

    def _export(self, path: Path, *, final: bool = False) -> None:
        provenance = {
            **self.parent,
            "recipe": self.recipe.to_dict(),
            "seed": self.plan.seed,
            "steps": self.step,
            "updates": self.updates,
            "tokens_seen": self.step * self.plan.batch * self.recipe.data.length,
            "data": self.facts["data"],
            "run": self.folder.path.name,
        }
        try:
            if self.average is not None:
                with self.average.applied(self.model):
                    beside = path.with_name("ema") if final else path.with_name(f"{path.name}-ema")
                    save(beside, self.model, self.tokenizer, {**provenance, "ema": self.plan.ema})
            save(path, self.model, self.tokenizer, provenance)  # last: a run that has it is finished
        except CheckpointError as failure:
            if final:
                raise TrainError(f"{failure}; the state is saved: make room and run the same command again") from None
            self.monitor.say(f"step {self.step}: milestone not exported: {failure}")

    def _settings(self) -> dict[str, Any]:
        return {"recipe": self.recipe.to_toml()}

    def _summary(self) -> dict[str, Any]:
        return {
            "run": str(self.folder.path),
            "model": str(self.folder.path / "model"),
            "steps": self.step,
            "updates": self.updates,
            "skipped": self.skipped,
            "tokens": self.step * self.plan.batch * self.recipe.data.length,
        }


def _plus_minus(stderr: float | None) -> str:
    return "" if stderr is None else f" ± {stderr:.4f}"


def _has_triton() -> bool:
    import importlib.util

    return importlib.util.find_spec("triton") is not None
