"""Decides who runs what: events in, instructions out. It knows neither Dask nor a clock."""
