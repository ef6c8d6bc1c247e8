"""Dynamic sampling: roll out until enough groups have rewards that differ.

A step draws chunks of `N` candidates; each is chosen from, rolled out and
graded. A group whose rewards are not all the same takes the next of the `N`
places of a buffer. The step ends with the chunk that fills the last place, or
after `max_draws` chunks.

DAPO and GRESO average over the buffer. That estimates the mean of the groups
with variance, which is larger than the mean of all by the inverse of their
share. The exact denominator undoes this. Say that a candidate's value is its
term of the gradient over its probability, 0 where it was skipped or has no
variance, and that the order of candidates is random. The value of any one
candidate, say the first, has the right mean, and so has its expectation given
where the step ended and what it collected. If the step ended with the `m`-th
group with variance as the `n`-th candidate, that last one has variance and the
other `m - 1` are anywhere among the first `n - 1` with equal chance: the first
candidate is one of them with probability `(m - 1) / (n - 1)`, and then its
value is on average the mean of those collected. If it ended with `k < m` among
`n`, the probability is `k / n`. Hence the sum over the buffer is divided by
`m (n - 1) / (m - 1)` or `n`.

That holds where each candidate is chosen by itself, with a probability that
this step's rewards do not change, and where the most that can be seen is known
beforehand. `every_prompt` and `drop_zero_variance_streaks` do so; rules that
look at the whole chunk do so only nearly. The order of candidates is random
where the place of a step in the epoch does not follow from rewards either: see
`draws_of_step`.

Source: Girshick, Mosteller and Savage 1946, unbiased estimates for binomial
sampling plans; Haldane 1945 for the untruncated one. DAPO, arXiv:2503.14476,
and GRESO, arXiv:2506.02177, for drawing again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax.algo import advantages
from dppo_jax.records import PromptBatch, Rollout, Selection


class DynamicSampling(NamedTuple):
  """How a method draws until its buffer is full.

  Attributes:
    max_draws: chunks in a step, at most; 1 never draws again.
    is_exact: divides so that the expected gradient is that of all candidates.
  """

  max_draws: int
  is_exact: bool


class GroupBuffer(NamedTuple):
  """Groups with variance in the order in which they were drawn, then blanks.

  A blank is a prompt that was not kept: lengths and rewards are 0, the
  probability is 1.

  Attributes:
    prompts: `[N]`.
    rollout: `[N, G, T]`; its slot steps are those of all chunks.
    rewards: `[N, G]`.
    num_groups: places in use, at most N.
    num_seen: candidates up to the one that took the last place, or all; one
      that `limit` cut is a candidate like one that was skipped.
  """

  prompts: PromptBatch
  rollout: Rollout
  rewards: Float[Array, "N G"]
  num_groups: Int[Array, ""]
  num_seen: Int[Array, ""]


def draws_of_step(
  sampling: DynamicSampling, step: int, first_draw: int, draws_per_epoch: int
) -> range:
  """The draws that a step may make, in order; on the host.

  Usually it goes on at `first_draw`, where the step before ended. An exact mean
  does not: then a step with much variance would leave less of it in the epoch
  to the next one, and a step across the border of two epochs would mix
  candidates that are not in random order. There each step has draws of its
  own, whether it makes them all or not. What it leaves, and what of an epoch
  is too short for a step, is not visited in that epoch.

  Args:
    step: of the run.
    draws_per_epoch: chunks that an epoch consists of.
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
  """An empty buffer for chunks of these shapes."""
  nothing = lambda x: jnp.zeros(x.shape, x.dtype)
  return GroupBuffer(
    *jax.tree.map(nothing, (prompts, rollout, rewards)),
    num_groups=jnp.int32(0),
    num_seen=jnp.int32(0),
  )


def add_groups(
  buffer: GroupBuffer,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "N G"],
) -> GroupBuffer:
  """`buffer` and the groups with variance of one more chunk, if they fit."""
  size = len(prompts.ids)
  is_new = has_variance(rollout, rewards)
  rank = jnp.cumsum(is_new, dtype=jnp.int32) - is_new.astype(jnp.int32)
  is_seen = rank < size - buffer.num_groups
  number = buffer.num_groups + is_new.sum(dtype=jnp.int32)
  number = jnp.minimum(number, size)

  # The chunk's others are the blanks: their ids repeat none of those kept.
  is_old = jnp.arange(size) < buffer.num_groups
  kind = [jnp.where(is_old, 0, 3), jnp.where(is_new, 1, 2)]
  order = jnp.argsort(jnp.concatenate(kind), stable=True)[:size]
  is_used = jnp.arange(size) < number
  join = lambda a, b: (
    jnp.concatenate([a, b])[order] if a.ndim else a + b  # slot steps
  )
  old = (buffer.prompts, buffer.rollout, buffer.rewards)
  prompts, rollout, rewards = jax.tree.map(
    join, old, (prompts, rollout, rewards)
  )
  return GroupBuffer(
    prompts,
    rollout.replace(
      lengths=jnp.where(is_used[:, None], rollout.lengths, 0),
      is_stopped=rollout.is_stopped & is_used[:, None],
      kept=Selection(is_used, jnp.where(is_used, rollout.kept.prob, 1.0)),
    ),
    jnp.where(is_used[:, None], rewards, 0.0),
    number,
    buffer.num_seen + is_seen.sum(dtype=jnp.int32),
  )


def has_variance(
  rollout: Rollout, rewards: Float[Array, "N G"]
) -> Bool[Array, "N"]:
  """True for a prompt that was kept and whose rewards are not all the same."""
  return rollout.kept.keep & ~advantages.is_zero_variance(rewards)


def denominator(
  buffer: GroupBuffer, sampling: DynamicSampling
) -> Float[Array, ""]:
  """The number of prompts by which the sum over groups is divided.

  Raises:
    ValueError: where it should be exact and there is only one place.
  """
  size = len(buffer.prompts.ids)
  number = buffer.num_groups.astype(jnp.float32)
  if not sampling.is_exact:
    return jnp.maximum(number, 1.0)
  if size < 2:
    raise ValueError(
      f"exact dynamic sampling of {size} prompt is not possible, as it takes "
      "2 to tell how many were passed over; see config.data.prompts_per_step"
    )
  seen = buffer.num_seen.astype(jnp.float32)
  return jnp.where(number == size, (seen - 1) * (size / (size - 1)), seen)


def next_size(
  buffer: GroupBuffer,
  rollout: Rollout,
  rewards: Float[Array, "N G"],
  sampling: DynamicSampling,
) -> Int[Array, ""]:
  """How many of the next chunk's kept prompts to roll out, at most `N`.

  A quarter more than fill the buffer if as many of them have variance as of
  the last chunk: `min(N, ceil(1.25 missing / share with variance))`. Where it
  should be exact, all `N`: how many can be seen must not follow from rewards.

  Args:
    rollout, rewards: of the last chunk.
  Source: GRESO, arXiv:2506.02177, and its public code at b277843.
  Deviates:
    1. The code rounds to its loader's batches and trains on what it has after
       a chunk below the full size; here the draws go on.
  """
  size = len(buffer.prompts.ids)
  if sampling.is_exact:
    return jnp.int32(size)
  missing = size - buffer.num_groups
  rolled = rollout.kept.keep.sum(dtype=jnp.int32)
  found = has_variance(rollout, rewards).sum(dtype=jnp.int32)
  needed = -(-5 * missing * rolled // jnp.maximum(4 * found, 1))
  return jnp.where(found > 0, jnp.minimum(needed, size), size)


def limit(kept: Selection, size: int | Int[Array, ""]) -> Selection:
  """The first `size` of those that `kept`, `[N]`, keeps."""
  return kept.replace(keep=kept.keep & (jnp.cumsum(kept.keep) <= size))
