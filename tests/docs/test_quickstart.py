"""The quickstart notebook: its cells run as they stand, in one namespace, and compute what they promise."""

import json
import math
import time
from pathlib import Path

import pytest

from sinkdlm import load

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "quickstart.ipynb"
MOST_SECONDS, MOST_BYTES = 60, 150_000
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_it_is_small_and_was_run():
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert (len(CELLS), len(code)) == (10, 9)
    assert [cell["execution_count"] for cell in code] == list(range(1, 10))
    assert all(cell["outputs"] for cell in code)


@pytest.mark.slow
def test_its_cells_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    start = time.thread_time()  # which the load of the machine does not change
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), found)
    seconds = time.thread_time() - start
    found["plt"].close("all")
    assert seconds < MOST_SECONDS

    losses, errors = found["losses"], found["errors"]
    assert found["counts"][0] - found["counts"][1] == found["config"].d_model
    assert sum(losses[-50:]) < 0.8 * sum(losses[:50])
    assert [text.startswith(prompt) for text, prompt in zip(found["texts"], found["prompts"], strict=True)] == [True] * 3
    assert (found["nats"] < math.log(len(found["tokenizer"]))).all()  # a guess among all characters
    assert ((errors > 0) & (errors < 0.2)).all()
    assert len(found["shares"]) == 3
    assert all(0 < share < 1 for share in found["shares"])
    assert found["same"]
    assert load("runs/quickstart").config.n_sinks == 1
    assert "mean loss" in capsys.readouterr().out
