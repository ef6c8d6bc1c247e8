"""Order, ties and draws of a fixed number, for completion rules."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dppo_jax.algo import designs
from dppo_jax.algo.validation import check, one_of
from dppo_jax.methods.method import ROUNDING, CompletionRule
from dppo_jax.records import Groups, IntScalar, Scalar, Selection
from dppo_jax.rng import StepRng, as_step_rng

# (step, uniform, advantages, is_drawn), with random numbers in [0, 1).
Choice = Callable[
  [IntScalar | None, Float[Array, "n"], Float[Array, "n"], Bool[Array, "n"]],
  Selection,
]


def in_scope(scope: str, choose: Choice) -> CompletionRule:
  """Applies `choose` to each "group" by itself, or to the "batch" as one."""
  check(one_of("group", "batch"), scope=scope)

  def rule(
    rng: StepRng | jax.Array, groups: Groups, budget: Scalar | float = 1.0
  ) -> Selection:
    rng = as_step_rng(rng)
    shape = groups.advantages.shape
    rows = shape if scope == "group" else (1, groups.advantages.size)
    uniform = jax.random.uniform(rng.key, shape)
    items = [uniform, finite_advantages(groups), groups.lengths > 0]
    items = [x.reshape(rows) for x in items]
    chosen = jax.vmap(choose, (None, 0, 0, 0))(rng.step, *items)
    return jax.tree.map(lambda x: x.reshape(shape), chosen)

  return rule


def finite_advantages(groups: Groups) -> Float[Array, "Q G"]:
  """Returns advantages to rank by: those that are not finite are the largest.

  An infinite or NaN reward spoils the advantages of its group. Its completion
  must be kept, so that the update is skipped and counted.
  """
  advantages = groups.advantages
  is_finite = jnp.isfinite(advantages)
  largest = jnp.where(is_finite, jnp.abs(advantages), 0.0).max()
  above = 1e6 * jnp.maximum(largest, 1.0)
  above = jnp.where(jnp.isfinite(groups.rewards), above, 2 * above)
  return jnp.where(is_finite, advantages, above)


def rank(
  uniform: Float[Array, "n"],
  x: Float[Array, "n"],
  is_candidate: Bool[Array, "n"],
) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
  """Returns ranks of the candidates, 0 for the least, and ids of their ties.

  Neighbours that differ by rounding only are tied; `uniform` orders them. Items
  that are no candidates come last.
  """
  x = jnp.where(is_candidate, x, 0.0)
  order = jnp.argsort(x)
  gaps = jnp.diff(x[order]) > ROUNDING * jnp.abs(x).max()
  numbers = jnp.pad(jnp.cumsum(gaps, dtype=jnp.int32), (1, 0))
  tie = jnp.zeros_like(numbers).at[order].set(numbers)
  order = jnp.lexsort((uniform, tie, ~is_candidate))
  ranks = jnp.arange(x.shape[0], dtype=jnp.int32)
  return jnp.zeros_like(ranks).at[order].set(ranks), tie


def random_in_ties(
  keep: Bool[Array, "n"], tie: Int[Array, "n"], is_candidate: Bool[Array, "n"]
) -> Selection:
  """Returns a choice that is random only within ties, with probabilities."""
  zeros = jnp.zeros(keep.shape, jnp.float32)
  count = lambda x: zeros.at[tie].add(x.astype(jnp.float32))
  prob = count(keep) / jnp.maximum(count(is_candidate), 1.0)
  return Selection(keep, jnp.where(is_candidate, prob[tie], 0.0))


def fixed_size(
  key: Key[Array, ""],
  size: Float[Array, "Q G"],
  num: IntScalar,
  min_prob: float = 0.0,
  strata: tuple[Array, ...] = (),
) -> Selection:
  """Draws exactly `num` completions systematically, in proportion to size.

  Args:
    size, num, min_prob: as in `designs.water_filling`.
    strata: keys `[Q, G]` of the order, the most significant last; ties are
      ordered at random. Neighbours exclude one another.
  """
  order_key, key = jax.random.split(key)
  by = (jax.random.uniform(order_key, size.shape), *strata)
  order = jnp.lexsort([x.reshape(-1) for x in by])
  prob = designs.water_filling(size.reshape(-1), num, min_prob)
  keep = designs.systematic(key, prob[order])
  keep = jnp.zeros(prob.shape, bool).at[order].set(keep)
  return Selection(keep.reshape(size.shape), prob.reshape(size.shape))


def floor_count(share: float | Scalar, count: IntScalar) -> IntScalar:
  """Rounds `share * count` down, after correcting a float32 rounding error."""
  exact = jnp.float32(share) * count.astype(jnp.float32)
  return jnp.floor(exact * (1 + 1e-6)).astype(jnp.int32)


def round_count(
  share: float | Scalar, count: Int[Array, "*shape"]
) -> Int[Array, "*shape"]:
  """Rounds `share * count`, but to at least 1 if the count is above 0."""
  exact = jnp.float32(share) * count.astype(jnp.float32)
  return jnp.clip(jnp.round(exact).astype(jnp.int32), 1, count)
