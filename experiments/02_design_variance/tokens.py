"""The choice of tokens: whole gradients, of a few draws of each method."""

from batch import Batch, update_config
import errors
import jax
from jax import flatten_util
import jax.numpy as jnp
import numpy as np

from dppo_jax import methods
from dppo_jax.learner import select as selection
from dppo_jax.learner import update
from dppo_jax.rng import StepRng

DRAWS = 32
METHODS = {
  "grpo": methods.grpo(),  # exact, or something is wrong
  "d2s": methods.d2s(0.5, 0.5),
  "d3s, first step": methods.d3s(),
  "neyman, tokens 50%": methods.neyman(1.0, 1.0, 0.5),
  "neyman, completions and tokens 71%": methods.neyman(1.0, 0.707, 0.707),
}


def measure(sampled: Batch) -> list[dict]:
  """Squared bias and variance, in units of the full batch's own variance."""
  exact = sampled.factors @ sampled.scores
  config = update_config(sampled.run)
  # Compiled once: whatever is chosen, the rows have the same shape.
  score = jax.jit(
    lambda packed, used: update.score(sampled.params, config, packed, used)
  )

  @jax.jit
  def gradient(packed, used):
    total = update.sum_gradients(packed, used, sampled.params, None, config)
    return flatten_util.ravel_pytree(total.grad)[0]

  found = []
  for name, method in METHODS.items():
    select, choose = _choices(sampled, method)
    estimates, tokens = [], []
    # Where nothing is chosen at random, two draws are as good as many.
    num = DRAWS if method.tokens else 2
    for key in jax.random.split(jax.random.key(1), DRAWS)[:num]:
      packed, used = select(key)
      needs_stats = method.tokens and method.tokens.needs_stats
      stats = score(packed, used) if needs_stats else None
      packed, info = choose(key, packed, stats)
      estimates.append(np.asarray(gradient(packed, used), np.float64))
      tokens.append(float(info["tokens/trained"]))
    error = errors.describe(np.stack(estimates), exact, sampled.variance)
    share = np.mean(tokens) / sampled.live_tokens.sum()
    found.append({"budget": 0.5, "method": name, **error, "tokens": share})
  return found


def _choices(sampled: Batch, method: methods.Method):
  """The method's choices of completions and of tokens, compiled."""
  objective = sampled.run.objective
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
      spec=sampled.run.packing,
      train_zero_advantage=False,
    )[:2]

  @jax.jit
  def choose(key, packed, stats):
    return selection.choose_tokens(
      at(key),
      packed,
      stats,
      method=method,
      objective=objective,
      is_on_policy=True,
    )

  return select, choose
