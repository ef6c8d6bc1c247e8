"""Sums over the sequences of packed rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def segment_sum(
  x: Float[Array, "*rows L"], segment_ids: Int[Array, "*rows L"]
) -> Float[Array, "*rows L"]:
  """Sum of `x` over the sequence of each position.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> x, ids = jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.array([1, 1, 2, 0])
  >>> print(algo.segment_sum(x, ids))
  [3. 3. 4. 0.]

  Args:
    segment_ids: 1, 2, ... along a row, at most `L` of them; the sum at
      padding, 0, is 0.
  """
  row_length = x.shape[-1]

  def of_row(x, ids):
    return jax.ops.segment_sum(x, ids, num_segments=row_length + 1)[ids]

  flat = (-1, row_length)
  sums = jax.vmap(of_row)(x.reshape(flat), segment_ids.reshape(flat))
  return jnp.where(segment_ids > 0, sums.reshape(x.shape), 0.0)
