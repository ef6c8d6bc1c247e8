"""Rewards: plain functions, called in processes that may be killed."""

from dppo_jax.rewards.functions import RewardFn, RewardSpec, Verdict, parse
from dppo_jax.rewards.grader import (
  MAX_WORKERS,
  Graded,
  Grader,
  check,
  default_workers,
)
from dppo_jax.rewards.math_answers import last_boxed
