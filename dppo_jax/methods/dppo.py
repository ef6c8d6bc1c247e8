"""DPPO: drops prompts and completions at random, and weights what is kept."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax.algo import designs
from dppo_jax.algo.advantages import group_normalized
from dppo_jax.methods import ranking
from dppo_jax.methods.grpo import grpo
from dppo_jax.methods.method import (
  ROUNDING,
  CompletionRule,
  Method,
  PromptRule,
  Rate,
  at_step,
  check,
  check_choice,
  check_fraction,
  check_rate,
  check_whole,
  uniform_for_ids,
)
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
) -> Method:
  """GRPO on fewer prompts and completions, with the same expected gradient.

  Args:
    prompt_rate: share dropped of the prompts whose last visit taught little.
    completion_rate: share dropped of the completions whose |advantage| is
      below the mean.
    scope: that mean is of the "group" or of the "batch".
    prompt_scope: a prompt's score is compared with the mean of the "batch" of
      candidates, or of "all" problems.
    score: of a prompt's visit: "advantage", the mean |advantage|, or
      "variance", that of its rewards.
    smoothing: weight of the older scores, in [0, 1).
    max_age: steps after which a score prunes no more; 0 is never.
    prune_until: share of the run after which nothing is pruned, in (0, 1].
    total_steps: of the run; None prunes to its end. The config passes
      config.steps.
  Raises:
    ValueError: for a value outside these.
  Source: DPPO, arXiv:2603.04135; prune_until from InfoBatch, arXiv:2303.04947.
  Deviates:
    1. Draws at random with known probabilities, as the paper's proof needs.
       Its algorithm 1 is said to drop a fixed share, the lowest first, which
       no weight makes unbiased: that reading was not taken.
    2. Divides by the counts of the unpruned batch, which is what the paper's
       factor C / (1 - P) amounts to where C is the share really kept. The
       other reading, C as the expected share and a mean over what was kept,
       is a ratio estimator with a bias of order 1 / kept: it was not taken.
    3. Pruned prompts wait for their next epoch and are not replaced.
    4. Rates, threshold and score are our reading: the text was not at hand.
  """
  check_rate("prompt_rate", prompt_rate)
  check_rate("completion_rate", completion_rate)
  prompts = drop_by_history(
    _until(prompt_rate, prune_until, total_steps),
    score=score,
    smoothing=smoothing,
    max_age=max_age,
    scope=prompt_scope,
  )
  completions = drop_small_advantage(
    _until(completion_rate, prune_until, total_steps), scope=scope
  )
  return grpo()._replace(
    prompts=prompts, completions=completions, has_schedule=prune_until < 1
  )


def drop_small_advantage(rate: Rate, scope: str = "group") -> CompletionRule:
  """Drops with probability `rate` where |advantage| is below the mean.

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
    rate: share of the eligible completions to drop, in [0, 1); or a function
      from the step to such a share.
    scope: the mean is of each "group", or of the "batch".
  Raises:
    ValueError: for a value outside these.
  Source: DPPO, arXiv:2603.04135, section 4.2.
  Deviates:
    1. The threshold's scope is our reading.
  """
  if not callable(rate):
    check_rate("rate", rate)

  def choose(step, uniform, advantages, is_drawn):
    drop = at_step(rate, step)
    size = jnp.where(is_drawn, jnp.abs(advantages), 0.0)
    mean = size.sum() / jnp.maximum(is_drawn.sum(dtype=jnp.float32), 1.0)
    is_small = is_drawn & (size < mean * (1 - ROUNDING))
    prob = jnp.where(is_small, jnp.float32(1 - drop), 1.0)
    prob = designs.drawn_probability(prob)
    return Selection(uniform < prob, prob)

  return ranking.in_scope(scope, choose)


class ScoreHistory(NamedTuple):
  """What each problem's visits taught.

  Attributes:
    score: `[M]`, inf where never visited.
    last_step: `[M]`, the step of the last visit.
  """

  score: Float[Array, "M"]
  last_step: Int[Array, "M"]


def drop_by_history(
  rate: Rate,
  advantage: Callable[
    [Float[Array, "Q G"]], Float[Array, "Q G"]
  ] = group_normalized,
  score: str = "advantage",
  max_age: int = 0,
  smoothing: float = 0.0,
  scope: str = "batch",
) -> PromptRule:
  """Drops with probability `rate` where the last visit taught less than usual.

  A prompt is eligible where its score is below the mean score of those that
  were ever visited. A prompt never visited is always kept.

  Args:
    rate: share of the eligible prompts to drop, in [0, 1), or a function of
      the step that returns it.
    advantage: rewards to advantages, as the method computes them.
    score: of a visit, "advantage" for the group's mean |advantage| or
      "variance" for the variance of its rewards.
    max_age: steps after which a score counts as never observed; 0 for never.
    smoothing: in [0, 1), the old score's share in the new one.
    scope: the mean score is that of the "batch" of candidates or of "all"
      problems.
  Raises:
    ValueError: for a value outside these.
  Source: DPPO, arXiv:2603.04135, section 4.2; InfoBatch, arXiv:2303.04947, for
    the soft threshold at the mean.
  Deviates:
    1. The score, its mean as threshold and the constant rate are a reading;
       ageing, smoothing and the choice of scope are ours.
  """
  if not callable(rate):
    check_rate("rate", rate)
  check_choice("score", score, ("advantage", "variance"))
  check_choice("scope", scope, ("batch", "all"))
  check("smoothing", smoothing, lambda x: 0 <= x < 1, "in [0, 1)")
  check_whole("max_age", max_age, least=0)

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
    last_score = history.score[ids]
    is_eligible = is_known[ids] & (last_score < mean * (1 - ROUNDING))
    share = jnp.asarray(at_step(rate, rng.step), jnp.float32)
    prob = jnp.where(is_eligible, 1 - share, 1.0)
    prob = designs.drawn_probability(prob)
    return Selection(uniform_for_ids(rng.key, ids) < prob, prob)

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

  return PromptRule(init, select, observe)


def _until(rate: float, share: float, total_steps: int | None) -> Rate:
  """`rate`, and 0 once `share` of the steps is behind."""
  check_fraction("prune_until", share)
  if total_steps is not None:
    check_whole("total_steps", total_steps, least=0)
  if share == 1 or total_steps is None:
    return rate
  return lambda step: jnp.where(
    step < share * total_steps, jnp.float32(rate), 0.0
  )
