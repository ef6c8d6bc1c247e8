"""One optimizer step from packed rows: gradient sums, then one division.

Rows are cut into micro-batches of one fixed shape, `[M, R, L]`, of which the
first `num_used` are run by one compiled loop: a pruned batch costs fewer turns
of the loop and no new compilation. The mini-batches of a rollout lie one after
another, and each is a step of its own.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import optax

from dppo_jax.algo import policy_loss
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.models import lm_head, moe, transformer
from dppo_jax.records import PackedBatch, TokenStats, TrainState

MAX_SKIPPED = 10  # updates in a row whose gradient is not finite


class UpdateConfig(NamedTuple):
  """What a compiled update is specialised to.

  Attributes:
    model: the architecture.
    objective: what is optimised.
    temperature: of the sampler.
    logit_chunk: tokens whose logits exist at once.
    inner_updates: passes over one rollout.
    mini_batches: parts of a rollout, each an optimizer step of every pass. With
      one step in all, the parameters that are trained are those that sampled:
      the old log-probabilities are the current ones, held constant, and those
      in the batch only serve to measure the sampler.
    noise_every: steps between two measurements of the gradient's noise, each
      of which takes the first gradient of its step twice; 0 for none.
    num_prompts: of a batch, pruned ones too; read where noise is measured.
  """

  model: transformer.ModelConfig
  objective: policy_loss.Objective
  temperature: float = 1.0
  logit_chunk: int = lm_head.LOGIT_CHUNK
  inner_updates: int = 1
  mini_batches: int = 1
  noise_every: int = 0
  num_prompts: int = 1

  @property
  def is_on_policy(self) -> bool:
    return self.inner_updates * self.mini_batches == 1

  @property
  def prompts_per_update(self) -> int:
    return self.num_prompts // self.mini_batches


class GradSums(NamedTuple):
  """Running sums over micro-batches.

  Attributes:
    grad: gradient of the loss sum.
    sums: what describes the loss: `loss tokens clipped kl logprob
      entropy`.
    log_ratio: the largest |log(policy / sampler)| of any trained token.
    load: of each layer's experts; None for a dense model.
    num_read: positions that the model read, padding aside.
  """

  grad: transformer.Params
  sums: dict[str, Float[Array, ""]]
  log_ratio: Float[Array, ""]
  load: moe.Load | None
  num_read: Float[Array, ""]


def logprobs(
  params: transformer.Params,
  config: UpdateConfig,
  rows: PackedBatch,
  is_needed: Bool[Array, "R L"],
) -> Float[Array, "R L"]:
  """Log-probability of the needed targets, in nats; 0 elsewhere."""
  arguments, _ = _head_args(params, config, rows, is_needed)
  return lm_head.token_logprobs(*arguments)


def score(
  params: transformer.Params,
  config: UpdateConfig,
  batch: PackedBatch,
  num_used: Int[Array, "*P"],
) -> TokenStats:
  """Statistics of every trained token of the micro-batches in use."""

  def score_one(i, stats):
    rows = _take(batch, i)
    arguments, _ = _head_args(params, config, rows, rows.is_trained)
    new = lm_head.token_stats(*arguments)
    put = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda x, y: put(x, y, i, 0), stats, new)

  zeros = jnp.zeros_like(batch.weights)
  return jax.lax.fori_loop(
    0, num_used.max(), score_one, TokenStats(zeros, zeros, zeros)
  )


def _head_args(params, config: UpdateConfig, rows: PackedBatch, is_needed):
  """The arguments of the functions of `models.lm_head`, and the load."""
  model = config.model
  hidden, load = transformer.forward_and_load(
    params,
    model,
    rows.tokens,
    rows.positions,
    rows.segment_ids,
    rows.prefix_ids,
    rows.experts,
  )
  arguments = (
    hidden,
    transformer.head(params, model).astype(hidden.dtype),
    rows.targets,
    is_needed,
    config.temperature,
    config.logit_chunk,
  )
  return arguments, load


def zero_sums(
  params: transformer.Params,
  model: transformer.ModelConfig,
  replays: bool = False,
) -> GradSums:
  """What sums over micro-batches start from; those `replays` have experts."""
  load = None
  if model.experts:
    load = moe.zero_load(model.experts, model.layers, replays)
  names = ("loss", "logprob", "entropy", "tokens", "clipped", "kl")
  return GradSums(
    grad=jax.tree.map(jnp.zeros_like, params),
    sums={name: jnp.float32(0) for name in names},
    log_ratio=jnp.float32(0),
    load=load,
    num_read=jnp.float32(0),
  )


def add_gradient(
  sums: GradSums,
  params: transformer.Params,
  reference: transformer.Params | None,
  config: UpdateConfig,
  rows: PackedBatch,
) -> GradSums:
  """`sums` with one micro-batch, `[R, L]`, added to it.

  Args:
    reference: parameters of the reference policy; needed where beta is not 0.
  """
  is_chosen = rows.is_trained & (rows.weights != 0)
  # A sequence's ratio needs all of its tokens, unless it is 1 by definition.
  has_ratio = config.objective.is_sequence_ratio and not config.is_on_policy
  is_needed = rows.is_trained if has_ratio else is_chosen

  def loss_sum(params):
    arguments, load = _head_args(params, config, rows, is_needed)
    new, entropy = lm_head.logprobs_and_entropy(*arguments)
    constant = jax.lax.stop_gradient(new)
    ref_logprobs = None
    if config.objective.beta:
      ref_logprobs = jax.lax.stop_gradient(
        logprobs(reference, config, rows.replace(experts=None), is_chosen)
      )
    loss, info = policy_loss.surrogate(
      config.objective,
      new,
      constant if config.is_on_policy else rows.old_logprobs,
      rows.advantages,
      rows.weights,
      rows.is_trained,
      rows.segment_ids,
      ref_logprobs,
      # Off policy, `select.choose_tokens` has put it into the weights.
      rows.old_logprobs if config.is_on_policy else None,
    )
    log_ratio = jnp.where(is_chosen, constant - rows.old_logprobs, 0.0)
    at_chosen = jnp.where(is_chosen, constant, 0.0)
    scalars = {
      "loss": loss,
      "logprob": at_chosen.sum(),
      "entropy": jnp.where(is_chosen, entropy, 0.0).sum(),
      **info,
    }
    return loss, (scalars, jnp.abs(log_ratio).max(), load)

  grad, (scalars, log_ratio, load) = jax.grad(loss_sum, has_aux=True)(params)
  num_read = (rows.segment_ids > 0).sum(dtype=jnp.float32)
  return _add(sums, GradSums(grad, scalars, log_ratio, load, num_read))


def _add(sums: GradSums, more: GradSums) -> GradSums:
  return jax.tree.map(jnp.add, sums, more)._replace(
    log_ratio=jnp.maximum(sums.log_ratio, more.log_ratio)
  )


def sum_gradients(
  batch: PackedBatch,
  num_used: Int[Array, ""],
  params: transformer.Params,
  reference: transformer.Params | None,
  config: UpdateConfig,
  first: Int[Array, ""] | int = 0,
  change: Callable[[PackedBatch], PackedBatch] = lambda rows: rows,
) -> GradSums:
  """The sums over the micro-batches `[first, num_used)` of `[M, R, L]`.

  Args:
    change: made to each micro-batch.
  """
  add = lambda i, sums: add_gradient(
    sums, params, reference, config, change(_take(batch, i))
  )
  zeros = zero_sums(params, config.model, batch.experts is not None)
  return jax.lax.fori_loop(first, num_used, add, zeros)


def apply_gradient(
  state: TrainState,
  sums: GradSums,
  denominator: Float[Array, ""],
  optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
  """One optimizer step along `sums.grad / denominator`.

  A gradient that is not finite changes nothing but the optimizer's count of
  such steps. One of zero, where nothing was drawn or no rewards differ, is an
  estimate like any other: the optimizer takes it, and goes on by what it
  remembers of earlier ones. To skip it would favour the draws that found
  something.

  Args:
    denominator: the loss denominator, in completions of the unpruned batch.
  """
  grad = jax.tree.map(lambda g: g / denominator, sums.grad)
  updates, opt_state = optimizer.update(grad, state.opt_state, state.params)
  metrics = _describe(sums, denominator) | {
    "update/grad_norm": optax.tree.norm(grad),
    "update/skipped": opt_state.total_notfinite.astype(jnp.float32),
    "update/skipped_in_a_row": opt_state.notfinite_count.astype(jnp.float32),
  }
  params = optax.apply_updates(state.params, updates)
  metrics["update/nonfinite_params"] = sum(
    jnp.sum(~jnp.isfinite(x), dtype=jnp.float32)
    for x in jax.tree.leaves(params)
  )
  return state.replace(params=params, opt_state=opt_state), metrics


def _describe(
  sums: GradSums, denominator: Float[Array, ""]
) -> dict[str, Float[Array, ""]]:
  tokens = jnp.maximum(sums.sums["tokens"], 1.0)
  metrics = {
    "update/loss": sums.sums["loss"] / denominator,
    "update/logprob": sums.sums["logprob"] / tokens,
    "update/entropy": sums.sums["entropy"] / tokens,
    "update/kl": sums.sums["kl"] / tokens,
    "update/clip_share": sums.sums["clipped"] / tokens,
    "update/policy_ratio_max": jnp.exp(sums.log_ratio),
  }
  if sums.load is not None:
    metrics |= moe.describe(sums.load, sums.num_read)
  return metrics


def update(
  state: TrainState,
  reference: transformer.Params | None,
  batch: PackedBatch,
  num_used: Int[Array, "*P"],
  denominator: Float[Array, ""],
  *,
  config: UpdateConfig,
  optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
  """Optimizer steps on the micro-batches `[M, R, L]` of a rollout.

  Each mini-batch has the same share of the prompts, and its gradient the same
  share of the denominator: their mean is the gradient of the whole.

  Args:
    num_used: micro-batches in use; of several mini-batches, `[P]`, those up to
      the end of each.
    denominator: the loss denominator of the rollout, in completions.
  Returns:
    The new state, and metrics. What describes tokens is of the last pass over
    the rollout, the gradient's norm of the last step.
  Raises:
    ValueError: where the config has another number of mini-batches.
  """
  ends = jnp.atleast_1d(num_used)
  num_parts = len(ends)
  if num_parts != config.mini_batches:
    raise ValueError(
      f"the batch was packed as {num_parts} mini-batches but the update's "
      f"config has {config.mini_batches}: give select.select the same number"
    )

  def step(i, carry):
    state, seen, _ = carry
    part = i % num_parts
    first = jnp.where(part > 0, ends[part - 1], 0)
    sum_up = functools.partial(
      sum_gradients, batch, ends[part], state.params, reference, config, first
    )
    if config.noise_every:
      is_due = (i == 0) & (state.step % config.noise_every == 0)
      sums, state = _sums_and_noise(sum_up, zeros, state, config, is_due)
    else:
      sums = sum_up()
    state, metrics = apply_gradient(
      state, sums, denominator / num_parts, optimizer
    )
    seen = jax.tree.map(lambda x: jnp.where(part > 0, x, 0), seen)
    seen = _add(seen, sums._replace(grad=None))
    return state, seen, metrics | _describe(seen, denominator)

  zeros = zero_sums(state.params, config.model, batch.experts is not None)
  carry = (state, zeros._replace(grad=None), None)
  if config.is_on_policy:
    state, _, metrics = step(0, carry)
  else:
    *_, blank = jax.tree.map(jnp.zeros_like, jax.eval_shape(step, 0, carry))
    state, _, metrics = jax.lax.fori_loop(
      0, config.inner_updates * num_parts, step, (*carry[:2], blank)
    )
  metrics["update/micro_batches"] = num_used.max().astype(jnp.float32)
  if config.noise_every:
    metrics |= gradient_noise.describe(state.noise, config.prompts_per_update)
    is_due = (state.step % config.noise_every == 0).astype(jnp.float32)
    metrics["noise/measured"] = is_due
  return state, metrics


def _sums_and_noise(
  sum_up: Callable[..., GradSums],
  zeros: GradSums,
  state: TrainState,
  config: UpdateConfig,
  is_due: Bool[Array, ""],
) -> tuple[GradSums, TrainState]:
  """What `sum_up` sums, and the state with the noise measured where it is due.

  One compiled loop serves both passes, of which the first has signs.

  Args:
    sum_up: `sum_gradients` of all but the change.
    zeros: what the sums look like.
  """
  signs = gradient_noise.signs(state.step, config.num_prompts)
  num_passes = 1 + is_due.astype(jnp.int32)

  def one_pass(i, carry):
    is_signed = i < num_passes - 1
    here = jnp.where(is_signed, signs, 1.0)
    sums = sum_up(change=lambda rows: gradient_noise.signed(rows, here))
    squared = optax.tree.norm(sums.grad, squared=True)
    return sums, jnp.where(is_signed, squared, carry[1]), squared

  nothing = jnp.float32(0)
  sums, signed, total = jax.lax.fori_loop(
    0, num_passes, one_pass, (zeros, nothing, nothing)
  )
  new = gradient_noise.measured(
    state.noise, total, signed, config.prompts_per_update
  )
  new = jax.tree.map(lambda x, y: jnp.where(is_due, x, y), new, state.noise)
  return sums, state.replace(noise=new)


def _take(batch: PackedBatch, i: Int[Array, ""]) -> PackedBatch:
  index = jax.lax.dynamic_index_in_dim
  return jax.tree.map(lambda x: index(x, i, 0, keepdims=False), batch)
