"""Measurements, side by side in one run, as ratios; results are in docs/results.md."""
