"""The scripts of launch/ on gloo ranks: they train, end together on a signal or a lost rank, and resume bit for bit."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from benchmarks import kills

from launches import ROOT, SCRIPT, launched, make_undisturbed, plain_ranks, script, starts, steps_made, train_arguments, wait_until

STEPS, ENDLESS = 24, 100_000
SOON = 150.0  # seconds: less than a collective or a launcher waits, and long for a busy machine
HOSTS = ("127.0.0.2", "127.0.0.3")  # every address of 127.0.0.0/8 is this machine
JOB = str(os.getpid())  # tests of another checkout may run at the same time, and a job has its port

# Starts a task on each host in a session of its own, notes them, and ends with their highest status, as srun does.
SRUN = f"""#!{sys.executable}
import os, pathlib, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
tasks = [
    subprocess.Popen(command, start_new_session=True, env={{**os.environ, "SLURMD_NODENAME": host}}) for host in {HOSTS!r}
]
pathlib.Path(os.environ["SLURM_STUB"], "tasks").write_text(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = f"""#!/bin/bash
case "$1 $2" in
    "show hostnames") printf '%s\\n' {" ".join(HOSTS)} ;;
    "show job") echo "JobId=$3 JobState=$(cat "$SLURM_STUB/state")" ;;
    requeue*) echo "$2" >> "$SLURM_STUB/requeued" ;;
esac
"""


@pytest.fixture(scope="session")
def runs(made_once) -> Path:
    return made_once("launches", lambda folder: make_undisturbed(folder, 2, STEPS))


@pytest.fixture
def endless(runs, tmp_path) -> Path:
    """A recipe that trains long enough to be watched and ended."""
    return kills.write_recipe(tmp_path / "endless.toml", runs / "data", steps=ENDLESS)


def slurm(folder: Path, state: str) -> dict[str, str]:
    """The environment of a job, with stand-ins for Slurm's commands."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "state").write_text(state)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "some[2-3]", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(ROOT)}
    return {**job, "SLURM_STUB": str(folder), "PATH": path}


@pytest.mark.slow
def test_the_script_trains_on_the_ranks_that_it_is_told(runs):
    (start,) = starts(runs / "alone")
    assert start["ranks"] == 2
    assert start["threads"] == 1
    assert len([line for line in kills.read_metrics(runs / "alone") if line["kind"] == "train"]) == STEPS
    assert (runs / "alone" / "model").is_dir()


@pytest.mark.slow
def test_a_preempted_slurm_job_saves_its_state_is_requeued_and_goes_on_bit_for_bit(runs, tmp_path):
    out = runs / "slurm"
    job = ["bash", str(ROOT / "launch" / "slurm.sbatch"), *train_arguments(runs / "recipe.toml", out)]
    environment = {**slurm(tmp_path, "RUNNING"), "NPROC": "1"}
    with launched(job, tmp_path / "said", **environment) as launch:
        wait_until(lambda: steps_made(out) > 4, launch)
        for task in (tmp_path / "tasks").read_text().split():
            os.killpg(int(task), signal.SIGTERM)
        assert launch.wait() == 128 + signal.SIGTERM
        assert not launch.ranks()
    said = re.findall(rf"stopped by SIGTERM after step (\d+) of {STEPS}; state saved in", launch.text())
    assert len(said) == 1, launch.text()[-4000:]
    assert (out / "checkpoints" / f"step-{int(said[0]):010d}").is_dir()
    assert (tmp_path / "requeued").read_text() == f"{JOB}\n"
    with launched(job, tmp_path / "said", **environment, SLURM_RESTART_COUNT="1") as launch:
        assert launch.wait() == 0, launch.text()[-4000:]
    assert [(start["step"], start["ranks"]) for start in starts(out)] == [(0, 2), (int(said[0]), 2)]
    assert kills.differences(runs / "alone", out) == []


@pytest.mark.parametrize(
    ("status", "state", "requeued"),
    [(143, "RUNNING", True), (143, "CANCELLED", False), (143, "PENDING", False), (1, "RUNNING", False), (0, "RUNNING", False)],
)
def test_only_a_job_that_was_stopped_and_that_slurm_does_not_handle_is_requeued(tmp_path, status, state, requeued):
    environment = {**os.environ, **slurm(tmp_path, state)}
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/bash\necho $NNODES $RDZV $RDZV_ID; exit {status}\n")
    command = ["bash", str(ROOT / "launch" / "slurm.sbatch"), "recipe.toml"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == status
    assert done.stdout == f"2 {HOSTS[0]}:{10000 + int(JOB) % 20000} {JOB}-0\n"
    assert (tmp_path / "requeued").exists() == requeued


def test_the_script_says_what_it_needs():
    without = {key: value for key, value in os.environ.items() if key not in ("NPROC", "NNODES", "RDZV", "ADDRESS")}
    environment = {**without, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    several = {"NPROC": "1", "NNODES": "2"}
    for given, word in (({}, "NPROC=2"), (several, "RDZV"), ({**several, "RDZV": "a:1"}, "ADDRESS")):
        done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, env={**environment, **given}, check=False)
        assert done.returncode != 0
        assert word in done.stderr


@pytest.mark.slow
def test_sigterm_to_one_rank_ends_all_with_a_saved_state(endless, tmp_path):
    out = tmp_path / "run"
    with launched(script(endless, out), tmp_path / "said", NPROC="2", MAX_RESTARTS="0") as launch:
        wait_until(lambda: steps_made(out) > 4, launch)
        os.kill(launch.ranks()[1], signal.SIGTERM)
        assert launch.wait() == 1  # torchrun's own status: it got no signal
    (step,) = re.findall(rf"stopped by SIGTERM after step (\d+) of {ENDLESS}; state saved in", launch.text())
    assert (out / "checkpoints" / f"step-{int(step):010d}").is_dir()


@pytest.mark.slow
def test_a_lost_rank_ends_the_others_with_its_name(endless, tmp_path):
    out = tmp_path / "run"
    with launched(script(endless, out), tmp_path / "said", NPROC="2", MAX_RESTARTS="0") as launch:
        wait_until(lambda: steps_made(out) > 4, launch)
        lost = launch.ranks()[1]
        os.kill(lost, signal.SIGKILL)
        assert launch.wait(SOON) == 1
    assert re.search(rf"sinkdlm: rank 1 \(\S+, process {lost}\) was lost; run the same command", launch.text())


@pytest.mark.slow
@pytest.mark.parametrize(("size", "victim"), [(3, 1), (2, 0)])
def test_a_lost_rank_ends_the_others_under_any_launcher(endless, size, victim, tmp_path):
    """Ranks as plain processes without a launcher: only they watch each other. Rank 0 holds the store."""
    out = tmp_path / "run"
    command = ["-m", "sinkdlm", "train", *train_arguments(endless, out)]
    with plain_ranks(size, command, tmp_path / "said") as launch:
        wait_until(lambda: steps_made(out) > 4, launch)
        lost = launch.ranks()[victim]
        os.kill(lost, signal.SIGKILL)
        launch.wait(SOON)
    assert re.search(rf"sinkdlm: .*rank {victim} \(\S+, process {lost}\)", launch.text()), launch.text()[-4000:]
    assert ("store of rank 0" in launch.text()) <= (victim == 0)  # while rank 0 lives, the others hear the name from it


@pytest.mark.slow
def test_a_row_that_one_rank_cannot_read_ends_all_with_its_words(runs, tmp_path):
    """By then the others are in the step and wait for this rank."""
    data = kills.write_set(tmp_path / "data")
    tokens = np.fromfile(data / "train-00000.bin", "<u2")
    tokens[32 * 5 : 32 * 6] = 200
    (data / "train-00000.bin").write_bytes(tokens.tobytes())
    index = json.loads((data / "index.json").read_text())
    index["splits"]["train"]["shards"][0]["sha256"] = hashlib.sha256(tokens.tobytes()).hexdigest()
    (data / "index.json").write_text(json.dumps(index))
    recipe = kills.write_recipe(tmp_path / "recipe.toml", data, steps=300)
    with launched(script(recipe, tmp_path / "run"), tmp_path / "said", NPROC="2", MAX_RESTARTS="0") as launch:
        assert launch.wait() == 1
    assert "sinkdlm: rank" in launch.text()
    assert "token id 200 at position 0 of row 5" in launch.text()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_trains_and_replaces_a_lost_worker_bit_for_bit(runs, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, str(ROOT / "launch" / "ray_train.py"), str(runs / "recipe.toml"), "--out", str(out)]
    with launched([*command, "--workers", "2", "--cpu"], tmp_path / "said", RAY_AUTH_MODE="disabled") as launch:
        wait_until(lambda: steps_made(out) > 4, launch)
        workers = [pid for pid in launch.environments() if b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        assert launch.wait(240) == 0, launch.text()[-4000:]
    assert [start["ranks"] for start in starts(out)] == [2, 2]
    assert kills.differences(runs / "alone", out) == []
