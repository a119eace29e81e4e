"""Time block diffusion beside full attention, in one run: training, sampling with the exact cache, long prompts, keyed noise.

    python -m benchmarks.blocks --out benchmarks/results           a GPU: smdm-472m, rows of 2,048, blocks of 32
    python -m benchmarks.blocks --device cpu --parts noise         one part

- training: steps of benchmarks.train_step by turns; full attention and blocks, with a sink, and blocks without one.
- sampling: one token a step at temperature 0.1. The official loop, our full attention without a cache and with `dual`, and blocks
  with the exact cache, all in blocks but for the official loop.
- prompts: a step of 32 behind prompts of several lengths, with context_length raised, and the time of its attention kernels.
- noise: masks and times of blocks, as hashes: on this device, on a CPU, and of the same rows in batches cut otherwise.

Weights are random, which suffices for timing. Each part is printed once it is measured, and the result is written after each.
"""

import argparse
import gc
import hashlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import kernel_times, quantiles, result, write
from benchmarks.sampling import Case, seconds_of, time_official, time_runs
from benchmarks.train_step import free, kind_of, measure_forms
from sinkdlm import DiffusionLM, ModelConfig
from sinkdlm.diffusion import corrupt
from sinkdlm.fast import accelerate
from sinkdlm.fast.objective import mask_compiled
from sinkdlm.sampling import requests_of, start, step

_TEMPERATURE = 0.1  # of the official evaluation
_SAMPLES = (1 << 40) + 7  # index of the first sample whose noise is hashed
_KERNELS = 12  # of a step: how many are listed


def training(given: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second and memory. Each form's ratio is to the first: full attention with a sink."""
    forms = ("sink", f"sink-block{given.block}", f"vanilla-block{given.block}")
    how = {"forms": ",".join(forms), "rows": given.rows, "length": given.length, "alone": False, "graphs": "auto", "warmup": 3}
    found = measure_forms(argparse.Namespace(device=given.device, model=given.preset, repeats=given.steps, **how))
    rates = [found[form]["tokens_per_second"] for form in forms]
    return {**found, "blocks_to_full": rates[1] / rates[0], "sink_to_none": rates[1] / rates[2]}


def make(given: argparse.Namespace, **changes: Any) -> DiffusionLM:
    config = ModelConfig.preset(given.preset, n_sinks=1, **changes)
    return accelerate(DiffusionLM(config, seed=0).to(given.device, torch.bfloat16 if given.device == "cuda" else torch.float32))


def prompts_of(given: argparse.Namespace, rows: int, n_tokens: int) -> torch.Tensor:
    """A prompt of its own for each row."""
    vocab = ModelConfig.preset(given.preset).vocab_size
    return torch.randint(0, vocab, (rows, n_tokens), generator=torch.Generator().manual_seed(0)).to(given.device)


def sampling(given: argparse.Namespace) -> dict[str, Any]:
    models = {"full": make(given), "blocks": make(given, block_size=given.block)}
    figures = {}
    for rows in given.batch:
        prompt = prompts_of(given, rows, given.prompt)
        size = (given.canvas, given.canvas - given.prompt, given.block, given.device)
        full, blocks = (Case(model, prompt, *size) for model in models.values())
        greedy: dict[str, Any] = {"config": "llada", "temperature": _TEMPERATURE, "steps": None}  # one for each token
        found = {"official": time_official(full, given.repeats, _TEMPERATURE)}
        with full.model.inference():
            for cache in ("none", "dual"):
                run = partial(full.ours, block=given.block, cache=cache, **greedy)
                found[f"full_cache_{cache}"] = time_runs(full, run, given.repeats)
        with blocks.model.inference():
            found["blocks_cache_exact"] = time_runs(blocks, partial(blocks.ours, cache="exact", **greedy), given.repeats)
        own = found["blocks_cache_exact"]["tokens_per_second"]["p50"]
        ratios = {f"blocks_to_{name}": own / one["tokens_per_second"]["p50"] for name, one in found.items()}
        figures[f"{rows} rows"] = {**found, **ratios}
    return figures


def cycle(model: DiffusionLM, prompt: torch.Tensor, block: int) -> Callable[[], None]:
    """Prefill, take the steps of two blocks, in which every kind of step is captured, and return what takes a block's steps: the
    rest of the third and the first step of the next one, which also keeps the third."""
    gc.collect()  # states of earlier calls, which are not finished, hold their caches
    length = prompt.shape[1] + 4 * block
    made = requests_of(prompt, length=length, mask_id=model.config.mask_id, temperature=_TEMPERATURE, block_size=block)
    states, denoiser = start(made), model.denoiser()

    def run(n_steps: int = block) -> None:
        for _ in range(n_steps):
            step(states, denoiser, device=prompt.device, together=True)

    run(2 * block + 1)
    return run


def long_prompts(given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step: by the clock, in kernels, and in attention's. Ratios are to the shortest prompt."""
    model = make(given, block_size=given.block, context_length=max(given.prompts) + 4 * given.block)
    figures: dict[str, Any] = {}
    for rows in given.batch:
        steps: dict[str, Any] = {}
        with model.inference():
            for n_tokens in given.prompts:
                prompt = prompts_of(given, rows, n_tokens)
                taken = [seconds_of(cycle(model, prompt, given.block), given.device) for _ in range(given.repeats + 1)][1:]
                kernels = kernel_times(cycle(model, prompt, given.block), given.device, repeats=1)
                attention = sum(one["ms"] for one in kernels if kind_of(one["kernel"]) == "attention") / given.block
                clock = quantiles([1000 * seconds / given.block for seconds in taken])
                busy = sum(one["ms"] for one in kernels) / given.block
                steps[str(n_tokens)] = {
                    "ms_step": clock,
                    "ms_kernels": busy,
                    "ms_attention": attention,
                    "ms_step_less_attention": clock["p50"] - attention,
                    "ms_kernels_less_attention": busy - attention,
                    "kernels": [{**one, **{key: one[key] / given.block for key in ("ms", "calls")}} for one in kernels[:_KERNELS]],
                }
        base = steps[str(given.prompts[0])]
        for one in steps.values():
            one["to_shortest"] = {name: one[name] / base[name] for name in ("ms_step_less_attention", "ms_kernels_less_attention")}
        figures[f"{rows} rows"] = steps
    return figures


def digest(given: argparse.Namespace, device: str, cuts: list[int]) -> dict[str, str]:
    """SHA-256 of masks and times of blocks, drawn in batches of these sizes."""
    parts = []
    for samples in (torch.arange(sum(cuts)) + _SAMPLES).split(cuts):
        tokens = torch.zeros(len(samples), given.length, dtype=torch.int64, device=device)
        how = {"seed": 3407, "mask_id": 1, "block_size": given.block, "mask": mask_compiled}
        parts.append(corrupt(tokens, samples.to(device), **how))
    joined = {name: torch.cat([getattr(part, name).cpu() for part in parts]) for name in ("masked", "t")}
    return {name: hashlib.sha256(values.numpy().tobytes()).hexdigest() for name, values in joined.items()}


def noise(given: argparse.Namespace) -> dict[str, Any]:
    whole = digest(given, given.device, [64])
    others = {"on_cpu": digest(given, "cpu", [64]), "cut": digest(given, given.device, [1, 40, 23])}
    return {"digest": whole, **{f"equal_{name}": other == whole for name, other in others.items()}}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "noise": noise,
    "training": training,
    "sampling": sampling,
    "prompts": long_prompts,
}


def arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--preset", default=None, help="default: smdm-472m on a GPU, else nano")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8, help="training: rows of a step; all forms stay in memory")
    parser.add_argument("--length", type=int, default=2048, help="training and noise: tokens of a row")
    parser.add_argument("--steps", type=int, default=6, help="training: how often each form is timed, four steps at a time")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 1], help="sampling and prompts: rows")
    parser.add_argument("--canvas", type=int, default=256, help="sampling: tokens of a row, prompt included")
    parser.add_argument("--prompt", type=int, default=4, help="sampling: tokens of a prompt")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 4096], help="prompts: tokens of each")
    parser.add_argument("--repeats", type=int, default=3, help="sampling and prompts")
    parser.add_argument("--subject", default=None, help="part of the result's name; default: the preset")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    given = parser.parse_args()
    given.preset = given.preset or ("smdm-472m" if given.device == "cuda" else "nano")
    return given


def main() -> None:
    given = arguments()
    settings = {key: value for key, value in vars(given).items() if key not in ("out", "device", "subject")}
    figures: dict[str, Any] = {}
    for name in given.parts:
        figures[name] = PARTS[name](given)
        free()
        print(f"{name} is measured", file=sys.stderr, flush=True)
        write(result("blocks", figures, device=given.device, settings=settings), given.out, subject=given.subject or given.preset)


if __name__ == "__main__":
    main()
