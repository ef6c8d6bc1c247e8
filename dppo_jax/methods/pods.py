"""PODS: trains on each group's subset of the largest reward variance."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dppo_jax.algo.validation import SCHEDULE, check
from dppo_jax.methods import method, ranking
from dppo_jax.methods.grpo import grpo
from dppo_jax.records import IntScalar


def pods(keep: float = 0.25) -> method.Method:
  """GRPO on each group's subset of largest reward variance, as if it were all.

  Args:
    keep: as in `max_variance`; m / n in the paper.
  Source: PODS, arXiv:2504.13818.
  Deviates:
    1. At least two are kept; ties are broken at random, and of subsets of the
       same variance the most balanced is taken.
  """
  rule = max_variance(keep, "group")
  return grpo()._replace(
    completions=method.unweighted(rule),
    has_statistics_after=True,
    prune_less="raise keep",
  )


def max_variance(
  keep: method.Rate, scope: str = "group"
) -> method.CompletionRule:
  """Keeps the subset whose advantages have the largest variance.

  It consists of some of the highest and some of the lowest. Of equally good
  subsets, up to rounding, the most balanced is taken, and then the one with
  more of the lowest. Ties are broken at random, which sets the probabilities.
  Within a group, rewards give the same subset.

  Args:
    keep: fraction of the completions, in (0, 1], rounded down but at least
      two; or a function from the step to it.
    scope: subset of each "group" or of the "batch".
  Source: PODS, arXiv:2504.13818; D3S, arXiv:2509.22115, for the batch.
  """
  check(SCHEDULE, keep=keep)

  def choose(step, uniform, advantages, is_drawn):
    num_drawn = is_drawn.sum(dtype=jnp.int32)
    num = ranking.floor_count(method.at_step(keep, step), num_drawn)
    num = jnp.minimum(jnp.maximum(num, 2), num_drawn)
    # Centred first: sums of squares would otherwise swallow the differences.
    total = jnp.where(is_drawn, advantages, 0.0).sum()
    mean = total / jnp.maximum(num_drawn, 1).astype(jnp.float32)
    x = jnp.where(is_drawn, advantages - mean, 0.0)
    place, tie = ranking.rank(uniform, x, is_drawn)
    num_high = _num_highest(x, is_drawn, num)
    is_end = (place < num - num_high) | (place >= num_drawn - num_high)
    return ranking.random_in_ties(is_drawn & is_end, tie, is_drawn)

  return ranking.in_scope(scope, choose)


def _num_highest(
  x: Float[Array, "n"], is_drawn: Bool[Array, "n"], num: IntScalar
) -> IntScalar:
  """Number of the highest in the subset of `num` with the largest variance."""
  num_drawn = is_drawn.sum(dtype=jnp.int32)
  ascending = jnp.sort(jnp.where(is_drawn, x, jnp.inf))
  ascending = jnp.where(jnp.isinf(ascending), 0.0, ascending)
  high = jnp.arange(x.shape[0] + 1, dtype=jnp.int32)

  def total(values):
    sums = jnp.pad(jnp.cumsum(values), (1, 0))
    lowest = sums[jnp.maximum(num - high, 0)]
    return lowest + sums[num_drawn] - sums[jnp.maximum(num_drawn - high, 0)]

  variance = num.astype(jnp.float32) * total(ascending * ascending)
  variance -= jnp.square(total(ascending))  # times num squared
  variance = jnp.where(high <= num, variance, -jnp.inf)
  best = variance.max()
  is_best = variance >= best - method.ROUNDING * jnp.abs(best)
  imbalance = jnp.where(is_best, jnp.abs(2 * high - num), x.shape[0] + 1)
  return jnp.argmin(imbalance).astype(jnp.int32)
