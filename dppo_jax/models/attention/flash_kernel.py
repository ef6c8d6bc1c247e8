"""Attention over packed rows by Pallas kernels for NVIDIA GPUs.

FlashAttention-2 (https://arxiv.org/abs/2307.08691) with the masks of packed
rows: programs divide rows, heads and blocks of queries (backward also of keys),
and skip most blocks that share no sequence.
"""

import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Int

from dppo_jax.models.attention.blockwise import MASKED

_BLOCK = 64  # tokens; at most
_NUMBERS = 2**13  # in one block of one head; at most


def attention(
  q, k, v, segment_ids, prefix_ids=None, *, ranges=None, window=None
):
  """Computes `models.attention.attention`.

  Rows are multiples of 16 tokens, heads have 16, 32, 64, 128 or 256 numbers.

  Args:
    ranges: result of `block_ranges`, computed here if not given.
    window: see `models.attention.attention`.
  """
  ranges = ranges or block_ranges(segment_ids, prefix_ids, q.shape[-1])
  prefix_ids = segment_ids if prefix_ids is None else prefix_ids
  masks = segment_ids, prefix_ids, *(window or ())
  return _attention(q, k, v, (masks, *ranges))


def block_ranges(
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"] | None,
  head_dim: int,
) -> tuple[Int[Array, "B n"], ...]:
  """Returns the blocks that may share a sequence, in four numbers for each.

  A block of queries reads the blocks of keys from `first` to itself, except
  the blocks from `stop` up to `resume`: between a prompt and its completion
  there may be other completions. Blocks of queries up to `last` read a block of
  keys. Ids that ascend, with padding at the end as in packed rows, make the
  ranges tight.
  """
  prefix_ids = segment_ids if prefix_ids is None else prefix_ids
  block = _block_size(segment_ids.shape[1], head_dim)
  by_block = lambda x: x.reshape(len(x), -1, block)

  def bounds(ids):  # of each block, without padding
    no_padding = jnp.where(ids > 0, ids, jnp.iinfo(ids.dtype).max)
    return by_block(no_padding).min(-1)[..., None], by_block(ids).max(-1)

  least, most = bounds(segment_ids)
  overlaps = lambda low, high: (
    (low <= most[:, None]) & (high[..., None] >= least.swapaxes(1, 2))
  )
  index = jnp.arange(most.shape[1], dtype=jnp.int32)
  sees = overlaps(least, most) | overlaps(*bounds(prefix_ids))
  sees |= index == index[:, None]  # so that padding gets finite numbers
  sees &= index <= index[:, None]
  least_where = lambda x: jnp.where(x, index, len(index)).min(2)
  first = least_where(sees)
  stop = least_where(~sees & (index > first[..., None]))
  resume = least_where(sees & (index > stop[..., None]))
  stop, resume = (jnp.minimum(x, index + 1) for x in (stop, resume))
  last = jnp.where(sees, index[:, None], 0).max(1)
  return first, stop, resume, last.astype(jnp.int32)


def _block_size(length: int, head_dim: int) -> int:
  return math.gcd(length, min(_BLOCK, _NUMBERS // head_dim))


@jax.custom_vjp
def _attention(q, k, v, ids):
  return _forward(q, k, v, ids)[0]


def _forward(q, k, v, ids):
  batch, length, heads, dim = q.shape
  out, lse = _call(
    _forward_kernel,
    (q, k, v, *ids),
    [q, jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)],
    grid=(length // _block_size(length, dim), heads, batch),
  )
  return out, (q, k, v, ids, out, lse)


def _backward(saved, grad):
  q, k, v, ids, out, lse = saved
  batch, length, heads, dim = q.shape
  num_blocks = length // _block_size(length, dim)
  # The gradient of a softmax is p * (dp - sum of p * dp); delta is that sum.
  delta = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
  arrays = q, k, v, *ids, grad, lse, delta.swapaxes(1, 2)
  call = functools.partial(_call, num_warps=8)
  (dq,) = call(_dq_kernel, arrays, [q], grid=(num_blocks, heads, batch))
  grid = num_blocks, k.shape[2], batch
  dk, dv = call(_dkv_kernel, arrays, [k, v], grid=grid)
  return dq, dk, dv, None


_attention.defvjp(_forward, _backward)


def _call(kernel, arrays, outputs, grid, num_warps=4):
  q, k = arrays[:2]
  kernel = functools.partial(
    kernel,
    block=_block_size(q.shape[1], q.shape[-1]),
    group=q.shape[2] // k.shape[2],
    scale=q.shape[-1] ** -0.5,
  )
  return pl.pallas_call(
    kernel,
    grid=grid,
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
    compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=2),
    name=f"attention{kernel.func.__name__}",
  )(*arrays)


def dot(a, b, **kwargs):
  """Multiplies blocks in a kernel; float32 without rounding its inputs."""
  exact = {"allow_tf32": False} if a.dtype == jnp.float32 else {}
  return plgpu.dot(a, b, **exact, **kwargs)


def _probs(q, k, masks, row, i, j, block, scale, shift=None):
  """Returns logits of a block of queries and keys, or exp(logits - shift)."""
  offset = jnp.arange(block, dtype=jnp.int32)
  queries, keys = pl.ds(i * block, block), pl.ds(j * block, block)
  segments, prefixes, *window = masks
  key_ids = segments[row, keys][None]
  is_seen = segments[row, queries][:, None] == key_ids
  is_seen |= prefixes[row, queries][:, None] == key_ids
  if window:
    position, oldest = window
    is_seen &= position[row, keys][None] >= oldest[row, queries][:, None]
  is_seen &= (i * block + offset)[:, None] >= (j * block + offset)[None]
  logits = dot(q, k, trans_b=True) * scale
  if shift is not None:
    logits = jnp.exp(logits - shift[:, None])
  return jnp.where(is_seen, logits, MASKED if shift is None else 0.0)


def _blocks_of_keys(first, stop, resume, row, i):
  """Returns the number of blocks that queries read, and a map to them."""
  start, end, gap = first[row, i], stop[row, i], resume[row, i] - stop[row, i]
  at = lambda n: start + n + jnp.where(start + n < end, 0, gap)
  return i + 1 - gap - start, at


def _forward_kernel(
  q, k, v, masks, first, stop, resume, last, out, lse,
  *, block, group, scale,
):  # fmt: skip
  i, head, row = (pl.program_id(axis) for axis in range(3))
  queries = pl.ds(i * block, block)
  query = q[row, queries, head, :]
  number, block_at = _blocks_of_keys(first, stop, resume, row, i)

  def step(n, carry):
    j = block_at(n)
    total, row_max, denom = carry
    keys = row, pl.ds(j * block, block), head // group
    logits = _probs(query, k[*keys, :], masks, row, i, j, block, scale)
    new_max = jnp.maximum(row_max, logits.max(1))
    rescale = jnp.exp(row_max - new_max)
    probs = jnp.exp(logits - new_max[:, None])
    new = dot(probs.astype(v.dtype), v[*keys, :])
    total = total * rescale[:, None] + new
    return total, new_max, denom * rescale + probs.sum(1)

  zeros = jnp.zeros(block, jnp.float32)
  carry = jnp.zeros(query.shape, jnp.float32), zeros + MASKED, zeros
  total, row_max, denom = jax.lax.fori_loop(0, number, step, carry)
  out[row, queries, head, :] = (total / denom[:, None]).astype(out.dtype)
  lse[row, head, queries] = row_max + jnp.log(denom)


def _dq_kernel(
  q, k, v, masks, first, stop, resume, last, grad, lse, delta, dq,
  *, block, group, scale,
):  # fmt: skip
  i, head, row = (pl.program_id(axis) for axis in range(3))
  at = pl.ds(i * block, block)
  query, grad = q[row, at, head, :], grad[row, at, head, :]
  lse, delta = lse[row, head, at], delta[row, head, at]

  number, block_at = _blocks_of_keys(first, stop, resume, row, i)

  def step(n, total):
    j = block_at(n)
    keys = row, pl.ds(j * block, block), head // group
    key = k[*keys, :]
    probs = _probs(query, key, masks, row, i, j, block, scale, shift=lse)
    dprobs = dot(grad, v[*keys, :], trans_b=True)
    dlogits = probs * (dprobs - delta[:, None]) * scale
    return total + dot(dlogits.astype(key.dtype), key)

  zeros = jnp.zeros(query.shape, jnp.float32)
  total = jax.lax.fori_loop(0, number, step, zeros)
  dq[row, at, head, :] = total.astype(dq.dtype)


def _dkv_kernel(
  q, k, v, masks, first, stop, resume, last, grad, lse, delta,
  dk, dv, *, block, group, scale,
):  # fmt: skip
  j, kv_head, row = (pl.program_id(axis) for axis in range(3))
  at = row, pl.ds(j * block, block), kv_head
  key, value = k[*at, :], v[*at, :]
  num_blocks = last[row, j] + 1 - j

  def step(n, carry):
    dkey, dvalue = carry
    i, head = j + n % num_blocks, kv_head * group + n // num_blocks
    queries = pl.ds(i * block, block)
    query, grads = q[row, queries, head, :], grad[row, queries, head, :]
    shift = lse[row, head, queries]
    probs = _probs(query, key, masks, row, i, j, block, scale, shift)
    dvalue += dot(probs.astype(grads.dtype), grads, trans_a=True)
    dprobs = dot(grads, value, trans_b=True)
    dlogits = probs * (dprobs - delta[row, head, queries][:, None]) * scale
    dkey += dot(dlogits.astype(query.dtype), query, trans_a=True)
    return dkey, dvalue

  zeros = jnp.zeros(key.shape, jnp.float32)
  sums = jax.lax.fori_loop(0, num_blocks * group, step, (zeros, zeros))
  dk[*at, :], dv[*at, :] = (x.astype(dk.dtype) for x in sums)
