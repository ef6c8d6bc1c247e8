"""Gradient noise scale, estimated from an occasional extra backward pass.

If each prompt's part of a gradient is multiplied by a random sign, the expected
squared norm of the sum is the sum of the squared norms of the parts. Its
difference from the squared norm of the gradient is due to products of different
prompts, that is to their common direction. Parts that cut through groups, such
as micro-batches, cannot be used: completions of a group are not independent,
and half a group's advantages do not sum to 0.

Source: the definitions of McCandlish et al. 2018, arXiv:1812.06162, section 2.2
and appendix A; the signs are ours.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax.analysis.runs import SCALE_LIMIT

DECAY = 0.7  # weight of earlier measurements, at each further one


class Noise(NamedTuple):
  """Estimates smoothed over measurements; both are 0 before the first.

  Attributes:
    signal: estimate of `|E g|^2`, which may be negative.
    noise: estimate of `E |g - E g|^2`, of the batch without pruning.
  """

  signal: Float[Array, ""]
  noise: Float[Array, ""]


def init() -> Noise:
  """Returns the estimates before the first measurement."""
  return Noise(jnp.float32(0), jnp.float32(0))


def random_signs(key: jax.Array, num_prompts: int) -> Float[Array, "N"]:
  """Draws 1 or -1 for each prompt."""
  return jax.random.rademacher(key, (num_prompts,), jnp.float32)


def add_measurement(
  old: Noise,
  total: Float[Array, ""],
  signed: Float[Array, ""],
  num_prompts: int | Int[Array, ""],
  added: float | Float[Array, ""] = 0.0,
) -> Noise:
  """Updates the estimates; a measurement that is not finite changes nothing.

  Args:
    total: squared norm of the gradient.
    signed: squared norm of the gradient with random signs.
    num_prompts: prompts that the gradient is a sum of, of a draw of fixed size;
      with one, everything counts as noise.
    added: variance that the choice of completions adds, over that of the batch.
  """
  num_pairs = jnp.maximum(num_prompts, 2) - 1  # with any one prompt
  signal = (total - signed) * (1 + 1 / num_pairs)
  signal = jnp.where(num_prompts > 1, signal, 0.0)
  noise = (total - signal) / (1 + added)
  mix = lambda x, y: jnp.where(jnp.isfinite(total + signed), DECAY * x + y, x)
  return Noise(mix(old.signal, signal), mix(old.noise, noise))


def noise_fraction(noise: Noise) -> float:
  """Computes `noise_fraction` of `records.StepCosts`, on the host."""
  signal = max(float(noise.signal), 0.0)
  total = signal + max(float(noise.noise), 0.0)
  return 1 - signal / total if total > 0 else 1.0


def describe(noise: Noise, num_prompts: int) -> dict[str, float]:
  """Returns metrics: the fraction, and the noise scale in prompts, limited."""
  fraction = noise_fraction(noise)
  scale = num_prompts * fraction / max(1 - fraction, 1e-9)
  return {"noise/fraction": fraction, "noise/scale": min(scale, SCALE_LIMIT)}
