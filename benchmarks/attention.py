"""Time and check attention with a sink lane: errors against float64, milliseconds beside the plain kernel.

For each shape, plain is torch's kernel without a sink and append has the sinks as more keys. Errors: forward and every gradient,
relative to the naive form in float64. Times: forward plus backward; on a GPU, kernels only (replayed as a graph, since in training
the host runs ahead). trained, trained-plain: attention as a training step computes it, from projected heads to mixed values with
rotary, with and without the lane, and the time of each kernel.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import arguments, graphed, kernel_times, measure_together, result, write
from sinkdlm.fast.attention import attend_grouped
from sinkdlm.fast.functions import attend_flat
from sinkdlm.model.attention import attend_naive
from sinkdlm.model.positions import Rotation

# batch, tokens, query heads, key/value heads, head width: shapes whose errors are checked; then a grid that is timed.
CHECKED = {"cuda": [(2, 2048, 10, 10, 128), (2, 1000, 14, 2, 64)], "cpu": [(2, 257, 4, 4, 64), (2, 257, 14, 2, 64)]}
_HEADS = [(10, 10, 128), (20, 20, 64), (16, 4, 128), (14, 2, 64)]
TIMED = {"cuda": [(32768 // tokens, tokens, *heads) for tokens in (1024, 2048, 4096) for heads in _HEADS], "cpu": []}
FORMS = ["plain", "append"]
N_SINKS = 1


def make_inputs(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Tensor]:
    batch, tokens, heads, kv_heads, width = shape
    generator = torch.Generator(device).manual_seed(0)
    sizes = [(batch, heads, tokens, width), *[(batch, kv_heads, tokens, width)] * 2, *[(1, kv_heads, N_SINKS, width)] * 2]
    return [torch.randn(size, generator=generator, device=device).to(dtype).requires_grad_() for size in sizes]


def run(form: str, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    used = inputs[:3] if form == "plain" else inputs
    out = attend_grouped(*used)
    return [out.detach(), *torch.autograd.grad(out, used, grad)]


def trained(shape: tuple[int, ...], n_sinks: int) -> Callable[[], list[Tensor]]:
    """Attention of a training step on a GPU, with the sinks behind the tokens."""
    batch, tokens, heads, kv_heads, width = shape
    generator = torch.Generator("cuda").manual_seed(0)
    n_rows = batch * tokens + (16 if n_sinks else 0)
    given, grad = (
        torch.randn(n_rows, n, width, generator=generator, device="cuda").bfloat16() for n in (heads + 2 * kv_heads, heads)
    )
    angles = torch.rand(1, tokens, 1, width // 2, generator=generator, device="cuda")
    rotation = Rotation(angles.cos(), angles.sin())
    sink_rotation = Rotation(rotation.cos[:, :n_sinks], rotation.sin[:, :n_sinks]) if n_sinks else None
    given.requires_grad_()

    def call() -> list[Tensor]:
        out = attend_flat(given, rotation, sink_rotation, batch, heads)
        return [out.detach(), *torch.autograd.grad(out, given, grad)]

    return call


def relative_errors(form: str, inputs: list[Tensor], grad: Tensor) -> dict[str, float]:
    """Errors of one form against its own float64 reference (the plain kernel's has no sink)."""
    precise = [x.detach().double().requires_grad_() for x in inputs]
    used = precise[:3] if form == "plain" else precise
    out, _ = attend_naive(*used)
    reference = [out.detach(), *torch.autograd.grad(out, used, grad.double())]
    names = ["out", "dq", "dk", "dv", "dsink_k", "dsink_v"]
    got = run(form, inputs, grad)
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in zip(names[: len(got)], got, reference, strict=True)}


def main() -> None:
    args = arguments(__doc__)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    figures: dict[str, Any] = {}
    for shape in (*CHECKED[args.device], *TIMED[args.device]):
        inputs = make_inputs(shape, args.device, dtype)
        grad = torch.randn(inputs[0].shape, generator=torch.Generator(args.device).manual_seed(1), device=args.device).to(dtype)
        checked = shape in CHECKED[args.device]
        row: dict[str, Any] = {}
        if checked:
            row["relative_error"] = {form: relative_errors(form, inputs, grad) for form in FORMS}
        calls: dict[str, Callable[[], Any]] = {form: partial(run, form, inputs, grad) for form in FORMS}
        if args.device == "cuda":
            calls |= {"trained-plain": trained(shape, 0), "trained": trained(shape, N_SINKS)}
            calls = {form: graphed(call) for form, call in calls.items()}
        row["ms_forward_backward"] = measure_together(calls, args.device)
        if args.device == "cuda":
            row["kernels"] = {form: kernel_times(calls[form], args.device) for form in ("trained-plain", "trained")}
        medians = {form: timed["p50"] for form, timed in row["ms_forward_backward"].items()}
        base = {form: medians["trained-plain" if form.startswith("trained") else "plain"] for form in medians}
        row["to_plain"] = {form: median / base[form] for form, median in medians.items()}
        figures["x".join(map(str, shape))] = row
        print(shape, {form: round(ratio, 3) for form, ratio in row["to_plain"].items()}, file=sys.stderr, flush=True)
    settings = {"dtype": str(dtype), "n_sinks": N_SINKS, "shape": "batch x tokens x heads x kv heads x width"}
    write(result("attention", figures, device=args.device, settings=settings), args.out)


if __name__ == "__main__":
    main()
