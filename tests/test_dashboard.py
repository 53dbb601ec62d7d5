"""The live page: what it works out, what it says, and, in a real browser during a real run, what a person sees."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from distributed import Client, Scheduler

from browser import CHROMIUM, Page, browser
from cluster.dashboard import text
from cluster.dashboard.facts import ROWS_MAX, Facts, Recovery, head_count, lanes, recoveries
from cluster.dashboard.lanes import Lanes
from cluster.dashboard.metrics import exposition
from cluster.dashboard.panels import STEPS_MAX, Learning, Planner, Pools
from cluster.dashboard.plugin import PAGE, PagePlugin, pages
from cluster.dispatch.dispatcher import Dispatcher
from cluster.dispatch.events import WorkerJoined
from cluster.dispatch.journal import Label
from cluster.dispatch.rules import Rules
from kills import client_of, process_of
from runs import settings_file, wait_for
from spotlight.config import load
from spotlight.records import Explored, Kept, Prompt, Selection, Stopped, WorkerLife
from spotlight.report.feed import PICTURES_SHOWN, PROMPTS_SHOWN, TEXT_SHOWN, Feed, best_and_worst, variances
from spotlight.report.palette import ALIVE, PHASE_COLOURS
from spotlight.run import Run
from spotlight.simulation import simulate
from spotlight.store.creating import create_run
from spotlight.store.rows import HISTORY, HistoryRow
from spotlight.store.rundir import RunDir
from spotlight.store.thumbnails import Picture, pictures, thumbnail

PRICES = {"reserved": 10.0, "spot": 2.5}
ABOUT = {"kind": "run", "id": 0, "name": "a", "url": "/runs/a", "iterations": 9, "label": "", "usd_per_h": PRICES}
ABOUT |= {"session": "first"}

PROMPT = {"prompt": "a", "id": 3, "tried": 4, "reward": 0.5, "spread": 0.1, "kept": True}
EXPLORED = {"kind": "prompts", "id": 0, "scored": 4, "dropped": 0, "of": 1, "prompts": [PROMPT]}


def facts_of(*rows: dict[str, Any]) -> Facts:
    facts = Facts(lambda: None, clock=lambda: 100.0)
    facts.take(rows)
    return facts


def money_row(at_s: float = 1.0, usd: dict[str, float] | None = None, **given: float) -> dict[str, Any]:
    fields = {"usd_reserved_only": 1.5, "ledger_s": at_s, "ledger_usd": 0.5}
    return {"kind": "money", "id": -1, "at_s": at_s, "usd": usd or {"spot": 0.5}, **fields, **given}


def test_rows_that_come_again_change_nothing() -> None:
    rows = [ABOUT, *({"kind": "iteration", "id": k, "reward_mean": 0.1 * k, "reward_std": 0.2} for k in range(3))]
    facts = facts_of(*rows)
    before = facts.changes.copy()

    facts.take(rows)

    assert facts.changes == before
    assert [row["id"] for row in facts.rows("iteration")] == [0, 1, 2]


def test_another_run_begins_with_an_empty_page() -> None:
    facts = facts_of(ABOUT, {"kind": "validation", "id": 0, "score": 0.5})

    facts.take([ABOUT | {"session": "second"}])  # of the same name, in the same directory

    assert facts.rows("validation") == []
    assert facts.latest("run")["session"] == "second"


def test_dollars_an_hour_are_those_of_now_where_they_are_known() -> None:
    facts = facts_of(ABOUT)
    planned = facts.prices()

    facts.take([money_row() | {"usd_per_h": {"spot": 9.0}}])

    assert planned == PRICES
    assert facts.prices() == {"spot": 9.0}


def test_rows_of_a_kind_that_is_not_known_are_refused_and_not_kept() -> None:
    facts = facts_of(ABOUT)

    with pytest.raises(KeyError):
        facts.take([{"kind": "weather", "id": 0}])

    assert facts.rows("weather") == []


def test_the_page_keeps_no_more_than_it_shows() -> None:
    facts = facts_of(ABOUT, *({"kind": "images", "id": version, "images": []} for version in range(5)))

    facts.take([money_row(at_s=float(at_s)) for at_s in range(10_000)])

    assert [row["id"] for row in facts.rows("images")] == [4]
    assert len(facts.money) <= 240
    assert facts.money[-1].at_s == 9_999


def test_a_loss_is_over_when_its_work_has_taken_a_step_and_its_place_a_worker() -> None:
    events = [
        {"at_s": 5.0, "event": "lost", "worker": "spot-1"},
        {"at_s": 5.0, "event": "broken", "gang": "g", "lost": "spot-1"},
        {"at_s": 5.1, "event": "formed", "gang": "g"},
        {"at_s": 5.4, "event": "stepped", "gang": "g"},
        {"at_s": 9.0, "event": "joined", "worker": "spot-1"},
        {"at_s": 11.0, "event": "left", "worker": "spot-2"},
    ]

    first, second = recoveries(events, {})

    assert (first.worker, first.requests) == ("spot-1", 1)
    assert first.work_s == pytest.approx(0.4)
    assert first.back_s == pytest.approx(4.0)
    assert (second.what, second.work_s, second.back_s) == ("left on notice", None, None)


def test_a_worker_that_hung_is_told_of_once() -> None:
    events = [{"at_s": 1.0, "event": "hung", "worker": "s"}, {"at_s": 1.1, "event": "lost", "worker": "s"}]

    assert [each.what for each in recoveries(events, {})] == ["hung, and was ended"]


def test_a_worker_of_another_name_may_take_the_place_of_one_that_was_lost() -> None:
    pools = {"a": "spot", "b": "spot", "c": "spot", "r": "reserved"}
    events = [
        {"at_s": 1.0, "event": "lost", "worker": "a"},
        {"at_s": 2.0, "event": "lost", "worker": "b"},
        {"at_s": 3.0, "event": "engine lost", "worker": "c"},
        {"at_s": 4.0, "event": "joined", "worker": "r"},
        {"at_s": 5.0, "event": "joined", "worker": "b"},
        {"at_s": 7.0, "event": "joined", "worker": "d"},
    ]

    found = recoveries(events, pools | {"d": "spot"})

    assert [each.back_s for each in found] == [6.0, 3.0, None]
    assert '<td class="number">–</td></tr>' in text.recovery_table(found[2:], 0.0)  # its worker was there all along


def test_lanes_are_sorted_as_people_count() -> None:
    lives = [
        WorkerLife(worker=name, pool=pool, joined_s=0.0, left_s=left_s, reason="")
        for name, pool, left_s in (
            ("spot-10", "spot", None),
            ("spot-2", "spot", 50.0),
            ("spot-3", "spot", 5.0),
            ("reserved-0", "reserved", None),
        )
    ]

    assert lanes(lives, since_s=20.0) == [("reserved", "reserved-0"), ("spot", "spot-2"), ("spot", "spot-10")]
    assert head_count(lives, ("reserved", "spot"))[-1] == (50.0, {"reserved": 1, "spot": 1})


def test_what_strangers_wrote_is_shown_and_not_run() -> None:
    evil = '<script>alert("1")</script>'
    picture = {"prompt": evil, "seed": "1", "reward": 0.5, "url": 'x" onerror="alert(1)'}
    facts = facts_of(ABOUT | {"name": evil, "label": evil}, {"kind": "seeds", "id": 0, "pictures": [picture, picture]})

    said = text.cards(facts) + text.gallery(facts) + text.recovery_table([lost(worker=evil)], 0.0)

    assert "<script" not in said
    assert "onerror" not in said
    assert "&lt;script&gt;" in said


def test_dollars_of_all_pools_are_drawn_and_a_pool_that_never_was_is_not_shown() -> None:
    usd = {"reserved": 1.0, "spot": 2.0, "reward": 4.0}
    facts, dispatch = facts_of(money_row(at_s=10.0, usd=usd)), Dispatcher(Rules())
    facts._find = lambda: dispatch
    panel = Pools(facts)
    plots: list[Any] = panel.root.children
    drawn = [renderer for plot in plots for renderer in plot.renderers if renderer.name == "reward"]

    panel.update()
    shown = [renderer.visible for renderer in drawn]
    dispatch.handle(WorkerJoined(at_s=1.0, address="a", name="reward-0", pool="reward", node=""))
    panel.update()

    assert panel._spent.data["reward"] == [4.0]
    assert shown == [False, False]
    assert [renderer.visible for renderer in drawn] == [True, True]


def test_an_axis_names_no_moment_twice() -> None:
    facts = facts_of(ABOUT)

    axes = [plot.xaxis[0] for plot in (Lanes(facts).plot, *Pools(facts).root.children)]

    assert [axis.ticker.min_interval for axis in axes] == [1, 1, 1]


def test_panels_that_have_nothing_to_draw_say_so_and_draw_nothing() -> None:
    facts = facts_of(ABOUT)
    panels: tuple[Any, ...] = Learning(facts), Planner(facts)
    found = []

    unexplored = {"kind": "iteration", "id": 0, "reward_mean": 0.5, "reward_std": 0.1}
    explored = unexplored | {"id": 1, "rank_correlation": 0.8, "variance_kept": 0.1, "variance_equal": 0.1}
    for rows in ([], [unexplored], [explored, EXPLORED]):
        facts.take(rows)
        for panel in panels:
            panel.update()
            said, *plots = panel.root.children
            found.append((said.visible, said.text, *(plot.visible for plot in plots)))

    assert found[:2] == [
        (True, "<p>No iteration is finished yet.</p>", False, False, False),
        (True, "<p>Nothing was explored yet.</p>", False),
    ]
    assert found[2][0] is found[4][0] is False
    assert found[2][2:] == (True, False, False)
    assert found[4][2:] == (True, True, True)
    assert found[5][2:] == (True,)


def test_work_at_reserved_prices_stands_beside_what_was_spent_by_the_same_moment() -> None:
    at_end = {"ledger_s": 20.0, "ledger_usd": 3.0, "usd_reserved_only": 4.0}
    none_yet = {"ledger_s": 0.0, "ledger_usd": 0.0, "usd_reserved_only": 0.0}
    facts = facts_of(money_row(10.0, {"spot": 2.0}, **none_yet), money_row(30.0, {"spot": 5.0}, **at_end))
    facts.take([money_row(40.0, {"spot": 7.0}, **at_end)])
    facts._find = lambda: joined(0.0)
    panel = Pools(facts)

    panel.update()

    assert dict(panel._reserved_only.data) == {"at": [20.0], "usd": [4.0], "spent": [3.0]}
    assert "beside $3.00 by then" in text.cards(facts)


def test_a_run_that_goes_on_is_drawn_from_its_first_worker_on() -> None:
    before = {"ledger_s": 5.0, "ledger_usd": 3.0, "usd_reserved_only": 4.0}
    facts = facts_of(money_row(105.0, {"spot": 5.0}, **before), money_row(125.0, ledger_s=120.0))
    facts._find = lambda: joined(100.0)
    panel = Pools(facts)

    panel.update()

    assert list(panel._reserved_only.data["at"]) == [20.0]


def joined(*at_s: float, dispatch: Dispatcher | None = None) -> Dispatcher:
    found = dispatch or Dispatcher(Rules())
    for at in at_s:
        found.handle(WorkerJoined(at_s=at, address=f"a{at}", name=f"spot-{at:g}", pool="spot", node=""))
    return found


def test_counts_of_workers_are_drawn_anew_only_when_one_came_or_went() -> None:
    dispatch, now_s = joined(0.0), [100.0]
    facts = Facts(lambda: dispatch, clock=lambda: now_s[0])
    panel = Pools(facts)
    panel.update()
    drawn = panel._steps.data

    now_s[0] = 130.0
    panel.update()
    assert panel._steps.data is drawn
    assert drawn["at"][-1] == 130.0
    joined(*(float(at) for at in range(1, 3_000)), dispatch=dispatch)
    panel.update()

    assert len(panel._steps.data["at"]) <= STEPS_MAX + 2
    assert panel._steps.data["spot"][-1] == 3_000


def test_workers_of_all_pools_are_counted() -> None:
    dispatch = joined(0.0)
    dispatch.handle(WorkerJoined(at_s=1.0, address="r", name="reward-0", pool="reward", node=""))
    facts = Facts(lambda: dispatch, clock=lambda: 100.0)
    facts.take([ABOUT])

    assert "<b>0 + 1 + 1</b><span>reserved + spot + reward workers now" in text.cards(facts)
    assert 'spotlight_workers{run="a",pool="reward"} 1.0' in exposition(facts)


def test_a_long_history_is_told_in_pieces_the_latest_first(tmp_path: Path) -> None:
    directory = create_run(load(settings_file(tmp_path)), now_s=0.0)
    rows = [
        HistoryRow(iteration=k, weights_version=k + 1, weights_sha256="", metrics={}, measured={}) for k in range(120)
    ]
    directory.append(HISTORY, *map(asdict, rows))
    feed = Feed(directory, directory.config())

    told = [[row["id"] for row in feed.rows({}) if row["kind"] == "iteration"] for _ in range(4)]

    assert told == [list(range(70, 120)), list(range(20, 70)), list(range(20)), []]


def test_a_feed_tells_each_thing_of_a_run_once(tmp_path: Path) -> None:
    (done,) = simulate(settings_file(tmp_path), ["rollout.prompts=20", "run.iterations=3"], compare=False, report=False)
    directory = RunDir.open(done.run_dir)
    *before, last = directory.rows(HISTORY)
    directory.rewrite(HISTORY, before)
    feed = Feed(directory, directory.config())

    first, second = feed.rows({"usd": 1.0}), feed.rows({"usd": 2.0})
    directory.append(HISTORY, last)
    third = feed.rows({"usd": 3.0})

    validated = [("validation", row.version) for row in directory.validation()]
    iterations, prompts = [("iteration", 0), ("iteration", 1)], [("prompts", 1), ("prompts", 2)]
    seeds, images, money = ("seeds", 1), ("images", validated[-1][1]), ("money", -1)
    assert keys(first) == [("run", 0), *iterations, *prompts, seeds, *validated, images, money]
    assert keys(second) == [money]
    assert keys(third) == [("iteration", 2), ("seeds", 2), money]
    rows = dict(zip(keys([*first, *third]), [*first, *third], strict=True))
    assert rows["run", 0]["label"].startswith("SIMULATED")
    assert [rows["iteration", k]["usd"] for k in range(3)] == [row.measured["usd"] for row in directory.history()]
    assert [rows[key]["at_s"] for key in validated] == [row.at_s for row in directory.validation()]
    shown, selection = rows["prompts", 1], directory.selection(1)
    assert selection
    assert (shown["scored"], shown["dropped"]) == (selection.seeds_scored, selection.seeds_dropped)
    assert (shown["of"], len(shown["prompts"])) == (len(selection.explored), PROMPTS_SHOWN)
    tried = sorted((len(explored.rewards) for explored in selection.explored), reverse=True)
    assert [row["tried"] for row in shown["prompts"]] == tried[:PROMPTS_SHOWN]
    by_id = {explored.prompt: explored.rewards for explored in selection.explored}
    spreads = [float(np.std(by_id[row["id"]])) if by_id[row["id"]] else 0.0 for row in shown["prompts"]]
    assert [row["spread"] for row in shown["prompts"]] == pytest.approx(spreads)


@pytest.mark.parametrize(("known", "shown"), [(0, 0), (2, 2), (5, 4), (40, 2 * PICTURES_SHOWN)])
def test_a_picture_is_among_the_best_or_the_worst_and_not_among_both(known: int, shown: int) -> None:
    found = [
        Picture(prompt="a" * 999, seed=2**53 + n, explored_reward=None, reward=n % 7 if n else None, url="")
        for n in range(known + 1)
    ]

    rows = best_and_worst(found)

    rewards = sorted((picture.reward for picture in found if picture.reward is not None), reverse=True)
    assert [row["reward"] for row in rows] == rewards[: shown // 2] + rewards[known - shown // 2 :]
    assert len({row["seed"] for row in rows}) == shown
    assert all(isinstance(row["seed"], str) for row in rows)  # a browser rounds such integers
    assert all(len(row["prompt"]) == TEXT_SHOWN for row in rows)


def keys(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["kind"], row["id"]) for row in rows]


def lost(**given: Any) -> Recovery:
    return Recovery(**{"at_s": 1.0, "worker": "w", "what": "lost", **given})


def test_figures_for_prometheus_are_in_its_format() -> None:
    row = {"kind": "iteration", "id": 3, "reward_mean": 0.75, "variance_kept": 0.1}

    said = exposition(facts_of(ABOUT | {"name": 'a"\\'}, row, money_row(usd={"spot": 0.5})))

    line = re.compile(r'# (HELP|TYPE) spotlight_\w+ .+|spotlight_\w+\{\w+="([^"\\]|\\.)*"(,\w+="\w*")*\} [-+.\deinf]+')
    assert [each for each in said.splitlines() if not line.fullmatch(each)] == []
    assert 'spotlight_usd_total{run="a\\"\\\\",pool="spot"} 0.5' in said
    assert 'spotlight_iterations_done{run="a\\"\\\\"} 4.0' in said
    assert exposition(Facts(lambda: None)) == ""


def test_kept_seeds_are_compared_with_equal_shares_of_the_same_rewards() -> None:
    """Of two prompts one never pays: the planner gave it few candidates, and the other one more."""
    flat, varied = (0.5, 0.5), (0.0, 1.0, 0.0, 1.0, 0.5, 0.5)
    kept = Kept(prompt=Prompt(id=1, text=""), seeds=(1, 2, 3, 4), explored_rewards=(0.0, 1.0, 0.0, 1.0))
    selection = Selection(
        iteration=0,
        kept=(kept,),
        seeds_scored=8,
        seeds_dropped=0,
        explored=(Explored(prompt=0, rewards=flat), Explored(prompt=1, rewards=varied)),
    )

    found = variances(selection, seed=0)

    assert found["variance_kept"] == 0.25
    assert 0 < found["variance_equal"] < 0.25
    assert variances(selection, seed=0) == found


LIMITATIONS = {
    "none": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""In linear RGB; Machado, Oliveira and Fernandes 2009, severity 1."""
APART = 20.0
"""CIELAB distance of two colours that nobody takes for each other: ten times what is just noticeable."""


@pytest.mark.parametrize("sight", LIMITATIONS)
def test_the_colours_of_lanes_can_be_told_apart_by_everybody(sight: str) -> None:
    shown = ("rollout", "score", "train", "explore", "explore-score", "validate")
    colours = {phase: lab(PHASE_COLOURS[phase], sight) for phase in shown} | {"idle": lab(ALIVE, sight)}

    alike = [pair for pair in combinations(colours, 2) if np.linalg.norm(colours[pair[0]] - colours[pair[1]]) < APART]

    assert alike == []


def lab(colour: str, sight: str) -> Any:
    """CIELAB of a colour as somebody sees it."""
    rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(LIMITATIONS[sight]) @ linear, 0, 1)
    to_xyz = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
    f = np.cbrt(to_xyz @ seen / np.array([0.9505, 1.0, 1.0888]))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_a_thumbnail_is_small_and_the_same_every_time() -> None:
    image = np.random.default_rng(0).integers(0, 255, (1280, 640, 3), dtype=np.uint8)

    assert thumbnail(image) == thumbnail(image)
    assert thumbnail(image).startswith("data:image/jpeg;base64,")
    assert len(thumbnail(image)) < 20_000
    assert thumbnail(image[:16, :32]).startswith("data:image/png;base64,")


def test_the_page_is_mounted_on_a_scheduler_that_already_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed.dashboard.scheduler import applications

    for path in pages():  # another test's run may have prepared this process
        monkeypatch.delitem(applications, path, raising=False)

    async def mount() -> tuple[int, str, str]:
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
            server: Any = scheduler.http_server
            address = f"http://127.0.0.1:{server.port}"
            async with Client(scheduler.address, asynchronous=True) as client:
                await client.register_plugin(PagePlugin())
                found = [await asyncio.to_thread(_get, f"{address}/{path}") for path in (PAGE, "status")]
            return found[0][0], found[0][1], found[1][1]

    status, page, theirs = asyncio.run(mount())

    assert status == 200
    assert "panel-lanes" in page
    assert f'<a href="{PAGE}">' in theirs


def test_the_page_is_below_the_prefix_of_dasks_pages() -> None:
    async def mount() -> dict[str, int]:
        options: Any = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}
        async with Scheduler(**options, http_prefix="/hub/me") as scheduler:
            server: Any = scheduler.http_server
            async with Client(scheduler.address, asynchronous=True) as client:
                await client.register_plugin(PagePlugin())
                paths = ("hub/me/status", f"hub/me/{PAGE}", f"hub/me/individual-{PAGE}-lanes", "hub/me/metrics")
                return {
                    path: (await asyncio.to_thread(_get, f"http://127.0.0.1:{server.port}/{path}"))[0] for path in paths
                }

    assert set(asyncio.run(mount()).values()) == {200}


def test_a_page_that_is_open_goes_on_with_the_next_run() -> None:
    runs = [Dispatcher(Rules()), Dispatcher(Rules())]
    facts = Facts(lambda: runs[0], clock=lambda: 100.0)
    for number, dispatch in enumerate(runs):
        dispatch.state.journal.joined(0.0, "tcp://a", f"spot-{number}", "spot")
        for _ in range(3 - number):
            label = Label(pool="spot", phase="rollout", iteration=0)
            dispatch.state.journal.span(("rollout", 0), label, None, "tcp://a", 1.0, 2.0, "done")
    shown = Lanes(facts)
    shown.update()
    before = list(shown._done.data["worker"])

    runs.pop(0)
    shown.update()

    assert before == ["spot-0"] * 3
    assert list(shown._done.data["worker"]) == ["spot-1"] * 2


def test_when_a_run_is_over_the_page_says_so_and_shows_what_it_did() -> None:
    live: list[Dispatcher] = [Dispatcher(Rules())]
    facts, journal = Facts(lambda: live[0] if live else None, clock=lambda: 1e6), live[0].state.journal
    for name in ("spot-0", "spot-1"):
        journal.joined(0.0, f"tcp://{name}", name, "spot")
    label = Label(pool="spot", phase="rollout", iteration=0)
    journal.span(("rollout", 0), label, None, "tcp://spot-0", 1.0, 2.0, "done")
    journal.left(3.0, "tcp://spot-1", "lost")
    facts.take([ABOUT, money_row(at_s=60.0)])

    live.clear()
    lanes, pools = Lanes(facts), Pools(facts)
    lanes.update()
    pools.update()

    assert list(lanes._done.data["worker"]) == ["spot-0"]
    assert list(lanes._losses.data["at"]) == [3.0]
    assert max(lanes._alive.data["stop"]) == lanes._end() == 60.0
    assert list(pools._steps.data["spot"]) == [1, 2, 1, 0, 0]
    assert "this run is over" in text.cards(facts)
    assert "0 + 0" in text.cards(facts)
    assert 'spotlight_preemptions_total{run="a"} 1.0' in exposition(facts)


def _get(url: str) -> tuple[int, str]:
    with urlopen(url, timeout=60) as answer:
        return answer.status, answer.read().decode()


# During a live run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run of pairs of spot workers, one of which was killed; it goes on until the tests are done with it."""
    overrides = ["run.iterations=500", "strategy.widths=[2]", "pools.spot.workers=4", "run.validate_every=2"]
    run = Run(settings_file(tmp_path_factory.mktemp("shown")), overrides).start()
    try:
        client = client_of(run)

        def found() -> list[str]:
            workers = client.scheduler_info(n_workers=-1)["workers"].items()
            return [address for address, facts in workers if facts["name"] == "spot-1"]

        wait_for(lambda: len(run.directory.history()) > 1)
        os.kill(process_of(wait_for(found)[0]), signal.SIGKILL)
        wait_for(lambda: run.status.preemptions)
        yield run
    finally:
        run.stop()
        with suppress(Stopped):
            run.wait()


def test_figures_of_a_run_are_at_metrics_and_its_plots_in_the_list_for_jupyterlab(run: Run) -> None:
    base = run.status.dashboard.removesuffix("/status")

    metrics, plots = _get(f"{base}/metrics")[1], json.loads(_get(f"{base}/individual-plots.json")[1])

    assert f'spotlight_workers{{run="{run.directory.path.name}",pool="reserved"}} 1.0' in metrics
    assert f'spotlight_preemptions_total{{run="{run.directory.path.name}"}} 1.0' in metrics
    assert "spotlight_variance_kept" in metrics
    assert {f"/individual-{PAGE}-{name}" for name in ("lanes", "pools", "learning", "planner", "images")} <= set(
        plots.values()
    )


def test_the_best_and_the_worst_kept_seeds_have_pictures(run: Run) -> None:
    rows = {row["kind"]: row for row in Feed(run.directory, run.config).rows({"at_s": time.time()})}
    selection = run.directory.selection(0)

    assert selection
    assert len(pictures(run.directory, selection)) == 12
    rewards = [picture["reward"] for picture in rows["seeds"]["pictures"]]
    assert len(rewards) == 2 * PICTURES_SHOWN
    assert rewards == sorted(rewards, reverse=True)
    assert all(picture["url"].startswith("data:image/png") for picture in rows["seeds"]["pictures"])
    assert set(rows) == {*ROWS_MAX, "money"}


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
def test_in_a_browser_lanes_appear_a_killed_worker_shows_and_nothing_complains(run: Run, tmp_path: Path) -> None:
    seen = asyncio.run(_look(run.status.dashboard.replace("/status", f"/{PAGE}"), tmp_path))

    assert seen["errors"] == []
    assert {"reserved-0", "spot-0", "spot-1", "spot-2", "spot-3"} <= set(seen["workers"])
    assert seen["joints"] > 0
    assert seen["losses"] == ["spot-1: lost without a notice"]
    assert seen["too wide"] == []
    assert seen["pictures"] > 0


async def _look(url: str, directory: Path) -> dict[str, Any]:
    async with browser() as page:
        too_wide = [width_px for width_px in WIDTHS_PX if not await _fits(page, url, width_px, directory)]
        await page.until(f"{column('lanes-done', 'worker')}.length > 20")
        return {
            "workers": await page.js(column("lanes-done", "worker")),
            "losses": await page.js(column("lanes-losses", "what")),
            "joints": await page.js(f"{column('lanes-joints', 'start')}.length"),
            "pictures": await page.js(f"({IMAGES})(document)"),
            "too wide": too_wide,
            "errors": page.errors,
        }


async def _fits(page: Page, url: str, width_px: int, directory: Path) -> bool:
    """Whether the page is no wider than its window, no text is cut, and Dask's navigation hides nothing."""
    await page.open(url, width_px=width_px)
    await page.until("document.querySelectorAll('section').length == 7")
    await page.picture(directory / f"{width_px}.png")
    return bool(await page.js(f"document.documentElement.scrollWidth <= window.innerWidth && {UNCUT}"))


def column(source: str, name: str) -> str:
    """In the page, a column of what a plot shows."""
    return f"[...Bokeh.documents[0].get_model_by_name('{source}').get_array('{name}')]"


IMAGES = (
    "function count(root) { let n = root.querySelectorAll('img[src^=data]').length; "
    "for (const one of root.querySelectorAll('*')) if (one.shadowRoot) n += count(one.shadowRoot); return n; }"
)
"""Bokeh puts what it shows into shadow trees, one within the other."""
WIDTHS_PX = (480, 1050, 1920)
"""At 1,050 px Dask's navigation has two rows."""
UNCUT = (
    "(function all(root) { return [...root.querySelectorAll('*')].flatMap(one => "
    "[one, ...(one.shadowRoot ? all(one.shadowRoot) : [])]); })(document)"
    ".filter(one => one.matches('.bk-label, .card, td, th, section'))"
    ".every(one => one.getBoundingClientRect().right <= document.querySelector('section').getBoundingClientRect().right"
    " && one.getBoundingClientRect().top >= document.querySelector('.navbar').getBoundingClientRect().bottom)"
)
"""Whether all names of legends and all cards are within their sections, and below the navigation."""
