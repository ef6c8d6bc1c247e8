"""Posterior of each problem's pass rate, and the predicted cost of a rollout.

Right and wrong completions are counted and slowly forgotten. The counts plus
a prior's counts are the parameters of a Beta distribution.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax.records import IntScalar

MIN_COUNT = 1e-5  # with fewer completions a problem counts as never seen


class PassCounts(NamedTuple):
  """Counts of each problem's completions, without the prior's counts.

  Attributes:
    right: `[M]`, sum of the completions' correctness, each in [0, 1].
    wrong: `[M]`, number of completions less `right`.
    tokens: `[M]`, tokens in all of them.
    last_step: `[M]`, step up to which the counts have decayed.
    group_size: completions in a group; 8 until one is observed.
    per_step: prompts of a step, 0 until one is observed.
  """

  right: Float[Array, "M"]
  wrong: Float[Array, "M"]
  tokens: Float[Array, "M"]
  last_step: Int[Array, "M"]
  group_size: IntScalar
  per_step: IntScalar


def init(num_prompts: int) -> PassCounts:
  """Returns counts of 0."""
  zeros = jnp.zeros((num_prompts,), jnp.float32)
  last_step = jnp.zeros((num_prompts,), jnp.int32)
  scalars = jnp.int32(8), jnp.int32(0)
  return PassCounts(zeros, zeros, zeros, last_step, *scalars)


def decayed(
  counts: PassCounts,
  step: int | IntScalar,
  ids: Int[Array, "Q"],
  forgetting: float,
) -> PassCounts:
  """Returns the counts of `ids`, `[Q]`, decayed up to `step`.

  Args:
    forgetting: factor on every count per epoch. In an epoch the number of
      prompts drawn reaches the number of problems.
  """
  selected = jax.tree.map(lambda x: x[ids] if x.ndim else x, counts)
  steps = (step - selected.last_step).astype(jnp.float32)
  per_step = counts.per_step.astype(jnp.float32)
  factor = forgetting ** (steps * per_step / len(counts.right))
  return selected._replace(
    right=selected.right * factor,
    wrong=selected.wrong * factor,
    tokens=selected.tokens * factor,
    last_step=jnp.full_like(ids, step),
  )


def update(
  counts: PassCounts,
  step: int | IntScalar,
  ids: Int[Array, "Q"],
  correct: Float[Array, "Q G"],
  lengths: Int[Array, "Q G"],
  forgetting: float,
) -> PassCounts:
  """Adds some groups to the counts; an id of `M` or more changes none.

  Args:
    correct: correctness, clipped to [0, 1]; infinite or NaN is not counted.
  """
  counts = counts._replace(per_step=jnp.int32(len(ids)))
  old = decayed(counts, step, ids, forgetting)
  is_counted = jnp.isfinite(correct)
  right = jnp.where(is_counted, jnp.clip(correct, 0.0, 1.0), 0.0).sum(axis=1)
  count = is_counted.sum(axis=1, dtype=jnp.float32)
  tokens = jnp.where(is_counted, lengths, 0).sum(axis=1)
  new = old._replace(
    right=old.right + right,
    wrong=old.wrong + (count - right),
    tokens=old.tokens + tokens.astype(jnp.float32),
    group_size=jnp.int32(correct.shape[1]),
  )
  put = lambda x, y: x.at[ids].set(y, mode="drop") if x.ndim else y
  return jax.tree.map(put, counts, new)


def expected_tokens(
  counts: PassCounts, ids: Int[Array, "N"]
) -> Float[Array, "N"]:
  """Returns each problem's mean completion length, or the mean of all."""
  num = counts.right + counts.wrong
  usual = counts.tokens.sum() / jnp.maximum(num.sum(), MIN_COUNT)
  observed = counts.tokens[ids] / jnp.maximum(num[ids], MIN_COUNT)
  return jnp.maximum(jnp.where(num[ids] >= MIN_COUNT, observed, usual), 1.0)


def second_moment(
  right: Float[Array, "N"],
  wrong: Float[Array, "N"],
  group_size: IntScalar,
  kappa: float,
) -> Float[Array, "N"]:
  """Returns the expected squared norm of a group's gradient, over `s^2 / G`.

  With advantages divided by their deviation, the noise `s` of the completions'
  scores adds `s^2 / G` if the group is mixed, and the difference `d` of the
  mean scores of right and wrong ones adds `ph (1 - ph) |d|^2`, where `ph` is
  the fraction that is right.

  Args:
    right, wrong: parameters of the Beta distribution, prior included.
    kappa: `G |d|^2 / (4 s^2)`.
  """
  total = right + wrong
  size = group_size.astype(jnp.float32)
  spread = (1 - 1 / size) * right * wrong / (total * (total + 1))
  return prob_mixed(right, wrong, group_size) + 4 * kappa * spread


def prob_mixed(
  right: Float[Array, "N"], wrong: Float[Array, "N"], group_size: IntScalar
) -> Float[Array, "N"]:
  """Returns the probability that a group is neither all right nor all wrong.

  That is `1 - E[p^G] - E[(1 - p)^G]` for a pass rate `p` from Beta(right,
  wrong), where `E[p^G]` is the product over `j < G` of
  `(right + j) / (right + wrong + j)`.
  """
  total = right + wrong
  less, more = jnp.minimum(right, wrong), jnp.maximum(right, wrong)

  def add_one(j, logs):
    num = total + j.astype(jnp.float32)
    return logs[0] + jnp.log1p(-less / num), logs[1] + jnp.log1p(-more / num)

  # The likelier of the two is near 1 if mixed groups are rare: its distance
  # from 1 is computed without cancellation.
  logs = (jnp.zeros_like(total), jnp.zeros_like(total))
  likely, unlikely = jax.lax.fori_loop(0, group_size, add_one, logs)
  return -jnp.expm1(likely) - jnp.exp(unlikely)
