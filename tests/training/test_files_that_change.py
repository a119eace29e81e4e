"""Files that somebody changes or removes while a run uses them: an error of one line, never a signal, silence or wrong data."""

import os
import shutil

import pytest

from runs import recipe_of, run
from sinkdlm.data.shards import Split
from sinkdlm.errors import DataError, TrainError
from sinkdlm.training import loop


def at_step(number, act, monkeypatch):
    """Do something to the files before this step."""
    make_step = loop.Trainer._make_step

    def make(self, *given):
        if self.step == number:
            act()
        return make_step(self, *given)

    monkeypatch.setattr(loop.Trainer, "_make_step", make)


@pytest.fixture
def own_set(token_set, tmp_path):
    return shutil.copytree(token_set, tmp_path / "set")


def shards_of(folder):
    found = sorted(folder.glob("train-*.bin"))
    assert found
    return found


def recipe_without_looks(folder):
    return recipe_of(folder, train={"steps": 200}, eval={"every": 0}, log={"probe_every": 0}, save={"every": 1000})


def test_a_shard_that_is_cut_mid_run_is_named(own_set, tmp_path, monkeypatch):
    """A mapped file would end the process with SIGBUS."""
    monkeypatch.setattr(Split, "verify", lambda self: iter(()))

    def damage():
        for path in shards_of(own_set):
            os.truncate(path, 0)

    at_step(2, damage, monkeypatch)
    with pytest.raises(DataError, match=r"train-\d+\.bin: cut while it was read.*prepare the set again"):
        run(recipe_without_looks(own_set), tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))  # the steps before it are kept


def test_a_shard_altered_in_place_ends_the_run(own_set, tmp_path):
    """Its size is as before, and its ids are allowed: only its checksum tells."""
    for path in shards_of(own_set):
        content = path.read_bytes()
        assert content[:100] != content[100:200]
        path.write_bytes(content[100:200] + content[100:])
    with pytest.raises(DataError, match=r"train-\d+\.bin: damaged: its SHA-256 is not the one in index\.json"):
        run(recipe_without_looks(own_set), tmp_path / "run")


def test_a_run_folder_that_is_removed_mid_run_is_an_error(token_set, tmp_path, monkeypatch):
    """Saving made the folder anew, with the model and without recipe and metrics, and the command ended well."""
    out = tmp_path / "run"
    at_step(2, lambda: shutil.rmtree(out), monkeypatch)
    with pytest.raises(TrainError, match=r"run: was removed, or its \.lock, while the run wrote there"):
        run(recipe_of(token_set), out)
    assert not (out / "model").exists()
