"""What does a task's work: the process that owns one GPU, and what happens in it."""
