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

  Scores are float32 and exist for at most about `head_tokens` cells at a time.
  Where those are all, the backward pass finds them kept; else it makes them
  again.

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
    total = jax.nn.logsumexp(s, axis=-1)
    at_target = _at_target(s, cells.take(targets, i)) - total
    entropy = total - (share * s).sum(-1)
    norm = 1 - 2 * jnp.exp(at_target) + (share * share).sum(-1)
    new = Scores(at_target, jnp.maximum(entropy, 0), jnp.maximum(norm, 0))
    return jax.tree.map(lambda x, y: cells.put(x, y, i), scores, new)

  empty = Scores(*(jnp.zeros(targets.shape, jnp.float32) for _ in range(3)))
  scores = jax.lax.fori_loop(0, cells.num_chunks, column, empty)
  return jax.tree.map(cells.restore, scores)


def _forward(hidden, head, targets, is_needed, temperature, head_tokens):
  cells = _Cells(is_needed, head_tokens)

  def column(i, carry):
    logprobs, totals, kept = carry
    scores = _scores(cells.take(hidden, i), head, temperature)
    total = jax.nn.logsumexp(scores, axis=-1)
    logprob = _at_target(scores, cells.take(targets, i)) - total
    if kept is not None:
      kept = jax.lax.dynamic_update_index_in_dim(kept, scores, i, 0)
    return cells.put(logprobs, logprob, i), cells.put(totals, total, i), kept

  empty, kept = jnp.zeros(targets.shape, jnp.float32), None
  if targets.size <= head_tokens:
    kept = jnp.zeros((*cells.shape, head.shape[0]), jnp.float32)
  logprobs, totals, kept = jax.lax.fori_loop(
    0, cells.num_chunks, column, (empty, empty, kept)
  )
  saved = hidden, head, targets, is_needed, totals, kept
  return cells.restore(logprobs), saved


def _backward(temperature, head_tokens, saved, slopes):
  hidden, head, targets, is_needed, totals, kept = saved
  cells = _Cells(is_needed, head_tokens)
  slopes = jnp.where(is_needed, slopes, 0.0)

  def column(i, carry):
    head_slope, hidden_slope = carry
    chunk = cells.take(hidden, i)
    if kept is None:
      scores = _scores(chunk, head, temperature)
    else:
      scores = jax.lax.dynamic_index_in_dim(kept, i, 0, keepdims=False)
    share = jnp.exp(scores - cells.column(totals, i)[..., None])
    target = cells.take(targets, i)[..., None]
    # One-hot as a comparison: on a CPU a scatter would cost more.
    is_target = target == jnp.arange(head.shape[0], dtype=jnp.int32)
    slope = cells.take(slopes, i)[..., None] / temperature
    slope = ((is_target.astype(share.dtype) - share) * slope).astype(
      hidden.dtype
    )
    # This way round a CPU copies neither operand.
    head_slope = head_slope + jnp.einsum(
      "te,tv->ev",
      chunk.reshape(-1, chunk.shape[-1]),
      slope.reshape(-1, slope.shape[-1]),
      preferred_element_type=jnp.float32,
    )
    new = jnp.einsum("blv,ve->ble", slope, head)
    return head_slope, cells.put(hidden_slope, new, i)

  empty = jnp.zeros(head.shape[::-1], jnp.float32), jnp.zeros_like(hidden)
  head_slope, hidden_slope = jax.lax.fori_loop(
    0, cells.num_chunks, column, empty
  )
  head_slope = head_slope.T.astype(head.dtype)
  return cells.restore(hidden_slope), head_slope, None, None


token_logprobs.defvjp(_forward, _backward)


def _scores(hidden, head, temperature):
  scores = jnp.einsum(
    "ble,ve->blv", hidden, head, preferred_element_type=jnp.float32
  )
  return scores / temperature


def _at_target(scores, targets):
  return jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]


class _Cells:
  """Columns of needed cells, `[B, c]` at a time.

  Columns, not tokens: rows stay where the data axis put them. Few at a time
  leave out more of those that no row needs.
  """

  def __init__(self, is_needed: Bool[Array, "B L"], head_tokens: int):
    batch, length = is_needed.shape
    most = min(head_tokens // batch, buckets.block(length))
    self.width = buckets.largest_divisor(length, most)
    self.shape = (length // self.width, batch, self.width)
    self.is_needed = is_needed
    self.order = jnp.argsort(~is_needed, axis=1, stable=True).astype(jnp.int32)
    fullest = is_needed.sum(axis=1, dtype=jnp.int32).max()
    self.num_chunks = (fullest + self.width - 1) // self.width

  def take(self, x: Array, i: Array) -> Array:
    """The i-th columns of `x`, `[B, L, ...]`."""
    return _pick(x, self.column(self.order, i))

  def column(self, x: Array, i: Array) -> Array:
    """The same of an `x` that is in the order of columns."""
    return jax.lax.dynamic_slice_in_dim(x, i * self.width, self.width, axis=1)

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
