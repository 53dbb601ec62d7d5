"""A live run on an S3 server: its driver is killed; whoever goes on with it, or looks at it, needs the URL alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphs.loop import Loop, synchronous
from runs import ROOT, WAIT_S, NoWatch, settings_file
from spotlight import config
from spotlight.run import Run
from spotlight.store.creating import create_run
from spotlight.store.objects import BucketObjects
from spotlight.store.rundir import RunDir

FEWER = {"prompts = 3": "prompts = 2", "steps = 6": "steps = 3", "seeds_tried = 8": "seeds_tried = 6"}
"""Every request to the server of the bucket takes long."""


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket, on a server of this machine that ends with the test."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server: Any = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": address,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "hush-hush",
        "AWS_REGION": "us-east-1",
        "XDG_STATE_HOME": str(tmp_path / "here"),
    }.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
    yield "s3://bucket"
    server.stop()


def kept(run: RunDir) -> list[Any]:
    """What must not depend on where a run is kept, and by whom it was run."""
    history = [(row.weights_sha256, row.metrics) for row in run.history()]
    validation = [(row.version, row.score, row.rewards) for row in run.validation()]
    return [history, validation, [run.selection(iteration) for iteration in range(len(history))]]


def test_a_run_at_a_url_survives_its_driver_and_is_seen_from_anywhere(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_file(tmp_path)
    text = settings.read_text()
    for many, few in FEWER.items():
        assert many in text
        text = text.replace(many, few)
    settings.write_text(text)
    in_one_thread = create_run(config.load(settings), now_s=0.0)
    Loop(in_one_thread, synchronous, NoWatch()).go()
    settings.write_text(text.replace(f'dir = "{tmp_path}"', f'dir = "{bucket}/runs"'))
    command = [sys.executable, str(ROOT / "tests" / "killing_driver.py"), str(settings), "rollout", "1", "memory"]

    killed = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=WAIT_S, env=os.environ
    )

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (name,) = {key.split("/")[0] for key in BucketObjects(f"{bucket}/runs").sizes("")}
    Run.resume(f"{bucket}/runs/{name}").start().wait()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    seen = Run.attach(f"{bucket}/runs/{name}")
    seen.directory.pull()
    assert seen.state == "finished"
    assert kept(seen.directory) == kept(in_one_thread)
