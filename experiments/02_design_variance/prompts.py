"""The choice of prompts, from what one earlier visit to each taught."""

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import methods
from dppo_jax.rng import StepRng

from ..common.policy import sample
from . import errors
from .batch import Batch
from .completions import BUDGETS, DRAWS


def measure(sampled: Batch) -> list[dict]:
  """Measures every rule at every budget of prompts that it can keep to."""
  run, ids = sampled.run, sampled.prompts.ids
  before, rewards = sample(run, sampled.params, sampled.prompts, draw=1)
  seen = (rewards, rewards, before.lengths)  # 1 for what is correct, else 0
  rows = []
  for budget in BUDGETS:
    rate = _rate(seen, run, ids, budget)
    soft = rate and methods.drop_by_history(rate)
    for name, rule, is_seen in (
      ("uniform", methods.neyman_prompts(budget), False),
      ("dppo", soft, True),
      ("InfoBatch-like", soft, True),
      ("neyman", methods.neyman_prompts(budget), True),
    ):
      measured = {"variance": None}
      if rule:
        history = rule.init(len(run.train_set))
        if is_seen:
          history = rule.observe(history, jnp.int32(0), ids, *seen)
        measured = _error(sampled, rule, history, name == "InfoBatch-like")
      rows.append({"method": name, "budget": budget, **measured})
  return rows


def _error(
  sampled: Batch, rule: methods.PromptRule, history, is_mean: bool
) -> dict:
  """Squared bias and variance, and shares of prompts and tokens kept.

  Args:
    is_mean: divides by the number of prompts kept, not by that of all.
  """
  choose = jax.jit(
    lambda key: rule.select(
      StepRng(key, jnp.int32(1)), history, sampled.prompts.ids
    )
  )
  drawn = jax.lax.map(choose, jax.random.split(jax.random.key(2), DRAWS))
  keep = np.asarray(drawn.keep)
  factor = np.where(keep, 1 / np.asarray(drawn.prob, np.float64), 0)
  if is_mean:
    factor /= keep.mean(axis=1, keepdims=True)
  full = sampled.factors.reshape(sampled.rewards.shape)
  draws = (factor[..., None] * full).reshape(DRAWS, -1)
  moments = errors.describe(
    draws, sampled.factors, sampled.variance, sampled.products
  )
  tokens = np.asarray(sampled.rollout.lengths).sum(axis=1)
  live = sampled.live_tokens.reshape(full.shape).sum(axis=1)
  return moments | {
    "prompts": keep.mean(),
    "generated": (keep @ tokens).mean() / tokens.sum(),
    "tokens": (keep @ live).mean() / live.sum(),
  }


def _rate(seen, run, ids, budget: float) -> float | None:
  """The pruning rate at which DPPO keeps `budget` of the prompts, if any."""
  rule = methods.drop_by_history(0.5)
  history = rule.observe(
    rule.init(len(run.train_set)), jnp.int32(0), ids, *seen
  )
  rng = StepRng(jax.random.key(0), jnp.int32(1))
  eligible = float((rule.select(rng, history, ids).prob < 1).mean())
  rate = (1 - budget) / eligible if eligible else 1.0
  return rate if rate < 1 else None
