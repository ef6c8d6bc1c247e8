"""One optimizer step from packed rows: gradient sums, then one division.

Rows are cut into micro-batches of one fixed shape, `[M, R, L]`, of which the
first `num_used` are run by one compiled loop: a pruned batch costs fewer turns
of the loop and no new compilation.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import optax

from dppo_jax.algo import objectives
from dppo_jax.models import head, transformer
from dppo_jax.records import PackedBatch, Scores, TrainState

MAX_SKIPPED = 10  # updates in a row whose gradient is not finite


class Settings(NamedTuple):
  """What a compiled update is specialised to.

  Attributes:
    model: the architecture.
    objective: what is optimised.
    temperature: of the sampler.
    head_tokens: cells whose scores over the vocabulary exist at once.
    inner_updates: optimizer steps on one batch. With one, the parameters that
      are trained are those that sampled: the old log-probabilities are the
      current ones, held constant, and those in the batch only serve to
      measure the sampler.
  """

  model: transformer.ModelConfig
  objective: objectives.Objective
  temperature: float = 1.0
  head_tokens: int = 2048
  inner_updates: int = 1

  @property
  def is_on_policy(self) -> bool:
    return self.inner_updates == 1


class Total(NamedTuple):
  """Running sums over micro-batches.

  Attributes:
    gradient: of the loss sum.
    sums: what describes the loss: `loss tokens clipped kl logprob`.
    log_ratio: the largest |log(policy / sampler)| of any trained token.
  """

  gradient: transformer.Params
  sums: dict[str, Float[Array, ""]]
  log_ratio: Float[Array, ""]


def make_optimizer(
  learning_rate: float,
  total_steps: int,
  schedule: str = "constant",
  ramp_steps: int = 0,
  weight_decay: float = 0.0,
  b1: float = 0.9,
  b2: float = 0.999,
  clip_norm: float = 1.0,
) -> optax.GradientTransformation:
  """AdamW behind global-norm clipping; skips gradients that are not finite.

  Raises:
    ValueError: for a schedule that is not constant, linear or cosine.
  """
  rest = max(1, total_steps - ramp_steps)
  schedules = {
    "constant": lambda: optax.constant_schedule(learning_rate),
    "linear": lambda: optax.linear_schedule(learning_rate, 0.0, rest),
    "cosine": lambda: optax.cosine_decay_schedule(learning_rate, rest),
  }
  if schedule not in schedules:
    raise ValueError(
      f"config.optimizer.schedule is {schedule!r} but must be one of "
      f"{', '.join(schedules)}"
    )
  rate = schedules[schedule]()
  if ramp_steps:
    ramp = optax.linear_schedule(
      learning_rate / ramp_steps, learning_rate, ramp_steps - 1
    )
    rate = optax.join_schedules([ramp, rate], [ramp_steps])
  return optax.apply_if_finite(
    optax.chain(
      optax.clip_by_global_norm(clip_norm),
      optax.adamw(rate, b1=b1, b2=b2, weight_decay=weight_decay),
    ),
    # The run stops long before optax would let such a gradient through.
    max_consecutive_errors=2**30,
  )


def logprobs(
  params: transformer.Params,
  settings: Settings,
  rows: PackedBatch,
  is_needed: Bool[Array, "R L"],
) -> Float[Array, "R L"]:
  """Log-probability of the needed cells' targets, in nats; 0 elsewhere."""
  return head.token_logprobs(*_at_head(params, settings, rows, is_needed))


def score(
  params: transformer.Params,
  settings: Settings,
  batch: PackedBatch,
  num_used: Int[Array, ""],
) -> Scores:
  """What `params` make of every trained cell of the first `num_used` rows."""

  def score_one(i, scores):
    rows = _take(batch, i)
    new = head.token_scores(*_at_head(params, settings, rows, rows.is_trained))
    put = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda x, y: put(x, y, i, 0), scores, new)

  zeros = jnp.zeros_like(batch.weights)
  return jax.lax.fori_loop(0, num_used, score_one, Scores(zeros, zeros, zeros))


def _at_head(params, settings, rows, is_needed):
  """The arguments of the functions of `models.head`."""
  model = settings.model
  hidden = transformer.forward(
    params,
    model,
    rows.tokens,
    rows.positions,
    rows.segment_ids,
    rows.prefix_ids,
  )
  return (
    hidden,
    transformer.head(params, model).astype(hidden.dtype),
    rows.targets,
    is_needed,
    settings.temperature,
    settings.head_tokens,
  )


def no_gradient(params: transformer.Params) -> Total:
  """What sums over micro-batches start from."""
  names = ("loss", "logprob", "tokens", "clipped", "kl")
  return Total(
    gradient=jax.tree.map(jnp.zeros_like, params),
    sums={name: jnp.float32(0) for name in names},
    log_ratio=jnp.float32(0),
  )


def add_gradient(
  total: Total,
  params: transformer.Params,
  reference: transformer.Params | None,
  settings: Settings,
  rows: PackedBatch,
) -> Total:
  """`total` with one micro-batch, `[R, L]`, added to it."""

  is_chosen = rows.is_trained & (rows.weights != 0)
  # A sequence's ratio needs all of its tokens, unless it is 1 by definition.
  has_ratio = settings.objective.is_sequence_ratio and not settings.is_on_policy
  is_needed = rows.is_trained if has_ratio else is_chosen

  def loss_sum(params):
    new = logprobs(params, settings, rows, is_needed)
    constant = jax.lax.stop_gradient(new)
    ref_logprobs = None
    if settings.objective.beta:
      ref_logprobs = jax.lax.stop_gradient(
        logprobs(reference, settings, rows, is_chosen)
      )
    loss, info = objectives.surrogate(
      settings.objective,
      new,
      constant if settings.is_on_policy else rows.old_logprobs,
      rows.advantages,
      rows.weights,
      rows.is_trained,
      rows.segment_ids,
      ref_logprobs,
      # Off the policy, `batch.choose_tokens` has put it into the weights.
      rows.old_logprobs if settings.is_on_policy else None,
    )
    log_ratio = jnp.where(is_chosen, constant - rows.old_logprobs, 0.0)
    at_chosen = jnp.where(is_chosen, constant, 0.0)
    sums = {"loss": loss, "logprob": at_chosen.sum(), **info}
    return loss, (sums, jnp.abs(log_ratio).max())

  gradient, (sums, log_ratio) = jax.grad(loss_sum, has_aux=True)(params)
  return Total(
    gradient=jax.tree.map(jnp.add, total.gradient, gradient),
    sums=jax.tree.map(jnp.add, total.sums, sums),
    log_ratio=jnp.maximum(total.log_ratio, log_ratio),
  )


def gradient(
  batch: PackedBatch,
  num_used: Int[Array, ""],
  params: transformer.Params,
  reference: transformer.Params | None,
  settings: Settings,
) -> Total:
  """The sums over the first `num_used` micro-batches of `[M, R, L]`."""
  add = lambda i, total: add_gradient(
    total, params, reference, settings, _take(batch, i)
  )
  return jax.lax.fori_loop(0, num_used, add, no_gradient(params))


def apply_gradient(
  state: TrainState,
  total: Total,
  denominator: Float[Array, ""],
  optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
  """One optimizer step along `total.gradient / denominator`.

  A gradient that is not finite changes nothing but the optimizer's count of
  such steps.

  Args:
    denominator: a count of the unpruned batch.
  """
  gradient = jax.tree.map(lambda g: g / denominator, total.gradient)
  updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
  tokens = jnp.maximum(total.sums["tokens"], 1.0)
  info = {
    "update/loss": total.sums["loss"] / denominator,
    "update/logprob": total.sums["logprob"] / tokens,
    "update/kl": total.sums["kl"] / tokens,
    "update/clip_share": total.sums["clipped"] / tokens,
    "update/policy_ratio_max": jnp.exp(total.log_ratio),
    "update/grad_norm": optax.tree.norm(gradient),
    "update/skipped": opt_state.total_notfinite.astype(jnp.float32),
    "update/skipped_in_a_row": opt_state.notfinite_count.astype(jnp.float32),
  }
  params = optax.apply_updates(state.params, updates)
  return state.replace(params=params, opt_state=opt_state), info


def update(
  state: TrainState,
  reference: transformer.Params | None,
  batch: PackedBatch,
  num_used: Int[Array, ""],
  denominator: Float[Array, ""],
  *,
  settings: Settings,
  optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
  """Steps on the first `num_used` micro-batches of `[M, R, L]`.

  Returns:
    The new state, and what describes the last of its inner updates.
  """

  def inner(_, carry):
    state, _ = carry
    total = gradient(batch, num_used, state.params, reference, settings)
    return apply_gradient(state, total, denominator, optimizer)

  carry = inner(0, (state, None))
  if not settings.is_on_policy:
    carry = jax.lax.fori_loop(1, settings.inner_updates, inner, carry)
  state, info = carry
  return state, info | {"update/micro_batches": num_used.astype(jnp.float32)}


def _take(batch: PackedBatch, i: Int[Array, ""]) -> PackedBatch:
  index = jax.lax.dynamic_index_in_dim
  return jax.tree.map(lambda x: index(x, i, 0, keepdims=False), batch)
