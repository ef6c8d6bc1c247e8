"""Attention a pair of blocks at a time, for rows of any length, in plain XLA.

No pair of blocks is computed whose queries see none of its keys in any of the
rows that are handled at once: neither keys that follow the queries nor, where
the ids of a packed row ascend, those of other sequences, nor padding.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import buckets

MASKED = -1e30  # finite, so that a wholly masked block stays a number
BLOCK = 64  # cells; with less, more is skipped, with more, less is started


class _Blocks(NamedTuple):
  """Who sees whom: `N` blocks of `R` rows side by side, `c` cells of each.

  A row has `n` blocks.

  Attributes:
    segment: of each cell.
    prefix: the segment that it sees beside its own.
    start: the first cell's place in its row.
    seen: for each block those of the same rows, by their place among the `N`,
      first those that it sees in any of the rows.
    num_seen: how many those are.
  """

  segment: Int[Array, "N R c"]
  prefix: Int[Array, "N R c"]
  start: Int[Array, "N"]
  seen: Int[Array, "N n"]
  num_seen: Int[Array, "N"]


def attention(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"],
  together: int = 1,
) -> Float[Array, "B L H D"]:
  """As `models.attention.attention`.

  Args:
    together: rows that are handled at once, a divisor of `B`. What one of them
      sees is computed for all: more than 1 is for rows that are alike.
  """
  batch, length, heads, dim = q.shape
  kv_heads = k.shape[2]
  block = min(length, BLOCK)
  end = buckets.round_up(length, block)

  def in_blocks(x):
    x = jnp.pad(x, ((0, 0), (0, end - length), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(-1, together, end // block, block, *x.shape[2:])
    return x.swapaxes(1, 2).reshape(-1, together, block, *x.shape[4:])

  q = in_blocks(q * jnp.asarray(dim**-0.5, q.dtype))
  q = q.reshape(*q.shape[:3], kv_heads, heads // kv_heads, dim)
  out = _attend(
    q.transpose(0, 1, 3, 4, 2, 5),
    in_blocks(k).swapaxes(2, 3),
    in_blocks(v).swapaxes(2, 3),
    _blocks(in_blocks(segment_ids), in_blocks(prefix_ids), end // block),
  )
  out = out.transpose(0, 1, 4, 2, 3, 5)
  out = out.reshape(-1, end // block, together, block, heads, dim)
  return out.swapaxes(1, 2).reshape(batch, end, heads, dim)[:, :length]


def _blocks(
  segment: Int[Array, "N R c"], prefix: Int[Array, "N R c"], per_row: int
) -> _Blocks:
  """Finds the pairs of blocks that share a segment.

  Then an id of the queries lies between the least and the greatest of the keys.
  Where a row's ids do not ascend that may be too many blocks, never too few.
  """
  by_row = lambda x: x.reshape(-1, per_row, *x.shape[1:])
  least, most = by_row(segment.min(-1)), by_row(segment.max(-1))

  def holds(ids):
    ids = by_row(ids)[:, :, None]
    is_inside = (least[:, None, ..., None] <= ids) & (
      ids <= most[:, None, ..., None]
    )
    return (is_inside & (ids > 0)).any((-2, -1))

  # Itself in any case: what padding sees must be a number too.
  own = jnp.eye(per_row, dtype=bool)
  sees = jnp.tril(holds(segment) | holds(prefix) | own)
  seen = jnp.argsort(~sees, axis=2, stable=True).astype(jnp.int32)
  first = jnp.arange(0, segment.shape[0], per_row, dtype=jnp.int32)
  place = jnp.arange(segment.shape[0], dtype=jnp.int32) % per_row
  return _Blocks(
    segment,
    prefix,
    place * segment.shape[2],
    (seen + first[:, None, None]).reshape(-1, per_row),
    sees.sum(2, dtype=jnp.int32).reshape(-1),
  )


@jax.custom_vjp
def _attend(q, k, v, blocks):
  """`q [N, R, K, G, c, D]`, scaled; `k` and `v` `[N, R, K, c, D]`."""
  return _forward(q, k, v, blocks)[0]


def _forward(q, k, v, blocks):
  def query_block(_, xs):
    i, q_i = xs

    def key_block(n, carry):
      out, top, total = carry
      j = blocks.seen[i, n]
      scores = _scores(q_i, k[j], blocks, i, j)
      new_top = jnp.maximum(top, scores.max(-1))
      shrink = jnp.exp(top - new_top)
      share = jnp.exp(scores - new_top[..., None])
      new = _einsum("rhgqs,rhsd->rhgqd", share.astype(v.dtype), v[j])
      return (
        out * shrink[..., None] + new,
        new_top,
        total * shrink + share.sum(-1),
      )

    zeros = jnp.zeros(q_i.shape[:-1], jnp.float32)
    carry = (jnp.zeros(q_i.shape, jnp.float32), zeros + MASKED, zeros)
    out, top, total = jax.lax.fori_loop(0, blocks.num_seen[i], key_block, carry)
    return None, (
      (out / total[..., None]).astype(q.dtype),
      top + jnp.log(total),
    )

  _, (out, log_total) = jax.lax.scan(query_block, None, (_index(q), q))
  return out, (q, k, v, blocks, out, log_total)


def _backward(saved, slope):
  q, k, v, blocks, out, log_total = saved

  def query_block(carry, xs):
    i, q_i, out_i, log_total_i, slope_i = xs
    # The slope of a softmax: p * (dp - sum of p * dp), and that sum is this.
    product = slope_i.astype(jnp.float32) * out_i.astype(jnp.float32)
    inner = product.sum(-1, keepdims=True)

    def key_block(n, carry):
      to_q, to_k, to_v = carry
      j = blocks.seen[i, n]
      scores = _scores(q_i, k[j], blocks, i, j)
      share = jnp.exp(scores - log_total_i[..., None])
      to_share = _einsum("rhgqd,rhsd->rhgqs", slope_i, v[j])
      to_scores = (share * (to_share - inner)).astype(q.dtype)
      new_k = _einsum("rhgqs,rhgqd->rhsd", to_scores, q_i)
      new_v = _einsum("rhgqs,rhgqd->rhsd", share.astype(q.dtype), slope_i)
      new_q = _einsum("rhgqs,rhsd->rhgqd", to_scores, k[j])
      return to_q + new_q, to_k.at[j].add(new_k), to_v.at[j].add(new_v)

    to_q = jnp.zeros(q_i.shape, jnp.float32)
    to_q, *carry = jax.lax.fori_loop(
      0, blocks.num_seen[i], key_block, (to_q, *carry)
    )
    return tuple(carry), to_q.astype(q.dtype)

  zeros = jnp.zeros(k.shape, jnp.float32)
  (to_k, to_v), to_q = jax.lax.scan(
    query_block, (zeros, zeros), (_index(q), q, out, log_total, slope)
  )
  return to_q, to_k.astype(k.dtype), to_v.astype(v.dtype), None


_attend.defvjp(_forward, _backward)

_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _index(x: Array) -> Int[Array, "N"]:
  return jnp.arange(x.shape[0], dtype=jnp.int32)


def _scores(q_i, k_j, blocks: _Blocks, i, j) -> Float[Array, "R K G q s"]:
  """Float32 scores of query block `i` against key block `j`."""
  cells = jnp.arange(q_i.shape[-2], dtype=jnp.int32)
  is_past = (blocks.start[i] + cells)[:, None] >= blocks.start[j] + cells
  keys = blocks.segment[j][:, None]
  is_seen = (blocks.segment[i][..., None] == keys) | (
    blocks.prefix[i][..., None] == keys
  )
  scores = _einsum("rhgqd,rhsd->rhgqs", q_i, k_j)
  return jnp.where((is_seen & is_past)[:, None, None], scores, MASKED)
