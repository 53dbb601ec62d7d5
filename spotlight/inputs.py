"""Checks, before anything starts, all that could stop a run once its cluster is up: prompts, traces, models, ports."""

from __future__ import annotations

import errno
import logging
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

from spotlight import config as configuration
from spotlight.clock import wall_clock
from spotlight.demands import check_demands
from spotlight.files import kind_of, shown
from spotlight.market.trace_files import read_trace
from spotlight.plan.availability import pool_switches
from spotlight.plan.durations import TRANSFORMERS, TaskDurations
from spotlight.records import Pool, SpotlightError
from spotlight.rl import checkpoints, rewards
from spotlight.rl.prompts import check_prompts, choose_prompts, read_prompts
from spotlight.rl.start import require_lora
from spotlight.store.accounts import pool_prices
from spotlight.store.rows import MODEL, ModelHash
from spotlight.store.rundir import RunDir

TAGS_SHOWN = 8
MADE_UP_H_MAX = 100_000
"""Longest synthetic trace: eleven years, which took 2 to 27 s to make for eight workers, by model (one busy core)."""
SPANS_MAX = 10.0
"""Largest ratio of two rewards' ranges: beyond it, the smaller hardly counts in their sum. The ratio is 2.2 with
weights that make PickScore and the CLIP score Flow-GRPO's (14 / 26 and 0.35 x 100 / 30), beside a reward of 0 to 1."""

logger = logging.getLogger(__name__)


def check_inputs(
    settings: configuration.Config,
    *,
    with_model: bool = True,
    live: bool = True,
    joins: bool = False,
    begun: bool = False,
    logged: set[str] | None = None,
) -> None:
    """Check all that could stop the run once its cluster is up; doubtful settings are logged.

    Args:
        with_model: whether the run needs the model's files, and stores latents.
        live: whether the run will have workers.
        joins: whether those are of an existing cluster.
        begun: whether the run has its first weights, so that it no longer needs the LoRA to start from.
        logged: doubts that were logged before; new ones are added.
    """
    if sys.flags.optimize > 1:
        raise SpotlightError(
            "Python drops docstrings here (-OO, or PYTHONOPTIMIZE=2), and transformers cannot be imported then: leave "
            "that out"
        )
    logged = set() if logged is None else logged
    _log(settings.doubts, logged)
    data, model = settings.data, settings.model
    now_s = wall_clock()
    for name, price in pool_prices(settings).items():
        is_calendar = not price.since_start and settings.emulated_per_real_s == 1
        if live and is_calendar and price.times_s[0] > now_s:
            logger.warning(
                "pools.%s.prices begin in %.1f h: until then their first price is paid, %g",
                *(name, (price.times_s[0] - now_s) / 3600, price.usd_per_h[0]),
            )
    for name, pool in settings.pools:
        is_made_up = pool.trace_model and not live
        made_up_h = settings.simulation.hours / settings.emulated_per_real_s * pool.speedup if is_made_up else 0.0
        if made_up_h > MADE_UP_H_MAX:
            raise SpotlightError(
                f"simulation.hours = {settings.simulation.hours:g} with pools.{name}.speedup = {pool.speedup:g} ask "
                f"for a made-up trace of {made_up_h:,.0f} h, and at most {MADE_UP_H_MAX:,} can be had: lower one"
            )
        recorded = read_trace(pool.trace) if pool.trace else None
        with _named(f"pools.{name}.trace_offset_h = {pool.trace_offset_h:g} of {pool.trace or pool.trace_model!r}"):
            switches = pool_switches(pool, recorded, seed=settings.run.seed, duration_s=1.0)
        absent = sum(not any(up for _, up in place) for place in switches) if recorded else 0
        if absent:
            share = f" (trace_share = {pool.trace_share:g})" if pool.trace_share < 1 else ""
            never = f"pools.{name}.workers = {pool.workers}, and {absent} of them never come"
            _log([f"{never}: {pool.trace} has no more at a time{share}"], logged)
    rewards.read_again(table.name for table in (settings.reward, *settings.reward.also))
    scorer = rewards.build(settings.reward)
    _log(_doubtful_weights(settings, scorer), logged)
    if (target := settings.run.target) is not None and target > scorer.range[1]:
        _log([f"run.target = {target:g} ends nothing: no reward is above {scorer.range[1]:g}; lower it"], logged)
    for path in (data.train_prompts, data.validation_prompts):
        check_prompts(read_prompts(path), path, scorer.check_prompt)
    _check_tags(settings)
    choose_prompts(len(read_prompts(data.train_prompts)), settings.prompts_drawn, seed=settings.run.seed, iteration=0)
    check_demands(settings, validation_prompts=len(read_prompts(data.validation_prompts)), live=live, joins=joins)
    if settings.pace.gpu or not live:
        _check_durations(settings)
    if not with_model:
        return
    if settings.latents.url:
        from spotlight.store.zarr_store import check_url

        check_url(settings.latents.url)
    if model.path and model.embedded and kind_of(model.path) != "file":
        raise SpotlightError(
            f"model.path = {model.path!r}: no such file; give one that examples/pretrain_tiny.py wrote, or leave it out"
        )
    if model.path and not model.embedded and kind_of(model.path) != "directory":
        raise SpotlightError(f"model.path = {model.path!r}: no such directory; give that of a diffusers pipeline")
    if model.embedded:
        _check_heads(settings, TRANSFORMERS[model.name].heads, model.name)
    if model.name in checkpoints.FAMILIES:
        found = checkpoints.survey(model.name, model.path)
        _check_widths(settings, found)
        told = found.transformer.config.get("guidance_embeds") and model.name == "flux"
        if told and settings.rollout.guidance == 1 and settings.train.is_stepwise:
            logger.warning(
                "rollout.guidance = 1 with %s, which takes guidance as an input: published recipes of Flow-GRPO and "
                "DanceGRPO tell FLUX.1-dev 3.5, which is one pass all the same; set rollout.guidance = 3.5",
                model.path,
            )
    if settings.train.lora_path and not begun:
        require_lora(settings.train)
    if model.device == "cuda" and live and not joins and settings.cluster.manager == "local":
        from spotlight.rl.models import device_of  # torch, which takes seconds

        device_of(model)


def check_same_model(run: RunDir, settings: configuration.Config) -> None:
    """Check that a run goes on with the weights that it began with; a new run records which they are.

    Raises:
        SpotlightError: its checkpoint has others now.
    """
    model, known = settings.model, run.model_hash()
    if not model.path:
        return
    found = checkpoints.fingerprint(model.name, model.path)
    if known is None:
        run.write_json(MODEL, ModelHash(sha256=found))
    elif known.sha256 != found:
        raise SpotlightError(
            f"{model.path}: holds other weights than those that {run.url} began with: put those back, or begin a new "
            f"run; if they are the same, in other files, delete {run.objects.where(MODEL)}"
        )


def _log(doubts: Iterable[str], logged: set[str]) -> None:
    for doubt in doubts:
        if doubt not in logged:
            logger.warning("%s", doubt)
            logged.add(doubt)


def _doubtful_weights(settings: configuration.Config, scorer: rewards.Scorer) -> Iterator[str]:
    """A sentence that one of several rewards hardly counts in their sum, if so."""
    train = settings.train
    if not isinstance(scorer, rewards.Weighted) or (train.combine == "advantages" and train.advantage_std != "none"):
        return
    names = [table.name for table in (settings.reward, *settings.reward.also)]
    ranges = [rewards.planned_range(part) for _, part in scorer.parts]
    spans = [abs(weight) * (high - low) for (weight, _), (low, high) in zip(scorer.parts, ranges, strict=True)]
    by_span = sorted(zip(spans, names, strict=True))
    (least, weak), (most, strong) = by_span[0], by_span[-1]
    if most > SPANS_MAX * least:
        with_std = ', and train.advantage_std to "global" or "group"' if train.advantage_std == "none" else ""
        yield (
            f"reward.weight: rewards are added up as they are; {strong!r} spans {most:g} and {weak!r} {least:g}, "
            "weights included, so the second has hardly any say; published weights are for PickScore over 26 and the "
            f'CLIP score times 100 / 30: change the weights, or set train.combine = "advantages"{with_std}'
        )


def _check_durations(settings: configuration.Config) -> None:
    """
    Raises:
        SpotlightError: the cost model knows nothing of the GPU, the model, its size or a width.
    """
    durations = TaskDurations(settings)
    section = "pace" if settings.pace.gpu else "model"
    for name, pool in settings.pools:
        if pool.workers and name != "reward":
            for width in settings.strategy.widths:
                with _named(f"[{section}], with strategy.widths = {list(settings.strategy.widths)}"):
                    durations.step_s(1, width, cast(Pool, name))
    with _named(f"[{section}], with train.width = {settings.train.width}"):
        durations.train_s(1, settings.train.width)


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except SpotlightError as error:
        raise SpotlightError(f"{where}: {error}") from None


def _check_tags(settings: configuration.Config) -> None:
    """
    Raises:
        SpotlightError: a reward is for tags that no prompt has, which would count nothing.
    """
    tagged = [table for table in (settings.reward, *settings.reward.also) if table.tags]
    there = {prompt.tag for prompt in read_prompts(settings.data.train_prompts)} - {""} if tagged else set()
    for table in tagged:
        if missing := [tag for tag in table.tags if tag not in there]:
            known = ", ".join(map(repr, sorted(there)[:TAGS_SHOWN])) or "none"
            raise SpotlightError(
                f"reward.tags of {table.name!r}: no prompt of {settings.data.train_prompts} has the tag "
                f"{missing[0]!r}; there are {known}"
            )


def _check_widths(settings: configuration.Config, found: checkpoints.Survey) -> None:
    """
    Raises:
        SpotlightError: a gang cannot share the transformer, or its heads.
    """
    for setting, widths in _asked_widths(settings):
        if max(widths) > 1 and not found.family.shares:
            raise SpotlightError(
                f"{setting}: a gang of {max(widths)} cannot share a forward pass of {settings.model.path}: diffusers "
                f"has no plan for splitting a {found.family.transformer}; make it 1"
            )
    heads = found.transformer.config.get("num_attention_heads")
    if isinstance(heads, int):
        _check_heads(settings, heads, settings.model.path)


def _check_heads(settings: configuration.Config, heads: int, model: str) -> None:
    """
    Raises:
        SpotlightError: a gang cannot evenly share the attention heads of a model.
    """
    for setting, widths in _asked_widths(settings):
        if uneven := [width for width in widths if heads % width]:
            raise SpotlightError(
                f"{setting}: a gang of {uneven[0]} cannot evenly share the {heads} attention heads of "
                f"{model}: choose a width that divides them"
            )


def _asked_widths(settings: configuration.Config) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return ("strategy.widths", settings.strategy.widths), ("train.width", (settings.train.width,))


def check_port(host: str, port: int) -> None:
    """
    Raises:
        SpotlightError: the dashboard cannot listen there.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, TypeError) as error:  # the latter if no host can have that name
            why = getattr(error, "strerror", error)
            if getattr(error, "errno", None) not in (errno.EADDRINUSE, errno.EACCES):
                raise SpotlightError(
                    f"cluster.dashboard_host = {shown(host)}: the dashboard cannot listen there ({why}): "
                    "give a name or an IPv4 address of this machine, such as 127.0.0.1, or 0.0.0.0 for all it has"
                ) from None
            raise SpotlightError(
                f"cluster.dashboard_port = {port} cannot be used ({why}): stop what listens there, or "
                "choose another, 0 for any free one: for a new run by --set cluster.dashboard_port=0, for a resumed "
                f"one in its {configuration.RESOLVED}"
            ) from None
