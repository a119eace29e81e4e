import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks import kills

from browsers import BROWSER, BROWSER_FLAGS, BROWSER_WAIT
from shared_folders import make_once
from sinkdlm.cli import entry as cli
from small_models import VARIANTS

pytest.register_assert_rewrite("launches", "pages", "sites")  # so that a failure there says what was found

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: two threads each would wait for one another
if torch.cuda.is_available():
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # else each test process starts one for every core
else:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels then run on a CPU; its functions read this as they are defined


def pytest_addoption(parser) -> None:
    parser.addoption("--part", metavar="I/N", help="run every N-th test, from the I-th on: `-m gpu --part 1/3`")


def pytest_configure(config) -> None:
    if config.option.markexpr == "gpu":
        config.addinivalue_line("filterwarnings", "default")  # a GPU machine's torch is another than that of the lock


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    """`-m gpu` reads the files alone that have such tests: a GPU machine may lack what others import."""
    if config.option.markexpr == "gpu" and collection_path.suffix == ".py" and "mark.gpu" not in collection_path.read_text():
        return True
    return None


@pytest.hookimpl(trylast=True)  # when marks have chosen
def pytest_collection_modifyitems(config, items) -> None:
    """Every N-th test, so that the cases of one test, which take about as long, are spread over all parts."""
    if config.option.part is None:
        return
    part, of = map(int, config.option.part.split("/"))
    if not 1 <= part <= of:
        raise pytest.UsageError(f"--part {config.option.part}: the first number is 1 to the second; write --part 1/{of}")
    chosen = items[part - 1 :: of]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


@pytest.fixture(scope="session")
def token_set(tmp_path_factory) -> Path:
    return kills.write_set(tmp_path_factory.mktemp("tokens") / "set")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`made_once(name, make)`: a folder for the whole session, however many processes share the tests."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own
    return lambda name, make: make_once(shared / name, make)


@pytest.fixture
def command_line(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: exit status, stdout, stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sinkdlm", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        shown = capsys.readouterr()
        return left.value.code or 0, shown.out, shown.err

    return run


@pytest.fixture
def unrendered(monkeypatch) -> None:
    """Figures are drawn, and no SVG is made of them, which is most of a report's time: for those who look at something else."""
    monkeypatch.setattr("sinkdlm.analysis.plates._to_svg", lambda figure: "<svg></svg>")


@pytest.fixture(scope="module")
def browser():
    """A real one, where there is one. Of a module: a driver that stays open would be in the way of event loops of other tests."""
    if BROWSER is None:
        pytest.skip("no Chromium on PATH")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=[*BROWSER_FLAGS, "--disable-sync"], timeout=BROWSER_WAIT)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def lms():
    """The models that the page shows, to compare with: one that serves is its engine's alone."""
    from pages import shown_lms

    return shown_lms()


@pytest.fixture(scope="module")
def site(browser):
    """A server whose page shows them."""
    from pages import shown_lms
    from sites import serving

    with serving(shown_lms()) as found:
        yield found


@pytest.fixture(params=VARIANTS, ids=list(VARIANTS))
def variant(request) -> dict:
    return VARIANTS[request.param]
