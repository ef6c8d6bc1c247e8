"""Errors of rules that choose the number of completions, at equal tokens.

Each rule of sampling.py draws completions from the pool (pool.py) with
replacement, and its estimate is a sum of their gradients. Errors are against
the mean gradient of the full batch, 16 completions of each prompt; where a
rule changes the objective on purpose, also against what it changes it to.
"""

import numpy as np

from . import errors, sampling
from . import pool as pools
from .batch import Batch
from .sampling import Drawn

BUDGETS = (0.5, 0.25, 0.125)  # of the tokens generated


def measure(sampled: Batch) -> list[dict]:
  """Measures every rule at every budget that it can keep to.

  Variance is what a rule has beyond the full batch, whose completions are
  drawn too; in units of the full batch's own, that of its prompts included.
  """
  pool = pools.prepare(sampled)
  products = pools.products(pool)
  rng = np.random.default_rng(0)
  full = sampling.full(pool, rng)
  unit = _full_variance(full, products)

  def error(drawn: Drawn, target: np.ndarray) -> dict[str, float]:
    flat = drawn.factors.reshape(len(drawn.factors), -1)
    return errors.describe(flat, target.reshape(-1), unit, products)

  exact = pools.expected(pool)
  rows = [{"method": "full", "budget": 1.0, **error(full, exact)}]
  for name, rule in sampling.RULES.items():
    for budget in BUDGETS:
      drawn = rule(pool, rng, budget)
      row = {"method": name, "budget": budget, "variance": None}
      if drawn:
        row |= error(drawn, exact)
        row["variance"] -= rows[0]["variance"]
        row["generated"] = drawn.generated / full.generated
        row["tokens"] = drawn.trained / full.trained
        if drawn.aim is not None:
          moments = error(drawn, drawn.aim)
          row |= {f"aim_{k}": moments[k] for k in ("bias", "cosine", "scale")}
      rows.append(row)
  return rows


def _full_variance(full: Drawn, products: np.ndarray) -> float:
  """The full batch's own: squared distances of prompts from their mean."""
  _, num, most = full.factors.shape
  blocks = products.reshape(num, most, num, most)
  within = blocks[np.arange(num), :, np.arange(num), :]
  squares = sum(
    errors.squared_norm(full.factors[:, q], within[q]) for q in range(num)
  )
  flat = full.factors.reshape(len(full.factors), -1)
  return float((squares - errors.squared_norm(flat, products) / num).mean())
