"""A Dask cluster that somebody else started, with Dask's own commands: scheduler and workers, TLS, on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.certificate import write
from runs import ROOT, wait_for


class DaskCluster:
    """Its processes end with it, however they are."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []
        self.tls = certificates(directory / "tls")
        self.file = directory / "scheduler.json"
        common = ("--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0", "--protocol", "tls")
        self._start("scheduler", *common, "--port", "0", "--scheduler-file", str(self.file))
        self.address: str = wait_for(self._address, None)

    def _address(self) -> Any:
        return (
            self.file.is_file() and self.file.read_text().endswith("}") and json.loads(self.file.read_text())["address"]
        )

    def worker(self, name: str, pool: str, *more: str, nanny: bool = False) -> subprocess.Popen[bytes]:
        """As the documentation has it, one line."""
        alone = () if nanny else ("--no-nanny",)
        common = ("--name", name, "--nthreads", "1", "--resources", f"{pool}=1", "--host", "127.0.0.1", *alone)
        return self._start("worker", self.address, *common, "--no-dashboard", "--memory-limit", "0", *more)

    @property
    def environment(self) -> Mapping[str, str]:
        """In which Dask's commands, and ours, find the certificates."""
        return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **self.tls}

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dask", *arguments]
        with (self.directory / "dask.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.directory, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


def certificates(directory: Path) -> dict[str, str]:
    """Fresh ones, in files; returns the environment by which Dask finds them."""
    cert, key = map(str, write(directory))
    files = {"CA_FILE": cert}
    for role in ("SCHEDULER", "WORKER", "CLIENT"):
        files |= {f"{role}__CERT": cert, f"{role}__KEY": key}
    found = {f"DASK_DISTRIBUTED__COMM__TLS__{name}": file for name, file in files.items()}
    return {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "true", **found}


def dask_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The same for this process, by the names that Dask's configuration has."""
    prefix = "DASK_"
    return {
        name.removeprefix(prefix).lower().replace("__", ".").replace("_", "-"): value
        for name, value in environment.items()
        if name.startswith(f"{prefix}DISTRIBUTED__COMM__TLS")
    }
