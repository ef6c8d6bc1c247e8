"""Variance that a choice adds, as the cost model of pruning needs it.

Of a choice of completions with probabilities `p` that are drawn independently,
the added variance is `sum((1 / p - 1) |g|^2)`. In units of the full batch's own
variance V that is `rho` times a mean of `1 / p - 1`, where `rho` is the sum of
the squared gradients of the completions over V. A run knows no gradients, but a
size that stands for them; here is how far the formula gets with either.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import methods
from dppo_jax.methods.neyman import budget
from dppo_jax.methods.neyman.rules import gradient_size
from dppo_jax.rng import StepRng
from experiments.common.variance import added_variance

from . import completions
from .batch import Batch

SHARES = (0.75, 0.5, 0.25, 0.125, 0.0625)  # of what has an advantage
GROUPS = (2, 4, 8, 16)


def measure(sampled: Batch) -> list[dict]:
  """`rho`, and the formula next to the measured variance of the real draw."""
  squares = sampled.factors**2 * np.diag(sampled.products)
  size = np.asarray(gradient_size(sampled.groups), np.float64).reshape(-1)
  is_live = sampled.factors != 0
  live_share = is_live.mean()
  facts = {"rho": squares.sum() / sampled.variance}
  facts["rho_of_prompts"] = _prompt_squares(sampled) / sampled.variance
  rows = []
  for share in SHARES:
    method = methods.neyman(1.0, share * live_share)
    rng = StepRng(jax.random.key(0), jnp.int32(0))
    chosen = method.completions(rng, sampled.groups)
    prob = np.asarray(chosen.prob, np.float64).reshape(-1)[is_live]
    formula = lambda x, p=prob: (1 / p - 1) @ x[is_live] / x[is_live].sum()
    error = completions.error(sampled, method)
    rows.append(
      {
        "method": "neyman",
        "share_of_live": share,
        "share": share * live_share,
        "tokens": error["tokens"],
        "formula_true": formula(squares),
        "formula_proxy": formula(size**2),
        "measured": error["variance"],
        **facts,
      }
    )
    last = rows[-1]
    last["predicted_true"] = last["rho"] * last["formula_true"]
    last["predicted_proxy"] = last["rho"] * last["formula_proxy"]
  return rows


def design_effects(sampled: Batch) -> list[dict]:
  """Compares the draw with independent ones, in groups of several sizes."""
  rows = []
  for group in GROUPS:
    part = _first(sampled, group)
    squares = part.factors**2 * np.diag(part.products)
    is_live = part.factors != 0
    for share in (0.5, 0.25):
      method = methods.neyman(1.0, share * is_live.mean())
      rng = StepRng(jax.random.key(0), jnp.int32(0))
      prob = method.completions(rng, part.groups).prob.reshape(1, -1)
      of = jnp.asarray(squares, jnp.float32)
      is_positive = part.advantages.reshape(-1) > 0
      shape = part.rewards.shape
      independent = float(added_variance(prob, of)[0])
      expected = budget.systematic_variance(prob, of, is_positive, shape)
      error = completions.error(part, method)
      measured = error["variance"] * part.variance / squares.sum()
      rows.append(
        {
          "group": group,
          "share_of_live": share,
          "independent": independent,
          "measured": measured / independent,
          "predicted": float(expected[0]) / independent,
        }
      )
    jax.clear_caches()
  return rows


def _first(sampled: Batch, group: int) -> Batch:
  """Returns the batch of the first completions of each prompt."""
  num, most = sampled.rewards.shape
  is_first = (np.arange(num * most) % most) < group
  rollout = jax.tree.map(
    lambda x: x[:, :group] if x.shape[:2] == (num, most) else x, sampled.rollout
  )
  return sampled._replace(
    rollout=rollout,
    rewards=sampled.rewards[:, :group],
    scores=sampled.scores[is_first],
    products=sampled.products[np.ix_(is_first, is_first)],
  )


def _prompt_squares(sampled: Batch) -> float:
  """The sum over prompts of the squared gradient of each."""
  num, group = sampled.rewards.shape
  factors = sampled.factors.reshape(num, group)
  blocks = sampled.products.reshape(num, group, num, group)
  within = blocks[np.arange(num), :, np.arange(num), :]
  return np.einsum("qi,qij,qj->", factors, within, factors)
