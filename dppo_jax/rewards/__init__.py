"""What completions earn."""

from dppo_jax.rewards.workers import OUTCOMES, Grader, last_boxed

__all__ = ["OUTCOMES", "Grader", "last_boxed"]
