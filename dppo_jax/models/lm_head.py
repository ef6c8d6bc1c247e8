"""Log-probabilities of targets without ever holding `[tokens, vocab]`.

Only needed tokens get logits: each row moves its needed tokens to the front,
and the columns that the fullest row needs are computed.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dppo_jax import sharding
from dppo_jax.models import layers

LOGIT_CHUNK = 2048  # tokens whose logits exist at once


def logprobs_and_entropy(
  hidden: Float[Array, "B L E"],
  head: Float[Array, "V E"],
  targets: Int[Array, "B L"],
  is_needed: Bool[Array, "B L"],
  temperature: float,
  logit_chunk: int,
) -> tuple[Float[Array, "B L"], Float[Array, "B L"]]:
  """Returns each target's log-probability and its distribution's entropy.

  Both are in nats, of softmax(logits / temperature) in float32. The entropy's
  gradient is zero. If `logit_chunk` covers all tokens, the backward pass reuses
  the logits; else it computes them again.

  Args:
    is_needed: tokens to evaluate; all others get 0 and no gradient.
    logit_chunk: tokens whose logits exist at once; at least one column of rows.
  """
  num_shards = sharding.num_shards_here("batch")
  if num_shards == 1:
    return _logprobs_and_entropy(
      hidden, head, targets, is_needed, temperature, logit_chunk
    )
  chunk = max(logit_chunk // num_shards, 1)
  by_row = sharding.unclaimed_spec("batch")
  # The vocabulary may stay divided. The width is gathered here, once for all
  # chunks, so that each device gets its own slice of the head's gradient.
  # The barrier is for the gradient of an untied head: the TPU compiler tries
  # to move its sum over devices out of the loop, and fails (jax 0.10.2).
  head = jax.lax.optimization_barrier(head)

  def on_shard(hidden, head, targets, is_needed):
    head = sharding.gather_width(head, "vocab", "embed")
    return _logprobs_and_entropy(
      hidden, head, targets, is_needed, temperature, chunk
    )

  return jax.shard_map(
    on_shard,
    in_specs=(by_row, sharding.spec((None, "embed")), by_row, by_row),
    out_specs=by_row,
    axis_names=set(sharding.RULES["batch"]),
    check_vma=False,
  )(hidden, head, targets, is_needed)


def _forward(hidden, head, targets, is_needed, temperature, logit_chunk):
  columns = _ColumnChunks(is_needed, logit_chunk)

  def chunk(i, carry):
    logprobs, entropies, lses, kept = carry
    logits = _logits(columns.compact(hidden, i), head, temperature)
    lse = jax.nn.logsumexp(logits, axis=-1)
    target = columns.compact(targets, i)[..., None]
    logprob = jnp.take_along_axis(logits, target, axis=-1)[..., 0] - lse
    entropy = lse - (jnp.exp(logits - lse[..., None]) * logits).sum(-1)
    if kept is not None:
      kept = jax.lax.dynamic_update_index_in_dim(kept, logits, i, 0)
    return (
      columns.put(logprobs, logprob, i),
      columns.put(entropies, jnp.maximum(entropy, 0), i),
      columns.put(lses, lse, i),
      kept,
    )

  empty, kept = jnp.zeros(targets.shape, jnp.float32), None
  if targets.size <= logit_chunk:
    kept = jnp.zeros((*columns.shape, head.shape[0]), jnp.float32)
  logprobs, entropies, lses, kept = jax.lax.fori_loop(
    0, columns.num_chunks, chunk, (empty, empty, empty, kept)
  )
  saved = hidden, head, targets, is_needed, lses, kept
  out = columns.scatter_back(logprobs), columns.scatter_back(entropies)
  return out, saved


def _backward(temperature, logit_chunk, saved, grads):
  hidden, head, targets, is_needed, lses, kept = saved
  columns = _ColumnChunks(is_needed, logit_chunk)
  grads = jnp.where(is_needed, grads[0], 0.0)

  def chunk(i, carry):
    dhead, dhidden = carry
    x = columns.compact(hidden, i)
    if kept is None:
      logits = _logits(x, head, temperature)
    else:
      logits = jax.lax.dynamic_index_in_dim(kept, i, 0, keepdims=False)
    probs = jnp.exp(logits - columns.slice(lses, i)[..., None])
    target = columns.compact(targets, i)[..., None]
    # One-hot by comparison: on a CPU a scatter would cost more.
    is_target = target == jnp.arange(head.shape[0], dtype=jnp.int32)
    grad = columns.compact(grads, i)[..., None] / temperature
    dlogits = (is_target.astype(probs.dtype) - probs) * grad
    dlogits = dlogits.astype(hidden.dtype)
    # [E, V], since XLA's CPU backend copies no operand for this product.
    dhead = dhead + _einsum(
      "te,tv->ev", x.reshape(-1, x.shape[-1]), dlogits.reshape(-1, len(head))
    )
    new = jnp.einsum("blv,ve->ble", dlogits, head)
    return dhead, columns.put(dhidden, new, i)

  empty = jnp.zeros(head.shape[::-1], jnp.float32), jnp.zeros_like(hidden)
  dhead, dhidden = jax.lax.fori_loop(0, columns.num_chunks, chunk, empty)
  return columns.scatter_back(dhidden), dhead.T.astype(head.dtype), None, None


_logprobs_and_entropy = jax.custom_vjp(
  lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(4, 5)
)
_logprobs_and_entropy.defvjp(_forward, _backward)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _logits(hidden, head, temperature):
  return _einsum("ble,ve->blv", hidden, head) / temperature


class _ColumnChunks:
  """The needed tokens of `[B, L]`, in chunks of `c` columns.

  Columns of all rows, rather than runs of tokens, keep rows on their devices.
  """

  def __init__(self, is_needed: Bool[Array, "B L"], logit_chunk: int):
    batch, length = is_needed.shape
    most = min(logit_chunk // batch, layers.block_size(length))
    self.width = sharding.largest_divisor(length, most)
    self.shape = (length // self.width, batch, self.width)
    self.is_needed = is_needed
    self.order = jnp.argsort(~is_needed, axis=1, stable=True).astype(jnp.int32)
    fullest = is_needed.sum(axis=1, dtype=jnp.int32).max()
    self.num_chunks = (fullest + self.width - 1) // self.width

  def compact(self, x: Array, i: Array) -> Array:
    """Returns chunk `i` of `x [B, L, ...]` at token positions, compacted."""
    return _pick(x, self.slice(self.order, i))

  def slice(self, x: Array, i: Array) -> Array:
    """Returns chunk `i` of an `x` that is already compacted."""
    return jax.lax.dynamic_slice_in_dim(x, i * self.width, self.width, axis=1)

  def put(self, x: Array, new: Array, i: Array) -> Array:
    """Replaces chunk `i` of a compacted `x`."""
    return jax.lax.dynamic_update_slice_in_dim(x, new, i * self.width, axis=1)

  def scatter_back(self, x: Array) -> Array:
    """Scatters a compacted `x` back to token positions; 0 where not needed."""
    back = jnp.argsort(self.order, axis=1).astype(jnp.int32)
    needed = self.is_needed.reshape(*self.is_needed.shape, *(1,) * (x.ndim - 2))
    return jnp.where(needed, _pick(x, back), jnp.zeros((), x.dtype))


def _pick(x: Array, columns: Int[Array, "B c"]) -> Array:
  return jnp.take_along_axis(
    x, columns.reshape(*columns.shape, *(1,) * (x.ndim - 2)), axis=1
  )
