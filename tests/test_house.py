"""The house rules of the design, checked on the syntax trees: who imports whom, and what every file has."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("spotlight", "graphs", "cluster")
ROOF = (
    "spotlight/__init__.py",
    "spotlight/__main__.py",
    "spotlight/demands.py",
    "spotlight/detached.py",
    "spotlight/display.py",
    "spotlight/driver.py",
    "spotlight/inputs.py",
    "spotlight/notebook.py",
    "spotlight/background.py",
    "spotlight/run.py",
    "spotlight/shell.py",
    "spotlight/simulation.py",
)
"""May import every room; the first only names what the last holds."""

FLOORS = (
    ("spotlight/records.py", "spotlight/files.py", "spotlight/market/"),
    ("spotlight/config/", "spotlight/strategies.py"),
    ("spotlight/plan/",),
    ("spotlight/store/",),
    ("spotlight/rl/",),
    ("spotlight/device/",),
    ("spotlight/report/",),
)
"""The floors of `spotlight` below its roof, the ground first: a file imports from its own floor or from those below."""

PURE = (
    "spotlight/records.py",
    "spotlight/market/ledger.py",
    "spotlight/market/trace_files.py",
    "spotlight/market/trace_models.py",
    "spotlight/market/traces.py",
    "spotlight/plan/",
    "spotlight/device/learning_model.py",
)
"""Files, or directories, that take clocks, chance and the world as arguments."""
PURE_IMPORTS = (
    "numpy",
    *(f"spotlight.{ground}" for ground in ("config", "files", "market.prices")),
    *(path.removesuffix(".py").removesuffix("/").replace("/", ".") for path in PURE),
)
IMPURE_STDLIB = ("asyncio", "datetime", "logging", "os", "random", "socket", "subprocess", "threading", "time")
"""Clocks, chance and the world: pure files take what they need as arguments."""

DOORS = {
    "bokeh": ("spotlight/report/", "cluster/dashboard/"),
    "dask": ("graphs/", "cluster/", *ROOF),
    "dask_jobqueue": ("cluster/start/slurm.py",),
    "diffusers": ("spotlight/rl/models/", "spotlight/rl/export.py", "spotlight/device/sequence_parallel.py"),
    "distributed": ("cluster/", *ROOF),
    "mlflow": ("spotlight/report/tracking.py",),
    "onnxruntime": ("spotlight/rl/rewards/",),
    "peft": ("spotlight/rl/models/",),
    "rapidfuzz": ("spotlight/rl/rewards/",),
    "tensorboard": ("spotlight/report/tracking.py",),
    "transformers": ("spotlight/rl/models/", "spotlight/rl/rewards/"),
    "wandb": ("spotlight/report/tracking.py",),
    "xfuser": ("spotlight/device/xfuser_backend.py",),
    "zarr": ("spotlight/store/zarr_store.py",),
}
"""{dependency: the files, or directories, that alone may import it}"""

INTERNALS_DOOR = "cluster/scheduler/plugin.py"
"""Alone reaches below the names that the package `distributed` itself exports."""
PAGE_DOOR = "cluster/dashboard/plugin.py"
"""Alone reaches into Dask's dashboard and its web server."""
EXTENSION_POINTS = ("distributed.deploy.cluster", "distributed.deploy.spec")
"""Documented for subclassing, though not exported by the package: any user of `distributed` may."""

HOSTS = tuple(".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org")))
"""Package registries; put together here so that this file passes its own test."""


def test_the_house_keeps_its_rules() -> None:
    assert list(broken_rules(ROOT)) == []


@pytest.mark.parametrize(
    ("path", "source", "broken"),
    [
        ("graphs/a.py", "import cluster.start.run_cluster", "graphs/a.py imports cluster.start.run_cluster"),
        ("cluster/a.py", "def f():\n    from graphs import loop", "cluster/a.py imports graphs.loop"),
        ("spotlight/a.py", "from graphs.loop import run", "spotlight/a.py imports graphs.loop.run"),
        ("spotlight/a.py", "from spotlight import run", "spotlight/a.py imports spotlight.run"),
        ("spotlight/a.py", "import dask", "spotlight/a.py imports dask"),
        ("spotlight/market/ledger.py", "import time", "spotlight/market/ledger.py imports time"),
        ("spotlight/market/ledger.py", "import torch", "spotlight/market/ledger.py imports torch"),
        (
            "cluster/start/run_cluster.py",
            "from distributed.scheduler import Scheduler",
            "reaches into distributed.scheduler",
        ),
        ("spotlight/plan/a.py", "from spotlight.store import rundir", "imports point down"),
        ("spotlight/a.py", "from . import data", "relative import"),
    ],
)
def test_a_broken_import_rule_is_reported(tmp_path: Path, path: str, source: str, broken: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)

    file.write_text(f'"""Docstring."""\n{source}\n')

    (report,) = broken_rules(tmp_path)
    assert broken in report


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("spotlight/run.py", "import dask\nfrom cluster import pools\nfrom graphs import loop"),
        ("spotlight/market/ledger.py", "import math\nimport numpy as np\nfrom spotlight.records import Request"),
        ("cluster/scheduler/plugin.py", "from distributed.scheduler import Scheduler"),
        ("cluster/start/run_cluster.py", "from distributed import Client, get_worker"),
        ("spotlight/rl/models/a.py", "import diffusers"),
    ],
)
def test_what_the_rules_allow_is_not_reported(tmp_path: Path, path: str, source: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)

    file.write_text(f'"""Docstring."""\n{source}\n')

    assert list(broken_rules(tmp_path)) == []


@pytest.mark.parametrize(("package", "door"), [(package, door) for package, doors in DOORS.items() for door in doors])
def test_every_door_is_there_and_in_use(package: str, door: str) -> None:
    behind = [file for file in python_files(ROOT, *ROOMS) if file.relative_to(ROOT).as_posix().startswith(door)]

    assert behind
    if door not in ROOF:  # all of which may use Dask, whoever does
        assert any(within(name, package) for file in behind for _, name in imports(parse(file)))


def test_every_file_that_a_rule_names_is_there() -> None:
    named = [*ROOF, *PURE, *(place for floor in FLOORS for place in floor), INTERNALS_DOOR, PAGE_DOOR]

    assert [place for place in named if not (ROOT / place).exists()] == []


def test_every_file_begins_with_a_docstring() -> None:
    files = python_files(ROOT, *ROOMS, "tests", "benchmarks", "examples", "docs")

    bare = [str(file.relative_to(ROOT)) for file in files if not ast.get_docstring(parse(file))]

    assert bare == []


def test_no_file_names_a_package_registry() -> None:
    suffixes = {".py", ".md", ".toml", ".txt", ".yml", ""}
    folders = (*ROOMS, "tests", "benchmarks", "examples", "docs", ".ci")
    files = [*ROOT.iterdir(), *(file for folder in folders for file in (ROOT / folder).rglob("*"))]

    texts = {file: file.read_text("utf-8", "replace") for file in files if file.is_file() and file.suffix in suffixes}

    assert [file.relative_to(ROOT) for file, text in texts.items() if any(host in text for host in HOSTS)] == []


def broken_rules(root: Path) -> Iterator[str]:
    """Every import that a rule forbids, as one sentence."""
    for file in python_files(root, *ROOMS):
        path = file.relative_to(root).as_posix()
        for module, name in imports(parse(file)):
            if why := forbidden(path, module, name):
                yield f"{path} imports {name}: {why}"


def forbidden(path: str, module: str, name: str) -> str | None:
    """Why a file may not import a name from a module; None if it may."""
    room, package = path.split("/")[0], name.split(".")[0]
    if name.startswith("."):
        return "a relative import; say which room it is from"
    if path not in ROOF:
        if package in ROOMS and package not in (room, "spotlight"):
            return f"{room} does not know {package}"
        if any(within(name, roof[:-3].replace("/", ".")) for roof in ROOF if not roof.endswith("__init__.py")):
            return "nothing imports the roof"
    if package in DOORS and not any(path.startswith(door) for door in DOORS[package]):
        return f"the doors of {package} are {', '.join(DOORS[package])}"
    if path == PAGE_DOOR and module.startswith(("distributed.dashboard", "distributed.http")):
        return None
    if module.startswith("distributed.") and module not in EXTENSION_POINTS and path != INTERNALS_DOOR:
        return f"reaches into {module}; only {INTERNALS_DOOR} may"
    from_floor, to_floor = (
        floor(f"{place}/", otherwise=other)
        for place, other in ((path.removesuffix(".py"), len(FLOORS)), (name.replace(".", "/"), 0))
    )
    if room == package == "spotlight" and from_floor < to_floor:
        return "imports point down"
    if path.startswith(PURE) and not allowed_in_pure(name):
        return "a pure file takes clocks, chance and the world as arguments"
    return None


def floor(path: str, *, otherwise: int) -> int:
    """Of a file, or of what a dotted name leads to, both with a slash at the end."""
    floors = (number for number, places in enumerate(FLOORS) if path.startswith(_folders(places)))
    return next(floors, otherwise)


def _folders(places: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(place.replace(".py", "/") for place in places)


def allowed_in_pure(name: str) -> bool:
    package = name.split(".")[0]
    if package in sys.stdlib_module_names:
        return package not in IMPURE_STDLIB
    return any(within(name, allowed) for allowed in PURE_IMPORTS)


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """All imports, also those inside functions: ``from a import b`` gives ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((module, f"{module}.{alias.name}") for alias in node.names)


def python_files(root: Path, *folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (root / folder).rglob("*.py"))


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"), str(file))
