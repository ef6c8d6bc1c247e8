"""A run around the training loop: setup, checks, checkpoints, processes."""
