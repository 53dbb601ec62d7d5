"""Decides which seeds to try.

Values in, values out: no clock, no torch, and no randomness but what a seed argument fixes. Ties fall to
the earlier candidate, so the same rewards always give the same seeds.

A prompt is an arm: a pull is its next chunk of candidates, and pays the variance that the kept subset is
expected to gain.

Shapes: P prompts, J chunks, W imagined worlds.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spotlight.plan.beliefs import Arm, Array, Beliefs, posterior, unexplored_variance
from spotlight.plan.subset import finite_row
from spotlight.plan.worlds import imagine


def equal_shares(
    prompts: int, seeds_tried: int, chunk: int, rounds: int, round_index: int, *, keep: int = 0
) -> list[tuple[int, int, int]]:
    """One round of the plain allocation: every prompt gets the same number of candidates.

    Chunks are dealt candidates first: every prompt's first chunk, then every prompt's second. So wherever the deadline
    cuts, prompts are explored equally to within a chunk, but for their first ``keep``. The rounds together cover each
    prompt's candidates ``0 .. seeds_tried - 1`` exactly once, and their numbers of chunks differ by at most one.

    Args:
        prompts: how many there are.
        seeds_tried: candidates per prompt.
        chunk: most candidates in one request.
        rounds: how many rounds there are.
        round_index: which of them, from 0.
        keep: candidates that a prompt gets before the next gets any: where candidates are trained on as drawn, a prompt
            with fewer is rolled out whole.

    Returns:
        ``(prompt index, first candidate, number of candidates)`` each, in the order to run them.

    Raises:
        ValueError: a count is not positive, or there is no such round.
    """
    if min(prompts, seeds_tried, chunk, rounds) < 1 or not 0 <= round_index < rounds:
        raise ValueError(
            f"prompts = {prompts}, seeds_tried = {seeds_tried}, chunk = {chunk} and rounds = {rounds} must be positive "
            f"and round_index = {round_index} in [0, rounds)"
        )
    chunks = [
        (prompt, first, min(chunk, seeds_tried - first))
        for first in range(0, seeds_tried, chunk)
        for prompt in range(prompts)
    ]
    chunks.sort(key=lambda dealt: (0, dealt[0]) if dealt[1] < keep else (1, dealt[1]))  # stable
    start, end = (len(chunks) * edge // rounds for edge in (round_index, round_index + 1))
    return chunks[start:end]


ROUNDS_MAX = 16
"""Most rounds of an exploration: with 32 the planner gained little more (docs/results/planner.md), and each has layers
in the graph."""


def rounds_of(slots: int, gangs: int) -> int:
    """How many rounds to split the slots into: the more rounds, the more scores each chunk is chosen by.

    A round sees the scores of all rounds but the one before it, so two are under way at a time. Together they must have
    work for all gangs.

    Args:
        slots: chunks of candidates in all rounds.
        gangs: how many explore at once.
    """
    return max(1, min(ROUNDS_MAX, slots // -(-max(1, gangs) // 2)))


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float | None:
    """Spearman's rank correlation of paired numbers, equal ones sharing their mean rank; in [-1, 1].

    Returns:
        None where it is undefined: fewer than two pairs, or one side is constant.

    Raises:
        ValueError: the lengths differ, or a number is not finite.
    """
    left, right = finite_row(a, "a"), finite_row(b, "b")
    if len(left) != len(right):
        raise ValueError(f"pairs are needed, and there are {len(left)} and {len(right)} numbers")
    if len(left) < 2:
        return None
    x, y = _centred_ranks(left), _centred_ranks(right)
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else None


def _centred_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return np.asarray(ranks[inverse] - (len(values) + 1) / 2)


LEAST_GAIN = 0.01
"""A chunk is tried if the variance it gains is at least this share of an average prompt's unexplored variance: so
little that rewards of 0 or 1 with even chances stop at half of the shares, and lose no variance by it."""
PROBE_SHARE = 4
"""One prompt in so many is explored however low the fidelity is: it could not be measured again otherwise."""
SLACK, RECENT = 1.5, 4
"""Exploration is planned for more time than there was in so many iterations: what is too much is called off, least
useful first."""


def affordable(*, spare_s: Sequence[float], seed_s: float, chunk: int) -> int | None:
    """Candidates, in whole chunks, that there is time for beside training::

        chunk floor(SLACK mean(spare_s[-RECENT:]) / (chunk seed_s))

    Args:
        spare_s: worker seconds that spot workers had beside training in past iterations, the last one last: what they
            still rolled out meanwhile is not in it. The mean of the last few is taken: a loss in a rollout leaves
            little, and says nothing of the next.
        seed_s: worker seconds of one candidate, in the last iteration that scored any.
        chunk: candidates in one request.

    Returns:
        None where the mean of the last iterations, or ``seed_s``, is 0: nothing can be foretold.

    Raises:
        ValueError: a number is negative or not finite, or a chunk has no candidate.

    Source: the papers name a training-time budget and no formula; this one is ours.
    """
    if chunk < 1 or not all(math.isfinite(number) and number >= 0 for number in (*spare_s, seed_s)):
        raise ValueError(
            f"spare_s = {spare_s} and seed_s = {seed_s} must be finite and not negative, and chunk = {chunk} at least 1"
        )
    mean_s = statistics.fmean(spare_s[-RECENT:]) if spare_s else 0.0
    return chunk * math.floor(SLACK * mean_s / (chunk * seed_s)) if mean_s and seed_s else None


def allocate(
    arms: Sequence[Arm],
    beliefs: Beliefs,
    *,
    iteration: int,
    slots: int,
    later: int,
    candidates: int,
    chunk: int,
    keep: int,
    complete: int = 0,
    rho: float | None = None,
    seed: int,
) -> list[tuple[int, int, int]]:
    """One round of the bandit: the chunks that raise the variance of the kept seeds most, at most one a slot.

    The pay-off of a chunk is imagined in a few worlds, each drawn from what is believed of the prompt: rewards for the
    pending candidates and for the chunks to come, and the largest variance of ``keep`` of them. Regeneration keeps
    ``rho`` of a difference in reward, thus ``rho**2`` of a gain in variance (exact for Gaussian rewards). Chunks whose
    gain is then too small to matter are not tried: solved and hopeless prompts get none, and a low ``rho`` leaves
    only the few that measure it.

    Args:
        arms: the iteration's prompts; what is pending counts as planned.
        beliefs: learnt from the iterations before; what ``arms`` show is added to them here.
        slots: most chunks in this round.
        later: most chunks in the rounds behind it. All are planned, then those that teach most are run first:
            first every prompt's next chunk, then every prompt's second-next.
        candidates: most candidates in all these chunks.
        chunk: candidates in a chunk; the last may have fewer.
        keep: seeds of a prompt that are kept, from 2. With fewer scored, untried seeds fill the group, so the
            first ``keep`` gain nothing and chunks are judged by what they gain together with those behind them.
        complete: prompts that get ``keep`` candidates before any gets more, one prompt after the other, those that gain
            most first: where candidates are trained on as drawn, a prompt with fewer is rolled out whole.
        rho: ranking fidelity, 0 to 1; None takes the beliefs'.
        seed: fixes the worlds' random numbers, the same for all arms, so that equal arms have equal gains.

    Returns:
        ``(arm index, first candidate, number of candidates)`` each, in the order to run them.

    Raises:
        ValueError: a number is out of range.
    """
    rho = beliefs.fidelity if rho is None else rho
    if min(chunk, keep - 1) < 1 or min(slots, later, candidates, complete) < 0 or not 0 <= rho <= 1:
        raise ValueError(
            f"chunk = {chunk} must be positive, keep = {keep} at least 2, slots = {slots}, later = {later}, "
            f"candidates = {candidates} and complete = {complete} not negative, and rho = {rho} in [0, 1]"
        )
    plan = min(slots + later, -(-candidates // chunk))
    if not arms or not slots or not plan:
        return []
    chance_PKN, shares_PK = posterior(arms, beliefs, iteration)
    ahead = min(plan, _ahead(keep, chunk))
    worlds_PWJ = imagine(arms, chance_PKN, shares_PK, ahead, chunk, keep, seed)
    gained_PJ = worlds_PWJ.mean(axis=1)
    slopes_PJ = rho**2 * _slopes(gained_PJ)
    least = LEAST_GAIN * unexplored_variance(chance_PKN, shares_PK, keep).mean()
    completing = _completing(arms, slopes_PJ, complete, chunk, keep)[:plan]
    order = completing + _greedy(arms, slopes_PJ, plan, least, completing)
    if not any(arm.tried for arm in arms):
        order += _probes(order, slopes_PJ, plan)
    chunks, first = _chunks(arms, order, chunk, candidates), len(completing)
    return [*chunks[:first], *sorted(chunks[first:], key=lambda allotted: allotted[1])][:slots]


def captured_variance(
    prompts: Sequence[int],
    beliefs: Beliefs,
    *,
    iteration: int,
    groups: int,
    chunks: int,
    chunk: int,
    keep: int,
    seed: int,
    drawn: int = 0,
) -> list[float]:
    """Variance that the kept seeds of an iteration are expected to have, after 0, 1, 2, ... chunks by `allocate`.

    The sum over the ``groups`` prompts that are rolled out. What is not explored is not chosen for its variance, and
    has that of an average prompt; of what is explored, the prompts that vary most are rolled out.

    Args:
        prompts: ids of those that may be explored.
        groups: how many of them are rolled out.
        chunks: most that are planned; the list ends earlier where no further chunk gains anything.
        chunk, keep, seed: as in `allocate`.
        drawn: chunks that each prompt gets in any case, which are not among those counted: where candidates are trained
            on as drawn, ``keep`` of them must be drawn.
    """
    arms = [Arm(prompt=prompt) for prompt in prompts]
    chance_PKN, shares_PK = posterior(arms, beliefs, iteration)
    ahead = max(1, min(drawn + chunks, _ahead(keep, chunk)))
    gained_PJ = imagine(arms, chance_PKN, shares_PK, ahead, chunk, keep, seed).mean(axis=1)
    slopes_PJ = beliefs.fidelity**2 * _slopes(gained_PJ[:, drawn:])
    unexplored_P = unexplored_variance(chance_PKN, shares_PK, keep)
    expected_P = unexplored_P + beliefs.fidelity**2 * (gained_PJ[:, drawn] - gained_PJ[:, 0])
    average, planned = float(unexplored_P.mean()), [0] * len(arms)

    def captured() -> float:
        explored = (variance for variance, count in zip(expected_P.tolist(), planned, strict=True) if drawn or count)
        chosen = sorted(explored)[-groups:]
        return sum(chosen) + (groups - len(chosen)) * average

    found = [captured()]
    for p in _greedy(arms, slopes_PJ, chunks, LEAST_GAIN * average):
        expected_P[p] += slopes_PJ[p, planned[p]]
        planned[p] += 1
        found.append(captured())
    return found


def _ahead(keep: int, chunk: int) -> int:
    """Chunks of a prompt that are imagined: the first ones gain only together."""
    return -(-keep // chunk) + 8


def _slopes(gained_PJ: Array) -> Array:
    """Slopes of the gain curves' concave hulls, the gain of one more chunk after j: (P, J - 1), descending in j.

    So chunks that gain only together, as those within ``keep`` do, are worth the same each. The hull's slope behind j
    is the least, over the points up to j, of the steepest line from there to a point behind j.
    """
    last = gained_PJ.shape[1] - 1
    slopes_PJ = np.full((len(gained_PJ), last), np.inf)
    for start in range(last):
        steepness_PJ = (gained_PJ[:, start + 1 :] - gained_PJ[:, start, None]) / np.arange(1, last - start + 1)
        steepest_PJ = np.maximum.accumulate(steepness_PJ[:, ::-1], axis=1)[:, ::-1]
        np.minimum(slopes_PJ[:, start:], steepest_PJ, out=slopes_PJ[:, start:])
    return slopes_PJ


def _completing(arms: Sequence[Arm], slopes_PJ: Array, complete: int, chunk: int, keep: int) -> list[int]:
    """The chunks that give up to ``complete`` arms ``keep`` candidates each, as the arm of each chunk, in order.

    Arms that have candidates already come first, then those that gain most.
    """
    order = sorted(range(len(arms)), key=lambda p: (not arms[p].tried, -slopes_PJ[p, 0], p))
    return [p for p in order[:complete] for _ in range(arms[p].tried, keep, chunk)]


def _greedy(arms: Sequence[Arm], slopes_PJ: Array, slots: int, least: float, given: Sequence[int] = ()) -> list[int]:
    """The chunks to add to those ``given``, as the arm of each: largest gain first, of equal ones the least tried."""
    planned = [0] * len(arms)
    for p in given:
        planned[p] += 1
    heap: list[tuple[float, int, int]] = []

    def push(p: int) -> None:
        if planned[p] < slopes_PJ.shape[1] and (slope := slopes_PJ[p, planned[p]]) >= least:
            heapq.heappush(heap, (-slope, arms[p].tried + planned[p], p))

    for p in range(len(arms)):
        push(p)
    order: list[int] = []
    while heap and len(given) + len(order) < slots:
        p = heapq.heappop(heap)[-1]
        order.append(p)
        planned[p] += 1
        push(p)
    return order


def _probes(order: Sequence[int], slopes_PJ: Array, slots: int) -> list[int]:
    """Chunks for further arms, steepest first, until enough arms are explored to measure the fidelity."""
    idle = sorted(set(range(len(slopes_PJ))) - set(order), key=lambda p: (-slopes_PJ[p, 0], p))
    enough = -(-len(slopes_PJ) // PROBE_SHARE) - len(set(order))
    return idle[: max(0, min(enough, slots - len(order)))]


def _chunks(arms: Sequence[Arm], order: Sequence[int], chunk: int, candidates: int) -> list[tuple[int, int, int]]:
    """``(arm, first candidate, number of candidates)`` for each arm in ``order``: its next chunk."""
    following = [arm.tried for arm in arms]
    chunks = []
    for p in order:
        count = min(chunk, candidates)
        chunks.append((p, following[p], count))
        following[p] += count
        candidates -= count
    return chunks
