"""Log-probabilities of targets without ever holding `[tokens, vocab]`.

Only the cells that are needed meet the vocabulary: each row brings its own to
the front, and as many columns are scored as the fullest row has.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax import buckets
from dppo_jax.records import Scores


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def token_logprobs(
  hidden: Float[Array, "B L E"],
  head: Float[Array, "V E"],
  targets: Int[Array, "B L"],
  is_needed: Bool[Array, "B L"],
  temperature: float,
  head_tokens: int,
) -> Float[Array, "B L"]:
  """Log-probability, in nats, of each target under softmax(scores / t).

  Scores are float32 and exist for at most about `head_tokens` cells at a time;
  the backward pass makes them again.

  Args:
    is_needed: cells to score; the others get 0 and have no slope.
    temperature: that of the sampler, so that both speak of one distribution.
    head_tokens: cells whose scores exist at once, at least one column of rows.
  """
  arguments = (hidden, head, targets, is_needed, temperature, head_tokens)
  return _forward(*arguments)[0]


def token_scores(
  hidden: Float[Array, "B L E"],
  head: Float[Array, "V E"],
  targets: Int[Array, "B L"],
  is_needed: Bool[Array, "B L"],
  temperature: float,
  head_tokens: int,
) -> Scores:
  """As `token_logprobs`, without a slope and with what else a pass can tell."""
  cells = _Cells(is_needed, head_tokens)

  def column(i, scores):
    s = _scores(cells.take(hidden, i), head, temperature)
    share = jax.nn.softmax(s, axis=-1)
    is_target = _is_target(cells.take(targets, i), s)
    total = jax.nn.logsumexp(s, axis=-1)
    at_target = jnp.where(is_target, s, 0.0).sum(-1) - total
    entropy = total - (share * s).sum(-1)
    norm = 1 - 2 * jnp.exp(at_target) + (share * share).sum(-1)
    new = Scores(at_target, jnp.maximum(entropy, 0), jnp.maximum(norm, 0))
    return jax.tree.map(lambda x, y: cells.put(x, y, i), scores, new)

  empty = Scores(*(jnp.zeros(targets.shape, jnp.float32) for _ in range(3)))
  scores = jax.lax.fori_loop(0, cells.num_chunks, column, empty)
  return jax.tree.map(cells.restore, scores)


def _forward(hidden, head, targets, is_needed, temperature, head_tokens):
  cells = _Cells(is_needed, head_tokens)

  def column(i, logprobs):
    scores = _scores(cells.take(hidden, i), head, temperature)
    is_target = _is_target(cells.take(targets, i), scores)
    at_target = jnp.where(is_target, scores, 0.0).sum(-1)
    new = at_target - jax.nn.logsumexp(scores, axis=-1)
    return cells.put(logprobs, new, i)

  empty = jnp.zeros(targets.shape, jnp.float32)
  logprobs = jax.lax.fori_loop(0, cells.num_chunks, column, empty)
  return cells.restore(logprobs), (hidden, head, targets, is_needed)


def _backward(temperature, head_tokens, saved, slopes):
  hidden, head, targets, is_needed = saved
  cells = _Cells(is_needed, head_tokens)
  slopes = jnp.where(is_needed, slopes, 0.0)

  def column(i, carry):
    head_slope, hidden_slope = carry
    chunk = cells.take(hidden, i)
    share = jax.nn.softmax(_scores(chunk, head, temperature), axis=-1)
    is_target = _is_target(cells.take(targets, i), share).astype(share.dtype)
    slope = cells.take(slopes, i)[..., None] / temperature
    slope = ((is_target - share) * slope).astype(hidden.dtype)
    head_slope = head_slope + jnp.einsum(
      "blv,ble->ve", slope, chunk, preferred_element_type=jnp.float32
    )
    new = jnp.einsum("blv,ve->ble", slope, head)
    return head_slope, cells.put(hidden_slope, new, i)

  empty = jnp.zeros(head.shape, jnp.float32), jnp.zeros_like(hidden)
  carry = jax.lax.fori_loop(0, cells.num_chunks, column, empty)
  head_slope, hidden_slope = carry
  return cells.restore(hidden_slope), head_slope.astype(head.dtype), None, None


token_logprobs.defvjp(_forward, _backward)


def _scores(hidden, head, temperature):
  scores = jnp.einsum(
    "ble,ve->blv", hidden, head, preferred_element_type=jnp.float32
  )
  return scores / temperature


def _is_target(targets, scores):
  """One-hot as a comparison: on a CPU a scatter would cost more."""
  return targets[..., None] == jnp.arange(scores.shape[-1], dtype=jnp.int32)


class _Cells:
  """Columns of needed cells, `[B, c]` at a time.

  Columns, not tokens: rows stay where the data axis put them.
  """

  def __init__(self, is_needed: Bool[Array, "B L"], head_tokens: int):
    batch, length = is_needed.shape
    self.width = buckets.largest_divisor(length, head_tokens // batch)
    self.is_needed = is_needed
    self.order = jnp.argsort(~is_needed, axis=1, stable=True).astype(jnp.int32)
    fullest = is_needed.sum(axis=1, dtype=jnp.int32).max()
    self.num_chunks = (fullest + self.width - 1) // self.width

  def take(self, x: Array, i: Array) -> Array:
    """The i-th columns of `x`, `[B, L, ...]`."""
    columns = jax.lax.dynamic_slice_in_dim(
      self.order, i * self.width, self.width, axis=1
    )
    return _pick(x, columns)

  def put(self, x: Array, new: Array, i: Array) -> Array:
    """`x`, in the order of columns, with the i-th ones replaced."""
    return jax.lax.dynamic_update_slice_in_dim(x, new, i * self.width, axis=1)

  def restore(self, x: Array) -> Array:
    """`x` from the order of columns back to that of cells."""
    back = jnp.argsort(self.order, axis=1).astype(jnp.int32)
    needed = self.is_needed.reshape(*self.is_needed.shape, *(1,) * (x.ndim - 2))
    return jnp.where(needed, _pick(x, back), jnp.zeros((), x.dtype))


def _pick(x: Array, columns: Int[Array, "B c"]) -> Array:
  return jnp.take_along_axis(
    x, columns.reshape(*columns.shape, *(1,) * (x.ndim - 2)), axis=1
  )
