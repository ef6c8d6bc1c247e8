"""Gradient noise scale, estimated from what updates report anyway.

The optimizer's momentum is a weighted sum of earlier gradients, each from other
prompts. Their noise is independent of the newest gradient's, so the inner
product of the two is, in expectation, the squared norm of the gradient's mean
times the sum of the weights, as long as the mean changes slowly. Faster changes
make the estimate of the signal too low, and budgets prune less. The product
follows from the momentum's norm before and after an update.

The part of the noise between the completions of a prompt comes from an extra
backward pass of one micro-batch now and then: if each completion's gradient has
a random sign, the expected squared norm of the sum is the sum of the squared
norms. Parts that cut through groups, as micro-batches do, cannot be compared
instead: the completions of a group are not independent.

Source: the definitions of McCandlish et al. 2018, arXiv:1812.06162, section 2.2
and appendix A; momentum and signs are ours.
"""

import math
from typing import NamedTuple

import numpy as np

from dppo_jax.analysis.runs import SCALE_LIMIT
from dppo_jax.records import Scalar

Value = Scalar | np.ndarray | np.float32  # a float32, on the host or not
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

  momentum: Value
  signal: Value
  noise: Value
  within: Value
  total: Value


def init() -> Noise:
  """Returns the estimates before the first measurement."""
  return Noise(*np.zeros(len(Noise._fields), np.float32))


def product_with_momentum(
  before: float, after: float, clipped_norm: float, decay: float
) -> float:
  """Returns the inner product of a clipped gradient and the momentum before it.

  Args:
    before, after: squared norm of the momentum, before and after the update
      `after = decay before + (1 - decay) gradient` of the vectors.
    clipped_norm: norm of the gradient that reached the momentum.
    decay: decay of the momentum; 0 if it has none.
  """
  if not decay:
    return math.nan
  cross = after - decay**2 * before - ((1 - decay) * clipped_norm) ** 2
  return cross / (2 * decay * (1 - decay))


def add_gradient(
  old: Noise, squared_norm: float, product: float, added: float
) -> Noise:
  """Updates signal and noise by one gradient.

  Args:
    squared_norm: squared norm of the gradient.
    product: inner product of the gradient and the momentum before it.
    added: variance that the choice of completions adds, over the noise of the
      batch without pruning.
  """
  if old.momentum <= 0 or not math.isfinite(squared_norm + product):
    return old
  signal = product / float(old.momentum)
  noise = (squared_norm - signal) / (1 + added)
  return old._replace(
    signal=_mix(old.signal, signal), noise=_mix(old.noise, noise)
  )


def add_momentum(old: Noise, decay: float, kept: float) -> Noise:
  """Updates the weight of earlier gradients as the optimizer does.

  Args:
    decay: decay of the momentum.
    kept: factor on the newest gradient, from clipping.
  """
  weight = decay * float(old.momentum) + (1 - decay) * kept
  return old._replace(momentum=np.float32(weight))


def add_signs(
  old: Noise, squared_norm: float, within: float, added: float
) -> Noise:
  """Updates the noise within prompts by one measurement.

  Args:
    squared_norm, added: as in `add_gradient`.
    within: sum of the squared norms of the completions' gradients.
  """
  total = squared_norm / (1 + added * noise_fraction(old))
  if not math.isfinite(within + total):
    return old
  return old._replace(
    within=_mix(old.within, within), total=_mix(old.total, total)
  )


def _mix(old: Value, new: float) -> np.float32:
  return np.float32(DECAY * float(old) + (1 - DECAY) * new)


def noise_fraction(noise: Noise, passes: int = 1) -> float:
  """Returns the noise's part of the gradient's squared norm; 1 while unknown.

  That is `r / (1 + r)`, with `r` the noise scale over the batch size.

  Args:
    passes: updates on the same completions, which multiply the noise scale.
  """
  signal = max(float(noise.signal), 0.0)
  total = signal + max(float(noise.noise), 0.0) * passes
  return 1 - signal / total if total > 0 else 1.0


def within_fraction(noise: Noise, unknown: float = math.inf) -> float:
  """Returns the sum of the completions' squared gradient norms over the noise.

  Args:
    unknown: result before it is measured.
  """
  if noise.within <= 0 or noise.total <= 0:
    return unknown
  fraction = float(noise.within) / float(noise.total)
  return fraction / max(noise_fraction(noise), MIN_NOISE_FRACTION)


def describe(noise: Noise, num_prompts: int) -> dict[str, float]:
  """Returns metrics: the fraction, and the noise scale in prompts, limited."""
  fraction = noise_fraction(noise)
  scale = num_prompts * fraction / max(1 - fraction, 1e-9)
  return {"noise/fraction": fraction, "noise/scale": min(scale, SCALE_LIMIT)}
