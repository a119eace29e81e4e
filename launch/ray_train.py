"""Train a recipe on a Ray cluster, one rank a worker. It needs pip install 'ray[train]'.

    python launch/ray_train.py RECIPE --out /shared/runs/x --workers 16 [--cpu] [--set train.lr=1e-4 ...]

Ray places the workers. When one is lost it restarts all of them, and they go on from the last state.
"""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any


def work(job: dict[str, Any]) -> None:
    """Run one rank, on the host that Ray has chosen."""
    os.chdir(job["folder"])  # paths of a recipe start where the command runs
    os.environ.update(_describe_rank())
    from sinkdlm.cli.loading import load_parent, load_recipe
    from sinkdlm.training.loop import train

    out = Path(job["out"])
    train(load_recipe(Path(job["recipe"]), job["overrides"], out), out, load_parent=load_parent, device=job["device"])


def _describe_rank() -> dict[str, str]:
    """Return the environment that torchrun would set. Ray's process group tells where rank 0 is, and is then destroyed: training
    makes its own, with a heartbeat."""
    import ray
    import torch.distributed as dist

    context = ray.train.get_context()
    place: list[Any] = [(ray.util.get_node_ip_address(), _free_port()) if context.get_world_rank() == 0 else None]
    dist.broadcast_object_list(place, src=0)
    dist.destroy_process_group()
    address, port = place[0]
    return {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("", 0))
        return place.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe's file, or a name of `sinkdlm recipe list`")
    parser.add_argument("--out", type=Path, required=True, help="the run folder, on a file system that all hosts share")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--workers", type=int, required=True, help="ranks")
    parser.add_argument("--cpus", type=int, default=1, help="cores of a worker, which are its threads too")
    parser.add_argument("--cpu", action="store_true", help="without GPUs")
    parser.add_argument("--max-failures", type=int, default=3, help="how often lost workers are replaced")
    given = parser.parse_args()

    from sinkdlm import UserError
    from sinkdlm.cli.loading import load_recipe
    from sinkdlm.config.shipped import find_recipe

    try:
        recipe = find_recipe(given.recipe)
        load_recipe(recipe, given.overrides, given.out)  # report a mistake here, once, and not on every worker
    except UserError as failure:
        sys.exit(f"sinkdlm: {failure}")
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as failure:
        sys.exit(f"sinkdlm: {failure}; pip install 'ray[train]'")

    out = given.out.resolve()
    job = {
        "recipe": str(recipe.resolve()),
        "overrides": given.overrides,
        "out": str(out),
        "folder": str(Path.cwd()),
        "device": "cpu" if given.cpu else None,
    }
    TorchTrainer(
        work,
        train_loop_config=job,
        torch_config=TorchConfig(backend="gloo"),  # for Ray's short-lived group: NCCL would take GPU memory
        scaling_config=ScalingConfig(
            num_workers=given.workers, use_gpu=not given.cpu, resources_per_worker={"CPU": given.cpus, "GPU": 0 if given.cpu else 1}
        ),
        # Beside the run folder, which holds nothing but the run.
        run_config=RunConfig(storage_path=f"{out}.ray", failure_config=FailureConfig(max_failures=given.max_failures)),
    ).fit()


if __name__ == "__main__":
    main()
