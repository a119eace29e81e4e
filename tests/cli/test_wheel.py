"""The package as users install it: a wheel in a folder of its own, away from the checkout."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import sinkdlm

SOURCE = Path(sinkdlm.__file__).parent
ROOT = SOURCE.parents[1]
SMALL = ["--set", "train.steps=3", "--set", "eval.draws=4", "--set", "train.batch=4"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")

    def pip(*words: object) -> None:
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, words)]
        subprocess.run(command, check=True, capture_output=True)

    pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    pip("install", "--no-deps", "--target", folder / "packages", wheel)
    return folder / "packages"


@pytest.mark.slow
def test_an_installed_package_works_without_its_checkout(installed, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    given = {"cwd": tmp_path, "env": environment, "text": True}

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], capture_output=True, check=False, **given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert Path(run("-c", "import sinkdlm; print(sinkdlm.__file__)").strip()).parent == installed / "sinkdlm"
    for kind, least in (("*.toml", 65), ("page/*", 5), ("*.json", 1)):
        shipped = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob(kind) if path.is_file() and path.suffix != ".pyc"}
        assert len(shipped) >= least
        assert shipped <= {str(path.relative_to(installed / "sinkdlm")) for path in (installed / "sinkdlm").rglob(kind)}
    listed = json.loads(run("-m", "sinkdlm", "recipe", "list", "--json"))
    assert len(listed) == len([*SOURCE.glob("recipes/**/*.toml")])
    assert all(Path(one["path"]).is_relative_to(installed) for one in listed)
    run("-m", "sinkdlm", "data", "example", "--out", "data/nano", "--documents", "200")
    run("-m", "sinkdlm", "train", "nano-sink", "--device", "cpu", *SMALL)
    model = ("runs/nano-sink/model", "--device", "cpu")
    found = json.loads(run("-m", "sinkdlm", "sample", *model, "--length", "8", "--json"))
    assert len(found["samples"][0]["tokens"]) >= 8
    run("-m", "sinkdlm", "analyze", *model, "--out", "report", "--trajectories", "1", "--length", "4", "--no-interventions")
    assert (tmp_path / "report" / "report.html").is_file()
    serve = [sys.executable, "-m", "sinkdlm", "serve", *model, "--port", "0"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
                assert [card["id"] for card in json.load(answer)["data"]] == ["nano-sink"]
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert b"<title>sinkdlm inspector</title>" in answer.read()
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()
