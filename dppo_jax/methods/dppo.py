"""DPPO: drops prompts and completions at random, and weights those kept."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dppo_jax.algo import designs
from dppo_jax.algo.advantages import group_normalized
from dppo_jax.algo.validation import RATE, check
from dppo_jax.methods import method, ranking
from dppo_jax.methods.grpo import grpo
from dppo_jax.records import Selection


def dppo(
  prompt_rate: float = 0.5, completion_rate: float = 0.5, scope: str = "group"
) -> method.Method:
  """GRPO on fewer prompts and completions, with the same expected gradient.

  Args:
    prompt_rate: as `rate` in `drop_by_history`.
    completion_rate, scope: as in `drop_small_advantage`.
  Source: DPPO, arXiv:2603.04135.
  Deviates:
    1. Draws at random with known probabilities, as the paper's proof needs.
       Algorithm 1 reportedly drops a fixed fraction, the lowest first, which no
       weights make unbiased: that reading is not implemented.
    2. Divides by the counts of the unpruned batch. So does the paper's factor
       C / (1 - P) if C is the actual fraction kept. If C is the expected one,
       the mean over kept items is a ratio estimator, with a bias of order
       1 / kept: that reading is not implemented.
    3. Pruned prompts wait for their next epoch and are not replaced.
    4. Rates, threshold and score are our reading of summaries of the paper.
  """
  check(RATE, prompt_rate=prompt_rate, completion_rate=completion_rate)
  return grpo()._replace(
    prompts=drop_by_history(prompt_rate),
    completions=drop_small_advantage(completion_rate, scope),
    prune_less="lower prompt_rate or completion_rate",
  )


def drop_small_advantage(
  rate: float, scope: str = "group"
) -> method.CompletionRule:
  """Drops with probability `rate` if |advantage| is below the mean.

  >>> import jax
  >>> import jax.numpy as jnp
  >>> from dppo_jax import algo, methods, records
  >>> rewards = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
  >>> advantages = algo.group_normalized(rewards)
  >>> groups = records.Groups(rewards, advantages, jnp.full((2, 4), 9))
  >>> rule = methods.drop_small_advantage(0.5)
  >>> print(rule(jax.random.key(0), groups).prob)
  [[1.  0.5 0.5 0.5]
   [1.  1.  1.  1. ]]

  Args:
    rate: fraction of the eligible completions to drop, in [0, 1).
    scope: mean of each "group" or of the "batch".
  Source: DPPO, arXiv:2603.04135, section 4.2.
  Deviates:
    1. The threshold's scope is our reading.
  """
  check(RATE, rate=rate)

  def choose(step, uniform, advantages, is_drawn):
    del step
    prob = _drop_below_mean(rate, jnp.abs(advantages), is_drawn)
    prob = designs.drawn_probability(prob)
    return Selection(uniform < prob, prob)

  return ranking.in_scope(scope, choose)


def drop_by_history(rate: float) -> method.PromptRule:
  """Drops with probability `rate` if the last visit's score is below the mean.

  A visit's score is the mean |advantage| of its group, normalised under any
  objective. The mean is over the candidates that were visited; others are
  always kept. The history is the score of each problem, `[M]`, infinite if it
  was never visited.

  Args:
    rate: fraction of the eligible prompts to drop, in [0, 1).
  Source: DPPO, arXiv:2603.04135, section 4.2; InfoBatch, arXiv:2303.04947, for
    the soft threshold at the mean.
  Deviates:
    1. The score, its mean as threshold and the constant rate are a reading.
  """
  check(RATE, rate=rate)

  def init(num_prompts):
    return jnp.full((num_prompts,), jnp.inf, jnp.float32)

  def select(rng, history, ids):
    score = history[ids]
    prob = _drop_below_mean(rate, score, jnp.isfinite(score))
    return method.draw_prompts(rng.key, ids, prob)

  def observe(history, step, ids, rewards, correct, lengths):
    del step, correct, lengths
    score = jnp.abs(group_normalized(rewards)).mean(axis=1)
    return history.at[ids].set(score, mode="drop")

  return method.PromptRule(init, select, observe)


def _drop_below_mean(
  rate: float, score: Float[Array, "n"], is_known: Bool[Array, "n"]
) -> Float[Array, "n"]:
  """Returns 1 - rate for a known score below the mean known one, else 1."""
  known = jnp.where(is_known, score, 0.0)
  mean = known.sum() / jnp.maximum(is_known.sum(dtype=jnp.float32), 1.0)
  is_low = is_known & (score < mean * (1 - method.ROUNDING))
  return jnp.where(is_low, jnp.float32(1 - rate), 1.0)
