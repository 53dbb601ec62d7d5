"""The colours of phases and pools, the same in every picture of the project; imports nothing that draws."""

from __future__ import annotations

from spotlight.records import base_phase

__all__ = ["PHASE_COLOURS", "POOL_COLOURS", "WASTE_COLOURS", "base_phase", "phase_colour"]

PHASE_COLOURS = {
    "rollout": "#3f7fd6",
    "score": "#a9cbf3",
    "advantage": "#8b95a7",
    "train": "#43308f",
    "publish": "#b56bcb",
    "explore": "#f0991c",
    "explore-score": "#f8d08a",
    "allocate": "#b9690b",
    "select": "#7d4a0c",
    "validate": "#8a9a5b",
}
"""Blue makes samples, violet learns from them, amber explores; in the order of an iteration."""
POOL_COLOURS = {"reserved": "#475569", "spot": "#1f9e8f", "reward": "#b07d3a"}
INK, FAINT, AXIS, RULE = "#1d2433", "#6b7485", "#b4bac5", "#eceef2"
"""Text, its fainter kind, axes, and the lines of grids and tables."""
OTHER, LOST, ALIVE = "#c3c9d2", "#d3323a", "#e9ecf1"
"""A phase without a colour of its own, a preemption, a worker that is alive."""
WASTE_COLOURS = {"idle": "#dfe3ea", "start-up": "#b9c1cf", "dropped": "#f9d7a5", "lost": LOST, "redone": "#e88a8f"}
"""Seconds that were paid for and bought nothing, by kind."""
CALLED_OFF = ("dropped", "stopped")
"""Outcomes of work that was called off."""
CALLED_OFF_ALPHA = 0.4
"""Opacity of work that was dropped or stopped, so that useful work stands out."""


def phase_colour(phase: str) -> str:
    """The phase's colour; grey where it has none."""
    return PHASE_COLOURS.get(base_phase(phase), OTHER)
