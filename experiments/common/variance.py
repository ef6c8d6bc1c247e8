"""Variance that independent draws add, next to which designs are measured."""

import jax
import jax.numpy as jnp

from dppo_jax.algo.weights import ratio


def added_variance(prob: jax.Array, squares: jax.Array) -> jax.Array:
  """Computes `sum (1 / prob - 1) a^2 / sum a^2`, `[K]`, for independent draws.

  Args:
    prob: `[K, M]`.
    squares: `[M]`, `a^2` up to a common factor; 0 for terms that are not
      needed.
  """
  is_lost = (squares[None] > 0) & (prob <= 0)
  added = (1 / jnp.where(prob > 0, prob, 1.0) - 1) * squares[None]
  fraction = ratio(added.sum(axis=1), squares.sum())
  return jnp.where(is_lost.any(axis=1), jnp.inf, fraction)
