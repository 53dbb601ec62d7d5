"""Writes docs/code.md, every file of the code in a sentence: ``python docs/make_code.py``. A test compares the two."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "code.md"
HEAD = """# Every file in a sentence

The first line of each file of `spotlight/`, `graphs/` and `cluster/`. Made by `python docs/make_code.py`; do not edit
this page. The README's tree has the rooms; imports point down in `spotlight/`, and `graphs` and `cluster` never import
each other."""


def page() -> str:
    """A table for each package, the outer ones first."""
    packages = sorted(file.parent for room in ("spotlight", "graphs", "cluster") for file in _inits(room))
    order = {"spotlight": 0, "graphs": 1, "cluster": 2}
    packages.sort(key=lambda package: (order[package.relative_to(ROOT).parts[0]], package))
    return "\n".join([HEAD, *(line for package in packages for line in _table(package))]) + "\n"


def _inits(room: str) -> Iterator[Path]:
    return (ROOT / room).rglob("__init__.py")


def _table(package: Path) -> Iterator[str]:
    yield from ("", f"## {package.relative_to(ROOT)}/", "", first_line(package / "__init__.py"), "")
    yield from ("| file | |", "|---|---|")
    for file in sorted(package.glob("*.py")):
        if file.name != "__init__.py":
            yield f"| [{file.name}](../{file.relative_to(ROOT)}) | {first_line(file)} |"


def first_line(file: Path) -> str:
    """Of the docstring; the first sentence or two."""
    said = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return said.split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
