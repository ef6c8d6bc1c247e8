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
# Before the first measurement; those of experiments/11_equal_seconds chose 3 to
# 4, and a step of full groups costs as much as several of these.
FIRST_GROUP_SIZE = 4


class Noise(NamedTuple):
  """Estimates smoothed over measurements; all are 0 before the first.

  Attributes:
    signal: estimate of `|E g|^2`, which may be negative.
    noise: estimate of `E |g - E g|^2`, of the batch without pruning.
    apart: sum of the squared norms of the completions' gradients.
    within: the same with what the choice of completions adds, times the
      completions of a prompt less 1, which does not depend on their number.
    common: signal and noise without `apart`; it does not depend on it either.
  """

  signal: Float[Array, ""]
  noise: Float[Array, ""]
  apart: Float[Array, ""]
  within: Float[Array, ""]
  common: Float[Array, ""]


def init() -> Noise:
  """Returns the estimates before the first measurement."""
  return Noise(*jnp.zeros(5, jnp.float32))


def random_signs(
  key: jax.Array, shape: int | tuple[int, ...]
) -> Float[Array, "..."]:
  """Draws 1 or -1 for each prompt or completion."""
  shape = (shape,) if isinstance(shape, int) else shape
  return jax.random.rademacher(key, shape, jnp.float32)


def add_measurement(
  old: Noise,
  total: Float[Array, ""],
  signed: Float[Array, ""],
  num_prompts: int | Int[Array, ""],
  added: float | Float[Array, ""] = 0.0,
  apart: float | Float[Array, ""] = 0.0,
  group_size: float | Float[Array, ""] = 2.0,
) -> Noise:
  """Updates the estimates; a measurement that is not finite changes nothing.

  Args:
    total: squared norm of the gradient.
    signed: squared norm of the gradient with random signs.
    num_prompts: prompts that the gradient is a sum of, of a draw of fixed size;
      with one, everything counts as noise.
    added: variance that the choice of completions adds, over that of the batch.
    apart: squared norm of the gradient with a random sign for each completion.
    group_size: mean number of completions of a prompt.
  """
  num_pairs = jnp.maximum(num_prompts, 2) - 1  # with any one prompt
  signal = (total - signed) * (1 + 1 / num_pairs)
  signal = jnp.where(num_prompts > 1, signal, 0.0)
  noise = (total - signal) / (1 + added)
  common = signal + noise - apart
  apart = jnp.asarray(apart)
  within = (apart + added * noise) * (group_size - 1)
  new = Noise(signal, noise, apart, within, common)
  is_finite = jnp.isfinite(total + signed + apart + added)
  mix = lambda x, y: jnp.where(is_finite, DECAY * x + y, x)
  return jax.tree.map(mix, old, new)


def noise_fraction(noise: Noise) -> float:
  """Computes `noise_fraction` of `records.StepCosts`, on the host."""
  signal = max(float(noise.signal), 0.0)
  total = signal + max(float(noise.noise), 0.0)
  return 1 - signal / total if total > 0 else 1.0


def apart_fraction(noise: Noise) -> float:
  """Computes `apart_fraction` of `records.StepCosts`, on the host."""
  return float(noise.apart) / float(noise.noise) if noise.noise > 0 else 0.5


def best_group_size(noise: Noise, largest: int) -> float:
  """Returns the size that minimises the steps to a target times their cost.

  With groups of `g`, of which a fixed fraction is trained on, steps are
  proportional to `common + within / (g - 1)` and their cost to `g`, if that of
  prompts is small. The best `g - 1` is then the square root of `within /
  common`. In turn with an automatic budget this reaches a size and a fraction
  of which neither can be improved alone.
  """
  if not noise.apart > 0:
    return float(min(FIRST_GROUP_SIZE, largest))
  within, common = max(float(noise.within), 0.0), float(noise.common)
  ratio = within / common if common > 0 else float("inf")
  return min(max(1 + ratio**0.5, 2.0), float(largest))


def describe(noise: Noise, num_prompts: int) -> dict[str, float]:
  """Returns metrics: the fraction, and the noise scale in prompts, limited."""
  fraction = noise_fraction(noise)
  scale = num_prompts * fraction / max(1 - fraction, 1e-9)
  return {"noise/fraction": fraction, "noise/scale": min(scale, SCALE_LIMIT)}
