"""One optimizer step from packed rows: gradient sums, then one division.

Rows are cut into micro-batches of one fixed shape, `[M, R, L]`. One compiled
loop runs those in use: a pruned batch costs fewer turns of the loop and no new
compilation.
"""

from typing import NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import optax

from dppo_jax.algo import policy_loss
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
from dppo_jax.step import measure_noise
from dppo_jax.step.optimizer import Optimizer
from dppo_jax.step.select import SelectInfo


class UpdateConfig(NamedTuple):
  """Constants that a compiled update is specialised to.

  Attributes:
    temperature: of the sampler.
    inner_updates: passes over one rollout.
    mini_batches: parts of a rollout, each an update of every pass.
    clip_norm: largest gradient norm that the optimizer lets through.
    noise_every: steps between measurements of the noise within prompts; 0
      measures no gradient noise.
    momentum: decay of the optimizer's first moment, `mu`; 0 if it has none or
      is unknown, which leaves the noise scale unknown.
    sampler_is_policy: True if the sampler draws from the policy as the trainer
      computes it, in one dtype and without top_k or top_p. Its own
      log-probabilities then serve as the old ones of several updates.
  """

  model: ModelConfig
  objective: policy_loss.Objective
  temperature: float = 1.0
  logit_chunk: int = lm_head.LOGIT_CHUNK
  inner_updates: int = 1
  mini_batches: int = 1
  clip_norm: float = float("inf")
  noise_every: int = 0
  momentum: float = 0.0
  sampler_is_policy: bool = True

  @property
  def num_updates(self) -> int:
    """Updates on one rollout."""
    return self.inner_updates * self.mini_batches

  @property
  def is_on_policy(self) -> bool:
    """True if a rollout has one update.

    The current log-probabilities, held constant, are then the old ones.
    """
    return self.num_updates == 1

  @property
  def needs_old_logprobs(self) -> bool:
    """True if the old log-probabilities take a pass before the first update.

    A correction for the sampler compares them with the sampler's own.
    """
    is_known = self.sampler_is_policy and not self.objective.sampler_cap
    return not (self.is_on_policy or is_known)


class UpdateInfo(struct.PyTreeNode):
  """Result of an update: the metrics `update/NAME` of metrics/README.md.

  Attributes:
    experts: load of a mixture of experts, as metrics.
  """

  loss: Scalar
  logprob: Scalar
  entropy: Scalar
  kl: Scalar
  clip_share: Scalar
  policy_ratio_max: Scalar
  sampler_ratio_max: Scalar
  grad_norm: Scalar
  skipped: Scalar
  skipped_in_a_row: Scalar
  nonfinite_params: Scalar
  experts: dict[str, Scalar]

  def metrics(self) -> dict[str, Scalar]:
    values = dict(vars(self))
    experts = values.pop("experts")
    return {f"update/{name}": x for name, x in values.items()} | experts


class GradSums(NamedTuple):
  """Running sums over micro-batches.

  Attributes:
    grad: gradient of the loss sum by the trainable weights.
    sums: token sums to log: `loss tokens clipped kl logprob entropy`.
    log_ratio: the largest |log(policy / old)| of any trained token.
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
  config: UpdateConfig,
  rows: PackedBatch,
  is_needed: Bool[Array, "R L"],
) -> Float[Array, "R L"]:
  """Computes log-probabilities of the needed targets in nats; 0 elsewhere."""
  return _forward(params, config, rows, is_needed)[0].logprobs


def score(
  params: parameters.Params,
  config: UpdateConfig,
  batch: PackedBatch,
  num_micro: IntScalar,
) -> TokenStats:
  """Computes statistics of the trained tokens of the micro-batches in use."""

  def score_one(i, stats):
    rows = _take(batch, i)
    new, _ = _forward(params, config, rows, rows.is_trained)
    put = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda x, y: put(x, y, i, 0), stats, new)

  zeros = jnp.zeros_like(batch.weights)
  return jax.lax.fori_loop(0, num_micro, score_one, TokenStats(zeros, zeros))


def _forward(
  params, config: UpdateConfig, rows: PackedBatch, is_needed
) -> tuple[TokenStats, moe.Load | None]:
  """Returns the statistics of the needed targets, and the experts' load."""
  model = config.model
  hidden, load = transformer.forward_and_load(
    params,
    model,
    rows.tokens,
    rows.positions,
    rows.segment_ids,
    rows.prefix_ids,
  )
  stats = lm_head.logprobs_and_entropy(
    hidden,
    transformer.head(params, model).astype(hidden.dtype),
    rows.targets,
    is_needed,
    config.temperature,
    config.logit_chunk,
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
  config: UpdateConfig,
  rows: PackedBatch,
) -> GradSums:
  """Adds the gradient of one micro-batch, `[R, L]`, to the sums.

  Args:
    reference: parameters of the reference policy, needed if beta is not 0. None
      with adapters, whose frozen weights are the reference.
  """
  is_chosen = rows.is_trained & (rows.weights != 0)
  # A sequence's ratio needs all of its tokens, unless it is 1 by definition.
  has_ratio = config.objective.is_sequence_ratio and not config.is_on_policy
  is_needed = rows.is_trained if has_ratio else is_chosen

  reference = lora.frozen(params) or reference

  def loss_sum(trainable):
    stats, load = _forward({**params, **trainable}, config, rows, is_needed)
    new = stats.logprobs
    constant = jax.lax.stop_gradient(new)
    ref_logprobs = None
    if config.objective.beta:
      ref_logprobs = jax.lax.stop_gradient(
        logprobs(reference, config, rows, is_chosen)
      )
    weights, cap = rows.weights, config.objective.sampler_cap
    if cap and config.is_on_policy:  # else by `tokens.choose_tokens`
      weights *= policy_loss.sampler_correction(new, rows.old_logprobs, cap)
    loss, info = policy_loss.surrogate(
      config.objective,
      new,
      constant if config.is_on_policy else rows.old_logprobs,
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
  return _add(sums, GradSums(grad, scalars, log_ratio, load, num_read))


def _add(sums: GradSums, more: GradSums) -> GradSums:
  return jax.tree.map(jnp.add, sums, more)._replace(
    log_ratio=jnp.maximum(sums.log_ratio, more.log_ratio)
  )


def sum_gradients(
  batch: PackedBatch,
  num_micro: IntScalar,
  params: parameters.Params,
  reference: parameters.Params | None,
  config: UpdateConfig,
) -> GradSums:
  """Sums over the first `num_micro` micro-batches of `[M, R, L]`."""
  add = lambda i, sums: add_gradient(
    sums, params, reference, config, _take(batch, i)
  )
  empty = zero_sums(params, config.model)
  with jax.named_scope("micro_batch"):
    return jax.lax.fori_loop(0, num_micro, add, empty)


def apply_gradient(
  state: TrainState,
  sums: GradSums,
  denominator: Scalar,
  optimizer: optax.GradientTransformation | Optimizer,
) -> tuple[TrainState, UpdateInfo]:
  """Takes one optimizer step along `sums.grad / denominator`.

  A gradient that is not finite changes only the optimizer's count of such
  steps. A gradient of zero, because nothing was kept or no rewards differ, is
  applied too: skipping it would bias the steps towards draws with a gradient.

  Args:
    denominator: the loss denominator, in completions before pruning.
  """
  grad = jax.tree.map(lambda g: g / denominator, sums.grad)
  params = lora.trainable(state.params)
  updates, opt_state = optimizer.update(grad, state.opt_state, params)
  params = optax.apply_updates(params, updates)
  state = state.replace(params={**state.params, **params}, opt_state=opt_state)
  return state, _describe(state, sums, denominator, optax.tree.norm(grad))


def _describe(
  state: TrainState, sums: GradSums, denominator: Scalar, grad_norm: Scalar
) -> UpdateInfo:
  """Describes the step that led to `state` by sums over its tokens."""
  means = {
    k: x / jnp.maximum(sums.sums["tokens"], 1.0) for k, x in sums.sums.items()
  }
  return UpdateInfo(
    loss=sums.sums["loss"] / denominator,
    logprob=means["logprob"],
    entropy=means["entropy"],
    kl=means["kl"],
    clip_share=means["clipped"],
    policy_ratio_max=jnp.exp(sums.log_ratio),
    sampler_ratio_max=jnp.exp(sums.log_ratio),
    grad_norm=grad_norm,
    skipped=state.opt_state.total_notfinite.astype(jnp.float32),
    skipped_in_a_row=state.opt_state.notfinite_count.astype(jnp.float32),
    nonfinite_params=optax.tree.sum(
      jax.tree.map(
        lambda x: jnp.sum(~jnp.isfinite(x), dtype=jnp.float32),
        lora.trainable(state.params),
      )
    ),
    experts=moe.describe(sums.load, sums.num_read) if sums.load else {},
  )


def update(
  state: TrainState,
  reference: parameters.Params | None,
  batch: PackedBatch,
  num_micro: IntScalar,
  denominator: Scalar,
  number: IntScalar | int = 0,
  rng: StepRng | None = None,
  select_info: SelectInfo | None = None,
  *,
  config: UpdateConfig,
  optimizer: optax.GradientTransformation | Optimizer,
) -> tuple[TrainState, UpdateInfo]:
  """Takes an optimizer step; the last one on a rollout ends the training step.

  Args:
    batch: micro-batches `[M, R, L]`.
    num_micro: micro-batches in use.
    denominator: loss denominator of the update, in completions before pruning.
    number: index of this update among those on the rollout.
    rng, select_info: randomness and properties of the batch that gradient noise
      is measured with; needed if `config.noise_every` is not 0.
  """

  def sum_up(weights, num):
    rows = batch.replace(weights=weights)
    return sum_gradients(rows, num, state.params, reference, config)

  if config.noise_every:
    is_due = (state.step % config.noise_every == 0) & (number == 0)
    sums, norm_factor = measure_noise.sum_with_signs(
      sum_up, batch, num_micro, rng.key, is_due
    )
    product = measure_noise.product_with_momentum(
      state,
      sums.grad,
      denominator,
      config.momentum,
      number < config.mini_batches,
    )
  else:
    sums = sum_up(batch.weights, num_micro)
  state, info = apply_gradient(state, sums, denominator, optimizer)
  if config.noise_every:
    terms = select_info.noise
    noise = measure_noise.update_noise(
      state.noise,
      info.grad_norm,
      product,
      norm_factor * terms.sum_squares / denominator**2,
      terms,
      config.clip_norm,
      config.momentum,
    )
    state = state.replace(noise=noise)
  is_last = number == config.num_updates - 1
  return state.replace(step=state.step + is_last), info


def _take(batch: PackedBatch, i: IntScalar) -> PackedBatch:
  index = jax.lax.dynamic_index_in_dim
  return jax.tree.map(lambda x: index(x, i, 0, keepdims=False), batch)
