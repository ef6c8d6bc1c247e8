"""GRESO: skips prompts whose rewards have lately been all the same."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax.algo import designs
from dppo_jax.algo.advantages import is_zero_variance
from dppo_jax.methods.dynamic_sampling import DynamicSampling
from dppo_jax.methods.grpo import grpo
from dppo_jax.methods.method import (
  ROUNDING,
  Method,
  PromptRule,
  check,
  check_choice,
  check_fraction,
  check_whole,
  uniform_for_ids,
  unweighted_prompts,
)
from dppo_jax.records import Selection


def greso(
  base: float = 0.5,
  floor: float = 0.01,
  target: float = 0.25,
  tuning: float = 0.01,
  dynamic_sampling: str = "plain",
  max_draws: int = 4,
  is_weighted: bool = False,
) -> Method:
  """GRPO that skips prompts after visits on which all rewards were the same.

  `base=1, tuning=0` skips nothing: that is DAPO's dynamic sampling.
  `is_weighted=True, dynamic_sampling="none"` has the full batch's expected
  gradient.

  Args:
    base: keep probability after one such visit, its power after several.
    floor: the least keep probability.
    target: share of such groups towards which `base` tunes itself, a third of
      it for those that are correct and two for those that are wrong.
    tuning: by how much, each step; 0 leaves it.
    dynamic_sampling: "plain" draws batches of prompts until one is full of
      groups whose rewards differ, and takes their mean; "exact" corrects for
      having stopped then; "none" draws one batch.
    max_draws: batches drawn in a step at most; the step then trains on what
      there is.
    is_weighted: weights 1 / probability; not with "plain" dynamic sampling.
  Raises:
    ValueError: for a value outside these.
  Source: GRESO, arXiv:2506.02177.
  Deviates:
    1. A streak counts visits; pruned prompts wait for their next epoch.
    2. A batch of candidates is as large as the batch trained on, and the last
       one is cut to the estimated need; what it leaves over is not visited.
    3. A group is easy or hard where its rewards are exactly the same, and
       which of the two the verifier says; the authors' code has thresholds on
       the mean reward, 0.98 and 0.11.
    4. One update on a rollout unless `objective.mini_batches` asks for more:
       4 in the authors' scripts, of 64 prompts each.
  """
  check_whole("max_draws", max_draws, least=1)
  choices = ("plain", "exact", "none")
  check_choice("dynamic_sampling", dynamic_sampling, choices)
  check(
    "dynamic_sampling",
    dynamic_sampling,
    lambda x: not (is_weighted and x == "plain"),
    "exact or none where is_weighted",
  )
  prompts = drop_zero_variance_streaks(base, floor, target, tuning)
  sampling = DynamicSampling(max_draws, is_exact=dynamic_sampling == "exact")
  return grpo()._replace(
    prompts=prompts if is_weighted else unweighted_prompts(prompts),
    dynamic_sampling=None if dynamic_sampling == "none" else sampling,
  )


class Streaks(NamedTuple):
  """Streaks of groups without variance, per problem.

  Attributes:
    run: `[M]`, length of the streak; -1 if never visited.
    is_easy: `[M]`, True if most of the last such group was correct.
    keep_base: `[2]`, probability of keeping an easy and a hard problem after
      a run of one.
    num_zero_variance: `[2]`, easy and hard groups at `step` of problems
      visited before.
    num_revisited: groups at `step` of problems visited before.
    step: the last that was observed.
  """

  run: Int[Array, "M"]
  is_easy: Bool[Array, "M"]
  keep_base: Float[Array, "2"]
  num_zero_variance: Int[Array, "2"]
  num_revisited: Int[Array, ""]
  step: Int[Array, ""]


def drop_zero_variance_streaks(
  base: float = 0.5,
  floor: float = 0.01,
  target: float = 0.25,
  tuning: float = 0.01,
  easy_share: float = 1 / 3,
) -> PromptRule:
  """Keeps a problem less often the longer its rewards have not differed.

  After `z` groups in a row without variance a prompt is kept with probability
  `max(p**z, floor)`, where `p` is that of easy problems if most of the last
  group was correct, else that of hard ones. Each `p` starts at `base`. After a
  step it loses `tuning` where too many groups were of its kind and else gains
  it, within 0.05 and 0.95. With a `tuning` of 0 it stays at `base`.

  The probabilities are those of the draw. Several observations of one step
  count together, and none changes the choice of this step's other prompts.

  Args:
    base: in (0, 1].
    floor: in (0, 1].
    target: share of groups without variance that is not too many, in [0, 1].
    tuning: change of `p`, in [0, 1].
    easy_share: share of the target that is for easy groups, in [0, 1].
  Raises:
    ValueError: for a value outside these.
  Source: GRESO, arXiv:2506.02177, and its public code at b277843.
  Deviates:
    1. The method does not weight by these probabilities: see
       `unweighted_prompts`.
    2. `p` moves by the groups of problems that were visited before, and not
       where there are none; the code waits for the end of the first epoch.
    3. The code's share of hard groups counts only rewards of exactly 0.1.
  """
  check_fraction("base", base)
  check_fraction("floor", floor)
  check("target", target, lambda x: 0 <= x <= 1, "in [0, 1]")
  check("tuning", tuning, lambda x: 0 <= x <= 1, "in [0, 1]")
  check("easy_share", easy_share, lambda x: 0 <= x <= 1, "in [0, 1]")

  def init(num_prompts: int) -> Streaks:
    return Streaks(
      run=jnp.full((num_prompts,), -1, jnp.int32),
      is_easy=jnp.zeros((num_prompts,), bool),
      keep_base=jnp.full((2,), base, jnp.float32),
      num_zero_variance=jnp.zeros((2,), jnp.int32),
      num_revisited=jnp.int32(0),
      step=jnp.int32(0),
    )

  def keep_base_at(history, step):
    targets = jnp.array([easy_share, 1 - easy_share], jnp.float32) * target
    return (
      _tuned(history, step, targets, tuning) if tuning else history.keep_base
    )

  def select(rng, history, ids):
    easy, hard = keep_base_at(history, rng.step)
    keep_base = jnp.where(history.is_easy[ids], easy, hard)
    run = history.run[ids].astype(jnp.float32)
    prob = jnp.where(run > 0, jnp.maximum(keep_base**run, floor), 1.0)
    prob = designs.drawn_probability(prob)
    return Selection(uniform_for_ids(rng.key, ids) < prob, prob)

  def observe(history, step, ids, rewards, correct, lengths):
    del lengths
    keep_base = keep_base_at(history, step)
    return _observed(history, step, ids, rewards, correct)._replace(
      keep_base=keep_base
    )

  return PromptRule(init, select, observe)


def _tuned(
  history: Streaks,
  step: Int[Array, ""],
  targets: Float[Array, "2"],
  tuning: float,
) -> Float[Array, "2"]:
  """Returns `keep_base` at `step`, tuned by the last step once that is over."""
  count = jnp.maximum(history.num_revisited, 1).astype(jnp.float32)
  fraction = history.num_zero_variance.astype(jnp.float32) / count
  change = jnp.where(fraction >= targets - ROUNDING, -tuning, tuning)
  tuned = jnp.clip(history.keep_base + change, 0.05, 0.95)
  is_due = (history.num_revisited > 0) & (step > history.step)
  return jnp.where(is_due, tuned, history.keep_base)


def _observed(
  history: Streaks,
  step: Int[Array, ""],
  ids: Int[Array, "Q"],
  rewards: Float[Array, "Q G"],
  correct: Float[Array, "Q G"],
) -> Streaks:
  """Adds the groups of one rollout to the streaks and counts."""
  has_none = is_zero_variance(rewards)
  is_easy = has_none & (correct.mean(axis=1) > 0.5)
  is_hard = has_none & ~is_easy
  run = history.run[ids]
  is_revisited = (ids < history.run.shape[0]) & (run >= 0)
  longer = jnp.where(has_none, jnp.maximum(run, 0) + 1, 0)
  kinds = jnp.stack([is_easy, is_hard]) & is_revisited
  is_same_step = step == history.step
  before = lambda count: jnp.where(is_same_step, count, 0)
  num_zero_variance = kinds.sum(axis=1, dtype=jnp.int32)
  return history._replace(
    run=history.run.at[ids].set(longer, mode="drop"),
    is_easy=history.is_easy.at[ids].set(is_easy, mode="drop"),
    num_zero_variance=before(history.num_zero_variance) + num_zero_variance,
    num_revisited=before(history.num_revisited)
    + is_revisited.sum(dtype=jnp.int32),
    step=jnp.asarray(step, jnp.int32),
  )
