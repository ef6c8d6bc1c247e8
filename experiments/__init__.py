"""Experiments; start one from the root, `python -m experiments.NAME.run`."""
