"""Methods of this experiment: fixed budgets and a baseline.

A `share` is a fraction of the completions with nonzero advantage, so that it
means the same on every task.
"""

import jax.numpy as jnp

from dppo_jax import methods
from dppo_jax.methods import ranking
from dppo_jax.methods.neyman import budget
from dppo_jax.methods.neyman.rules import gradient_size
from dppo_jax.records import Groups, Selection
from dppo_jax.rng import StepRng
from experiments.common.variance import added_variance

# That of `methods.neyman.budget` when the predictions were made.
DESIGN_EFFECT = 0.5
SHARES = (0.5, 0.25, 0.125, 0.0625)


def baseline() -> methods.Method:
  """Returns GRPO that logs what shares of its completions add and cost."""
  grpo = methods.grpo()

  def rule(rng: StepRng, groups: Groups) -> Selection:
    size = gradient_size(groups).reshape(-1)
    num_needed = (size > 0).sum(dtype=jnp.float32)
    counts = jnp.maximum(jnp.round(jnp.array(SHARES) * num_needed), 1.0)
    prob = budget.proportional(size, counts)
    added = DESIGN_EFFECT * added_variance(prob, size * size)
    lengths = jnp.where(size > 0, groups.lengths.reshape(-1), 0)
    tokens = (prob @ lengths) / jnp.maximum(lengths.sum(), 1)
    metrics = {"law/needed": num_needed}
    for i, share in enumerate(SHARES):
      metrics[f"law/variance_{share}"] = added[i]
      metrics[f"law/tokens_{share}"] = tokens[i]
    return grpo.completions(rng, groups).replace(metrics=metrics)

  return grpo._replace(completions=rule, noise_every=8)


def fixed(share: float = 0.5) -> methods.Method:
  """Returns Neyman's choice of a fixed share."""
  fixed_budget = methods.AutoBudget(share, update_cost=1.0, max_keep=share)
  rule = methods.neyman_completions(fixed_budget)
  return methods.grpo()._replace(completions=rule)


def uniform(share: float = 0.5) -> methods.Method:
  """Returns the choice of as many completions, all equally likely."""

  def rule(rng: StepRng, groups: Groups) -> Selection:
    is_needed = (groups.advantages != 0) & (groups.lengths > 0)
    num = ranking.round_count(share, is_needed.sum(dtype=jnp.int32))
    return ranking.fixed_size(rng.key, is_needed.astype(jnp.float32), num)

  return methods.grpo()._replace(completions=rule)
