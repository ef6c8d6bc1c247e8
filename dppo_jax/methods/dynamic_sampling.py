"""Dynamic sampling: roll out until enough groups have rewards that differ.

A step draws chunks of `N` candidates; each is chosen from, rolled out and
graded. Groups whose rewards differ fill a buffer of `N` places. The step ends
with the chunk that fills the last place, or after `max_draws` chunks.

DAPO and GRESO average over the buffer. That estimates the mean of the groups
with variance, which exceeds the mean of all by the inverse of their fraction.
The exact denominator undoes this. Let a candidate's value be its term of the
gradient over its probability, 0 if it was skipped or has no variance. In random
order, the first candidate's value has the right mean, and so has its
expectation given where the step ended and what it collected. If the step ended
with the `m`-th group with variance at the `n`-th candidate, the other `m - 1`
are anywhere among the first `n - 1`: the first candidate is one of them with
probability `(m - 1) / (n - 1)`. If it ended with `k < m` among `n`, that is
`k / n`. Hence the sum over the buffer is divided by `m (n - 1) / (m - 1)` or
`n`.

Candidates must be chosen independently, with probabilities that this step's
rewards do not change; with rules that look at the full chunk the mean is
approximate. Their order must not follow from rewards: see `draws_of_step`.

Source: Girshick, Mosteller and Savage 1946, unbiased estimates for binomial
sampling plans; Haldane 1945 for the untruncated one. DAPO, arXiv:2503.14476,
and GRESO, arXiv:2506.02177, for drawing again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dppo_jax.algo import advantages
from dppo_jax.records import IntScalar, PromptBatch, Rollout, Scalar, Selection


class DynamicSampling(NamedTuple):
  """Repeated draws until a buffer is full.

  Attributes:
    max_draws: largest number of chunks in a step.
    is_exact: divides so that the expected gradient is all candidates'.
  """

  max_draws: int
  is_exact: bool


class GroupBuffer(NamedTuple):
  """Groups with variance in the order in which they were drawn, then blanks.

  A blank is a prompt that was not kept: lengths and rewards are 0, the
  probability is 1.

  Attributes:
    prompts, rollout, rewards: of `N` places; slot steps are of all chunks.
    num_groups: places in use, at most N.
    num_seen: candidates drawn until the last place was taken, or all, including
      those that were skipped or cut by `limit`.
  """

  prompts: PromptBatch
  rollout: Rollout
  rewards: Float[Array, "N G"]
  num_groups: IntScalar
  num_seen: IntScalar


def draws_of_step(
  sampling: DynamicSampling, step: int, first_draw: int, draws_per_epoch: int
) -> range:
  """Returns the draws that a step may make, in order; on the host.

  Without an exact mean a step continues at `first_draw`, where the last one
  ended. An exact mean would then be biased: a step that found much variance
  would leave less of the epoch's for the next, and candidates of two epochs are
  not in random order. Each exact step therefore has separate draws within an
  epoch. Unused draws, and the remainder of an epoch, are not visited.
  """
  if not sampling.is_exact:
    return range(first_draw, first_draw + sampling.max_draws)
  size = min(sampling.max_draws, draws_per_epoch)
  epoch, block = divmod(step, draws_per_epoch // size)
  begin = epoch * draws_per_epoch + block * size
  return range(begin, begin + size)


def init_buffer(
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: jax.Array | jax.ShapeDtypeStruct,
) -> GroupBuffer:
  """Returns an empty buffer for chunks shaped like the arguments."""
  chunk = (prompts, rollout, rewards)
  prompts, rollout, zeros = jax.tree.map(jnp.zeros_like, chunk)
  return GroupBuffer(prompts, rollout, zeros, jnp.int32(0), jnp.int32(0))


def add_groups(
  buffer: GroupBuffer,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "N G"],
) -> GroupBuffer:
  """Adds the groups with variance of one more chunk that fit."""
  size = len(prompts.ids)
  is_new = has_variance(rollout, rewards)
  rank = jnp.cumsum(is_new, dtype=jnp.int32) - is_new.astype(jnp.int32)
  is_seen = rank < size - buffer.num_groups
  number = jnp.minimum(buffer.num_groups + is_new.sum(dtype=jnp.int32), size)
  # Blanks are other candidates of the chunk: no id is repeated.
  is_old = jnp.arange(size) < buffer.num_groups
  kind = [jnp.where(is_old, 0, 3), jnp.where(is_new, 1, 2)]
  order = jnp.argsort(jnp.concatenate(kind), stable=True)[:size]
  is_used = jnp.arange(size) < number
  # Slot steps, the only scalar, are summed.
  join = lambda a, b: jnp.concatenate([a, b])[order] if a.ndim else a + b
  old = (buffer.prompts, buffer.rollout, buffer.rewards)
  new = (prompts, rollout, rewards)
  prompts, rollout, rewards = jax.tree.map(join, old, new)
  blanked = lambda x: jnp.where(is_used[:, None], x, jnp.zeros_like(x))
  return GroupBuffer(
    prompts,
    rollout.replace(
      lengths=blanked(rollout.lengths),
      is_stopped=jax.tree.map(blanked, rollout.is_stopped),  # or None
      kept=Selection(is_used, jnp.where(is_used, rollout.selection.prob, 1.0)),
    ),
    blanked(rewards),
    number,
    buffer.num_seen + is_seen.sum(dtype=jnp.int32),
  )


def has_variance(
  rollout: Rollout, rewards: Float[Array, "N G"]
) -> Bool[Array, "N"]:
  """Returns True for prompts that were kept and whose rewards differ."""
  return rollout.selection.keep & ~advantages.is_zero_variance(rewards)


def denominator(buffer: GroupBuffer, sampling: DynamicSampling) -> Scalar:
  """Returns the number of prompts that divides the sum over groups."""
  size = len(buffer.prompts.ids)  # at least 2 if it is exact
  number = buffer.num_groups.astype(jnp.float32)
  if not sampling.is_exact:
    return jnp.maximum(number, 1.0)
  seen = buffer.num_seen.astype(jnp.float32)
  return jnp.where(number == size, (seen - 1) * (size / (size - 1)), seen)


def next_size(
  buffer: GroupBuffer,
  rollout: Rollout,
  rewards: Float[Array, "N G"],
  sampling: DynamicSampling,
) -> IntScalar:
  """Returns the number of the next chunk's kept prompts to roll out.

  This is a quarter more than would fill the buffer at the last chunk's fraction
  with variance, `min(N, ceil(1.25 missing / fraction))`. With an exact mean it
  is `N`, as the number must not depend on rewards.

  Args:
    rollout, rewards: of the last chunk.
  Source: GRESO, arXiv:2506.02177, and its public code at b277843.
  Deviates:
    1. The code rounds to its loader's batches and stops after a chunk below
       the full size; here the draws continue.
  """
  size = len(buffer.prompts.ids)
  if sampling.is_exact:
    return jnp.int32(size)
  missing = size - buffer.num_groups
  rolled = rollout.selection.keep.sum(dtype=jnp.int32)
  mixed = has_variance(rollout, rewards).sum(dtype=jnp.int32)
  needed = -(-5 * missing * rolled // jnp.maximum(4 * mixed, 1))
  return jnp.where(mixed > 0, jnp.minimum(needed, size), size)
