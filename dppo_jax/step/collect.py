"""Prompts to graded completions, the first stages of a step.

draw -> choose prompts -> roll out -> grade -> update history, once or, for
methods with dynamic sampling, until enough groups have rewards that differ.
"""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree
import numpy as np

from dppo_jax.methods import Method, dynamic_sampling
from dppo_jax.records import IntScalar, PromptBatch, Rollout, Scalar, Selection
from dppo_jax.rng import StepRng


class Experience(NamedTuple):
  """Graded completions of one step.

  Attributes:
    rewards: `[Q, G]`, 0 for the completions of a pruned prompt.
    num_prompts: loss denominator, in prompts.
    counts: sums over the rollouts of the step, see `grade`.
    samples: one line of samples.jsonl per completion, with its `row` among the
      `Q`, None for a group that was not gathered, and its `member`.
  """

  prompts: PromptBatch
  rollout: Rollout
  rewards: jax.Array | np.ndarray
  num_prompts: jax.Array | np.ndarray
  counts: collections.Counter
  samples: list[dict]


def choose_prompts(
  rng: StepRng,
  history: PyTree,
  ids: Int[Array, "N"],
  limit: IntScalar,
  *,
  method: Method,
) -> Selection:
  """Chooses prompts to roll out: the first `limit` that the rule keeps."""
  kept = method.prompts.select(rng, history, ids)
  return kept.replace(keep=kept.keep & (jnp.cumsum(kept.keep) <= limit))


def update_history(
  history: PyTree,
  step: IntScalar,
  draws: IntScalar,
  rollout: Rollout,
  rewards: Float[Array, "Q G"],
  correct: Float[Array, "Q G"],
  *,
  method: Method,
  num_problems: int,
) -> tuple[PyTree, IntScalar]:
  """Updates the prompt rule's memory after a rollout, and counts the draw."""
  # A pruned prompt gets an id that no problem has.
  ids = jnp.where(rollout.kept.keep, rollout.prompt_ids, num_problems)
  history = method.prompts.observe(
    history, step, ids, rewards, correct, rollout.lengths
  )
  return history, draws + 1


def add_groups(
  buffer: dynamic_sampling.GroupBuffer,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "N G"],
  *,
  rule: dynamic_sampling.DynamicSampling,
) -> tuple[dynamic_sampling.GroupBuffer, IntScalar, Scalar]:
  """Adds a chunk; returns buffer, size of the next chunk and denominator."""
  buffer = dynamic_sampling.add_groups(buffer, prompts, rollout, rewards)
  size = dynamic_sampling.next_size(buffer, rollout, rewards, rule)
  return buffer, size, dynamic_sampling.denominator(buffer, rule)
