"""Parts of a transformer layer: norm, projection, rotary positions."""

from collections.abc import Callable
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dppo_jax import sharding

# The activation of a gated feed-forward part, by its name in config.json.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
  "silu": jax.nn.silu,
  "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class RopeScaling(NamedTuple):
  """Division of rotary frequencies by a factor, for longer contexts.

  With the other fields, which are 0 if absent, it is Llama 3's, of the low
  frequencies alone.
  """

  factor: float
  low_freq_factor: float = 0.0
  high_freq_factor: float = 0.0
  original_length: int = 0  # context before scaling, in tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(
  x: Float[Array, "*B E"], scale: Float[Array, "E"], eps: float
) -> Float[Array, "*B E"]:
  """Returns `x / sqrt(mean(x^2) + eps) * scale`, the mean in float32.

  The product with `scale` is computed in the dtype of `scale`.

  The backward pass is written by hand for XLA's CPU backend: there, sums
  written as matrix products are up to ten times faster than reductions.
  """
  return _rms_norm_forward(x, scale, eps)[0]


def _rms_norm_forward(x, scale, eps):
  x32 = x.astype(jnp.float32)
  inv_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
  out = (x32 * inv_rms).astype(scale.dtype) * scale
  return out.astype(x.dtype), (x, scale, inv_rms)


def _rms_norm_backward(eps, saved, grad):
  x, scale, inv_rms = saved
  normed = x.astype(jnp.float32) * inv_rms
  grad, scale32 = grad.astype(jnp.float32), scale.astype(jnp.float32)
  product = grad * normed
  dscale = _dot(jnp.ones(x.shape[:-1]), product, x.ndim - 1)
  mean = _dot(product, scale32[:, None] / x.shape[-1], 1)
  dx = (grad * scale32 - normed * mean) * inv_rms
  return dx.astype(x.dtype), dscale.astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)

_dot = functools.partial(jnp.tensordot, precision=jax.lax.Precision.HIGHEST)


def linear(
  x: Float[Array, "*B E"], weight: Float[Array, "E *F"]
) -> Float[Array, "..."]:
  """Returns `x` times `weight`, `[*B, *F]`, as a product of two matrices.

  For a product over several axes XLA would first transpose a copy.
  """
  out = x.reshape(-1, x.shape[-1]) @ weight.reshape(x.shape[-1], -1)
  return out.reshape(*x.shape[:-1], *weight.shape[1:])


def cos_sin_table(
  num_positions: int,
  head_dim: int,
  theta: float,
  scaling: RopeScaling | None = None,
) -> tuple[Float[Array, "N 1 half"], Float[Array, "N 1 half"]]:
  """Returns float32 cosines and sines of each position's rotation angles.

  RoPE, https://arxiv.org/abs/2104.09864.
  """
  half = head_dim // 2
  frequency = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
  if scaling and not scaling.original_length:
    frequency = frequency / scaling.factor
  elif scaling:
    rotations = scaling.original_length * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
    frequency = frequency * (kept + (1 - kept) / scaling.factor)
  positions = jnp.arange(num_positions, dtype=jnp.float32)
  angle = positions[:, None, None] * frequency
  return jnp.cos(angle), jnp.sin(angle)


def apply_rope(
  x: Float[Array, "*B H D"],
  cos: Float[Array, "*B 1 half"],
  sin: Float[Array, "*B 1 half"],
) -> Float[Array, "*B H D"]:
  """Rotates each pair (i, i + D/2) of the last axis of `x` by its angle."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x.dtype)


def block_size(length: int) -> int:
  """Returns the tokens of a row to process at once, about an eighth.

  Smaller blocks skip more padding, larger ones launch fewer operations.
  """
  return min(length, 512, sharding.round_up(-(-length // 8), 64))
