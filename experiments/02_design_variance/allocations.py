"""Numbers of completions to sample of each prompt, from an earlier visit.

Each is `(rates [Q], total, least, most) -> [Q]` whole numbers that sum to
`total`, as far as the bounds let them.
"""

from collections.abc import Callable

import numpy as np


def even(rates, total: int, least: int, most: int) -> np.ndarray:
  """The same number of each."""
  return _greedy(lambda n: -n, len(rates), total, least, most)


def vip_like(rates, total: int, least: int, most: int) -> np.ndarray:
  """The least sum of predicted variances `p (1 - p) / n`.

  Source: VIP, arXiv:2602.01601, whose text was read in parts and whose public
    code gives bounds of 1 and 32; it predicts p by a Gaussian process over
    prompts, this by the mean of a Beta(1/2, 1/2) after the earlier visit.
  """
  p = (rates * 16 + 0.5) / 17
  gain = lambda n: p * (1 - p) / (n * (n + 1))
  return _greedy(gain, len(rates), total, least, most)


def knapsack_like(rates, total: int, least: int, most: int) -> np.ndarray:
  """The largest sum of `(1 - p^n - (1 - p)^n) p (1 - p)^2`.

  Source: Knapsack RL, arXiv:2509.25849, as summaries give its value of a task.
    The value of n is concave, so that adding where it grows most is optimal.
    What was all right or all wrong keeps `least`.
  """
  p = rates
  grows = lambda n: p**n * (1 - p) + (1 - p) ** n * p
  gain = lambda n: grows(n) * p * (1 - p) ** 2
  return _greedy(gain, len(rates), total, least, most)


def duet_like(rates, total: int, least: int, most: int) -> np.ndarray:
  """In proportion to `sqrt(p (1 - p))`.

  Source: DUET, arXiv:2605.08441: our reading of its abstract, which speaks of
    a cheap surrogate of a prompt's informativeness.
  """
  p = (rates * 16 + 0.5) / 17
  size = np.sqrt(p * (1 - p))
  gain = lambda n: size / np.maximum(n, 1)
  return _greedy(gain, len(rates), total, least, most)


def _greedy(
  gain: Callable[[np.ndarray], np.ndarray],
  num: int,
  total: int,
  least: int,
  most: int,
) -> np.ndarray:
  """From `least` of each, one more where that gains most, until `total`.

  What gains nothing anywhere is spread evenly.
  """
  sizes = np.full(num, least)
  while sizes.sum() < total and (sizes < most).any():
    gains = gain(sizes) - 1e-9 * sizes
    sizes[np.argmax(np.where(sizes < most, gains, -np.inf))] += 1
  return sizes
