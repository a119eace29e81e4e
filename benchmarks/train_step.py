"""Time a training step, ours beside the official form, in one run: tokens a second, MFU, peak memory, and kernels.

    python -m benchmarks.train_step --model smdm-472m --rows 16 --out benchmarks/results

- official: as the authors' code trains: the sink is a token in front under a dense (T+1)^2 mask, every position has logits in
  float32, blocks run eagerly, with torch's own norm and AdamW; official-compiled: the same, compiled whole.
- vanilla, sink, gate, logit: what `sinkdlm train` does, with CUDA graphs where train.graphs = "auto" captures them (--graphs:
  wherever possible, --no-graphs: nowhere).
- Suffixes change a form of ours: -fp8 is train.precision = "fp8" (a CPU emulates its matmuls), -whole and -blocks are
  train.compile, -residual is train.residual = "bf16", -plain is train.runner = "plain"; -torchao and -torchaorows use torchao's
  float8 layers, scaled by tensor or by row, in compiled blocks; -block32 is block diffusion in blocks of 32 tokens. They combine:
  sink-fp8-residual.

Forms take turns, so that ratios do not depend on when each was measured. --profile FORM: the kernels of one step of that form, by
kind. --sweep: the time of a step by rows and by length, beside the FLOPs of planning/formulas.py.
"""

import argparse
import gc
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measuring import kernel_times, measure, measure_together, result, write
from benchmarks.official_loop import MaskedForm
from sinkdlm import DiffusionLM, Recipe
from sinkdlm.data.rows import Batch
from sinkdlm.diffusion import Noisy, corrupt
from sinkdlm.distributed.world import World
from sinkdlm.fast import compile_blocks
from sinkdlm.fast.float8_training import fits
from sinkdlm.planning.formulas import peak_flops, training_flops
from sinkdlm.training.captured import find_capturer
from sinkdlm.training.choose import settle_runner, settle_way
from sinkdlm.training.gradients import Gradients
from sinkdlm.training.optimizer import Optimizer
from sinkdlm.training.weights import Weights

_MODELS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "sink": {"n_sinks": 1},
    "gate": {"gate": "elementwise"},
    "logit": {"n_sinks": 1, "sink_kind": "logit"},
    "official": {"n_sinks": 1},
}
_TORCHAO = {"torchao": "tensorwise", "torchaorows": "rowwise"}  # torchao's names of its recipes
_TRAINED = {  # suffix of a form of ours -> what it sets in a recipe's train
    "fp8": {"precision": "fp8"},
    "residual": {"residual": "bf16"},
    "whole": {"compile": "whole"},
    "blocks": {"compile": "blocks"},
    "plain": {"runner": "plain"},
    **{change: {"compile": "blocks"} for change in _TORCHAO},
}
_BLOCKS = re.compile(r"block(\d+)")  # suffix of a form of ours: block diffusion
_STEPS = 4  # steps that are timed together
# Kind of kernels -> words in their names; the first match counts.
_KINDS = {
    "attention": ("flash", "fmha", "cudnn", "sdpa", "attention", "_merge"),
    "matrix products": ("gemm", "nvjet", "cutlass", "matmul", "xmma", "mm_"),
    "optimizer": ("adam", "multi_tensor", "lpnorm"),
    "fused by hand": (
        "_swiglu",
        "_nll",
        "_round",
        "_norm_backward",
        "_add_norm",
        "_rotate_heads",
        "_join_heads",
        "_sum_rows",
        "_sum_parts",
    ),
    "compiled": ("triton",),
    "copies": ("copy", "memcpy", "memset", "cat"),
}


def split_form(form: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The recipe's model and train settings of a form: sink-fp8-residual is sink with two changes."""
    base, *changes = form.split("-")
    sizes = {change: int(found[1]) for change in changes if (found := _BLOCKS.fullmatch(change))}
    allowed = ["compiled"] if base == "official" else [*_TRAINED, *sizes]
    if base not in _MODELS or any(change not in allowed for change in changes):
        ours = " or ".join(f"-{change}" for change in (*_TRAINED, "block32"))
        raise argparse.ArgumentTypeError(
            f"no form {form!r}: official, official-compiled, or one of vanilla, sink, gate and logit, then any of {ours}"
        )
    trained: dict[str, str] = {}
    for change in changes:
        for key, value in _TRAINED.get(change, {}).items():
            if key in trained:
                raise argparse.ArgumentTypeError(f"form {form!r} sets train.{key} twice")
            trained[key] = value
    return _MODELS[base] | ({"block_size": max(sizes.values())} if sizes else {}), trained


def form_name(form: str) -> str:
    """Check one form before anything is measured."""
    split_form(form)
    return form


def form_names(text: str) -> str:
    """Check several forms, separated by commas."""
    return ",".join(form_name(form) for form in text.split(","))


def check_device(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse -residual on a CPU, whose steps are in float32."""
    for form in args.forms.split(",") if args.device == "cpu" else []:
        if "residual" in split_form(form)[1]:
            parser.error(f"form {form!r} needs --device cuda: a CPU's steps are timed in float32")


def to_torchao(model: DiffusionLM, scaling: str) -> None:
    """Convert the blocks' linear layers to torchao's float8 layers: those that train.precision = "fp8" covers."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for block in model.blocks:
        convert_to_float8_training(
            block,
            config=Float8LinearConfig.from_recipe_name(scaling),
            module_filter_fn=lambda layer, name: fits(layer) and not name.endswith("gate"),
        )


class Step:
    """A model that makes training steps on rows of random tokens, with new noise for each step."""

    def __init__(self, recipe: Recipe, form: str, rows: int, device: torch.device) -> None:
        self.recipe, self.form, self.device, self.rows = recipe, form, device, rows
        self._official = form.startswith("official")
        world = World(device)
        with torch.device("meta"):
            model = DiffusionLM(recipe.model)
        trained = self._as_trained()
        way = settle_way(trained, world, full_rows=True)
        self.ends_early = way.ends_early and not self._official
        if not self._official:
            settle_runner(model, way, trained, trained.train.precision, print)
        for change in form.split("-"):
            if change in _TORCHAO:
                to_torchao(model, _TORCHAO[change])
        first = model.initial_weight
        self.weights = Weights(model, world, dtype=torch.float32, first=lambda name, shape: first(name, shape, 0))
        if way.compile == "blocks" and not self._official:
            compile_blocks(model)
        self.update = self._plain_update() if self._official else Optimizer(self.weights.local, recipe.train).step
        self._logits: Callable[[Tensor], Tensor] = MaskedForm(model) if self._official else model
        if form == "official-compiled":
            self._logits = torch.compile(self._logits.__call__)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, recipe.model.vocab_size, (rows, recipe.data.length), generator=generator)
        self.take(tokens)
        self.done = 0
        self.missed = torch.zeros((), dtype=torch.float64, device=device)
        self.compiled = form == "official-compiled" if self._official else way.compiled
        self.gradients = Gradients(
            trained,
            self.weights,
            self.precision(),
            micro_batch=rows,
            compiled=self.compiled,
            say=print,
        )
        capturer = None if self._official else find_capturer(device)
        if capturer is not None:
            self.gradients.fix(self._batch(), capturer)

    def _as_trained(self) -> Recipe:
        """The recipe with which `train` would make these steps."""
        table = self.recipe.to_dict()
        train = {**table["train"], "batch": self.rows, "micro_batch": self.rows, **split_form(self.form)[1]}
        return Recipe.resolve({**table, "train": train})

    def _plain_update(self) -> Callable[[float, Tensor], object]:
        """torch's own clipping and AdamW: fused on a GPU, else over lists of tensors."""
        train, fused = self.recipe.train, self.device.type == "cuda"
        optimizer = torch.optim.AdamW(
            list(self.weights.local.values()),
            lr=train.lr,
            betas=train.betas,
            eps=train.adam_eps,
            weight_decay=train.weight_decay,
            fused=fused,
            foreach=not fused,
        )

        def update(lr: float, norm: Tensor) -> None:
            torch.nn.utils.clip_grads_with_norm_(list(self.weights.local.values()), train.clip, norm)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()

        return update

    def take(self, tokens: Tensor) -> None:
        """Set the rows of the next steps."""
        self.host_tokens = tokens.pin_memory() if self.device.type == "cuda" else tokens
        self.tokens = self.host_tokens.to(self.device)

    @property
    def recorded(self) -> bool:
        return self.gradients.captured is not None and self.gradients.captured.replays is not None

    def precision(self) -> AbstractContextManager[Any]:
        half = torch.bfloat16 if self.device.type == "cuda" else None
        return torch.autocast(self.device.type, half, enabled=half is not None)

    def _batch(self) -> Batch:
        """A batch as the reader thread provides it."""
        samples = torch.arange(self.done * self.rows, (self.done + 1) * self.rows)
        return Batch(self.host_tokens, samples.pin_memory() if self.device.type == "cuda" else samples)

    def _add_gradients(self) -> Tensor:
        if not self._official:
            loss, _, missed = self.gradients.add(self._batch(), float(self.tokens.numel()))[:3]
            self.missed += missed
            return loss
        samples = torch.arange(self.done * self.rows, (self.done + 1) * self.rows, device=self.device)
        noisy = corrupt(self.tokens, samples, seed=self.recipe.train.seed, mask_id=self.recipe.model.mask_id)
        loss = self.official_loss(noisy)
        loss.backward()
        return loss.detach()

    def official_loss(self, noisy: Noisy) -> Tensor:
        with self.precision():
            logits = self._logits(noisy.tokens)
        nll = functional.cross_entropy(logits[noisy.masked].float(), self.tokens[noisy.masked], reduction="none")
        weights = noisy.weight.to(nll.dtype)[:, None].expand(self.tokens.shape)[noisy.masked]
        return (nll * weights).sum() / self.tokens.numel()

    def __call__(self) -> Tensor:
        loss = self._add_gradients()
        gradients = self.weights.take_gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        self.update(1e-4, norm)
        self.weights.clear_gradients()
        self.done += 1
        return loss

    def several(self) -> None:
        """Make several steps as the training loop does, without waiting for the device in between."""
        for _ in range(_STEPS):
            self()


def recipe_of(preset: str, length: int, *, graphs: str = "auto", **model: Any) -> Recipe:
    train = {"batch": 1, "steps": 1, "seed": 0, "graphs": graphs}
    return Recipe.resolve({"model": {"preset": preset, **model}, "data": {"length": length}, "train": train})


def flops_of(step: Step) -> float:
    """FLOPs of a step. The head, and a last layer that ends early, count only the masked half, where they are computed."""
    length = step.recipe.data.length
    return step.rows * length * training_flops(step.recipe.model, length, ends_early=step.ends_early)


def rates(step: Step, timed: dict[str, float], device: str) -> dict[str, Any]:
    """timed: of several steps."""
    if float(step.missed):
        raise RuntimeError(
            f"{step.form}: {float(step.missed):.0f} masked positions found no head slot, so this is not a full training step"
        )
    tokens = step.rows * step.recipe.data.length
    timed = {name: value if name == "repeats" else value / _STEPS for name, value in timed.items()}
    found: dict[str, Any] = {"ms_step": timed, "tokens_per_second": 1000 * tokens / timed["p50"]}
    peak = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
    if peak and not {"fp8", *_TORCHAO} & set(step.form.split("-")):  # the peak is bf16's
        found["mfu"] = flops_of(step) / (timed["p50"] / 1000) / peak
    return found


def peak_gb(step: Step, before: int) -> float:
    """Peak memory of a step with its model and optimizer. before: bytes held before these were made.

    A captured step allocates while it is captured, not when it is replayed.
    """
    torch.cuda.synchronize()
    if not step.recorded:
        torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def measure_forms(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each form's memory and first steps, then time all forms by turns."""
    device = torch.device(args.device)
    figures: dict[str, Any] = {}
    made: dict[str, Step] = {}
    for form in args.forms.split(","):
        recipe = recipe_of(args.model, args.length, graphs=args.graphs, **split_form(form)[0])
        before = torch.cuda.memory_allocated() if args.device == "cuda" else 0
        step = Step(recipe, form, args.rows, device)
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        losses = [step().item() for _ in range(args.warmup)]
        figures[form] = {"seconds_first_steps": time.perf_counter() - began, "first_loss": losses[0], "last_loss": losses[-1]}
        figures[form] |= {"recorded": step.recorded, "compiled": step.compiled}
        if args.device == "cuda":
            figures[form]["peak_gb"] = peak_gb(step, before)
        if args.alone:
            timed = measure(step.several, args.device, warmup=1, repeats=args.repeats)
            figures[form] |= rates(step, timed, args.device)
            del step
            free()
        else:
            made[form] = step
        print(form, figures[form], flush=True)
    if made:
        together = measure_together(
            {form: step.several for form, step in made.items()}, args.device, warmup=1, repeats=args.repeats
        )
        for form, step in made.items():
            figures[form] |= rates(step, together[form], args.device)
    return figures


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    torch._dynamo.reset()


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "other")


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of one step by kind of kernel, and the slowest kernels."""
    recipe = recipe_of(args.model, args.length, graphs=args.graphs, **split_form(args.profile)[0])
    step = Step(recipe, args.profile, args.rows, torch.device(args.device))
    for _ in range(args.warmup):
        step()
    kernels = kernel_times(step, args.device)
    kinds: dict[str, float] = {}
    for one in kernels:
        kind = kind_of(one["kernel"])
        kinds[kind] = kinds.get(kind, 0.0) + one["ms"]
    free()
    return {"form": args.profile, "ms_by_kind": kinds, "ms_busy": sum(kinds.values()), "kernels": kernels[:40]}


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time steps by rows and by length, with the FLOPs of planning/formulas.py."""
    found = []
    shapes = [(rows, args.length) for rows in map(int, args.sweep_rows.split(","))]
    shapes += [(max(1, args.rows * args.length // length), length) for length in map(int, args.sweep_lengths.split(","))]
    for rows, length in shapes:
        step = Step(recipe_of(args.model, length, graphs=args.graphs, n_sinks=1), "sink", rows, torch.device(args.device))
        timed = measure(step.several, args.device, warmup=args.warmup, repeats=args.repeats)
        found.append({"rows": rows, "length": length, **rates(step, timed, args.device), "flops": flops_of(step)})
        print(found[-1], flush=True)
        del step
        free()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="smdm-472m", help="a preset")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--forms", type=form_names, default="vanilla,sink,gate,official,official-compiled")
    parser.add_argument("--alone", action="store_true", help="keep only one form in memory at a time")
    parser.add_argument("--graphs", dest="graphs", action="store_const", const="on", default="auto", help="capture where possible")
    parser.add_argument("--no-graphs", dest="graphs", action="store_const", const="off", help="capture no CUDA graph")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: torch's")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--profile", type=form_name, default=None, help="also profile this form's kernels")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--sweep-rows", default="4,8,16,32")
    parser.add_argument("--sweep-lengths", default="512,1024,4096")
    parser.add_argument("--subject", default=None, help="part of the result's name; default: model and length")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    args = parser.parse_args()
    check_device(parser, args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    figures: dict[str, Any] = {"forms": measure_forms(args)}
    free()
    if "official" in figures["forms"]:
        base = figures["forms"]["official"]["tokens_per_second"]
        figures["to_official"] = {form: row["tokens_per_second"] / base for form, row in figures["forms"].items()}
    if args.profile:
        figures["profile"] = profile(args)
    if args.sweep:
        figures["sweep"] = sweep(args)
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "device", "subject")}
    settings["precision"] = "bf16" if args.device == "cuda" else "float32"
    write(
        result("train_step", figures, device=args.device, settings=settings),
        args.out,
        subject=args.subject or f"{args.model}-{args.length}",
    )


if __name__ == "__main__":
    main()
