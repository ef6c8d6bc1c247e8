"""Rewards of a group turned into advantages within it.

Rewards and masks may be arrays or lists of lists; whole numbers become float32.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from dppo_jax.algo.validation import check

Rewards = Float[Array, "Q G"] | np.ndarray | Sequence
Mask = Bool[Array, "Q G"] | np.ndarray | Sequence


def group_normalized(
  rewards: Rewards,
  is_counted: Mask | None = None,
  eps: float = 1e-6,
  ddof: int = 1,
) -> Float[Array, "Q G"]:
  """Rewards centred and divided by their deviation, within each group.

  A group whose rewards are all equal has advantages of exactly zero, whatever
  the rounding of its mean. Of `G` rewards, `c` being 1 and the rest 0, with a
  `ddof` of 0: those of 1 get `sqrt((G - c) / c)`, those of 0 get
  `-sqrt(c / (G - c))`; the advantages' squares sum to `G`, their sizes to
  `2 sqrt(c (G - c))`. A `ddof` of 1 shrinks each by `sqrt((G - 1) / G)`.

  >>> from dppo_jax import algo
  >>> print(algo.group_normalized([[1, 0, 0, 0], [1, 1, 1, 1]]).round(2))
  [[ 1.5 -0.5 -0.5 -0.5]
   [ 0.   0.   0.   0. ]]

  Args:
    is_counted: rewards from which mean and deviation are taken; the others'
      advantages are zero. None counts all.
    eps: added to the deviation, above 0.
    ddof: 1 for the sample deviation, 0 for the population's.
  Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. The sample
    deviation and this eps are what verl and tunix use; the paper says neither.
  """
  if not eps > 0:
    raise ValueError(
      f"eps is {eps} but must be above 0: a group whose rewards are all the "
      "same has no deviation to divide by"
    )
  rewards, counted = _arrays(rewards, is_counted)
  centred = group_centred(rewards, counted)
  per_freedom = 1.0 / jnp.maximum(_size(counted) - ddof, 1.0)
  variance = jnp.square(centred).sum(axis=1, keepdims=True) * per_freedom
  return centred / (jnp.sqrt(variance) + eps)


def group_centred(
  rewards: Rewards, is_counted: Mask | None = None
) -> Float[Array, "Q G"]:
  """Rewards less the mean of their group.

  >>> from dppo_jax import algo
  >>> print(algo.group_centred([[1, 0, 0, 0]]))
  [[ 0.75 -0.25 -0.25 -0.25]]

  Args:
    is_counted: rewards from which the mean is taken; the others' advantages
      are zero. None counts all.
  Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783.
  """
  rewards, counted = _arrays(rewards, is_counted)
  # A reciprocal, which is what the compiler makes of a constant size: a mask
  # of all and None then agree to the bit.
  share = 1.0 / jnp.maximum(_size(counted), 1.0)
  total = jnp.where(counted, rewards, 0.0).sum(axis=1, keepdims=True)
  has_none = is_zero_variance(rewards, counted)[:, None]
  return jnp.where(counted & ~has_none, rewards - total * share, 0.0)


def leave_one_out(
  rewards: Rewards, is_counted: Mask | None = None
) -> Float[Array, "Q G"]:
  """Rewards less the mean of the others in their group.

  >>> from dppo_jax import algo
  >>> print(algo.leave_one_out([[3, 0, 0, 0]]))
  [[ 3. -1. -1. -1.]]

  Args:
    is_counted: rewards from which the mean is taken; the others' advantages
      are zero. None counts all.
  Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free".
  """
  rewards, counted = _arrays(rewards, is_counted)
  size = _size(counted)
  centred = group_centred(rewards, counted)
  return centred * (size / jnp.maximum(size - 1, 1.0))


def is_zero_variance(
  rewards: Rewards, is_counted: Mask | None = None
) -> Bool[Array, "Q"]:
  """True for the groups whose counted rewards are all the same, or none.

  >>> from dppo_jax import algo
  >>> print(algo.is_zero_variance([[1, 1], [1, 0]]))
  [ True False]
  """
  rewards, counted = _arrays(rewards, is_counted)
  most = jnp.where(counted, rewards, -jnp.inf).max(axis=1)
  least = jnp.where(counted, rewards, jnp.inf).min(axis=1)
  return most <= least


def _arrays(
  rewards: Rewards, is_counted: Mask | None
) -> tuple[Float[Array, "Q G"], Bool[Array, "Q G"]]:
  """Rewards as numbers, and whose are counted."""
  rewards = jnp.asarray(rewards)
  if rewards.ndim != 2:
    raise ValueError(
      f"rewards have the shape {rewards.shape} but must be [Q, G], the rewards "
      "of each group in a row"
    )
  if not jnp.issubdtype(rewards.dtype, jnp.floating):
    rewards = rewards.astype(jnp.float32)
  if is_counted is None:
    return rewards, jnp.ones(rewards.shape, bool)
  counted = jnp.asarray(is_counted, bool)
  if counted.shape != rewards.shape:
    raise ValueError(
      f"is_counted has the shape {counted.shape} but must have that of the "
      f"rewards, {rewards.shape}"
    )
  return rewards, counted


def _size(counted: Bool[Array, "Q G"]) -> Float[Array, "Q 1"]:
  """How many rewards of each group are counted."""
  return counted.sum(axis=1, keepdims=True, dtype=jnp.float32)


def overlong_penalty(
  lengths: Int[Array, "Q G"], max_tokens: int, cache: int
) -> Float[Array, "Q G"]:
  """DAPO's soft overlong punishment, from -1 to 0, to be added to the reward.

  0 up to `max_tokens - cache` tokens, from there a linear ramp down to -1 at
  `max_tokens`, and -1 beyond.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> lengths = jnp.array([[5, 8, 10]])
  >>> print(algo.overlong_penalty(lengths, max_tokens=10, cache=4))
  [[ 0.  -0.5 -1. ]]

  Args:
    lengths: tokens in each completion.
    max_tokens: the generation limit.
    cache: length of the ramp, in tokens; 0 for no penalty.
  Raises:
    ValueError: for a cache that is negative or longer than a completion.
  Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.4.
  """
  check(
    "cache",
    cache,
    lambda x: 0 <= x <= max_tokens,
    f"from 0 to {max_tokens}, the generation limit",
    "config.reward.overlong_tokens",
  )
  if cache == 0:
    return jnp.zeros(lengths.shape, jnp.float32)
  left = (max_tokens - cache - lengths).astype(jnp.float32)
  return jnp.clip(left / cache, -1.0, 0.0)
