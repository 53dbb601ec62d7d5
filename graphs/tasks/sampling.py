"""Rollouts and their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

from spotlight.device import protocol as device
from spotlight.device.signals import signals
from spotlight.records import Dropped, Quarantined, Request, Rollout, Scored, SpotlightError, Surplus, request_id
from spotlight.store.rundir import RunDir

if TYPE_CHECKING:
    from spotlight.store.latents import LatentStore

ShardResult = Rollout | Dropped | Surplus | Quarantined
"""What a shard of a request returns; the first shard's is the request's result."""
_opened: dict[str, LatentStore] = {}
"""{run directory: its latents}, where scores were looked for: the next iteration waits until all candidates that were
called off have been, and the address is in the run's settings."""


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
    """Does nothing: a task that waits for others. See `refills.replace_unscored` for why it takes the other shards."""


def _scored_before(run_dir: str, request: Request) -> Rollout | None:
    """The result of a called-off request whose scores are stored: its worker, which held the result, is gone."""
    if _stored_scores(run_dir, request) is None:
        return None
    sha256 = request.weights.sha256
    return Rollout(request=request, weights_sha256=sha256, steps_resumed=request.steps, steps_run=0)


def _stored_scores(run_dir: str, request: Request) -> Scored | None:
    if run_dir not in _opened and (found := _latents(run_dir)):
        _opened[run_dir] = found
    store = _opened.get(run_dir)
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
