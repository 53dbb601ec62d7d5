"""Finds, before anything starts, what would stop a run once its cluster is up: prompts, traces, models, ports."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from spotlight import config as configuration
from spotlight.demands import check_demands
from spotlight.market.trace_files import read_trace
from spotlight.plan.availability import pool_switches
from spotlight.records import SpotlightError
from spotlight.rl import checkpoints, rewards
from spotlight.rl.prompts import check_prompts, choose_prompts, read_prompts
from spotlight.store.accounts import pool_prices

logger = logging.getLogger(__name__)


def check_inputs(settings: configuration.Config, *, with_model: bool = True, live: bool = True) -> None:
    """Find at once what would stop the run once its cluster is up.

    Args:
        with_model: whether it needs the model's files, and stores latents.
        live: whether it will have workers.

    What is only doubtful is said in the log.
    """
    for doubt in settings.doubts:
        logger.warning("%s", doubt)
    data, model = settings.data, settings.model
    pool_prices(settings)
    for name, pool in settings.pools:
        recorded = read_trace(pool.trace) if pool.trace else None
        switches = pool_switches(pool, recorded, seed=settings.run.seed, duration_s=1.0)
        absent = sum(not any(up for _, up in place) for place in switches) if recorded else 0
        if absent:
            logger.warning(
                "pools.%s.workers = %d, and %d of them never come: %s has no more at a time",
                *(name, pool.workers, absent, pool.trace),
            )
    scorer = rewards.build(settings.reward)
    for path in (data.train_prompts, data.validation_prompts):
        check_prompts(read_prompts(path), path, scorer.check_prompt)
    choose_prompts(len(read_prompts(data.train_prompts)), settings.prompts_drawn, seed=settings.run.seed, iteration=0)
    check_demands(settings, validation_prompts=len(read_prompts(data.validation_prompts)), live=live)
    if not with_model:
        return
    if settings.latents.url:
        from spotlight.store.zarr_store import check_url

        check_url(settings.latents.url)
    if model.path and model.embedded and not Path(model.path).is_file():
        raise SpotlightError(
            f"model.path = {model.path!r}: no such file; give one that examples/pretrain_tiny.py wrote, or leave it out"
        )
    if model.path and not model.embedded and not Path(model.path).is_dir():
        raise SpotlightError(f"model.path = {model.path!r}: no such directory; give that of a diffusers pipeline")
    if not model.embedded:
        checkpoints.survey(model.name, model.path)


def check_port(host: str, port: int) -> None:
    """
    Raises:
        SpotlightError: the dashboard cannot listen there.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SpotlightError(
                f"cluster.dashboard_port = {port} cannot be used ({error.strerror}): stop what listens there, or "
                "choose another, 0 for any free one: for a new run by --set cluster.dashboard_port=0, for a resumed "
                f"one in its {configuration.RESOLVED}"
            ) from None
