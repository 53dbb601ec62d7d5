"""Where: the machines that a run uses, and what happens when they go."""
