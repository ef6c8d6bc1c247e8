"""Sums over segments against brute force."""

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax.algo.segments import segment_sum

SEGMENTS = np.array(
  [
    [[1] * 9 + [2] * 7, [1] * 5 + [2] * 5 + [3] * 4 + [0] * 2],
    [[1] * 16, [0] * 16],
  ],
  np.int32,
)


@given(st.integers(0, 10**6))
def test_segment_sum_by_brute_force(seed):
  x = np.random.default_rng(seed).normal(size=SEGMENTS.shape)
  sums = jax.jit(segment_sum)(jnp.array(x, jnp.float32), jnp.array(SEGMENTS))
  same = (SEGMENTS[..., None] == SEGMENTS[..., None, :]) & (
    SEGMENTS[..., None] > 0
  )
  np.testing.assert_allclose(
    sums, (same * x[..., None, :]).sum(axis=-1), atol=1e-5
  )


def test_a_row_may_be_full_of_segments():
  ids = jnp.arange(1, 6, dtype=jnp.int32)
  x = jnp.arange(5, dtype=jnp.float32)
  np.testing.assert_array_equal(segment_sum(x, ids), x)
