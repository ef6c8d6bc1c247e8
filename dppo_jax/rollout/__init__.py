"""Sampling completions by continuous batching, as pure functions."""

from dppo_jax.rollout.generate import roll_out, sample
from dppo_jax.rollout.sampling import Sampling, sample_token

__all__ = ["Sampling", "roll_out", "sample", "sample_token"]
