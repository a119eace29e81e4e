"""Files written at e1660f9, before today's package layout: a model, and a run's state after step 3 of 6. They still load."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sinkdlm

WRITTEN = Path(__file__).parent / "before_rooms"
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # another machine's matmuls add in another order


def lines_of(run: Path, kind: str) -> list[dict]:
    return [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["kind"] == kind]


@pytest.mark.parametrize("runner", ["auto", "plain"])
def test_a_model_of_before_gives_its_logits(runner):
    wanted = torch.tensor(json.loads((WRITTEN / "expected.json").read_text())["logits"])
    lm = sinkdlm.load(WRITTEN / "run" / "model", runner=runner)
    with torch.no_grad():
        found = lm.model.head(lm.model(torch.arange(24).view(2, 12)))[..., :7]
    assert lm.config.n_sinks == 1
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_run_of_before_goes_on_from_its_state(tmp_path, monkeypatch, command_line):
    """The steps after the state equal the old code's: samples, noise, moments, average, learning rate, metrics."""
    shutil.copytree(WRITTEN, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run" / "model")
    monkeypatch.chdir(tmp_path)
    status, _, said = command_line("train", "run/recipe.toml", "--out", "run", "--device", "cpu")
    assert status == 0, said
    assert "resumed at step 3" in said
    for kind in ("train", "validation"):
        ours, theirs = lines_of(tmp_path / "run", kind), lines_of(WRITTEN / "run", kind)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for name in ("loss", *(("grad_norm", "lr", "masked") if kind == "train" else ())):
            assert [line[name] for line in ours] == pytest.approx([line[name] for line in theirs], rel=1e-4)
    weights, wanted = (load_file(folder / "run" / "model" / "model.safetensors") for folder in (tmp_path, WRITTEN))
    assert weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight, **CLOSE)
