"""Seconds of a step's stages, smoothed over steps, for automatic budgets."""

from typing import NamedTuple

import numpy as np

from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.records import StepCosts

DECAY = 0.95  # weight of earlier steps, at each further one


class StepSample(NamedTuple):
  """Measurements of one step.

  Attributes:
    update: seconds of scoring and updating.
    other: seconds of all other stages.
    micros: micro-batches of the update, those that measure noise included.
    rows: packed rows in use.
    tokens: tokens of the completions in these rows, trained or not.
  """

  update: float
  other: float
  micros: float
  rows: float
  tokens: float


class CostTracker:
  """Smooths the measurements of steps.

  Args:
    rows_per_micro: rows of a full micro-batch, over all devices.
  """

  def __init__(self, rows_per_micro: int):
    self._rows_per_micro = rows_per_micro
    self._sums = np.zeros(len(StepSample._fields))
    self._weight = 0.0

  def add(self, sample: StepSample) -> None:
    """Adds the measurements of one more step."""
    self._sums = DECAY * self._sums + np.array(sample)
    self._weight = DECAY * self._weight + 1

  def costs(
    self,
    noise: gradient_noise.Noise,
    inner_updates: int = 1,
    mini_batches: int = 1,
  ) -> StepCosts:
    """Returns the costs of a step; all seconds are 0 before the first.

    Args:
      inner_updates, mini_batches: as in `update.UpdateConfig`.
    """
    fraction = gradient_noise.noise_fraction(noise, inner_updates)
    fraction /= inner_updates
    within = gradient_noise.within_fraction(noise)
    sums = StepSample(*self._sums)
    ratio = lambda x, y: np.array(x / y if y > 0 else 0.0, np.float32)
    return StepCosts(
      noise_fraction=np.asarray(fraction, np.float32),
      micro_seconds=ratio(sums.update, sums.micros),
      micro_tokens=ratio(self._rows_per_micro * sums.tokens, sums.rows),
      other_seconds=ratio(sums.other, self._weight),
      within_fraction=np.asarray(within, np.float32),
      num_updates=np.asarray(inner_updates * mini_batches, np.float32),
    )
