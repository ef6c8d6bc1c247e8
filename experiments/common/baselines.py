"""Methods and rules that others are compared with."""

import jax.numpy as jnp

from dppo_jax import methods
from dppo_jax.methods.ranking import fixed_size, round_count
from dppo_jax.records import Groups, Selection
from dppo_jax.rng import StepRng


def grpo_all_tokens() -> methods.Method:
  """Returns GRPO that also trains on completions of zero advantage."""
  return methods.grpo()._replace(trains_zero_advantage=True)


def uniform(budget: float) -> methods.CompletionRule:
  """Keeps `round(budget * drawn)` completions, all with equal probability.

  Args:
    budget: fraction of the completions drawn, in (0, 1]; at least one is kept.
  """

  def rule(rng: StepRng, groups: Groups, fraction=1.0) -> Selection:
    is_drawn = groups.lengths > 0
    num = round_count(budget, is_drawn.sum(dtype=jnp.int32))
    return fixed_size(rng.key, is_drawn.astype(jnp.float32), num)

  return rule
