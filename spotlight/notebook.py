"""What a notebook shows of a run: a live view, pictures, tables.

The view is updated by a task on the kernel's own event loop, not by a thread, whose output kernels lose. It only
reads: a kernel may end at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from spotlight.files import whole
from spotlight.market.ledger import AT_RESERVED_PRICES
from spotlight.records import SpotlightError, WorkerLife
from spotlight.report.money import dollars
from spotlight.report.palette import FAINT, INK, LOST, RULE
from spotlight.status import HINT_AFTER_S, Status
from spotlight.store.rundir import RunDir
from spotlight.store.thumbnails import Picture, pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spotlight.run import Run

REFRESH_S = 1.0
DPI = 110
STATE_COLOURS = {"running": "#1c8a5a", "finished": "#3f7fd6", "failed": LOST}
STYLE = f"""<style>
.spotlight-run {{ font-family: system-ui, sans-serif; color: {INK}; border: 1px solid {RULE}; border-radius: 6px;
  padding: 10px 14px; max-width: 900px; background: #fff; }}
.spotlight-run b {{ font-weight: 600; font-variant-numeric: tabular-nums; }}
.spotlight-run .facts {{ display: flex; flex-wrap: wrap; gap: 4px 26px; font-size: 13px; margin-top: 6px; }}
.spotlight-run .facts span {{ color: {FAINT}; }}
.spotlight-run .trouble {{ color: {LOST}; font-size: 13px; margin-top: 6px; overflow-wrap: anywhere; }}
.spotlight-run .bar {{ height: 6px; border-radius: 3px; background: {RULE}; margin: 8px 0 2px; }}
.spotlight-run .bar div {{ height: 6px; border-radius: 3px; background: #43308f; }}
.spotlight-images {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(96px, 1fr)); gap: 8px;
  max-width: 900px; font: 12px system-ui, sans-serif; color: {INK}; }}
.spotlight-images img {{ width: 100%; image-rendering: pixelated; display: block; }}
</style>"""

_views: set[asyncio.Task[None]] = set()
"""Kept here, because an event loop does not keep its tasks."""


def show(run: Run) -> None:
    """Display a run, and update what is displayed while the run goes on."""
    from IPython.display import display

    handle = display(_views_of(run), raw=True, display_id=True)
    if not run.alive or handle is None:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # not in a notebook, but in a terminal
        return
    task = loop.create_task(_follow(run, handle))
    _views.add(task)
    task.add_done_callback(_views.discard)


async def _follow(run: Run, handle: Any) -> None:
    """Update a view until the run ends, or cannot be read: nobody would see an error of this task."""
    alive = True
    while alive:
        await asyncio.sleep(REFRESH_S)
        try:
            alive = run.alive
            views = _views_of(run)
        except SpotlightError as error:
            alive, said = False, f"{error}; this view is updated no more: show the run again"
            views = {"text/html": f'{STYLE}<div class="spotlight-run">{_line(said)}</div>', "text/plain": said}
        handle.update(views, raw=True)


def _views_of(run: Run) -> dict[str, str]:
    """{MIME type: the view}, for a notebook and for a terminal."""
    return {"text/html": describe(run), "text/plain": repr(run)}


def describe(run: Run) -> str:
    """A run in a few lines of HTML."""
    if run.state == "new":
        return f'{STYLE}<div class="spotlight-run"><b>{escape(run.config.run.name)}</b>: not started yet</div>'
    status = run.status
    hint = run.how_to_start(status.waiting_for) if status.waiting_for and status.elapsed_s > HINT_AFTER_S else ""
    share = status.iteration / status.iterations
    facts = "".join(f"<div><span>{escape(name)}</span> <b>{escape(value)}</b></div>" for name, value in _facts(status))
    link = f' · <a href="{escape(status.live_page)}" target="_blank">live page</a>' if status.dashboard else ""
    colour = STATE_COLOURS.get(status.state, FAINT)
    return (
        f'{STYLE}<div class="spotlight-run"><b>{escape(Path(status.run_dir).name)}</b> '
        f'<b style="color: {colour}">{escape(status.state)}</b> {escape(status.phase)}{link}'
        f'<div class="bar"><div style="width: {share:.1%}"></div></div><div class="facts">{facts}</div>'
        f"{''.join(map(_line, filter(None, (*_troubles(status), hint))))}</div>"
    )


def _line(trouble: str) -> str:
    return f'<div class="trouble">{escape(trouble)}</div>'


def _troubles(status: Status) -> list[str]:
    """Problems that a person may have to fix."""
    refused = [f"worker {name} takes no part: {reason}" for name, reason in status.refused.items()]
    return [status.error] if status.error else refused


def _facts(status: Status) -> list[tuple[str, str]]:
    scores = [status.scores[version] for version in sorted(status.scores)]
    workers = ", ".join(f"{count} {pool}" for pool, count in sorted(status.workers.items()))
    return [
        ("iterations", f"{status.iteration} of {status.iterations}"),
        ("validation", " → ".join(f"{score:.3f}" for score in (scores[:1] + scores[1:][-1:])) or "–"),
        ("reward", "–" if status.reward is None else f"{status.reward:.3f}"),
        ("workers", workers or "–"),
        *([("waiting for workers", " and ".join(status.waiting_for))] if status.waiting_for else []),
        ("preempted", str(status.preemptions)),
        ("spent", dollars(status.usd)),
        (AT_RESERVED_PRICES, _at_reserved_prices(status)),
        *([("not real", status.emulated)] if status.emulated else []),
    ]


def _at_reserved_prices(status: Status) -> str:
    """What useful seconds cost at reserved prices: known of finished iterations only."""
    if not status.usd_reserved_only:
        return "–"
    until = f" by the end of iteration {status.iteration - 1}" if status.state == "running" and status.iteration else ""
    return dollars(status.usd_reserved_only) + until


def workers_frame(lives: Iterable[WorkerLife]) -> pd.DataFrame:
    """A table of workers, in the order in which they joined."""
    rows = [
        {
            "worker": life.worker,
            "pool": life.pool,
            "alive": life.left_s is None,
            "joined": pd.Timestamp(life.joined_s, unit="s", tz="UTC").floor("ms"),
            "seconds": None if life.left_s is None else life.left_s - life.joined_s,
            "left": life.reason,
        }
        for life in sorted(lives, key=lambda life: life.joined_s)
    ]
    return pd.DataFrame(rows, columns=["worker", "pool", "alive", "joined", "seconds", "left"])


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture that a notebook shows."""

    figure: Figure

    def _repr_png_(self) -> bytes:
        from spotlight.report.pictures import save

        file = BytesIO()
        save(self.figure, file, dpi=DPI, bbox_inches="tight")
        return file.getvalue()


def plot(run_dir: str | Path, what: str) -> Plot:
    """One of the report's pictures, drawn from the run so far.

    Raises:
        SpotlightError: there is no such picture, or no data for it yet.
    """
    from spotlight.report.facts import read
    from spotlight.report.pictures import draw

    known = ("reward", "timeline", "before-after")
    if what not in known:
        raise SpotlightError(f"there is no plot {what!r}; there are {', '.join(map(repr, known))}")
    figure = draw(read(run_dir), what)
    if figure is None:
        raise SpotlightError(f"{run_dir}: has nothing to draw for {what!r} yet: try again when the run is further")
    return Plot(figure)


class Images(Sequence[Picture]):
    """Pictures that a notebook shows; a sequence of `Picture`."""

    def __init__(self, found: Iterable[Picture]) -> None:
        self._found = tuple(found)

    def __repr__(self) -> str:
        return f"<{len(self)} pictures>"

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: Any) -> Any:
        found = self._found[index]
        return Images(found) if isinstance(index, slice) else found

    def _repr_html_(self) -> str:
        return f'{STYLE}<div class="spotlight-images">{"".join(map(_figure, self._found))}</div>'


def _figure(picture: Picture) -> str:
    reward = "no reward" if picture.reward is None else f"{picture.reward:.2f}"
    said = f"{escape(picture.prompt)}, seed {picture.seed}"
    return f'<div title="{said}"><img src="{escape(picture.url)}" alt="{said}"><b>{reward}</b></div>'


def images(run: RunDir, iteration: int | None) -> Images:
    """The pictures of an iteration.

    Raises:
        SpotlightError: there are none.
    """
    done = len(run.history())
    k = done - 1 if iteration is None else whole(iteration, "iteration")
    selection = run.selection(k) if k >= 0 else None
    if k < 0 or (selection is None and k >= done):
        said = f"iteration {k}: expected 0 to {done - 1}" if done else "no iteration is finished yet"
        raise SpotlightError(f"{run.url}: {said}, so there are no pictures")
    if selection is None and run.config().strategy.exploration != "off":
        where = run.objects.where(run.selection_key(k))
        raise SpotlightError(f"{where}: is missing, and says which seeds were kept: restore it, or do without pictures")
    if selection is None:
        raise SpotlightError(
            f"{run.url}: no seeds are recorded for iteration {k}: only runs that explore record "
            "them: look at validation instead, run.plot('before-after')"
        )
    if run.simulated == "modelled":
        raise SpotlightError(f"{run.url}: learning was modelled in this simulated run, so there are no pictures")
    found = pictures(run, selection)
    if not found and k < done:
        raise SpotlightError(
            f"{run.latents_url}: the scores of iteration {k} are missing or damaged there, and pictures are kept with "
            "them: restore them, or look at another iteration"
        )
    return Images(found)
