"""Log-probabilities of targets without ever holding `[tokens, vocab]`."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import buckets


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_logprobs(
  hidden: Float[Array, "B L E"],
  head: Float[Array, "V E"],
  targets: Int[Array, "B L"],
  temperature: float,
  head_tokens: int,
) -> Float[Array, "B L"]:
  """Log-probability, in nats, of each target under softmax(scores / t).

  Scores are float32 and exist for at most about `head_tokens` cells at a time;
  the backward pass makes them again.

  Args:
    temperature: that of the sampler, so that both speak of one distribution.
    head_tokens: cells whose scores exist at once, at least one column of rows.
  """
  return _forward(hidden, head, targets, temperature, head_tokens)[0]


def _forward(hidden, head, targets, temperature, head_tokens):
  def columns(_, chunk):
    hidden, targets = chunk
    scores = _scores(hidden, head, temperature)
    at_target = jnp.where(_is_target(targets, scores), scores, 0.0).sum(-1)
    return None, at_target - jax.nn.logsumexp(scores, axis=-1)

  chunks = (
    _split(hidden, head_tokens),
    _split(targets, head_tokens),
  )
  _, logprobs = jax.lax.scan(columns, None, chunks)
  return _join(logprobs), (hidden, head, targets)


def _backward(temperature, head_tokens, saved, slopes):
  hidden, head, targets = saved

  def columns(head_slope, chunk):
    hidden, targets, slopes = chunk
    share = jax.nn.softmax(_scores(hidden, head, temperature), axis=-1)
    is_target = _is_target(targets, share).astype(share.dtype)
    slope = (is_target - share) * (slopes / temperature)[..., None]
    slope = slope.astype(hidden.dtype)
    head_slope = head_slope + jnp.einsum(
      "blv,ble->ve", slope, hidden, preferred_element_type=jnp.float32
    )
    return head_slope, jnp.einsum("blv,ve->ble", slope, head)

  chunks = (
    _split(hidden, head_tokens),
    _split(targets, head_tokens),
    _split(slopes, head_tokens),
  )
  start = jnp.zeros(head.shape, jnp.float32)
  head_slope, hidden_slope = jax.lax.scan(columns, start, chunks)
  return _join(hidden_slope), head_slope.astype(head.dtype), None


token_logprobs.defvjp(_forward, _backward)


def _scores(hidden, head, temperature):
  scores = jnp.einsum(
    "ble,ve->blv", hidden, head, preferred_element_type=jnp.float32
  )
  return scores / temperature


def _is_target(targets, scores):
  """One-hot as a comparison: on a CPU a scatter would cost more."""
  return targets[..., None] == jnp.arange(scores.shape[-1], dtype=jnp.int32)


def _split(x, head_tokens):
  """`[B, L, ...]` as chunks of columns `[L / c, B, c, ...]`.

  Columns, not tokens: rows stay where the data axis put them.
  """
  batch, length = x.shape[:2]
  c = buckets.largest_divisor(length, head_tokens // batch)
  x = x.reshape(batch, length // c, c, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)


def _join(x):
  """The inverse of `_split`."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])
