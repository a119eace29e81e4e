"""What several processes of a test session share: made by one of them, and its failure told to the others."""

import threading
import time

import pytest

from shared_folders import make_once


def test_whoever_comes_second_waits_for_the_first(tmp_path):
    """Threads stand for processes: each opens the lock's file for itself."""
    made, seen = [], []

    def make(folder):
        made.append(folder)
        time.sleep(0.2)
        (folder / "file").touch()

    def ask():
        seen.append((make_once(tmp_path / "thing", make) / "file").exists())

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(made) == 1
    assert seen == [True] * 3


def test_a_failure_is_told_and_nothing_is_made_anew(tmp_path):
    def fail(folder):
        raise RuntimeError("no ranks today")

    with pytest.raises(RuntimeError, match="no ranks today"):
        make_once(tmp_path / "thing", fail)
    with pytest.raises(pytest.fail.Exception, match=r"thing.* could not be made: RuntimeError: no ranks today"):
        make_once(tmp_path / "thing", lambda folder: None)


def test_a_maker_that_was_killed_is_told(tmp_path):
    (tmp_path / "thing").mkdir()
    with pytest.raises(pytest.fail.Exception, match="its maker was killed"):
        make_once(tmp_path / "thing", lambda folder: None)
