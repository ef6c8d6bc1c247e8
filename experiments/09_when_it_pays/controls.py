"""Methods of this experiment: fixed budgets and a baseline.

A `share` is a fraction of the completions with nonzero advantage, so that it
means the same on every task.
"""

import jax.numpy as jnp
import numpy as np

from dppo_jax import methods
from dppo_jax.methods import ranking
from dppo_jax.methods.neyman import rules
from dppo_jax.records import Groups, Selection
from dppo_jax.rng import StepRng

# That of `methods.neyman.budget` when the predictions were made.
DESIGN_EFFECT = 0.5
SHARES = (0.5, 0.25, 0.125, 0.0625)


def _given(share: float):
  """Always the same share; logs what `SHARES` would add and cost.

  The saved predictions are of a version that predicted tokens.
  """

  def policy(metrics, added_variance=None, micro_batches=None):
    del metrics
    law = {}
    if added_variance is not None:
      law["law/needed"] = float(micro_batches[-1])
      for i, other in enumerate(reversed(SHARES)):
        part = micro_batches[i] / max(micro_batches[-1], 1e-9)
        law[f"law/variance_{other}"] = float(added_variance[i])
        law[f"law/tokens_{other}"] = float(part)
    return share, law

  return policy


def baseline() -> methods.Method:
  """Returns GRPO that logs what shares of its completions add and cost."""
  return fixed(1.0)


def fixed(share: float = 0.5) -> methods.Method:
  """Returns Neyman's choice of a fixed share."""
  rule = methods.neyman_completions()
  budget = rules.automatic(lambda: _given(share))
  fractions = np.float32((*reversed(SHARES), 1.0))
  return methods.grpo()._replace(
    completions=lambda rng, groups, _: rule(rng, groups, share),
    budget=budget._replace(fractions=fractions),
  )


def uniform(share: float = 0.5) -> methods.Method:
  """Returns the choice of as many completions, all equally likely."""

  def rule(rng: StepRng, groups: Groups, budget: float) -> Selection:
    del budget
    is_needed = (groups.advantages != 0) & (groups.lengths > 0)
    num = ranking.round_count(share, is_needed.sum(dtype=jnp.int32))
    return ranking.fixed_size(rng.key, is_needed.astype(jnp.float32), num)

  return methods.grpo()._replace(completions=rule)
