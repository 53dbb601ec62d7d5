"""Reads prices: the packaged list by type of GPU, and files of prices that change in time.

Nothing is fetched. A run's prices are in its settings: the list is only read when these are.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from spotlight.files import kind_of, read_bytes, shown
from spotlight.market.ledger import LATEST_S, Price
from spotlight.records import SpotlightError

LIST = Path(__file__).with_name("prices.toml")
USUAL_GPU = "h100"
"""GPU of a pool that names none."""
COLUMNS = ("time", "usd_per_h"), ("since_start_s", "usd_per_h")
"""The first lines that a file of prices may have."""


@cache
def price_list() -> Mapping[str, Mapping[str, Any]]:
    """``{gpu: {"reserved": usd_per_h, "spot": usd_per_h, "source": text, "date": text}}``, as packaged."""
    return tomllib.loads(LIST.read_text("utf-8"))


def usd_per_h(gpu: str, pool: str) -> float:
    """The listed price of one GPU: the spot price in the pool "spot", the reserved price in any other.

    Raises:
        ValueError: there is no such GPU in the list; the text names those that are.
    """
    if gpu not in price_list():
        known = ", ".join(map(repr, sorted(price_list())))
        raise ValueError(
            f"pools.{pool}.gpu = {gpu!r} is not in the price list, which has {known}: "
            f"choose one of them, or give pools.{pool}.usd_per_h yourself"
        )
    return float(price_list()[gpu]["spot" if pool == "spot" else "reserved"])


def read_prices(path: str | Path) -> Price:
    """Read a CSV file of prices over time. Its first line is ``time,usd_per_h`` or ``since_start_s,usd_per_h``.

    ``time`` is ISO 8601, UTC where it names no zone, or Unix seconds; ``since_start_s`` counts seconds from when the
    run's first worker joined, to replay a recorded price. Each price holds until the next line's time.

    Raises:
        SpotlightError: the file or a line of it is not usable; the text says which and why.
    """
    path = Path(path)
    if not kind_of(path):
        raise SpotlightError(f"{path}: no such file of prices; give a CSV file of time,usd_per_h")
    try:
        lines = [line.strip() for line in read_bytes(path, "a CSV file of prices").decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise SpotlightError(f"{path}: cannot be read as a CSV file of time,usd_per_h: {error}") from None
    rows = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    header = tuple(name.strip() for name in rows[0][1].split(",")) if rows else ()
    if header not in COLUMNS:
        first = f":{rows[0][0]}: {shown(rows[0][1])}" if rows else ": the file is empty; its first line"
        raise SpotlightError(f"{path}{first} should be time,usd_per_h or since_start_s,usd_per_h")
    if len(rows) == 1:
        raise SpotlightError(f"{path}: holds no price: add a line such as 2026-01-31T12:00:00Z,2.66")
    times_s: list[float] = []
    prices: list[float] = []
    for number, line in rows[1:]:
        try:
            at_s, price = _row(line, calendar=header[0] == "time")
            if times_s and at_s <= times_s[-1]:
                raise ValueError("its time is not after the line before; sort the lines, one for each time")
        except (ValueError, csv.Error) as error:
            raise SpotlightError(f"{path}:{number}: {shown(line)}: {error}") from None
        times_s.append(at_s)
        prices.append(price)
    return Price(times_s=tuple(times_s), usd_per_h=tuple(prices), since_start=header[0] != "time")


def _row(line: str, *, calendar: bool) -> tuple[float, float]:
    """One line's time in seconds, and its price."""
    fields = next(csv.reader([line]))
    if len(fields) != 2:
        raise ValueError(f"has {len(fields)} fields; expected two, a time and a price")
    at_s, price = _number(fields[0]), _number(fields[1])
    if at_s is None and calendar:
        at_s = _unix_s(fields[0])
    if at_s is None:
        raise ValueError(
            f"{shown(fields[0])} is no time; expected {'ISO 8601 or Unix seconds' if calendar else 'seconds'}"
        )
    if at_s > LATEST_S:
        raise ValueError(f"{shown(fields[0])} is after the year 33658; give seconds, not milliseconds")
    if price is None or price < 0:
        raise ValueError(f"{shown(fields[1])} is no price; expected US dollars per hour, 0 or more")
    return at_s, price


def _number(text: str) -> float | None:
    """A finite number, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if -inf < value < inf else None


def _unix_s(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
