"""Pages and pictures are made from any results; whether the stored ones agree, `make docs-check` says."""

import json

import pytest
from benchmarks import page
from benchmarks.measuring import RESULTS

REMAKE = "run: make docs-benchmarks"
PICTURES = ("benchmarks-training", "benchmarks-sampling", "benchmarks-memory", "benchmarks-steps", "sinks")


def test_the_table_of_planned_runs_agrees_with_the_recipes():
    text = page.PLAN_PAGE.read_text()
    assert page.plan_text() == text, REMAKE
    assert text.count("\n| `") == 22 + 6  # runs of the paper, options


def test_a_result_of_any_benchmark_gets_a_part(tmp_path):
    """One with tables of its own, and one that nobody has thought of."""
    base = json.loads((RESULTS / "noise-nvidia-h200.json").read_text())
    timed = {"p20": 90.0, "p50": 100.0, "p80": 110.0}
    row = {"ms_step": timed, "tokens_per_second": 20_000.0, "mfu": 0.5, "peak_gb": 1.25}
    step = {
        "forms": {"official": {**row, "tokens_per_second": 10_000.0}, "sink": row},
        "sweep": [{"rows": 4, "length": 512, **row}],
    }
    settings = {"model": "nano", "rows": 2, "length": 64}
    for name, figures in (("train_step", step), ("novel", {"a": {"b": timed}, "c": 1234567})):
        (tmp_path / f"{name}-x.json").write_text(json.dumps({**base, "benchmark": name, "settings": settings, "figures": figures}))
    made = page.parts(page.read_results(tmp_path))
    assert set(made) == {"train_step-x", "novel-x"}
    assert "| sink | 100 (90 to 110) | 20,000 | 50.0% | 1.2 GB | 2.00 |" in made["train_step-x"]
    assert "| 4 x 512 | 100 (90 to 110) | 20,000 | 50.0% |" in made["train_step-x"]
    assert "| figure | value |\n| --- | ---: |\n| `a.b` | 100 (90 to 110) |\n| `c` | 1,234,567 |" in made["novel-x"]


@pytest.mark.slow
def test_pictures_are_drawn_from_the_results(tmp_path):
    plots = pytest.importorskip("benchmarks.plots")
    drawn = plots.draw(tmp_path)
    assert {path.stem for path in drawn} == set(PICTURES)
    assert all(path.read_text().lstrip().startswith("<?xml") for path in drawn)


@pytest.mark.slow
def test_a_twin_without_a_sink_joins_the_picture_once_there_is_a_result_of_it(tmp_path):
    plots = pytest.importorskip("benchmarks.plots")
    record = json.loads((RESULTS / "train-smollm2-135m-sink-nvidia-h200.json").read_text())
    (tmp_path / "train-a.json").write_text(json.dumps(record))
    plots.draw_sinks(tmp_path / "alone.svg", tmp_path)
    record["settings"]["recipe"] = "smollm2-135m"
    (tmp_path / "train-b.json").write_text(json.dumps(record))
    plots.draw_sinks(tmp_path / "twins.svg", tmp_path)
    assert (tmp_path / "twins.svg").read_text().count("<path") > (tmp_path / "alone.svg").read_text().count("<path")
