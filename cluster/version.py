"""Which code a process has: driver, scheduler and workers of a run must have the same."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path

import spotlight

PACKAGES = ("spotlight", "graphs", "cluster")


@cache
def code_version() -> str:
    """The version, with a hash of the sources: a checkout may be at any commit of it."""
    root, digest = Path(__file__).parents[1], sha256()
    for file in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return f"{spotlight.__version__} (code {digest.hexdigest()[:8]})"
