"""What runs inside a Dask worker: it makes any worker ours, and keeps its engine process."""
