"""Compare loss curves of the fast and the plain training step on the same rows and noise, beside those of two seeds.

    python -m benchmarks.curves --model smdm-170m --steps 300 --out benchmarks/results

Rows are synthetic but can be learned: each token follows from the one before it, up to a few choices. Every step has new rows.
official: the plain path of benchmarks/train_step.py, eager, with a dense mask; sink: what `sinkdlm train` does. If the fast path is
right, the two differ less than two seeds of the plain path do.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import result, write
from benchmarks.train_step import Step, check_device, form_names, free, recipe_of, split_form

_CHOICES = 4  # tokens that may follow a token
_WORDS = 4096  # size of the language
_SMOOTHED = 20  # steps to average before curves are compared, as a single step's loss is noisy


def make_rows(seed: int, steps: int, rows: int, length: int, vocab: int) -> Tensor:
    """(steps, rows, length): all rows are made together, position by position, as each token follows from the one before it."""
    generator = torch.Generator().manual_seed(seed)
    n_words = min(_WORDS, vocab)
    tokens = 97 * torch.randint(0, _CHOICES, (length, steps * rows), generator=generator)
    tokens[0] = torch.randint(0, n_words, (steps * rows,), generator=generator)
    for place in range(1, length):
        tokens[place] = (5 * tokens[place - 1] + 1 + tokens[place]) % n_words
    return tokens.T.reshape(steps, rows, length).contiguous()


def curve(args: argparse.Namespace, form: str, seed: int) -> list[float]:
    device = torch.device(args.device)
    step = Step(recipe_of(args.model, args.length, **split_form(form)[0]), form, args.rows, device)
    losses = []
    for tokens in make_rows(seed, args.steps, args.rows, args.length, step.recipe.model.vocab_size):
        step.take(tokens)
        losses.append(step().clone())
    found = torch.stack(losses).tolist()
    print(f"{form}, seed {seed}: {found[0]:.4f} to {found[-1]:.4f}", file=sys.stderr, flush=True)
    del step
    free()
    return found


def apart(one: list[float], other: list[float]) -> dict[str, float]:
    """Relative differences of two smoothed curves."""
    size = min(_SMOOTHED, len(one))
    smooth = [torch.tensor(losses).double().unfold(0, size, size).mean(1) for losses in (one, other)]
    differences = ((smooth[0] - smooth[1]) / smooth[0]).abs()
    return {"mean": float(differences.mean()), "most": float(differences.max()), "at_end": float(differences[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="smdm-170m", help="a preset")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--forms", type=form_names, default="official,sink", help="train_step's forms, the baseline first")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    args = parser.parse_args()
    check_device(parser, args)
    plain, *fast = args.forms.split(",")
    curves: dict[str, list[float]] = {f"{plain}, seed {seed}": curve(args, plain, seed) for seed in (0, 1)}
    figures: dict[str, Any] = {"between_seeds": apart(*curves.values())}
    for form in fast:
        curves[f"{form}, seed 0"] = curve(args, form, 0)
        figures[f"{form} to {plain}"] = apart(curves[f"{plain}, seed 0"], curves[f"{form}, seed 0"])
    figures["losses"] = {name: [round(loss, 5) for loss in losses] for name, losses in curves.items()}
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "device")}
    write(result("curves", figures, device=args.device, settings=settings), args.out, subject=args.model)


if __name__ == "__main__":
    main()
