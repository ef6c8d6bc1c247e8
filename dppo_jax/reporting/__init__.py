"""What a run tells: numbers, samples, progress, a report."""
