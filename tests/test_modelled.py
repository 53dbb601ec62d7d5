"""The modelled device: the very same loop, graphs and tasks run on it, without tensors, and their point shows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from dask.callbacks import Callback

from factories import answer, make_request
from graphs.loop import Loop, _seed_s, synchronous
from runs import ROOT, VALIDATED, NoWatch, outcome, settings_file
from spotlight import config
from spotlight.device import protocol
from spotlight.device.modelled import ModelledDevice
from spotlight.device.signals import Clear, CloseExploration, signals
from spotlight.plan.balance import Balance
from spotlight.plan.offload import Measured
from spotlight.records import Dropped, GradientPart, Placement, Sample, Scored, SpotlightError, Surplus, WeightsRef
from spotlight.report import write_report
from spotlight.store import weights
from spotlight.store.creating import create_run
from spotlight.store.rows import HISTORY, SIMULATED, VALIDATION, HistoryRow
from spotlight.store.rundir import RunDir
from spotlight.store.versions import versions_of


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> ModelledDevice:
    """Installed for the length of a test."""
    modelled = ModelledDevice()
    monkeypatch.setattr(protocol, "_device", modelled)
    return modelled


class ExploredAtFirst(NoWatch):
    """A watch that sees exploration beside the training of the first two iterations only, and nobody idle."""

    def __init__(self) -> None:
        self._begun = 0

    def begin(self, phase: str, iteration: int) -> None:
        self._begun += phase == "iterate"

    def balance(self, iteration: int, began_s: float, window_s: float) -> Balance:
        return Balance(
            measured=Measured(train_wait_s=0.0, remote_wait_s=0.0, spot=1, rollout_s=10.0),
            spare_s=0.0,
            idle_s=0.0,
            work_s=20.0,
            explored_s=1e4 if self._begun <= 2 else 0.0,
            train_s=10.0,
            reserved=1,
        )


class Killed(BaseException):
    """The driver ends here."""


def make_run(directory: Path, *overrides: str) -> RunDir:
    return create_run(
        config.load(
            settings_file(directory), ["run.name=modelled", "run.iterations=3", "run.validate_every=3", *overrides]
        ),
        0.0,
    )


def go(run: RunDir) -> RunDir:
    Loop(run, synchronous, NoWatch()).go()
    return run


def files(run: RunDir) -> dict[str, bytes]:
    """What a run leaves, but for the journals and manifests, which hold times."""
    kept = ("weights.safetensors", "optimizer.safetensors")
    patterns = ("selections/*.json", "beliefs/*.json", *(f"weights/*/{name}" for name in kept))
    found = [path for pattern in patterns for path in sorted(run.path.glob(pattern))]
    return {str(path.relative_to(run.path)): path.read_bytes() for path in found}


def scores(run: RunDir) -> list[float]:
    return [row["metrics"]["modelled_score"] for row in run.rows(HISTORY)]


def test_the_loop_runs_as_on_any_device(tmp_path: Path) -> None:
    run = go(make_run(tmp_path))

    history, validation = run.rows(HISTORY), run.rows(VALIDATION)
    assert [row["iteration"] for row in history] == [0, 1, 2]
    assert [row["version"] for row in validation] == [0, 3]
    assert all(row["metrics"]["seeds_scored"] == 3 * 8 and row["metrics"]["samples"] == 3 * 4 for row in history)
    assert all((run.path / row["images"]).is_file() for row in validation)
    assert len(list((run.path / "selections").iterdir())) == 3
    assert scores(run) == sorted(scores(run))
    latest = weights.latest(run.path)
    assert latest is not None
    assert latest.weights.version == 3
    assert not (run.path / "latents").exists()


def test_two_runs_leave_the_same_bytes(tmp_path: Path) -> None:
    first, second = (go(make_run(tmp_path / name)) for name in ("a", "b"))

    assert outcome(first.path) == outcome(second.path)
    assert files(first) == files(second)


def test_exploration_stays_worth_what_it_was_after_an_iteration_in_which_nothing_was_scored(tmp_path: Path) -> None:
    run = make_run(tmp_path, "exploration.budget=worth", "run.iterations=5", "exploration.seeds_tried=64")
    Loop(run, synchronous, ExploredAtFirst()).go()

    first, *others = (row.metrics["seeds_scored"] for row in run.history())
    assert all(scored < first / 2 for scored in others[1:])
    assert all(others)  # a few are tried however little it is worth: their fidelity is measured


def test_a_candidate_takes_as_long_as_in_the_last_iteration_that_scored_some() -> None:
    measured: list[dict[str, float]] = [
        {"beside_s": 5.0, "beside_seeds": 5},
        {"beside_s": 10.0, "beside_seeds": 5},
        {"beside_s": 3.0},
        {},
    ]
    rows = [
        HistoryRow(iteration=k, weights_version=k + 1, weights_sha256="", metrics={}, measured=each)
        for k, each in enumerate(measured)
    ]

    assert _seed_s(rows) == 2.0
    assert _seed_s(rows[2:]) == 0.0


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        ((), True),
        (("strategy.exploration=off",), False),
        (("exploration.reuse=true", "train.algorithm=nft", "strategy.exploration=blocking"), False),
    ],
)
def test_the_fidelity_of_exploration_is_told_where_it_is_measured(
    tmp_path: Path, overrides: tuple[str, ...], is_told: bool
) -> None:
    run = go(make_run(tmp_path, *overrides))

    assert all(("fidelity" in row.metrics) == is_told for row in run.history())
    assert ("<th>fidelity" in write_report(run.url).read_text()) == is_told


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    first, second = (go(make_run(tmp_path / name, f"run.seed={name}")) for name in ("1", "2"))

    assert outcome(first.path) != outcome(second.path)


@pytest.mark.parametrize("survived", [0, 1, 25, 60, 90, 110])
def test_a_run_killed_before_any_task_and_resumed_leaves_the_same_bytes(tmp_path: Path, survived: int) -> None:
    undisturbed = go(make_run(tmp_path / "a"))
    killed = make_run(tmp_path / "b")
    done: list[object] = []

    def before(key: object, *_: object) -> None:
        if len(done) == survived:
            raise Killed
        done.append(key)

    with pytest.raises(Killed), Callback(pretask=before):
        go(killed)
    protocol.install(ModelledDevice())  # a new process remembers nothing
    go(RunDir.open(killed.path))

    assert outcome(killed.path) == outcome(undisturbed.path)
    assert files(killed) == files(undisturbed)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    script = (
        "import sys\n"
        "from graphs.loop import Loop, synchronous\n"
        "from runs import NoWatch\n"
        "from spotlight.device import protocol\n"
        "from spotlight.device.modelled import ModelledDevice\n"
        "from spotlight.store.rundir import RunDir\n"
        "protocol.install(ModelledDevice())\n"
        f"Loop(RunDir({str(run.path)!r}), synchronous, NoWatch()).go()\n"
        "print(*{'torch', 'distributed', 'zarr', 'diffusers', 'onnxruntime', 'pandas'} & set(sys.modules))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT / "tests",
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )

    assert done.stdout.split() == []
    assert len(run.rows(HISTORY)) == 3


def test_exploration_learns_faster(tmp_path: Path) -> None:
    ends = {
        exploration: [
            scores(go(make_run(tmp_path / f"{exploration}-{seed}", f"run.seed={seed}", *overrides)))[-1]
            for seed in range(4)
            for overrides in [[f"strategy.exploration={exploration}", "run.iterations=8", "rollout.prompts=8"]]
        ]
        for exploration in ("off", "stale", "blocking")
    }

    gained = {name: fmean(values) - config.SimulationSection().start for name, values in ends.items()}
    assert gained["stale"] > 1.15 * gained["off"]  # 4 kept of 8 tried
    assert gained["blocking"] > gained["stale"]  # current weights rank better than stale ones
    assert all(stale > off for stale, off in zip(ends["stale"], ends["off"], strict=True))


def test_validation_shows_the_score_of_the_weights(tmp_path: Path) -> None:
    overrides = ["run.iterations=2", "simulation.start=0.3", "run.validation_seeds=200"]
    overrides += [f"data.validation_prompts={VALIDATED[20]}"]
    run = go(make_run(tmp_path, *overrides, "simulation.gain=2.0"))

    before, after = (row["score"] for row in run.rows(VALIDATION))

    assert before == pytest.approx(0.3, abs=0.03)
    assert after == pytest.approx(scores(run)[-1], abs=0.03)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_of_validated_versions_the_best_and_the_last_few_are_kept(tmp_path: Path, kept: int) -> None:
    run = go(make_run(tmp_path, "run.iterations=12", "run.validate_every=2", f"run.versions_kept={kept}"))

    *validated, last = run.validation()
    best = max(validated, key=lambda row: row.score)  # the last one came after versions were last removed
    assert last.version == 12
    expected = {row.version for row in (best, *validated[-kept:])}
    assert versions_of(run.path).numbers() == sorted({0, 11, 12} | expected)


def test_training_in_parts_is_training_at_once(tmp_path: Path) -> None:
    whole, parts = (
        go(make_run(tmp_path / std, f"train.advantage_std={std}", 'strategy.offload="all"'))
        for std in ("global", "group")
    )

    assert config.load(parts.path / config.RESOLVED).trains_as_scored
    assert scores(whole) == scores(parts)


def test_an_update_stages_a_version_once(tmp_path: Path, device: ModelledDevice) -> None:
    run = make_run(tmp_path)
    run_dir, start = str(run.path), device.prepare(str(run.path)).start
    request = make_request(weights=start, purpose="rollout")
    samples = tuple(Sample(request=request, index=index, reward=float(index), advantage=0.0) for index in (0, 1))

    parts = [
        GradientPart(weights=start, iteration=0, update=0, number=at, samples=(sample,), positions=(at,))
        for at, sample in enumerate(samples)
    ]

    gradients = tuple(answer(device.gradient(run_dir, part)) for part in parts)
    with pytest.raises(SpotlightError, match="never staged"):
        weights.publish(run.path, 1)
    device.update(run_dir, start, (gradients,), (gradients,), 0)
    first = weights.publish(run.path, 1)
    device.update(run_dir, start, (gradients,), (gradients,), 0)

    assert weights.publish(run.path, 1) == first == weights.latest(run.path)


def test_only_exploration_with_older_weights_is_stale(tmp_path: Path, device: ModelledDevice) -> None:
    run_dir = str(make_run(tmp_path).path)
    start = device.prepare(run_dir).start
    seeds = tuple(range(500))

    def scored(purpose: str, iteration: int) -> tuple[float | None, ...]:
        done = device.score(run_dir, make_request(weights=start, purpose=purpose, iteration=iteration, seeds=seeds))
        assert isinstance(done, Scored)
        return done.rewards

    assert scored("explore", 0) == scored("rollout", 0) == scored("rollout", 1)
    assert scored("explore", 1) != scored("explore", 0)


def test_one_rank_answers_for_its_gang(tmp_path: Path, device: ModelledDevice) -> None:
    run_dir = str(make_run(tmp_path).path)
    request = make_request(weights=device.prepare(run_dir).start)

    done = [device.rollout(run_dir, request, Placement(gang="g", epoch=0, rank=rank, width=2)) for rank in (0, 1)]

    assert done[0].weights_sha256 == request.weights.sha256  # type: ignore[union-attr]  # a `Rollout`
    assert done[1] == Surplus()


def test_weights_that_are_not_there_are_refused(tmp_path: Path, device: ModelledDevice) -> None:
    run_dir = str(make_run(tmp_path).path)
    device.prepare(run_dir)
    request = make_request(weights=WeightsRef(version=0, sha256="0" * 64))

    with pytest.raises(SpotlightError, match="belong to another run"):
        device.rollout(run_dir, request)


@pytest.fixture
def closed() -> Iterator[str]:
    """The name of a run whose exploration for iteration 1 is over."""
    signals.obey(CloseExploration(run="closed", iteration=1))
    yield "closed"
    signals.obey(Clear(run="closed"))


def test_exploration_that_is_closed_is_not_scored(tmp_path: Path, device: ModelledDevice, closed: str) -> None:
    run_dir = str(make_run(tmp_path).path)
    request = make_request(run=closed, iteration=1, purpose="explore", weights=device.prepare(run_dir).start)

    assert isinstance(device.score(run_dir, request), Dropped)


@pytest.mark.parametrize("learning", ["modelled", "real"])
def test_a_simulated_run_says_how_it_learns(tmp_path: Path, learning: str) -> None:
    run = make_run(tmp_path)
    before = run.simulated

    run.write_json(SIMULATED, {"learning": learning})

    assert (before, run.simulated) == ("", learning)


def test_a_damaged_record_of_a_simulation_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.path / SIMULATED).write_text("{}")

    with pytest.raises(SpotlightError, match=r"simulated\.json: no field 'learning'"):
        _ = run.simulated
