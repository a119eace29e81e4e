import gc
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

pytest.register_assert_rewrite("launches", "pages", "sites")  # so that their failed assertions show values

gc.disable()  # until all tests are collected: else it goes through what modules hold again and again
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start: more threads would compete for cores
if torch.cuda.is_available():
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # else every test process starts one per core
else:
    os.environ["TRITON_INTERPRET"] = "1"  # runs Triton kernels on a CPU; must be set before they are defined


def pytest_addoption(parser) -> None:
    parser.addoption("--part", metavar="I/N", help="run every N-th test, from the I-th on: `-m gpu --part 1/3`")


def pytest_configure(config) -> None:
    if config.option.markexpr == "gpu":
        config.addinivalue_line("filterwarnings", "default")  # a GPU machine's torch may differ from the lock's


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    """With `-m gpu`, collect only files with such tests: a GPU machine may lack what others import."""
    if config.option.markexpr == "gpu" and collection_path.suffix == ".py" and "mark.gpu" not in collection_path.read_text():
        return True
    return None


def pytest_collection_finish() -> None:
    """Leave out of every later garbage collection what stays: modules and tests."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after marks have selected
def pytest_collection_modifyitems(config, items) -> None:
    """Keep every N-th test, so that cases of one test, which take equally long, spread over all parts."""
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
    """`made_once(name, make)`: a folder made once per session, shared by all test processes."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own
    return lambda name, make: make_once(shared / name, make)


@pytest.fixture
def command_line(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit status, stdout, stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sinkdlm", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        shown = capsys.readouterr()
        return left.value.code or 0, shown.out, shown.err

    return run


@pytest.fixture
def without_pngs(monkeypatch) -> None:
    """Leave figures' PNG files empty, in tests that look at other files of a report."""
    from matplotlib.figure import Figure

    def save(self, file, *, format, **how):
        return Path(file).touch() if format == "png" else savefig(self, file, format=format, **how)

    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", save)


@pytest.fixture
def unrendered(without_pngs, monkeypatch) -> None:
    """Skip writing figures, most of a report's time, in tests that look at something else."""
    monkeypatch.setattr("sinkdlm.analysis.figures._to_svg", lambda figure: "<svg></svg>")


@pytest.fixture(scope="module")
def browser():
    """A real browser, or skip. Closed after each module: an open driver disturbs other tests' event loops."""
    if BROWSER is None:
        pytest.skip("no Chromium on PATH")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=[*BROWSER_FLAGS, "--disable-sync"], timeout=BROWSER_WAIT)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def lms():
    """The models that the page shows, to compare with: a served model belongs to its engine."""
    from pages import shown_lms

    return shown_lms()


@pytest.fixture(scope="module")
def site(browser):
    """A server whose page shows the models of `lms`."""
    from pages import shown_lms
    from sites import serving

    with serving(shown_lms()) as found:
        yield found


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub on loopback, which huggingface_hub asks in place of the real one, with a cache and tokens of its own."""
    from hubs import serving, use

    with serving() as found, use(found, tmp_path, monkeypatch):
        yield found


@pytest.fixture
def token(hub, monkeypatch) -> None:
    from hubs import TOKEN

    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture(params=VARIANTS, ids=list(VARIANTS))
def variant(request) -> dict:
    return VARIANTS[request.param]
