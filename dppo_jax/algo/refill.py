"""Roll out until enough groups are informative.

A step draws chunks of `N` candidates; each is chosen from, rolled out and
graded. An informative group, one whose rewards are not all the same, takes the
next of `N` slots. The step ends with the chunk that fills the last slot, or
after `max_draws` chunks.

Averaging over the slots is what DAPO and GRESO do: it estimates the mean of
informative groups, which is larger than that of all by the inverse of their
share. The exact denominator undoes that. Say that a candidate's value is its
term of the gradient over its probability, 0 where it was skipped or flat, and
that the order of candidates is random. Any one candidate's value, say the
first's, has the right mean, and so has its expectation given where the step
ended and what it collected. If it ended with the `m`-th informative candidate
as the `n`-th seen, that last one is informative and the other `m - 1` are
anywhere among the first `n - 1` with equal chance: the first is one of them
with probability `(m - 1) / (n - 1)`, and then its value is on average the mean
of those collected. If it ended with `k < m` among `n`, the probability is
`k / n`. Hence the sum over slots is divided by `m (n - 1) / (m - 1)` or `n`.

That holds where each candidate is chosen by itself, with a probability that
this step's rewards do not change, and where the most that can be seen is known
beforehand: `every_prompt` and `drop_flat_streaks` do so, while rules that look
at the whole chunk do so only nearly.

Source: Girshick, Mosteller and Savage 1946, unbiased estimates for binomial
sampling plans; Haldane 1945 for the untruncated one. DAPO, arXiv:2503.14476,
and GRESO, arXiv:2506.02177, for the refill.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax.algo import advantages
from dppo_jax.records import PromptBatch, Rollout, Selection


class Refill(NamedTuple):
  """How a method draws until its step is full.

  Attributes:
    max_draws: chunks in a step, at most; 1 draws no more than others do.
    is_exact: divides so that the expected gradient is that of all candidates.
  """

  max_draws: int
  is_exact: bool


class Collected(NamedTuple):
  """Informative groups in the order in which they were drawn, then blanks.

  A blank is a prompt that was not kept: lengths and rewards are 0, the
  probability is 1.

  Attributes:
    prompts: `[N]`.
    rollout: `[N, G, T]`; its slot steps are those of all chunks.
    rewards: `[N, G]`.
    num_informative: slots in use, at most N.
    num_seen: candidates up to the one that took the last slot, or all; one
      that `limit` cut is a candidate like one that was skipped.
  """

  prompts: PromptBatch
  rollout: Rollout
  rewards: Float[Array, "N G"]
  num_informative: Int[Array, ""]
  num_seen: Int[Array, ""]


def start(
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: jax.Array | jax.ShapeDtypeStruct,
) -> Collected:
  """Nothing yet, with room for one chunk of these shapes."""
  nothing = lambda x: jnp.zeros(x.shape, x.dtype)
  return Collected(
    *jax.tree.map(nothing, (prompts, rollout, rewards)),
    num_informative=jnp.int32(0),
    num_seen=jnp.int32(0),
  )


def add(
  collected: Collected,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "N G"],
) -> Collected:
  """`collected` and the informative groups of one more chunk, if they fit."""
  size = len(prompts.ids)
  is_new = is_informative(rollout, rewards)
  rank = jnp.cumsum(is_new, dtype=jnp.int32) - is_new.astype(jnp.int32)
  is_seen = rank < size - collected.num_informative
  number = collected.num_informative + is_new.sum(dtype=jnp.int32)
  number = jnp.minimum(number, size)

  # The chunk's others are the blanks: their ids repeat none of those kept.
  is_old = jnp.arange(size) < collected.num_informative
  turn = [jnp.where(is_old, 0, 3), jnp.where(is_new, 1, 2)]
  order = jnp.argsort(jnp.concatenate(turn), stable=True)[:size]
  is_used = jnp.arange(size) < number
  join = lambda a, b: (
    jnp.concatenate([a, b])[order] if a.ndim else a + b  # slot steps
  )
  old = (collected.prompts, collected.rollout, collected.rewards)
  prompts, rollout, rewards = jax.tree.map(
    join, old, (prompts, rollout, rewards)
  )
  return Collected(
    prompts,
    rollout.replace(
      lengths=jnp.where(is_used[:, None], rollout.lengths, 0),
      is_stopped=rollout.is_stopped & is_used[:, None],
      kept=Selection(is_used, jnp.where(is_used, rollout.kept.prob, 1.0)),
    ),
    jnp.where(is_used[:, None], rewards, 0.0),
    number,
    collected.num_seen + is_seen.sum(dtype=jnp.int32),
  )


def is_informative(
  rollout: Rollout, rewards: Float[Array, "N G"]
) -> Bool[Array, "N"]:
  """True for a prompt that was kept and whose rewards are not all the same."""
  return rollout.kept.keep & ~advantages.is_constant(rewards)


def denominator(collected: Collected, refill: Refill) -> Float[Array, ""]:
  """The number of prompts by which the sum over groups is divided.

  Raises:
    ValueError: where it should be exact and there is only one slot.
  """
  size = len(collected.prompts.ids)
  number = collected.num_informative.astype(jnp.float32)
  if not refill.is_exact:
    return jnp.maximum(number, 1.0)
  if size < 2:
    raise ValueError(
      f"an exact refill of {size} prompt is not possible, as it takes 2 to "
      "tell how many were passed over; see config.data.prompts_per_step"
    )
  seen = collected.num_seen.astype(jnp.float32)
  return jnp.where(number == size, (seen - 1) * (size / (size - 1)), seen)


def next_size(
  collected: Collected,
  rollout: Rollout,
  rewards: Float[Array, "N G"],
  refill: Refill,
) -> Int[Array, ""]:
  """How many of the next chunk's kept prompts to roll out, at most `N`.

  A quarter more than fill the step if as many of them are informative as of
  the last chunk: `min(N, ceil(1.25 missing / (1 - flat share)))`. An exact
  refill takes all `N`: how many can be seen must not follow from rewards.

  Args:
    rollout, rewards: of the last chunk.
  Source: GRESO, arXiv:2506.02177, and its public code at b277843.
  Deviates:
    1. The code rounds to its loader's batches and trains on what it has after
       a chunk below the full size; here the draws go on.
  """
  size = len(collected.prompts.ids)
  if refill.is_exact:
    return jnp.int32(size)
  missing = size - collected.num_informative
  rolled = rollout.kept.keep.sum(dtype=jnp.int32)
  found = is_informative(rollout, rewards).sum(dtype=jnp.int32)
  needed = -(-5 * missing * rolled // jnp.maximum(4 * found, 1))
  return jnp.where(found > 0, jnp.minimum(needed, size), size)


def limit(kept: Selection, size: int | Int[Array, ""]) -> Selection:
  """The first `size` of those that `kept`, `[N]`, keeps."""
  return kept.replace(keep=kept.keep & (jnp.cumsum(kept.keep) <= size))
