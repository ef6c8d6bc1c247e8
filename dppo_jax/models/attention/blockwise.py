"""Attention by pairs of blocks in plain XLA, for rows of any length.

A pair of blocks is skipped if its queries see none of its keys in any of the
rows that are handled at once: keys that follow the queries, and keys whose
interval of queries ends before them. The softmax is accumulated
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

  end: Int[Array, "N R c"]
  window: tuple[Int[Array, "N R c"], Int[Array, "N R c"]] | None
  start: Int[Array, "N"]  # index of the first token in its row
  seen: Int[Array, "N n"]
  num_seen: Int[Array, "N"]


def attention(q, k, v, end, window=None, rows_at_once=1):
  """Computes `models.attention.attention`.

  Args:
    rows_at_once: rows computed together, a divisor of `B`; None is `B`. If one
      of them sees a pair of blocks, the pair is computed for all of them.
  """
  batch, length, heads, dim = q.shape
  kv_heads, rows = k.shape[2], rows_at_once or batch
  block = min(length, BLOCK)
  padded = sharding.round_up(length, block)

  def in_blocks(x):
    x = jnp.pad(x, ((0, 0), (0, padded - length), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(-1, rows, padded // block, block, *x.shape[2:])
    return x.swapaxes(1, 2).reshape(-1, rows, block, *x.shape[4:])

  q = in_blocks(q * jnp.asarray(dim**-0.5, q.dtype))
  q = q.reshape(*q.shape[:3], kv_heads, heads // kv_heads, dim)
  out = _attend(
    q.transpose(0, 1, 3, 4, 2, 5),
    in_blocks(k).swapaxes(2, 3),
    in_blocks(v).swapaxes(2, 3),
    _blocks(in_blocks(end), jax.tree.map(in_blocks, window), padded // block),
  )
  out = out.transpose(0, 1, 4, 2, 3, 5)
  out = out.reshape(-1, padded // block, rows, block, heads, dim)
  return out.swapaxes(1, 2).reshape(batch, padded, heads, dim)[:, :length]


def _blocks(
  end: Int[Array, "N R c"],
  window: tuple[Int[Array, "N R c"], Int[Array, "N R c"]] | None,
  per_row: int,
) -> _Blocks:
  """Finds the pairs of blocks that attend.

  The first query must come before the largest end of the keys. With a window,
  some query must see the last position of the keys.
  """
  by_row = lambda x: x.reshape(-1, per_row, *x.shape[1:])
  start = jnp.arange(per_row, dtype=jnp.int32) * end.shape[2]
  last = by_row(end.max((1, 2)))
  sees = start[:, None] < last[:, None]
  if window is not None:
    position, oldest = map(by_row, window)
    sees &= (position.max(-1)[:, None] >= oldest.min(-1)[:, :, None]).any(-1)
  # Each block sees itself in any case, so that padding gets finite numbers.
  sees = jnp.tril(sees | jnp.eye(per_row, dtype=bool))
  seen = jnp.argsort(~sees, axis=2, stable=True).astype(jnp.int32)
  first = jnp.arange(0, len(end), per_row, dtype=jnp.int32)
  return _Blocks(
    end,
    window,
    _index(end) % per_row * end.shape[2],
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
  query, key = (blocks.start[i] + offset)[:, None], blocks.start[j] + offset
  is_seen = (key <= query) & (query < blocks.end[j][:, None])
  if blocks.window is not None:
    position, oldest = blocks.window
    is_seen &= position[j][:, None] >= oldest[i][..., None]
  logits = _einsum("rhgqd,rhsd->rhgqs", q_i, k_j)
  return jnp.where(is_seen[:, None, None], logits, MASKED)
