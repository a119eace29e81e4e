import errno
import io
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks import kills
from rich.console import Console

from evaluated import tiny_tokenizer
from runs import TINY, interrupted, load_parent, metrics, recipe_of, run
from sinkdlm import DiffusionLM, ModelConfig, Recipe, UserError, load, save
from sinkdlm.checkpoint.directory import fingerprint
from sinkdlm.checkpoint.tokenizer import write_tokenizer
from sinkdlm.config.recipe import LogSection, TrainSection
from sinkdlm.data.rows import open_rows
from sinkdlm.distributed.world import World
from sinkdlm.fast import blocks
from sinkdlm.planning.formulas import budget_steps, training_flops
from sinkdlm.sampling import policy_of
from sinkdlm.text.generate import Job, write
from sinkdlm.training import evaluate, gradients, loop, optimizer, setup, state
from sinkdlm.training.evaluate import VALIDATION_SEED, validate
from sinkdlm.training.health import read_lines
from sinkdlm.training.monitor import Metrics, Monitor, Pace, flat_numbers
from sinkdlm.training.optimizer import learning_rate
from sinkdlm.training.weights import as_sharded, own_part

ALONE = World(torch.device("cpu"))


def test_first_weights_drawn_ahead_are_those_of_the_model():
    """In order and out of order; a few at a time on the host, or all at once to their final place."""
    model = DiffusionLM(ModelConfig.preset("nano", n_sinks=1), seed=3)
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    for names in (list(wanted), list(reversed(wanted))):
        for to in (None, (device, torch.float32), (device, torch.float64)):
            drawn = setup.DrawnAhead(model, 3, n_threads=2, to=to)
            assert len(drawn._drawn) == (4 if to is None else len(wanted))
            for name in names:
                one = drawn(name, tuple(wanted[name].shape))
                assert to is None or (one.device, one.dtype) == to
                assert torch.equal(one.cpu().float(), wanted[name])


def test_first_weights_that_stay_are_begun_with_the_largest(monkeypatch):
    model, order = DiffusionLM(ModelConfig.preset("nano", n_sinks=1), seed=3), []
    plain = model.initial_weight
    monkeypatch.setattr(model, "initial_weight", lambda name, *given: order.append(name) or plain(name, *given))
    with setup.DrawnAhead(model, 3, n_threads=1, to=(torch.device("cpu"), torch.float32)) as drawn:
        for name, p in model.named_parameters():
            drawn(name, tuple(p.shape))
    sizes = [dict(model.named_parameters())[name].numel() for name in order]
    assert sizes == sorted(sizes, reverse=True)
    assert order != [name for name, _ in model.named_parameters()]


def test_a_failure_ends_the_drawing_of_first_weights(monkeypatch):
    """The first worker's failure is raised, and the others' work is cancelled."""
    model, order = DiffusionLM(ModelConfig.preset("nano", n_sinks=1), seed=3), []

    def fails(name, *_):
        order.append(name)
        time.sleep(0.2)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model, "initial_weight", fails)
    largest = max(dict(model.named_parameters()).items(), key=lambda item: item[1].numel())[0]
    with (
        pytest.raises(torch.OutOfMemoryError),
        setup.DrawnAhead(model, 3, n_threads=1, to=(torch.device("cpu"), torch.float32)) as drawn,
    ):
        drawn(largest, ())
    drawn._pool.shutdown(wait=True)
    assert order[0] == largest
    assert len(order) <= 2


@pytest.mark.parametrize("norm", [3.0, 0.2, float("nan")])
def test_clipping_within_the_update_is_clipping_before_it(norm, monkeypatch):
    """On a GPU, with the GPU's kernel. A gradient that is not finite changes nothing either way."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drawn = torch.Generator().manual_seed(0)
    first, *gradients = (torch.randn(7, 5, generator=drawn).to(device) for _ in range(4))
    gradients = [gradient * norm / gradient.norm() for gradient in gradients]
    found = []
    for divides in (False, True):
        monkeypatch.setattr(optimizer, "_divides", lambda _, divides=divides: divides)
        weight = torch.nn.Parameter(first.clone())
        adamw = optimizer.Optimizer({"weight": weight}, TrainSection(steps=3, batch=1, clip=0.5))
        for gradient in gradients:
            weight.grad = gradient.clone()
            total = gradient.norm()
            adamw.step(1e-2, total.double(), (~total.isfinite()).float())
        found.append([weight.detach(), *(adamw.moments[moment]["weight"] for moment in optimizer.MOMENTS)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert torch.equal(found[1][0], first) == (norm != norm)


# The command, with a fifth step that waits for a signal.
WAITING = """
import time
from sinkdlm.cli import entry as cli
from sinkdlm.training import loop
make_step, begun = loop.Trainer._make_step, []
def wait(self, batch, lr, signals):
    begun.append(self.step)
    while len(begun) == 5 and not signals.caught:
        time.sleep(0.005)
    return make_step(self, batch, lr, signals)
loop.Trainer._make_step = wait
cli.main()
"""


def start_cli(recipe: Recipe, out: Path, program: Sequence[str] = ("-m", "sinkdlm"), **more) -> subprocess.Popen:
    file = out.with_suffix(".toml")
    file.write_text(recipe.to_toml())
    command = [sys.executable, *program, "train", str(file), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **more)


# -- exactness --------------------------------------------------------------------------------------------------------------


def test_a_package_that_another_thread_is_loading_has_made_no_shard(monkeypatch):
    half_loaded = ModuleType("torch.distributed.tensor")
    for package in (None, half_loaded):
        monkeypatch.setitem(sys.modules, "torch.distributed.tensor", package)
        tensor = torch.ones(2)
        assert as_sharded(tensor) is None
        assert own_part(tensor) is tensor


def test_a_state_in_the_background_loads_its_packages_before_its_thread(tmp_path):
    script = (
        "import sys, threading, torch\n"
        "from pathlib import Path\n"
        "from sinkdlm.distributed.world import World\n"
        "from sinkdlm.training.state import States\n"
        "states = States(Path(sys.argv[1]), keep=1, warn=print, world=World(torch.device('cpu')))\n"
        "assert 'torch.distributed.checkpoint' not in sys.modules\n"
        "seen, write = [], states._write\n"
        "def watched(*given):\n"
        "    before = set(sys.modules)\n"
        "    write(*given)\n"
        "    seen.extend(name for name in set(sys.modules) - before if name.startswith('torch.distributed'))\n"
        "states._write = watched\n"
        "assert states.save_behind(1, {'a': torch.ones(3)}, {'step': 1})\n"
        "states.wait()\n"
        "assert states.steps() == [1]\n"
        "print(seen)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["plain", "background"])
def test_fifty_kills_change_nothing(tmp_path, background):
    found = kills.run(50 if not background else 10, seed=0, folder=tmp_path, background=background)
    assert found["kills"] == (50 if not background else 10)
    assert found["torn_states"] > 0  # some died while writing
    assert found["lines"] > 32
    assert found["differences"] == []


def test_the_comparison_of_runs_can_fail(tmp_path, token_set):
    first, second = tmp_path / "a", tmp_path / "b"
    run(recipe_of(token_set, train={"ema": 0.9}), first)
    run(recipe_of(token_set, train={"ema": 0.9, "seed": 1}), second)
    assert len(kills.differences(first, second)) == 4
    assert kills.differences(first, first) == []


def test_padding_that_no_row_needs_changes_nothing_but_time(tmp_path, token_set, monkeypatch):
    """Short rows run apart from full ones, without padding."""
    seen, losses = [], {}
    corrupt = evaluate.corrupt

    def watched(tokens, *args, **options):
        seen.append(tuple(tokens.shape))
        return corrupt(tokens, *args, **options)

    monkeypatch.setattr(evaluate, "corrupt", watched)
    quiet = {"eval": {"every": 0}, "log": {"probe_every": 0}, "save": {"every": 1000}}
    recipe = recipe_of(token_set, data={"random_lengths": 0.5}, train={"steps": 12, "batch": 8, "precision": "float64"}, **quiet)
    for trims in (True, False):
        monkeypatch.setattr(gradients.Gradients, "_trims", lambda self, trims=trims: trims)
        run(recipe, tmp_path / str(trims))
        losses[trims] = [line["loss"] for line in metrics(tmp_path / str(trims))]
        if trims:
            assert min(length for _, length in seen) < 16
            assert sum(rows for rows, _ in seen) == 12 * 8
            seen.clear()
    assert set(seen) == {(8, 16)}
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-12)


@pytest.mark.parametrize(
    ("precision", "steps", "limit"), [pytest.param("float64", 50, 1e-9, marks=pytest.mark.slow), ("float32", 20, 1e-5)]
)
def test_loss_ignores_the_micro_batch(tmp_path, token_set, precision, steps, limit):
    losses = []
    for micro_batch in (1, 2, 8):
        recipe = recipe_of(
            token_set,
            data={"random_lengths": 0.2},
            train={"steps": steps, "batch": 8, "micro_batch": micro_batch, "precision": precision},
            eval={"every": 0},
            log={"probe_every": 0},
            save={"every": 1000},
        )
        run(recipe, tmp_path / str(micro_batch))
        losses.append([line["loss"] for line in metrics(tmp_path / str(micro_batch))])
    assert len(losses[0]) == steps
    np.testing.assert_allclose(losses[1], losses[0], rtol=limit)
    np.testing.assert_allclose(losses[2], losses[0], rtol=limit)
    assert losses[0][0] != losses[0][1]


def test_looking_changes_nothing(tmp_path, token_set):
    quiet = recipe_of(token_set, eval={"every": 0}, log={"probe_every": 0}, save={"every": 100})
    run(quiet, tmp_path / "quiet")
    run(recipe_of(token_set, save={"every": 1, "milestones": [2]}), tmp_path / "curious")
    assert metrics(tmp_path / "quiet") == metrics(tmp_path / "curious")


@pytest.mark.slow
def test_sigterm_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, token_set):
    recipe = recipe_of(token_set, train={"steps": 20}, eval={"every": 0}, log={"probe_every": 0}, save={"every": 1000})
    run(recipe, tmp_path / "alone")
    for life, number in enumerate((signal.SIGTERM, signal.SIGINT)):
        process = start_cli(recipe, tmp_path / "stopped", ("-c", WAITING))
        deadline = time.monotonic() + 120
        while kills._lines_after(tmp_path / "stopped" / "metrics.jsonl", 0) < 5 * life + 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(number)
        out, said = process.communicate(timeout=120)
        assert process.returncode == 128 + number, said
        assert "run the same command to go on" in said.splitlines()[-1]
        assert f"stopped by {signal.Signals(number).name} after step {5 * life + 5} of 20" in said.splitlines()[-1]
        assert "Traceback" not in said
        assert out == ""
    process = start_cli(recipe, tmp_path / "stopped")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "resumed at step" in said
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "alone")


def test_a_resumed_run_goes_on_with_average_and_background(tmp_path, token_set, monkeypatch):
    recipe = recipe_of(token_set, train={"ema": 0.95}, save={"every": 2, "background": True})
    run(recipe, tmp_path / "alone")
    make_step, calls = loop.Trainer._make_step, []

    def die_once(self, batch, lr, signals):
        calls.append(self.step)
        if len(calls) == 4:
            raise RuntimeError("a crash")
        return make_step(self, batch, lr, signals)

    save_tensors = state._save_tensors

    def take_time(*arguments):
        time.sleep(0.3)  # so that the crash finds the state half written
        save_tensors(*arguments)

    monkeypatch.setattr(loop.Trainer, "_make_step", die_once)
    with monkeypatch.context() as patched:
        patched.setattr(state, "_save_tensors", take_time)
        with pytest.raises(RuntimeError, match="a crash"):
            run(recipe, tmp_path / "crashed")
    _, said = run(recipe, tmp_path / "crashed")
    assert any("resumed at step 2" in line for line in said)
    assert kills.differences(tmp_path / "alone", tmp_path / "crashed") == []


# -- what goes wrong --------------------------------------------------------------------------------------------------------


def fails_once(write, at: int, failure: Exception, *, after: float = 0.0):
    """A stand-in for `write` whose call number `at` fails; and the list of what it was called with."""
    calls: list[Path] = []

    def stand_in(path, *arguments):
        calls.append(path)
        if len(calls) == at:
            time.sleep(after)
            raise failure
        return write(path, *arguments)

    return stand_in, calls


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def damage(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["flipped", "short", "no scalars", "empty"])
def test_a_damaged_state_is_skipped_with_a_warning(tmp_path, token_set, monkeypatch, kind):
    recipe = recipe_of(token_set, train={"ema": 0.9})
    run(recipe, tmp_path / "alone")
    interrupted(recipe, tmp_path / "run", monkeypatch, after=5)
    newest = tmp_path / "run" / "checkpoints" / "step-0000000004"
    file = next(newest.glob("*.safetensors"))
    if kind == "flipped":
        damage(newest)
    elif kind == "short":
        file.write_bytes(file.read_bytes()[:-8])
    elif kind == "no scalars":
        (newest / "state.json").unlink()
    else:
        for path in newest.iterdir():
            path.unlink()
    _, said = run(recipe, tmp_path / "run")
    assert any("step-0000000004: damaged, skipped" in line for line in said), said
    assert any("resumed at step 2" in line for line in said)
    assert kills.differences(tmp_path / "alone", tmp_path / "run") == []
    kept = state.States(tmp_path / "run" / "checkpoints", keep=2, warn=print, world=ALONE)
    assert [kept._check(step)[0]["step"] for step in kept.steps()] == [6, 4]  # the damaged one was written anew on the way


def test_without_a_whole_state_nothing_is_overwritten(tmp_path, token_set, monkeypatch):
    recipe = recipe_of(token_set)
    interrupted(recipe, tmp_path / "run", monkeypatch, after=5)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        damage(folder)
    with pytest.raises(UserError, match="no whole state among 2; restore one, or remove the folder"):
        run(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_full_disk_in_the_middle_is_said_and_tried_again(tmp_path, token_set, monkeypatch):
    recipe = recipe_of(token_set, train={"ema": 0.9})
    run(recipe, tmp_path / "alone")
    save_tensors, calls = state._save_tensors, []

    def full_once(folder, tensors, group):
        calls.append(folder)
        if len(calls) == 2:
            (folder / "half.safetensors").write_bytes(b"0" * 100)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_tensors(folder, tensors, group)

    monkeypatch.setattr(state, "_save_tensors", full_once)
    _, said = run(recipe, tmp_path / "run")
    assert any("step 4: state not saved" in line and "No space left on device" in line for line in said), said
    assert kills.differences(tmp_path / "alone", tmp_path / "run") == []
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_a_failing_write_in_the_background_costs_no_other_state(tmp_path, token_set, monkeypatch):
    """One write fails while training goes on: it is reported, and the next state, here the last, is still written."""
    recipe = recipe_of(token_set, train={"ema": 0.9}, save={"every": 4, "background": True})
    run(recipe, tmp_path / "alone")
    full_once, calls = fails_once(state._save_tensors, 1, NO_SPACE, after=0.2)
    monkeypatch.setattr(state, "_save_tensors", full_once)
    _, said = run(recipe, tmp_path / "run")
    assert len(calls) == 2
    assert any("could not be saved" in line and "No space left" in line for line in said), said
    assert kills.differences(tmp_path / "alone", tmp_path / "run") == []


@pytest.mark.slow
def test_writing_behind_holds_no_other_thread(tmp_path, monkeypatch):
    """Another thread, like training, runs between the files: the longest it waits falls with their size. The best of several tries
    counts: every try has the cost of the files, not every one that of other processes."""
    tensors = {f"w{i}": torch.zeros(2 << 20) for i in range(40)}  # 8 MB each

    def longest_wait(folder: Path) -> float:
        states = state.States(folder, keep=1, warn=print, world=ALONE)
        assert states.save_behind(1, tensors, {"step": 1})
        waits, last = [0.0], time.perf_counter()
        while not states._writing.done():
            time.sleep(0.001)
            waits.append(time.perf_counter() - last)
            last = time.perf_counter()
        states.wait()
        assert len(waits) > 3
        shutil.rmtree(folder)
        return max(waits)

    small_files = [longest_wait(tmp_path / "x") for _ in range(3)]
    monkeypatch.setattr(state, "_FILE_BYTES", 1 << 40)
    one_file = min(longest_wait(tmp_path / "x") for _ in range(3))
    monkeypatch.undo()
    while min(small_files) >= one_file / 4 and len(small_files) < 15:
        small_files.append(longest_wait(tmp_path / "x"))
    assert min(small_files) < one_file / 4, (one_file, small_files)


def test_a_signal_while_a_state_is_being_written_waits_for_it(tmp_path, token_set, monkeypatch):
    """The state of the signal's step fails in the background: a state that is reported as saved is saved."""
    look = loop.Trainer._look_around

    def interrupt(self):
        look(self)
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(state, "_save_tensors", fails_once(state._save_tensors, 1, NO_SPACE, after=0.2)[0])
    monkeypatch.setattr(loop.Trainer, "_look_around", interrupt)
    with pytest.raises(loop.Stopped, match="state saved in"):
        run(recipe_of(token_set, save={"every": 4, "background": True}), tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step-0000000004" / "state.json").exists()


def test_a_finished_run_without_its_states_is_not_trained_over(tmp_path, token_set):
    import shutil

    run(recipe_of(token_set), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="the run is over; choose another --out, or remove model/"):
        run(recipe_of(token_set), tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_milestone_that_was_cut_off_is_made_again(tmp_path, token_set, monkeypatch):
    recipe = recipe_of(token_set, save={"every": 2, "milestones": [4]})
    die_first, calls = fails_once(loop.save_weights, 1, RuntimeError("a crash"))
    monkeypatch.setattr(loop, "save_weights", die_first)
    with pytest.raises(RuntimeError, match="a crash"):
        run(recipe, tmp_path / "run")
    run(recipe, tmp_path / "run")
    assert [path.name for path in calls] == ["step-4", "step-4", "model"]
    assert load(tmp_path / "run" / "milestones" / "step-4").provenance["steps"] == 4


def test_lost_metrics_do_not_end_a_run(tmp_path, token_set, monkeypatch):
    recipe = recipe_of(token_set)
    interrupted(recipe, tmp_path / "run", monkeypatch, after=3)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    _, said = run(recipe, tmp_path / "run")
    assert any("shorter than when the state was saved" in line for line in said)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [3, 4, 5, 6]


def test_metrics_that_were_cut_within_a_line_do_not_end_a_run(tmp_path, token_set, monkeypatch):
    """Probes before the interruption are read again; a partial line is ignored."""
    recipe = recipe_of(token_set)
    interrupted(recipe, tmp_path / "run", monkeypatch, after=3)
    path = tmp_path / "run" / "metrics.jsonl"
    os.truncate(path, path.read_bytes().index(b"\n") + 20)
    run(recipe, tmp_path / "run")
    assert [line["step"] for line in read_lines(tmp_path / "run", "train")] == [3, 4, 5, 6]
    assert [line["step"] for line in read_lines(tmp_path / "run", "probe")][:1] == [0]


@pytest.mark.parametrize("long", [3, 200_000])
@pytest.mark.parametrize("before", ["", '{"a": 1}\n'])
def test_metrics_go_on_behind_the_last_whole_line(tmp_path, before, long):
    """However long the partial line is, and whether or not a state's length includes it."""
    for length, whole in ((10**6, False), (len(before) + 2, True)):
        (tmp_path / "m.jsonl").write_text(before + "{" + "x" * long)
        written = Metrics(tmp_path / "m.jsonl")
        assert written.cut(length) == whole
        written.write({"b": 2})
        written.close()
        assert (tmp_path / "m.jsonl").read_text() == before + '{"b": 2}\n'


def test_a_changed_scalar_is_damage(tmp_path, token_set, monkeypatch):
    recipe = recipe_of(token_set)
    interrupted(recipe, tmp_path / "run", monkeypatch, after=5)
    file = tmp_path / "run" / "checkpoints" / "step-0000000004" / "state.json"
    file.write_text(file.read_text().replace('"updates": 4', '"updates": 5'))
    _, said = run(recipe, tmp_path / "run")
    assert any("state.json was changed" in line for line in said)
    assert any("resumed at step 2" in line for line in said)


@pytest.mark.slow
def test_a_file_size_limit_stops_at_the_end_and_loses_nothing(tmp_path, token_set):
    """The real thing: a process that may not write a file as large as a state."""
    recipe = recipe_of(token_set, train={"ema": 0.9}, log={"every": 2, "probe_every": 0})
    run(recipe, tmp_path / "alone")
    limit = 40_000
    process = start_cli(recipe, tmp_path / "run", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert "File too large" in last
    assert "make room and run the same command again" in last
    assert "state not saved" in said
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    run(recipe, tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "alone")


def test_metrics_end_with_a_whole_line_when_the_disk_is_full(tmp_path, monkeypatch):
    written = Metrics(tmp_path / "m.jsonl")
    written.write({"a": 1})
    pwrite = os.pwrite

    def partial(file, data, offset):
        if len(data) > 3:
            return pwrite(file, data[:3], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", partial)
        written.write({"bbbb": 2})
        assert (tmp_path / "m.jsonl").read_text() == '{"a": 1}\n'
    written.write({"c": 3})
    assert (tmp_path / "m.jsonl").read_text() == '{"a": 1}\n{"bbbb": 2}\n{"c": 3}\n'
    assert not written.cut(10_000)
    assert written.cut(9)
    assert (tmp_path / "m.jsonl").read_text() == '{"a": 1}\n'
    written.close()


@pytest.fixture
def own_set(tmp_path) -> Path:
    return kills.write_set(tmp_path / "own", tokens=4000)


def change_index(folder: Path, change) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda d: (d / "train-00000.bin").unlink(), ["train-00000.bin: missing shard", "restore it or prepare"]),
        (lambda d: (d / "train-00000.bin").write_bytes(b"12"), ["train-00000.bin: truncated: 2 bytes"]),
        (lambda d: (d / "index.json").write_text("{}"), ["index.json", "format None"]),
        (lambda d: (d / "index.json").write_text('{"format": "sink'), ["index.json: damaged"]),
        (lambda d: (d / "index.json").rename(d / "progress.json"), ["unfinished", "run the same `sinkdlm data prepare` again"]),
        (lambda d: change_index(d, lambda i: i["splits"]["train"].update(highest_id=64)), ["ids go up to 64", "vocab_size is 64"]),
    ],
)
def test_bad_data_stops_a_run_before_it_starts(tmp_path, own_set, harm, words):
    harm(own_set)
    with pytest.raises(UserError) as failure:
        run(recipe_of(own_set), tmp_path / "run")
    assert all(word in str(failure.value) for word in words), failure.value
    assert not (tmp_path / "run" / "model").exists()


def test_data_that_changed_is_refused_when_resuming(tmp_path, own_set, monkeypatch):
    recipe = recipe_of(own_set)
    interrupted(recipe, tmp_path / "run", monkeypatch, after=3)
    index = (own_set / "index.json").read_text()
    change_index(own_set, lambda i: i["tokenizer"].update(sha256="another"))
    with pytest.raises(UserError, match="another tokenizer since the run began"):
        run(recipe, tmp_path / "run")
    (own_set / "index.json").write_text(index)
    change_index(own_set, lambda i: i["splits"]["train"].update(documents=1))
    with pytest.raises(UserError, match="changed since the run began"):
        run(recipe, tmp_path / "run")
    (own_set / "index.json").write_text(index)
    run(recipe, tmp_path / "run")
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("token", "mask_id", "words"), [(64, 64, "beyond model.vocab_size = 64"), (5, 5, "is [MASK]")])
def test_an_id_beyond_the_vocabulary_in_the_middle_keeps_the_steps_made(tmp_path, own_set, token, mask_id, words):
    tokens = np.fromfile(own_set / "train-00000.bin", "<u2")
    tokens[tokens == token] = 6
    recipe = recipe_of(own_set, model={**TINY, "mask_id": mask_id}, save={"every": 100}, eval={"every": 0}, log={"probe_every": 0})
    samples = open_rows(recipe.data, "train", seed=recipe.train.seed, vocab_size=64, mask_id=64).batch(np.arange(20)).tokens
    place = np.flatnonzero([tokens[i : i + 16].tolist() == samples[17].tolist() for i in range(0, len(tokens) - 16, 16)])[0] * 16
    tokens[place + 3] = token
    tokens.tofile(own_set / "train-00000.bin")
    index = json.loads((own_set / "index.json").read_text())
    index["splits"]["train"]["shards"][0]["sha256"] = fingerprint(own_set / "train-00000.bin")["sha256"]
    (own_set / "index.json").write_text(json.dumps(index))  # else the run ends because the file was altered
    with pytest.raises(UserError) as failure:
        run(recipe, tmp_path / "run")
    assert words in str(failure.value)
    assert "position 3" in str(failure.value)
    assert (tmp_path / "run" / "checkpoints" / "step-0000000004").is_dir()  # sample 17 belongs to step 5


def with_nan(monkeypatch, steps: set[int]) -> None:
    loss = gradients.denoising_loss

    def sometimes(model, tokens, noisy, **more):
        found = loss(model, tokens, noisy, **more)
        return found._replace(total=found.total * float("nan")) if run_step[0] in steps else found

    try_step, run_step = loop.Trainer._try_step, [0]

    def count(self, *given, **more):
        run_step[0] = self.step + 1
        return try_step(self, *given, **more)

    monkeypatch.setattr(loop.Trainer, "_try_step", count)
    monkeypatch.setattr(gradients, "denoising_loss", sometimes)


def test_a_loss_that_is_not_finite_skips_its_step_and_is_counted(tmp_path, token_set, monkeypatch):
    with_nan(monkeypatch, {2, 3, 5})
    result, said = run(recipe_of(token_set), tmp_path / "run")
    assert (result["steps"], result["updates"], result["skipped"]) == (6, 3, 3)
    assert [line["loss"] is None for line in metrics(tmp_path / "run")] == [False, True, True, False, True, False]
    assert [line["skipped"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 2, 3, 3]
    assert sum("not finite, no update" in line for line in said) == 3
    weights = load(tmp_path / "run" / "model").model.state_dict()
    assert all(bool(weight.isfinite().all()) for weight in weights.values())


def test_three_bad_steps_in_a_row_stop_the_run_with_the_last_good_state(tmp_path, token_set, monkeypatch):
    recipe = recipe_of(token_set, save={"every": 100}, eval={"every": 0}, log={"probe_every": 0})
    with monkeypatch.context() as patched:
        with_nan(patched, {3, 4, 5})
        with pytest.raises(UserError, match="steps 3 to 5: no finite loss 3 times in a row; weights of step 2 are kept"):
            run(recipe, tmp_path / "run")
    good = recipe_of(token_set, train={"steps": 6}, save={"every": 2}, eval={"every": 0}, log={"probe_every": 0})
    first = torch_state(tmp_path / "run" / "checkpoints" / "step-0000000005")
    interrupted(good, tmp_path / "second", monkeypatch, after=3)
    second = torch_state(tmp_path / "second" / "checkpoints" / "step-0000000002")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    result, _ = run(recipe, tmp_path / "run")  # goes on after the bad steps
    assert (result["steps"], result["updates"], result["skipped"]) == (6, 3, 3)


def torch_state(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def test_another_recipe_in_the_same_folder_is_refused_with_the_keys(tmp_path, token_set):
    run(recipe_of(token_set), tmp_path / "run")
    with pytest.raises(UserError) as failure:
        run(recipe_of(token_set, train={"lr": 2e-3}, model={**TINY, "n_sinks": 2}), tmp_path / "run")
    message = str(failure.value)
    assert "train.lr = 0.002, not 0.001" in message
    assert "model.n_sinks = 2, not 1" in message
    assert "min_lr" not in message
    _, said = run(recipe_of(token_set, train={"micro_batch": 2}, save={"keep": 5}), tmp_path / "run")
    assert any("already finished after 6 steps" in line for line in said)


def test_a_start_that_failed_does_not_hold_the_folder(tmp_path, token_set):
    with pytest.raises(UserError, match="no such folder"):
        run(recipe_of(tmp_path / "typo"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="no such folder"):
        run(recipe_of(tmp_path / "typo"), tmp_path / "run")
    run(recipe_of(token_set), tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 6


def test_running_out_of_memory_names_the_cure(tmp_path, token_set, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(gradients, "denoising_loss", fail)
        with pytest.raises(UserError, match=r"4 rows of 16 tokens a forward; lower train\.micro_batch"):
            run(recipe_of(token_set), tmp_path / "run")
    run(recipe_of(token_set, train={"micro_batch": 1}), tmp_path / "run")


def test_an_export_that_was_cut_off_is_made_again(tmp_path, token_set, monkeypatch):
    recipe = recipe_of(token_set, train={"ema": 0.9})
    die_second, calls = fails_once(loop.save_weights, 2, RuntimeError("a crash"))
    monkeypatch.setattr(loop, "save_weights", die_second)
    with pytest.raises(RuntimeError, match="a crash"):
        run(recipe, tmp_path / "run")
    run(recipe, tmp_path / "run")
    assert [path.name for path in calls] == ["ema", "model", "ema", "model"]
    assert load(tmp_path / "run" / "model").provenance["steps"] == 6
    assert len(metrics(tmp_path / "run")) == 6


def test_a_folder_has_one_run_and_one_process(tmp_path, token_set):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="other files and no run"):
        run(recipe_of(token_set), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"
    held = loop.RunFolder(tmp_path / "run", recipe_of(token_set), ALONE)
    with pytest.raises(UserError, match="another training runs there"):
        run(recipe_of(token_set), tmp_path / "run")
    held.close()
    run(recipe_of(token_set), tmp_path / "run")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"sets": {}}}, "data.sets: empty"),
        ({"data": {"sets": {"nowhere": 1.0}}}, "nowhere: no such folder; make one with: sinkdlm data prepare"),
        ({"data": {"length": 65}}, "data.length = 65: allowed is at most model.context_length = 64"),
        ({"data": {"length": 64, "validation": "nowhere"}}, "nowhere: no such folder"),
        ({"data": {"first": 999}}, "data.first = 999: must be an id of the vocabulary (below "),
        (
            {"model": {"n_sinks": 1, "sink_kind": "register"}, "data": {"documents": "confined"}},
            "data.documents = 'confined': impossible with model.sink_kind = 'register'",
        ),
        ({"train": {"steps": None}}, "no budget; set one of train.steps, train.tokens, train.epochs, train.flops"),
        ({"train": {"steps": None, "tokens": 10}}, "less than one step"),
        ({"init": {"from": "x"}}, "no loader was given"),
        ({"train": {"betas": [0.9, 1.0]}}, "train.betas.1 = 1.0"),
        ({"log": {"sample_every": 1}}, "neither the data nor the parent has a tokenizer"),
    ],
)
def test_a_run_that_cannot_start_says_why(tmp_path, token_set, sections, words):
    with pytest.raises(UserError) as failure:
        run(recipe_of(token_set, **sections), tmp_path / "run")
    assert words in str(failure.value)


def test_sampled_texts_begin_as_those_of_sample(tmp_path, token_set):
    """With BOS where the tokenizer adds it; it counts in the length and is not shown."""
    tokenizer = tiny_tokenizer(bos=True)
    own = shutil.copytree(token_set, tmp_path / "set")
    write_tokenizer(own / "tokenizer", tokenizer)
    size, length = len(tokenizer), TINY["context_length"] - len("the cat") - 1
    log = {"sample_every": 6, "sample_prompt": "the cat", "probe_every": 0}
    recipe = recipe_of(own, model={**TINY, "vocab_size": size, "mask_id": size}, log={**log, "sample_length": length})
    run(recipe, tmp_path / "run")
    (found,) = metrics(tmp_path / "run", "sample")
    lm = load(tmp_path / "run" / "model")
    expected = write(lm, Job("the cat", length=length, seed=recipe.train.seed), policy_of("smdm-origin"))
    assert expected["samples"][0]["tokens"][0] == tokenizer.bos_token_id
    assert found["text"] == expected["samples"][0]["text"]
    longer = recipe_of(own, model={**TINY, "vocab_size": size, "mask_id": size}, log={**log, "sample_length": length + 1})
    with pytest.raises(UserError, match=r"log\.sample_length = 57: at most model\.context_length = 64 with the prompt"):
        run(longer, tmp_path / "longer")


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_is_told_of_before_the_first_step(broken, tmp_path, token_set):
    own = shutil.copytree(token_set, tmp_path / "set")
    write_tokenizer(own / "tokenizer", tiny_tokenizer())
    recipe = recipe_of(own, model={**TINY, "vocab_size": len(tiny_tokenizer()), "mask_id": len(tiny_tokenizer())})
    whole = (own / "tokenizer" / broken).read_text()
    (own / "tokenizer" / broken).write_text(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"tokenizer files cannot be read: .* put whole ones there"):
        run(recipe, tmp_path / "run")
    (own / "tokenizer" / broken).write_text(whole)
    with pytest.raises(UserError, match=r"tokenizer: the tokenizer's ids go up to 86, the model has 64 .*; set model\.vocab_size"):
        run(recipe_of(own), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "model" / broken).is_file()


# -- what a run leaves ------------------------------------------------------------------------------------------------------


def test_the_run_folder_holds_everything(tmp_path, token_set):
    recipe = recipe_of(token_set, train={"ema": 0.9}, save={"every": 2, "keep": 1, "milestones": [3, 6, 60]})
    result, said = run(recipe, tmp_path / "run")
    assert "save.milestones: 6, 60: not before the last step, 6; only model/ is exported then" in said
    out = tmp_path / "run"
    assert Recipe.load(out / "recipe.toml") == recipe
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-0000000006"]
    start = json.loads((out / "environment.json").read_text())["starts"]
    assert len(start) == 1
    assert {"command", "commit", "torch", "threads", "time"} <= set(start[0])
    milestone, final, average = (load(out / name) for name in ("milestones/step-3", "model", "ema"))
    assert (milestone.provenance["steps"], final.provenance["steps"]) == (3, 6)
    assert final.provenance["tokens_seen"] == 6 * 4 * 16
    assert final.provenance["recipe"] == json.loads(json.dumps(recipe.to_dict()))
    assert list(final.provenance["data"]) == [str(token_set)]
    assert average.provenance["ema"] == 0.9
    assert not torch.equal(average.model.embed.weight, final.model.embed.weight)
    validations, probes = metrics(out, "validation"), metrics(out, "probe")
    assert [line["step"] for line in validations] == [3, 6]
    assert all(0 < line["loss"] < 10 and line["ema"]["loss"] > 0 and line["draws"] == 4 for line in validations)
    assert [line["step"] for line in probes] == [0, 3, 6]  # the first: before anything was learnt
    assert [set(layer) for layer in probes[0]["layers"]] == 2 * [
        {"top_content_share", "content_value_norm", "entropy", "sink_share", "sink_value_norm"}
    ]
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    line = next(line for line in lines if line["kind"] == "train")
    assert {"seconds", "tokens_per_second", "flops_per_second"} <= set(line["timing"])
    assert len(line["nll_by_ratio"]) == 4
    assert result["model"] == str(out / "model")


def test_precision_follows_the_device(tmp_path, token_set):
    _, said = run(recipe_of(token_set, train={"precision": "auto"}), tmp_path / "auto")
    assert any("float32 on cpu" in line and f" rows in {token_set};" in line for line in said)
    run(recipe_of(token_set), tmp_path / "float32")
    assert metrics(tmp_path / "auto") == metrics(tmp_path / "float32")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units says so
def test_float8_needs_a_gpu_that_has_it(tmp_path, token_set, monkeypatch):
    recipes = {
        precision: recipe_of(token_set, train={"precision": precision}, parallel={"gather": "bf16"})
        for precision in ("bf16", "fp8")
    }
    with pytest.raises(UserError, match=r'a CPU has no float8 matmuls; set train\.precision = "bf16"'):
        run(recipes["fp8"], tmp_path / "fp8")
    assert not (tmp_path / "fp8").exists()
    monkeypatch.setattr(loop, "check_training", lambda _: None)  # matmuls are emulated
    losses = {}
    for precision, recipe in recipes.items():
        run(recipe, tmp_path / precision)
        losses[precision] = [line["loss"] for line in metrics(tmp_path / precision)]
    assert losses["fp8"] != losses["bf16"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.02)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units says so
def test_the_residual_stream_may_be_bf16(tmp_path, token_set, monkeypatch):
    """With bf16 matmuls; exported weights stay float32."""
    seen: dict[str, set[torch.dtype]] = {"float32": set(), "bf16": set()}
    losses, plain = {}, blocks.Block.compute
    for residual, found in seen.items():
        monkeypatch.setattr(
            blocks.Block, "compute", lambda self, x, *rest, found=found: found.add(x.dtype) or plain(self, x, *rest)
        )
        recipe = recipe_of(token_set, train={"precision": "bf16", "residual": residual}, eval={"every": 3, "draws": 8})
        _, said = run(recipe, tmp_path / residual)
        assert any("bf16 with a bf16 residual stream on cpu" in line for line in said) == (residual == "bf16")
        losses[residual] = [line["loss"] for line in metrics(tmp_path / residual) if "loss" in line]
    assert seen == {"float32": {torch.float32}, "bf16": {torch.bfloat16}}
    assert losses["bf16"] != losses["float32"]
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.01)
    assert {p.dtype for p in load(tmp_path / "bf16" / "model").model.parameters()} == {torch.float32}
    with pytest.raises(UserError, match=r"train\.residual = 'bf16' with .* float32 on a CPU: set train\.precision = 'bf16'"):
        run(recipe_of(token_set, train={"precision": "auto", "residual": "bf16"}), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_training_learns(tmp_path, token_set):
    recipe = recipe_of(
        token_set,
        train={"steps": 150, "batch": 16, "lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.0},
        eval={"every": 75, "draws": 32},
        log={"probe_every": 0},
        save={"every": 1000},
    )
    run(recipe, tmp_path / "run")
    losses = [line["loss"] for line in metrics(tmp_path / "run", "validation")]
    assert losses[0] < 4.1  # uniform over 64 symbols is 4.16
    assert losses[1] < losses[0] - 0.1


def test_validation_is_the_same_in_any_cut(tmp_path, token_set, monkeypatch):
    from sinkdlm.diffusion import Schedule

    recipe = recipe_of(token_set, train={"precision": "float64"})
    run(recipe, tmp_path / "run")
    model = load(tmp_path / "run" / "model").model
    rows = open_rows(recipe.data, "validation", seed=VALIDATION_SEED, vocab_size=64, mask_id=64)
    found = []
    for tokens in (1 * 16, 4 * 16, 13 * 16):
        monkeypatch.setattr(evaluate, "_VALIDATION_TOKENS", tokens)
        found.append(validate(model, rows, 13, Schedule(), loop.nullcontext, ALONE))
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-12) == found[2]["loss"]
    assert found[0]["loss"] == pytest.approx(metrics(tmp_path / "run", "validation")[-1]["loss"], rel=0.5)


@pytest.mark.parametrize("documents", ["joined", "confined"])
@pytest.mark.parametrize("shifted", [False, True])
def test_validation_of_a_model_that_knows_nothing_is_the_logarithm(token_set, shifted, documents):
    from sinkdlm.diffusion import Schedule

    recipe = recipe_of(token_set, data={"documents": documents}, model={**TINY, "shift_logits": shifted})
    model = DiffusionLM(recipe.model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    rows = open_rows(recipe.data, "validation", seed=VALIDATION_SEED, vocab_size=64, mask_id=64)
    found = validate(model, rows, 512, Schedule(), loop.nullcontext, ALONE)
    assert found["loss"] == pytest.approx(np.log(64), rel=0.02)
    assert abs(found["loss"] - np.log(64)) < 3 * found["stderr"]


def test_the_average_is_the_exponential_one():
    from sinkdlm.training.optimizer import Average

    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    average, expected = Average(dict(model.named_parameters()), 0.8), 0.0
    for update in range(1, 60):
        with torch.no_grad():
            model.weight.fill_(float(update))
        average.update(update)
        decay = min(0.8, update / (update + 10))
        expected = decay * expected + (1 - decay) * update
    assert float(average.weights["weight"]) == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(59 - 4, abs=0.1)  # a mean age of decay / (1 - decay) updates
    with average.applied():
        assert float(model.weight.detach()) == pytest.approx(expected, rel=1e-5)
    assert float(model.weight.detach()) == 59.0


def test_learning_rate_warms_up_and_falls():
    train = recipe_of(Path("x"), train={"warmup": 0.1, "lr": 1.0, "min_lr": 0.1, "steps": 100}).train
    rates = [learning_rate(step, 100, train) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert all(first >= second for first, second in itertools.pairwise(rates[10:]))
    assert 0.1 < rates[-1] < 0.101
    late = train.replace(min_warmup=50)
    assert learning_rate(24, 100, late) == 0.5


def test_budgets_agree():
    train, config = recipe_of(Path("x"), train={"batch": 256}).train, ModelConfig.preset("smdm-472m")
    bare = train.replace(steps=None)
    assert budget_steps(bare.replace(flops=300e18), config, 2048, 10) == 202089  # as the paper's run
    assert budget_steps(bare.replace(tokens=105.95e9), config, 2048, 10) == pytest.approx(202089, abs=10)
    assert budget_steps(bare.replace(epochs=2.0), config, 2048, 2560) == 20
    assert budget_steps(train, config, 2048, 10) == 6
    with pytest.raises(UserError, match="steps and tokens: allowed is one budget"):
        train.replace(tokens=5.0)
    count = config.count_parameters().non_embedding
    assert training_flops(config, 2048, 0.5) == 6 * (count + 0.5 * 32000 * 1280) + 12 * 18 * 1280 * 2048
    for gate, rows in (("none", 0), ("elementwise", 1280), ("headwise", 10)):  # a last layer that ends early: out, gate, and MLP
        shape = ModelConfig.preset("smdm-472m", gate=gate)
        left_out = training_flops(shape, 2048, 0.25) - training_flops(shape, 2048, 0.25, ends_early=True)
        assert left_out == pytest.approx(6 * 0.75 * 1280 * (1280 + rows + 3 * config.d_ff))


def test_a_later_budget_replaces_an_earlier_one(tmp_path):
    (tmp_path / "a.toml").write_text('[model]\npreset = "nano"\n[train]\nsteps = 5\n[data.sets]\n"x" = 1\n')
    (tmp_path / "part.toml").write_text("[train]\nlr = 1e-3\n")
    (tmp_path / "b.toml").write_text('base = ["a.toml", "part.toml"]\n[train]\ntokens = 7\n[data.sets]\n"y" = 2\n')
    recipe = Recipe.load(tmp_path / "b.toml")
    assert (recipe.train.steps, recipe.train.tokens, recipe.train.lr) == (None, 7, 1e-3)
    assert recipe.data.sets == {"y": 2.0}
    assert Recipe.load(tmp_path / "b.toml", ["train.epochs=1"]).train.tokens is None


# -- adaptation, SFT, options -----------------------------------------------------------------------------------------------


def test_adaptation_opens_attention_and_adds_a_sink(tmp_path, token_set):
    parent, still = recipe_of(token_set, model={**TINY, "n_sinks": 0}), {"lr": 1e-9, "min_lr": 0.0}
    run(parent, tmp_path / "parent")
    recipe = recipe_of(token_set, init={"from": str(tmp_path / "parent" / "model")}, train=still | {"anneal": 0.5})
    run(recipe, tmp_path / "run", load_parent=load_parent)
    before, after = load(tmp_path / "parent" / "model"), load(tmp_path / "run" / "model")
    assert after.config.n_sinks == 1
    torch.testing.assert_close(before.model.blocks[0].mlp.down.weight, after.model.blocks[0].mlp.down.weight)
    assert after.provenance["parent"]["path"] == str(tmp_path / "parent" / "model")
    full = recipe_of(token_set, init={"from": str(tmp_path / "parent" / "model")}, train=still)
    run(full, tmp_path / "full", load_parent=load_parent)
    annealed, open_ = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("run", "full"))
    assert annealed[0] != open_[0]  # causal at first
    assert annealed[3:] == pytest.approx(open_[3:], rel=1e-5)  # full from the middle on
    wrong = recipe_of(token_set, model={**TINY, "d_ff": 32}, init={"from": str(tmp_path / "parent" / "model")})
    with pytest.raises(UserError, match=r"has d_ff = 24, model\.d_ff is 32"):
        run(wrong, tmp_path / "wrong", load_parent=load_parent)


@pytest.mark.parametrize(
    ("parent", "model", "words"),
    [
        ({"preset": "nano"}, TINY, ["d_model = 64, model.d_model is 16", 'set model.preset = "nano"']),
        ({"preset": "nano", "mask_id": 3}, TINY, ["d_ff", 'set model.preset = "nano", and with it mask_id = 3']),
        (
            {**TINY, "vocab_size": 80},
            TINY,
            ["has vocab_size = 80, model.vocab_size is 64; mask_id = 80", "leave out of [model]"],
        ),
        ({**TINY, "mask_id": 3}, TINY, ["has mask_id = 3, model.mask_id is 64", "leave out of [model]"]),
        ({**TINY, "n_sinks": 2}, TINY, ["has n_sinks = 2, model.n_sinks is 1"]),
        ({**TINY, "gate": "headwise"}, TINY, ["has gate = 'headwise', model.gate is 'none'"]),
    ],
)
def test_a_parent_of_another_shape_is_named_with_what_differs(tmp_path, token_set, parent, model, words):
    """Before its weights are read, and without naming a --set that nobody gave."""
    save(tmp_path / "parent", DiffusionLM(Recipe.resolve({"model": parent}).model))
    with pytest.raises(UserError) as failure:
        run(recipe_of(token_set, model=model, init={"from": str(tmp_path / "parent")}), tmp_path / "run", load_parent=load_parent)
    assert str(failure.value).startswith(f"init.from = '{tmp_path / 'parent'}': has ")
    assert all(word in str(failure.value) for word in words), failure.value
    assert "--set" not in str(failure.value)


def test_a_parent_whose_tokenizer_did_not_make_the_data_is_refused(tmp_path, token_set):
    from sinkdlm.data.synthetic import character_tokenizer

    recipe = recipe_of(token_set, init={"from": str(tmp_path / "parent")})
    save(tmp_path / "parent", DiffusionLM(recipe.model), character_tokenizer())
    with pytest.raises(UserError, match="its tokenizer is not the one that the data was prepared with; prepare it with"):
        run(recipe, tmp_path / "run", load_parent=load_parent)
    assert not (tmp_path / "run").exists()


def test_a_run_with_documents_confined_and_random_lengths(tmp_path, token_set):
    recipe = recipe_of(token_set, data={"documents": "confined", "random_lengths": 0.3, "length": 32})
    run(recipe, tmp_path / "run")
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    assert len(losses) == 6
    joined = recipe_of(token_set, data={"random_lengths": 0.3, "length": 32})
    run(joined, tmp_path / "joined")
    assert losses != [line["loss"] for line in metrics(tmp_path / "joined")]


def test_numbers_of_a_line_are_flat_for_trackers():
    line = {"kind": "x", "step": 1, "layers": [{"a": 1.0}, {"a": 2.0}], "n": None, "ok": True, "t": {"s": 3}}
    assert dict(flat_numbers(line)) == {"step": 1.0, "layers/0/a": 1.0, "layers/1/a": 2.0, "t/s": 3.0}


def test_mlflow_hears_of_a_step_once(tmp_path, token_set, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = recipe_of(token_set, log={"probe_every": 0, "trackers": ["mlflow"]})
        interrupted(recipe, tmp_path / "run", monkeypatch, after=3)
        run(recipe_of(token_set, log={"probe_every": 0, "trackers": ["mlflow"]}, save={"every": 3}), tmp_path / "run")
        history = mlflow.MlflowClient().get_metric_history((tmp_path / "run" / "mlflow.id").read_text(), "train/loss")
    assert sorted(point.step for point in history) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("device", ["foo", "mps", "cuda:99"])
def test_a_device_that_is_not_there_is_named(tmp_path, token_set, device):
    with pytest.raises(UserError, match=f"device = '{device}': not available here"):
        run(recipe_of(token_set), tmp_path / "run", device=device)


def test_tensorboard_gets_every_number(tmp_path, token_set):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(recipe_of(token_set, log={"probe_every": 3, "trackers": ["tensorboard"]}), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    seen = [event.value for event in events.Scalars("train/loss")]
    assert seen == pytest.approx([line["loss"] for line in metrics(tmp_path / "run")])
    assert "probe/layers/0/sink_share" in events.Tags()["scalars"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_other_trackers_run_for_real_offline(tmp_path, token_set, monkeypatch, tracker):
    pytest.importorskip(tracker)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    _, said = run(recipe_of(token_set, log={"probe_every": 0, "trackers": [tracker]}), tmp_path / "run")
    assert not any("dropped" in line for line in said), said
    identity = (tmp_path / "run" / f"{tracker}.id").read_text()
    if tracker == "mlflow":
        import mlflow

        history = mlflow.MlflowClient().get_metric_history(identity, "train/loss")
        assert [point.value for point in history] == pytest.approx([line["loss"] for line in metrics(tmp_path / "run")])
    else:
        assert list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{identity}"))


def test_a_tracker_that_fails_is_dropped_and_the_run_goes_on(tmp_path, token_set, monkeypatch):
    from sinkdlm.training import monitor

    def fails(*_):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(monitor.TRACKERS, "wandb", lambda *_: (fails, fails))
    _, said = run(recipe_of(token_set, log={"probe_every": 0, "trackers": ["wandb"]}), tmp_path / "run")
    assert sum("wandb: dropped: no route; metrics.jsonl is still written" in line for line in said) == 1
    assert len(metrics(tmp_path / "run")) == 6


@pytest.mark.parametrize(("kept", "status"), [(True, 0), (False, -signal.SIGTERM)])
def test_a_rank_that_failed_is_not_ended_before_it_has_said_why(kept, status):
    """Its launcher signals it as soon as another rank is lost, while its own failure is being raised."""
    script = f"""
import os, signal
from sinkdlm.distributed.signals import noted_signals
try:
    with noted_signals(after_failure={kept}):
        raise RuntimeError("Connection closed by peer")
except RuntimeError:
    os.kill(os.getpid(), signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == status


@pytest.mark.parametrize(("columns", "rate"), [(80, True), (50, False)])
def test_a_bar_shows_the_time_that_is_left_at_any_width(tmp_path, columns, rate):
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, legacy_windows=False, color_system=None)
    folder = tmp_path / "a-run-with-a-name-of-some-length"
    folder.mkdir()
    monitor = Monitor(folder, LogSection(), console)
    monitor.begin(0, 1100, {})
    monitor.progress(106, 1100, "loss 3.420  3,052 tokens/s  grad 0.64  lr 3.98e-03")
    monitor._bar.refresh()
    monitor.close()
    line = console.file.getvalue().split("\x1b[2K")[-1]
    assert re.search(r"106/1100  loss 3\.420  \d:\d\d:\d\d left", line)
    assert ("3,052 tokens/s" in line) == rate
    assert line.count("\N{HORIZONTAL ELLIPSIS}") <= 1  # only the name's


def test_a_shown_loss_and_rate_are_smoothed():
    """The first step's time counts for nothing, and a loss that is not finite for nothing later."""
    pace = Pace(tokens=1000)
    assert pace.text(4.0, 10.0) == "loss 4.000  100 tokens/s"
    assert pace.text(math.nan, 0.5) == "loss nan  2,000 tokens/s"
    assert pace.text(2.0, 0.5) == "loss 2.990  2,000 tokens/s"  # the later of two weighs 1 of 1.98
    for _ in range(500):
        last = pace.text(3.0, 0.25)
    assert last == "loss 3.000  4,000 tokens/s"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([0.6, 0.1, 0.1, 0.1, 0.2, 0.1], [("5/100", "0:00:11"), ("100/100", "0:00:00")]),  # (0.1 + 0.1 + 0.1 + 0.2) / 4 a step
        ([40.0, 20.0, 20.0], [("1/100", "1:06:00"), ("2/100", "0:32:40"), ("3/100", "0:32:20"), ("100/100", "0:00:00")]),
    ],
)
def test_the_time_that_is_left_is_said_early_and_without_the_first_step(tmp_path, monkeypatch, seconds, said):
    """The first step warms up or compiles. With short steps, the first line waits for a timed step."""
    from sinkdlm.training import monitor as module

    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    console = Console(file=io.StringIO(), width=80)
    monitor = Monitor(tmp_path, LogSection(), console)
    monitor.begin(0, 100, {})
    for step, spent in enumerate(seconds, start=1):
        now += spent
        monitor.progress(step, 100, "loss 1")
    monitor.progress(100, 100, "loss 1")
    monitor.close()
    assert re.findall(r"step (\S+)  loss 1  (\S+) left", console.file.getvalue()) == said
