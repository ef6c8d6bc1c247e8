"""Sampling designs: inclusion probabilities, and draws that have them exactly.

Probabilities are multiples of `1 / GRID`, so that draws in integers have them
without rounding and weights 1 / prob are exact.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from dppo_jax.records import IntScalar

GRID = 2**20


def water_filling(
  size_measure: Float[Array, "M"], n: int | IntScalar, min_prob: float = 0.0
) -> Float[Array, "M"]:
  """Probabilities that sum to `n`, proportional to size within their bounds.

  They are `clip(scale * size, least, 1)` with the scale that makes the sum
  `n`. If size is the norm of a term, no other probabilities within these
  bounds have less variance in independent draws.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> print(algo.water_filling(jnp.array([4.0, 2.0, 1.0, 1.0, 0.0]), n=2))
  [1.   0.5  0.25 0.25 0.  ]

  Args:
    size_measure: non-negative sizes, in any unit; below 1.2e-38 of the largest
      they are 0. Items of size 0 have probability 0; if at most `n` others
      remain, these have 1. If some are infinite or NaN, only these are kept,
      equally likely: they must not vanish from the sum.
    n: number of items to keep.
    min_prob: least probability of an item of size above 0, in [0, 1];
      `n / count` if that is lower. Never below `1 / GRID`.
  Source: Neyman 1934, optimal allocation; Sarndal et al. 1992, section 3.6.
  """
  n = jnp.asarray(n, jnp.int32)
  bad = ~jnp.isfinite(size_measure)
  size_measure = jnp.where(bad.any(), bad.astype(jnp.float32), size_measure)
  # By a power of two to about 1, as a product of large sizes would overflow.
  _, exponent = jnp.frexp(size_measure.max(initial=0.0))
  size_measure *= 2.0 ** jnp.clip(-exponent, -126, 126).astype(jnp.float32)
  is_some = size_measure > 0
  # At most an even split of `n`: the least of all must fit.
  count = jnp.maximum(is_some.sum(dtype=jnp.float32), 1.0)
  even = jnp.floor(n.astype(jnp.float32) / count * GRID).astype(jnp.int32)
  even -= (_excess(jnp.where(is_some, even, 0), n) > 0).astype(jnp.int32)
  least = jnp.clip(even, 1, min(max(math.ceil(min_prob * GRID), 1), GRID - 1))
  least = least.astype(jnp.float32) / GRID

  def filled(bits):
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    prob = jnp.clip(scale * size_measure, least, 1.0)
    return jnp.where(is_some & (n > 0), prob, 0.0)

  # Positive floats are ordered like their bits, so bisecting the bits finds the
  # largest scale that fits exactly.
  def halve(_, bounds):
    low, high = bounds
    middle = high - (high - low) // 2
    fits = _excess(_units(filled(middle)), n) <= 0
    return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

  highest = jax.lax.bitcast_convert_type(jnp.finfo(jnp.float32).max, jnp.int32)
  low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.int32(0), highest))
  units, above = _units(filled(low)), _units(filled(low + 1))
  # The next scale raises some by a unit each, and too many of them.
  is_raised = above > units
  rank = jnp.cumsum(is_raised, dtype=jnp.int32)
  units += (is_raised & (rank <= -_excess(units, n))).astype(jnp.int32)
  return units.astype(jnp.float32) / GRID


def systematic(
  key: Key[Array, ""], prob: Float[Array, "M"]
) -> Bool[Array, "M"]:
  """Keeps `prob.sum()` items, each with exactly its probability.

  Neighbours whose probabilities sum to at most 1 exclude one another, so the
  order is a stratification. It may depend on anything but the draw.

  >>> import jax
  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> prob = algo.water_filling(jnp.array([4.0, 2.0, 1.0, 1.0, 0.0]), n=2)
  >>> keep = algo.systematic(jax.random.key(0), prob)
  >>> print(keep.sum(), keep[0], keep[4])
  2 True False

  Args:
    prob: multiples of `1 / GRID`, of a sum that is a whole number.
  Source: Madow 1949, systematic sampling with unequal probabilities.
  """
  return systematic_at(jax.random.bits(key, dtype=jnp.uint32) >> 12, prob)


def systematic_at(
  offset: UInt32[Array, ""], prob: Float[Array, "M"]
) -> Bool[Array, "M"]:
  """Items that a systematic draw keeps at one of its equally likely offsets.

  Each item covers `prob * GRID` consecutive marks of a ruler, one item after
  the other; those that cover `offset + k * GRID` for an integer `k` are kept.

  Args:
    offset: mark of the ruler, in `[0, GRID)`.
  """
  units = _units(prob).astype(jnp.uint32)
  # The ruler may wrap around at 2**32, which is a multiple of GRID.
  start = jnp.cumsum(units, dtype=jnp.uint32) - units
  return (offset - start) % jnp.uint32(GRID) < units


def bernoulli(
  key: Key[Array, ""], prob: Float[Array, "*shape"]
) -> Bool[Array, "*shape"]:
  """Keeps each item independently, see `drawn_probability`.

  >>> import jax
  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> prob = jnp.array([0.0, 0.5, 1.0])
  >>> keys = jax.random.split(jax.random.key(0), 10_000)
  >>> keep = jax.vmap(algo.bernoulli, (0, None))(keys, prob)
  >>> print(keep.mean(axis=0).round(1))
  [0.  0.5 1. ]
  """
  return jax.random.uniform(key, prob.shape) < prob


def drawn_probability(prob: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Probability with which `jax.random.uniform(key) < prob` is True.

  Random numbers in float32 are multiples of 2^-23, so this is `prob` rounded
  up to the next multiple. Reporting it keeps the weights exact.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo
  >>> print(2**23 * algo.drawn_probability(jnp.array([0.5, 1e-6])))
  [4.194304e+06 9.000000e+00]
  """
  return jnp.ceil(prob * 2.0**23) / 2.0**23


def _units(prob: Float[Array, "M"]) -> Int[Array, "M"]:
  """Multiples of `1 / GRID` in each probability."""
  return jnp.floor(prob * GRID).astype(jnp.int32)


def _excess(units: Int[Array, "M"], n: IntScalar) -> IntScalar:
  """`sum(units) - n * GRID`, clipped to 2**30, of up to 2**30 items."""
  # Of blocks, in three limbs, as the sum may exceed 2**32.
  blocks = jnp.pad(units, (0, -units.size % 1024)).reshape(-1, 1024)
  sums = blocks.sum(axis=1, dtype=jnp.int32)
  low = (sums & 1023).sum(dtype=jnp.int32)
  middle = ((sums >> 10) & 1023).sum(dtype=jnp.int32) + (low >> 10)
  high = (sums >> 20).sum(dtype=jnp.int32) + (middle >> 10) - n
  remainder = (middle & 1023) * 1024 + (low & 1023)
  return jnp.clip(high, -1024, 1023) * GRID + remainder
