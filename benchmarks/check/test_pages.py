"""Pages, pictures and the README say what stored results say."""

import json
import re

from benchmarks import page, readme
from benchmarks.marked import prose
from benchmarks.measuring import RESULTS
from benchmarks.reproduction import RECORDS
from benchmarks.reproduction_page import DOCS, METHOD, PAGE, write_method, write_page

_PICTURES = ("benchmarks-training", "benchmarks-sampling", "benchmarks-memory", "benchmarks-steps", "sinks")
_README = (page.ROOT / "README.md").read_text(encoding="utf-8")
_PICTURE = re.compile(r"!\[.*\]\(.*\)")
_REMAKE = "run: make docs-benchmarks"


def test_the_benchmark_page_says_what_the_results_say() -> None:
    made = page.page_text()
    assert page.PAGE.read_text(encoding="utf-8") == made, _REMAKE
    names = {"smdm-472m", "smollm2-135m", "qwen2.5-0.5b", "H200", "float8", "fp8", "bf16", "float32", "64", "20th", "80th"}
    assert set(re.findall(r"[\w.-]*\d[\w-]*", _PICTURE.sub("", prose(made)))) <= names | {"-fp8"}
    for path in RESULTS.glob("*.json"):
        entry = json.loads(path.read_text())
        for words in (f"`{path.name}`", f"`{entry['command']}`", entry["commit"][:10]):
            assert words in made


def test_tutorials_say_what_the_results_say() -> None:
    assert len(page.MADE) == 4
    for path, text in page.MADE.items():
        assert path.read_text(encoding="utf-8") == text(), _REMAKE


def test_the_readmes_numbers_are_those_of_its_records() -> None:
    assert readme.faults(_README) == []


def test_no_number_of_the_readmes_results_can_be_changed_unseen() -> None:
    """Each digit of each statement, of the results' table and of each link to a record, replaced by another one."""
    stated = [unit for unit in readme.units(_README) if readme.label_of(unit) in readme.LABELS]
    stated += [f"[{label}]: {path}" for label, (path, _) in readme.LABELS.items()]
    changed = 0
    for unit in stated:
        start = _README.index(unit)
        for found in re.finditer(r"\d", unit):
            place = start + found.start()
            planted = f"{_README[:place]}{(int(found[0]) + 1) % 10}{_README[place + 1 :]}"
            assert readme.faults(planted), f"{unit}: nobody notices another digit at {found.start()}"
            changed += 1
    assert changed > 100


def test_a_new_number_in_the_readme_needs_a_record() -> None:
    for place, line in (("## Results\n", "It takes 3 steps.\n\n"), ("## Map of the code\n", "A step takes 3 ms.\n\n")):
        assert readme.faults(_README.replace(place, place + line))


def test_the_pages_of_the_reproduction_say_what_its_records_say() -> None:
    for name, made in ((PAGE, write_page(RECORDS, DOCS / "assets")), (METHOD, write_method())):
        assert (DOCS / name).read_text(encoding="utf-8") == made, "run: python -m benchmarks.reproduction"


def test_pictures_are_there_and_small() -> None:
    for name in _PICTURES:
        assert 1_000 < (page.ROOT / "docs" / "assets" / f"{name}.svg").stat().st_size < 150_000, name
