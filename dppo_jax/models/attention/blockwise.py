"""Attention by pairs of blocks in plain XLA, for rows of any length.

A pair of blocks is skipped if its queries see none of its keys in any of the
rows that are handled at once: keys that follow the queries, padding and, where
the ids of a packed row ascend, other sequences. The softmax is accumulated
over key blocks as in flash attention (https://arxiv.org/abs/2205.14135), in
the backward pass recomputed from its saved log-sum-exp.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import sharding

MASKED = -1e30  # finite: the softmax of a fully masked block is no NaN
BLOCK = 64  # tokens; smaller blocks skip more, larger ones launch less


class _Blocks(NamedTuple):
  """Pairs of blocks that attend: `N` blocks of `c` tokens of `R` rows.

  A row has `n` blocks. `seen` holds, for each block, the indices of the blocks
  of the same rows, beginning with the `num_seen` that it sees in any row.
  """

  segment: Int[Array, "N R c"]
  prefix: Int[Array, "N R c"]
  window: tuple[Int[Array, "N R c"], Int[Array, "N R c"]] | None
  start: Int[Array, "N"]  # index of the first token in its row
  seen: Int[Array, "N n"]
  num_seen: Int[Array, "N"]


def attention(
  q, k, v, segment_ids, prefix_ids=None, window=None, rows_at_once=1
):
  """Computes `models.attention.attention`.

  Args:
    rows_at_once: rows computed together, a divisor of `B`; None is `B`. If one
      of them sees a pair of blocks, the pair is computed for all of them.
  """
  batch, length, heads, dim = q.shape
  kv_heads, rows = k.shape[2], rows_at_once or batch
  prefix_ids = segment_ids if prefix_ids is None else prefix_ids
  block = min(length, BLOCK)
  end = sharding.round_up(length, block)

  def in_blocks(x):
    x = jnp.pad(x, ((0, 0), (0, end - length), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(-1, rows, end // block, block, *x.shape[2:])
    return x.swapaxes(1, 2).reshape(-1, rows, block, *x.shape[4:])

  q = in_blocks(q * jnp.asarray(dim**-0.5, q.dtype))
  q = q.reshape(*q.shape[:3], kv_heads, heads // kv_heads, dim)
  out = _attend(
    q.transpose(0, 1, 3, 4, 2, 5),
    in_blocks(k).swapaxes(2, 3),
    in_blocks(v).swapaxes(2, 3),
    _blocks(
      in_blocks(segment_ids),
      in_blocks(prefix_ids),
      jax.tree.map(in_blocks, window),
      end // block,
    ),
  )
  out = out.transpose(0, 1, 4, 2, 3, 5)
  out = out.reshape(-1, end // block, rows, block, heads, dim)
  return out.swapaxes(1, 2).reshape(batch, end, heads, dim)[:, :length]


def dense(q, k, v, segment_ids, prefix_ids=None, window=None):
  """Computes `models.attention.attention` with all logits of a row at once."""
  prefix_ids = segment_ids if prefix_ids is None else prefix_ids
  is_seen = segment_ids[:, :, None] == segment_ids[:, None]
  is_seen |= prefix_ids[:, :, None] == segment_ids[:, None]
  if window is not None:
    position, oldest = window
    is_seen &= position[:, None] >= oldest[:, :, None]
  return jax.nn.dot_product_attention(
    q, k, v, mask=is_seen[:, None], is_causal=True, implementation="xla"
  )


def _blocks(
  segment: Int[Array, "N R c"],
  prefix: Int[Array, "N R c"],
  window: tuple[Int[Array, "N R c"], Int[Array, "N R c"]] | None,
  per_row: int,
) -> _Blocks:
  """Finds the pairs of blocks that share a segment.

  The test is whether an id of the queries lies between the least and the
  greatest id of the keys: if a row's ids do not ascend, some pairs share none.
  With a window, some query must see the last position of the keys.
  """
  by_row = lambda x: x.reshape(-1, per_row, *x.shape[1:])
  least, most = by_row(segment.min(-1)), by_row(segment.max(-1))

  def holds(ids):
    ids = by_row(ids)[:, :, None]
    is_inside = least[:, None, ..., None] <= ids
    is_inside &= ids <= most[:, None, ..., None]
    return (is_inside & (ids > 0)).any((-2, -1))

  # Each block sees itself in any case, so that padding gets finite numbers.
  is_itself = jnp.eye(per_row, dtype=bool)
  sees = holds(segment) | holds(prefix)
  if window is not None:
    position, oldest = map(by_row, window)
    sees &= (position.max(-1)[:, None] >= oldest.min(-1)[:, :, None]).any(-1)
  sees = jnp.tril(sees | is_itself)
  seen = jnp.argsort(~sees, axis=2, stable=True).astype(jnp.int32)
  first = jnp.arange(0, len(segment), per_row, dtype=jnp.int32)
  return _Blocks(
    segment,
    prefix,
    window,
    _index(segment) % per_row * segment.shape[2],
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
      out, row_max, denom = carry
      j = blocks.seen[i, n]
      logits = _logits(q_i, k[j], blocks, i, j)
      new_max = jnp.maximum(row_max, logits.max(-1))
      rescale = jnp.exp(row_max - new_max)
      probs = jnp.exp(logits - new_max[..., None])
      new = _einsum("rhgqs,rhsd->rhgqd", probs.astype(v.dtype), v[j])
      out = out * rescale[..., None] + new
      return out, new_max, denom * rescale + probs.sum(-1)

    zeros = jnp.zeros(q_i.shape[:-1], jnp.float32)
    carry = (jnp.zeros(q_i.shape, jnp.float32), zeros + MASKED, zeros)
    carry = jax.lax.fori_loop(0, blocks.num_seen[i], key_block, carry)
    out, row_max, denom = carry
    out = (out / denom[..., None]).astype(q.dtype)
    return None, (out, row_max + jnp.log(denom))

  _, (out, lse) = jax.lax.scan(query_block, None, (_index(q), q))
  return out, (q, k, v, blocks, out, lse)


def _backward(saved, grad):
  q, k, v, blocks, out, lse = saved

  def query_block(carry, xs):
    i, q_i, out_i, lse_i, grad_i = xs
    # The gradient of a softmax is p * (dp - sum of p * dp); delta is that sum.
    product = grad_i.astype(jnp.float32) * out_i.astype(jnp.float32)
    delta = product.sum(-1, keepdims=True)

    def key_block(n, carry):
      dq, dk, dv = carry
      j = blocks.seen[i, n]
      logits = _logits(q_i, k[j], blocks, i, j)
      probs = jnp.exp(logits - lse_i[..., None])
      dprobs = _einsum("rhgqd,rhsd->rhgqs", grad_i, v[j])
      dlogits = (probs * (dprobs - delta)).astype(q.dtype)
      new_dk = _einsum("rhgqs,rhgqd->rhsd", dlogits, q_i)
      new_dv = _einsum("rhgqs,rhgqd->rhsd", probs.astype(q.dtype), grad_i)
      new_dq = _einsum("rhgqs,rhsd->rhgqd", dlogits, k[j])
      return dq + new_dq, dk.at[j].add(new_dk), dv.at[j].add(new_dv)

    carry = jnp.zeros(q_i.shape, jnp.float32), *carry
    dq, *carry = jax.lax.fori_loop(0, blocks.num_seen[i], key_block, carry)
    return tuple(carry), dq.astype(q.dtype)

  zeros = jnp.zeros(k.shape, jnp.float32)
  xs = _index(q), q, out, lse, grad
  (dk, dv), dq = jax.lax.scan(query_block, (zeros, zeros), xs)
  return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)

_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
_index = lambda x: jnp.arange(len(x), dtype=jnp.int32)


def _logits(q_i, k_j, blocks: _Blocks, i, j) -> Float[Array, "R K G q s"]:
  """Float32 logits of query block `i` against key block `j`."""
  offset = jnp.arange(q_i.shape[-2], dtype=jnp.int32)
  is_past = (blocks.start[i] + offset)[:, None] >= blocks.start[j] + offset
  keys = blocks.segment[j][:, None]
  is_seen = blocks.segment[i][..., None] == keys
  is_seen |= blocks.prefix[i][..., None] == keys
  if blocks.window is not None:
    position, oldest = blocks.window
    is_seen &= position[j][:, None] >= oldest[i][..., None]
  logits = _einsum("rhgqd,rhsd->rhgqs", q_i, k_j)
  return jnp.where((is_seen & is_past)[:, None, None], logits, MASKED)
