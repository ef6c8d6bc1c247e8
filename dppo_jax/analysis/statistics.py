"""Means, differences and ratios over seeds, with 95% t-intervals.

A bootstrap would give intervals that are too short for three to five seeds.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

NORMAL = 1.96  # standard errors in half of a 95% interval of many values
Curve = tuple[np.ndarray, np.ndarray]


class Interval(NamedTuple):
  """A value and the bounds of its interval, NaN if it is of one seed."""

  value: float
  low: float
  high: float


def mean(values: Sequence[float]) -> Interval:
  """Returns the mean of one value per seed."""
  x, error = np.asarray(values, float), np.nan
  if len(x) > 1:
    quantile = special.stdtrit(len(x) - 1, 0.975)  # of Student's distribution
    error = quantile * x.std(ddof=1) / np.sqrt(len(x))
  return Interval(*(float(x.mean() + e) for e in (0, -error, error)))


def with_interval(value: float, stderr: float) -> str:
  """A mean of many values with its 95% interval, as text."""
  return f"{value:.3f} ± {NORMAL * stderr:.3f}"


def difference(a: Mapping[int, float], b: Mapping[int, float]) -> Interval:
  """Returns the mean of `a - b`, paired by seed."""
  if seeds := a.keys() & b.keys():
    return mean([a[seed] - b[seed] for seed in seeds])
  return mean([np.mean([*a.values()]) - np.mean([*b.values()])])


def ratio(a: Mapping[int, float], b: Mapping[int, float]) -> Interval:
  """Returns the geometric mean of `a / b`; all values are above 0."""
  logs = ({seed: np.log(x) for seed, x in values.items()} for values in (a, b))
  return Interval(*(float(np.exp(x)) for x in difference(*logs)))


def band(curves: Sequence[Curve]) -> tuple[np.ndarray, Interval]:
  """Averages linear curves up to the end of the shortest; returns x and y."""
  end = min(x[-1] for x, _ in curves)
  x = np.unique(np.concatenate([x for x, _ in curves]))
  x = np.unique([*x[x < end], end])
  y = np.stack([np.interp(x, *curve) for curve in curves], axis=1)
  return x, Interval(*np.array([mean(row) for row in y]).T)
