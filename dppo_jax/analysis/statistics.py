"""Means, differences and ratios over seeds, with 95% t-intervals.

A bootstrap would give intervals that are too short for three to five seeds.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

Curve = tuple[np.ndarray, np.ndarray]


class Interval(NamedTuple):
  """A value and the bounds of its 95% interval, NaN if unknown."""

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


def with_interval(x: Interval, digits: int = 3) -> str:
  """Returns a value with its interval, if it has one, as text."""
  low, high = (f"{bound:.{digits}f}" for bound in (x.low, x.high))
  interval = "" if np.isnan(x.low) else f" ({low} to {high})"
  return f"{x.value:.{digits}f}{interval}"


def difference(a: Mapping[int, float], b: Mapping[int, float]) -> Interval:
  """Returns the mean of `a - b`, paired if one has all seeds of the other."""
  seeds = a.keys() & b.keys()
  if len(seeds) == min(len(a), len(b)):
    return mean([a[seed] - b[seed] for seed in seeds])
  return mean([float(np.mean([*a.values()]) - np.mean([*b.values()]))])


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
