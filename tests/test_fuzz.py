"""Whatever is wrong with settings, files and run directories: it works, is refused by name, or is the same run."""

from __future__ import annotations

import pytest

from benchmarks.fuzz import KINDS, fuzz


@pytest.mark.parametrize("kind", KINDS)
def test_anything_works_or_is_refused_by_name(kind: str) -> None:
    fuzz(kind, KINDS[kind][-1])
