"""Run directories on file systems that lack something are refused in a sentence, before anything is lost on them."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from runs import settings_file
from spotlight.config import load
from spotlight.records import SpotlightError
from spotlight.store.creating import create_run, create_run_at

LACKING = [
    ("link", errno.EPERM, "hard links"),
    ("link", errno.EOPNOTSUPP, "hard links"),
    ("flock", errno.ENOSYS, "locks of files"),
    ("flock", errno.ENOLCK, "locks of files"),
]


def lacks(call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the file system answer a system call as one does that cannot do it."""

    def refuse(*_: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os if call == "link" else fcntl, call, refuse)


@pytest.mark.parametrize(("call", "number", "says"), LACKING)
def test_no_run_is_made_where_no_driver_could_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, says: str
) -> None:
    settings = load(settings_file(tmp_path))
    lacks(call, number, monkeypatch)

    for make in (lambda: create_run(settings, 0.0), lambda: create_run_at(tmp_path / "here", settings)):
        with pytest.raises(
            SpotlightError, match=rf"{says}.* lacks \({os.strerror(number)}\): give a run\.dir on a local"
        ):
            make()
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(("call", "number", "says"), LACKING)
def test_a_run_that_was_moved_to_such_a_file_system_says_what_is_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, says: str
) -> None:
    run = create_run(load(settings_file(tmp_path)), 0.0)
    lacks(call, number, monkeypatch)

    with pytest.raises(SpotlightError, match=says), run.lock():
        pass


def test_a_full_disk_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(settings_file(tmp_path))
    lacks("link", errno.ENOSPC, monkeypatch)

    with pytest.raises(SpotlightError, match=r"No space left on device; choose another run\.dir, or make room"):
        create_run(settings, 0.0)


def test_what_is_only_simulated_may_be_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(settings_file(tmp_path))
    for call in ("link", "flock"):
        lacks(call, errno.ENOSYS, monkeypatch)

    assert create_run(settings, 0.0, simulated=True).config().run == settings.run
