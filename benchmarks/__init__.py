"""Measurements, mostly ratios of two sides in one run; results are in docs/results.md."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TypeVar

N = TypeVar("N", int, float)


def at_least(least: N) -> Callable[[str], N]:
    """A `type` of argparse: a number of the same kind that is no smaller."""

    def number(text: str) -> N:
        found = type(least)(text)
        if not found >= least:  # nor not a number
            raise argparse.ArgumentTypeError(f"at least {least}, not {text}")
        return found

    return number


class NoWatch:
    """A `graphs.loop.Watch` that follows nothing."""

    def begin(self, phase: str, iteration: int) -> None: ...

    def measure(self, start_s: float, stop_s: float) -> Mapping[str, float]:
        return {}

    def usd(self) -> float:
        return 0.0

    def balance(self, iteration: int, began_s: float, window_s: float) -> None: ...
