"""Means, differences and ratios over seeds, with their intervals.

Intervals are Student's t on the values, on differences paired by seed where
two seeds or more match, and on logarithms for ratios. There is no bootstrap on
purpose: of the three to five seeds that one has it makes intervals that are too
short.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import NamedTuple

import numpy as np

LEVEL = 0.95


class Interval(NamedTuple):
  """A value with its confidence interval.

  Attributes:
    low, high: NaN where there is one seed, which says nothing of others.
    n: values, or pairs of them, that it is made of.
    is_paired: made of differences between equal seeds.
  """

  value: float
  low: float
  high: float
  n: int
  is_paired: bool = False

  def excludes(self, value: float) -> bool:
    """Whether `value` is outside; never where no spread was seen at all."""
    return self.low < self.high and not self.low <= value <= self.high


@functools.lru_cache
def t_quantile(freedom: float, level: float = LEVEL) -> float:
  """The t with `level` of Student's distribution between -t and t.

  Args:
    freedom: degrees of freedom, above 0; need not be whole.
  """
  # With t = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1).
  edges = np.linspace(0, np.pi / 2, 20_001)
  middles = (edges[1:] + edges[:-1]) / 2
  share = np.concatenate([[0], np.cumsum(np.cos(middles) ** (freedom - 1))])
  angle = np.interp(level, share / share[-1], edges)
  return float(np.sqrt(freedom) * np.tan(angle))


def mean(
  values: Sequence[float], level: float = LEVEL, is_paired: bool = False
) -> Interval:
  """The mean of one value a seed.

  Raises:
    ValueError: for no values.
  """
  if not len(values):
    raise ValueError("a mean takes at least 1 value")
  x = np.asarray(values, float)
  centre, n = float(x.mean()), len(x)
  if n < 2:
    return Interval(centre, np.nan, np.nan, n, is_paired)
  half = t_quantile(n - 1, level) * x.std(ddof=1) / np.sqrt(n)
  return Interval(centre, centre - half, centre + half, n, is_paired)


def difference(
  a: Mapping[int, float], b: Mapping[int, float], level: float = LEVEL
) -> Interval:
  """The mean of `a` less that of `b`, each a value for every seed.

  Paired where two seeds or more match, of those alone; otherwise by Welch's
  interval, which needs two seeds on either side.
  """
  both = [seed for seed in a if seed in b]
  if len(both) >= 2 or (both and min(len(a), len(b)) == 1):
    return mean([a[seed] - b[seed] for seed in both], level, is_paired=True)
  centre = float(np.mean([*a.values()]) - np.mean([*b.values()]))
  n = min(len(a), len(b))
  if n < 2:
    return Interval(centre, np.nan, np.nan, n)
  parts = [np.var([*x.values()], ddof=1) / len(x) for x in (a, b)]
  if not sum(parts):
    return Interval(centre, centre, centre, n)
  freedom = sum(parts) ** 2 / sum(
    part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True)
  )
  half = t_quantile(freedom, level) * np.sqrt(sum(parts))
  return Interval(centre, centre - half, centre + half, n)


def ratio(
  a: Mapping[int, float], b: Mapping[int, float], level: float = LEVEL
) -> Interval:
  """The geometric mean of `a` over that of `b`; all values above 0."""
  logs = [{seed: np.log(x) for seed, x in values.items()} for values in (a, b)]
  found = difference(*logs, level)
  return found._replace(
    value=float(np.exp(found.value)),
    low=float(np.exp(found.low)),
    high=float(np.exp(found.high)),
  )


class Band(NamedTuple):
  """Curves of several seeds as one.

  Attributes:
    x: as far as the shortest curve goes.
    mean, low, high: over the seeds; low and high are the lowest and highest.
  """

  x: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray


def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> Band:
  """The mean of curves, linear between their points, and their range."""
  end = min(x[-1] for x, _ in curves)
  points = np.unique(np.concatenate([x for x, _ in curves]))
  points = np.unique([*points[points < end], end])
  y = np.stack([np.interp(points, *curve) for curve in curves])
  return Band(points, y.mean(axis=0), y.min(axis=0), y.max(axis=0))
