"""Measurement of the gradient noise scale, as a separate compiled stage."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
import optax

from dppo_jax.algo.packing import PackingSpec
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.models import transformer
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
  params: transformer.Params,
  reference: transformer.Params | None,
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
  """Adds one measurement, from two backward passes over the first mini-batch.

  Args:
    batch: micro-batches `[M, R, L]` as they are trained on.
    num_micro: as returned by `pack`.
    select_info: of the choice of completions, whose variance is taken off.
  """
  num_prompts = len(prompts.ids)
  signs = gradient_noise.random_signs(rng.key, num_prompts)
  # Packed again with signs in place of weights: the plan depends on lengths
  # alone, so each position of `batch` finds its sign in the same place.
  signed, *_ = pack(
    prompts,
    rollout.replace(lengths=summary.trained_lengths),
    summary.advantages,
    jnp.broadcast_to(signs[:, None], summary.weights.shape),
    spec,
    config.mini_batches,
  )
  end = jnp.atleast_1d(num_micro)[0]

  def squared_norm(weights):
    rows = batch.replace(weights=weights)
    sums = update.sum_gradients(rows, end, params, reference, config)
    return optax.tree.norm(sums.grad, squared=True)

  both = jnp.stack([batch.weights, batch.weights * signed.weights])
  total, with_signs = jax.lax.map(squared_norm, both)
  num_kept = rollout.kept.keep[:: config.mini_batches].sum(dtype=jnp.int32)
  added = select_info.diagnostics.get("budget/added_variance", 0.0)
  return gradient_noise.add_measurement(
    noise, total, with_signs, num_kept, added
  )
