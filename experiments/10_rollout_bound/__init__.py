"""Bounds of the time that pruning rollouts can save."""
