"""Old log-probabilities and token selection, between packing and update."""

from flax import struct
import jax.numpy as jnp

from dppo_jax.algo import policy_loss
from dppo_jax.algo.weights import invalid_probs
from dppo_jax.methods import Method
from dppo_jax.models import parameters
from dppo_jax.records import IntScalar, PackedBatch, Scalar, TokenStats
from dppo_jax.rng import StepRng
from dppo_jax.step import update


class ScoreInfo(struct.PyTreeNode):
  """Result of choosing tokens: the metrics `tokens/NAME`."""

  invalid_probs: Scalar
  sampler_ratio_max: Scalar
  trained: Scalar
  weight_max: Scalar

  def metrics(self) -> dict[str, Scalar]:
    return {f"tokens/{name}": x for name, x in vars(self).items()}


def needs_stats(method: Method, config: update.UpdateConfig) -> bool:
  """Returns True if a step takes another forward pass before its update."""
  is_read = method.tokens is not None and method.tokens.needs_stats
  return is_read or config.needs_old_logprobs


def is_needed(method: Method, config: update.UpdateConfig) -> bool:
  """Returns True if `score` changes the batch."""
  return method.tokens is not None or needs_stats(method, config)


def score(
  rng: StepRng,
  params: parameters.Params,
  batch: PackedBatch,
  num_micro: IntScalar,
  *,
  method: Method,
  config: update.UpdateConfig,
) -> tuple[PackedBatch, ScoreInfo]:
  """Computes old log-probabilities if needed, and chooses tokens."""
  stats = None
  if needs_stats(method, config):
    stats = update.score(params, config, batch, num_micro)
  return choose_tokens(
    rng,
    batch,
    stats,
    method=method,
    objective=config.objective,
    replaces_old=config.needs_old_logprobs,
  )


def choose_tokens(
  rng: StepRng,
  batch: PackedBatch,
  stats: TokenStats | None,
  *,
  method: Method,
  objective: policy_loss.Objective,
  replaces_old: bool,
) -> tuple[PackedBatch, ScoreInfo]:
  """Weights the tokens that the method chooses; the others get weight 0.

  The update does not compute the log-probability of a token of weight 0.

  Args:
    stats: statistics of the batch under the policy to train, if computed.
    replaces_old: True if the log-probabilities of `stats` become the batch's
      old ones, and the objective's correction for their difference from the
      sampler's is applied to the weights.
  """
  weights, num_invalid = batch.weights, jnp.float32(0)
  if method.tokens:
    chosen = method.tokens.select(rng, batch, stats)
    keep = chosen.keep & batch.is_trained
    num_invalid = invalid_probs(chosen.replace(keep=keep))
    weights = jnp.where(keep, weights / jnp.where(keep, chosen.prob, 1.0), 0.0)
  sampler_ratio = jnp.float32(0)
  if replaces_old:
    log_ratio = jnp.abs(stats.logprobs - batch.old_logprobs)
    sampler_ratio = jnp.where(batch.is_trained, log_ratio, 0.0).max()
    if objective.sampler_cap:
      weights *= policy_loss.sampler_correction(
        stats.logprobs, batch.old_logprobs, objective.sampler_cap
      )
    batch = batch.replace(old_logprobs=stats.logprobs)
  is_kept = weights != 0
  ratio = weights / jnp.where(is_kept, batch.weights, 1.0)
  info = ScoreInfo(
    invalid_probs=num_invalid,
    sampler_ratio_max=jnp.exp(sampler_ratio),
    trained=is_kept.sum(dtype=jnp.float32),
    weight_max=jnp.where(is_kept, ratio, 0.0).max(),
  )
  return batch.replace(weights=weights), info
