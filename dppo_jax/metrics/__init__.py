"""Logs of a run: metrics, samples, progress, warnings and the report."""
