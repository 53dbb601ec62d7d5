"""Measurements, side by side in one run, as ratios; results are kept in RESULTS.md."""
