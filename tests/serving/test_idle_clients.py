"""Clients that do nothing: silent sockets, streams that nobody reads, bodies of mistakes. The server stays there for the others."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from benchmarks.serving import Process, nano_checkpoint, server

from sinkdlm.serving import connection
from sinkdlm.serving.answers import _AHEAD, _Inbox
from sinkdlm.serving.bodies import parse
from sinkdlm.serving.connection import Connection
from sinkdlm.serving.engine import Frame, Over, Written
from sites import SECONDS, letters_lm, serving

FILES = 256  # that the server may open
# The command, with few files, and with its log where it can be weighed.
LIMITED = f"""
import os, resource
from sinkdlm.cli import entry as cli
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
os.dup2(os.open(os.environ["LOG"], os.O_WRONLY | os.O_CREAT, 0o600), 2)
cli.main()
"""
# Ask for /health until stdin closes. For each time: seconds until the answer; those that the thread of the server's loop did not
# wait for a core; those that it had one.
ASK = """
import select, socket, sys, time
def times():
    return [int(word) / 1e9 for word in open(f"/proc/{sys.argv[1]}/task/{sys.argv[1]}/schedstat").read().split()[:2]]
while not select.select([sys.stdin], [], [], 0.1)[0]:
    began, (worked, waited), found = time.monotonic(), times(), b""
    with socket.create_connection((sys.argv[2], int(sys.argv[3])), 120) as client:
        client.sendall(b"GET /health HTTP/1.1\\r\\nhost: 127.0.0.1\\r\\nconnection: close\\r\\n\\r\\n")
        while part := client.recv(1 << 16):
            found += part
    seconds = time.monotonic() - began
    assert b'"ok"' in found, found
    now = times()
    print(seconds, seconds - (now[1] - waited), now[0] - worked, flush=True)
"""
STREAM = {"model": "nano", "prompt": "tom ", "max_tokens": 120, "n": 16, "stream": True}
STREAM["sinkdlm"] = {"frames": True, "ignore_eos": True}
PARTS = b'{"model": "nano", "messages": [{"role": "user", "content": [' + b"{}," * 349_000 + b"{}]}]}"
MINUS = b'{"model": "nano", "prompt": [' + b"-1," * 349_000 + b"-1]}"


@pytest.fixture(scope="module")
def running():
    with serving({"letters": letters_lm(seed=3)}) as found:
        yield found


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), SECONDS)


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    fixed = [b"host: 127.0.0.1", b"content-type: application/json", b"content-length: %d" % len(body)]
    return b"\r\n".join([b"POST " + path + b" HTTP/1.1", *fixed, *headers, b"", body])


def received(client: socket.socket) -> bytes:
    """Until the server closes."""
    found = b""
    with suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            found += part
    return found


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"\r\n", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET /hea"])
def test_who_sends_no_request_is_cut(running, monkeypatch, sent):
    monkeypatch.setattr(connection, "_HEAD", 0.5)
    with connect(running.url) as client:
        client.sendall(sent)
        client.settimeout(SECONDS)
        assert (b"200 OK" in received(client)) == (b"\r\n\r\n" in sent)


def test_who_sends_a_head_byte_by_byte_is_cut(running, monkeypatch):
    monkeypatch.setattr(connection, "_HEAD", 0.5)
    end = time.monotonic() + SECONDS
    with connect(running.url) as client, suppress(OSError):  # reset, or a broken pipe
        while time.monotonic() < end:
            client.sendall(b"G")
            time.sleep(0.1)
    assert time.monotonic() < end


def test_a_connection_waits_for_the_next_request(running, monkeypatch):
    monkeypatch.setattr(connection, "_HEAD", 0.5)
    with httpx.Client(base_url=running.url, timeout=SECONDS) as http:
        http.get("/health")
        (before,) = running.server.server_state.connections
        time.sleep(2.5)
        http.get("/health")
        assert running.server.server_state.connections == {before}


def test_a_stream_that_nobody_reads_is_cut_and_its_request_ends(running, monkeypatch):
    """What waits is no more than what a socket holds: the rest is left out."""
    monkeypatch.setattr(connection, "_STALL", 1.0)
    body = json.dumps(STREAM | {"model": "letters", "max_tokens": 240}).encode()
    with connect(running.url) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(post(body))
        end = time.monotonic() + SECONDS
        while not running.site.n_inside:
            assert time.monotonic() < end
        (taken,) = [each for each in running.server.server_state.connections if each.cycle is not None]
        taken.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while running.site.n_inside:
            assert taken.transport.get_write_buffer_size() < 1 << 20
            assert time.monotonic() < end
            time.sleep(0.01)
    while running.site.models["letters"].engine.running:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_waits_for_a_reader_is_bounded_and_ends_are_never_lost():
    async def run():
        kept = []
        inbox = _Inbox(kept.append)
        tokens = [1] * 100
        for step in range(1000):
            inbox.tell([Frame(0, step, tokens, [0.5] * 100), Written(0, tokens, step == 999, step)])
        inbox.tell([Over(None)])
        await asyncio.sleep(0.1)
        events = []
        while not events or not isinstance(events[-1], Over):
            events.append(await inbox.take())
        return kept, events

    kept, events = asyncio.run(run())
    assert len(kept) == 1000  # inspection has them all
    assert [event.steps for event in events[:4]] == [0, 0, 1, 1]
    assert [event.steps for event in events[-3:-1]] == [999, 999]
    assert sum(len(event.tokens) for event in events[:-1]) <= _AHEAD + 300


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"nonsense\r\n\r\n", "Invalid HTTP request"),
        (b"GET / HTTP/1.1\r\n\r\n", "Invalid HTTP request"),  # no host
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n", "Invalid HTTP request"),
        (post(b"{}", b"transfer-encoding: chunked"), "not both"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: gzip\r\n\r\n", "Invalid HTTP request"),
    ],
    ids=["line", "host", "long", "lengths", "encoding"],
)
def test_errors_of_protocol_have_openais_shape(running, sent, words):
    with connect(running.url) as client:
        client.sendall(sent)
        client.settimeout(SECONDS)
        head, _, body = received(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]


@pytest.mark.parametrize("path", ["/health", "/", "/v1/models", "/metrics"])
def test_head_answers_what_get_does_without_a_body(running, path):
    got, head = httpx.get(running.url + path), httpx.head(running.url + path)
    assert head.status_code == got.status_code
    assert head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", PARTS),
        ("/v1/completions", MINUS),
        ("/v1/completions", b'{"model": "nano", "prompt": [' + b"[-1]," * 200_000 + b"[-1]]}"),
        ("/v1/chat/completions", b'{"model": "nano", "messages": [' + b'{"role":"user","content":[{},{},{}]},' * 1020 + b"{}]}"),
        ("/v1/chat/completions", b'{"model": "nano", "messages": [' + b"{}," * 349_000 + b"{}]}"),
        (
            "/v1/chat/completions",
            json.dumps(
                {"model": "nano", "messages": [{"role": "user", "content": ""}], "metadata": {str(n): 1 for n in range(80_000)}}
            ).encode(),
        ),
    ],
    ids=["parts", "minus", "lists", "messages", "empty", "metadata"],
)
def test_a_body_of_many_mistakes_is_refused_at_once(running, path, body):
    """Each took from one to fourteen seconds, in which nobody else was answered."""
    before = time.process_time()
    answer = httpx.post(running.url + path, content=body, headers={"content-type": "application/json"}, timeout=SECONDS)
    assert time.process_time() - before < 1
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("inner", ["{}", "[]", "[{", '{"":', '""', '"\\\\"'])
def test_what_no_request_can_hold_is_refused_unparsed(inner):
    body = f'{{"prompt": [{",".join([inner] * 200_000)}]}}'.encode()
    with pytest.raises(ValueError, match=r"more than .* (strings|lists and objects)"):
        parse(body)


def test_the_largest_requests_are_parsed_as_json_has_them():
    """All fields of all messages and parts; ids in lists; a prompt of brackets, quotes and backslashes."""
    parts = [{"type": "text", "text": '"'}] * 1024
    empty = {"refusal": None, "annotations": [], "audio": None, "tool_calls": [], "function_call": None}
    messages = [{"role": "user", "name": "x", "content": parts if number == 0 else "", **empty} for number in range(1024)]
    bodies = [{"messages": messages}, {"prompt": [[7] * 8000] * 64}, {"prompt": '{"[\\' * 100_000 + "\\", "n": [{}]}]
    for body in bodies:
        sent = json.dumps(body).encode()
        assert len(sent) > 1 << 17
        assert parse(sent) == body


def test_when_all_connections_are_taken_the_idlest_goes(running, monkeypatch):
    """A newcomer is always let in; only where every other is at work is it told to come back."""
    monkeypatch.setattr(running.server, "_most", 8)
    silent = [connect(running.url) for _ in range(8)]
    for client in silent:
        client.settimeout(SECONDS)
    assert httpx.get(f"{running.url}/health").status_code == 200
    assert received(silent[0]) == b""
    with httpx.Client(base_url=running.url) as http:
        assert http.get("/health").status_code == 200
        late = [connect(running.url) for _ in range(6)]
        time.sleep(0.5)
        (asked,) = [each for each in running.server.server_state.connections if each.cycle is not None]
        assert not asked.transport.is_closing()  # those who never asked go first
    monkeypatch.setattr(running.server, "_most", 0)
    monkeypatch.setattr(Connection, "idle", False)
    told = httpx.get(f"{running.url}/health")
    assert told.status_code == 503
    assert told.json()["error"]["code"] == "busy"
    for client in silent + late:
        client.close()


def test_no_file_left_is_no_flood(running, monkeypatch, capfd):
    """accept fails for a while: a pause, and no word in the log."""
    calls, accept = [], socket.socket.accept

    def fail(this):
        calls.append(1)
        if len(calls) < 4:
            raise OSError(24, "Too many open files")
        return accept(this)

    monkeypatch.setattr(socket.socket, "accept", fail)
    assert httpx.get(f"{running.url}/health", timeout=SECONDS).status_code == 200
    assert len(calls) < 10
    assert capfd.readouterr().err == ""


def test_a_deadline_ends_a_shutdown_that_a_client_holds_up(monkeypatch):
    """A request that never ends, as it seems to the server."""
    with serving({"letters": letters_lm(seed=3)}) as found:
        found.server._drain = 0.5
        found.site.n_inside += 1
        found.site.draining = True
        end = time.monotonic() + SECONDS
        while not found.server.should_exit:
            assert time.monotonic() < end
            time.sleep(0.05)


# -- all of it at once ------------------------------------------------------------------------------------------------------------


class Soak:
    """Clients that keep so many sockets open for so long, and that send so many large bodies every second."""

    def __init__(self, url: str, n_silent: int, n_unread: int, n_bodies: int) -> None:
        self.url, self.over, self.statuses = url, threading.Event(), {}
        work = [(self._hold, (n_silent, b"")), (self._hold, (n_unread, post(json.dumps(STREAM).encode())))]
        work += [(self._send, (number,)) for number in range(n_bodies)]
        self._threads = [threading.Thread(target=function, args=given) for function, given in work]

    def run(self, seconds: float) -> None:
        for thread in self._threads:
            thread.start()
        time.sleep(seconds)

    def end(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(SECONDS)

    def _hold(self, n: int, sent: bytes) -> None:
        """So many sockets that send this and read nothing; those that were cut are opened again."""
        held: list[socket.socket] = []
        while not self.over.is_set():
            for client in [client for client in held if _is_cut(client, peek=not sent)]:
                held.remove(client)
                client.close()
            with suppress(OSError):
                while len(held) < n and not self.over.is_set():
                    held.append(connect(self.url))
                    held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    held[-1].sendall(sent)
            time.sleep(0.2)
        for client in held:
            client.close()

    def _send(self, number: int) -> None:
        path, body = ((b"/v1/chat/completions", PARTS), (b"/v1/completions", MINUS))[number % 2]
        while not self.over.is_set():
            with suppress(OSError), connect(self.url) as client:
                client.sendall(post(body, b"connection: close", path=path))
                status = received(client)[9:12]
                self.statuses[status] = self.statuses.get(status, 0) + 1
            time.sleep(1 - time.time() % 1)  # all at once


def _is_cut(client: socket.socket, *, peek: bool) -> bool:
    try:
        client.setblocking(False)
        return client.send(b"") < 0 or (peek and client.recv(1, socket.MSG_PEEK) == b"")
    except BlockingIOError:
        return False
    except OSError:
        return True


def megabytes(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def asking(process: Process) -> Iterator[list[tuple[float, ...]]]:
    """Another process asks for /health: threads of this one would wait for each other."""
    address, found = urlsplit(process.url), []
    command = [sys.executable, "-c", ASK, str(process.popen.pid), str(address.hostname), str(address.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as popen:
        yield found
        told, _ = popen.communicate(timeout=SECONDS)
    assert popen.returncode == 0
    found += [tuple(map(float, line.split())) for line in told.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="asks Linux for a process's memory and waits")
def test_a_soak_of_idle_clients_shuts_nobody_out(tmp_path):
    """On a machine whose cores are busy elsewhere, too: their share of a delay is left out."""
    seconds, most = float(os.environ.get("SINKDLM_SOAK_SECONDS", 5)), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    n_silent, log = min(400, most // 2), tmp_path / "log"
    given = {"program": ("-c", LIMITED), "LOG": str(log)}
    with server(nano_checkpoint(tmp_path), "--timeout", "5", **given) as process:
        pid = process.popen.pid
        first = Soak(process.url, n_silent, 64, 8)  # what is made once is made
        first.run(2)
        first.end()
        before = megabytes(pid)
        soak = Soak(process.url, n_silent, 64, 8)
        with asking(process) as asked:
            soak.run(seconds)
        during = megabytes(pid)
        soak.end()
        end = time.monotonic() + 30
        while (after := megabytes(pid)) - before > 50 and time.monotonic() < end:
            time.sleep(0.1)
        last = Soak(process.url, n_silent, 64, 0)
        last.run(2)
        began = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        status = process.popen.wait(SECONDS)
        ended = time.monotonic() - began
        last.end()
    waits, delays, works = map(sorted, zip(*asked, strict=True))
    figures = f"/health {waits[-1]:.2f} s at most of {len(waits)}, {waits[len(waits) // 2]:.2f} s median"
    figures += f"; without other processes {delays[-1]:.2f} s; in it the loop worked {works[-1]:.2f} s at most; {soak.statuses}"
    sys.stderr.write(f"{figures}; {before:.0f}, {during:.0f}, {after:.0f} MB; ended in {ended:.1f} s\n")
    assert works[-1] < 1
    assert delays[len(delays) // 2] < 1
    assert delays[-1] < 5  # now and then the thread that holds Python's lock waits for a core, too
    assert set(soak.statuses) == {b"400"}
    assert after - before < 50
    assert status == 0
    assert ended < 5 + 10 + 3
    assert log.stat().st_size == 0, log.read_text()[:2000]
