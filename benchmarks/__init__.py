"""Measurements, mostly ratios of two sides in one run; results are in docs/results.md."""
