"""Compare the chunked head loss with the full-logits form: time and peak memory of forward plus backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.measuring import arguments, measure_together, peak_bytes, result, write
from sinkdlm.fast.objective import chunked_nll

# masked tokens, width, vocabulary
SHAPES = {"cuda": [(8192, 896, 151936), (16384, 1280, 32000)], "cpu": [(512, 64, 4096)]}


def full_logits(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    logits = hidden @ head.T
    return (cross_entropy(logits.float(), targets, reduction="none") * weights).sum()


def chunked(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return chunked_nll(hidden, head, targets, weights)[0]


def step(form: Callable[..., Tensor], hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> list[Tensor]:
    loss = form(hidden, head, targets, weights)
    return [loss.detach(), *torch.autograd.grad(loss / hidden.shape[0], [hidden, head])]


def main() -> None:
    args = arguments(__doc__)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    figures: dict[str, Any] = {}
    for rows, width, vocab in SHAPES[args.device]:
        generator = torch.Generator(args.device).manual_seed(0)
        hidden = torch.randn(rows, width, generator=generator, device=args.device).to(dtype).requires_grad_()
        head = (torch.randn(vocab, width, generator=generator, device=args.device) * width**-0.5).to(dtype).requires_grad_()
        targets = torch.randint(0, vocab, (rows,), generator=generator, device=args.device)
        weights = torch.rand(rows, generator=generator, device=args.device) + 0.5

        inputs = (hidden, head, targets, weights)
        forms = {"full_logits": full_logits, "chunked": chunked}
        results = {name: step(form, *inputs) for name, form in forms.items()}
        calls = {name: partial(step, form, *inputs) for name, form in forms.items()}
        row: dict[str, Any] = {
            "ms_forward_backward": measure_together(calls, args.device),
            "relative_difference": {
                name: float((a.double() - b.double()).norm() / b.double().norm())
                for name, a, b in zip(["loss", "dhidden", "dhead"], results["chunked"], results["full_logits"], strict=True)
            },
        }
        del results
        if args.device == "cuda":
            row["peak_bytes"] = {name: peak_bytes(call) for name, call in calls.items()}
        figures[f"{rows}x{width}x{vocab}"] = row
    write(
        result("loss", figures, device=args.device, settings={"dtype": str(dtype), "shape": "rows x width x vocabulary"}), args.out
    )


if __name__ == "__main__":
    main()
