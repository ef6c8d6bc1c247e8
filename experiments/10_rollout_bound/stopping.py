"""Completions stopped while they are generated, each with known probability.

A completion that is still alive after `t_k` tokens continues with a probability
that its prefix and the past determine. `pi` is the product of these
probabilities, and a completion that reaches its end has weight `1 / pi`.
Advantages must be linear in the
rewards: no estimate of a deviation from some of the rewards is unbiased.
"""

import numpy as np

from . import bounds
from .bounds import Cells
from .logged import Logged
from .moments import OBJECTIVES, folds, moments
from .stop_rules import costs, learned, quantile_bins

_PROBS = np.geomspace(1.0, 0.003, 60)
_PRICES = np.geomspace(0.01, 100.0, 41)
STOP, NEYMAN = "stopping while generating", "and Neyman's choice of the rest"


def measure(log: Logged) -> list[dict]:
  """Bounds for rules with full knowledge, and rules fitted on logs.

  Each with and without a choice, at the update, of the completions that lived:
  what stopping adds to that is the ratio to the row that stops nothing.
  """
  results = []
  for name, objective in OBJECTIVES.items():
    if not objective.is_linear:
      continue
    m = moments(log, objective)
    rows = [*_bounds(log, m)]
    for kind, pairs in zip(("rule", "same logs"), folds(log), strict=True):
      for with_visit in (False, True):
        know = "last visit and prefix" if with_visit else "prefix"
        for chooses in (False, True):
          gain = learned(log, objective, m, pairs, with_visit, chooses)
          rule = f"{STOP}, {NEYMAN}" if chooses else STOP
          rows.append({"rule": rule, "knows": know, "is": kind, **gain})
      gain = learned(log, objective, m, pairs, False, True, stops=False)
      row = {"rule": f"no stop, {NEYMAN}", "knows": "residuals", "is": kind}
      rows.append(row | gain)
    results += [{"objective": name, **row} for row in rows]
  return results


def _bounds(log: Logged, m) -> list[dict]:
  value, lengths = m.values.ravel(), log.lengths.ravel()
  rollout, update = costs(log).reshape(2, -1)
  prompt = np.repeat(log.prompt, log.rewards.shape[1])
  levels = {
    "everything": np.arange(value.size),
    "prompt and length": prompt * 4 + quantile_bins(lengths, 4),
    "length": quantile_bins(lengths, 16),
    "nothing": np.zeros(value.size, int),
  }
  results, fixed = [], log.shares.rest
  for level, cell in levels.items():
    add = lambda x, cell=cell: np.bincount(cell, x)
    cells = Cells(add(rollout + update), add(value), fixed)
    tokens = add(lengths / lengths.sum())
    row = {"knows": level, "is": "bound"}
    gain = bounds.gains(cells)
    gain["cauchy_schwarz"] = bounds.cauchy_schwarz(cells.value, tokens)
    results.append({"rule": STOP, **row, **gain})
    gain = _chosen_after(cell, rollout, update, value, fixed, _PROBS)
    results.append({"rule": f"{STOP}, {NEYMAN}", **row, **gain})
  gain = _chosen_after(cell, rollout, update, value, fixed, _PROBS[:1])
  row = {"rule": f"no stop, {NEYMAN}", "knows": "everything", "is": "bound"}
  return [*results, row | gain]


def _chosen_after(cell, rollout, update, value, fixed: float, probs) -> dict:
  """Gains where the update knows each second moment, and the rollout cells.

  A completion lives with its cell's probability and is trained on with one of
  its own, not above. For each price of variance the best of `probs` is found
  cell by cell.
  """
  add = lambda x: np.bincount(cell, x)
  curve = []
  for price in _PRICES:
    with np.errstate(divide="ignore", invalid="ignore"):
      free = np.sqrt(price * value / update)
    free = np.where(update > 0, free, np.inf)
    tried = []
    for prob in probs:
      trained = np.minimum(prob, free)
      odds = 1 / np.where(value > 0, trained, 1.0) - 1
      spent = add(rollout * prob + update * trained)
      tried.append((spent, add(value * odds)))
    spent, noise = np.array(tried).swapaxes(0, 1)
    best = (spent + price * noise).argmin(axis=0), np.arange(spent.shape[1])
    curve.append((fixed + spent[best].sum(), noise[best].sum()))
  cost, added = np.array(curve).T
  took = lambda r: min(1.0, bounds.seconds(cost, added, r).min())
  return {bounds.name(r): 1 / took(r) for r in bounds.RATIOS}
