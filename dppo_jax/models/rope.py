"""Rotary position embeddings: a position is an angle of each pair of a head."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class RopeScaling(NamedTuple):
  """Llama 3's stretch of slow rotary frequencies to longer contexts."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_length: int  # tokens of the context before the stretch


def turns(
  num_positions: int,
  head_dim: int,
  theta: float,
  scaling: RopeScaling | None = None,
) -> tuple[Float[Array, "N 1 D/2"], Float[Array, "N 1 D/2"]]:
  """Float32 cosines and sines of each position."""
  half = head_dim // 2
  exponent = jnp.arange(half, dtype=jnp.float32) / half
  frequency = theta**-exponent
  if scaling is not None:
    frequency = _stretch(frequency, scaling)
  positions = jnp.arange(num_positions, dtype=jnp.float32)
  angle = positions[:, None, None] * frequency
  return jnp.cos(angle), jnp.sin(angle)


def rotate(
  x: Float[Array, "*B H D"],
  cos: Float[Array, "*B 1 D/2"],
  sin: Float[Array, "*B 1 D/2"],
) -> Float[Array, "*B H D"]:
  """`x` with each pair (i, i + D/2) of its last axis turned by its angle."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


def _stretch(frequency, scaling: RopeScaling):
  """Slow frequencies divided by `factor`, fast ones kept, a ramp between."""
  turned = scaling.original_length * frequency / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  kept = jnp.clip((turned - low) / (high - low), 0.0, 1.0)
  return frequency * (kept + (1 - kept) / scaling.factor)
