"""The design that every other is compared with: all equally likely."""

import jax.numpy as jnp

from dppo_jax.methods import CompletionRule
from dppo_jax.methods.ranking import fixed_size, round_count
from dppo_jax.records import Groups, Selection
from dppo_jax.rng import StepRng


def uniform(budget: float) -> CompletionRule:
  """Keeps exactly `round(budget * drawn)` completions, all equally likely.

  Args:
    budget: share of the completions drawn, in (0, 1]; at least one is kept.
  """

  def rule(rng: StepRng, groups: Groups) -> Selection:
    is_drawn = groups.lengths > 0
    num = round_count(budget, is_drawn.sum(dtype=jnp.int32))
    return fixed_size(rng.key, is_drawn.astype(jnp.float32), num)

  return rule
