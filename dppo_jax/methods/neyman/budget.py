"""Automatic budgets: the number of completions that is worth training on.

The number depends on earlier steps and on this step's rollouts but on no draw,
so the weights stay exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dppo_jax.algo.weights import ratio
from dppo_jax.methods.neyman.gradient_noise import MIN_NOISE_FRACTION
from dppo_jax.records import Groups, IntScalar, Scalar, StepCosts

NUM_BUDGETS = 25  # on each of two grids, evenly in their logarithms
# Fraction of a completion's squared gradient that it shares with completions of
# the same prompt and reward: 0.3 to 0.5 in experiments/02_design_variance.
SHARED = 0.4
# Fraction of the batch's noise between the completions of a prompt, until it is
# measured.
UNKNOWN_WITHIN = 0.5
# Fraction of the least time that may be spent on keeping more. Times are flat
# around their minimum, where a few percent more halve the variance added.
SLACK = 0.02


class Budget(NamedTuple):
  """A number of completions to train on.

  Attributes:
    added_variance: variance that the choice adds, over the batch's noise.
    metrics: scalars to log.
  """

  number: IntScalar
  added_variance: Scalar
  metrics: dict[str, Scalar]


class _Candidates(NamedTuple):
  """Budgets to choose from.

  Attributes:
    fraction: fraction of the needed completions.
    number: number of completions.
    added_variance: as in `Budget`.
    update, other: seconds of the update, and of the other stages of a step.
    seconds: predicted seconds to a target, up to a factor.
  """

  fraction: Float[Array, "K"]
  number: Float[Array, "K"]
  added_variance: Float[Array, "K"]
  update: Float[Array, "K"]
  other: Float[Array, "K"]
  seconds: Float[Array, "K"]


class AutoBudget(NamedTuple):
  """Chooses the keep fraction that minimises the predicted time to a target.

  With a gradient noise scale of `r` times the batch size, steps to a target
  are proportional to `1 + r`; a choice that adds `v` of the batch's own
  variance makes that `1 + (1 + v) r`. Seconds to the target are therefore
  proportional to the seconds of a step times `1 + v r / (1 + r)`.

  Attributes:
    min_keep, max_keep: bounds of the fraction, in (0, 1], before a least
      probability raises it.
    update_cost: seconds of an update on every needed completion over the other
      seconds of a step; 0 uses measured times.
  Source: McCandlish et al. 2018, arXiv:1812.06162, equation 2.7, for steps
    against noise; the rest is ours.
  """

  min_keep: float = 0.03
  update_cost: float = 0.0
  max_keep: float = 1.0

  def choose(
    self, groups: Groups, size: Float[Array, "Q G"], min_prob: float = 0.0
  ) -> Budget:
    """Returns the number of completions to train on, and what it predicts.

    A grid over all fractions is refined between the neighbours of its best one.

    Args:
      size: as from `gradient_size`; 0 for completions that are not needed.
      min_prob: least probability of a needed completion, as in the draw.
    """
    size = jnp.where(jnp.isfinite(size), size, 0.0).reshape(-1)
    predict = lambda low, high: self._predict(
      groups, size, jnp.geomspace(low, high, NUM_BUDGETS), min_prob
    )
    step = (self.max_keep / self.min_keep) ** (1 / (NUM_BUDGETS - 1))
    coarse = predict(self.min_keep, self.max_keep)
    near = coarse.fraction[jnp.argmin(coarse.seconds)]
    fine = predict(
      jnp.maximum(near / step, self.min_keep),
      jnp.minimum(near * step, self.max_keep),
    )
    both = jax.tree.map(lambda *x: jnp.concatenate(x), coarse, fine)
    order = jnp.argsort(both.fraction)
    both = jax.tree.map(lambda x: x[order], both)
    best = largest_near_optimal(both.seconds)
    num_needed = (size > 0).sum(dtype=jnp.float32)
    last = jax.tree.map(lambda x: x[-1], both)
    chosen = jax.tree.map(lambda x: x[best], both)
    return Budget(
      number=chosen.number.astype(jnp.int32),
      added_variance=chosen.added_variance,
      metrics={
        "budget/completions": ratio(chosen.number, num_needed),
        "budget/added_variance": chosen.added_variance,
        # 1 while all seconds are 0, that is unknown.
        "budget/predicted_speedup": ratio(last.seconds, chosen.seconds, 1.0),
        "budget/update_cost": ratio(last.update, last.other),
      },
    )

  def _predict(
    self,
    groups: Groups,
    size: Float[Array, "M"],
    fractions: Float[Array, "K"],
    min_prob: float,
  ) -> _Candidates:
    """Predicts seconds to a target, up to a factor, for several fractions."""
    lengths = jnp.where(size > 0, groups.lengths.reshape(-1), 0)
    lengths = lengths.astype(jnp.float32)
    num_needed = (size > 0).sum(dtype=jnp.float32)
    at_most_all = lambda x: jnp.clip(x, 1.0, jnp.maximum(num_needed, 1.0))
    prob = proportional(size, at_most_all(jnp.round(fractions * num_needed)))
    # Up to rounding the probabilities of `water_filling` for `counts`.
    prob = jnp.where(size > 0, jnp.maximum(prob, min_prob), 0.0)
    counts = at_most_all(jnp.round(prob.sum(axis=1)))
    added = added_noise(groups, size, prob)
    tokens = (prob * lengths[None]).sum(axis=1)
    update, other = self._seconds(tokens, lengths.sum(), groups.costs)
    noise = jnp.float32(1)
    if groups.costs is not None:
      noise = jnp.maximum(groups.costs.noise_fraction, MIN_NOISE_FRACTION)
    slowdown = 1 + added * noise
    if groups.costs is not None:  # no pruning before the noise is measured
      is_known = jnp.isfinite(groups.costs.within_fraction)
      slowdown = jnp.where(is_known | (added <= 0), slowdown, jnp.inf)
    seconds = (other + update) * slowdown
    other = jnp.broadcast_to(other, update.shape)
    return _Candidates(fractions, counts, added, update, other, seconds)

  def _seconds(
    self, tokens: Float[Array, "K"], all_tokens: Scalar, costs: StepCosts | None
  ) -> tuple[Float[Array, "K"], Scalar]:
    """Predicts seconds of an update on `tokens`, and of the other stages."""
    other = jnp.float32(1)
    update = tokens / jnp.maximum(all_tokens, 1.0)
    if self.update_cost:
      return self.update_cost * update, other
    if costs is None:
      raise ValueError(
        "groups.costs is None, but an automatic budget needs measured seconds: "
        "pass costs, or set update_cost or a fixed budget"
      )
    micros = tokens / jnp.maximum(costs.micro_tokens, 1.0)
    # The number of micro-batches is rounded up and known within a fifth.
    error = jnp.linspace(0.8, 1.2, 5)
    micros = jnp.ceil(micros[:, None] * error[None]).mean(axis=1)
    micros *= jnp.maximum(costs.num_updates, 1.0)
    # Before any timing is available, assume that the update costs as much as
    # the rest of the step.
    is_known = costs.other_seconds > 0
    return (
      jnp.where(is_known, costs.micro_seconds * micros, update),
      jnp.where(is_known, costs.other_seconds, other),
    )


def proportional(
  size: Float[Array, "M"], budgets: Float[Array, "K"]
) -> Float[Array, "K M"]:
  """Probabilities proportional to size, with one row per budget they sum to.

  Like `designs.water_filling` without a least probability and a grid, for many
  budgets at the cost of one sort.

  Args:
    size: at least 0 and finite.
    budgets: at least 0; a budget above the number of nonzero sizes gives each
      of them probability 1.
  """
  falling = -jnp.sort(-size)
  # With the `f` largest certain, smaller ones divide the remaining budget.
  tails = jnp.cumsum(falling[::-1])[::-1]
  certain = jnp.arange(len(size), dtype=jnp.float32)
  left = budgets[:, None] - certain[None]
  f = jnp.argmax(left * falling[None] <= tails[None], axis=1)
  scale = (budgets - certain[f]) / jnp.where(tails > 0, tails, 1.0)[f]
  prob = jnp.clip(scale[:, None] * size[None], 0.0, 1.0)
  is_all = budgets >= (size > 0).sum(dtype=jnp.float32)
  return jnp.where(is_all[:, None], (size > 0).astype(jnp.float32)[None], prob)


def systematic_variance(
  prob: Float[Array, "K M"],
  squares: Float[Array, "M"],
  is_positive: Bool[Array, "M"],
  shape: tuple[int, ...],
) -> Float[Array, "K"]:
  """Computes what a systematic draw along prompts and signs adds to the noise.

  In units of `sum a^2` of gradient norms `a`. Independent draws would add
  `sum (1 / prob - 1) a^2`.

  A draw keeps `k` completions of a prompt and sign, rounded up or down, if it
  keeps `k` on average. What these share varies with their number alone: by `f
  (1 - f)`, with `f` the fractional part of `k`, where independent draws vary by
  `sum prob (1 - prob)`. The rest of each gradient varies as in those.

  Args:
    squares: `a^2` up to a common factor; 0 for terms that are not needed.
    is_positive: True for a positive advantage.
    shape: prompts and completions of each.
  """
  is_lost = (squares[None] > 0) & (prob <= 0)
  per_prob = 1 / jnp.where(prob > 0, prob, 1.0)
  by_sign = jnp.stack([is_positive, ~is_positive]).astype(jnp.float32)
  sums = lambda x: (
    (x[:, None] * by_sign[None]).reshape(len(x), 2, *shape).sum(axis=-1)
  )
  part = sums(prob) % 1.0
  shared = ratio(part * (1 - part), sums(prob * (1 - prob)), 1.0)
  added = sums((per_prob - 1) * squares[None])
  added = (added * (1 - SHARED + SHARED * shared)).sum(axis=(1, 2))
  fraction = ratio(added, squares.sum())
  return jnp.where(is_lost.any(axis=1), jnp.inf, fraction)


def added_noise(
  groups: Groups, size: Float[Array, "..."], prob: Float[Array, "K M"]
) -> Float[Array, "K"]:
  """Computes `systematic_variance` as a fraction of the batch's noise."""
  squares, is_positive = (
    x.reshape(-1) for x in (size * size, groups.advantages > 0)
  )
  shape, costs = groups.advantages.shape, groups.costs
  added = systematic_variance(prob, squares, is_positive, shape)
  within = jnp.float32(jnp.inf) if costs is None else costs.within_fraction
  return added * jnp.where(jnp.isfinite(within), within, UNKNOWN_WITHIN)


def largest_near_optimal(times: Float[Array, "K"]) -> IntScalar:
  """Returns the index of the largest budget within SLACK of the least time.

  Args:
    times: predicted seconds, in rising order of the budget.
  """
  times = jnp.where(jnp.isfinite(times), times, jnp.inf)
  is_near = times[::-1] <= (1 + SLACK) * times.min()
  return len(times) - 1 - jnp.argmax(is_near)
