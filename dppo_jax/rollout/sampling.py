"""Sampling of a token from logits."""

from math import inf
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax.algo.validation import FRACTION, Limit, check

_TEMPERATURE = Limit(lambda x: x == 0 or 1e-6 <= x < inf, "0, or at least 1e-6")
_BLOCK = 128  # tokens of the vocabulary whose probabilities are summed first


class Sampling(NamedTuple):
  """Options of sampling.

  Attributes:
    max_tokens: tokens of a completion, its stop token included, at least 1.
    stop_ids: tokens that end a completion, as its last token.
    temperature: 0 for the most likely token, or at least 1e-6.
    top_k: number of most likely tokens to sample from; 0 for all.
    top_p: probability of the most likely tokens to sample from, in (0, 1].
  """

  max_tokens: int
  stop_ids: tuple[int, ...]
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0


def sample_token(
  logits: Float[Array, "B V"],
  uniform: Float[Array, "B"],
  temperature: float,
  top_k: int = 0,
  top_p: float = 1.0,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Returns a token for each row of logits and its log-probability.

  The log-probability is taken after temperature and truncation; at temperature
  0, the most likely token has its log-probability at temperature 1.

  >>> import jax.numpy as jnp
  >>> from dppo_jax import rollout
  >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
  >>> token, logprob = rollout.sample_token(logits, jnp.array([0.6]), 1.0)
  >>> print(token[0], f"{jnp.exp(logprob)[0]:.2f}")
  1 0.30

  Args:
    uniform: one random number in [0, 1) for each token.
    temperature, top_k, top_p: the fields of `Sampling`; among tokens tied at
      the k-th place, lower ids are kept.
  Raises:
    UserError: if one is out of its range.
  """
  where, vocab = "rollout.Sampling", logits.shape[1]
  check(_TEMPERATURE, where, temperature=temperature)
  check(Limit(lambda x: 0 <= x <= vocab, f"0 to {vocab}"), where, top_k=top_k)
  check(FRACTION, where, top_p=top_p)
  if temperature == 0:
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return token, _at(jax.nn.log_softmax(logits, axis=-1), token)
  logits = logits / temperature
  if top_k:
    # By index, so that ties at the k-th place do not add tokens.
    _, kept = jax.lax.top_k(logits, top_k)
    rows = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
    is_kept = jnp.zeros(logits.shape, bool).at[rows, kept].set(True)
    logits = jnp.where(is_kept, logits, -jnp.inf)
  if top_p < 1:
    ordered = -jnp.sort(-logits, axis=-1)
    probs = jax.nn.softmax(ordered, axis=-1)
    is_needed = jnp.cumsum(probs, axis=-1) - probs < top_p
    lowest = jnp.where(is_needed, ordered, jnp.inf).min(-1, keepdims=True)
    logits = jnp.where(logits < lowest, -jnp.inf, logits)
  return jax.lax.platform_dependent(
    logits, uniform, cuda=_sample_by_weight, default=_sample_by_prob
  )


def _sample_by_prob(logits, uniform):
  logprobs = jax.nn.log_softmax(logits, axis=-1)
  token, _ = _invert_cdf(jnp.exp(logprobs), uniform)
  return token, _at(logprobs, token)


def _sample_by_weight(logits, uniform):
  """Reads the logits once less than `_sample_by_prob`, with other rounding."""
  logits = logits - logits.max(axis=-1, keepdims=True)
  token, total = _invert_cdf(jnp.exp(logits), uniform)
  return token, _at(logits, token) - jnp.log(total)


def _at(values: Float[Array, "B V"], index: Int[Array, "B"]) -> Array:
  return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]


def _invert_cdf(
  weights: Float[Array, "B V"], uniform: Float[Array, "B"]
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Returns where running sums pass `uniform` times the total, and the total.

  Sums are within blocks of the vocabulary, then over blocks. The target stays
  below each total, so a token of weight 0 is never returned.

  Args:
    uniform: multiple of 2^-23 in [0, 1).
  """
  batch, vocab = weights.shape
  blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK)))
  blocks = blocks.reshape(batch, -1, _BLOCK)
  sums = blocks.sum(-1)
  ends = _running_sum(sums)
  target = uniform * ends[:, -1]
  block = (ends <= target[:, None]).sum(-1, dtype=jnp.int32)
  at_block = lambda x: jnp.take_along_axis(
    x, block.reshape(batch, *(1,) * (x.ndim - 1)), 1
  )[:, 0]
  inside = _running_sum(at_block(blocks))
  offset = target - at_block(ends - sums)
  offset = jnp.clip(offset, 0.0, inside[:, -1] * (1 - 2.0**-22))
  place = (inside <= offset[:, None]).sum(-1, dtype=jnp.int32)
  return block * _BLOCK + place, ends[:, -1]


def _running_sum(x: Float[Array, "B n"]) -> Float[Array, "B n"]:
  """Returns the running sum as a product with ones: `cumsum` compiles slower.

  Every column must add its numbers in the same order, as matrix products do:
  then the sum never falls, and does not change where a number is 0. On a GPU
  it is one kernel as a masked sum, but five as a product.
  """

  def masked(x):
    index = jnp.arange(x.shape[1], dtype=jnp.int32)
    return jnp.where(index <= index[:, None], x[:, None], 0).sum(-1)

  def product(x):
    ones = jnp.triu(jnp.ones((x.shape[1],) * 2, x.dtype))
    return jnp.dot(x, ones, precision=jax.lax.Precision.HIGHEST)

  return jax.lax.platform_dependent(x, cuda=masked, default=product)
