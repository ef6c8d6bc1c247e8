"""The choice of completions: every method's draws at equal tokens trained.

A gradient estimate is a sum of the completions' gradients, so its squared error
is a quadratic form in their inner products, and thousands of draws cost little.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import methods
from dppo_jax.algo import horvitz_thompson
from dppo_jax.records import Selection
from dppo_jax.rng import StepRng

from ..common.baselines import uniform
from . import errors
from .batch import Batch

BUDGETS = (0.75, 0.5, 0.25, 0.125)
DRAWS = 500


def measure(sampled: Batch) -> list[dict]:
  """Measures every method at every budget that it can keep to."""
  rows = []
  for name, make in by_share(sampled).items():
    for budget in BUDGETS:
      method = at_budget(sampled, make, budget)
      measured = error(sampled, method) if method else {"variance": None}
      rows.append({"method": name, "budget": budget, **measured})
    jax.clear_caches()  # or the programs of all shares pile up
  return rows


def at_budget(
  sampled: Batch, make: Callable[[float], methods.Method], budget: float
) -> methods.Method | None:
  """The method whose draws train on `budget` of the tokens, if there is one.

  Args:
    make: a share to a method; more of it trains on more tokens.
  """
  wanted = budget * sampled.live_tokens.sum()
  rng = StepRng(jax.random.key(0), jnp.int32(0))

  def tokens(share):
    chosen = make(share).completions(rng, sampled.groups)
    prob = np.asarray(chosen.prob, np.float64)
    # An unweighted rule reports one number: what it keeps is what it keeps.
    if np.ptp(prob[np.asarray(chosen.keep)]) == 0:
      prob = np.asarray(chosen.keep, np.float64)
    return prob.reshape(-1) @ sampled.live_tokens

  low, high = 1e-3, 1.0
  if tokens(low) > 1.02 * wanted:
    return None
  for _ in range(9):
    middle = (low + high) / 2
    low, high = (middle, high) if tokens(middle) < wanted else (low, middle)
  return make(high)


def by_share(sampled: Batch) -> dict[str, Callable[[float], methods.Method]]:
  """Name to a method of a share; a share of what, `at_budget` finds out."""
  choose = lambda rule: methods.grpo()._replace(completions=rule)
  lengths = jnp.asarray(sampled.rollout.lengths, jnp.float32)
  neyman = lambda squares: lambda share: choose(_neyman(share, squares))
  return {
    "uniform": lambda share: choose(uniform(share)),
    "dppo": lambda share: methods.dppo(0.0, 1 - share),
    "dppo, batch mean": lambda share: methods.dppo(0.0, 1 - share, "batch"),
    "neyman, advantage alone": neyman(lengths**2),
    "neyman, length": neyman(lengths),
    "neyman": lambda share: choose(methods.neyman_completions(share)),
    "neyman, true norm": lambda share: choose(_true_norm(sampled, share)),
    "cppo": methods.cppo,
    "cppo, batch": lambda share: methods.cppo(share, "batch"),
    "d1s": methods.d1s,
    "d1s, batch": lambda share: methods.d1s(share, "batch"),
    "pods": methods.pods,
  }


def _true_norm(sampled: Batch, share: float) -> methods.CompletionRule:
  """The design with each completion's true gradient norm as its size."""
  norms = np.sqrt(np.diag(sampled.products)).reshape(sampled.rewards.shape)
  rule = _neyman(share, jnp.asarray(norms**2, jnp.float32))
  return lambda rng, groups: rule(rng, groups.replace(scale=None))


def _neyman(share: float, squares: jax.Array) -> methods.CompletionRule:
  """The design with other squared norms of a completion's scores, `[Q, G]`."""
  rule = methods.neyman_completions(share)
  with_squares = lambda groups: groups.replace(sum_sq_residual=squares)
  return lambda rng, groups: rule(rng, with_squares(groups))


def error(sampled: Batch, method: methods.Method) -> dict[str, float]:
  """Squared bias and variance, in units of the full batch's own variance."""
  factors, tokens = _draw(sampled, method)
  moments = errors.describe(
    factors, sampled.factors, sampled.variance, sampled.products
  )
  return moments | {"tokens": tokens / sampled.live_tokens.sum()}


def _draw(sampled: Batch, method: methods.Method) -> tuple[np.ndarray, float]:
  """`[DRAWS, U]` factors of the completions' scores, and tokens trained."""
  advantages, groups = sampled.advantages, sampled.groups
  everyone = Selection(
    jnp.ones(groups.rewards.shape[:1], bool), jnp.ones(groups.rewards.shape[:1])
  )

  @jax.jit
  def one(key):
    chosen = method.completions(StepRng(key, jnp.int32(0)), groups)
    a = advantages
    if method.has_statistics_after:
      a = sampled.run.spec.objective.advantage(sampled.rewards, chosen.keep)
    weight = horvitz_thompson(everyone, chosen)
    tokens = jnp.where((weight > 0) & (a != 0), groups.lengths, 0).sum()
    return (weight * a).reshape(-1), tokens

  drawn = jax.random.split(jax.random.key(0), DRAWS)
  factors, tokens = jax.lax.map(one, drawn, batch_size=64)
  return np.asarray(factors, np.float64), float(np.mean(tokens))
