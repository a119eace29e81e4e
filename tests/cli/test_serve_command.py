"""`sinkdlm serve` as a process: what it prints, what it refuses, how it ends; schemathesis over its schema."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from evaluated import save_model
from fuzzing import fuzz, known_schema
from sinkdlm.serving.served import Limits
from sites import SECONDS, bytes_lm, letters_lm, serving


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("served") / "tiny")


@contextmanager
def served(*words, command="serve", **environment):
    """Start the command and wait for its address; end it by SIGTERM, with status 0."""
    line = [sys.executable, "-m", "sinkdlm", command, *map(str, words), "--port", "0", "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(line, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, **pipes)
    try:
        said = process.stdout.readline()
        assert "serving" in said, process.stderr.read()
        process.url = re.search(r"http://\S+", said)[0]
        yield process
        process.send_signal(signal.SIGTERM)
        _, process.complaints = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, process.complaints
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_it_says_where_it_serves_and_ends_when_told(checkpoint):
    """Two models, a key from the environment, all addresses."""
    with served(checkpoint, checkpoint, "--host", "0.0.0.0", SINKDLM_API_KEY="k") as process:
        url = process.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/models", timeout=SECONDS).status_code == 401
        asked = {"headers": {"authorization": "Bearer k"}, "timeout": SECONDS}
        cards = httpx.get(f"{url}/v1/models", **asked).json()["data"]
        assert [card["id"] for card in cards] == ["tiny-1", "tiny-2"]
        body = {"model": "tiny-2", "prompt": "the ", "max_tokens": 4}
        asked["headers"]["host"] = "other.example"
        answer = httpx.post(f"{url}/v1/completions", json=body, **asked)
        assert answer.status_code == 200
    assert process.complaints == ""


@pytest.mark.slow
def test_inspect_opens_the_page_once_it_is_there(checkpoint, tmp_path):
    """A browser as webbrowser knows one, which writes down what it was given; with --no-browser it is not called."""
    calls = tmp_path / "calls"
    opener = tmp_path / "opener"
    opener.write_text(f'#!/bin/sh\ncurl -s "$1" >/dev/null; echo "$1" >> {calls}\n')
    opener.chmod(0o755)
    with served(checkpoint, "--host", "0.0.0.0", "--allow-anyone", command="inspect", BROWSER=str(opener)) as process:
        deadline = time.monotonic() + SECONDS
        while not calls.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        page = httpx.get(process.url.replace("0.0.0.0", "127.0.0.1"), timeout=SECONDS)
        assert "<title>sinkdlm inspector</title>" in page.text
    assert calls.read_text().strip() == process.url.replace("0.0.0.0", "127.0.0.1")
    with served(checkpoint, "--no-browser", command="inspect", BROWSER=str(opener)) as process:
        assert httpx.get(process.url, timeout=SECONDS).status_code == 200
    assert calls.read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a", "b", "c"], "one or two"),
        (["none"], "none"),
        (["CKPT", "--host", "203.0.113.7"], "--host 203.0.113.7 --port 0: cannot be bound"),
        (["CKPT", "--device", "cuda:99"], "cuda:99"),
        (["CKPT", "--max-batch", "0"], "--max-batch"),
        (["CKPT", "--api-key", ""], "--api-key: an empty key"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "inspect"])
def test_a_mistake_gets_one_line(command_line, checkpoint, words, told, command):
    given = [checkpoint if word == "CKPT" else word for word in words]
    status, out, err = command_line(command, *given, "--port", "0")
    assert status == 2
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


def test_a_port_that_is_taken_is_told_before_models_are_read(command_line):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = command_line("serve", "no-such-model", "--port", port)
    assert status == 2
    assert f"--port {port}: cannot be bound: Address already in use" in err


def test_without_the_packages_it_says_what_to_install(command_line, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("sinkdlm.serving.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    status, _, err = command_line("serve", "x")
    assert status == 2
    assert err == "sinkdlm: uvicorn is not installed; pip install 'sinkdlm[serve]'\n"


@pytest.mark.parametrize("command", ["serve", "inspect"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_this_machine_a_key_is_asked_for(command_line, host, command):
    """Before models are read. Whoever means it says so."""
    status, out, err = command_line(command, "no-such-model", "--host", host, "--port", 0)
    cure = "set --api-key, or give --allow-anyone"
    assert (status, out) == (2, "")
    assert err == f"sinkdlm: --host {host}: anybody who reaches it could use this server; {cure}\n"
    for given in (["--api-key", "k"], ["--allow-anyone"]):
        _, _, err = command_line(command, "no-such-model", "--host", host, "--port", 0, *given)
        assert "no-such-model" in err
        assert "--host" not in err


def test_memory_for_caches_is_an_option(command_line, tmp_path, monkeypatch):
    path, found = save_model(tmp_path / "tiny"), []
    monkeypatch.setattr("sinkdlm.serving.server.run", lambda site, bound, ready: found.extend(site.models.values()))
    status, _, err = command_line("serve", path, "--port", 0, "--device", "cpu", "--cache-memory", "0.5")
    assert (status, err) == (0, "")
    assert [served.engine.capacity.cache_bytes for served in found] == [1 << 29]


def test_any_address_of_the_loopback_needs_no_key(command_line):
    _, _, err = command_line("serve", "no-such-model", "--host", "127.0.0.2", "--port", 0)
    assert "no-such-model" in err


@pytest.mark.parametrize("cases", [30, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_request_makes_the_server_fail(cases):
    """Every answer conforms to the schema."""
    with serving({"letters": letters_lm(seed=3), "bytes": bytes_lm()}, limits=Limits(length=24)) as found:
        body = {"model": "letters", "prompt": "ab", "max_tokens": 4, "sinkdlm": {"inspect": True}}
        inspected = httpx.post(f"{found.url}/v1/completions", json=body, timeout=SECONDS).json()["id"]
        tally = fuzz(found.url, known_schema(found.url, ["letters", "bytes"], inspected), cases, seed=cases)
    assert tally.cases >= cases
    assert tally.operations == 14
    assert not [status for status in tally.statuses if status >= 500]
    assert tally.statuses[200] >= cases // 20  # not every generated request is refused
    assert tally.statuses[400] >= cases // 20
