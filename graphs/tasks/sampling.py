"""Rollouts and their rewards, and what becomes of samples that have none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

from graphs.tasks.seeds import candidate_seeds
from spotlight.device import protocol as device
from spotlight.device.signals import signals
from spotlight.records import Dropped, Quarantined, Request, Rollout, Scored, SpotlightError, Surplus, request_id
from spotlight.store.rundir import RunDir

if TYPE_CHECKING:
    from spotlight.store.latents import LatentStore

REFILL = 1 << 20
"""Replacements are candidates numbered from here: no exploration tries so many."""
SPARES = 4
"""Fresh seeds, in a row or at once, that may be drawn in place of a sample without a reward."""

ShardResult = Rollout | Dropped | Surplus | Quarantined
"""What a shard of a request returns; the first shard's is the request's result."""


def rollout_shard(run_dir: str, request: Request, gang: str, shard: int) -> ShardResult:
    """One rank's part of denoising a request, resuming at its last committed step.

    Args:
        gang: names the request within the graph.
        shard: number among the shards of the widest gang; those not needed return once the first shard is done.
    """
    place = signals.placed(gang, shard, request)
    if isinstance(place, Quarantined):
        RunDir(run_dir).quarantine(place)
    if isinstance(place, Surplus | Quarantined):
        return place
    reason = signals.check(request)
    if reason:
        return _scored_before(run_dir, request) or Dropped(reason=reason)
    return device.current().rollout(run_dir, request, place)


def rollout_ahead(run_dir: str, request: Request, gang: str, shard: int) -> ShardResult:
    """As `rollout_shard`, of the next iteration, which finds the latents in the store.

    Without a dispatcher nothing is begun early: that iteration does it.
    """
    if not signals.was_told(gang, shard):
        return Dropped(reason=f"iteration {request.iteration} begins with it")
    place = signals.placed(gang, shard, request)
    return place if isinstance(place, Surplus | Quarantined) else device.current().rollout(run_dir, request, place)


def ended(results: Sequence[Any], surplus: Sequence[ShardResult]) -> None:
    """Does nothing: a task that waits for others. See `replace_unscored` for why it takes the other shards."""


def _scored_before(run_dir: str, request: Request) -> Rollout | None:
    """The result of a called-off request whose scores are stored: its worker, which held the result, is gone."""
    if _stored_scores(run_dir, request) is None:
        return None
    sha256 = request.weights.sha256
    return Rollout(request=request, weights_sha256=sha256, steps_resumed=request.steps, steps_run=0)


def _stored_scores(run_dir: str, request: Request) -> Scored | None:
    store = _latents(run_dir)
    known = store.known_scores(request) if store else None
    if known is None:
        return None
    parts = tuple(map(tuple, known.get("parts", ())))
    return Scored(request=request, rewards=tuple(known["rewards"]), errors=tuple(known["errors"]), parts=parts)


def decode(run_dir: str, done: ShardResult) -> ShardResult:
    """Decode the images of a rollout, for workers that only score; returns the rollout's result, or a `Dropped`."""
    dropped = device.current().decode(run_dir, done.request) if isinstance(done, Rollout) else None
    return dropped or done


def score(run_dir: str, done: ShardResult) -> Scored | Dropped | Quarantined:
    """Rewards of what was rolled out, given the result of the request's first shard.

    Raises:
        SpotlightError: it was rolled out with other weights than were asked for.
    """
    assert not isinstance(done, Surplus)
    if not isinstance(done, Rollout):
        return done
    if done.weights_sha256 != done.request.weights.sha256:
        raise SpotlightError(
            f"request {done.request.id} asked for weights {done.request.weights.sha256[:12]} and was run with "
            f"{done.weights_sha256[:12]}: nothing was trained on it; resume the run"
        )
    reason = signals.check(done.request)
    scored: Scored | Dropped
    if reason:  # also beside the scheduler, where there is no device
        scored = _stored_scores(run_dir, done.request) or Dropped(reason=reason)
    else:
        scored = device.current().score(run_dir, done.request)
    if isinstance(scored, Scored) and scored.steps_resumed != done.steps_resumed:
        return replace(scored, steps_resumed=done.steps_resumed)
    return scored


def score_whole(run_dir: str, seed: int, done: ShardResult) -> tuple[Scored, ...]:
    """As `score`, of samples that are trained on: those without a reward are replaced at once, on the same worker.

    Raises:
        SpotlightError: the replacements have no reward either.
    """
    scored = score(run_dir, done)
    assert not isinstance(scored, Dropped), "only exploration is dropped"
    return refill(run_dir, seed, scored)


def refill(run_dir: str, seed: int, scored: Scored | Quarantined) -> tuple[Scored, ...]:
    """Replace the samples that have no reward, or a request that was set aside, by fresh seeds of the same prompt.

    Raises:
        SpotlightError: the replacements have no reward either.
    """
    known = scored if isinstance(scored, Scored) else _unscored(scored)
    return (known, *_replacements(run_dir, seed, known))


def replace_unscored(
    run_dir: str, seed: int, scored: Sequence[Scored | Quarantined], surplus: Sequence[ShardResult] = ()
) -> tuple[ShardResult, ...]:
    """The first half of `refill`, for each request: denoise and decode fresh seeds, which are scored elsewhere.

    Args:
        surplus: the other shards of the requests. Dask forgets a task that nobody depends on, so the task that
            collects the scores also takes these.
    """
    found = (_with_spares(seed, result if isinstance(result, Scored) else _unscored(result)) for result in scored)
    return tuple(decode(run_dir, device.current().rollout(run_dir, fresh)) for fresh in found if fresh)


def score_all(run_dir: str, done: Sequence[ShardResult]) -> tuple[Scored | Dropped | Quarantined, ...]:
    """As `score` of each."""
    return tuple(score(run_dir, each) for each in done)


def refilled(seed: int, scored: Sequence[Scored | Quarantined], again: Sequence[Scored]) -> tuple[Scored, ...]:
    """The second half of `refill`: all requests with the scored replacements of their samples.

    Raises:
        SpotlightError: the replacements have no reward either.
    """
    fresh = {result.request: result for result in again}
    whole: list[Scored] = []
    for result in (each if isinstance(each, Scored) else _unscored(each) for each in scored):
        whole.append(result)
        asked = _with_spares(seed, result)
        if asked:
            whole.append(_rewarded(result, fresh[asked]))
    return tuple(whole)


def _unscored(aside: Quarantined) -> Scored:
    error = f"set aside: it killed those who ran it {aside.preemptions} times"
    return Scored(request=aside.request, rewards=(None,) * len(aside.request.seeds), errors=(error,))


def _replacements(run_dir: str, seed: int, scored: Scored) -> Iterator[Scored]:
    """Scores of fresh seeds until no reward is missing: `SPARES` rounds at most, one if no sample has any."""
    missing, drawn = scored.rewards.count(None), 0
    has_some = missing < len(scored.rewards)
    for rounds_left in reversed(range(SPARES)):
        if not missing:
            return
        fresh = _fresh(seed, scored, drawn, missing)
        device.current().rollout(run_dir, fresh)
        again = device.current().score(run_dir, fresh)
        assert isinstance(again, Scored), "only exploration is dropped"
        drawn, missing = drawn + missing, again.rewards.count(None)
        has_some |= missing < len(again.rewards)
        if missing and not (rounds_left and has_some):
            raise _without_reward(scored, again)
        yield again


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
    """A request of fresh seeds with some to spare, should they have no reward either; None where none is missing.

    It has no more seeds than the request before it, which is known to fit a device.
    """
    missing = scored.rewards.count(None)
    return _fresh(seed, scored, 0, min(SPARES * missing, len(scored.rewards))) if missing else None


def _rewarded(scored: Scored, again: Scored) -> Scored:
    """The scored replacements, of which only the first that have a reward keep it, as many as are missing.

    Raises:
        SpotlightError: there are not as many.
    """
    missing = scored.rewards.count(None)
    known = [at for at, reward in enumerate(again.rewards) if reward is not None][:missing]
    if len(known) < missing:
        raise _without_reward(scored, again)

    def only(rewards: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(reward if at in known else None for at, reward in enumerate(rewards))

    return replace(again, rewards=only(again.rewards), parts=tuple(map(only, again.parts)))


def _without_reward(scored: Scored, again: Scored) -> SpotlightError:
    request = scored.request
    seeds = [seed for seed, reward in zip(request.seeds, scored.rewards, strict=True) if reward is None]
    return SpotlightError(
        f"the reward failed for {request.prompt.text!r}, {len(seeds)} of {len(request.seeds)} seeds (such as "
        f"{seeds[0]}), and for those that replaced them: {again.errors[0]}; mend the scorer, then resume the run"
    )


def save_images(
    run_dir: str, version: int, scored: Sequence[Scored | Quarantined], surplus: Sequence[ShardResult] = ()
) -> str:
    """Write the validation images of a version as one .npz.

    Returns:
        Its path inside the run directory; empty where every request was set aside.
    """
    import numpy as np

    name = f"images/validation-{version:05d}.npz"
    requests = [result.request for result in scored if isinstance(result, Scored)]
    if not requests:
        return ""
    texts = [request.prompt.text for request in requests for _ in request.seeds]
    images = [device.current().images(run_dir, request) for request in requests]
    content = BytesIO()
    np.savez_compressed(content, images=np.concatenate(images), texts=texts)
    RunDir(run_dir).objects.put(name, content.getvalue())
    return name


def forget_unscored(run_dir: str) -> None:
    """Forget scores without a reward, so that they are scored anew: the scorer may have been mended since."""
    store = _latents(run_dir)
    if store:
        store.forget_unscored()


def compact(run_dir: str, iteration: int, keep: Literal["clean", "all", "none"]) -> None:
    """Apply the retention setting to the latents of an iteration that training is done with."""
    store = _latents(run_dir)
    if store:
        selection = RunDir(run_dir).selection(iteration)
        trained_on = (
            request_id(iteration, "explore", kept.prompt, drawn.seeds[0])
            for kept in (selection.kept if selection else ())
            for drawn in kept.drawn
        )
        store.finish_iteration(iteration, keep, set(trained_on))


def _latents(run_dir: str) -> LatentStore | None:
    """The run's store of latents; None where nothing was ever stored, so that nobody imports Zarr for that."""
    run = RunDir(run_dir)
    if not run.has_latents():
        return None
    from spotlight.store.latents import LatentStore

    return LatentStore(run.latents_url)
