"""README.md: short enough to read, its code runs, its links lead somewhere; the version stands in two places."""

import re
from pathlib import Path

import sinkdlm

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES, MOST_CHARACTERS, MOST_WORDS = 120, 160, 25


def block(kind: str, number: int = 0) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TEXT, re.S)[number].splitlines()


def test_it_is_short():
    lines = TEXT.splitlines()
    assert len(lines) <= MOST_LINES
    assert {number: len(line) for number, line in enumerate(lines, 1) if len(line) > MOST_CHARACTERS} == {}


def test_six_results_are_said_in_a_row_each():
    results = TEXT.partition("\n## Results\n")[2].partition("\n## ")[0]
    rows = [line for line in results.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 6
    for row in rows:
        assert len(re.sub(r"\||\[.*", "", row).split()) <= MOST_WORDS, row


def test_its_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = block("python")
    assert len([line for line in lines if line]) == 10
    found: dict = {}
    exec(compile("\n".join(lines), "README.md", "exec"), found)
    assert found["loss"].total.isfinite()
    assert found["written"].tokens.shape == (4, 32)
    assert sinkdlm.load("runs/mine").config == found["config"]


def test_it_shows_six_commands():
    """That they are ours, test_docs.py says."""
    assert [line.split()[1] for line in block("sh", 1)] == ["convert", "data", "train", "sample", "eval", "serve"]


def test_every_label_has_a_file():
    labels = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", TEXT, re.M))
    assert set(re.findall(r"\]\[([\w-]+)\]", TEXT)) == set(labels)
    assert len(labels) >= 6
    for path in labels.values():
        assert (ROOT / path).is_file()


def test_the_version_is_the_same_everywhere():
    """That of the package is pyproject's (hatch reads it), and CHANGELOG begins with it."""
    assert 'path = "src/sinkdlm/__init__.py"' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {sinkdlm.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == sinkdlm.__version__
