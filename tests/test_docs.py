"""What the README and docs/ say of the project: their links lead somewhere, and what is generated is up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from benchmarks.target.readme import MARK

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"python -m benchmarks\.(\w+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text("utf-8")) if not link.startswith("http")]

    lost = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]

    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_within_a_page_leads_to_a_heading(page: Path) -> None:
    anchors = [link.split("#") for link in LINK.findall(page.read_text("utf-8")) if "#" in link and "://" not in link]

    lost = [f"{file}#{name}" for file, name in anchors if name not in headings(page.parent / file if file else page)]

    assert lost == []


def test_the_page_of_settings_is_what_the_settings_say() -> None:
    make = runpy.run_path(str(ROOT / "docs" / "make_settings.py"))["page"]

    assert (ROOT / "docs" / "settings.md").read_text("utf-8") == make(), "run: python docs/make_settings.py"


def test_the_page_of_files_is_made_from_them() -> None:
    make = runpy.run_path(str(ROOT / "docs" / "make_code.py"))["page"]

    assert (ROOT / "docs" / "code.md").read_text("utf-8") == make(), "run: python docs/make_code.py"


def test_every_benchmark_has_its_results_and_every_command_its_benchmark() -> None:
    benchmarks = {file.stem for file in (ROOT / "benchmarks").glob("*.py")} - {"__init__"}

    pages = [ROOT / "docs" / "trials.md", *(ROOT / "docs" / "results").glob("*.md")]
    commands = {name for page in pages for name in COMMAND.findall(page.read_text("utf-8"))}

    assert commands == benchmarks


def test_the_readme_is_a_five_minute_read() -> None:
    """Without the tables that `benchmarks.time_to_target` makes; the tree and the commands are looked at."""
    written = re.sub(
        rf"{MARK}\n(\|.*\n)*|^```\n.*?^```\n", "", (ROOT / "README.md").read_text("utf-8"), flags=re.M | re.S
    )
    words = written.split()

    assert len(words) < 1_200


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
