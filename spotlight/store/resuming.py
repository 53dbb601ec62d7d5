"""Checks that a run can be resumed, and names what is missing; it changes nothing.

What can be made again may be missing: weights are trained again from the version before, and a version whose weights
are there is validated again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from spotlight.config import RESOLVED, Config, is_whole, not_written
from spotlight.files import digest, read_files
from spotlight.records import SpotlightError
from spotlight.store.rows import HISTORY, PROMPTS, SPANS, VALIDATION, WORKERS, HistoryRow, ValidationRow
from spotlight.store.rundir import RunDir, made_again
from spotlight.store.weights import published

logger = logging.getLogger(__name__)

NAMED_MAX = 5
"""Most missing settings that a message names."""


def check(run: RunDir, iterations: int | None = None) -> None:
    """Check at once that all is there that the rest of the run needs and cannot make again.

    Args:
        iterations: after how many the run is to end from now on; None: as its settings say.

    Raises:
        SpotlightError: a file is missing, damaged, or not the one that the run began with; the text names it.
    """
    config, rows = run.config(), rows_that_stay(run)
    done = len(rows)
    is_to_go_on = done < (config.run.iterations if iterations is None else iterations)
    if run.simulated:
        raise SpotlightError(f"{run.url}: a simulated run has nothing to go on with: simulate its settings again")
    _check_settings(run, config)
    _check_prompts(run, config)
    for journal in (WORKERS, SPANS) if done else ():
        if not run.count(journal):
            said = "%s: is missing or empty: what was spent before is no longer counted, unless you restore it"
            logger.warning(said, run.path / journal)
    if done and is_to_go_on:
        needed = [run.beliefs_key(done)]
        if config.strategy.exploration == "stale" and _explored_next(run, rows[-1]):
            needed.append(run.selection_key(done))
        for key in needed:
            if run.objects.size(key) is None:
                where = run.objects.where(key)
                raise SpotlightError(
                    f"{where}: is missing, and iteration {done} needs it: restore it, or {made_again(done)}"
                )
    before = done - 1
    if config.trains_on_older and before > 0 and is_to_go_on and not published(run.url, before):
        where = run.objects.where(f"weights/v{before:05d}")
        raise SpotlightError(
            f"{where}: are missing, and samples of iteration {done} are drawn with these weights "
            "(rollout.prompts_ahead or exploration.reuse): restore them, or begin a new run"
        )
    run.beliefs(done)
    run.selection(done)
    for version in unvalidated(run, config, done):
        if version and published(run.url, version) is None:
            raise SpotlightError(
                f"{run.path / VALIDATION}: has no row of version {version}, whose weights are no longer kept: "
                "restore the file"
            )


def _explored_next(run: RunDir, last: HistoryRow) -> bool:
    """Whether the iteration of this row explored for the next one: the planned last one does not.

    The run may have been made longer since. Older rows do not say: a finished run then means no.
    """
    return run.summary() is None if last.explored_next is None else last.explored_next


def rows_that_stay(run: RunDir) -> list[HistoryRow]:
    """The finished iterations, without the last ones if their weights were deleted as damaged: those are done again.

    Raises:
        SpotlightError: iterations are missing between others, or the last one's weights have another hash.
    """
    rows = run.history()
    for expected, row in enumerate(rows):
        if row.iteration != expected:
            raise SpotlightError(
                f"{run.path / HISTORY}:{expected + 1}: iteration: expected {expected}, found {row.iteration}; restore "
                "the line, or delete all lines from this one on: `spotlight resume` then does these iterations again"
            )
    while rows and not (found := published(run.url, rows[-1].weights_version)):
        rows.pop()
    if rows and found and found.weights.sha256 != rows[-1].weights_sha256:
        directory = run.objects.where(f"weights/v{rows[-1].weights_version:05d}")
        raise SpotlightError(
            f"{directory}: expected weights with sha256 {rows[-1].weights_sha256}, as {HISTORY}:{len(rows)} says, "
            f"found {found.weights.sha256}; restore them, or delete {directory} and `spotlight resume` makes them again"
        )
    return rows


def unvalidated(run: RunDir, config: Config, done: int) -> Iterator[int]:
    """Versions before iteration ``done`` that should have been validated, but have no row."""
    validated = {row.version for row in run.validation()}
    due = range(0, done, config.run.validate_every)
    return (version for version in due if version not in validated)


def has_begun(place: str | Path) -> bool:
    """Whether there is a run in this directory, or at this URL, whose initial weights are published."""
    return published(place, 0) is not None


def is_over(run: RunDir, config: Config) -> bool:
    """Whether all iterations are done and validated, and the summary is written: nothing is left to do.

    Some may be left of a run that `ended_early`, and of a simulated one that ended by the hour.
    """
    summary = run.summary()
    if run.simulated or summary is None:
        return summary is not None
    done = len(run.history())
    if done < config.run.iterations and not enough(run, config, summary.usd):
        return False
    return any(row.version == done for row in run.validation()) and not list(unvalidated(run, config, done))


def reached(run: RunDir, config: Config) -> ValidationRow | None:
    """The first validation that reached the run's target."""
    target = config.run.target
    return None if target is None else next((row for row in run.validation() if row.score >= target), None)


def ended_early(run: RunDir) -> str:
    """Why a run that is over has iterations left, in words; else empty."""
    config, summary = run.config(), run.summary()
    return enough(run, config, summary.usd) if summary and summary.iterations < config.run.iterations else ""


def enough(run: RunDir, config: Config, usd: float) -> str:
    """Why no iteration should begin any more, in words; empty if one may.

    Args:
        usd: what it has cost, in dollars of its own clock.
    """
    if row := reached(run, config):
        return f"version {row.version} scored {row.score:.3f}, and run.target is {config.run.target:g}"
    limit, scale = config.run.usd_max, config.emulated_per_real_s
    if limit is None:
        return ""
    last_usd = sum(row.measured.get("usd", 0.0) for row in run.last(HISTORY, HistoryRow, 1))
    if scale * (usd + last_usd) <= limit:
        return ""
    last = f", the last iteration ${scale * last_usd:,.2f}" if last_usd else ""
    return f"it cost ${scale * usd:,.2f}{last}, and run.usd_max is {limit:g}"


def _check_settings(run: RunDir, config: Config) -> None:
    """Every setting was written out: one that is not there was cut off, or is newer than the run."""
    content, where = run.objects.get(RESOLVED) or b"", run.objects.where(RESOLVED)
    if missing := not_written(config, content):
        more = f" and {len(missing) - NAMED_MAX} more" if len(missing) > NAMED_MAX else ""
        named = f"{', '.join(missing[:NAMED_MAX])}{more}"
        if not is_whole(content):
            raise SpotlightError(
                f"{where}: has no {named}, though a run writes every setting: restore the file, or go on with the "
                "version of Spotlight that began the run"
            )
        logger.warning(
            "%s: an older version of Spotlight began this run, without %s: these have their defaults, and what else "
            "has changed since applies from now on",
            where,
            named,
        )


def _check_prompts(run: RunDir, config: Config) -> None:
    hashes = run.prompt_hashes()
    if hashes is None:
        raise SpotlightError(
            f"{run.objects.where(PROMPTS)}: is missing, so nobody knows whether the prompts are those that the run "
            "began with: restore it, or begin a new run"
        )
    for path, expected in (
        (config.data.train_prompts, hashes.train_sha256),
        (config.data.validation_prompts, hashes.validation_sha256),
    ):
        try:
            found = digest(read_files(path, "a prompt file"))
        except SpotlightError as error:
            raise SpotlightError(f"{error}; restore it, or begin a new run") from None
        if found != expected:
            raise SpotlightError(
                f"{Path(path)}: expected the prompts that the run began with (sha256 {expected}), found others "
                f"(sha256 {found}): restore the file, or begin a new run with the new prompts"
            )
