"""Fuzzes the project with damaged settings, overrides, prompts, traces, prices, and every file of a run.

Each case must have one of three results: it works, it is refused in a paragraph that names the place, or the run
resumes to the same bits. Anything else is a fault. ``python -m benchmarks.fuzz --cases 100000`` takes an hour; the
tests try some of each.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import random
import shutil
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks import NoWatch, at_least
from graphs.loop import Loop, synchronous
from spotlight import config
from spotlight.clock import wall_clock
from spotlight.config import Config, Section
from spotlight.device import protocol
from spotlight.device.modelled import ModelledDevice
from spotlight.inputs import check_inputs
from spotlight.market.prices import read_prices
from spotlight.market.trace_files import read_trace
from spotlight.plan.availability import pool_switches, ups
from spotlight.records import SpotlightError
from spotlight.rl import rewards
from spotlight.rl.prompts import check_prompts, read_prompts
from spotlight.simulation import Simulation
from spotlight.store import resuming
from spotlight.store.accounts import Accounts
from spotlight.store.rows import HISTORY, SIMULATED, SUMMARY, VALIDATION
from spotlight.store.rundir import RunDir

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "examples" / "prompts"
PARAGRAPH = 2000
"""Most characters of a refusal; one of settings has a line for each wrong setting."""
SETTINGS = f"""
[run]
iterations = 3
validate_every = 2
validation_seeds = 1

[data]
train_prompts = "{PROMPTS / "digits-train.txt"}"
validation_prompts = "{PROMPTS / "digits-validation.txt"}"

[rollout]
prompts = 3
seeds_kept = 4
request_seeds = 2
steps = 6

[exploration]
seeds_tried = 8
request_seeds = 4
rounds = 2
budget = "fixed"

[pools.reserved]
workers = 1
usd_per_h = 10.0

[pools.spot]
workers = 2
usd_per_h = 2.5
"""

Check = Callable[[Path, Any], None]
"""Tries one case in a directory of its own; a fault raises `AssertionError`, or any other error."""

# What is tried

scalars: st.SearchStrategy[Any] = st.one_of(
    st.booleans(),
    st.integers(-2, 40),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**26, -(2**63), 10**12, 10**6]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 1e-320, 1e308, 0.5, 1.5]),
    st.text(max_size=12),
    st.sampled_from(
        ["", ".", "..", "/", "a\0b", "/dev/null", "/dev/null/x", "/proc/x", "nan", "reserved", "h100", "47"]
    ),
)
values: st.SearchStrategy[Any] = st.one_of(
    scalars, st.lists(scalars, max_size=3), st.dictionaries(st.text(max_size=5), scalars, max_size=2)
)
junk = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [b"9" * 5000, b"[" * 3000, b"{" * 3000, b"\xef\xbb\xbf", b"\0", b"\n" * 50, b'"', b"nan", b"1e999"]
    ),
)


@cache
def fields() -> list[str]:
    """Names of all settings, as ``section.key``."""

    def of(section: type[Section], above: str) -> Iterator[str]:
        for key, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from of(kind, f"{above}{key}.")
            else:
                yield above + key

    return list(of(Config, ""))


def toml(value: Any) -> str:
    """A value as TOML; invalid text for values that TOML cannot hold."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value)
        case list():
            return f"[{', '.join(map(toml, value))}]"
        case _:
            return "{" + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + "}"


lines_of = {
    "prompts": ['A sign that reads "47".', 'a "1"', "no target", '""', '"', "\ufeff", 'caf\u00e9 "48"', "\0", ""],
    "traces": ["0,add,a", "1000,remove,a", "60000,19", "2021-12-11, 11:11:30, 55", "1000,end,", "0,add,", "9e9,add,b"]
    + ['{"metadata": {"gap_seconds": 300}, "data": [1, 2]}', '[0, "add", {"nodes": ["a"], "duration": 5}]', "0,99999"],
    "prices": [
        "time,usd_per_h",
        "since_start_s,usd_per_h",
        "0,1",
        "3600,2.5",
        "2026-01-31T12:00:00Z,2.66",
        "1e308,1e308",
    ]
    + ["0001-01-01,1", "9999-12-31T23:59:59+14:00,1", "# note", "-1e308,0", '"0,1', "7200,1e-320"],
}


def texts(kind: str) -> st.SearchStrategy[bytes]:
    """Files of lines, most of them valid, some with junk in between."""
    line = st.one_of(
        st.sampled_from(lines_of[kind]).map(str.encode),
        st.sampled_from(lines_of[kind]).map(str.encode),
        junk,
        st.builds(lambda a, b, c: f"{a},{b},{c}".encode("utf-8", "replace"), scalars, scalars, scalars),
    )
    return st.one_of(st.lists(line, max_size=6).map(b"\n".join), junk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damage to one file of a run."""

    file: float
    """Which file, as a share of all in order of their names."""
    how: str
    at: float
    """Where in the file, as a share of its length."""
    value: Any
    junk: bytes


LOSSES = ("delete", "cut", "overwrite", "directory", "link", "pipe", "empty", "cut line")
"""Damages that remove something: the run must end the same afterwards, or be refused."""
EDITS = ("leaf", "key", "line twice", "junk")
"""Damages that may leave another valid value: the run may work, with any result."""
damages = st.builds(
    Damage,
    file=st.floats(0, 1, exclude_max=True),
    how=st.sampled_from((*LOSSES, *EDITS, "leaf", "leaf", "leaf")),
    at=st.floats(0, 1, exclude_max=True),
    value=values,
    junk=junk,
)

# What must come of it


def refusal(work: Callable[[], Any], *places: object) -> str | None:
    """The text of the refusal; None if it works.

    Raises:
        AssertionError: the refusal names none of the places, or is too long to be read.
    """
    try:
        work()
    except SpotlightError as error:
        said = str(error)
        assert any(str(place) in said for place in places), f"names none of {places}: {said}"
        assert len(said) <= PARAGRAPH, f"{len(said)} characters: {said[:PARAGRAPH]}"
        return said
    return None


def check_settings(directory: Path, case: tuple[list[tuple[str, Any]], bytes | None, float]) -> None:
    """A settings file with some settings changed, or with junk in the middle of it."""
    edits, within, at = case
    path = directory / "run.toml"
    text = (
        SETTINGS + "".join(f"\n[{section}]\n{key} = {toml(value)}\n" for section, key, value in _once(edits))
    ).encode("utf-8", "replace")
    cut = int(at * len(text))
    path.write_bytes(text if within is None else text[:cut] + within + text[cut:])

    def work() -> None:
        found = config.load(path)
        assert config.resolve(tomllib.loads(config.dump(found)), Path("/")) == found
        for pool in (found.pools.reserved, found.pools.spot):
            if pool.workers > 50:
                return  # takes long, and shows no more
        check_inputs(found, with_model=False, live=False)

    refusal(
        work, path, *(key for name, _ in edits for key in (name, name.split(".")[-1])), "ask for", "prompt", "trace"
    )


def _once(edits: list[tuple[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for name, value in edits:
        section, _, key = name.rpartition(".")
        yield section, key, value


def check_override(directory: Path, override: str) -> None:
    """One ``--set``."""
    path = directory / "run.toml"
    path.write_text(SETTINGS)

    refusal(lambda: config.dump(config.load(path, [override])), "--set", path)


def check_prompt_file(directory: Path, content: bytes) -> None:
    path = directory / "prompts.txt"
    path.write_bytes(content)
    refusal(lambda: check_prompts(read_prompts(path), path, rewards.load("ocr").check_prompt), path)


def check_trace_file(directory: Path, content: bytes) -> None:
    path = directory / "trace.csv"
    path.write_bytes(content)

    def work() -> None:
        trace = read_trace(path)
        pool = config.PoolSection(workers=3, usd_per_h=1.0, trace=str(path), trace_share=0.5, speedup=60.0)
        for switches in pool_switches(pool, trace, seed=0, duration_s=1.0):
            assert all(start_s < stop_s for start_s, stop_s in ups(switches))
        assert math.isfinite(trace.summary().mean_available)

    refusal(work, path)


def check_price_file(directory: Path, content: bytes) -> None:
    path = directory / "prices.csv"
    path.write_bytes(content)
    refusal(lambda: read_prices(path).usd(0.0, 3600.0), path)


def check_run(directory: Path, damage: Damage) -> None:
    """A run whose driver died before its last iteration, with one file damaged: it is resumed, reported and accounted
    for."""
    killed, expected = example_run()
    run_dir = directory / killed.name
    shutil.copytree(killed, run_dir)
    path = inflict(run_dir, damage)
    with protocol.using(ModelledDevice()):
        said = refusal(lambda: go_on(run_dir), run_dir)
    if said is None and damage.how in LOSSES:
        assert outcome(run_dir) == expected, f"{path}: {damage.how}: went on to another outcome"
    shutil.rmtree(run_dir)
    shutil.copytree(killed, run_dir)
    inflict(run_dir, damage)
    refusal(lambda: account(run_dir), run_dir)


def go_on(run_dir: Path) -> None:
    """Resume a run, as `spotlight resume` does."""
    run = RunDir.open(run_dir)
    resuming.check(run)
    rows = len(resuming.rows_that_stay(run))
    check_inputs(run.config(), with_model=False, live=False)
    run.rewrite(HISTORY, run.rows(HISTORY)[:rows])
    Loop(run, synchronous, NoWatch()).go()
    Accounts(run, run.config()).close(wall_clock())


def account(run_dir: Path) -> None:
    """Do what `spotlight cost` and `spotlight report` do, except drawing."""
    from spotlight.report.facts import read
    from spotlight.report.money import bought, cost_json, cost_table

    facts = read(run_dir)
    json.dumps(cost_json(facts.ledger))
    cost_table(facts.ledger, "", width=80)
    assert bought(facts.ledger)
    assert facts.money()
    assert facts.zoom()
    assert len(facts.lanes()) >= len({lane for lane, _ in facts.losses()})
    for line in facts.validation:
        facts.images(line)


def outcome(run_dir: Path) -> dict[str, Any]:
    """Results of a run that depend only on its settings."""
    run = RunDir.open(run_dir)
    return {
        "weights": [row.weights_sha256 for row in run.history()],
        "scores": [(row.version, row.score) for row in run.validation()],
    }


@cache
def example_run() -> tuple[Path, dict[str, Any]]:
    """The directory of a run that was killed before its last iteration, and the outcome of the whole run."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "run.toml").write_text(SETTINGS)
    settings_ = config.load(directory / "run.toml", [f"run.dir={directory}", "simulation.gain=1"])
    whole = Simulation("fuzz", settings_, "modelled")
    whole.go(report=False)
    run = whole.directory
    expected = outcome(run.path)
    (run.path / SIMULATED).unlink()
    (run.path / SUMMARY).unlink()
    for journal in (HISTORY, VALIDATION):
        run.rewrite(journal, run.rows(journal)[:-1])
    shutil.rmtree(run.path / "weights" / "v00003")
    (run.path / "beliefs" / "00003.json").unlink()
    return run.path, expected


def inflict(run_dir: Path, damage: Damage) -> Path:
    """Damage one file; returns its path."""
    files = sorted(path for path in run_dir.rglob("*") if path.is_file())
    path = files[int(damage.file * len(files))]
    content = path.read_bytes()
    cut = int(damage.at * len(content))
    match damage.how:
        case "delete":
            path.unlink()
        case "cut":
            path.write_bytes(content[:cut])
        case "overwrite":
            path.write_bytes(content[:cut] + b"\0" * len(content[cut:]))
        case "directory":
            path.unlink()
            path.mkdir()
        case "link":
            path.unlink()
            path.symlink_to("/etc/passwd")
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case "empty":
            path.write_bytes(b"")
        case "cut line" if path.suffix == ".jsonl":
            lines = content.splitlines(keepends=True)
            del lines[int(damage.at * len(lines))]
            path.write_bytes(b"".join(lines))
        case "line twice" if path.suffix == ".jsonl":
            lines = content.splitlines(keepends=True)
            path.write_bytes(b"".join([*lines, lines[int(damage.at * len(lines))]]))
        case "leaf" | "key" if path.suffix in (".json", ".jsonl"):
            _change_json(path, damage)
        case "junk" | "leaf" | "key":
            path.write_bytes(content[:cut] + damage.junk + content[cut:])
    return path


def _change_json(path: Path, damage: Damage) -> None:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = int(damage.at * len(lines))
    value = json.loads(lines[number])
    chance = random.Random(damage.at)
    at = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = chance.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and chance.random() < 0.7:
            at = at[key]
            continue
        if damage.how == "key":
            del at[key]
        else:
            at[key] = damage.value
        break
    lines[number] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n", errors="surrogatepass")


KINDS: dict[str, tuple[st.SearchStrategy[Any], Check, int]] = {
    "settings": (
        st.tuples(
            st.lists(st.tuples(st.deferred(lambda: st.sampled_from(fields())), values), max_size=2),
            st.one_of(st.none(), st.none(), junk),
            st.floats(0, 1),
        ),
        check_settings,
        800,
    ),
    "overrides": (
        st.one_of(
            st.builds(
                lambda name, value: f"{name}={toml(value)}", st.deferred(lambda: st.sampled_from(fields())), values
            ),
            st.builds(lambda name, text: f"{name}={text}", st.deferred(lambda: st.sampled_from(fields())), st.text()),
            st.text(max_size=30),
        ),
        check_override,
        500,
    ),
    "prompts": (texts("prompts"), check_prompt_file, 200),
    "traces": (texts("traces"), check_trace_file, 220),
    "prices": (texts("prices"), check_price_file, 220),
    "run": (damages, check_run, 60),
}
"""{kind: its cases, the check, and how many of 2,000 cases it gets}"""


def fuzz(kind: str, cases: int, number: int | None = None) -> None:
    """Try so many cases of a kind.

    Args:
        number: of the attempt; each number tries other cases. None: always the same cases.

    Raises:
        Exception: the first fault, minimised.
    """
    strategy, check, _ = KINDS[kind]

    def attempt(case: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
            check(Path(directory), case)

    tried = settings(
        max_examples=cases,
        database=None,
        deadline=None,
        derandomize=number is None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )(given(strategy)(attempt))
    (tried if number is None else seed(number)(tried))()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=at_least(1), default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    arguments = parser.parse_args()
    of = sum(share for _, _, share in KINDS.values())
    for kind in arguments.kind or KINDS:
        cases, began_s = max(1, arguments.cases * KINDS[kind][2] // of), time.monotonic()
        fuzz(kind, cases, arguments.seed)
        print(f"{kind}: {cases} cases in {time.monotonic() - began_s:.0f} s, no fault", flush=True)


if __name__ == "__main__":
    main()
