import copy
import fcntl
import functools
import itertools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sinkdlm import DiffusionLM, ModelConfig
from sinkdlm.cli import app as cli

pytest.register_assert_rewrite("launches", "pages", "sites")  # so that a failure there says what was found

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: two threads each would wait for one another
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # where Triton is installed, its kernels then run on a CPU

SMALL = {"vocab_size": 11, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "d_model": 24, "d_ff": 20, "context_length": 64}

# Every value of every flag, and the combinations that could trip each other.
VARIANTS = {
    "vanilla": {},
    "sink": {"n_sinks": 1},
    "sink-end": {"n_sinks": 1, "sink_position": "end"},
    "sink-zero": {"n_sinks": 1, "sink_value": "zero", "qkv_bias": True},
    "sinks-4": {"n_sinks": 4},
    "sinks-2-end-zero-gate": {"n_sinks": 2, "sink_position": "end", "sink_value": "zero", "gate": "elementwise"},
    "gate": {"gate": "elementwise"},
    "gate-headwise-sink": {"gate": "headwise", "n_sinks": 1},
    "register": {"n_sinks": 1, "sink_kind": "register"},
    "register-2-end-zero": {"n_sinks": 2, "sink_kind": "register", "sink_position": "end", "sink_value": "zero"},
    "logit": {"n_sinks": 1, "sink_kind": "logit"},
    "logit-gate": {"n_sinks": 1, "sink_kind": "logit", "gate": "headwise"},
    "parent": {"n_sinks": 1, "qkv_bias": True, "tie_embeddings": True, "mask_id": 10, "shift_logits": True},
}


def small_config(**flags) -> ModelConfig:
    return ModelConfig(**{**SMALL, **flags})


def small_model(seed: int = 0, dtype: torch.dtype = torch.float64, attention: str = "auto", **flags) -> DiffusionLM:
    """Random weights of a size at which every term matters: biases and logits away from zero, norms away from one."""
    return copy.deepcopy(_small_model(seed, dtype, attention, tuple(flags.items())))


@functools.cache
def _small_model(seed: int, dtype: torch.dtype, attention: str, given: tuple) -> DiffusionLM:
    """Nobody's own: a copy takes less than half the time of making one."""
    flags = dict(given)
    model = DiffusionLM(small_config(**flags), seed=seed, attention=attention).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator, dtype=dtype)
    return model


def small_tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 10, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """make(folder) by the first process that asks; the others wait for it, and are told where it failed or was killed."""
    done, failure = folder.with_name(f"{folder.name}.done"), folder.with_name(f"{folder.name}.failed")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system takes it from a process that dies
        if done.exists():
            return folder
        if folder.exists():
            reason = failure.read_text() if failure.exists() else "its maker was killed"
            pytest.fail(f"{folder.name}, which the tests share, could not be made: {reason}", pytrace=False)
        folder.mkdir()
        try:
            make(folder)
        except BaseException as problem:
            failure.write_text(f"{type(problem).__name__}: {problem}")
            raise
        done.touch()
    return folder


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


@pytest.fixture
def half_rendered(monkeypatch) -> None:
    """SVGs of wide figures, and none of those for phones, which take as long."""
    from sinkdlm.analysis import plates

    render = plates._to_svg
    monkeypatch.setattr(plates, "_to_svg", lambda figure: render(figure) if figure.get_figwidth() > 4 else "<svg></svg>")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BROWSER_WAIT = 120_000  # ms: on a busy machine it takes a while to start
BROWSER_FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]


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


def grid():
    """The grid of the paper's ablations: S x position x value x gate x grouped-query ratio."""
    gates, ratios = ("none", "elementwise", "headwise"), ((2, 2), (6, 2), (7, 1))
    for n_sinks, gate, heads in itertools.product((0, 1, 2, 4), gates, ratios):
        for position, value in itertools.product(("front", "end"), ("learned", "zero")) if n_sinks else [("front", "learned")]:
            yield {
                "n_sinks": n_sinks,
                "gate": gate,
                "n_heads": heads[0],
                "n_kv_heads": heads[1],
                "d_model": heads[0] * 4,
                "sink_position": position,
                "sink_value": value,
                "qkv_bias": True,
            }
