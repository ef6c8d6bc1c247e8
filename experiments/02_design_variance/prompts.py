"""The choice of prompts, from what one earlier visit to each taught."""

from batch import Batch, sample
from completions import BUDGETS, DRAWS
import errors
import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import methods
from dppo_jax.rng import StepRng


def measure(sampled: Batch) -> list[dict]:
  """Of uniform, DPPO's and the Neyman design, at every budget of prompts."""
  run, ids = sampled.run, sampled.prompts.ids
  before, rewards = sample(run, sampled.params, sampled.prompts, draw=1)
  seen = (rewards, rewards, before.lengths)  # 1 for what is correct, else 0
  found = []
  for budget in BUDGETS:
    rate = _rate(seen, run, ids, budget)
    for name, rule, is_seen in (
      ("uniform", methods.neyman_prompts(budget), False),
      ("dppo", rate and methods.drop_by_history(rate), True),
      ("neyman", methods.neyman_prompts(budget), True),
    ):
      error = {"variance": None}
      if rule:
        history = rule.init(len(run.train_set))
        if is_seen:
          history = rule.observe(history, jnp.int32(0), ids, *seen)
        error = _error(sampled, rule, history)
      found.append({"method": name, "budget": budget, **error})
  return found


def _error(sampled: Batch, rule: methods.PromptRule, history) -> dict:
  """Variance of an unbiased rule, and shares of prompts and tokens kept."""
  choose = jax.jit(
    lambda key: rule.select(
      StepRng(key, jnp.int32(1)), history, sampled.prompts.ids
    )
  )
  drawn = jax.lax.map(choose, jax.random.split(jax.random.key(2), DRAWS))
  keep = np.asarray(drawn.keep)
  factor = np.where(keep, 1 / np.asarray(drawn.prob, np.float64), 0)
  full = sampled.factors.reshape(sampled.rewards.shape)
  apart = ((factor - 1)[..., None] * full).reshape(DRAWS, -1)
  squares = errors.squared_norm(apart, sampled.products)
  lengths = np.asarray(sampled.rollout.lengths).sum(axis=1)
  return {
    "variance": squares.mean() / sampled.variance,
    "prompts": keep.mean(),
    "tokens": (keep @ lengths).mean() / lengths.sum(),
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
