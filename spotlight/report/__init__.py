"""Explains a run by its directory: one page, the pictures for a README, the history as a table.

Reads what other code wrote and computes nothing that training depends on. Importing the package loads
the colours alone; pandas, matplotlib and Bokeh come with the first function that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotlight.report.palette import PHASE_COLOURS, POOL_COLOURS, base_phase, phase_colour

if TYPE_CHECKING:
    from spotlight.report.facts import history_frame
    from spotlight.report.page import write_report

__all__ = ["PHASE_COLOURS", "POOL_COLOURS", "base_phase", "history_frame", "phase_colour", "write_report"]


def __getattr__(name: str) -> object:
    if name == "history_frame":
        from spotlight.report.facts import history_frame

        return history_frame
    if name == "write_report":
        from spotlight.report.page import write_report

        return write_report
    raise AttributeError(f"module 'spotlight.report' has no attribute {name!r}")
