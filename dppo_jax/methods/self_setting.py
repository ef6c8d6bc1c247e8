"""Shares that set themselves: what the next step gains most by keeping.

Both choices depend on earlier steps, and that of completions on this step's
rollouts, but on no draw: whatever they choose, the weights stay exact.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax.algo import time_law
from dppo_jax.methods.method import check, check_finite, check_share
from dppo_jax.records import Groups, Measured

NUM_SHARES = 17  # on the grid, evenly in their logarithms


class Bounds(NamedTuple):
  """How a share may set itself.

  Attributes:
    least, most: of the shares, in (0, 1].
    update_cost: seconds of an update on all that is needed over all other
      seconds of a step; 0 takes what the run's clock says.
  """

  least: float
  most: float = 1.0
  update_cost: float = 0.0

  def check(self, what: str) -> None:
    """Refuses bounds between which there is no share.

    Raises:
      ValueError: for the first that is wrong.
    """
    check_share(f"least_{what}", self.least)
    check_share(f"most_{what}", self.most)
    is_valid = lambda x: x <= self.most
    check(f"least_{what}", self.least, is_valid, f"at most {self.most}")
    check_finite("update_cost", self.update_cost)

  def counts(self, num: Float[Array, ""]) -> Float[Array, "K"]:
    """Whole numbers of `num` that the shares of the grid keep."""
    shares = jnp.geomspace(self.least, self.most, NUM_SHARES)
    return jnp.clip(jnp.round(shares * num), 1.0, jnp.maximum(num, 1.0))


def of_completions(
  bounds: Bounds,
  measured: Measured | None,
  groups: Groups,
  size: Float[Array, "Q G"],
) -> tuple[Int[Array, ""], dict[str, Float[Array, ""]]]:
  """How many of the completions that are needed to train on, and why.

  Minimises `seconds x (1 + added variance x noise share)` over the grid, see
  `algo.relative_seconds`; an update's seconds go as its micro-batches.

  Args:
    size: norm of each one's gradient up to a common factor; 0 where it is not
      needed.
  Returns:
    The number, and metrics.
  Raises:
    ValueError: where nothing says what an update costs.
  """
  size, lengths = size.reshape(-1), groups.lengths.reshape(-1)
  num_needed = (size > 0).sum(dtype=jnp.float32)
  counts = bounds.counts(num_needed)
  prob = time_law.proportional(size, counts)
  added = time_law.INDEPENDENT * time_law.added_variance(prob, size * size)
  tokens = prob @ lengths.astype(jnp.float32)
  needed = jnp.where(size > 0, lengths, 0).sum(dtype=jnp.float32)
  noise_share = 1.0 if measured is None else measured.noise_share
  if bounds.update_cost:
    other = jnp.float32(1)
    update = bounds.update_cost * tokens / jnp.maximum(needed, 1.0)
  else:
    measured = _require(measured)
    other = measured.other_seconds
    # The last micro-batch is half empty, on average, and costs like the others.
    micros = tokens / jnp.maximum(measured.micro_tokens, 1.0) + 0.5
    update = measured.micro_seconds * jnp.maximum(micros, 1.0)
  seconds = other + update
  times = time_law.relative_seconds(seconds, added, noise_share)
  best = time_law.quickest(times)
  is_known = seconds[-1] > 0
  share_of = lambda x, of: x / jnp.where(of > 0, of, 1.0)
  told = {
    "shares/completions": share_of(counts[best], num_needed),
    "shares/completions_variance": added[best],
    "shares/completions_speedup": jnp.where(
      is_known, times[-1] / jnp.where(is_known, times[best], 1.0), 1.0
    ),
    "shares/update_cost": share_of(update[-1], other),
  }
  return counts[best].astype(jnp.int32), told


def of_prompts(
  bounds: Bounds,
  measured: Measured | None,
  size: Float[Array, "N"],
  moment: Float[Array, "N"],
  tokens: Float[Array, "N"],
) -> tuple[Int[Array, ""], dict[str, Float[Array, ""]]]:
  """How many of the prompts to roll out, and why.

  As if noise were all there is: then a smaller batch by chance never pays, and
  what does pay is the knowledge of which prompts to leave out.

  Args:
    size: probabilities are in proportion to it.
    moment: expected squared norm of a group's gradient.
    tokens: expected of a group.
  Returns:
    The number, and metrics.
  Raises:
    ValueError: where nothing says what a step costs.
  """
  num = jnp.float32(len(size))
  counts = bounds.counts(num)
  prob = time_law.proportional(size, counts)
  added = time_law.added_variance(prob, moment)
  fixed, per_token = jnp.float32(0), jnp.float32(1)
  if not bounds.update_cost:
    measured = _require(measured)
    fixed, per_token = measured.fixed_seconds, measured.token_seconds
  times = time_law.relative_seconds(
    fixed + per_token * (prob @ tokens), added, 1.0
  )
  best = time_law.quickest(times)
  is_known = times[-1] > 0
  told = {
    "shares/prompts": counts[best] / num,
    "shares/prompts_variance": added[best],
    "shares/prompts_speedup": jnp.where(
      is_known, times[-1] / jnp.where(is_known, times[best], 1.0), 1.0
    ),
  }
  return counts[best].astype(jnp.int32), told


def _require(measured: Measured | None) -> Measured:
  if measured is None:
    raise ValueError(
      "rng has no measured seconds, from which the share would set itself: "
      "give the rule a StepRng(key, step, measured), the method an "
      "update_cost, or a budget above 0"
    )
  return measured
