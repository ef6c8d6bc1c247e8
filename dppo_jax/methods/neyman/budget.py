"""The budget: a fraction of the needed completions, chosen between steps.

Completions are needed if they contribute to the gradient. The host chooses the
fraction from measured seconds and noise, and passes it to the next step as a
number. It depends on no draw of that step, so the weights stay exact.
"""

from collections.abc import Mapping
import math
import pathlib

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from dppo_jax.algo.weights import ratio
from dppo_jax.errors import UserError
from dppo_jax.files import jsonl
from dppo_jax.methods.method import Policy
from dppo_jax.records import Groups

# The choices of an automatic budget, evenly in their logarithms.
FRACTIONS = np.geomspace(0.05, 1.0, 10).astype(np.float32)
# Fraction of a completion's squared gradient that it shares with completions of
# the same prompt and reward: 0.3 to 0.5 in experiments/02_design_variance.
SHARED = 0.4
# Fraction of the least time that may be spent on keeping more. Times are flat
# around their minimum, where a few percent more halve the variance added.
SLACK = 0.02
DECAY = 0.95  # weight of earlier steps, at each further one
SMOOTHING = 0.8  # weight of earlier predictions, at each further choice
# Steps with the same number of micro-batches say nothing about the part of the
# seconds that does not depend on it. Until they differ, by more than about a
# sixth over a root of the number of steps, it is taken to be small.
SPREAD = 0.03


class BudgetPolicy:
  """Chooses the fraction that minimises the predicted time to a target.

  With a gradient noise scale of `r` times the batch size, steps to a target
  are proportional to `1 + r`; a choice that adds `v` of the batch's own
  variance makes that `1 + (1 + v) r`. Seconds to the target are therefore
  proportional to the seconds of a step times `1 + v r / (1 + r)`.

  Args:
    update_cost: seconds of an update on every needed completion over the other
      seconds of a step; 0 uses measured times.
  Source: McCandlish et al. 2018, arXiv:1812.06162, equation 2.7, for steps
    against noise; the rest is ours.
  """

  def __init__(self, update_cost: float = 0.0):
    self._update_cost = update_cost
    self._num_steps = 0
    self._sums = np.zeros(6)
    self._predicted: np.ndarray | None = None

  def __call__(
    self,
    metrics: Mapping[str, float],
    added_variance: np.ndarray | None = None,
    micro_batches: np.ndarray | None = None,
  ) -> tuple[float, dict[str, float]]:
    """Returns the fraction of the next step, and scalars to log of a choice.

    Args:
      metrics: of the last step: `budget/completions`, its fraction;
        `update/micro_batches`; `update/seconds`, `step/seconds` and, if any,
        `score/seconds` and `budget/seconds`; and `noise/fraction`, of the
        gradients of all updates on a rollout.
      added_variance: `[K]`, variance that each of `FRACTIONS` adds, over the
        noise of the batch; infinite while unknown. None keeps the fraction.
      micro_batches: `[K]`, expected number of them. None like the above.
    """
    self._observe(metrics)
    fraction = metrics["budget/completions"]
    is_known = self._update_cost or self._sums[0] > 0
    if added_variance is None or micro_batches is None or not is_known:
      return fraction, {}
    added, micros = self._smoothed(np.stack([added_variance, micro_batches]))
    update, other = self._seconds(micros)
    slower = 1 + added * metrics["noise/fraction"]
    times = (update + other) * slower
    best = largest_near_optimal(times)
    return float(FRACTIONS[best]), {
      "budget/predicted_speedup": float(times[-1] / times[best]),
      "budget/update_cost": float(update[-1] / other),
    }

  def _observe(self, metrics: Mapping[str, float]) -> None:
    """Adds the seconds of a step, but for a first one with one-time costs."""
    self._num_steps += 1
    if self._num_steps == 1:
      return
    update = metrics.get("score/seconds", 0.0) + metrics["update/seconds"]
    other = metrics["step/seconds"] - update
    other -= metrics.get("budget/seconds", 0.0)
    m = metrics["update/micro_batches"]
    new = np.array([1.0, m, m * m, update, update * m, other])
    self._sums = DECAY * self._sums + new

  def _smoothed(self, predicted: np.ndarray) -> np.ndarray:
    """Returns the mean over choices; with a given cost the last, which resumes.

    The best of the predictions for one batch would be too good.
    """
    if self._update_cost or not np.isfinite(predicted).all():
      return predicted
    old = predicted if self._predicted is None else self._predicted
    self._predicted = SMOOTHING * old + (1 - SMOOTHING) * predicted
    return self._predicted

  def _seconds(self, micro_batches: np.ndarray) -> tuple[np.ndarray, float]:
    """Predicts seconds of an update, and of the other stages."""
    if self._update_cost:
      scale = self._update_cost / max(micro_batches[-1], 1e-9)
      return scale * micro_batches, 1.0
    weight, *sums, other = self._sums
    m, squares, update, products = np.array(sums) / weight
    fixed, per_micro = 0.0, update / max(m, 1e-9)
    if m > 0:
      prior = SPREAD * m * m / weight
      variance, covariance = squares - m * m, products - m * update
      slope = (covariance + prior * per_micro) / (max(variance, 0) + prior)
      per_micro = np.clip(slope, 0.0, per_micro)
      fixed = update - per_micro * m
    return fixed + per_micro * micro_batches, max(other / weight, 1e-9)


def recorded_policy(path: str) -> Policy:
  """Returns a policy that repeats the fractions of a run, for the same bits.

  Args:
    path: its metrics.jsonl.
  Raises:
    UserError: if the file cannot be read, or has no `budget/completions`.
  """
  name = "budget/completions"
  lines = [x for x in jsonl.read(pathlib.Path(path)) if name in x]
  fractions = {line["step"]: line[name] for line in lines}
  if not lines:
    raise UserError(
      f"config.method.args.completion_budget is {path!r}, no file with {name}: "
      "name the metrics.jsonl of a run with an automatic budget"
    )

  def policy(metrics, *unused):
    return fractions.get(metrics["step"] + 1, metrics[name]), {}

  return policy


def probabilities(
  size: Float[Array, "M"], fractions: Float[Array, "K"], min_prob: float
) -> Float[Array, "K M"]:
  """Inclusion probabilities of a fraction of the needed completions.

  Up to rounding they equal `designs.water_filling`. A `min_prob` above
  what the fraction gives raises their sum.

  Args:
    size: as from `rules.gradient_size`; 0 for completions that are not needed.
  """
  num_needed = (size > 0).sum(dtype=jnp.float32)
  counts = jnp.clip(
    jnp.round(fractions * num_needed), 1.0, jnp.maximum(num_needed, 1.0)
  )
  prob = proportional(size, counts)
  return jnp.where(size > 0, jnp.maximum(prob, min_prob), 0.0)


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


def added_variance(
  groups: Groups,
  size: Float[Array, "Q G"],
  fractions: Float[Array, "K"],
  min_prob: float = 0.0,
) -> Float[Array, "K"]:
  """Computes what the draws of several fractions add to the gradient's noise.

  Args:
    size: as from `rules.gradient_size`.
    fractions: of the needed completions, in (0, 1].
  Returns:
    Variance in units of the sum of the completions' squared gradient norms.
  """
  size = jnp.where(jnp.isfinite(size), size, 0.0).reshape(-1)
  return systematic_variance(
    probabilities(size, fractions, min_prob),
    size * size,
    groups.advantages.reshape(-1) > 0,
    groups.advantages.shape,
  )


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
    prob: above 0 for terms that are needed.
    squares: `a^2` up to a common factor; 0 for terms that are not needed.
    is_positive: True for a positive advantage.
    shape: prompts and completions of each.
  """
  per_prob = 1 / jnp.where(prob > 0, prob, 1.0)
  by_sign = jnp.stack([is_positive, ~is_positive]).astype(jnp.float32)
  sums = lambda x: (
    (x[:, None] * by_sign[None]).reshape(len(x), 2, *shape).sum(axis=-1)
  )
  part = sums(prob) % 1.0
  shared = ratio(part * (1 - part), sums(prob * (1 - prob)), 1.0)
  added = sums((per_prob - 1) * squares[None])
  added = (added * (1 - SHARED + SHARED * shared)).sum(axis=(1, 2))
  return ratio(added, squares.sum())


def expected_micro_batches(rows: np.ndarray, rows_per_micro: int) -> np.ndarray:
  """Returns the expected number of micro-batches of a pass over a rollout.

  It is rounded up in each part, and the rows of a step are known within a
  fifth.

  Args:
    rows: `[num_parts, K]`, packed rows of each part and fraction.
  """
  known = np.linspace(0.8, 1.2, 5)[:, None, None]
  return np.ceil(rows * known / rows_per_micro).mean(axis=0).sum(axis=0)


def largest_near_optimal(times: np.ndarray) -> int:
  """Returns the index of the largest fraction within SLACK of the least time.

  Args:
    times: `[K]`, predicted seconds, in rising order of the fraction.
  """
  times = np.where(np.isfinite(times), times, math.inf)
  near = np.flatnonzero(times <= (1 + SLACK) * times.min())
  return int(near[-1])
