"""The law of seconds to the same point, and what minimises it.

A choice keeps unit `u` with probability `pi_u` and weight `1 / pi_u`. With
costs and second moments as shares of the unpruned step's cost and variance,

  cost = fixed + sum_u cost_u pi_u,    v = sum_u value_u (1 / pi_u - 1),

and seconds to the same point are `cost (1 + (1 + v) r) / (1 + r)` of the
unpruned run's, `r` being the noise scale over the batch.
"""

from typing import NamedTuple

import numpy as np

RATIOS = (np.inf, 3.0, 1.0)  # noise scale over the batch
_GRID = np.geomspace(1e-4, 1e4, 161)


class Cells(NamedTuple):
  """Units whose probability is one number each, as sums over their members.

  Attributes:
    cost: `[U]`, shares of an unpruned step's seconds.
    value: `[U]`, second moments over the unpruned gradient's variance.
    fixed: the share of seconds that no choice saves.
  """

  cost: np.ndarray
  value: np.ndarray
  fixed: float = 0.0


def seconds(cost, added, r: float):
  """Seconds to the same point, over those of the unpruned run."""
  if np.isinf(r):
    return cost * (1 + added)
  return cost * (1 + (1 + added) * r) / (1 + r)


def probabilities(cells: Cells, multiplier: float, floor: float = 0.0):
  """`[U]`: Neyman's, `multiplier * sqrt(value / cost)`, within `floor`..1.

  What costs nothing is kept; what is worth nothing is not.
  """
  with np.errstate(divide="ignore", invalid="ignore"):
    size = np.sqrt(np.maximum(cells.value, 0) / cells.cost)
  size = np.where(cells.cost > 0, size, np.inf)
  return np.clip(multiplier * size, floor, 1.0)


def outcome(cells: Cells, prob: np.ndarray) -> tuple[float, float]:
  """Cost and added variance of these probabilities."""
  cost = cells.fixed + cells.cost @ prob
  is_free = cells.value == 0
  odds = 1 / np.where(is_free | (prob == 0), 1.0, prob) - 1
  return cost, float(cells.value @ odds)


def frontier(cells: Cells, floor: float = 0.0):
  """Costs and added variances of Neyman's probabilities, `[N]` each.

  At every cost these have the least variance, so the best of them is the best
  of all.

  Returns:
    The multipliers, from all probabilities 1 to few, their costs and variances.
  """
  scale = np.sqrt(cells.cost.sum() / max(cells.value.sum(), 1e-30))
  multipliers = np.append(np.inf, _GRID * scale)
  points = [outcome(cells, np.ones_like(cells.cost))]
  for multiplier in multipliers[1:]:
    points.append(outcome(cells, probabilities(cells, multiplier, floor)))
  return multipliers, *np.array(points).T


def optimum(cells: Cells, r: float, floor: float = 0.0) -> np.ndarray:
  """The probabilities that take the fewest seconds."""
  multipliers, cost, added = frontier(cells, floor)
  best = multipliers[seconds(cost, added, r).argmin()]
  if np.isinf(best):
    return np.ones_like(cells.cost)
  return probabilities(cells, best, floor)


def gains(cells: Cells) -> dict[str, float]:
  """1 / seconds at each of `RATIOS`, the choice being the best for each."""
  _, cost, added = frontier(cells)
  return {name(r): 1 / seconds(cost, added, r).min() for r in RATIOS}


def name(r: float) -> str:
  return "r=inf" if np.isinf(r) else f"r={r:g}"


def cauchy_schwarz(value: np.ndarray, cost: np.ndarray) -> float:
  """The gain in the noise-dominated limit where no probability is held at 1.

  The unpruned variance is then the sum of the second moments, and nothing is
  fixed: `(sum v)(sum c) / (sum sqrt(v c))^2`, the most that any probabilities
  reach.
  """
  return value.sum() * cost.sum() / np.sqrt(value * cost).sum() ** 2


def smaller_batch(fixed: float, r: float) -> float:
  """Returns the gain of the best smaller batch: the control at finite `r`."""
  if np.isinf(r):
    return 1.0
  share = np.geomspace(1e-4, 1, 2001)
  took = (share * (1 - fixed) + fixed) * (1 + r / share) / (1 + r)
  return 1 / took.min()


def pool(cells: Cells) -> Cells:
  """Neighbours pooled until value over cost falls from each to the next.

  The best probabilities that never rise along the list are Neyman's of these
  pools, since the problem is an isotonic regression. Values may be negative as
  long as no tail's sum is.
  """
  pools: list[list[float]] = []
  for cost, value in zip(cells.cost, cells.value, strict=True):
    pools.append([cost, value])
    while len(pools) > 1 and _rises(*pools[-2:]):
      last = pools.pop()
      pools[-1] = [x + y for x, y in zip(pools[-1], last, strict=True)]
  cost, value = np.array(pools).T
  return Cells(cost, np.maximum(value, 0.0), cells.fixed)


def _rises(first: list[float], second: list[float]) -> bool:
  return second[1] * first[0] >= first[1] * second[0]
