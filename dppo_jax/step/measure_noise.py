"""Measurement of the gradient noise from an update's own gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool
import optax

from dppo_jax.algo.weights import ratio
from dppo_jax.methods.neyman import gradient_noise
from dppo_jax.models.parameters import Params
from dppo_jax.records import (
  IntScalar,
  NoiseTerms,
  PackedBatch,
  Scalar,
  TrainState,
)

PRODUCT_EVERY = 4  # steps between measurements of the noise scale


def sum_with_signs(
  sum_up: Callable[..., Any],
  batch: PackedBatch,
  num_micro: IntScalar,
  key: jax.Array,
  is_due: Bool[Array, ""],
) -> tuple[Any, Scalar]:
  """Sums the gradients of micro-batches, and measures completions if due.

  Before that, the first micro-batch is run with a random sign for each of its
  completions. One loop does both, so that nothing is compiled twice.

  Args:
    sum_up: `(weights [M, R, L], num) -> sums`, with the gradient as `grad`, of
      the first `num` micro-batches.
    batch: micro-batches `[M, R, L]`.
    num_micro: micro-batches in use.
  Returns:
    The sums, and the sum of the squared norms of the completions' gradients
    over its estimate from tokens that are independent and have gradients of
    norm 1 - p; NaN if it is not due.
  """
  most, num_rows, length = batch.tokens.shape
  by_segment = jax.random.rademacher(
    key, (most, num_rows, length + 1), jnp.float32
  )
  signs = jnp.take_along_axis(by_segment, batch.segment_ids, axis=2)

  def run(i, carry):
    is_signed = i == 0
    sums = sum_up(
      jnp.where(is_signed, batch.weights * signs, batch.weights),
      jnp.where(is_signed, 1, num_micro),
    )
    squared = jax.lax.cond(
      is_signed,
      lambda: optax.tree.norm(sums.grad, squared=True),
      lambda: carry[1],
    )
    return sums, squared

  shapes = jax.eval_shape(sum_up, batch.weights, num_micro)
  empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  start = jnp.where(is_due, 0, 1)
  carry = empty, jnp.float32(jnp.nan)
  sums, squared = jax.lax.fori_loop(start, 2, run, carry)
  rows = jax.tree.map(lambda x: x[0], batch)
  size = rows.weights * rows.advantages * (1 - jnp.exp(rows.old_logprobs))
  estimate = jnp.where(rows.is_trained, size * size, 0.0).sum()
  return sums, ratio(squared, estimate, jnp.nan)


def product_with_momentum(
  state: TrainState,
  sums: Params,
  denominator: Scalar,
  decay: float,
  is_new: Bool[Array, ""] | bool,
) -> Scalar:
  """Returns the product of the gradient and the momentum, NaN if it is not due.

  Reading both trees takes a percent of a step on a CPU, so that only every
  fourth step does.

  Args:
    state: train state before the optimizer's step.
    sums: gradient of the loss sum.
    decay: decay of the momentum; 0 if it is unknown.
    is_new: True if the momentum has no gradient of the same completions.
  """
  nothing = jnp.float32(jnp.nan)
  if not decay:
    return nothing
  momentum = optax.tree.get(state.opt_state, "mu")
  return jax.lax.cond(
    is_new & (state.step % PRODUCT_EVERY == 1),
    lambda: optax.tree.vdot(sums, momentum) / denominator,
    lambda: nothing,
  )


def update_noise(
  old: gradient_noise.Noise,
  grad_norm: Scalar,
  product: Scalar,
  within: Scalar,
  terms: NoiseTerms,
  clip_norm: float,
  decay: float,
) -> gradient_noise.Noise:
  """Returns the estimates of the gradient noise after an optimizer step.

  Args:
    product: value of `product_with_momentum`.
    within: sum of the squared norms of the completions' gradients; NaN if it
      was not measured.
    clip_norm: largest gradient norm that reaches the momentum.
    decay: decay of the momentum.
  """
  squared, added = grad_norm**2, terms.added_variance
  noise = gradient_noise.add_gradient(old, squared, product, added)
  noise = gradient_noise.add_signs(noise, squared, within, added)
  kept = jnp.minimum(clip_norm / grad_norm, 1.0)
  # A gradient that is not finite does not reach the momentum.
  moved = gradient_noise.add_momentum(noise, decay, kept)
  is_finite = jnp.isfinite(grad_norm)
  return jax.tree.map(lambda x, y: jnp.where(is_finite, x, y), moved, noise)
