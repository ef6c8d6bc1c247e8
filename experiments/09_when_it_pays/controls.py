"""Methods of this experiment: fixed shares of what is needed, and a baseline.

A share is of the completions whose advantage is not zero, so that it means the
same on every task.
"""

import jax.numpy as jnp

from dppo_jax import methods
from dppo_jax.methods import ranking
from dppo_jax.methods.neyman import time_law
from dppo_jax.methods.neyman.budget import SelfSet
from dppo_jax.records import Groups, Selection
from dppo_jax.rng import StepRng

# Of `algo.time_law`, as it was when the predictions were made.
DESIGN_EFFECT = 0.5
SHARES = (0.5, 0.25, 0.125, 0.0625)


def baseline() -> methods.Method:
  """GRPO, and what shares of its completions would add and cost."""

  def rule(rng: StepRng, groups: Groups) -> Selection:
    everyone = methods.every_completion()(rng, groups)
    size = jnp.abs(groups.advantages) * groups.scale
    size = (size * jnp.sqrt(groups.sum_sq_residual)).reshape(-1)
    size = jnp.where(groups.lengths.reshape(-1) > 0, size, 0.0)
    counts = jnp.maximum(jnp.round(jnp.array(SHARES) * (size > 0).sum()), 1.0)
    prob = time_law.proportional(size, counts)
    added = DESIGN_EFFECT * time_law.added_variance(prob, size * size)
    lengths = jnp.where(size > 0, groups.lengths.reshape(-1), 0)
    tokens = (prob @ lengths) / jnp.maximum(lengths.sum(), 1)
    told = {"law/needed": (size > 0).sum(dtype=jnp.float32)}
    for i, share in enumerate(SHARES):
      told |= {
        f"law/variance_{share}": added[i],
        f"law/tokens_{share}": tokens[i],
      }
    return everyone.replace(told=told)

  return methods.grpo()._replace(completions=rule)


def fixed(share: float = 0.5) -> methods.Method:
  """Neyman's choice of a fixed share."""
  budget = SelfSet(least=share, most=share, update_cost=1.0)
  rule = methods.neyman_completions(budget, proxy="residual")
  return methods.grpo()._replace(completions=rule)


def chance(share: float = 0.5) -> methods.Method:
  """As many, all equally likely."""

  def rule(rng: StepRng, groups: Groups) -> Selection:
    is_needed = (groups.advantages != 0) & (groups.lengths > 0)
    num = ranking.round_count(share, is_needed.sum(dtype=jnp.int32))
    return ranking.fixed_size(rng.key, is_needed.astype(jnp.float32), num)

  return methods.grpo()._replace(completions=rule)
