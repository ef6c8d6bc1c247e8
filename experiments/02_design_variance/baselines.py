"""Baselines from a prompt's history, with groups down to a single completion.

A step of a given number of completions has many prompts and small groups, or
few prompts and large ones. Nothing is drawn, as in group_sizes.py: prompts are
independent, and the number of right completions in a group is enumerated.
"""

import numpy as np

from . import group_sizes
from . import pool as pools
from .batch import Batch
from .pool import GROUP, Pool

BUDGETS = (0.5, 0.25, 0.125)  # of the full batch's completions
SIZES = (1, 2, 4, 8, 16)
VISIT = 16  # completions of each prompt at the earlier visit
PRIOR = 1.0  # weight of the other prompts' mean reward, in completions


def measure(sampled: Batch) -> list[dict]:
  """Compares leave-one-out, history and snapped history at equal completions.

  Variance is what a step has beyond the full batch with leave-one-out
  advantages, its choice of prompts included, in units of that.
  """
  pool = pools.prepare(sampled)
  products = _centred(pools.products(pool), len(pool.rates))
  of = lambda tables: group_sizes.moments(pool, products, tables)
  num = len(pool.rates)
  leave_one_out = lambda n: [group_sizes.group_advantages("rloo", n)] * num
  full = of(leave_one_out(GROUP))
  designs = {("leave-one-out", n): of(leave_one_out(n)) for n in SIZES if n > 1}
  for name, snaps in (("history", False), ("snapped", True)):
    for size in SIZES:
      designs[name, size] = of(history_advantages(pool, size, snaps))
  rows = []
  for (name, size), some in designs.items():
    for budget in BUDGETS:
      prompts = budget * GROUP / size  # for each prompt of the full batch
      variance = some.with_prompts(products) / prompts
      rows.append(
        {
          "method": f"{name} of {size}",
          "budget": budget,
          "variance": variance / full.with_prompts(products) - 1,
          "generated": budget,
          "tokens": prompts * some.trained.sum() / full.trained.sum(),
        }
      )
  return rows


def history_advantages(pool: Pool, size: int, snaps: bool) -> list[np.ndarray]:
  """Returns advantages against the baseline of experiment 16, for `moments`.

  Args:
    size: completions in a group.
    snaps: rounds baselines below 0.2 to 0 and above 0.8 to 1.
  """
  others = (pool.rates.sum() - pool.rates) / (len(pool.rates) - 1)
  right = np.arange(size + 1)[:, None]
  mates = np.maximum(right - np.array([0, 1]), 0)  # the others that are right
  tables = []
  for seen, mean in zip(pool.seen, others, strict=True):
    total = seen * VISIT + PRIOR * mean + mates
    baseline = total / (VISIT + PRIOR + size - 1)
    if snaps:
      baseline = np.where(baseline < 0.2, 0.0, baseline)
      baseline = np.where(baseline > 0.8, 1.0, baseline)
    tables.append((np.array([0, 1]) - baseline) * GROUP / size)
  return tables


def _centred(products: np.ndarray, num: int) -> np.ndarray:
  """Returns products of scores less their mean over each prompt's pool.

  Scores have mean zero under the policy. Over a finite pool they do not, and
  baselines of different means would have different mean gradients.
  """
  most = len(products) // num
  block = np.eye(most) - 1 / most
  apart = products.reshape(num, most, num, most)
  return np.einsum("ab,qbrc,cd->qard", block, apart, block).reshape(
    products.shape
  )
