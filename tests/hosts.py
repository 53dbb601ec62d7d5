"""Hosts on one machine: each has its own network, processes, host name, shared memory and temporary files.

A host is namespaces that a first process holds: all its processes end with that one, and nothing else of it is left.
They see the machine's other files, such as this project, and share one directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from runs import ROOT, wait_for

WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
NAMESPACES = (
    "unshare",
    "--net",
    "--mount",
    "--uts",
    "--pid",
    "--fork",
    "--kill-child=KILL",
    "--propagation",
    "private",
)
NETWORK = "10.77.0"
BOOT = """
hostname "$1"
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
exec 3<"$2" 4<"$3"
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -p "$2" "$3"
mount --no-canonicalize --bind /proc/self/fd/3 "$2"
mount --no-canonicalize --bind /proc/self/fd/4 "$3"
ip link set lo up
echo up
exec sleep infinity
"""


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    absent = [name for name in ("ip", "unshare", "nsenter", "setpriv") if not shutil.which(name)]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install iproute2 util-linux"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "hosts of one machine need /dev/net/tun, which is not there, or not for this user"
    tried = subprocess.run([*NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    return f"no namespaces can be made here: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """The hosts of a test and the wire between them.

    Args:
        shared: a directory that all of them see, under this path.
    """

    def __init__(self, shared: Path, *names: str) -> None:
        self.shared, self._names = shared, names
        self._first: dict[str, subprocess.Popen[str]] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        wire = [*WITH_US, "unshare", "--net", sys.executable, str(ROOT / "tests" / "wire.py")]
        pipe = subprocess.PIPE
        self._wire = subprocess.Popen(wire, stdin=pipe, stdout=pipe, text=True)
        try:
            for name in names:
                self.boot(name)
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        return f"{NETWORK}.{self._number(name)}"

    def boot(self, name: str) -> None:
        """Begin anew, with nothing but the shared directory."""
        command = [*WITH_US, *NAMESPACES, "sh", "-ec", BOOT, "sh", f"sp-{name}", str(self.shared), str(ROOT)]
        self._first[name] = first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert first.stdout
        assert first.stdout.readline() == "up\n", f"the host {name} did not begin"
        self._tell(do="plug", host=self._number(name), pid=self._init(name))
        for line in (f"addr add {self.address(name)}/24 dev eth0", "link set eth0 up"):
            subprocess.run([*self._inside(name), "ip", *line.split()], check=True)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A process on a host; its output goes to a file in the shared directory."""
        with (self.shared / f"{name}.log").open("ab") as log:
            started = subprocess.Popen(
                [*self._inside(name), *command], cwd=self.shared, env=dict(environment), stdout=log, stderr=log
            )
        self._started.append(started)
        return started

    def run(self, name: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """A command on a host, to its end."""
        return subprocess.run([*self._inside(name), *command], capture_output=True, text=True)

    def kill(self, name: str) -> None:
        """All its processes at once, and its network."""
        psutil.Process(self._init(name)).kill()
        self._first.pop(name).communicate()

    def pull(self, name: str) -> None:
        """Its cable: nothing says goodbye, and nothing arrives any more."""
        self.spoil(name, up=False)

    def spoil(self, name: str, **how: float) -> None:
        """Delay or drop what goes through its cable; see `wire.Cable`."""
        self._tell(do="spoil", host=self._number(name), **how)

    def log(self, name: str) -> str:
        return (self.shared / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for started in self._started:
            with suppress(ProcessLookupError):
                started.send_signal(signal.SIGCONT)  # who enters a host stops when what it started is stopped
        for name in list(self._first):
            self.kill(name)
        for started in self._started:
            started.wait()
        self._wire.communicate()

    def _number(self, name: str) -> int:
        return self._names.index(name) + 1

    def _init(self, name: str) -> int:
        """The first process of a host, as this machine numbers it."""
        (init,) = wait_for(lambda: psutil.Process(self._first[name].pid).children())
        return int(init.pid)

    def _inside(self, name: str) -> list[str]:
        spaces = ("--net", "--mount", "--uts", "--pid")
        return ["nsenter", f"--target={self._init(name)}", *spaces, f"--wdns={self.shared}", "--"]

    def _tell(self, **command: Any) -> None:
        assert self._wire.stdin
        assert self._wire.stdout
        self._wire.stdin.write(f"{json.dumps(command)}\n")
        self._wire.stdin.flush()
        assert self._wire.stdout.readline() == "{}\n", "the wire is broken"
