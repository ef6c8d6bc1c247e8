"""Gradient noise scale, estimated from what an update computes anyway.

The optimizer's momentum is a weighted sum of earlier gradients, each from other
prompts. Their noise is independent of the newest gradient's, so the inner
product of the two is, in expectation, the squared norm of the gradient's mean
times the sum of the weights, as long as the mean changes slowly. Faster changes
make the estimate of the signal too low, and budgets prune less.

The part of the noise between the completions of a prompt comes from an extra
backward pass of one micro-batch now and then: if each completion's gradient has
a random sign, the expected squared norm of the sum is the sum of the squared
norms. Parts that cut through groups, as micro-batches do, cannot be compared
instead: the completions of a group are not independent.

Source: the definitions of McCandlish et al. 2018, arXiv:1812.06162, section 2.2
and appendix A; momentum and signs are ours.
"""

from typing import NamedTuple

import jax.numpy as jnp

from dppo_jax.algo.weights import ratio
from dppo_jax.analysis.runs import SCALE_LIMIT
from dppo_jax.records import Scalar

DECAY = 0.9  # weight of earlier measurements, at each further one
# An estimate of the noise below this is a failed measurement: the smallest
# value in experiments/09_when_it_pays is 0.12.
MIN_NOISE_FRACTION = 0.1


class Noise(NamedTuple):
  """Estimates smoothed over measurements; all are 0 before the first.

  Squared norms are in units of the gradient of one update.

  Attributes:
    momentum: sum of the weights of earlier gradients in the momentum.
    signal: estimate of `|E g|^2`, which may be negative.
    noise: estimate of `E |g - E g|^2`, of the batch without pruning.
    within: sum of the squared norms of the completions' gradients.
    total: estimate of `E |g|^2` without pruning, where `within` was measured.
  """

  momentum: Scalar
  signal: Scalar
  noise: Scalar
  within: Scalar
  total: Scalar


def init() -> Noise:
  """Returns the estimates before the first measurement."""
  return Noise(*jnp.zeros(len(Noise._fields), jnp.float32))


def add_gradient(
  old: Noise, squared_norm: Scalar, product: Scalar, added: Scalar
) -> Noise:
  """Updates signal and noise by one gradient.

  Args:
    squared_norm: squared norm of the gradient.
    product: inner product of the gradient and the momentum before it.
    added: variance that the choice of completions adds, over the noise of the
      batch without pruning.
  """
  signal = ratio(product, old.momentum)
  noise = (squared_norm - signal) / (1 + added)
  is_measured = (old.momentum > 0) & jnp.isfinite(signal + noise)
  mix = lambda x, y: jnp.where(is_measured, DECAY * x + (1 - DECAY) * y, x)
  return old._replace(
    signal=mix(old.signal, signal), noise=mix(old.noise, noise)
  )


def add_momentum(old: Noise, decay: float, kept: Scalar) -> Noise:
  """Updates the weight of earlier gradients as the optimizer does.

  Args:
    decay: decay of the momentum.
    kept: factor on the newest gradient, from clipping.
  """
  return old._replace(momentum=decay * old.momentum + (1 - decay) * kept)


def add_signs(
  old: Noise, squared_norm: Scalar, within: Scalar, added: Scalar
) -> Noise:
  """Updates the noise within prompts by one measurement.

  Args:
    squared_norm, added: as in `add_gradient`.
    within: sum of the squared norms of the completions' gradients.
  """
  total = squared_norm / (1 + added * noise_fraction(old))
  is_finite = jnp.isfinite(within + total)
  mix = lambda x, y: jnp.where(is_finite, DECAY * x + (1 - DECAY) * y, x)
  return old._replace(
    within=mix(old.within, within), total=mix(old.total, total)
  )


def noise_fraction(noise: Noise, passes: int = 1) -> Scalar:
  """Computes `noise_fraction` of `records.StepCosts`; 1 while unknown.

  Args:
    passes: updates on the same completions, which multiply the noise scale.
  """
  signal = jnp.maximum(noise.signal, 0.0)
  total = signal + jnp.maximum(noise.noise, 0.0) * passes
  return 1 - ratio(signal, total)


def within_fraction(noise: Noise) -> Scalar:
  """Computes `within_fraction` of `records.StepCosts`; infinity if unknown."""
  fraction = ratio(noise.within, noise.total)
  fraction /= jnp.maximum(noise_fraction(noise), MIN_NOISE_FRACTION)
  return jnp.where(fraction > 0, fraction, jnp.inf)


def describe(noise: Noise, num_prompts: int) -> dict[str, float]:
  """Returns metrics: the fraction, and the noise scale in prompts, limited."""
  fraction = float(noise_fraction(noise))
  scale = num_prompts * fraction / max(1 - fraction, 1e-9)
  return {"noise/fraction": fraction, "noise/scale": min(scale, SCALE_LIMIT)}
