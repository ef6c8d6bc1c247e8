"""GRESO: skips prompts whose last rewards were all equal."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax.algo.advantages import is_zero_variance
from dppo_jax.algo.validation import COUNT, FRACTION, UNIT, check, one_of
from dppo_jax.methods import method
from dppo_jax.methods.dynamic_sampling import DynamicSampling
from dppo_jax.methods.grpo import grpo
from dppo_jax.records import IntScalar


def greso(
  base: float = 0.5,
  floor: float = 0.01,
  target: float = 0.25,
  tuning: float = 0.01,
  dynamic_sampling: str = "plain",
  max_draws: int = 4,
) -> method.Method:
  """GRPO that skips prompts after visits on which all rewards were equal.

  `base=1, tuning=0` skips nothing: that is DAPO's dynamic sampling.

  Args:
    base, floor, target, tuning: as in `drop_zero_variance_streaks`.
    dynamic_sampling: "plain" draws batches of prompts until one is full of
      groups whose rewards differ, and takes their mean, which is biased.
      "exact" weights by 1 / probability and corrects for this stopping rule;
      "none" draws one batch and weights it.
    max_draws: largest number of batches drawn in a step, which then trains on
      the groups it has.
  Source: GRESO, arXiv:2506.02177.
  Deviates:
    1. A streak counts visits; pruned prompts wait for their next epoch.
    2. A batch of candidates is as large as the batch trained on, and the last
       one is cut to the estimated need; its remainder is not visited.
    3. A group is easy or hard if its rewards are exactly equal; the verifier
       decides which. The authors' code compares the mean reward with 0.98 and
       0.11.
    4. One update on a rollout unless `objective.mini_batches` is set: 4 in the
       authors' scripts, of 64 prompts each.
    5. No entropy bonus; the authors' scripts keep their framework's default of
       0.001.
    6. Draws until the batch is full, or `max_draws`. The authors' code takes
       the first batch that it reduces to the estimated need for the last one,
       and may then train on fewer groups.
  """
  check(COUNT, max_draws=max_draws)
  check(one_of("plain", "exact", "none"), dynamic_sampling=dynamic_sampling)
  prompts = drop_zero_variance_streaks(base, floor, target, tuning)
  prune_less = "raise base or floor"
  if dynamic_sampling == "none":
    return grpo()._replace(prompts=prompts, prune_less=prune_less)
  is_exact = dynamic_sampling == "exact"
  return grpo()._replace(
    prompts=prompts if is_exact else method.unweighted_prompts(prompts),
    dynamic_sampling=DynamicSampling(max_draws, is_exact),
    prune_less=prune_less,
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
    step: last step that was observed.
  """

  run: Int[Array, "M"]
  is_easy: Bool[Array, "M"]
  keep_base: Float[Array, "2"]
  num_zero_variance: Int[Array, "2"]
  num_revisited: IntScalar
  step: IntScalar


def drop_zero_variance_streaks(
  base: float = 0.5,
  floor: float = 0.01,
  target: float = 0.25,
  tuning: float = 0.01,
) -> method.PromptRule:
  """Keeps a problem less often the longer its rewards have been equal.

  After `z` groups in a row without variance a prompt is kept with probability
  `max(p**z, floor)`. Easy problems, whose last group was mostly correct, and
  hard ones have separate `p`. Each starts at `base` and changes by `tuning` at
  every step, within 0.05 and 0.95: down if the fraction of such groups reaches
  its part of `target` (a third for easy ones), else up. A step's observations
  take effect together, after the step.

  Args:
    base, floor: in (0, 1].
    target: fraction of groups without variance, in [0, 1].
    tuning: change of `p`, in [0, 1]; 0 keeps it at `base`.
  Source: GRESO, arXiv:2506.02177, and its public code at b277843.
  Deviates:
    1. The method does not weight by these probabilities: see
       `unweighted_prompts`.
    2. `p` follows the groups of problems that were visited before, and stays if
       there are none; the code waits for the end of the first epoch.
    3. The code's fraction of hard groups counts only rewards of exactly 0.1.
  """
  check(FRACTION, base=base, floor=floor)
  check(UNIT, target=target, tuning=tuning)

  def init(num_prompts: int) -> Streaks:
    run = jnp.full((num_prompts,), -1, jnp.int32)
    keep_base = jnp.full((2,), base, jnp.float32)
    zeros, zero = jnp.zeros((2,), jnp.int32), jnp.int32(0)
    return Streaks(run, run >= 0, keep_base, zeros, zero, zero)

  def keep_base_at(history, step):
    """Tunes by the last observed step once that is over."""
    if not tuning:
      return history.keep_base
    targets = jnp.array([1 / 3, 1 - 1 / 3], jnp.float32) * target
    count = jnp.maximum(history.num_revisited, 1).astype(jnp.float32)
    fraction = history.num_zero_variance.astype(jnp.float32) / count
    change = jnp.where(fraction >= targets - method.ROUNDING, -tuning, tuning)
    tuned = jnp.clip(history.keep_base + change, 0.05, 0.95)
    is_due = (history.num_revisited > 0) & (step > history.step)
    return jnp.where(is_due, tuned, history.keep_base)

  def select(rng, history, ids):
    easy, hard = keep_base_at(history, rng.step)
    keep_base = jnp.where(history.is_easy[ids], easy, hard)
    run = history.run[ids].astype(jnp.float32)
    prob = jnp.where(run > 0, jnp.maximum(keep_base**run, floor), 1.0)
    return method.draw_prompts(rng.key, ids, prob)

  def observe(history, step, ids, rewards, correct, lengths):
    del lengths
    is_equal = is_zero_variance(rewards)
    is_easy = is_equal & (correct.mean(axis=1) > 0.5)
    run = history.run[ids]
    is_revisited = (ids < history.run.shape[0]) & (run >= 0)
    kinds = jnp.stack([is_easy, is_equal & ~is_easy]) & is_revisited
    earlier = lambda count: jnp.where(step == history.step, count, 0)
    count = lambda x: x.sum(axis=-1, dtype=jnp.int32)
    longer = jnp.where(is_equal, jnp.maximum(run, 0) + 1, 0)
    return Streaks(
      run=history.run.at[ids].set(longer, mode="drop"),
      is_easy=history.is_easy.at[ids].set(is_easy, mode="drop"),
      keep_base=keep_base_at(history, step),
      num_zero_variance=earlier(history.num_zero_variance) + count(kinds),
      num_revisited=earlier(history.num_revisited) + count(is_revisited),
      step=jnp.asarray(step, jnp.int32),
    )

  return method.PromptRule(init, select, observe)
