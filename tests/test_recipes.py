"""The recipes for other people's clusters: fields that exist, commands that Dask and we take, settings that load."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dask
import jsonschema
import pytest
import yaml
from distributed.cli import dask_scheduler, dask_worker

from cluster.certificate import write
from recipe_schemas import RESOURCES, SKYPILOT
from runs import ROOT
from spotlight import config
from spotlight.shell import _parser

RECIPES = Path(__file__).parents[1] / "examples" / "clusters"
COMMANDS = {"worker": dask_worker.main, "scheduler": dask_scheduler.main}


@pytest.fixture(scope="module")
def resources() -> dict[str, Any]:
    """What Kubernetes would be given, by kind and name."""
    found = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    return {f"{each['kind']} {each['metadata']['name']}": each for each in found}


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    """What SkyPilot would be given."""
    found: dict[str, Any] = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    return found


def pods(resources: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = resources["DaskCluster spotlight"]["spec"]
    return {
        "scheduler": cluster["scheduler"]["spec"],
        "reserved": cluster["worker"]["spec"],
        "spot": resources["DaskWorkerGroup spotlight-spot"]["spec"]["worker"]["spec"],
        "driver": resources["Job spotlight-driver"]["spec"]["template"]["spec"],
    }


def command(pod: Mapping[str, Any]) -> list[str]:
    (container,) = pod["containers"]
    found: list[str] = container["command"]
    return found


def environment(resources: Mapping[str, Any], pod: Mapping[str, Any]) -> dict[str, str]:
    """As its container gets it, but for the secrets."""
    (container,) = pod["containers"]
    maps = [each["configMapRef"]["name"] for each in container["envFrom"] if "configMapRef" in each]
    found = {name: value for each in maps for name, value in resources[f"ConfigMap {each}"]["data"].items()}
    return found | {each["name"]: each["value"] for each in container["env"]}


def given(arguments: list[str]) -> dict[str, Any]:
    """What Dask understands by one of its command lines."""
    dask_, role, *rest = arguments
    assert dask_ == "dask"
    context = COMMANDS[role].make_context(role, rest)
    return {name: value for name, value in context.params.items() if value is not None}


def test_every_recipe_says_that_it_was_never_run() -> None:
    assert {path.name: "NOT RUN" in path.read_text() for path in RECIPES.glob("*.yaml")} == {
        "kubernetes.yaml": True,
        "skypilot.yaml": True,
    }


def test_every_field_of_a_recipe_exists_where_it_goes(resources: Mapping[str, Any], task: Mapping[str, Any]) -> None:
    assert {each["kind"] for each in resources.values()} == RESOURCES.keys()
    for each in resources.values():
        jsonschema.validate(each, RESOURCES[each["kind"]])
    jsonschema.validate(task, SKYPILOT)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"replica": 2}, "'replica' was unexpected"),
        ({"spec": {"containers": [{"name": "w", "image": "i", "command": "dask worker"}]}}, "is not of type 'array'"),
        ({"spec": {"volumes": [{"name": "m", "emptyDir": {"medium": "RAM"}}]}}, "'RAM' is not one of"),
    ],
)
def test_a_misspelt_field_would_be_found(resources: Mapping[str, Any], wrong: dict[str, Any], said: str) -> None:
    group = resources["DaskWorkerGroup spotlight-spot"]
    worker = group["spec"]["worker"]
    spec = {**worker["spec"], **wrong.get("spec", {})}
    changed = {**group, "spec": {**group["spec"], "worker": {**worker, **wrong, "spec": spec}}}
    with pytest.raises(jsonschema.ValidationError, match=said):
        jsonschema.validate(changed, RESOURCES["DaskWorkerGroup"])


@pytest.mark.parametrize("pool", ["reserved", "spot"])
def test_a_pods_worker_is_one_process_of_its_pool_in_memory_that_is_large_enough(
    resources: Mapping[str, Any], pool: str
) -> None:
    pod = pods(resources)[pool]
    worker = given(command(pod))
    mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
    memory = [each["emptyDir"] for each in pod["volumes"] if each["name"] == mounts["/dev/shm"]]

    assert (worker["nanny"], worker["nthreads"], worker["resources"]) == (False, 1, f"{pool}=1")
    assert worker["name"] == "$(DASK_WORKER_NAME)"  # Kubernetes puts it in; the operator makes it
    assert [each["medium"] for each in memory] == ["Memory"]


def test_all_pods_speak_tls_to_the_one_scheduler(resources: Mapping[str, Any]) -> None:
    found = pods(resources)
    scheduler = given(command(found["scheduler"]))
    service = resources["DaskCluster spotlight"]["spec"]["scheduler"]["service"]
    name = resources["DaskCluster spotlight"]["metadata"]["name"]
    address = f"tls://{name}-scheduler:{scheduler['port']}"

    assert scheduler["protocol"] == "tls"
    assert {each["name"]: each["port"] for each in service["ports"]}["tcp-comm"] == int(scheduler["port"])
    assert (
        service["selector"]["dask.org/cluster-name"]
        == resources["DaskWorkerGroup spotlight-spot"]["spec"]["cluster"]
        == name
    )
    for pod in found.values():
        assert environment(resources, pod)["DASK_SCHEDULER_ADDRESS"] == address
        assert_tls(environment(resources, pod), "/tls")


def assert_tls(variables: Mapping[str, str], folder: str) -> None:
    """Dask knows each of these names, and finds there the files that our command writes."""
    understood = dask.config.collect_env(variables)
    comm = understood["distributed"]["comm"]
    assert comm["require_encryption"] is True
    assert set(leaves(comm["tls"])) == {f"{folder}/cert.pem", f"{folder}/key.pem"}
    for name in keys(understood):
        dask.config.get(name)


def test_a_certificate_in_files_is_for_this_user_alone_and_is_never_replaced(tmp_path: Path) -> None:
    made = write(tmp_path / "tls")
    before = [path.read_text() for path in made]

    with pytest.raises(FileExistsError):
        write(tmp_path / "tls")

    assert [path.name for path in made] == ["cert.pem", "key.pem"]
    assert [path.stat().st_mode & 0o077 for path in (tmp_path / "tls", *made)] == [0, 0, 0]
    assert [path.read_text() for path in made] == before


def test_the_command_for_a_certificate_says_what_it_does_and_what_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cluster.certificate"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    helped, first, again = (
        subprocess.run([*command, word], cwd=tmp_path, env=environment, capture_output=True, text=True)
        for word in ("--help", "tls", "tls")
    )

    assert helped.returncode == first.returncode == 0
    assert "cert.pem and key.pem" in helped.stdout
    assert first.stdout.split() == [str(tmp_path / "tls" / name) for name in ("cert.pem", "key.pem")]
    assert again.returncode == 1
    assert "cert.pem: File exists: a cluster may use it; delete it, or name another directory" in again.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tls"]


def leaves(tree: Any) -> Iterator[Any]:
    for each in tree.values() if isinstance(tree, dict) else ():
        yield from leaves(each) if isinstance(each, dict) else [each]


def keys(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, each in tree.items():
        if isinstance(each, dict):
            yield from keys(each, f"{above}{name}.")
        elif name != "scheduler_address":  # Dask has no default for it
            yield above + name


def test_the_driver_is_given_settings_that_load_and_the_scheduler(resources: Mapping[str, Any], tmp_path: Path) -> None:
    pod = pods(resources)["driver"]
    program, *arguments = command(pod)
    (container,) = pod["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    for name, text in resources["ConfigMap spotlight-settings"]["data"].items():
        (tmp_path / name).write_text(text)

    driver = _parser().parse_args(arguments)
    settings = config.load(tmp_path / Path(driver.config).name)

    assert program == "spotlight"
    assert str(Path(driver.config).parent) == mounts["settings"]
    assert driver.cluster == environment(resources, pod)["DASK_SCHEDULER_ADDRESS"]
    assert settings.pools.spot.workers == resources["DaskWorkerGroup spotlight-spot"]["spec"]["worker"]["replicas"]
    assert settings.pools.spot.grace_s < pods(resources)["spot"]["terminationGracePeriodSeconds"]


def test_a_spot_machine_of_skypilots_runs_the_one_line_and_outlives_its_worker(task: Mapping[str, Any]) -> None:
    lines = [line for line in task["run"].splitlines() if line and not line.startswith("#")]
    exports = dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))
    (line,) = [line for line in lines if line.startswith("dask worker")]
    worker = given(shlex.split(line))

    assert task["resources"]["use_spot"]
    assert (worker["nanny"], worker["nthreads"], worker["resources"]) == (False, 1, "spot=1")
    assert worker["scheduler"] == "$SCHEDULER"
    assert "SCHEDULER" in task["envs"]
    assert_tls(exports, "~/tls")
    assert "~/tls" in task["file_mounts"]
    assert re.fullmatch(r"sleep \d+", lines[-1])
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
