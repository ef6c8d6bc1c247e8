"""Sampling completions by continuous batching, as pure functions."""

from dppo_jax.rollout.generate import (
  begin_decode,
  finish_decode,
  sample,
  to_rollout,
)
from dppo_jax.rollout.sampling import Sampling, sample_token

__all__ = [
  "Sampling",
  "begin_decode",
  "finish_decode",
  "sample",
  "sample_token",
  "to_rollout",
]
