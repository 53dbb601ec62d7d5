"""Replaces samples that have no reward by fresh seeds of their prompt: by the first of these that have one.

The fresh seeds of a request are one sequence, and a sample depends on its seed, not on when it is drawn. So there are
two ways, which keep the same samples if both find enough:

- *At once* (`score_whole`), where the worker that denoised also scores: as many seeds as are missing are drawn, again
  and again, `SPARES` times at most; only once if nothing has a reward by then, for that is a broken scorer.
- *Elsewhere* (`replace_unscored`, `score_all`, `refilled`), where the reward pool scores. A graph repeats no task, so
  seeds are drawn only once, with some to spare: `SPARES` times as many as are missing, but no more than the request
  had, which is known to fit a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphs.tasks.sampling import ShardResult, decode, score
from graphs.tasks.seeds import candidate_seeds
from spotlight.device import protocol as device
from spotlight.records import Dropped, Quarantined, Request, Scored, SpotlightError

REFILL = 1 << 20
"""Replacements are candidates numbered from here: no exploration tries so many."""
SPARES = 4
"""Fresh seeds, in a row or at once, that may be drawn in place of a sample without a reward."""


def score_whole(run_dir: str, seed: int, done: ShardResult) -> tuple[Scored, ...]:
    """As `score`, of samples that are trained on: those without a reward are replaced at once, on the same worker.

    Raises:
        SpotlightError: the replacements have no reward either.
    """
    scored = score(run_dir, done)
    assert not isinstance(scored, Dropped), "only exploration is dropped"
    return refill(run_dir, seed, scored)


def refill(run_dir: str, seed: int, scored: Scored | Quarantined) -> tuple[Scored, ...]:
    """Replace the samples that have no reward, or a request that was set aside, at once.

    Raises:
        SpotlightError: the replacements have no reward either.
    """
    known = _as_scored(scored)
    results, drawn = [known], 0
    while missing := _missing(results[-1]):
        fresh = _fresh(seed, known, drawn, missing)
        device.current().rollout(run_dir, fresh)
        again = device.current().score(run_dir, fresh)
        assert isinstance(again, Scored), "only exploration is dropped"
        results.append(again)
        drawn += missing
        has_some = any(_missing(each) < len(each.rewards) for each in results)
        if _missing(again) and not (has_some and len(results) <= SPARES):
            raise _without_reward(known, again)
    return tuple(results)


def replace_unscored(
    run_dir: str, seed: int, scored: Sequence[Scored | Quarantined], surplus: Sequence[ShardResult] = ()
) -> tuple[ShardResult, ...]:
    """For each request that needs it: denoise and decode fresh seeds, which are scored elsewhere.

    Args:
        surplus: the other shards of the requests. Dask forgets a task that nobody depends on, so the task that
            collects the scores also takes these.
    """
    found = (_with_spares(seed, result) for result in map(_as_scored, scored))
    return tuple(decode(run_dir, device.current().rollout(run_dir, fresh)) for fresh in found if fresh)


def score_all(run_dir: str, done: Sequence[ShardResult]) -> tuple[Scored | Dropped | Quarantined, ...]:
    """As `score` of each."""
    return tuple(score(run_dir, each) for each in done)


def refilled(seed: int, scored: Sequence[Scored | Quarantined], again: Sequence[Scored]) -> tuple[Scored, ...]:
    """All requests with the scored replacements of their samples.

    Raises:
        SpotlightError: the replacements have no reward either.
    """
    fresh = {result.request: result for result in again}
    whole: list[Scored] = []
    for result in map(_as_scored, scored):
        whole.append(result)
        asked = _with_spares(seed, result)
        if asked:
            whole.append(_without_spares(result, fresh[asked]))
    return tuple(whole)


def _as_scored(result: Scored | Quarantined) -> Scored:
    """A request that was set aside is one of which no sample has a reward."""
    if isinstance(result, Scored):
        return result
    error = f"set aside: it killed those who ran it {result.preemptions} times"
    return Scored(request=result.request, rewards=(None,) * len(result.request.seeds), errors=(error,))


def _missing(scored: Scored) -> int:
    return scored.rewards.count(None)


def _fresh(seed: int, scored: Scored, drawn: int, count: int) -> Request:
    """A request of ``count`` fresh seeds, in place of samples that have no reward.

    Args:
        drawn: how many fresh seeds were drawn before.
    """
    request = scored.request
    # Begins with the first that is replaced, so that two requests of a prompt do not share seeds.
    first = REFILL + (request.seeds[scored.rewards.index(None)] & (REFILL - 1)) + drawn
    return replace(request, seeds=candidate_seeds(seed, request.iteration, request.prompt, range(first, first + count)))


def _with_spares(seed: int, scored: Scored) -> Request | None:
    """A request of fresh seeds with some to spare, should they have no reward either; None where none is missing."""
    missing = _missing(scored)
    return _fresh(seed, scored, 0, min(SPARES * missing, len(scored.rewards))) if missing else None


def _without_spares(scored: Scored, again: Scored) -> Scored:
    """The scored replacements, of which only the first that have a reward keep it, as many as are missing.

    Others were drawn in nobody's place, so errors of theirs say nothing.

    Raises:
        SpotlightError: there are not as many.
    """
    missing = _missing(scored)
    known = [at for at, reward in enumerate(again.rewards) if reward is not None][:missing]
    if len(known) < missing:
        raise _without_reward(scored, again)

    def only(rewards: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(reward if at in known else None for at, reward in enumerate(rewards))

    return replace(again, rewards=only(again.rewards), errors=(), parts=tuple(map(only, again.parts)))


def _without_reward(scored: Scored, again: Scored) -> SpotlightError:
    request = scored.request
    seeds = [seed for seed, reward in zip(request.seeds, scored.rewards, strict=True) if reward is None]
    return SpotlightError(
        f"the reward failed for {request.prompt.text!r}, {len(seeds)} of {len(request.seeds)} seeds (such as "
        f"{seeds[0]}), and for those that replaced them: {again.errors[0]}; mend the scorer, then resume the run"
    )
