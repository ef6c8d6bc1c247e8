"""Shares that set themselves: what the next step gains most by keeping.

Both choices depend on earlier steps, and that of completions on this step's
rollouts, but on no draw: whatever they choose, the weights stay exact.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax.methods.method import check_finite, check_share
from dppo_jax.methods.neyman import time_law
from dppo_jax.records import Groups, Measured

NUM_SHARES = 17  # on the grid, evenly in their logarithms

Told = dict[str, Float[Array, ""]]


class SelfSet(NamedTuple):
  """In place of a budget: a share that sets itself.

  Attributes:
    least, most: of the shares tried, in (0, 1].
    update_cost: seconds of an update on all that is needed over all other
      seconds of a step; 0 takes what the run's clock says.
  """

  least: float
  update_cost: float = 0.0
  most: float = 1.0

  def check(self, what: str) -> None:
    """Refuses what no share can be found by.

    Raises:
      ValueError: for the first that is wrong.
    """
    check_share(f"least_{what}", self.least)
    check_finite("update_cost", self.update_cost)

  def counts(self, num: Float[Array, ""]) -> Float[Array, "K"]:
    """Whole numbers of `num` that the shares of the grid keep."""
    shares = jnp.geomspace(self.least, self.most, NUM_SHARES)
    return jnp.clip(jnp.round(shares * num), 1.0, jnp.maximum(num, 1.0))


def of_completions(
  budget: SelfSet,
  measured: Measured | None,
  groups: Groups,
  size: Float[Array, "Q G"],
) -> tuple[Int[Array, ""], Told]:
  """How many of the completions that are needed to train on, and why.

  An update's seconds go as its micro-batches.

  Args:
    size: norm of each one's gradient up to a common factor; 0 where it is not
      needed.
  Returns:
    The number, and metrics.
  Raises:
    ValueError: where nothing says what an update costs.
  """
  size = size.reshape(-1)
  lengths = jnp.where(size > 0, groups.lengths.reshape(-1), 0)
  lengths = lengths.astype(jnp.float32)
  num_needed = (size > 0).sum(dtype=jnp.float32)
  counts = budget.counts(num_needed)
  prob = time_law.proportional(size, counts)
  added = time_law.DESIGN_EFFECT * time_law.added_variance(prob, size * size)
  tokens = (prob * lengths[None]).sum(axis=1)
  other = jnp.float32(1)
  update = tokens / jnp.maximum(lengths.sum(), 1.0)
  if budget.update_cost:
    update = budget.update_cost * update
  else:
    measured = _require(measured)
    micros = tokens / jnp.maximum(measured.micro_tokens, 1.0)
    # Whole ones, of a number that is known within a fifth.
    about = jnp.linspace(0.8, 1.2, 5)
    micros = jnp.ceil(micros[:, None] * about[None]).mean(axis=1)
    # Until the clock has told, an update is taken to cost as much as the rest.
    is_told = measured.other_seconds > 0
    other = jnp.where(is_told, measured.other_seconds, other)
    update = jnp.where(is_told, measured.micro_seconds * micros, update)
  noise_share = 1.0 if measured is None else measured.noise_share
  number, told = _choose(
    "completions", counts, num_needed, other + update, added, noise_share
  )
  return number, told | {"shares/update_cost": _ratio(update[-1], other)}


def of_prompts(
  budget: SelfSet,
  measured: Measured | None,
  size: Float[Array, "N"],
  moment: Float[Array, "N"],
  tokens: Float[Array, "N"],
) -> tuple[Int[Array, ""], Told]:
  """How many of the prompts to roll out, and why.

  As if noise were all there is: then a smaller batch by chance never pays, and
  what does pay is the knowledge of which prompts to leave out. That knowledge
  is a belief, which experiments/09_when_it_pays found too sure of itself: it
  has to promise a fifth of the time before it is followed.

  Args:
    size: probabilities are in proportion to it.
    moment: expected squared norm of a group's gradient.
    tokens: expected of a group.
  Returns:
    The number, and metrics.
  Raises:
    ValueError: where nothing says what a step costs.
  """
  fixed, per_token = jnp.float32(0), jnp.float32(1)
  if not budget.update_cost:
    measured = _require(measured)
    fixed, per_token = measured.fixed_seconds, measured.token_seconds
  num = jnp.float32(len(size))
  counts = budget.counts(num)
  prob = time_law.proportional(size, counts)
  added = time_law.added_variance(prob, moment)
  seconds = fixed + per_token * (prob * tokens[None]).sum(axis=1)
  return _choose("prompts", counts, num, seconds, added, 1.0, promise=0.2)


def _choose(
  what: str,
  counts: Float[Array, "K"],
  num: Float[Array, ""],
  seconds: Float[Array, "K"],
  added: Float[Array, "K"],
  noise_share: Float[Array, ""] | float,
  promise: float = 0.0,
) -> tuple[Int[Array, ""], Told]:
  """The count of the grid that gets to a point soonest, or hardly later.

  Args:
    num: what the counts are counts of; the last keeps all.
    seconds, added: of a step, and variance added, at each count.
    promise: share of the time that less than everything must save.
  Returns:
    The largest such count, and metrics.
  """
  times = time_law.relative_seconds(seconds, added, noise_share)
  best = time_law.quickest(times, promise)
  told = {
    f"shares/{what}": _ratio(counts[best], num),
    f"shares/{what}_variance": added[best],
    # 1 while seconds are unknown, that is all 0.
    f"shares/{what}_speedup": _ratio(times[-1], times[best], 1.0),
  }
  return counts[best].astype(jnp.int32), told


def _ratio(
  x: Float[Array, ""], y: Float[Array, ""], otherwise: float = 0.0
) -> Float[Array, ""]:
  return jnp.where(y > 0, x / jnp.where(y > 0, y, 1.0), otherwise)


def _require(measured: Measured | None) -> Measured:
  if measured is None:
    raise ValueError(
      "rng has no measured seconds, from which the share would set itself: "
      "give the rule a StepRng(key, step, measured), the method an "
      "update_cost, or a budget above 0"
    )
  return measured
