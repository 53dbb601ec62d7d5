"""Starts a cluster, or joins one, and cleans up after it."""
