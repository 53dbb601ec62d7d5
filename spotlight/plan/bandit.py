"""Decides which seeds to try and which of them to keep.

Values in, values out: no clock, no torch, and no randomness but what a seed argument fixes. Ties fall to
the earlier candidate, so the same rewards always give the same seeds.

A prompt is an arm: a pull is its next chunk of candidates, and pays the variance that the kept subset is
expected to gain. Beliefs about a prompt are counts of its rewards on a grid, fading with every iteration, over
kinds of prompts whose shares are learnt from all prompts, so that a new prompt starts with what the others taught.

Shapes: P prompts, K kinds, N grid nodes, V values of rewards, W imagined worlds, M kept, S sides (low and high).
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spotlight.plan.subset import finite_row

Array = NDArray[np.float64]
Narrow = NDArray[np.float32]
"""For what is computed in each world: single precision is enough, a reward's seventh digit decides nothing."""


def equal_shares(
    prompts: int, seeds_tried: int, chunk: int, rounds: int, round_index: int
) -> list[tuple[int, int, int]]:
    """One round of the plain allocation: every prompt gets the same number of candidates.

    Chunks are dealt candidates first: every prompt's first chunk, then every prompt's second. So wherever the deadline
    cuts, prompts are explored equally to within a chunk. The rounds together cover each prompt's candidates
    ``0 .. seeds_tried - 1`` exactly once, and their numbers of chunks differ by at most one.

    Args:
        prompts: how many there are.
        seeds_tried: candidates per prompt.
        chunk: most candidates in one request.
        rounds: how many rounds there are.
        round_index: which of them, from 0.

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
    start, end = (len(chunks) * edge // rounds for edge in (round_index, round_index + 1))
    return chunks[start:end]


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


GRID_N: Array = np.linspace(0.0, 1.0, 21)
"""Rewards are counted at their nearest node: halves, quarters and tenths are exact. A spread below 0.02 is not seen."""
_MEANS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 1.0)
_CONCENTRATIONS = (1.0, 4.0, 16.0, 64.0)
"""Of Beta distributions, beside coins: 1 is nearly a coin, 64 a bell with a standard deviation of 0.06 at most."""
_BACKGROUND = 0.005
"""Share of every kind that is spread over the whole grid, so that no reward is impossible."""
OWN_WEIGHT = 40.0
"""Rewards that a kind is worth beside a prompt's own. On coins, 10 lost some 3 points of the optimum's gain, 4 some 10;
25 and 60 were as good (``benchmarks.planner``)."""
START_PROMPTS = 1.0
"""Prompts that the first guess of the kinds' shares is worth."""
FADING = 0.93
"""What a count is worth an iteration later: half after ten."""
MEMORY = 64.0
"""Most rewards that a prompt's past is worth, so that a few iterations of drift never outweigh the present."""
LEAST_GAIN = 0.01
"""A chunk is tried if the variance it gains is at least this share of an average prompt's unexplored variance: so
little that coins of 0.5 stop at half of the shares, and lose no variance by it."""
WORLDS, LEAST_WORLDS, ALL_WORLDS = 128, 16, 2**14
"""In which a prompt is imagined: fewer where there are many prompts, so that the time grows little with them. Spread
evenly, 64 were as good as 256."""
PROBE_SHARE = 4
"""One prompt in so many is explored however low the fidelity is: it could not be measured again otherwise."""
FIDELITY_START = 0.8
"""The fidelity that is assumed before it is measured: that of the demo."""
FIDELITY_PAIRS = 32.0
"""Weight of the fidelity believed so far, in pairs, when new pairs come."""


def _check_length(name: str, values: Sequence[float], length: int) -> None:
    if len(values) != length:
        raise ValueError(f"{name} has {len(values)} values: give {length}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a prompt's rewards were."""

    prompt: int
    """Its id."""
    iteration: int
    """When the counts were last brought up to date."""
    counts: tuple[float, ...]
    """Rewards at each node of the grid; older ones count less."""

    def __post_init__(self) -> None:
        _check_length("counts", self.counts, len(GRID_N))


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """All that exploration remembers from one iteration to the next."""

    iteration: int = 0
    """The last one learnt from."""
    kinds: tuple[float, ...] = ()
    """Prompts seen of each kind, older ones counting less; empty before the first."""
    nodes: tuple[float, ...] = ()
    """The same prompts' rewards at each node of the grid, 1 in all for each prompt."""
    prompts: tuple[Seen, ...] = ()
    fidelity: float = FIDELITY_START
    """How much of a difference between two explored rewards is there again after regeneration, 0 to 1."""

    def __post_init__(self) -> None:
        if self.kinds or self.nodes:
            _check_length("kinds", self.kinds, len(_KINDS_KN))
            _check_length("nodes", self.nodes, len(GRID_N))

    def about(self, prompts: Sequence[int]) -> Beliefs:
        """The part that matters for some prompts: small enough to travel in a task."""
        wanted = set(prompts)
        return replace(self, prompts=tuple(seen for seen in self.prompts if seen.prompt in wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One prompt of the iteration, as far as it is explored."""

    prompt: int
    """Its id."""
    rewards: tuple[float, ...] = ()
    """Of the candidates scored so far."""
    tried: int = 0
    """Candidates given out so far: the next one has this number."""
    pending: int = 0
    """Those of them whose score is still to come; lost ones are not."""


def learn(
    beliefs: Beliefs,
    iteration: int,
    rewards: Mapping[int, Sequence[float]],
    pairs: Mapping[int, Sequence[tuple[float, float]]] | None = None,
) -> Beliefs:
    """What to believe after more rewards were seen.

    Args:
        iteration: the one that the rewards are from; not before ``beliefs.iteration``.
        rewards: ``{prompt id: rewards}`` in [0, 1]: of every candidate scored, or regenerated ones of seeds that
            were *not* chosen for their reward. Others would make each prompt look more varied than it is.
        pairs: ``{prompt id: (explored, regenerated) rewards}`` of the seeds that were kept.
    """
    age = iteration - beliefs.iteration
    counts_PN = _past(beliefs, rewards, iteration) + _counts(rewards.values())
    seen = tuple(
        Seen(prompt=prompt, iteration=iteration, counts=tuple(counts_N))
        for prompt, counts_N in zip(rewards, counts_PN.tolist(), strict=True)
    )
    kinds = _kinds(beliefs, age, counts_PN)
    return Beliefs(
        iteration=iteration,
        kinds=tuple(kinds.prompts_K.tolist()),
        nodes=tuple(kinds.prompts_N.tolist()),
        prompts=(*(known for known in beliefs.prompts if known.prompt not in rewards), *seen),
        fidelity=_fidelity(beliefs.fidelity, (pairs or {}).values()),
    )


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
        seed_s: worker seconds of one candidate, as the last iteration had them.
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
    rho: float | None = None,
    optimism: float = 0.0,
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
        beliefs: of the iterations before; ``arms`` are learnt from here.
        slots: most chunks in this round.
        later: most chunks in the rounds behind it. All are planned, then those that teach most are run first:
            each prompt's next chunk before any prompt's next but one.
        candidates: most candidates in all these chunks.
        chunk: candidates in a chunk; the last may have fewer.
        keep: seeds of a prompt that are kept, from 2. With fewer scored, untried seeds fill the group, so the
            first ``keep`` gain nothing and chunks are judged by what they gain together with those behind them.
        rho: ranking fidelity, 0 to 1; None takes the beliefs'.
        optimism: standard deviations between the worlds that are added to the mean gain (UCB); 0 averages over the
            posterior.
        seed: fixes the worlds' random numbers, the same for all arms, so that equal arms have equal gains.

    Returns:
        ``(arm index, first candidate, number of candidates)`` each, in the order to run them.

    Raises:
        ValueError: a number is out of range.
    """
    rho = beliefs.fidelity if rho is None else rho
    if min(chunk, keep - 1) < 1 or min(slots, later, candidates, optimism) < 0 or not 0 <= rho <= 1:
        raise ValueError(
            f"chunk = {chunk} must be positive, keep = {keep} at least 2, slots = {slots}, later = {later}, "
            f"candidates = {candidates} and optimism = {optimism} not negative, and rho = {rho} in [0, 1]"
        )
    plan = min(slots + later, -(-candidates // chunk))
    if not arms or not slots or not plan:
        return []
    chance_PKN, shares_PK = _posterior(arms, beliefs, iteration)
    ahead = min(plan, -(-keep // chunk) + 8)
    worlds_PWJ = _imagine(arms, chance_PKN, shares_PK, ahead, chunk, keep, seed)
    gained_PJ = worlds_PWJ.mean(axis=1) + optimism * (worlds_PWJ - worlds_PWJ[..., :1]).std(axis=1)
    slopes_PJ = rho**2 * _slopes(gained_PJ)
    least = LEAST_GAIN * _unexplored_variance(chance_PKN, shares_PK, keep).mean()
    order = _greedy(arms, slopes_PJ, plan, least)
    if not any(arm.tried for arm in arms):
        order += _probes(order, slopes_PJ, plan)
    return sorted(_chunks(arms, order, chunk, candidates), key=lambda allotted: allotted[1])[:slots]


def _posterior(arms: Sequence[Arm], beliefs: Beliefs, iteration: int) -> tuple[Array, Array]:
    """Chances of each node, (P, K, N), were the prompt of that kind; and how likely that is, (P, K)."""
    counts_PN = _past(beliefs, [arm.prompt for arm in arms], iteration) + _counts([arm.rewards for arm in arms])
    kinds = _kinds(beliefs, iteration - beliefs.iteration, counts_PN)
    total_P = OWN_WEIGHT + counts_PN.sum(axis=1)
    return (OWN_WEIGHT * kinds.chance_KN + counts_PN[:, None]) / total_P[:, None, None], kinds.shares_PK


def _imagine(
    arms: Sequence[Arm], chance_PKN: Array, shares_PK: Array, ahead: int, chunk: int, keep: int, seed: int
) -> Array:
    """Variance of the kept subset after 0, 1, ... ``ahead`` further chunks, in each world: (P, W, ahead + 1).

    Draw by draw, for all arms and worlds at once. A draw's random numbers are spread evenly over the worlds, in an
    order of its own (a Latin hypercube), so that few worlds do for many.
    """
    scored_P = np.array([len(arm.rewards) for arm in arms])
    pending_P = np.array([arm.pending for arm in arms])
    drawn_JP = np.maximum(pending_P + chunk * np.arange(ahead + 1)[:, None], keep - scored_P)
    new_JP = np.diff(drawn_JP, axis=0, prepend=0)
    worlds = min(WORLDS, max(LEAST_WORLDS, ALL_WORLDS // len(arms)))
    rng = np.random.Generator(np.random.Philox(key=seed))
    kind_W = (np.arange(worlds) + rng.random()) / worlds
    kind_PW = (shares_PK.cumsum(axis=1)[:, None, :-1] < kind_W[:, None]).sum(axis=-1)
    below_NPW = np.moveaxis(np.take_along_axis(chance_PKN.cumsum(axis=-1)[..., :-1], kind_PW[..., None], axis=1), -1, 0)
    below_NPW = np.ascontiguousarray(below_NPW, dtype=np.float32)
    grid_N = np.arange(len(GRID_N), dtype=np.uint8) * np.float32(GRID_N[1])
    values_V = np.unique(np.concatenate([grid_N, *(np.array(arm.rewards, dtype=np.float32) for arm in arms)]))
    ranks_MSPW = _extremes(arms, values_V, keep, worlds)
    none, last = _none(ranks_MSPW.dtype), len(values_V) - 1
    rank_N = np.searchsorted(values_V, grid_N).astype(ranks_MSPW.dtype)
    low_V, high_V = (
        np.append(side_V, np.float32(end)) for side_V, end in ((values_V, np.inf), (values_V[::-1], -np.inf))
    )
    new_SPW = np.empty_like(ranks_MSPW[0])
    variance_JPW = np.empty((ahead + 1, *kind_PW.shape), dtype=np.float32)
    for new_P, variance_PW in zip(new_JP, variance_JPW, strict=True):
        for at in range(new_P.max()):
            uniform_W = ((rng.permutation(worlds) + rng.random(worlds)) / worlds).astype(np.float32)
            node_PW = (below_NPW < uniform_W).view(np.uint8).sum(axis=0, dtype=np.uint8)
            np.take(rank_N, node_PW, out=new_SPW[0], mode="clip")
            np.subtract(last, new_SPW[0], out=new_SPW[1])
            if (absent_P := new_P <= at).any():
                new_SPW[:, absent_P] = none
            _insert(ranks_MSPW, new_SPW)
        low_MPW, high_MPW = (ranks_MSPW[:, side].astype(np.intp) for side in (0, 1))
        variance_PW[:] = _best_variance(low_V.take(low_MPW, mode="clip"), high_V.take(high_MPW, mode="clip"))
    return np.moveaxis(variance_JPW, 0, -1).astype(np.float64)


def _none(kind: np.dtype[Any]) -> int:
    """The rank of no reward: behind all others."""
    return int(np.iinfo(kind).max)


def _extremes(arms: Sequence[Arm], values_V: Narrow, keep: int, worlds: int) -> NDArray[Any]:
    """Ranks among the values of the lowest scored rewards, and, from the other end, of the highest, ascending.

    Shape (M, S, P, W). Ranks, in one byte where that is enough, are compared faster than rewards. The last one
    stands for no reward, where there are too few.
    """
    kind: type[np.unsignedinteger[Any]] = np.uint8 if len(values_V) < 256 else np.uint32
    columns = max(keep, *(len(arm.rewards) for arm in arms))
    both = np.full((2, len(arms), columns), _none(np.dtype(kind)), dtype=kind)
    for p, arm in enumerate(arms):
        ranks = np.searchsorted(values_V, np.array(arm.rewards, dtype=np.float32))
        both[:, p, : len(arm.rewards)] = ranks, len(values_V) - 1 - ranks
    both.sort(axis=-1)
    return np.repeat(np.moveaxis(both, -1, 0)[:keep, :, :, None], worlds, axis=-1)


def _insert(lowest_MSPW: NDArray[Any], new_SPW: NDArray[Any]) -> None:
    """A new value among the lowest, which stay ascending: what it displaces moves up. It is overwritten."""
    larger_SPW = np.empty_like(new_SPW)
    for value_SPW in lowest_MSPW:
        np.maximum(value_SPW, new_SPW, out=larger_SPW)
        np.minimum(value_SPW, new_SPW, out=value_SPW)
        new_SPW, larger_SPW = larger_SPW, new_SPW


def _best_variance(low_MPW: Narrow, high_MPW: Narrow) -> Narrow:
    """The largest variance of M rewards, given the M lowest ascending and the M highest descending."""
    keep = len(low_MPW)
    means, variances = _splits(low_MPW, high_MPW), _splits(low_MPW**2, high_MPW**2)
    means /= keep
    variances /= keep
    variances -= np.square(means, out=means)
    best: Narrow = variances.max(axis=0)
    return best


def _splits(low_MPW: Narrow, high_MPW: Narrow) -> Narrow:
    """Sums of the i lowest and the M - i highest, for i from 0 to M."""
    keep, high_PW = len(low_MPW), np.zeros_like(low_MPW[0])
    sums_IPW = np.zeros((keep + 1, *high_PW.shape), dtype=np.float32)
    for i in range(keep):
        np.add(sums_IPW[i], low_MPW[i], out=sums_IPW[i + 1])
    for i in range(keep):
        high_PW += high_MPW[i]
        sums_IPW[keep - 1 - i] += high_PW
    return sums_IPW


def _slopes(gained_PJ: Array) -> Array:
    """Gain per chunk from each number of chunks on, of the curves' concave hulls: (P, J - 1), descending in J.

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


def _greedy(arms: Sequence[Arm], slopes_PJ: Array, slots: int, least: float) -> list[int]:
    """Arms in the order of their chunks: the steepest first, of equal ones the least tried."""
    planned = [0] * len(arms)
    waiting = [(-slopes_PJ[p, 0], arm.tried, p) for p, arm in enumerate(arms) if slopes_PJ[p, 0] >= least]
    heapq.heapify(waiting)
    order: list[int] = []
    while waiting and len(order) < slots:
        _, tried, p = heapq.heappop(waiting)
        order.append(p)
        planned[p] += 1
        if planned[p] < slopes_PJ.shape[1] and slopes_PJ[p, planned[p]] >= least:
            heapq.heappush(waiting, (-slopes_PJ[p, planned[p]], tried + 1, p))
    return order


def _probes(order: Sequence[int], slopes_PJ: Array, slots: int) -> list[int]:
    """Chunks for further arms, steepest first, until enough arms are explored to measure the fidelity."""
    idle = sorted(set(range(len(slopes_PJ))) - set(order), key=lambda p: (-slopes_PJ[p, 0], p))
    enough = -(-len(slopes_PJ) // PROBE_SHARE) - len(set(order))
    return idle[: max(0, min(enough, slots - len(order)))]


def _chunks(arms: Sequence[Arm], order: Sequence[int], chunk: int, candidates: int) -> list[tuple[int, int, int]]:
    following = [arm.tried for arm in arms]
    chunks = []
    for p in order:
        count = min(chunk, candidates)
        chunks.append((p, following[p], count))
        following[p] += count
        candidates -= count
    return chunks


def _counts(rewards_P: Collection[Sequence[float]]) -> Array:
    """How many of each prompt's rewards are nearest to each node, (P, N); those outside count at the grid's ends."""
    last = len(GRID_N) - 1
    prompt_L = np.repeat(np.arange(len(rewards_P)), [len(rewards) for rewards in rewards_P])
    rewards_L = np.fromiter(chain.from_iterable(rewards_P), dtype=np.float64)
    node_L = np.rint(np.clip(rewards_L, 0, 1) * last).astype(np.int64)
    counts = np.bincount(prompt_L * len(GRID_N) + node_L, minlength=len(rewards_P) * len(GRID_N))
    return counts.reshape(len(rewards_P), len(GRID_N)).astype(np.float64)


def _past(beliefs: Beliefs, prompts: Iterable[int], iteration: int) -> Array:
    """What is still known of prompts' rewards, (P, N)."""
    known = {seen.prompt: seen for seen in beliefs.prompts}
    nothing = Seen(prompt=-1, iteration=iteration, counts=(0.0,) * len(GRID_N))
    seen = [known.get(prompt, nothing) for prompt in prompts]
    counts_PN = np.array([known.counts for known in seen]).reshape(len(seen), len(GRID_N))
    counts_PN *= FADING ** np.array([[iteration - known.iteration] for known in seen]).reshape(len(seen), 1)
    return np.asarray(counts_PN * np.minimum(1.0, MEMORY / np.maximum(counts_PN.sum(axis=1, keepdims=True), 1.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kinds:
    """The kinds of prompts, as the prompts seen have shaped them."""

    prompts_K: Array
    """Prompts seen of each."""
    prompts_N: Array
    """The same prompts, spread over their rewards."""
    chance_KN: Array
    """Chance of each node."""
    shares_PK: Array
    """How likely each prompt is of each kind."""


def _kinds(beliefs: Beliefs, age: int, counts_PN: Array) -> _Kinds:
    """Empirical Bayes: the kinds' shares, their shapes and the prompts' kinds, each worked out from the others in turn.

    All kinds are stretched alike, so that together they give the rewards that were seen. So a reward of few values, or
    one that keeps to a small part of [0, 1], makes kinds that do the same.
    """
    seen_PN = counts_PN[counts_PN.any(axis=1)]
    fading = FADING**age
    past_K = fading * np.array(beliefs.kinds) if beliefs.kinds else np.zeros(len(_KINDS_KN))
    past_N = fading * np.array(beliefs.nodes) if beliefs.nodes else np.zeros(len(GRID_N))
    prompts_N = past_N + (seen_PN / seen_PN.sum(axis=1, keepdims=True)).sum(axis=0)
    prompts_K, chance_KN = past_K, _KINDS_KN
    for _ in range(5):
        log_PK = np.log(prompts_K + START_PROMPTS / len(_KINDS_KN)) + counts_PN @ np.log(chance_KN).T
        shares_PK = np.exp(log_PK - log_PK.max(axis=1, keepdims=True))
        shares_PK /= shares_PK.sum(axis=1, keepdims=True)
        prompts_K = past_K + shares_PK[counts_PN.any(axis=1)].sum(axis=0)
        if total := prompts_K.sum():
            expected_N = prompts_K @ chance_KN
            stretch_N = (prompts_N / expected_N * total + START_PROMPTS) / (total + START_PROMPTS)
            chance_KN = chance_KN * stretch_N
            chance_KN = chance_KN / chance_KN.sum(axis=1, keepdims=True)
    return _Kinds(prompts_K=prompts_K, prompts_N=prompts_N, chance_KN=chance_KN, shares_PK=shares_PK)


def _unexplored_variance(chance_PKN: Array, shares_PK: Array, keep: int) -> Array:
    """What ``keep`` seeds taken unseen are expected to have."""
    mean_PK, square_PK = chance_PKN @ GRID_N, chance_PKN @ GRID_N**2
    return (shares_PK * (square_PK - mean_PK**2)).sum(axis=1) * (keep - 1) / keep


def _fidelity(before: float, pairs: Iterable[Sequence[tuple[float, float]]]) -> float:
    """Fidelity with these pairs among its measurements.

    It is the slope of regenerated on explored rewards *within* prompts. Unlike a correlation, a slope does not
    change by choosing seeds for their explored reward; and unlike a pooled one, it does not count that
    prompts differ.
    """
    rows = [np.array(values) for values in pairs if len({explored for explored, _ in values}) > 1]
    if not rows:
        return before
    x, y = np.concatenate([values - values.mean(axis=0) for values in rows]).T
    slope = float(x @ y) / float(x @ x)
    return min(1.0, max(0.0, before + (slope - before) * len(x) / (len(x) + FIDELITY_PAIRS)))


def _make_kinds() -> Array:
    """The kinds of prompts, (K, N): Beta distributions on the grid, from coins to bells, for every difficulty."""
    inner_N = np.clip(GRID_N, 0.5 / len(GRID_N), 1 - 0.5 / len(GRID_N))
    kinds = []
    for mean in _MEANS:
        kinds.append(np.where(GRID_N == 0, 1 - mean, np.where(GRID_N == 1, mean, 0.0)))
        for concentration in _CONCENTRATIONS:
            if concentration <= 200 * min(mean, 1 - mean):  # narrower ones fall on one or two nodes, as coins do
                a, b = mean * concentration, (1 - mean) * concentration
                log_N = (a - 1) * np.log(inner_N) + (b - 1) * np.log1p(-inner_N)
                kinds.append(np.exp(log_N - log_N.max()))
    kinds_KN = np.stack(kinds)
    return _BACKGROUND / len(GRID_N) + (1 - _BACKGROUND) * kinds_KN / kinds_KN.sum(axis=1, keepdims=True)


_KINDS_KN = _make_kinds()
