"""A real Slurm on this machine, started for a test and gone with it: two nodes, partitions `reserved` over `spot`.

Needs Debian's slurm-wlm and munge; no systemd, no cgroups; everything is on loopback and under one directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NODES = 3
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
NOT_READY_LIMITS, END_S = 30.0, 20.0
CONF = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge/munge.sock,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
MinJobAge=300
DefMemPerCPU=256
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr={address} Port=[{first}-{last}] CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=reserved Nodes=n[1-{nodes}] PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE DefaultTime=60 Default=YES
PartitionName=spot Nodes=n[1-{nodes}] PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 MaxTime=INFINITE DefaultTime=60
"""
WITH_US = ("setpriv", "--pdeathsig", "TERM", "--")
"""Daemons end when this process does, however it does."""
PRIVATE_NAME = ("unshare", "--mount", "--uts", "--propagation", "private", "--", "sh", "-c")
RENAME = 'hostname slurmlocal && mount --bind "$1" /etc/hosts && shift && exec "$@"'


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [name for name in ("munged", "slurmctld", "slurmd") if not shutil.which(name, path=PATH)]
    return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge" if absent else ""


@contextmanager
def private_slurm(root: Path) -> Iterator[None]:
    """While it lasts, Slurm's commands speak to a Slurm of this process.

    Args:
        root: a short path, since it holds a socket; nobody else may write to it.
    """
    for name in ("munge", "state", "spool", "log", "run"):
        (root / name).mkdir(mode=0o755)
    host, address, private = _own_name(root)
    port = _free_ports()
    (root / "slurm.conf").write_text(
        CONF.format(
            root=root,
            host=host,
            address=address,
            port=port,
            first=port + 10,
            last=port + 9 + NODES,
            nodes=NODES,
            user=_user(),
        )
    )
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    os.environ |= {"SLURM_CONF": str(root / "slurm.conf"), "PATH": PATH}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons += [_munged(root), _start(root, [*private, "slurmctld", "-D"])]
        daemons += [_start(root, [*private, "slurmd", "-D", "-N", f"n{node + 1}"]) for node in range(NODES)]
        _until_ready(root)
        yield
    finally:
        _cancel_all()
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(END_S)
            daemon.kill()
            daemon.wait()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _user() -> str:
    return subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()


def _own_name(root: Path) -> tuple[str, str, list[str]]:
    """Host name and address for the daemons, and what to start them with.

    They listen on the address of their host name. Where that is not loopback, they get a host name of their own, in
    namespaces, which takes root.
    """
    with suppress(OSError):
        if socket.gethostbyname(socket.gethostname()) == "127.0.0.1":
            return socket.gethostname().partition(".")[0], "127.0.0.1", []
    hosts = root / "run" / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text() + "\n127.0.0.1 slurmlocal\n")
    return "slurmlocal", "127.0.0.1", [*PRIVATE_NAME, RENAME, "sh", str(hosts)]


def _free_ports() -> int:
    """The first of a block of free ports, below those that the system gives out."""
    for base in range(16817, 30000, 100):
        with suppress(OSError):
            for port in (base, *range(base + 10, base + 10 + NODES)):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
            return base
    raise RuntimeError("no block of free ports below 30000")


def _munged(root: Path) -> subprocess.Popen[bytes]:
    home = root / "munge"
    key = home / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    files = {"key-file": key, "socket": home / "munge.sock", "pid-file": home / "munged.pid", "log-file": home / "log"}
    options = [f"--{name}={path}" for name, path in files.items()]
    return _start(root, ["munged", "--foreground", *options, f"--seed-file={home}/seed", "--num-threads=2"])


def _start(root: Path, command: list[str]) -> subprocess.Popen[bytes]:
    with (root / "log" / "start.log").open("ab") as log:
        return subprocess.Popen(
            [*WITH_US, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _until_ready(root: Path) -> None:
    end_s = time.monotonic() + NOT_READY_LIMITS
    while time.monotonic() < end_s:
        answer = subprocess.run(["sinfo", "-h", "-N", "-p", "spot", "-o", "%t"], capture_output=True, text=True)
        if answer.stdout.split().count("idle") == NODES:
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in (root / "log").iterdir())
    raise RuntimeError(f"Slurm was not ready after {NOT_READY_LIMITS} s:\n{logs}")


def _cancel_all() -> None:
    """End all jobs while the daemons still run."""
    end_s = time.monotonic() + END_S
    while time.monotonic() < end_s:
        jobs = subprocess.run(["squeue", "-h", "-o", "%A"], capture_output=True, text=True).stdout.split()
        if not jobs:
            return
        subprocess.run(["scancel", *jobs], capture_output=True)
        time.sleep(0.5)
