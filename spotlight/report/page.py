"""Writes the page that explains a run: one HTML file that needs no network and no server.

What is missing is said on top, and its section is left out.
"""

from __future__ import annotations

import base64
import html
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pandas as pd
from bokeh.embed import components
from bokeh.models import Model
from bokeh.resources import Resources

from spotlight.config import Config, ModelSection, PaceSection, PoolSection
from spotlight.device.learning_model import MODEL
from spotlight.market.ledger import AT_RESERVED_PRICES, Ledger, spot_utilisation
from spotlight.report.facts import LANES_MAX, Facts, read
from spotlight.report.money import bought, dollars, rows, simulation
from spotlight.report.palette import FAINT, INK, PHASE_COLOURS, RULE
from spotlight.report.pictures import write_pictures
from spotlight.report.plots import money_plot, reward_plot, spending_plot, timeline_plot
from spotlight.store.accounts import alive_s
from spotlight.store.objects import atomic_write
from spotlight.store.rundir import RunDir

METRICS = {
    "reward_mean": "reward of the iteration's samples",
    "reward_std": "their spread: what the advantage lives on",
    "explored_reward_mean": "reward of all seeds tried",
    "explored_reward_std": "their spread",
    "rank_correlation": "Spearman, explored against regenerated rewards: does stale ranking hold? 1 is perfect, as "
    "where iteration 0 was explored with its own weights",
    "fidelity": "how much of a difference in explored reward is there again in the rollout",
    "zero_std_ratio": "share of groups whose rewards are all equal: they teach nothing (train.filter_groups)",
    "samples": "of the iteration; all are trained on where there is no next row",
    "samples_trained": "of these, those that are trained on (train.seeds_used, train.filter_groups)",
    "seeds_scored": "candidate seeds scored before training ended",
    "beside_seeds": "of the next iteration's candidates, those scored beside this training",
    "steps_resumed": "denoising steps found committed: of what lost its worker, or was begun an iteration early",
    "loss": "mean over the updates",
    "grad_norm": "before clipping",
    "advantage_max": "the largest, up or down: 0 where no sample was better than another, and no step was taken",
    "kl": "distance to the policy that training started from",
    "log_prob_delta": "|Δ log-prob|, trainer against worker: near 0, or they disagree",
    "log_prob_delta_max": "the largest",
    "ratio_mean": "of the new policy to the old one",
    "ratio_std": "its spread",
    "pg_clipfrac": "share of samples outside the clip range",
    "pg_clipfrac_higher": "above it",
    "pg_clipfrac_lower": "below it",
    "approx_kl": "distance to the policy that sampled",
    "captured": "reward variance of the samples, in units of what unexplored seeds have: modelled learning goes by it",
    "modelled_score": "of the new weights: what validation measures, less its chance",
    "spot_utilisation": "busy share of the seconds that spot workers were alive",
    "preemptions": "spot workers taken away, with or without a notice",
    "others_lost": "workers of the other pools that were lost",
    "gangs_broken": "gangs that lost a member and formed anew",
    "recovery_s": "median seconds from there to the next committed step",
    "window_s": "longest that reserved workers rolled out before they trained, while there were spot workers",
    "spare_s": "worker seconds that spot workers had beside training",
    "idle_s": "of these, those in which exploration lengthened nothing",
    "work_s": "worker seconds of rollouts, with their scoring, and of training",
    "beside_s": "worker seconds of the next iteration's exploration, with its scoring",
    "train_wait_s": "seconds that training then waited for samples of spot workers",
    "spot_wait_s": "seconds that spot workers had neither a rollout nor exploration left",
    "spot_worth_renting": "more spot workers than so many would have found no rollout to do",
    "usd": "dollars, idle time included",
}
"""Captions of metrics. Those without one here are seconds by phase, whose names end with "_s"."""
FILES = {
    "config.toml": "the settings, every default written out",
    "prompts": "the prompts that the run began with",
    "prompts.json": "their hashes",
    "model.json": "tells the model's weights from others",
    "history.jsonl": "metrics of every iteration",
    "validation.jsonl": "validation scores; their images are in images/",
    "spans.jsonl": "what every worker did, and when",
    "workers.jsonl": "when every worker came and went",
    "prices": "what workers cost as time went by",
    "events.jsonl": "what happened to gangs and workers",
    "decisions.jsonl": "what was decided from what, enough to decide it again",
    "quarantined": "requests that nobody runs any more",
    "quarantined.jsonl": "the same, of an older version",
    "beliefs": "what the planner knew when it had the weights that are kept",
    "offload": "how long reserved workers may roll out in every iteration",
    "summary.json": "the numbers at the top of this page",
    "simulated.json": "says that no machine ran this, and how it learnt",
    "images": "validation images, and this page's pictures as PNG",
    "selections": "the seeds that every iteration kept, and what exploration scored them",
    "weights": "every weights version, as safetensors",
    "updates": "gradients of the iteration that was under way",
    "latents": "committed denoising steps, as Zarr",
}
SET_ASIDE_NOTE = "Requests that kept killing those who ran them; fresh seeds of their prompts took their places."
HIDDEN = ("weights_version", "weights_sha256", "started_s", "stopped_s", "busy_s.")
"""What names of metrics without a row begin with: the timeline shows them."""


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` and the PNG files that the run has data for; return the page's path.

    The pictures are ``images/reward.png``, ``images/timeline.png`` and ``images/before-after.png``.

    Raises:
        SpotlightError: the directory is not a run, or one of its files is damaged.
    """
    facts = read(run_dir)
    grid = write_pictures(facts)
    page, content = facts.dir / "report.html", _page(facts, grid).encode()
    with atomic_write(page) as file:
        file.write(content)
    RunDir(run_dir).push_files(page.name)
    return page


def _page(facts: Facts, grid: Path | None) -> str:
    plots: dict[str, Model] = {}
    if len(facts.history) or facts.validation:
        plots["reward"] = reward_plot(facts)
    if facts.spans:
        plots["timeline"] = timeline_plot(facts)
    if facts.workers:
        plots["money"] = money_plot(facts)
        plots["spending"] = spending_plot(facts.ledger)
    script, divs = components(plots) if plots else ("", {})
    sections = [
        _section("Reward", _reward_note(facts.settings), divs.get("reward", "")),
        _timeline(facts, divs.get("timeline", "")),
        _section("Before and after", GRID_NOTE, _embedded(grid) if grid else ""),
        _section("Dollars", MONEY_NOTE, divs.get("money", "")),
        _section("Where the dollars went", SPENDING_NOTE, _spending(facts.ledger, divs.get("spending", ""))),
        _section("Set aside", SET_ASIDE_NOTE, _quarantined(facts)),
        _section("Diagnostics", DIAGNOSTICS_NOTE, _diagnostics(facts)),
        _section("Files", html.escape(str(facts.dir)), _files(facts)),
    ]
    return _PAGE.substitute(
        PHASE_COLOURS,
        ink=INK,
        faint=FAINT,
        rule=RULE,
        title=html.escape(": ".join(filter(None, (facts.settings.run.name, facts.strategy)))),
        badge="SIMULATED: " if facts.simulated else "",
        banner=_banner(facts),
        subtitle=html.escape(_subtitle(facts)),
        missing=_missing(facts),
        cards=_cards(facts),
        sections="\n".join(section for section in sections if section),
        bokeh=Resources(mode="inline", components=["bokeh"]).render() if plots else "",
        script=script,
    )


def _section(title: str, note: str, body: str) -> str:
    return f"<section><h2>{title}</h2><p>{note}</p>{body}</section>" if body else ""


def _timeline(facts: Facts, plot: str) -> str:
    settings = facts.settings
    lanes = LANES_NOTES["ahead" if settings.rollout.prompts_ahead else settings.strategy.exploration]
    if settings.exploration.reuse and settings.strategy.exploration != "off":
        lanes += REUSE_NOTE
    if facts.unscored:
        lanes += UNSCORED_NOTE.format(unscored=facts.unscored, all=len(facts.history))
    lanes += "".join(f"Dotted: the run had no worker for {_duration(lasted_s)}. " for _, lasted_s in facts.breaks)
    if not facts.is_crowded():
        note = TIMELINE_NOTE if facts.zoom() == facts.whole else OVERVIEW_NOTE
        return _section("What every worker did", note.format(lanes=lanes), plot)
    shown, every = len(facts.closer().lanes()), len(facts.lanes())
    which = f"{shown} of its {every:,} workers" if shown < every else f"its {every} workers"
    chosen = ", evenly chosen" if every > LANES_MAX else ""
    return _section("What the workers did", CROWDED_NOTE.format(which=which, chosen=chosen, lanes=lanes), plot)


def _reward_note(settings: Config) -> str:
    explored = "" if settings.strategy.exploration == "off" else ", of all seeds that were explored"
    again = settings.strategy.exploration == "stale" and not settings.exploration.reuse
    earlier = EXPLORED_NOTE if again else ""
    return (
        f"Mean reward of the samples that were trained on{explored}, and of the held-out prompts. {earlier}"
        "Click a name to hide its line."
    )


def _banner(facts: Facts) -> str:
    """A notice, above all else, that a run is simulated; empty for a live one."""
    if not facts.simulated:
        return ""
    model = f" {html.escape(MODEL)}." if facts.simulated == "modelled" else ""
    return f'<aside class="simulated"><b>{html.escape(simulation(facts.simulated))}.</b>{model}</aside>'


def _missing(facts: Facts) -> str:
    lines = "".join(f"<li>{html.escape(text)}</li>" for text in facts.missing)
    return f"<aside><b>Not in this run directory</b><ul>{lines}</ul></aside>" if lines else ""


def _subtitle(facts: Facts) -> str:
    settings, pools = facts.settings, facts.settings.pools
    return (
        f"{settings.model.name}, {settings.train.algorithm}, exploration {settings.strategy.exploration}; "
        f"{pools.reserved.workers} reserved{_without_gpu(settings)} + {pools.spot.workers} spot workers "
        f"at {_price(pools.reserved)} and {_price(pools.spot)} per hour"
        f"{f', {pools.reward.workers} reward workers at {_price(pools.reward)}' if pools.reward.workers else ''}; "
        f"seed {settings.run.seed}{_unordered(settings.model)}{_paced(settings.pace)}"
    )


def _without_gpu(settings: Config) -> str:
    return "" if settings.reserved_computes else " (without a GPU)"


def _unordered(model: ModelSection) -> str:
    if model.deterministic or model.device == "cpu":
        return ""
    return "; NOT DETERMINISTIC: on a GPU, the same settings may come to other last bits (model.deterministic = false)"


def _paced(pace: PaceSection) -> str:
    if not pace.gpu:
        return ""
    text = f"; PACED: work lasts as {pace.model} at {pace.height_px} x {pace.width_px} px would on {pace.gpu}"
    if pace.speedup == 1:
        return text
    return (
        f"{text}, {pace.speedup:g} times as fast; so seconds and dollars are {pace.speedup:g} times fewer than emulated"
    )


def _price(pool: PoolSection) -> str:
    changing = " (changing)" if pool.prices else ""
    return f"${pool.usd_per_h:.2f}{changing}"


def _cards(facts: Facts) -> str:
    """The headline numbers, from the summary where there is one, else worked out from the records."""
    scores = [line.score for line in facts.validation]
    ledger = facts.ledger
    lost = Counter(life.pool for life in facts.workers if life.was_taken)
    known: dict[str, Any] = {
        "score_before": scores[0] if scores else None,
        "score_after": scores[-1] if len(scores) > 1 else None,
        "iterations": len(facts.history),
        "wall_s": alive_s(facts.workers, facts.whole[1]) or None,
        "usd": ledger.usd() if ledger.entries else None,
        "usd_reserved_only": ledger.usd_reserved_only if facts.spans else None,
        "preemptions": lost["spot"],
        "first_image_s": None,
    } | (asdict(facts.summary) if facts.summary else {})
    if len(scores) == 1:  # the summary has it as both
        known["score_after"] = None
    before, after, usd, alone = (known[name] for name in ("score_before", "score_after", "usd", "usd_reserved_only"))
    unknown = before is None or after is None
    share = spot_utilisation(facts.spans, facts.workers, facts.whole)
    busy = f"{share:.0%}" if ledger.seconds(pool="spot") else "–"
    times = f" ({alone / usd:.1f} ×)" if usd and alone else ""
    early = f": {facts.ended_early}" if facts.ended_early else ""
    cards = [
        (
            "Validation score",
            f"{_score(before)} → {_score(after)}",
            "not measured yet" if unknown else f"{after - before:+.2f} on held-out prompts",
        ),
        (
            "Wall time",
            _duration(known["wall_s"]),
            "; ".join(_about_time(known["first_image_s"], facts)),
        ),
        ("Iterations", str(known["iterations"]), f"of {facts.settings.run.iterations:,} asked for{early}"),
        (
            "Cost",
            dollars(usd),
            f"{AT_RESERVED_PRICES}: {dollars(alone)}{times}",
        ),
        ("Spot workers busy", busy, "of the seconds that were paid for"),
        ("Preemptions", str(known["preemptions"]), f"spot workers lost on the way{_reserved_too(lost)}"),
    ]
    return "".join(
        f"<div><h3>{name}</h3><b>{html.escape(value)}</b><span>{html.escape(note)}</span></div>"
        for name, value, note in cards
    )


def _reserved_too(lost: Mapping[str, int]) -> str:
    return f"; {lost['reserved']} reserved, too" if lost["reserved"] else ""


def _about_time(first_image_s: float | None, facts: Facts) -> Iterator[str]:
    """When there was a first image, if that is known, and the time lost in pauses of the run, if there was any."""
    if first_image_s is not None:
        yield f"first image after {_duration(first_image_s)}"
    if (lost := facts.curve("paused_s")) is not None:
        yield f"{_duration(float(lost.sum()))} of it lost: the run was paused"


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _diagnostics(facts: Facts) -> str:
    """A row per metric: its course in a small line, and its first, last and mean value."""
    others = sorted(str(name) for name in facts.history if name not in METRICS)
    rows = []
    for name in (*METRICS, *others):
        values = None if name.startswith(HIDDEN) else facts.curve(name)
        if values is not None:
            numbers = "".join(f"<td>{value:.4g}</td>" for value in (values.iloc[0], values.iloc[-1], values.mean()))
            note = html.escape(
                METRICS.get(name, "seconds of all workers, or of the clock (wall_s)" if name.endswith("_s") else "")
            )
            rows.append(f"<tr><th>{html.escape(name)}<i>{note}</i></th><td>{_sparkline(values)}</td>{numbers}</tr>")
    head = "<tr><td></td><td>over the run</td><td>first</td><td>last</td><td>mean</td></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""


def _quarantined(facts: Facts) -> str:
    """A row for each request that was set aside."""
    rows = "".join(
        f"<tr><th>{html.escape(refused.request.prompt.text)}</th>"
        f"<td>{html.escape(str(refused.request.iteration))}</td>"
        f"<td>{html.escape(', '.join(map(str, refused.request.seeds)))}</td>"
        f"<td>{html.escape(str(refused.preemptions))}</td></tr>"
        for refused in facts.quarantined
    )
    head = "<tr><td>prompt</td><td>iteration</td><td>seeds</td><td>preemptions</td></tr>"
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>" if rows else ""


def _spending(ledger: Ledger, plot: str) -> str:
    """The plot, what the dollars bought, and a row per kind of work and of waste."""
    if not plot:
        return ""
    pools = sorted({entry.pool for entry in ledger.entries})
    heads = "".join(f"<td>{html.escape(pool)} s</td><td>$</td>" for pool in pools)
    lines = []
    for row in rows(ledger):
        cells = "".join(f"<td>{row.seconds[pool]:,.1f}</td><td>{row.usd[pool]:.4f}</td>" for pool in pools)
        name = f"<b>{html.escape(row.name)}</b>" if row.is_sum else html.escape(row.name)
        total = f"<td>{sum(row.usd.values()):.4f}</td><td>{row.share:.1%}</td>"
        lines.append(f"<tr><th>{name}<i>{html.escape(row.note)}</i></th>{cells}{total}</tr>")
    head = f"<tr><td></td>{heads}<td>all $</td><td>share</td></tr>"
    facts = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in bought(ledger)
    )
    return f"{plot}<table><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table><table>{facts}</table>"


SPARKLINE_PX = 160


def _sparkline(values: pd.Series[float]) -> str:
    y = values.to_numpy(dtype=float)
    if len(y) > SPARKLINE_PX:  # more points than the picture has columns
        y = np.array([part.mean() for part in np.array_split(y, SPARKLINE_PX)])
    spread = float(np.ptp(y)) or 1.0
    x = np.linspace(2, SPARKLINE_PX - 2, len(y))
    points = " ".join(f"{a:.1f},{20 - 16 * (b - y.min()) / spread:.1f}" for a, b in zip(x, y, strict=True))
    return f'<svg width="{SPARKLINE_PX}" height="24"><polyline points="{points}"/></svg>'


def _files(facts: Facts) -> str:
    present = [(name, note) for name, note in FILES.items() if (facts.dir / name).exists()]
    return "<dl>" + "".join(f'<dt><a href="{name}">{name}</a></dt><dd>{note}</dd>' for name, note in present) + "</dl>"


def _embedded(picture: Path) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    return f'<img alt="validation images before and after training" src="data:image/png;base64,{data}">'


EXPLORED_NOTE = (
    "Explored seeds were drawn one version earlier than the samples chosen from them, but for the first ones. "
)
LANES_NOTES = {
    "stale": "In the violet bands a worker trains: amber below it is exploration for the next iteration, in time that "
    "spot workers would have idled away. Pale amber was called off when training ended. ",
    "blocking": "Amber is exploration, which each rollout (blue) waits for; in the violet bands a worker trains. ",
    "off": "In the blue bands a worker rolls out, in the violet ones it trains. ",
    "ahead": "In the violet bands a worker trains: blue beside it are the first rollouts of the next iteration. Pale "
    "blue goes on in that iteration. ",
}
"""What the colours of the lanes are, by how a run explores, or if it begins rollouts early."""
REUSE_NOTE = "Kept candidates are trained on as they were drawn; blue are prompts that had too few. "
UNSCORED_NOTE = (
    "For {unscored} of {all} iterations no seed was scored before training ended, so exploration for them was for "
    "nothing. "
)
TIMELINE_NOTE = "One lane per worker. {lanes}Drag to move, or hold ctrl and use the wheel."
OVERVIEW_NOTE = (
    "One lane per worker. {lanes}Drag to move, drag the window in the small picture, or hold ctrl and use the wheel."
)
CROWDED_NOTE = (
    "Above, how many workers did what in the whole run. Below, a lane for each of {which}{chosen}, in the iterations "
    "that are framed above. {lanes}"
)
GRID_NOTE = (
    "The text that each held-out prompt asks for, drawn with its first seed before and after training; rewards below."
)
MONEY_NOTE = (
    "What the workers cost from joining to leaving, idle time included. "
    "The dashed line prices their useful seconds as if reserved GPUs had had them, and never idled. A run that is "
    "planned for those alone may need fewer: it explores nothing, and its gradients cross no network."
)
SPENDING_NOTE = (
    "Every second of every worker, in one column each. Wasted: idle without work, start-up until the first task, "
    "exploration that the end of training called off, and steps that a preemption lost or that were done twice. "
    "A point is a hundredth of the validation score."
)
DIAGNOSTICS_NOTE = "One value per iteration."

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$badge$title · Spotlight</title>
<style>
body { margin: 0; background: #f4f5f8; color: $ink; font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { margin: 0; font-size: 30px; letter-spacing: -0.02em; }
h1 small { color: $explore; font-size: inherit; }
h2 { margin: 0; font-size: 19px; letter-spacing: -0.01em; }
p, header { color: $faint; margin: 2px 0 14px; max-width: 880px; }
header h1 { color: $ink; }
section, .cards div { background: #fff; border: 1px solid #e4e7ed; border-radius: 12px; }
section { margin-top: 20px; padding: 22px 26px 24px; }
section > img { display: block; max-width: 100%; margin: 0 auto; }
.cards { display: grid; grid-template-columns: 1.45fr 1fr 0.85fr 1.35fr 1fr 0.95fr; gap: 12px; }
@media (max-width: 900px) {
  .cards { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
  table { display: block; overflow-x: auto; }
}
.cards div { padding: 14px 16px; }
.cards h3 { margin: 0; font-size: 13px; font-weight: 500; color: $faint; }
.cards b { display: block; font-size: 25px; letter-spacing: -0.02em; white-space: nowrap; }
.cards span { font-size: 12.5px; color: $faint; }
aside { background: #fff6e5; border: 1px solid #f8d08a; border-radius: 12px; padding: 12px 18px; margin: 0 0 14px; }
aside.simulated { background: #eee9fb; border-color: $train; }
aside.simulated b { color: $train; }
aside ul { margin: 4px 0 0; padding-left: 20px; }
table { border-collapse: collapse; width: 100%; margin-top: 12px; font-variant-numeric: tabular-nums; }
td { text-align: right; padding: 5px 10px; }
th { text-align: left; font-weight: 500; padding: 5px 10px 5px 0; }
th i { display: block; font-style: normal; font-weight: 400; font-size: 12.5px; color: $faint; }
thead td { color: $faint; font-size: 12.5px; }
tbody tr { border-top: 1px solid $rule; }
polyline { fill: none; stroke: $train; stroke-width: 1.5; }
svg { vertical-align: middle; }
dl { display: grid; grid-template-columns: 180px 1fr; gap: 4px 12px; margin: 0; }
dt { font-family: ui-monospace, monospace; font-size: 13.5px; }
dd { margin: 0; color: $faint; }
a { color: $rollout; text-decoration: none; }
</style>
$bokeh
</head>
<body>
<main>
<header><h1><small>Spotlight</small> $title</h1>$subtitle</header>
$banner
$missing
<div class="cards">$cards</div>
$sections
</main>
$script
</body>
</html>
""")
