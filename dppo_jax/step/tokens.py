"""Old log-probabilities and token selection, between packing and update."""

import jax.numpy as jnp

from dppo_jax.algo import policy_loss
from dppo_jax.algo.weights import horvitz_thompson, invalid_probs
from dppo_jax.models import parameters
from dppo_jax.records import IntScalar, PackedBatch, Scalar, TokenStats
from dppo_jax.rng import StepRng
from dppo_jax.step import update
from dppo_jax.step.spec import StepSpec


def is_needed(spec: StepSpec) -> bool:
  """Returns True if `score` changes the batch."""
  return spec.method.tokens is not None or spec.needs_old_logprobs


def reads_tokens(spec: StepSpec) -> bool:
  """Returns True if `score` has a forward pass."""
  rule = spec.method.tokens
  return spec.needs_old_logprobs or bool(rule and rule.needs_stats)


def score(
  rng: StepRng,
  params: parameters.Params,
  batch: PackedBatch,
  num_micro: IntScalar,
  *,
  spec: StepSpec,
) -> tuple[PackedBatch, dict[str, Scalar]]:
  """Computes old log-probabilities if needed, and chooses tokens."""
  stats = None
  if reads_tokens(spec):
    stats = update.score(params, batch, num_micro, spec=spec)
  return choose_tokens(rng, batch, stats, spec=spec)


def choose_tokens(
  rng: StepRng, batch: PackedBatch, stats: TokenStats | None, *, spec: StepSpec
) -> tuple[PackedBatch, dict[str, Scalar]]:
  """Weights the tokens that the method chooses; the others get weight 0.

  The update computes the log-probability of a token of weight 0 only if the
  ratio of its sequence needs it.

  Args:
    stats: statistics of the batch under the policy to train, if computed. If
      `spec.needs_old_logprobs`, its log-probabilities become the batch's old
      ones, and the objective's correction for their difference from the
      sampler's is applied to the weights.
  """
  weights, num_invalid = batch.weights, jnp.float32(0)
  if rule := spec.method.tokens:
    chosen = rule.select(rng, batch, stats)
    chosen = chosen.replace(keep=chosen.keep & batch.is_trained)
    num_invalid = invalid_probs(chosen)
    weights = horvitz_thompson(chosen, values=weights)
  sampler_ratio = jnp.float32(0)
  if spec.needs_old_logprobs:
    log_ratio = jnp.abs(stats.logprobs - batch.old_logprobs)
    sampler_ratio = jnp.where(batch.is_trained, log_ratio, 0.0).max()
    if cap := spec.objective.sampler_cap:
      weights *= policy_loss.sampler_correction(
        stats.logprobs, batch.old_logprobs, cap
      )
    batch = batch.replace(old_logprobs=stats.logprobs)
  is_kept = weights != 0
  ratio = weights / jnp.where(is_kept, batch.weights, 1.0)
  return batch.replace(weights=weights), {
    "tokens/invalid_probs": num_invalid,
    "tokens/sampler_ratio_max": jnp.exp(sampler_ratio),
    "tokens/trained": is_kept.sum(dtype=jnp.float32),
    "tokens/weight_max": jnp.where(is_kept, ratio, 0.0).max(),
  }
