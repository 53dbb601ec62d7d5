"""The hosts that tests make: each on its own, with a wire between that delays, drops and stops as it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import Hosts, missing
from runs import wait_for

ECHO = """
import socket, threading
def answer(there):
    while said := there.recv(1 << 16):
        there.sendall(said)
listening = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
while True:  # a caller whose goodbye is still to arrive holds up nobody
    threading.Thread(target=answer, args=listening.accept()[:1], daemon=True).start()
"""
CALL = """
import socket, sys, time
there = socket.create_connection((sys.argv[1], 5000), timeout=20)
times_s = []
for number in range(int(sys.argv[2])):
    began_s = time.monotonic()
    there.sendall(b"x")
    try:
        assert there.recv(1) == b"x"
    except TimeoutError:
        sys.exit("no answer, and no end")
    if not times_s:
        print("answered", flush=True)
        there.settimeout(float(sys.argv[3]))
    times_s.append(time.monotonic() - began_s)
print(min(times_s), max(times_s))
"""
"""Says how long so many answers took; after the first one, it waits for each for so long at most."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := missing():
        pytest.skip(reason)
    made = Hosts(tmp_path, "a", "b")
    try:
        made.start("b", [sys.executable, "-c", ECHO], os.environ)
        wait_for(lambda: made.log("b").endswith("\n"))  # Python may write a line and its end one after the other
        assert made.log("b") == "listening\n"
        yield made
    finally:
        made.close()


def call(hosts: Hosts, times: int = 1) -> subprocess.CompletedProcess[str]:
    return hosts.run("a", [sys.executable, "-c", CALL, hosts.address("b"), str(times), "100"])


def test_a_cable_delays_and_drops_as_it_is_told_and_says_nothing_when_it_is_pulled(hosts: Hosts) -> None:
    hosts.spoil("b", delay_s=0.05)
    slow = call(hosts)
    hosts.spoil("b", delay_s=0.0, drop=0.2)
    lossy = call(hosts, times=30)
    hosts.spoil("b", drop=0.0)
    calling = hosts.start("a", [sys.executable, "-c", CALL, hosts.address("b"), "1000000000", "2"], os.environ)
    wait_for(lambda: "answered\n" in hosts.log("a") or calling.poll() is not None)
    assert hosts.log("a") == "answered\n"
    hosts.pull("b")

    assert 0.1 < float(slow.stdout.split()[-2]) < 1.0
    assert float(lossy.stdout.split()[-1]) > 0.1  # what was lost is sent again, a fifth of a second later
    wait_for(lambda: "no answer, and no end" in hosts.log("a"))


def test_a_host_sees_its_own_processes_memory_and_files_and_the_shared_ones(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "shared").touch()
    mark = tmp_path.parent / "mine"
    mark.touch()
    script = f"hostname; touch /dev/shm/spotlight-wire; ls /proc | grep -c '^[0-9]'; ls {tmp_path}; ls {mark} || true"

    seen = hosts.run("a", ["sh", "-c", script]).stdout.split()

    assert seen[0] == "sp-a"
    assert int(seen[1]) < 10
    assert "shared" in seen
    assert str(mark) not in seen
    assert not Path("/dev/shm/spotlight-wire").exists()


def test_a_host_that_is_killed_leaves_nothing_and_may_begin_again(hosts: Hosts) -> None:
    hosts.kill("b")
    refused = call(hosts)
    hosts.boot("b")
    hosts.start("b", [sys.executable, "-c", ECHO.replace('listening"', 'again"')], os.environ)
    wait_for(lambda: "again" in hosts.log("b"))

    assert refused.returncode != 0
    assert call(hosts).returncode == 0
