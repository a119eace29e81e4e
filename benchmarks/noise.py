"""Time corruption by keyed noise for a million positions, and hash the masks, which are equal on every device."""

import hashlib
from typing import Any

import torch

from benchmarks.measuring import arguments, measure, result, write
from sinkdlm.diffusion import Schedule, corrupt
from sinkdlm.fast.objective import mask_compiled
from sinkdlm.noise import permute

BATCH, LENGTH = 512, 2048  # 1,048,576 positions
SEED = 3407


def digest(device: str) -> dict[str, str]:
    """SHA-256 of masks, times and a permutation computed on a device."""
    found = {}
    tokens = torch.zeros(64, LENGTH, dtype=torch.int64, device=device)
    samples = torch.arange(64, device=device) + 10**12
    for name in ("linear", "cosine", "loglinear"):
        noisy = corrupt(tokens, samples, seed=SEED, mask_id=1, schedule=Schedule(name), mask=mask_compiled)
        found[name] = hashlib.sha256(noisy.masked.cpu().numpy().tobytes()).hexdigest()
    independent = corrupt(tokens, samples, seed=SEED, mask_id=1, times="independent", mask=mask_compiled)
    found["independent"] = hashlib.sha256(independent.masked.cpu().numpy().tobytes()).hexdigest()
    found["times"] = hashlib.sha256(independent.t.cpu().numpy().tobytes()).hexdigest()
    order = permute(torch.arange(100_003, device=device), 100_003, SEED, 1)
    found["permutation"] = hashlib.sha256(order.cpu().numpy().tobytes()).hexdigest()
    return found


def main() -> None:
    args = arguments(__doc__)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=args.device)
    samples = torch.arange(BATCH, device=args.device)
    figures: dict[str, Any] = {
        "ms_corrupt": measure(lambda: corrupt(tokens, samples, seed=SEED, mask_id=1, mask=mask_compiled), args.device, warmup=10),
        "digest": digest(args.device),
        "digest_on_cpu": digest("cpu"),
    }
    figures["equal_to_cpu"] = figures["digest"] == figures["digest_on_cpu"]
    write(result("noise", figures, device=args.device, settings={"positions": BATCH * LENGTH, "seed": SEED}), args.out)


if __name__ == "__main__":
    main()
