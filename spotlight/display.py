"""What a person sees in the terminal while a run goes on, and the summary at its end."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from spotlight.market.ledger import AT_RESERVED_PRICES
from spotlight.report.money import dollars, emulated
from spotlight.run import Run
from spotlight.status import HINT_AFTER_S, Status
from spotlight.store import resuming
from spotlight.store.accounts import read_lives
from spotlight.store.rundir import RunDir

if TYPE_CHECKING:
    from spotlight.simulation import Outcome

REFRESH_S = 0.5
FILE_WIDTH = 240
"""Characters of a line in a file or a pipe."""
SCORES_MAX = 5
"""Most validations shown; of more, the first and the last ones."""


def terminal() -> Console:
    """A console that prints text as it is: brackets in a path, or in a worker's message, are no markup.

    Lines may be long in a file or a pipe.
    """
    is_terminal = sys.stdout.isatty() and not os.environ.get("COLUMNS")  # whose width may change
    width = None if is_terminal else shutil.get_terminal_size((FILE_WIDTH, 24)).columns  # COLUMNS=0 is no width
    return Console(markup=False, emoji=False, width=width)


def follow(run: Run, console: Console | None = None) -> None:
    """Start a run and show it until it ends; Ctrl-C stops it after the steps in flight.

    So do SIGTERM (docker stop, scancel) and SIGHUP (a closed terminal).

    Raises:
        Stopped, SpotlightError: as `Run.wait` does.
    """
    console = console or terminal()
    with _asked_to_stop(run) as asked:
        run.start()
        try:
            console.print(f"run directory   {run.directory.url}", soft_wrap=True)
            with _Display(console) as display:
                _watch(run, display, console, asked)
        finally:
            run.stop()  # whatever ended the display: a run does not go on unseen
        run.wait()
    console.print(summary_table(run.directory))
    written = run.directory.config().run.report
    report = run.directory.path / "report.html" if written else f"spotlight report {run.directory.url}"
    console.print(f"report          {report}", soft_wrap=True)


@contextmanager
def _asked_to_stop(run: Run) -> Iterator[list[int]]:
    """Yields a list to which the numbers of SIGINT (Ctrl-C), SIGTERM and SIGHUP are appended when they arrive.

    The first one only is noted, without an exception, since Python drops an exception that a handler raises within a
    destructor. A later Ctrl-C raises KeyboardInterrupt, and so does any signal if the run is not alive; SIGTERM may
    come twice, from Slurm and from its batch script. Signals that `nohup`, or a script's ``&``, ignores stay ignored.
    """
    asked: list[int] = []
    terminals = [stream for stream in (0, 1, 2) if os.isatty(stream)]

    def hear(number: int, frame: object) -> None:
        if number == signal.SIGHUP:  # there is no terminal left to write to
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in terminals:
                os.dup2(nowhere, stream)
            os.close(nowhere)
        asked.append(number)
        if not run.alive or (len(asked) > 1 and number == signal.SIGINT):
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, hear) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(run: Run, display: _Display, console: Console, asked: Sequence[int]) -> None:
    stopping, hint_s = False, time.monotonic() + HINT_AFTER_S
    while run.alive:
        if asked and not stopping:
            stopping = True
            run.stop()
            console.print(
                f"stopping after the steps in flight; Ctrl-C again leaves at once; either way, "
                f"`{run.resume_command}` goes on",
                soft_wrap=True,
            )
        status = run.status
        if not status.waiting_for:
            hint_s = max(hint_s, time.monotonic() + HINT_AFTER_S)  # once told, never again
        elif time.monotonic() > hint_s and (hint := run.how_to_start(status.waiting_for)):
            hint_s = inf
            console.print(hint, soft_wrap=True)
        display.show(status)
        time.sleep(REFRESH_S)


def follow_simulation(begin: Callable[[Callable[[str, int, float], None]], Iterator[Outcome]]) -> None:
    """Show simulated runs as they go, then side by side; if one cannot go on, those before it.

    Args:
        begin: starts them; it is given the function to call with their progress.
    """
    console, outcomes = terminal(), []
    try:
        with console.status("simulating") as status:

            def follow(name: str, iteration: int, hours: float) -> None:
                status.update(Text(f"simulating {name}: iteration {iteration}, {hours:.2f} h"))

            for outcome in begin(follow):
                outcomes.append(outcome)
                console.print(f"{outcome.name:<40} {outcome.run_dir}", soft_wrap=True, highlight=False)
    finally:
        if outcomes:
            console.print(comparison(outcomes, console.width))


def comparison(outcomes: Sequence[Outcome], width: int = 80) -> Table:
    """Simulated runs, a row each; if they do not fit the width, the last columns are left out."""
    columns = 7 if width >= 78 else 5 if width >= 62 else 3
    to_target = " to\ntarget" if any(outcome.target_h is not None for outcome in outcomes) else ""
    modelled = any(outcome.learning == "modelled" for outcome in outcomes)
    targets = {outcome.target for outcome in outcomes if outcome.target is not None}
    missed = [] if to_target else sorted(targets)
    unvalidated = max((outcome.unvalidated for outcome in outcomes), default=0)
    table = Table(
        title="SIMULATED: the dispatcher and the loop are the live ones,\ndurations are a cost model's, "
        + ("and scores those of a model of learning" if modelled else "and the embedded model was trained"),
        caption="seeds scored: per prompt explored and iteration"
        + ("; >: had not reached the target" if to_target else "")
        + (f"; score: as last validated, up to {unvalidated} iterations before the end" if unvalidated else "")
        + "".join(f"; nobody reached the target of {target:g}" for target in missed)
        + ("; a wider terminal shows more" if columns < 7 else ""),
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("strategy", min_width=20)
    headings = (f"hours{to_target}", f"USD{to_target}", "score", "iter-\nations", "pre-\nempted")
    for heading in (*headings, "spot\nbusy", "seeds\nscored")[:columns]:
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        short = "> " if to_target and outcome.target_h is None else ""
        cells = (
            short + _three_digits(outcome.hours if outcome.target_h is None else outcome.target_h),
            short + _three_digits(outcome.usd if outcome.target_usd is None else outcome.target_usd),
            f"{outcome.score:.3f}",
            str(outcome.iterations),
            str(outcome.preemptions),
            _percent(outcome.spot_utilisation),
            f"{outcome.seeds_scored:.1f}",
        )
        table.add_row(outcome.name, *cells[:columns])
    return table


def _three_digits(value: float) -> str:
    """At least three digits: a short run costs cents and takes minutes."""
    return f"{value:#.3g}" if value < 99.95 else f"{value:,.0f}"


class _Display:
    """A live panel on a terminal; elsewhere, a line per finished iteration."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("iterations", total=None)
        is_terminal = console.is_terminal and console.file.isatty()  # FORCE_COLOR alone makes the former true
        is_live = is_terminal and not console.is_dumb_terminal  # there (TERM=dumb), nothing can be written anew
        self._live = Live(console=console, refresh_per_second=4) if is_live else None
        self._dashboard = ""
        self._said: tuple[int, int, tuple[str, ...]] = (-1, 0, ())
        self._refused: set[str] = set()

    def __enter__(self) -> _Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show(self, status: Status) -> None:
        if status.dashboard and not self._dashboard:
            self._dashboard = status.dashboard
            self._console.print(f"live page       {status.live_page}", soft_wrap=True)
        for name, reason in status.refused.items():
            if name not in self._refused:
                self._refused.add(name)
                self._console.print(f"worker {name} takes no part: {reason}", soft_wrap=True)
        self._bar.update(self._task, completed=status.iteration, total=status.iterations)
        if self._live:
            self._live.update(Group(self._bar, _facts(status)))
        elif self._said != (said := (status.iteration, len(status.scores), status.waiting_for)):
            self._said = said
            if status.waiting_for:
                self._console.print(_waiting(status), soft_wrap=True)
            self._console.print(_line(status), soft_wrap=True)


def status_table(status: Status) -> Table:
    """How a run stands."""
    table = Table(title=Path(status.run_dir).name, show_header=False)
    table.add_row("state", f"{status.state} {status.phase}".strip())
    if status.error:
        table.add_row("", status.error)
    table.add_row("iterations", f"{status.iteration} of {status.iterations}")
    table.add_row("validation", _scores(status))
    table.add_row("workers", ", ".join(f"{count} {pool}" for pool, count in sorted(status.workers.items())) or "-")
    if status.waiting_for:
        table.add_row("waiting for workers", " and ".join(status.waiting_for))
    table.add_row("preemptions", str(status.preemptions))
    table.add_row("cost", dollars(status.usd))
    if status.dashboard:
        table.add_row("live page", status.live_page)
    if status.emulated:
        table.add_row("", status.emulated)
    return table


def _facts(status: Status) -> Table:
    table = Table.grid(padding=(0, 2))
    running = ", ".join(f"{phase} x {count}" for phase, count in sorted(status.running.items())) or "-"
    workers = ", ".join(f"{count} {pool}" for pool, count in sorted(status.workers.items())) or (
        "starting" if status.state == "starting" else "-"
    )
    waiting = f" ({_waiting(status)})" if status.waiting_for else ""
    table.add_row("phase", status.phase, "running", running + waiting)
    table.add_row("reward", _number(status.reward), "validation", _scores(status))
    table.add_row("workers", workers, "preemptions", str(status.preemptions))
    table.add_row("rollout window", _window(status), "spot workers worth renting", _worth(status))
    table.add_row("spot utilisation", _percent(status.spot_utilisation), "cost", dollars(status.usd))
    if status.emulated:
        table.add_row("", status.emulated)
    return table


def _waiting(status: Status) -> str:
    return f"waiting for workers: {' and '.join(status.waiting_for)}"


def _line(status: Status) -> str:
    return (
        f"{status.elapsed_s:6.1f} s  iteration {status.iteration}/{status.iterations}  {status.phase}  "
        f"reward {_number(status.reward)}  validation {_scores(status)}  "
        f"spot utilisation {_percent(status.spot_utilisation)}  {dollars(status.usd)}  preemptions {status.preemptions}"
    )


def _window(status: Status) -> str:
    """The rollout window of reserved workers, and how long training then waited for spot workers."""
    if status.window_s is None:
        return "-"
    return f"{status.window_s:.1f} s (then waited {_number(status.train_wait_s)} s)"


def _worth(status: Status) -> str:
    return "-" if status.spot_worth_renting is None else str(status.spot_worth_renting)


def _scores(status: Status) -> str:
    scores = [f"{score:.3f}" for _, score in sorted(status.scores.items())]
    return " -> ".join(scores if len(scores) <= SCORES_MAX else [scores[0], "...", *scores[-3:]]) or "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def summary_table(run: RunDir) -> Table:
    """The end of a run in a few lines."""
    summary = run.summary()
    assert summary
    table = Table(title="Spotlight", show_header=False)
    gain = summary.score_after - summary.score_before
    table.add_row("validation score", f"{summary.score_before:.3f} -> {summary.score_after:.3f}  ({gain:+.3f})")
    early = f" of {run.config().run.iterations}: {why}" if (why := resuming.ended_early(run)) else ""
    table.add_row("iterations", f"{summary.iterations}{early}")
    if count := run.unscored():
        share = f"{count} of {summary.iterations} iterations"
        table.add_row("explored for nothing", f"{share}: no seed was scored before training ended")
    first = "" if summary.first_image_s is None else f" (first image after {_number(summary.first_image_s)} s)"
    table.add_row("wall time", f"{summary.wall_s:.1f} s{first}")
    alone = dollars(summary.usd_reserved_only)
    table.add_row("cost", f"{dollars(summary.usd)}; {AT_RESERVED_PRICES}: {alone}")
    if label := emulated(run.config(), run.simulated):
        table.add_row("", label)
    table.add_row("preemptions survived", str(summary.preemptions))
    if reserved := sum(life.pool == "reserved" and life.was_taken for life in read_lives(run)):
        table.add_row("reserved workers lost", f"{reserved}, and survived")
    return table
