"""Rewards: plain functions, called in processes that may be killed.

The functions that come with the project are in `functions`; they are not
re-exported, since `rewards.math` is the module.
"""

from dppo_jax.rewards.functions import RewardFn, RewardSpec, Verdict, parse
from dppo_jax.rewards.grader import Graded, Grader, check
from dppo_jax.rewards.math_answers import last_boxed

__all__ = [
  "Graded",
  "Grader",
  "RewardFn",
  "RewardSpec",
  "Verdict",
  "check",
  "last_boxed",
  "parse",
]
