"""What the runs would have cost at other prices of the same GPUs: their seconds are known, so nothing is run again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from benchmarks.target.cases import SETTINGS, Row, first_case
from spotlight import config
from spotlight.config import PoolSection
from spotlight.market.prices import usd_per_h

LISTS = {"RLBoost, 2025-10": "h100", "AWS, 2026": "h100-aws", "Google Cloud, 2026": "h100-gcp"}
"""{price list: its H100, by its name in ``spotlight/market/prices.toml``}"""


def at_prices(runs: Mapping[int, Row], strategy: str, gpu: str) -> dict[int, Row]:
    """The same runs, with dollars by the list's prices of an H100; whatever else a pool has costs what it did.

    A run's dollars are ``(r R t + s S) / 3600``, where its R reserved workers were there all the time, so S, the
    seconds of spot workers, follow from it.
    """
    reserved, spot = _pools(strategy)
    old = reserved.usd_per_h, spot.usd_per_h
    new = _price(reserved, "reserved", gpu), _price(spot, "spot", gpu)
    priced: dict[int, Row] = {}
    for seed, row in runs.items():
        reserved_h = [reserved.workers * seconds / 3600 for seconds in row["seconds"]]
        spot_h = [(usd - old[0] * hours) / old[1] for usd, hours in zip(row["usd"], reserved_h, strict=True)]
        usd = [new[0] * mine + new[1] * theirs for mine, theirs in zip(reserved_h, spot_h, strict=True)]
        priced[seed] = {**row, "usd": usd}
    return priced


@cache
def _pools(strategy: str) -> tuple[PoolSection, PoolSection]:
    pools = config.load(SETTINGS, first_case("digits", "2 levels", "512", strategy).overrides()).pools
    return pools.reserved, pools.spot


def _price(pool: PoolSection, name: str, gpu: str) -> float:
    return usd_per_h(gpu, name) if pool.gpu == "h100" else pool.usd_per_h
