"""Measurement of the gradient noise scale, as a separate compiled stage."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
import optax

from dppo_jax.algo.packing import PackingSpec
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.models import parameters
from dppo_jax.records import (
  CompletionSummary,
  PackedBatch,
  PromptBatch,
  Rollout,
)
from dppo_jax.rng import StepRng
from dppo_jax.step import update
from dppo_jax.step.pack import pack
from dppo_jax.step.select import SelectInfo


def measure_noise(
  rng: StepRng,
  noise: gradient_noise.Noise,
  params: parameters.Params,
  reference: parameters.Params | None,
  batch: PackedBatch,
  num_micro: Int[Array, "*P"],
  prompts: PromptBatch,
  rollout: Rollout,
  summary: CompletionSummary,
  select_info: SelectInfo,
  *,
  config: update.UpdateConfig,
  spec: PackingSpec,
) -> gradient_noise.Noise:
  """Adds one measurement, from three backward passes over the first mini-batch.

  Args:
    batch: micro-batches `[M, R, L]` as they are trained on.
    num_micro: as returned by `pack`.
    select_info: of the choice of completions, whose variance is taken off.
  """
  shape = summary.weights.shape
  keys = jax.random.split(rng.key)
  signs = gradient_noise.random_signs(keys[0], shape[0])
  signs_apart = gradient_noise.random_signs(keys[1], shape)
  # The root of the weight, so that the expectation is the full batch's.
  signs_apart /= jnp.sqrt(jnp.maximum(summary.weights, 1.0))

  def pack_again(values):
    """Returns the batch's weights, each times the value of its completion.

    The plan depends on lengths alone: each position of `batch` finds the value
    in the same place.
    """
    rows, *_ = pack(
      prompts,
      rollout.replace(lengths=summary.trained_lengths),
      summary.advantages,
      jnp.broadcast_to(values, shape),
      spec,
      config.mini_batches,
    )
    return batch.weights * rows.weights

  end = jnp.atleast_1d(num_micro)[0]

  def squared_norm(weights):
    rows = batch.replace(weights=weights)
    sums = update.sum_gradients(rows, end, params, reference, config)
    return optax.tree.norm(sums.grad, squared=True)

  weights = batch.weights, pack_again(signs[:, None]), pack_again(signs_apart)
  total, with_signs, apart = jax.lax.map(squared_norm, jnp.stack(weights))
  num_kept = rollout.kept.keep[:: config.mini_batches].sum(dtype=jnp.int32)
  num_drawn = (rollout.lengths > 0).sum(dtype=jnp.float32)
  all_kept = jnp.maximum(rollout.kept.keep.sum(dtype=jnp.float32), 1.0)
  added = select_info.diagnostics.get("budget/added_variance", 0.0)
  return gradient_noise.add_measurement(
    noise, total, with_signs, num_kept, added, apart, num_drawn / all_kept
  )
