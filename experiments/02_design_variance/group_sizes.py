"""Groups of several sizes against groups of one, at equal tokens.

Nothing is drawn: the number of right completions in a group is enumerated, and
given that number they are independent draws from the pool (pool.py).
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dppo_jax import algo, methods
from dppo_jax.methods.neyman import pass_rates

from ..common.policy import sample
from . import errors
from . import pool as pools
from .batch import Batch
from .pool import GROUP, Pool

BUDGETS = (0.75, 0.5, 0.375, 0.25, 0.1875, 0.125)  # of the completions
VISITS = 100  # after which a pass rate counts as known
# Advantages, and whether a completion's own reward is part of its baseline.
OBJECTIVES = {
  "grpo": (algo.group_normalized, True),
  "rloo": (algo.leave_one_out, False),
}


class Moments(NamedTuple):
  """Exact moments of the estimate for each prompt.

  Attributes:
    mean: `[Q, K]`, mean factors of the pool's scores.
    square: `[Q]`, expected squared norms.
    trained: `[Q]`, expected tokens of the completions with an advantage.
  """

  mean: np.ndarray
  square: np.ndarray
  trained: np.ndarray

  def variance(self, products: np.ndarray) -> float:
    """Computes the variance of the sum over these prompts."""
    means = _norms(self.mean, products)
    return float((self.square - means).sum())

  def with_prompts(self, products: np.ndarray) -> float:
    """Computes the variance with that of the prompts themselves."""
    total = self.variance(products)
    total += errors.squared_norm(self.mean.reshape(-1), products)
    return float(self.square.sum() - total / len(self.mean))


def measure(sampled: Batch) -> list[dict]:
  """Compares allocations at the tokens that groups of one size generate."""
  pool = pools.prepare(sampled)
  products = pools.products(pool)
  before, rewards = sample(sampled.run, sampled.params, sampled.prompts, draw=1)
  rules = {
    "even": None,
    "neyman": _history(sampled, np.asarray(rewards), before.lengths, 1),
    "neyman, known rates": _history(
      sampled,
      np.broadcast_to(pool.rates[:, None], (len(pool.rates), GROUP)),
      np.broadcast_to(
        pool.lengths.mean(axis=1, keepdims=True).round().astype(np.int32),
        (len(pool.rates), GROUP),
      ),
      VISITS,
    ),
  }
  rows = []
  for objective in OBJECTIVES:
    of = lambda sizes, name=objective: moments(
      pool, products, [group_advantages(name, int(size)) for size in sizes]
    )
    full = of(np.full(len(pool.rates), GROUP))
    for rule, history in rules.items():
      for budget in BUDGETS:
        sizes = _sizes(sampled, pool, history, budget)
        rows.append(
          {
            "method": f"{rule}, {objective}",
            "budget": budget,
            "sizes": np.bincount(sizes, minlength=GROUP + 1).tolist(),
            **_compare(of(sizes), full, products),
            "generated": _tokens(pool, sizes) / _tokens(pool, GROUP),
          }
        )
  return rows


def moments(
  pool: Pool, products: np.ndarray, advantages: list[np.ndarray]
) -> Moments:
  """Computes the moments of sums over one group of each prompt.

  Args:
    advantages: `[size + 1, 2]` for each prompt, of a wrong and of a right
      completion in a group of that size, by the number of right ones.
  """
  num, most = pool.rewards.shape
  blocks = products.reshape(num, most, num, most)
  blocks = blocks[np.arange(num), :, np.arange(num), :]
  is_right = pool.rewards > 0
  mean, square = np.zeros((num, most)), np.zeros(num)
  trained = np.zeros(num)
  for q, table in enumerate(advantages):
    size = len(table) - 1
    chance = pools.binomial(size, pool.rates[q : q + 1])[0]
    count = np.stack([size - np.arange(size + 1), np.arange(size + 1)], axis=1)
    masks = np.stack([~is_right[q], is_right[q]]).astype(float)
    each = masks / np.maximum(masks.sum(axis=1, keepdims=True), 1)  # [2, K]
    first = chance @ (count * table)  # wrong, right
    mean[q] = first @ each
    inner = each @ blocks[q] @ each.T  # of the mean scores
    alone = each @ np.diag(blocks[q])  # of the scores themselves
    pairs = np.einsum("k,ki,kj->ij", chance, count * table, count * table)
    squares = chance @ (count * table**2)
    square[q] = (pairs * inner).sum() + squares @ (alone - np.diag(inner))
    trained[q] = (chance @ (count * (table != 0))) @ (each @ pool.lengths[q])
  return Moments(mean, square, trained)


def group_advantages(objective: str, size: int) -> np.ndarray:
  """Returns `[size + 1, 2]` as `moments` takes them.

  They are scaled so that a sum over the group has the mean of a sum over
  `GROUP` completions.
  """
  advantage, includes_self = OBJECTIVES[objective]
  right = np.arange(size) < np.arange(size + 1)[:, None]
  values = np.asarray(advantage(jnp.asarray(right, jnp.float32)), np.float64)
  table = np.stack([values[:, -1], values[:, 0]], axis=1)
  return table * (GROUP - includes_self) / (size - includes_self)


def _compare(some: Moments, full: Moments, products: np.ndarray) -> dict:
  """Returns the errors as in errors.py, relative to the full batch."""
  unit = full.with_prompts(products)
  mean, exact = some.mean.reshape(-1), full.mean.reshape(-1)
  squares = (errors.squared_norm(x, products) for x in (mean, exact))
  lengths = [np.sqrt(x) for x in squares]
  full_variance = full.variance(products) / unit
  return {
    "variance": some.variance(products) / unit - full_variance,
    "full_variance": full_variance,
    "bias": errors.squared_norm(mean - exact, products) / unit,
    "cosine": mean @ products @ exact / np.prod(lengths),
    "scale": lengths[0] / lengths[1],
    "squared_length": lengths[1] ** 2 / unit,
    "tokens": some.trained.sum() / full.trained.sum(),
  }


def _norms(mean: np.ndarray, products: np.ndarray) -> np.ndarray:
  num, most = mean.shape
  blocks = products.reshape(num, most, num, most)
  blocks = blocks[np.arange(num), :, np.arange(num), :]
  return np.einsum("qi,qij,qj->q", mean, blocks, mean)


def _history(sampled: Batch, correct, lengths, visits: int):
  """Returns the memory of `neyman`'s prompt rule after some equal visits."""
  rule = methods.neyman_prompts(1.0)
  history = rule.init(len(sampled.run.train_set))
  seen = jnp.asarray(correct), jnp.asarray(correct), jnp.asarray(lengths)
  for _ in range(visits):
    history = rule.observe(history, jnp.int32(0), sampled.prompts.ids, *seen)
  return history


def _sizes(sampled: Batch, pool: Pool, history, budget: float) -> np.ndarray:
  """Returns the sizes that generate what even ones of the budget do."""
  num = len(pool.rates)
  even = np.full(num, round(budget * GROUP))
  if history is None:
    return even
  counts = pass_rates.decayed(history, jnp.int32(1), sampled.prompts.ids, 0.5)
  tokens = pass_rates.expected_tokens(history, sampled.prompts.ids)
  of = lambda total: by_history(
    *(np.asarray(x) for x in (counts.right, counts.wrong, tokens)), total
  )
  target = _tokens(pool, even)
  low, high = 2 * num, GROUP * num
  while high - low > 1:  # the largest total within the tokens
    middle = (low + high) // 2
    fits = _tokens(pool, of(middle)) <= target
    low, high = (middle, high) if fits else (low, middle)
  return of(low)


def by_history(right, wrong, tokens, total: int, prior: float = 0.2):
  """Returns sizes from 2 to `GROUP` that add up to `total`.

  If each baseline is the mean of the other rewards, the gradient of `g`
  completions varies by `p (1 - p) / (g - 1)` for a pass rate `p`. Each prompt
  has two completions; the others are given one by one to the prompt where one
  more lowers the posterior mean of this variance the most, per token.

  Args:
    right, wrong: `[Q]`, completions seen of each prompt.
    tokens: `[Q]`, expected tokens of a completion.
    prior: number of right completions in the Beta prior, and of wrong ones.
  """
  right, wrong = right + prior, wrong + prior
  spread = right * wrong / ((right + wrong) * (right + wrong + 1)) / tokens
  number = np.arange(3, GROUP + 1)[:, None]
  gain = spread / ((number - 2) * (number - 1))
  rank = (-gain.reshape(-1)).argsort(kind="stable").argsort()
  return 2 + (rank < total - 2 * len(right)).reshape(gain.shape).sum(axis=0)


def _tokens(pool: Pool, sizes) -> float:
  return float((pool.lengths.mean(axis=1) * sizes).sum())
