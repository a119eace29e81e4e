"""Two network namespaces as two hosts: names and addresses of their own, one cable between them, ranks that meet over TCP.

Host B has the lower address, so torchrun makes its ranks the first: B writes the run and holds the ranks' store, A the rendezvous.
The one that is lost is B.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from benchmarks import kills

from launches import Launch, launched, make_undisturbed, script, starts, steps_made, wait_until

STEPS = 40
LONG = 120  # far more steps than one host makes until the other is back
CABLE = "veth-sinkdlm"  # what each host calls its end of it
QUICK = "keep_alive_interval=1,last_call_timeout=3"  # torchrun takes 15 s to miss a host, and 30 s to begin without one
# A Python that has imported what torchrun needs, says so, and waits for permission: a host then comes back at once, however long
# imports take, while the others still train.
HELD = f"""#!{sys.executable}
import os, pathlib, runpy, sys, time
import torch.distributed.launcher.api
pathlib.Path(os.environ["READY"]).touch()
while not pathlib.Path(os.environ["GO"]).exists():
    time.sleep(0.01)
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""

pytestmark = pytest.mark.slow


class Host(NamedTuple):
    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Run a command there, under the host's own name."""
        named = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "bash", "-c", named, "bash", *words]


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def connect(a: Host, b: Host) -> None:
    for host in (a, b):
        ip("netns", "add", host.name)
        ip("-n", host.name, "link", "set", "lo", "up")
    ip("link", "add", CABLE, "netns", a.name, "type", "veth", "peer", "name", CABLE, "netns", b.name)
    for host in (a, b):
        ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", CABLE)
        ip("-n", host.name, "link", "set", CABLE, "up")
        subprocess.run(host.command("true"), capture_output=True, check=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    a, b = Host(f"node-a-{os.getpid()}", "10.213.7.2"), Host(f"node-b-{os.getpid()}", "10.213.7.1")
    try:
        try:
            connect(a, b)
        except (OSError, subprocess.CalledProcessError) as failure:
            pytest.skip(f"hosts cannot be made here: {failure}")
        yield a, b
    finally:
        if shutil.which("ip") is not None:
            for host in (a, b):  # and the cable with them
                subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


@pytest.fixture
def runs(hosts, made_once) -> Path:
    """Depends on the hosts: where they cannot be made, nothing is computed."""
    return made_once("nodes", lambda folder: make_undisturbed(folder, 4, STEPS))


@pytest.fixture
def long_runs(hosts, made_once) -> Path:
    """One rank's run: the runs compared with it have some steps of four ranks and some of two."""
    return made_once("nodes-long", lambda folder: make_undisturbed(folder, 1, LONG))


@contextmanager
def node(host: Host, meeting: Host, n_nodes: str, runs: Path, out: Path, **more: str) -> Iterator[Launch]:
    command = host.command(*script(runs / "recipe.toml", out))
    place = {"NNODES": n_nodes, "RDZV": f"{meeting.address}:29400", "ADDRESS": host.address, "NPROC": "2"}
    said = out.with_suffix(f".{host.name}")
    with launched(command, said, **place, RDZV_CONF=QUICK, GLOO_SOCKET_IFNAME=CABLE, **more) as launch:
        yield launch


@contextmanager
def away(hosts: tuple[Host, Host], n_nodes: str, runs: Path, out: Path) -> Iterator[tuple[Launch, Launch]]:
    """Both train; the scope loses B and checks what follows; after it B comes back, and both finish."""
    a, b = hosts
    held, ready, go = (out.with_suffix(suffix) for suffix in (".held", ".ready", ".go"))
    held.write_text(HELD)
    held.chmod(0o755)
    with node(b, a, n_nodes, runs, out, PYTHON=str(held), READY=str(ready), GO=str(go)) as back:
        wait_until(ready.exists, back)
        with node(a, a, n_nodes, runs, out) as stays:
            with node(b, a, n_nodes, runs, out) as lost:
                wait_until(lambda: steps_made(out) > 10, stays)
                yield stays, lost
            go.touch()
            for launch in (stays, back):
                assert launch.wait() == 0, launch.text()[-4000:]


def wait_for_words(pattern: str, told: Launch) -> None:
    wait_until(lambda: re.search(pattern, told.text()), told, 60)


def test_a_run_survives_the_loss_and_return_of_a_host(runs, hosts):
    a, b = hosts
    out = runs / "lost"
    with away(hosts, "2", runs, out) as (stays, lost):
        lost.kill()
        wait_for_words(rf"rank 0 \({b.name}, process \d+\)", stays)
    assert [(start["ranks"], start["hosts"]) for start in starts(out)] == [(4, [a.name, b.name])] * 2
    assert starts(out)[1]["step"] > 0
    assert kills.differences(runs / "alone", out) == []


def test_fewer_hosts_go_on_while_one_is_away(long_runs, hosts):
    a, b = hosts
    out = long_runs / "elastic"
    with away(hosts, "1:2", long_runs, out) as (stays, lost):
        lost.kill()
        wait_until(lambda: len(starts(out)) == 2, stays, 90)
    both = (4, [a.name, b.name])
    assert [(start["ranks"], start["hosts"]) for start in starts(out)] == [both, (2, [a.name]), both]
    (stopped,) = re.findall(r"stopped by SIGTERM after step (\d+)", stays.text())
    assert starts(out)[2]["step"] == int(stopped)  # restarting for a host that comes back loses no step
    losses = [[line["loss"] for line in kills.read_metrics(run) if line["kind"] == "train"] for run in (out, long_runs / "alone")]
    assert len(losses[1]) == LONG
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_a_host_that_falls_silent_is_missed(runs, hosts):
    """A cut cable closes no connection, so collectives would wait."""
    a, b = hosts
    out = runs / "silent"
    with away(hosts, "2", runs, out) as (stays, lost):
        ip("-n", b.name, "link", "set", CABLE, "down")
        wait_for_words(rf"rank 0 \({b.name}, process \d+\)", stays)
        wait_for_words(rf"rank [23] \({a.name}, process \d+\) was lost", lost)
        lost.kill()
        ip("-n", b.name, "link", "set", CABLE, "up")
    assert kills.differences(runs / "alone", out) == []
