"""The text and pictures of the page as HTML; text from others is escaped.

Bokeh puts each piece into a shadow tree of its own, so each has its style with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from cluster.dashboard.facts import WHAT, Facts, Money, Recovery, median_work_s
from spotlight.market.ledger import AT_RESERVED_PRICES
from spotlight.report.palette import FAINT, INK, LOST, PHASE_COLOURS, RULE

RECOVERIES_SHOWN = 8
BASE = f"""
:host, .bk-clearfix {{ font-family: system-ui, sans-serif; color: {INK}; width: 100%; }}
"""
CARDS = f"""{BASE}
.cards {{ display: flex; flex-wrap: wrap; gap: 6px 34px; align-items: flex-end; }}
.card b {{ display: block; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }}
.card, .card * {{ overflow-wrap: anywhere; }}
.card span {{ font-size: 12px; color: {FAINT}; }}
.name b {{ font-size: 17px; }}
.name i {{ color: #fff; background: {LOST}; border-radius: 3px; padding: 2px 7px; font: 600 11px sans-serif; }}
.waits b {{ color: {LOST}; }}
"""
TABLE = f"""{BASE}
:host {{ font-size: 13px; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th {{ text-align: left; font-weight: 500; font-size: 12px; color: {FAINT}; padding: 3px 10px 3px 0; }}
td {{ padding: 4px 10px 4px 0; border-top: 1px solid {RULE}; overflow-wrap: anywhere; }}
td:first-child, td.number {{ white-space: nowrap; }}
td:last-child, th:last-child {{ padding-right: 0; }}
.number {{ text-align: right; }}
p {{ margin: 4px 0 8px; color: {FAINT}; }}
p b {{ color: {INK}; }}
"""
IMAGES = f"""{BASE}
:host {{ font-size: 12px; }}
h3 {{ font-size: 12px; font-weight: 500; color: {FAINT}; margin: 8px 0 5px; }}
.row {{ display: grid; grid-template-columns: repeat(6, minmax(0, 1fr)); gap: 8px; }}
figure {{ margin: 0; min-width: 0; }}
img, .none {{ width: 100%; aspect-ratio: 2; object-fit: contain; background: {RULE}; display: block; }}
img {{ image-rendering: pixelated; }}
figcaption {{ display: flex; justify-content: space-between; gap: 6px; padding-top: 2px; }}
figcaption span {{ overflow: hidden; text-overflow: ellipsis; white-space: nowrap; color: {FAINT}; }}
figcaption b {{ font-weight: 600; font-variant-numeric: tabular-nums; }}
"""


def cards(facts: Facts) -> str:
    """The run in a few numbers."""
    run = facts.latest("run")
    if not run and not facts.lives():
        return '<div class="cards"><div class="card name"><b>No run of Spotlight on this scheduler</b></div></div>'
    iteration, money = facts.latest("iteration"), facts.money[-1] if facts.money else None
    done = iteration["id"] + 1 if iteration else 0
    counts = Counts(facts)
    spent = sum(money.usd.values()) if money else 0.0
    label = f" <i>{escape(run['label'])}</i>" if run.get("label") else ""
    shown = [
        _card(f"{escape(run.get('name', 'a run'))}{label}", counts.phase, kind="name"),
        _card(f"{done} of {run.get('iterations', '?')}", "iterations"),
        _card(" + ".join(map(str, counts.alive.values())), f"{' + '.join(counts.alive)} workers now"),
        _card(f"{counts.busy} of {counts.workers}", "at work"),
        _card(_usd(facts.usd_per_h()), "per hour now"),
        _card(_usd(spent), "spent"),
        _card(*_at_reserved_prices(money)),
        _card(str(counts.preemptions), "spot workers preempted"),
        _card(_score(facts), "validation"),
    ]
    if counts.waiting_for:
        shown.append(_card(escape(" or ".join(counts.waiting_for)), "work waits, and no worker is there", kind="waits"))
    return f'<div class="cards">{"".join(shown)}</div>'


class Counts:
    """Numbers of workers and tasks now, from one look at the dispatcher."""

    def __init__(self, facts: Facts) -> None:
        doing = facts.doing()
        self.workers = len(doing)
        pools = dict.fromkeys(("reserved", "spot", *sorted(each.pool for each in doing)))
        self.alive = {pool: sum(each.pool == pool for each in doing) for pool in pools}
        phases = [re.sub(r"-r\d+$", "", each.phase) for each in doing if each.phase]
        self.busy = len(phases)
        self.running = {phase: phases.count(phase) for phase in dict.fromkeys(sorted(phases))}
        self.phase = escape(", ".join(f"{phase} × {count}" for phase, count in self.running.items()))
        self.phase = self.phase or ("nothing to do" if facts.has_run else "this run is over")
        lives = facts.lives()
        self.preemptions = sum(life.pool == "spot" and life.was_taken for life in lives)
        self.waiting_for = facts.missing_pools()


def _card(value: str, name: str, kind: str = "") -> str:
    return f'<div class="card {kind}"><b>{value}</b><span>{name}</span></div>'


def _at_reserved_prices(money: Money | None) -> tuple[str, str]:
    """The price of useful work at reserved prices, known for finished iterations only, beside what they cost."""
    if not money or not money.usd_reserved_only:
        return "–", AT_RESERVED_PRICES
    return _usd(money.usd_reserved_only), f"{AT_RESERVED_PRICES}, beside {_usd(money.ledger_usd)} by then"


def _usd(value: float) -> str:
    return f"${value:.4f}" if 0 < value < 0.1 else f"${value:,.2f}"


def _score(facts: Facts) -> str:
    rows = facts.rows("validation")
    if not rows:
        return "–"
    gain = f" ({rows[-1]['score'] - rows[0]['score']:+.3f})" if len(rows) > 1 else ""
    return f"{rows[-1]['score']:.3f}{gain}"


def recovery_table(found: Sequence[Recovery], zero_s: float) -> str:
    """The latest losses, newest first."""
    if not found:
        return "<p>No worker was lost yet.</p>"
    half = median_work_s(found)
    said = f"<p>Work went on after <b>{half:.2f} s</b> in the median.</p>" if half is not None else ""
    rows = "".join(
        f"<tr><td>{_clock(each.at_s - zero_s)}</td><td>{escape(each.worker)} {each.what}</td>"
        f'<td class="number">{each.requests or "–"}</td><td class="number">{_seconds(each.work_s, each.requests)}</td>'
        f'<td class="number">{_seconds(each.back_s, each.what != WHAT["engine lost"])}</td></tr>'
        for each in list(found)[: -RECOVERIES_SHOWN - 1 : -1]
    )
    heads = (
        '<th class="number">requests</th><th class="number">next step after</th><th class="number">replaced after</th>'
    )
    return f"{said}<table><tr><th>at</th><th>worker</th>{heads}</tr>{rows}</table>"


def _seconds(value: float | None, wanted: int = 1) -> str:
    return f"{value:.2f} s" if value is not None else "–" if not wanted else "…"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def gallery(facts: Facts) -> str:
    """The newest validation images, and the best and the worst kept seeds of the latest iteration."""
    parts = []
    images, seeds = facts.latest("images"), facts.latest("seeds")
    if images.get("images"):
        parts += [f"<h3>validation of weights version {int(images['id'])}</h3>", _row(images["images"])]
    pictures = seeds.get("pictures") or []
    half = len(pictures) // 2
    for name, shown in (("best", pictures[:half]), ("worst", pictures[half:])):
        if shown:
            parts += [f"<h3>{name} kept seeds of iteration {int(seeds['id'])}</h3>", _row(shown)]
    return "".join(parts) or "<h3>No image yet.</h3>"


def _row(pictures: Iterable[Mapping[str, Any]]) -> str:
    return f'<div class="row">{"".join(map(_figure, pictures))}</div>'


def _figure(picture: Mapping[str, Any]) -> str:
    text, reward, url = str(picture["prompt"]), picture["reward"], str(picture["url"])
    image = '<div class="none"></div>'
    if re.fullmatch(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+", url):
        image = f'<img src="{url}" alt="{escape(text)}">'
    said = "no reward" if reward is None else f"{reward:.2f}"
    title = f"{text}, seed {picture['seed']}" if "seed" in picture else text
    return (
        f'<figure title="{escape(title)}">{image}<figcaption><span>{escape(target(text))}</span><b>{said}</b>'
        "</figcaption></figure>"
    )


def target(text: str) -> str:
    """The quoted text that a prompt asks for, or else the whole prompt."""
    parts = text.split('"')
    return parts[1] if len(parts) > 2 else text


def chips() -> str:
    """What the colours of the lanes mean."""
    named = [
        (PHASE_COLOURS[phase], phase) for phase in ("rollout", "score", "train", "explore", "explore-score", "validate")
    ]
    chips = [f'<i style="background:{colour}"></i>{name}' for colour, name in named]
    marks = [f'<em style="color:{LOST}">✖</em> preempted', "<u></u> one gang"]
    return "".join(f"<span>{chip}</span>" for chip in (*chips, *marks))
