"""DPPO: drops prompts and completions at random, and weights those kept."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax.algo import designs
from dppo_jax.algo.advantages import group_normalized
from dppo_jax.algo.validation import (
  FRACTION,
  RATE,
  Limit,
  check,
  integer,
  one_of,
)
from dppo_jax.methods import method, ranking
from dppo_jax.methods.grpo import grpo
from dppo_jax.records import Selection


def dppo(
  prompt_rate: float = 0.5,
  completion_rate: float = 0.5,
  scope: str = "group",
  prompt_scope: str = "batch",
  score: str = "advantage",
  smoothing: float = 0.0,
  max_age: int = 0,
  prune_until: float = 1.0,
  *,
  total_steps: int | None = None,
) -> method.Method:
  """GRPO on fewer prompts and completions, with the same expected gradient.

  Args:
    prompt_rate, prompt_scope, score, smoothing, max_age: as `rate`, `scope`
      and so on in `drop_by_history`.
    completion_rate, scope: as in `drop_small_advantage`.
    prune_until: fraction of the run after which nothing is pruned, in (0, 1].
    total_steps: of the run; None prunes to its end. The config passes
      config.steps.
  Source: DPPO, arXiv:2603.04135; prune_until from InfoBatch, arXiv:2303.04947.
  Deviates:
    1. Draws at random with known probabilities, as the paper's proof needs.
       Its algorithm 1 is said to drop a fixed fraction, the lowest first,
       which no weight makes unbiased: that reading was not taken.
    2. Divides by the counts of the unpruned batch, which is what the paper's
       factor C / (1 - P) amounts to if C is the fraction really kept. The
       other reading, C as the expected fraction and a mean over what was kept,
       is a ratio estimator with a bias of order 1 / kept: it was not taken.
    3. Pruned prompts wait for their next epoch and are not replaced.
    4. Rates, threshold and score are our reading: the text was not at hand.
  """
  check(RATE, prompt_rate=prompt_rate, completion_rate=completion_rate)
  check(FRACTION, prune_until=prune_until)

  def rate(value: float) -> method.Rate:
    if prune_until == 1 or total_steps is None:
      return value
    last = prune_until * total_steps
    return lambda step: jnp.where(step < last, jnp.float32(value), 0.0)

  prompts = drop_by_history(
    rate(prompt_rate),
    score=score,
    smoothing=smoothing,
    max_age=max_age,
    scope=prompt_scope,
  )
  return grpo()._replace(
    prompts=prompts,
    completions=drop_small_advantage(rate(completion_rate), scope),
    has_schedule=prune_until < 1,
  )


def drop_small_advantage(
  rate: method.Rate, scope: str = "group"
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
    rate: fraction of the eligible completions to drop, in [0, 1), or a
      function from the step to it.
    scope: mean of each "group" or of the "batch".
  Source: DPPO, arXiv:2603.04135, section 4.2.
  Deviates:
    1. The threshold's scope is our reading.
  """
  check(RATE, rate=rate)

  def choose(step, uniform, advantages, is_drawn):
    drop = method.at_step(rate, step)
    size = jnp.where(is_drawn, jnp.abs(advantages), 0.0)
    mean = size.sum() / jnp.maximum(is_drawn.sum(dtype=jnp.float32), 1.0)
    is_small = is_drawn & (size < mean * (1 - method.ROUNDING))
    prob = jnp.where(is_small, jnp.float32(1 - drop), 1.0)
    prob = designs.drawn_probability(prob)
    return Selection(uniform < prob, prob)

  return ranking.in_scope(scope, choose)


class ScoreHistory(NamedTuple):
  """Scores of each problem's visits.

  Attributes:
    score: `[M]`, inf if never visited.
    last_step: `[M]`, step of the last visit.
  """

  score: Float[Array, "M"]
  last_step: Int[Array, "M"]


def drop_by_history(
  rate: method.Rate,
  advantage: Callable[
    [Float[Array, "Q G"]], Float[Array, "Q G"]
  ] = group_normalized,
  score: str = "advantage",
  max_age: int = 0,
  smoothing: float = 0.0,
  scope: str = "batch",
) -> method.PromptRule:
  """Drops with probability `rate` if the last visit's score is below the mean.

  The mean is over prompts that were visited. Others are always kept.

  Args:
    rate: fraction of the eligible prompts to drop, in [0, 1), or a function
      from the step to it.
    advantage: rewards to advantages, as the method computes them.
    score: of a visit, "advantage" for the group's mean |advantage| or
      "variance" for the variance of its rewards.
    max_age: steps after which a score counts as never observed; 0 for never.
    smoothing: in [0, 1), weight of the old score in the new one.
    scope: mean score of the "batch" of candidates or of "all" problems.
  Source: DPPO, arXiv:2603.04135, section 4.2; InfoBatch, arXiv:2303.04947, for
    the soft threshold at the mean.
  Deviates:
    1. The score, its mean as threshold and the constant rate are a reading;
       ageing, smoothing and the choice of scope are ours.
  """
  check(RATE, rate=rate)
  check(one_of("advantage", "variance"), score=score)
  check(one_of("batch", "all"), scope=scope)
  check(Limit(lambda x: 0 <= x < 1, "in [0, 1)"), smoothing=smoothing)
  check(integer(0), max_age=max_age)

  def init(num_prompts: int) -> ScoreHistory:
    return ScoreHistory(
      jnp.full((num_prompts,), jnp.inf, jnp.float32),
      jnp.zeros((num_prompts,), jnp.int32),
    )

  def select(rng, history, ids):
    is_known = jnp.isfinite(history.score)
    if max_age:
      is_known &= rng.step - history.last_step <= max_age
    pool = slice(None) if scope == "all" else ids
    total = jnp.where(is_known, history.score, 0.0)[pool].sum()
    count = is_known[pool].sum(dtype=jnp.float32)
    mean = total / jnp.maximum(count, 1.0)
    is_low = history.score[ids] < mean * (1 - method.ROUNDING)
    drop = jnp.asarray(method.at_step(rate, rng.step), jnp.float32)
    prob = jnp.where(is_known[ids] & is_low, 1 - drop, 1.0)
    return method.draw_prompts(rng.key, ids, prob)

  def observe(history, step, ids, rewards, correct, lengths):
    del correct, lengths
    if score == "advantage":
      new = jnp.abs(advantage(rewards)).mean(axis=1)
    else:
      new = rewards.var(axis=1)
    old = history.score[ids]
    mixed = smoothing * old + (1 - smoothing) * new
    new = jnp.where(jnp.isfinite(old), mixed, new)
    return ScoreHistory(
      history.score.at[ids].set(new, mode="drop"),
      history.last_step.at[ids].set(step, mode="drop"),
    )

  return method.PromptRule(init, select, observe)
