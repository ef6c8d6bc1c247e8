"""Rewards of a group turned into advantages within it."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def group_normalized(
  rewards: Float[Array, "Q G"], eps: float = 1e-6, ddof: int = 1
) -> Float[Array, "Q G"]:
  """Rewards centred and divided by their deviation, within each group.

  A group whose rewards are all equal has advantages of exactly zero, whatever
  the rounding of its mean.

  Args:
    eps: added to the deviation.
    ddof: 1 for the sample deviation, 0 for the population's.
  Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. The sample
    deviation and this eps are what verl and tunix use; the paper says neither.
  """
  centred = group_centred(rewards)
  deviation = jnp.std(rewards, axis=1, keepdims=True, ddof=ddof)
  return centred / (deviation + eps)


def group_centred(rewards: Float[Array, "Q G"]) -> Float[Array, "Q G"]:
  """Rewards less the mean of their group.

  Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783.
  """
  is_flat = is_constant(rewards)
  centred = rewards - rewards.mean(axis=1, keepdims=True)
  return jnp.where(is_flat[:, None], 0.0, centred)


def leave_one_out(rewards: Float[Array, "Q G"]) -> Float[Array, "Q G"]:
  """Rewards less the mean of the others in their group.

  Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free".
  """
  size = rewards.shape[1]
  return group_centred(rewards) * (size / (size - 1))


def is_constant(rewards: Float[Array, "Q G"]):
  """True for the groups, `[Q]`, whose rewards are all the same."""
  return rewards.max(axis=1) == rewards.min(axis=1)
