"""How a cluster comes up, or is joined, and what cleans up after it."""
