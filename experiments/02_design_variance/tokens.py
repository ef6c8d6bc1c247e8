"""Errors of the choice of tokens, from the gradients of a few draws."""

import jax
from jax import flatten_util
import jax.numpy as jnp
import numpy as np

from dppo_jax import methods
from dppo_jax.rng import StepRng
from dppo_jax.step import select as selection
from dppo_jax.step import tokens as token_selection
from dppo_jax.step import update

from . import completions, errors
from .batch import Batch

BUDGETS = (0.5, 0.25, 0.125)
DRAWS = 8


def measure(sampled: Batch) -> list[dict]:
  """Squared bias and variance, in units of the full batch's own variance."""
  exact = sampled.factors @ sampled.scores
  config = sampled.run.spec.update_config
  # Compiled once: the shape of the rows does not depend on the choice.
  score = jax.jit(
    lambda packed, used: update.score(sampled.params, config, packed, used)
  )

  @jax.jit
  def gradient(packed, used):
    total = update.sum_gradients(packed, used, sampled.params, None, config)
    return flatten_util.ravel_pytree(total.grad)[0]

  rows = []
  for name, budget, method in _methods(sampled):
    select, choose = choices(sampled, method)
    estimates, tokens = [], []
    # What is random only in ties needs few draws.
    num = DRAWS if name.startswith("neyman") else 2
    for key in jax.random.split(jax.random.key(1), num):
      packed, used = select(key)
      needs_stats = method.tokens and method.tokens.needs_stats
      stats = score(packed, used) if needs_stats else None
      packed, info = choose(key, packed, stats)
      estimates.append(np.asarray(gradient(packed, used), np.float64))
      tokens.append(float(info.trained))
    error = errors.describe(np.stack(estimates), exact, sampled.variance)
    share = np.mean(tokens) / sampled.live_tokens.sum()
    rows.append({"budget": budget, "method": name, **error, "tokens": share})
  return rows


def _methods(sampled: Batch) -> list[tuple[str, float, methods.Method]]:
  """Name, budget and method; where two levels choose, each takes a root."""
  choices = [("grpo", 1.0, methods.grpo())]  # exact, or something is wrong
  for budget in BUDGETS:
    choices += [(n, budget, of_tokens(sampled, n, budget)) for n in NAMES]
  return [*choices, ("d3s, first step", 0.2, methods.d3s())]


NAMES = ("d2s", "neyman, tokens", "neyman, both")


def of_tokens(sampled: Batch, name: str, budget: float) -> methods.Method:
  """The method of that name that trains on `budget` of the tokens."""
  root = budget**0.5
  if name == "neyman, tokens":
    return methods.neyman(1.0, 1.0, budget)
  if name == "d2s":
    # Of the tokens kept, those with an advantage: the same share of these.
    chosen = completions.at_budget(
      sampled, lambda share: methods.d1s(share, "batch"), root
    )
    return chosen._replace(tokens=methods.top_entropy(root))
  chosen = completions.at_budget(
    sampled, lambda share: methods.neyman(1.0, share), root
  )
  return chosen._replace(tokens=methods.neyman_tokens(root))


def choices(sampled: Batch, method: methods.Method):
  """The method's choices of completions and of tokens, compiled."""
  objective = sampled.run.spec.objective
  at = lambda key: StepRng(key, jnp.int32(0))

  @jax.jit
  def select(key):
    return selection.select(
      at(key),
      sampled.prompts,
      sampled.rollout,
      sampled.rewards,
      method=method,
      objective=objective,
      spec=sampled.run.spec.packing,
    )[:2]

  @jax.jit
  def choose(key, packed, stats):
    return token_selection.choose_tokens(
      at(key),
      packed,
      stats,
      method=method,
      objective=objective,
      replaces_old=False,
    )

  return select, choose
