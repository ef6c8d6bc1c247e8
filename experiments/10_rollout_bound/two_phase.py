"""Groups of which a few are sampled first: the pilot decides on the rest.

  g = a g_pilot + (Z / pi) (g_full - a g_pilot),    P(Z = 1) = pi

has the mean g_full for any `pi` and `a` that depend only on the pilot and the
past. Usually `a` is 1. A pilot of g of G completions knows about g / G of
g_full's sum, so the best `a` is nearer to that.
"""

import math
from typing import NamedTuple

import numpy as np

from . import bounds
from .bounds import Cells
from .logged import Logged
from .moments import (
  OBJECTIVES,
  Moments,
  Objective,
  folds,
  last_visit,
  live_tokens,
  moments,
)

PILOTS = (2, 4, 8)
DRAWS = 40  # of a group's pilots
FLOOR = 0.02  # of a realisable rule's probabilities


class Pilots(NamedTuple):
  """Random pilots of every group, `[K, R]` each.

  Attributes:
    right: how many of the pilot are correct.
    full, cross, pilot: |g_full|^2, g_full . g_pilot and |g_pilot|^2, over the
      unpruned variance and the number of pilots.
    cost: seconds of going on, as shares of a step's over all pilots.
    fixed: the share of seconds without going on.
  """

  right: np.ndarray
  full: np.ndarray
  cross: np.ndarray
  pilot: np.ndarray
  cost: np.ndarray
  fixed: float


def draw(log: Logged, objective: Objective, m: Moments, size: int) -> Pilots:
  """Random pilots of `size` completions; all of them where they are few."""
  num, group = log.rewards.shape
  generator = np.random.default_rng(size)
  draws = min(DRAWS, math.comb(group, size))
  order = generator.random((num, draws, group)).argsort(axis=2)[..., :size]
  of = lambda x: np.take_along_axis(x[:, None, :], order, axis=2)
  rewards, lengths = of(log.rewards), of(log.lengths)
  factors = np.zeros((num, draws, group))
  np.put_along_axis(factors, order, objective.advantage(rewards) / size, axis=2)
  pulled = np.einsum("krg,kgh->krh", factors, m.products)
  full = np.einsum("kg,kgh,kh->k", m.factors, m.products, m.factors)
  unit = num * draws * m.variance
  live = live_tokens(log.rewards, log.lengths)
  live_pilot = live_tokens(rewards, lengths).sum(axis=2)
  tokens, trained = log.lengths.sum() * draws, max(live.sum(), 1) * draws
  remaining = log.lengths.sum(axis=1)[:, None] - lengths.sum(axis=2)
  more = live.sum(axis=1)[:, None] - live_pilot
  return Pilots(
    right=rewards.sum(axis=2).astype(int),
    full=np.repeat(full[:, None], draws, axis=1) / unit,
    cross=np.einsum("krg,kg->kr", pulled, m.factors) / unit,
    pilot=np.einsum("krg,krg->kr", pulled, factors) / unit,
    cost=log.shares.rollout * remaining / tokens
    + log.shares.update * more / trained,
    fixed=log.shares.rest
    + log.shares.rollout * lengths.sum() / tokens
    + log.shares.update * live_pilot.sum() / trained,
  )


def _sums(pilots: Pilots, cell: np.ndarray, num: int) -> list[np.ndarray]:
  """Sums full, cross, pilot and cost over the pilots of each cell, `[num]`."""
  add = lambda x: np.bincount(cell.ravel(), x.ravel(), num)
  return [add(getattr(pilots, x)) for x in ("full", "cross", "pilot", "cost")]


def _multiple(cross, pilot, is_best: bool):
  if not is_best:
    return np.ones_like(pilot)
  return np.clip(cross / np.where(pilot > 0, pilot, 1.0), 0.0, 1.0)


def known(pilots: Pilots, cell: np.ndarray, is_best=True) -> dict[str, float]:
  """Gains of a rule that knows the second moments of each pilot's cell."""
  full, cross, pilot, cost = _sums(pilots, cell, cell.max() + 1)
  a = _multiple(cross, pilot, is_best)
  value = np.maximum(full - 2 * a * cross + a**2 * pilot, 0.0)
  value[value < 1e-9 * full] = 0.0
  return bounds.gains(Cells(cost, value, pilots.fixed))


def estimate(full, pilot, goes_on, prob, multiple=1.0):
  """The estimate of the whole group's gradient: see above."""
  return multiple * pilot + goes_on / prob * (full - multiple * pilot)


def learned(pilots, cell, folds, is_best=True) -> dict[str, float]:
  """Gains of a rule fitted on some groups and used on others.

  Args:
    cell: `[K, R]`, what the rule knows.
    folds: pairs of `[K]`, the groups to fit on and those to use it on.
  """
  num, gains = cell.max() + 1, {}
  for r in bounds.RATIOS:
    cost, added = pilots.fixed, 0.0
    for train, test in folds:
      rows = _rows(pilots, train)
      a, prob = _fit(rows, cell[train], num, r, is_best, train.mean())
      full, cross, pilot, price = _sums(_rows(pilots, test), cell[test], num)
      cost += price @ prob
      added += (full - 2 * a * cross + a**2 * pilot) @ (1 / prob - 1)
    gains[bounds.name(r)] = 1 / bounds.seconds(cost, added, r)
  return gains


def _rows(pilots: Pilots, is_in: np.ndarray) -> Pilots:
  names = pilots._fields[:-1]
  return pilots._replace(**{x: getattr(pilots, x)[is_in] for x in names})


def _fit(pilots: Pilots, cell, num: int, r: float, is_best: bool, share: float):
  """The multiple and the probability of each cell.

  Args:
    share: of all groups, that these are.
  """
  full, cross, pilot, price = _sums(pilots, cell, num)
  a = _multiple(cross, pilot, is_best)
  value = np.maximum(full - 2 * a * cross + a**2 * pilot, 0.0)
  # An eighth of a group's worth of the average: no cell is worth nothing.
  members = np.bincount(cell.ravel(), minlength=num)
  few = cell.shape[1] / 8
  value += few * value.sum() / members.sum()
  value *= members / (members + few)
  cells = Cells(price / share, value / share, pilots.fixed)
  prob = bounds.optimum(cells, r, FLOOR)
  return a, np.where(members > 0, prob, 1.0)


def smaller_groups(pilots: Pilots) -> dict[str, float]:
  """Gains of groups of the pilot's size and nothing else: the control.

  Their gradient is brought to the length of g_full's before variances are
  compared, since GRPO's advantages grow with the group.
  """
  scale = pilots.cross.sum() / pilots.full.sum()
  signal = pilots.full.sum() - 1.0
  added = pilots.pilot.sum() / scale**2 - signal - 1.0
  took = lambda r: bounds.seconds(pilots.fixed, added, r)
  return {bounds.name(r): 1 / took(r) for r in bounds.RATIOS}


def measure(log: Logged) -> list[dict]:
  """Every objective, pilot size and level of knowledge."""
  visit = np.digitize(last_visit(log), [0.01, 0.2, 0.8, 1.0])
  crossed, same = folds(log)
  rows = []
  for name, objective in OBJECTIVES.items():
    m = moments(log, objective)
    for size in [s for s in PILOTS if s < log.rewards.shape[1]]:
      pilots = draw(log, objective, m, size)
      right = pilots.right
      each = np.arange(right.size).reshape(right.shape)
      prompt = log.prompt[:, None] * (size + 1) + right
      history = visit[:, None] * (size + 1) + right
      levels = [
        ("everything", "bound", known(pilots, each)),
        ("prompt and pilot", "bound", known(pilots, prompt)),
        ("last visit and pilot", "same logs", learned(pilots, history, same)),
        ("last visit and pilot", "rule", learned(pilots, history, crossed)),
        ("pilot", "same logs", learned(pilots, right, same)),
        ("pilot", "rule", learned(pilots, right, crossed)),
        ("pilot, a = 1", "rule", learned(pilots, right, crossed, False)),
        ("nothing", "control", smaller_groups(pilots)),
      ]
      for level, kind, gain in levels:
        rule = f"two phases, {size} first"
        if kind == "control":
          rule = f"groups of {size}"
        about = {"rule": rule, "objective": name, "knows": level, "is": kind}
        rows.append(about | gain)
  return rows
