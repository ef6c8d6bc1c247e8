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

from dppo_jax import rollout as rollouts
from dppo_jax.methods import dynamic_sampling
from dppo_jax.models import parameters
from dppo_jax.records import IntScalar, PromptBatch, Rollout, Scalar, Selection
from dppo_jax.rng import StepRng, keys_for_ids
from dppo_jax.step.spec import StepSpec


class Experience(NamedTuple):
  """Graded completions of one step.

  Attributes:
    rewards: `[Q, G]`, 0 for the completions of a pruned prompt.
    num_prompts: loss denominator, in prompts.
    counts: sums over the rollouts of the step, see `grade.to_metrics`.
    samples: one line of samples.jsonl per completion, with its `row` among the
      `Q`, None for a group that was not gathered, and its `member`.
  """

  prompts: PromptBatch
  rollout: Rollout
  rewards: jax.Array | np.ndarray
  num_prompts: jax.Array | np.floating
  counts: collections.Counter
  samples: list[dict]


def choose_prompts(
  rng: StepRng,
  history: PyTree,
  ids: Int[Array, "N"],
  limit: IntScalar,
  *,
  spec: StepSpec,
) -> Selection:
  """Chooses prompts to roll out: the first `limit` that the rule keeps.

  The rule chooses within each mini-batch of a rollout, with randomness of its
  own: a draw that ties them, as one of a fixed number does, would make the
  parameters before a later update depend on its prompts. Dynamic sampling puts
  prompts in other places, and its candidates are independent. Prompt `q`
  belongs to part `q % spec.mini_batches`.
  """
  method, num_parts = spec.method, spec.mini_batches
  if num_parts == 1 or method.dynamic_sampling:
    kept = method.prompts.select(rng, history, ids)
  else:
    parts = jnp.arange(num_parts, dtype=jnp.int32)
    rngs = rng._replace(key=keys_for_ids(rng.key, parts))
    axes = StepRng._make((0, None)), None, 1
    select = jax.vmap(method.prompts.select, axes, out_axes=1)
    kept = select(rngs, history, ids.reshape(-1, num_parts))
    kept = jax.tree.map(lambda x: x.reshape(-1), kept)
  return kept.replace(keep=kept.keep & (jnp.cumsum(kept.keep) <= limit))


def to_inference_params(
  params: parameters.Params, *, spec: StepSpec
) -> parameters.Params:
  """Returns the weights that rollouts read."""
  return parameters.to_inference_params(params, spec.model)


def roll_out(
  inference_params: parameters.Params,
  prompts: PromptBatch,
  rng: StepRng,
  kept: Selection,
  *,
  spec: StepSpec,
) -> Rollout:
  """Samples completions of the kept prompts."""
  return rollouts.roll_out(
    inference_params,
    prompts,
    rng,
    kept,
    model_config=spec.model,
    sampling=spec.sampling,
    group_size=spec.group_size,
    num_slots=spec.num_slots,
  )


def update_history(
  history: PyTree,
  step: IntScalar,
  draws: IntScalar,
  rollout: Rollout,
  rewards: Float[Array, "Q G"],
  correct: Float[Array, "Q G"],
  *,
  spec: StepSpec,
) -> tuple[PyTree, IntScalar]:
  """Updates the prompt rule's memory after a rollout, and counts the draw."""
  # A pruned prompt gets an id that no problem has.
  ids = jnp.where(rollout.kept.keep, rollout.prompt_ids, spec.num_problems)
  history = spec.method.prompts.observe(
    history, step, ids, rewards, correct, rollout.lengths
  )
  return history, draws + 1


def add_groups(
  buffer: dynamic_sampling.GroupBuffer,
  prompts: PromptBatch,
  rollout: Rollout,
  rewards: Float[Array, "N G"],
  *,
  spec: StepSpec,
) -> tuple[dynamic_sampling.GroupBuffer, IntScalar, Scalar]:
  """Adds a chunk; returns buffer, size of the next chunk and denominator."""
  rule = spec.method.dynamic_sampling
  buffer = dynamic_sampling.add_groups(buffer, prompts, rollout, rewards)
  size = dynamic_sampling.next_size(buffer, rollout, rewards, rule)
  return buffer, size, dynamic_sampling.denominator(buffer, rule)
