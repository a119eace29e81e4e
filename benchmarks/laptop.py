"""Train the laptop recipes on texts of one's own, as a user would: minutes, loss by masked share against unigram, samples.

    OMP_NUM_THREADS=2 python -m benchmarks.laptop moby-dick.txt emma.txt --out benchmarks/results

Each text is prepared with the tokenizer of the tutorial and trained with both recipes, by the command line. The loss is measured on
the validation split, with the same masks for all: each token is masked with the same probability, and the mean nats of the masked
tokens are compared with the entropy of that split's own token frequencies, which is a little less than any unigram model reaches.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import quantiles, result, write
from sinkdlm import Recipe, load
from sinkdlm.data.shards import Split, open_split
from sinkdlm.diffusion import token_nll
from sinkdlm.model.model import DiffusionLM
from sinkdlm.noise import random_bits
from sinkdlm.sampling import generate

RECIPES = ("laptop", "laptop-sink")
SHARES = (0.25, 0.5, 0.75)
_PROMPT = "The old man"
_DRAWS = 4  # masks of each validation row
_ROWS = 64  # rows in a forward
_BITS = 31


def entropy(tokens: np.ndarray[Any, Any]) -> float:
    """Nats a token of the tokens' own frequencies."""
    shares = np.bincount(tokens) / len(tokens)
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())


@torch.no_grad()
def losses_by_share(model: DiffusionLM, tokens: torch.Tensor) -> dict[str, dict[str, float]]:
    """Mean nats of masked tokens of rows (B, T) at each share, and the standard error over rows."""
    found, config = {}, model.config
    keys = torch.arange(_DRAWS * len(tokens))[:, None], torch.arange(tokens.shape[1])[None]
    noise = random_bits(_BITS, 21, *keys) / 2.0**_BITS
    rows = tokens.repeat(_DRAWS, 1)
    for share in SHARES:
        masked = noise < share
        parts = []
        for part in torch.arange(len(rows)).split(_ROWS):
            index = masked[part].flatten().nonzero()[:, 0]
            states = model(rows[part].masked_fill(masked[part], config.mask_id), select=index)
            _, nll = token_nll(states, model.head_weight, rows[part].flatten()[index], torch.ones(len(index)))
            parts.append(torch.zeros(len(part)).index_add_(0, index // rows.shape[1], nll))
        sums, counts = torch.cat(parts).view(_DRAWS, -1).sum(0), masked.view(_DRAWS, *tokens.shape).sum((0, 2))
        mean = float(sums.sum() / counts.sum())
        # Rows are the independent samples: their residuals against the common mean give the error of the ratio.
        error = float((sums - mean * counts).square().sum().sqrt() / counts.sum())
        found[f"{share:g}"] = {"loss": mean, "stderr": error}
    return found


def run(*words: str) -> float:
    """Run a command of sinkdlm; return its seconds."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "sinkdlm", *words], check=True, stdout=sys.stderr)
    return time.monotonic() - began


def samples(folder: Path, length: int) -> list[str]:
    """Write after a prompt and after nothing: ancestral sampling at temperature 0.8."""
    lm, found = load(folder), []
    for prompt in (_PROMPT, ""):
        ids = lm.tokenizer.encode(prompt)
        with lm.model.inference():
            out = generate(
                lm.model.denoiser(),
                prompt=[ids],
                length=length,
                mask_id=lm.config.mask_id,
                config="smdm-origin",
                temperature=0.8,
                seed=1,
            )
        found.append(lm.tokenizer.decode(out.tokens[0].tolist()))
    return found


def measure_text(path: Path, tokenizer: str, changes: list[str], device: str, folder: Path) -> dict[str, Any]:
    data = folder / "data"
    seconds = run("data", "prepare", str(path), "--tokenizer", tokenizer, "--out", str(data))
    held: Split = open_split(data, "validation")
    ids = held.read(0, held.n_tokens).astype(np.int64)
    found: dict[str, Any] = {
        "bytes": path.stat().st_size,
        "seconds_prepare": seconds,
        "tokens": open_split(data).n_tokens,
        "validation_tokens": len(ids),
        "unigram": entropy(ids),
        "recipes": {},
    }
    for recipe in RECIPES:
        out = folder / recipe
        words = [word for change in changes for word in ("--set", change)]
        seconds = run("train", recipe, "--data", str(data), "--out", str(out), "--device", device, *words)
        lm, settled = load(out / "model"), Recipe.load(out / "recipe.toml")
        length = settled.data.length
        rows = torch.from_numpy(ids[: len(ids) // length * length]).view(-1, length)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        by_share = losses_by_share(lm.model, rows)
        found["recipes"][recipe] = {
            "minutes": seconds / 60,
            "tokens_per_second": quantiles([line["timing"]["tokens_per_second"] for line in lines if line["kind"] == "train"]),
            "bound": [[line["step"], line["loss"]] for line in lines if line["kind"] == "validation"],
            "by_masked_share": by_share,
            "below_unigram": {share: found["unigram"] - value["loss"] for share, value in by_share.items()},
            "samples": samples(out / "model", length),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="bpe:1024")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="change both recipes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the recipes train")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    parser.add_argument("texts", nargs="+", type=Path)
    args = parser.parse_args()
    figures = {}
    for path in args.texts:
        with tempfile.TemporaryDirectory() as folder:
            figures[path.stem] = measure_text(path, args.tokenizer, args.changes, args.device, Path(folder))
            print(path.stem, json.dumps(figures[path.stem], indent=2), file=sys.stderr, flush=True)
    settings = {"tokenizer": args.tokenizer, "changes": args.changes, "threads": torch.get_num_threads(), "draws": _DRAWS}
    write(result("laptop", figures, device=args.device, settings=settings), args.out)


if __name__ == "__main__":
    main()
