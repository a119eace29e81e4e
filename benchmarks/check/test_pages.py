"""Pages, pictures and the README say what stored results say."""

import json

from benchmarks import page, readme
from benchmarks.measuring import RESULTS
from benchmarks.reproduction import DOCS, RECORDS
from benchmarks.reproduction_page import write_page

_PICTURES = ("benchmarks-training", "benchmarks-sampling", "benchmarks-memory", "benchmarks-steps", "sinks")
_REMAKE = "run: make docs-benchmarks"


def test_the_benchmark_page_says_what_the_results_say() -> None:
    made = page.page_text()
    assert page.PAGE.read_text() == made, _REMAKE
    for path in RESULTS.glob("*.json"):
        entry = json.loads(path.read_text())
        for words in (f"`{path.name}`", f"`{entry['command']}`", entry["commit"][:10]):
            assert words in made


def test_the_readmes_numbers_are_those_of_the_results() -> None:
    text = (page.ROOT / "README.md").read_text()
    wanted = [(name, words) for name, all_words in readme.expected().items() for words in all_words]
    assert len(wanted) >= 17
    for name, words in wanted:
        assert words in text, f"README.md does not say {words!r}, as {name} does"


def test_the_page_of_the_reproduction_says_what_its_records_say() -> None:
    made = write_page(RECORDS, DOCS / "assets")
    assert (DOCS / "reproduction.md").read_text(encoding="utf-8") == made, "run: python -m benchmarks.reproduction"


def test_pictures_are_there_and_small() -> None:
    for name in _PICTURES:
        assert 1_000 < (page.ROOT / "docs" / "assets" / f"{name}.svg").stat().st_size < 150_000, name
