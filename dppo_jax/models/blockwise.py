"""Attention a pair of blocks at a time, for rows of any length, in plain XLA.

No pair of blocks is computed whose queries see none of its keys in any row:
neither those that follow the queries nor, where the ids of a packed row ascend,
those of other sequences.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import buckets

MASKED = -1e30  # finite, so that a wholly masked block stays a number


class _Row(NamedTuple):
  """What decides who sees whom, `[B, L]` in whole blocks.

  Attributes:
    segment: of each cell.
    prefix: the segment that it sees beside its own.
    seen: for each block of queries all blocks, those that it sees in any of the
      B rows first.
    num_seen: how many those are.
  """

  segment: Int[Array, "B L"]
  prefix: Int[Array, "B L"]
  seen: Int[Array, "n n"]
  num_seen: Int[Array, "n"]


def attention(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"],
) -> Float[Array, "B L H D"]:
  """As `models.attention.attention`."""
  batch, length, heads, dim = q.shape
  kv_heads = k.shape[2]
  block = buckets.block(length, most=128)
  end = buckets.round_up(length, block)
  pad = lambda x: jnp.pad(
    x, ((0, 0), (0, end - length), *((0, 0),) * (x.ndim - 2))
  )
  row = _row(pad(segment_ids), pad(prefix_ids), block)
  q = pad(q).reshape(batch, end, kv_heads, heads // kv_heads, dim)
  out = _attend(
    q.transpose(0, 2, 3, 1, 4) * jnp.asarray(dim**-0.5, q.dtype),
    pad(k).swapaxes(1, 2),
    pad(v).swapaxes(1, 2),
    row,
    block,
  )
  out = out.transpose(0, 3, 1, 2, 4).reshape(batch, end, heads, dim)
  return out[:, :length]


def _row(segment: Array, prefix: Array, block: int) -> _Row:
  """Finds the pairs of blocks that share a segment.

  Then an id of the queries lies between the least and the greatest of the keys.
  Where a row's ids do not ascend that may be too many blocks, never too few.
  """
  batch, length = segment.shape
  in_blocks = segment.reshape(batch, 1, -1, block)
  least, most = in_blocks.min(-1), in_blocks.max(-1)
  holds = lambda ids: (least <= ids[..., None]) & (ids[..., None] <= most)
  sees = (holds(segment) | holds(prefix)).reshape(
    batch, -1, block, length // block
  )
  sees = jnp.tril(sees.any((0, 2)))
  seen = jnp.argsort(~sees, axis=1, stable=True).astype(jnp.int32)
  return _Row(segment, prefix, seen, sees.sum(1, dtype=jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, row, block):
  """`[B, K, G, L, D]`, the queries scaled."""
  return _forward(q, k, v, row, block)[0]


def _forward(q, k, v, row, block):
  batch, kv_heads, group, length, _ = q.shape

  def query_block(_, i):
    q_i = _cut(q, i, block, 3)

    def key_block(n, carry):
      out, top, total = carry
      j = row.seen[i, n]
      scores = _scores(q_i, k, row, i, j, block)
      new_top = jnp.maximum(top, scores.max(-1))
      shrink = jnp.exp(top - new_top)
      share = jnp.exp(scores - new_top[..., None])
      new = jnp.einsum(
        "bhgqs,bhsd->bhgqd",
        share.astype(v.dtype),
        _cut(v, j, block, 2),
        preferred_element_type=jnp.float32,
      )
      return (
        out * shrink[..., None] + new,
        new_top,
        total * shrink + share.sum(-1),
      )

    shape = (batch, kv_heads, group, block)
    zeros = jnp.zeros(shape, jnp.float32)
    carry = (jnp.zeros(q_i.shape, jnp.float32), zeros + MASKED, zeros)
    out, top, total = jax.lax.fori_loop(0, row.num_seen[i], key_block, carry)
    return None, (
      (out / total[..., None]).astype(q.dtype),
      top + jnp.log(total),
    )

  blocks = jnp.arange(length // block, dtype=jnp.int32)
  _, (out, log_total) = jax.lax.scan(query_block, None, blocks)
  out = jnp.moveaxis(out, 0, 3).reshape(q.shape)
  return out, (q, k, v, row, out, log_total)


def _backward(block, saved, slope):
  q, k, v, row, out, log_total = saved

  def query_block(carry, xs):
    i, log_total = xs
    q_i, slope_i = _cut(q, i, block, 3), _cut(slope, i, block, 3)
    # The slope of a softmax: p * (dp - sum of p * dp), and that sum is this.
    product = slope_i.astype(jnp.float32) * _cut(out, i, block, 3)
    inner = product.sum(-1, keepdims=True)

    def key_block(n, carry):
      to_q, to_k, to_v = carry
      j = row.seen[i, n]
      k_j, v_j = _cut(k, j, block, 2), _cut(v, j, block, 2)
      share = jnp.exp(_scores(q_i, k, row, i, j, block) - log_total[..., None])
      to_share = _einsum("bhgqd,bhsd->bhgqs", slope_i, v_j)
      to_scores = (share * (to_share - inner)).astype(q.dtype)
      new_k = _einsum("bhgqs,bhgqd->bhsd", to_scores, q_i)
      new_v = _einsum("bhgqs,bhgqd->bhsd", share.astype(q.dtype), slope_i)
      new_q = _einsum("bhgqs,bhsd->bhgqd", to_scores, k_j)
      return to_q + new_q, _add(to_k, new_k, j), _add(to_v, new_v, j)

    to_q = jnp.zeros(q_i.shape, jnp.float32)
    to_q, *carry = jax.lax.fori_loop(
      0, row.num_seen[i], key_block, (to_q, *carry)
    )
    return tuple(carry), to_q.astype(q.dtype)

  blocks = jnp.arange(q.shape[3] // block, dtype=jnp.int32)
  zeros = jnp.zeros(k.shape, jnp.float32)
  (to_k, to_v), to_q = jax.lax.scan(
    query_block, (zeros, zeros), (blocks, log_total)
  )
  to_q = jnp.moveaxis(to_q, 0, 3).reshape(q.shape)
  return to_q, to_k.astype(k.dtype), to_v.astype(v.dtype), None


_attend.defvjp(_forward, _backward)

_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _scores(q_i, k, row: _Row, i, j, block: int) -> Float[Array, "B K G q s"]:
  """Float32 scores of query block `i` against key block `j`."""
  cells = jnp.arange(block, dtype=jnp.int32)
  key_segment = _cut(row.segment, j, block, 1)[:, None]
  is_seen = (_cut(row.segment, i, block, 1)[:, :, None] == key_segment) | (
    _cut(row.prefix, i, block, 1)[:, :, None] == key_segment
  )
  is_seen &= (i * block + cells)[:, None] >= j * block + cells
  scores = _einsum("bhgqd,bhsd->bhgqs", q_i, _cut(k, j, block, 2))
  return jnp.where(is_seen[:, None, None], scores, MASKED)


def _cut(x: Array, i: Array, block: int, axis: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis)


def _add(x: Array, new: Array, j: Array) -> Array:
  """`x [B, K, L, D]` with `new` added to its block `j`."""
  start = j * new.shape[2]
  old = jax.lax.dynamic_slice_in_dim(x, start, new.shape[2], 2)
  return jax.lax.dynamic_update_slice_in_dim(x, old + new, start, 2)
