"""What is installed: a light import, one set of versions in three files, and every file that belongs to it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import EntryPoint
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import spotlight

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("spotlight", "graphs", "cluster")
PIN = re.compile(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)")
"""An exact version without a build tag, which would tie it to one index."""


def test_what_the_package_offers_can_be_completed_before_it_is_used() -> None:
    assert {"Run", "attach", "simulate"} <= set(dir(spotlight))


def test_importing_the_package_loads_only_itself_and_the_standard_library() -> None:
    list_modules = "import sys; print(*sys.modules)"

    bare, imported = (
        set(
            subprocess.run(
                [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout.split()
        )
        for code in (list_modules, f"import spotlight; {list_modules}")
    )

    foreign = {name.split(".")[0] for name in imported - bare} - sys.stdlib_module_names
    assert foreign == {"spotlight"}


def test_importing_the_package_loads_none_of_its_own_files_but_one() -> None:
    code = "import spotlight, sys; print(*(name for name in sys.modules if name.startswith('spotlight')))"

    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert loaded.split() == ["spotlight"]


def test_the_version_is_the_same_in_the_package_and_in_its_metadata() -> None:
    assert PROJECT["project"]["version"] == spotlight.__version__


def test_every_constraint_is_an_exact_version_for_any_index() -> None:
    lines = constraint_lines()

    loose = [line for line in lines if not PIN.fullmatch(line)]

    assert loose == []


def test_the_constraints_satisfy_every_requirement() -> None:
    versions = {canonical(name): version for name, version in map(split_pin, constraint_lines())}
    project = PROJECT["project"]
    requirements = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]

    unmet = [
        str(requirement)
        for requirement in requirements
        if not requirement.specifier.contains(versions.get(canonical(requirement.name), "0"))
    ]

    assert unmet == []


def test_conda_users_get_the_same_versions() -> None:
    lines = [line.strip().removeprefix("- ") for line in (ROOT / "environment.yml").read_text().splitlines()]

    pins = [line for line in lines if "==" in line]

    assert pins == constraint_lines()


def test_conda_users_get_a_python_that_the_package_accepts() -> None:
    environment = (ROOT / "environment.yml").read_text()

    (python,) = re.findall(r"- python=([0-9.]+)$", environment, flags=re.MULTILINE)

    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(python)


def test_the_shells_command_leads_to_a_function() -> None:
    (name, target), *others = PROJECT["project"]["scripts"].items()

    command = EntryPoint(name, target, "console_scripts").load()

    assert (name, others) == ("spotlight", [])
    assert callable(command)


def test_every_package_is_installed() -> None:
    packages = {
        folder.relative_to(ROOT).as_posix().replace("/", ".")
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        for folder in [file.parent]
    }

    assert packages == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_data_file_of_a_package_is_installed() -> None:
    package_data = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = [f"{package.replace('.', '/')}/{glob}" for package, globs in package_data.items() for glob in globs]
    files = [file.relative_to(ROOT).as_posix() for room in ROOMS for file in (ROOT / room).rglob("*") if file.is_file()]

    left_out = [
        file
        for file in files
        if not file.endswith((".py", ".pyc")) and not any(fnmatch(file, pattern) for pattern in patterns)
    ]

    assert {"spotlight/py.typed", "cluster/dashboard/page.html"} <= {*files}
    assert left_out == []


def constraint_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def split_pin(line: str) -> tuple[str, str]:
    name, _, version = line.partition("==")
    return name, version


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
