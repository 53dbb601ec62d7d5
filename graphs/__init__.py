"""When: one iteration as a Dask graph, and iteration after iteration."""
