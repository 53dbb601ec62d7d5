"""Measurements, mostly ratios of two sides in one run; results are in docs/results.md."""

from __future__ import annotations

import argparse
from collections.abc import Callable
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
