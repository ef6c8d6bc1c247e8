"""One optimizer step from packed rows: gradient sums, then one division.

Rows are cut into micro-batches of one fixed shape, `[M, R, L]`. One compiled
loop runs those in use: a pruned batch costs fewer turns of the loop and no new
compilation.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import optax

from dppo_jax.algo import policy_loss
from dppo_jax.algo.weights import ratio
from dppo_jax.models import lm_head, lora, moe, parameters, transformer
from dppo_jax.models.config import ModelConfig
from dppo_jax.records import (
  IntScalar,
  PackedBatch,
  Scalar,
  TokenStats,
  TrainState,
)
from dppo_jax.rng import StepRng
from dppo_jax.step.optimizer import Optimizer
from dppo_jax.step.spec import StepSpec


class GradSums(NamedTuple):
  """Running sums over micro-batches.

  Attributes:
    grad: gradient of the loss sum by the trainable weights.
    sums: token sums to log: `loss tokens clipped kl logprob entropy`.
    log_ratio: the largest |log(policy / old)| of a token of nonzero weight.
    load: of each layer's experts; None for a dense model.
    num_read: positions that the model read, without padding.
  """

  grad: parameters.Params
  sums: dict[str, Scalar]
  log_ratio: Scalar
  load: moe.Load | None
  num_read: Scalar


def logprobs(
  params: parameters.Params,
  rows: PackedBatch,
  is_needed: Bool[Array, "R L"],
  *,
  spec: StepSpec,
) -> Float[Array, "R L"]:
  """Computes log-probabilities of the needed targets in nats; 0 elsewhere."""
  return _forward(params, rows, is_needed, spec)[0].logprobs


def score(
  params: parameters.Params,
  batch: PackedBatch,
  num_micro: IntScalar,
  *,
  spec: StepSpec,
) -> TokenStats:
  """Computes statistics of the trained tokens of the micro-batches in use."""

  def score_one(i, stats):
    rows = _take(batch, i)
    new, _ = _forward(params, rows, rows.is_trained, spec)
    put = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda x, y: put(x, y, i, 0), stats, new)

  zeros = jnp.zeros_like(batch.weights)
  return jax.lax.fori_loop(0, num_micro, score_one, TokenStats(zeros, zeros))


def _forward(
  params, rows: PackedBatch, is_needed, spec: StepSpec
) -> tuple[TokenStats, moe.Load | None]:
  """Returns the statistics of the needed targets, and the experts' load."""
  model = spec.model
  hidden, load = transformer.forward_and_load(
    params, model, rows.tokens, rows.positions, rows.end
  )
  stats = lm_head.logprobs_and_entropy(
    hidden,
    transformer.head(params, model).astype(hidden.dtype),
    rows.targets,
    is_needed,
    spec.sampling.temperature,
    spec.logit_chunk,
  )
  return TokenStats(*stats), load


def zero_sums(params: parameters.Params, model: ModelConfig) -> GradSums:
  """Returns the empty sum."""
  names = "loss logprob entropy tokens clipped kl".split()
  return GradSums(
    grad=jax.tree.map(jnp.zeros_like, lora.trainable(params)),
    sums={name: jnp.float32(0) for name in names},
    log_ratio=jnp.float32(0),
    load=model.experts and moe.zero_load(model.experts, model.layers),
    num_read=jnp.float32(0),
  )


def add_gradient(
  sums: GradSums,
  params: parameters.Params,
  reference: parameters.Params | None,
  rows: PackedBatch,
  is_first: Bool[Array, ""] | bool = False,
  *,
  spec: StepSpec,
) -> GradSums:
  """Adds the gradient of one micro-batch, `[R, L]`, to the sums.

  Args:
    reference: parameters of the reference policy, for a KL penalty. None
      with adapters, whose frozen weights are the reference.
    is_first: True before the first update on a rollout, where every ratio is 1.
      The sampler's log-probabilities equal the trainer's up to rounding only.
  """
  is_chosen = rows.is_trained & (rows.weights != 0)
  # A sequence's ratio needs all of its tokens, unless it is 1 by definition.
  has_ratio = spec.objective.is_sequence_ratio and not spec.is_on_policy
  is_needed = rows.is_trained if has_ratio else is_chosen

  reference = lora.frozen(params) or reference

  def loss_sum(trainable):
    stats, load = _forward({**params, **trainable}, rows, is_needed, spec)
    new = stats.logprobs
    constant = jax.lax.stop_gradient(new)
    ref_logprobs = None
    if spec.objective.has_kl:
      ref_logprobs = jax.lax.stop_gradient(
        logprobs(reference, rows, is_chosen, spec=spec)
      )
    weights, cap = rows.weights, spec.objective.sampler_cap
    if cap and spec.is_on_policy:  # else by `tokens.choose_tokens`
      weights *= policy_loss.sampler_correction(new, rows.old_logprobs, cap)
    loss, info = policy_loss.surrogate(
      spec.objective,
      new,
      jnp.where(spec.is_on_policy or is_first, constant, rows.old_logprobs),
      rows.advantages,
      weights,
      rows.is_trained,
      rows.segment_ids,
      ref_logprobs,
    )
    log_ratio = jnp.where(is_chosen, constant - rows.old_logprobs, 0.0)
    at_chosen = jnp.where(is_chosen, constant, 0.0)
    scalars = {
      "loss": loss,
      "logprob": at_chosen.sum(),
      "entropy": jnp.where(is_chosen, stats.entropy, 0.0).sum(),
      **info,
    }
    return loss, (scalars, jnp.abs(log_ratio).max(), load)

  grad, (scalars, log_ratio, load) = jax.grad(loss_sum, has_aux=True)(
    lora.trainable(params)
  )
  num_read = (rows.segment_ids > 0).sum(dtype=jnp.float32)
  more = GradSums(grad, scalars, log_ratio, load, num_read)
  return jax.tree.map(jnp.add, sums, more)._replace(
    log_ratio=jnp.maximum(sums.log_ratio, log_ratio)
  )


def sum_gradients(
  batch: PackedBatch,
  num_micro: IntScalar,
  params: parameters.Params,
  reference: parameters.Params | None,
  is_first: Bool[Array, ""] | bool = False,
  *,
  spec: StepSpec,
) -> GradSums:
  """Sums over the first `num_micro` micro-batches of `[M, R, L]`."""
  add = lambda i, sums: add_gradient(
    sums, params, reference, _take(batch, i), is_first, spec=spec
  )
  empty = zero_sums(params, spec.model)
  with jax.named_scope("micro_batch"):
    return jax.lax.fori_loop(0, num_micro, add, empty)


def signed_square(
  rng: StepRng,
  params: parameters.Params,
  reference: parameters.Params | None,
  batch: PackedBatch,
  num_micro: IntScalar,
  *,
  spec: StepSpec,
) -> Scalar:
  """Measures completions in a backward pass of the first micro-batch.

  Each of its completions gets a random sign.

  Args:
    batch: micro-batches `[M, R, L]`.
    num_micro: micro-batches in use.
  Returns:
    The sum of the squared norms of the completions' gradients over its estimate
    from tokens that are independent and have gradients of norm 1 - p; NaN
    without completions.
  """
  first = jax.tree.map(lambda x: x[:1], batch)
  _, num_rows, length = batch.tokens.shape
  by_segment = jax.random.rademacher(
    rng.key, (num_rows, length + 1), jnp.float32
  )
  signs = jnp.take_along_axis(by_segment[None], first.segment_ids, axis=2)
  signed = first.replace(weights=first.weights * signs)
  one = jnp.minimum(num_micro, 1)
  sums = sum_gradients(signed, one, params, reference, True, spec=spec)
  squared = optax.tree.norm(sums.grad, squared=True)
  size = first.weights * first.advantages * (1 - jnp.exp(first.old_logprobs))
  estimate = jnp.where(first.is_trained, size * size, 0.0).sum()
  return ratio(squared, estimate, jnp.nan)


def apply_gradient(
  state: TrainState,
  sums: GradSums,
  denominator: Scalar,
  optimizer: optax.GradientTransformation | Optimizer,
) -> tuple[TrainState, dict[str, Scalar]]:
  """Takes one optimizer step along `sums.grad / denominator`.

  A gradient whose norm is not finite changes only the optimizer's count of such
  steps. A gradient of zero, because nothing was kept or no rewards differ, is
  applied too: skipping it would bias the steps towards draws with a gradient.

  Args:
    denominator: the loss denominator, in completions before pruning.
    optimizer: wrapped by `optax.apply_if_finite`, as by `make_optimizer`.
  """
  grad = jax.tree.map(lambda g: g / denominator, sums.grad)
  norm = optax.tree.norm(grad)  # squares may overflow where entries do not
  grad = jax.tree.map(lambda g: jnp.where(norm < jnp.inf, g, jnp.nan), grad)
  params = lora.trainable(state.params)
  updates, opt_state = optimizer.update(grad, state.opt_state, params)
  params = optax.apply_updates(params, updates)
  state = state.replace(params={**state.params, **params}, opt_state=opt_state)
  return state, _describe(state, sums, denominator, norm)


def _describe(
  state: TrainState, sums: GradSums, denominator: Scalar, grad_norm: Scalar
) -> dict[str, Scalar]:
  """Returns metrics of the step that led to `state`."""
  num_tokens = jnp.maximum(sums.sums["tokens"], 1.0)
  means = {name: x / num_tokens for name, x in sums.sums.items()}
  count_nonfinite = lambda x: jnp.sum(~jnp.isfinite(x), dtype=jnp.float32)
  skips = state.opt_state
  metrics = {
    "loss": sums.sums["loss"] / denominator,
    "logprob": means["logprob"],
    "entropy": means["entropy"],
    "kl": means["kl"],
    "clip_share": means["clipped"],
    "policy_ratio_max": jnp.exp(sums.log_ratio),
    "sampler_ratio_max": jnp.exp(sums.log_ratio),
    "grad_norm": grad_norm,
    "skipped": skips.total_notfinite.astype(jnp.float32),
    "skipped_in_a_row": skips.notfinite_count.astype(jnp.float32),
    "nonfinite_params": optax.tree.sum(
      jax.tree.map(count_nonfinite, lora.trainable(state.params))
    ),
  }
  experts = moe.describe(sums.load, sums.num_read) if sums.load else {}
  return {f"update/{name}": x for name, x in metrics.items()} | experts


def update(
  state: TrainState,
  reference: parameters.Params | None,
  batch: PackedBatch,
  num_micro: IntScalar,
  denominator: Scalar,
  number: IntScalar | int = 0,
  *,
  spec: StepSpec,
) -> tuple[TrainState, dict[str, Scalar]]:
  """Takes an optimizer step; the last one on a rollout ends the training step.

  Args:
    batch: micro-batches `[M, R, L]`.
    num_micro: micro-batches in use.
    denominator: loss denominator of the update, in completions before pruning.
    number: index of this update among those on the rollout.
  """
  sums = sum_gradients(
    batch, num_micro, state.params, reference, number == 0, spec=spec
  )
  state, metrics = apply_gradient(state, sums, denominator, spec.optimizer)
  is_last = number == spec.num_updates - 1
  return state.replace(step=state.step + is_last), metrics


def _take(batch: PackedBatch, i: IntScalar) -> PackedBatch:
  index = jax.lax.dynamic_index_in_dim
  return jax.tree.map(lambda x: index(x, i, 0, keepdims=False), batch)
