"""Advantages within a group, from its rewards.

Rewards and masks may be arrays or lists of lists; integers become float32.
`is_counted` marks the rewards from which statistics are taken. The advantages
of the others are zero. None counts all.
"""

from collections.abc import Sequence

import chex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from dppo_jax.algo.validation import POSITIVE, Limit, check

Rewards = Float[Array, "Q G"] | np.ndarray | Sequence
Mask = Bool[Array, "Q G"] | np.ndarray | Sequence


def group_normalized(
  rewards: Rewards,
  is_counted: Mask | None = None,
  eps: float = 1e-6,
  ddof: int = 1,
) -> Float[Array, "Q G"]:
  """Rewards centred and divided by their standard deviation, in each group.

  A group of equal rewards has advantages of exactly zero. If `c` of `G`
  rewards are 1 and the others 0, a `ddof` of 0 gives `sqrt((G - c) / c)` and
  `-sqrt(c / (G - c))`; a `ddof` of 1 multiplies these by `sqrt((G - 1) / G)`.

  >>> from dppo_jax import algo
  >>> print(algo.group_normalized([[1, 0, 0, 0], [1, 1, 1, 1]]).round(2))
  [[ 1.5 -0.5 -0.5 -0.5]
   [ 0.   0.   0.   0. ]]

  Args:
    eps: added to the standard deviation, above 0.
    ddof: 1 for the standard deviation of a sample, 0 for a population.
  Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. The paper specifies
    neither `eps` nor `ddof`; verl and tunix use these.
  """
  check(POSITIVE, "group_normalized", eps=eps)
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

  Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783.
  """
  rewards, counted = _arrays(rewards, is_counted)
  # The compiler divides by a constant size by multiplying with its reciprocal.
  # Doing so here makes a mask of all bit-identical to None.
  per_reward = 1.0 / jnp.maximum(_size(counted), 1.0)
  least = jnp.where(counted, rewards, jnp.inf).min(axis=1, keepdims=True)
  above = jnp.where(counted, rewards - least, 0.0)  # exact where it matters
  mean = above.sum(axis=1, keepdims=True) * per_reward
  is_constant = is_zero_variance(rewards, counted)[:, None]
  return jnp.where(counted & ~is_constant, above - mean, 0.0)


def leave_one_out(
  rewards: Rewards, is_counted: Mask | None = None
) -> Float[Array, "Q G"]:
  """Rewards less the mean of the others in their group.

  >>> from dppo_jax import algo
  >>> print(algo.leave_one_out([[3, 0, 0, 0]]))
  [[ 3. -1. -1. -1.]]

  Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free".
  """
  rewards, counted = _arrays(rewards, is_counted)
  size = _size(counted)
  return group_centred(rewards, counted) * (size / jnp.maximum(size - 1, 1.0))


def is_zero_variance(
  rewards: Rewards, is_counted: Mask | None = None
) -> Bool[Array, "Q"]:
  """True for groups whose counted rewards are all equal.

  >>> from dppo_jax import algo
  >>> print(algo.is_zero_variance([[1, 1], [1, 0]]))
  [ True False]
  """
  rewards, counted = _arrays(rewards, is_counted)
  most = jnp.where(counted, rewards, -jnp.inf).max(axis=1)
  least = jnp.where(counted, rewards, jnp.inf).min(axis=1)
  return most <= least


def overlong_penalty(
  lengths: Int[Array, "*shape"] | Int[np.ndarray, "*shape"],
  max_tokens: int,
  cache: int,
) -> Float[Array, "*shape"] | Float[np.ndarray, "*shape"]:
  """DAPO's soft penalty of long completions, to be added to the reward.

  0 up to `max_tokens - cache` tokens, a linear ramp down to -1 at `max_tokens`,
  and -1 beyond.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> lengths = jnp.array([[5, 8, 10]])
  >>> print(algo.overlong_penalty(lengths, max_tokens=10, cache=4))
  [[ 0.  -0.5 -1. ]]

  Args:
    max_tokens: generation limit.
    cache: length of the ramp, in tokens, from 1 to `max_tokens`.
  Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.4.
  """
  ramp = Limit(lambda x: 1 <= x <= max_tokens, f"from 1 to {max_tokens}")
  check(ramp, "overlong_penalty", cache=cache)
  remaining = (max_tokens - cache - lengths).astype(np.float32)
  return (remaining / cache).clip(-1.0, 0.0)


def _arrays(
  rewards: Rewards, is_counted: Mask | None
) -> tuple[Float[Array, "Q G"], Bool[Array, "Q G"]]:
  """Converts rewards to floats, and None to a full mask."""
  rewards = jnp.asarray(rewards)
  chex.assert_rank(rewards, 2)  # [Q, G]
  if not jnp.issubdtype(rewards.dtype, jnp.floating):
    rewards = rewards.astype(jnp.float32)
  if is_counted is None:
    return rewards, jnp.ones(rewards.shape, bool)
  counted = jnp.asarray(is_counted, bool)
  chex.assert_equal_shape((rewards, counted))
  return rewards, counted


def _size(counted: Bool[Array, "Q G"]) -> Float[Array, "Q 1"]:
  return counted.sum(axis=1, keepdims=True, dtype=jnp.float32)
