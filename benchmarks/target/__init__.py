"""What `benchmarks.time_to_target` compares, and what it makes of it."""
