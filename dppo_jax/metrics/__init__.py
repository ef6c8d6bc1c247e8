"""What a run writes: metrics, samples, progress, logs, a report."""
