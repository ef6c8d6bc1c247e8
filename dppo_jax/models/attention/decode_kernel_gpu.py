"""The decode kernel for NVIDIA GPUs; `decode_kernel` has its interface.

Programs divide the slots, the heads of keys and, if these are few, positions
(flash-decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The program of the
first new position also writes the new keys and values in place.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from dppo_jax.models.attention.blockwise import MASKED
from dppo_jax.models.attention.flash_kernel import dot

BLOCK = 64  # positions that a program reads at once; a cache has a multiple
_MIN_ROWS = 16  # of a product on tensor cores
_MIN_SPLIT = 256  # positions of one program
_MAX_SPLITS = 8  # programs of the longer of prompts and completions
_ENOUGH = 1024  # programs that need no splits: several on each multiprocessor


def attend(
  qkv, cache, prompts, layer, place, prompt, positions, count, oldest,
  num,
):  # fmt: skip
  """Computes `decode_kernel.attend` with `[B, K, n (H/K + 2), D]` inputs."""
  batch, kv_heads, rows, dim = qkv.shape
  queries = rows - 2 * num
  rows = max(_MIN_ROWS, pl.next_power_of_2(rows))
  lengths = [x.shape[3] for x in (prompts[0], cache[0])]
  split = max(_MIN_SPLIT, -(-max(lengths) // _MAX_SPLITS // BLOCK) * BLOCK)
  num_splits = [-(-length // split) for length in lengths]
  is_undivided = batch * kv_heads >= _ENOUGH
  if is_undivided:  # one program for prompt and completion
    split, num_splits = max(lengths) + BLOCK, [0, 1]
  shape = batch, kv_heads, sum(num_splits), queries
  kernel = functools.partial(
    _kernel,
    num=num,
    queries=queries,
    split=split,
    prompt_splits=num_splits[0],
    scale=dim**-0.5,
  )
  whole = pl.no_block_spec
  oldest = () if oldest is None else (oldest,)
  out, lse, *cache = pl.pallas_call(
    kernel,
    grid=shape[:3],
    in_specs=[
      *(whole,) * 5,
      (whole,) * len(oldest),
      pl.BlockSpec((None, None, rows, dim), lambda b, h, s: (b, h, 0, 0)),
      *(whole,) * 4,
    ],
    out_specs=[
      pl.BlockSpec(
        (None, None, None, rows, dim), lambda b, h, s: (b, h, s, 0, 0)
      ),
      pl.BlockSpec((None, None, None, rows), lambda b, h, s: (b, h, s, 0)),
      *(whole,) * 2,
    ],
    out_shape=[
      jax.ShapeDtypeStruct(
        (*shape, dim), qkv.dtype if is_undivided else jnp.float32
      ),
      jax.ShapeDtypeStruct(shape, jnp.float32),
      *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache),
    ],
    input_output_aliases={8 + len(oldest): 2, 9 + len(oldest): 3},
    compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
    name="decode_attention",
  )(layer[None], place, prompt, positions, count, oldest, qkv, *prompts, *cache)
  if is_undivided:
    return out[:, :, 0], tuple(cache)
  # In one fused operation: the splits are few.
  splits = range(shape[2])
  top = functools.reduce(jnp.maximum, [lse[:, :, i] for i in splits])
  weights = [jnp.exp(lse[:, :, i] - top)[..., None] for i in splits]
  out = sum(weights[i] * out[:, :, i] for i in splits) / sum(weights)
  return out.astype(qkv.dtype), tuple(cache)


def _add(carry, logits, is_seen, weigh):
  """Adds positions to a softmax; `weigh` multiplies values by weights."""
  out, row_max, denom = carry
  logits = jnp.where(is_seen, logits, MASKED)
  new_max = jnp.maximum(row_max, logits.max(1))
  rescale = jnp.exp(row_max - new_max)
  probs = jnp.where(is_seen, jnp.exp(logits - new_max[:, None]), 0.0)
  out = out * rescale[:, None] + weigh(probs)
  return out, new_max, denom * rescale + probs.sum(1)


def _kernel(
  layer, place, prompt, positions, count, oldest, qkv, prompt_keys,
  prompt_values, keys, values, out, lse, new_keys, new_values,
  *, num, queries, split, prompt_splits, scale,
):  # fmt: skip
  """Attends from one slot and head of keys to the positions of one split.

  Splits are of the prompt or of the own tokens; without `prompt_splits`, the
  only one is of both.
  """
  slot, head, index = (pl.program_id(axis) for axis in range(3))
  rows = jnp.arange(qkv.shape[0], dtype=jnp.int32)
  is_row = rows < queries
  query = plgpu.load(qkv, mask=is_row[:, None], other=0.0)
  own_index, newest, layer = index - prompt_splits, count[slot], layer[0]
  number = rows // (queries // num)  # of each query among the new tokens
  shared = positions[slot] - newest

  def attend_to(keys, values, row, start, end, before, carry):
    """Adds the places `start` to `end`, at positions `before` higher."""
    if oldest:
      first_seen = oldest[0][slot] - before + number
      skipped = jnp.maximum(oldest[0][slot] - before - start, 0) // BLOCK
      start += jnp.minimum(skipped * BLOCK, split)

    def block(i, carry):
      first = pl.multiple_of(start + i * BLOCK, BLOCK)
      at = pl.ds(first, BLOCK)
      logits = dot(query, keys[layer, row, head, at, :].T) * scale
      index = first + jnp.arange(BLOCK, dtype=jnp.int32)
      is_seen = (index < end)[None]
      if oldest:
        is_seen &= index[None] >= first_seen[:, None]
      block_values = values[layer, row, head, at, :]
      weigh = lambda probs: dot(probs.astype(values.dtype), block_values)
      return _add(carry, logits, is_seen, weigh)

    return jax.lax.fori_loop(0, pl.cdiv(end - start, BLOCK), block, carry)

  # New tokens come from the arguments: their cache may not be written yet.
  has_new = newest // split == own_index
  zeros = jnp.zeros(rows.shape, jnp.float32)
  carry = jnp.zeros(query.shape, jnp.float32), zeros + MASKED, zeros
  for i in range(num):
    key, value = (qkv[queries + x * num + i, :] for x in range(2))
    product = query.astype(jnp.float32) * key.astype(jnp.float32)
    logits = product.sum(1, keepdims=True) * scale
    weigh = lambda probs, value=value: probs * value.astype(jnp.float32)[None]
    is_seen = number >= i
    if oldest:
      is_seen &= positions[slot] + i >= oldest[0][slot] + number
    carry = _add(carry, logits, has_new & is_seen[:, None], weigh)
  start = index * split
  end = jnp.minimum(shared, start + split)
  reads_prompt = (own_index < 0) | (prompt_splits == 0)
  end = jnp.where(reads_prompt, jnp.maximum(end, start), start)
  row = prompt[slot]
  carry = attend_to(prompt_keys, prompt_values, row, start, end, 0, carry)
  start = own_index * split
  end = jnp.minimum(newest, start + split)
  end = jnp.where(own_index < 0, start, jnp.maximum(end, start))
  total, row_max, denom = attend_to(
    keys, values, place[slot], start, end, shared, carry
  )

  total = total / jnp.where(denom > 0, denom, 1.0)[:, None]
  plgpu.store(out, total.astype(out.dtype), mask=is_row[:, None])
  log_sum = jnp.where(denom > 0, row_max + jnp.log(denom), MASKED)
  plgpu.store(lse, log_sum, mask=is_row)

  for i in range(num):

    @pl.when(has_new & (newest + i < keys.shape[3]))
    def _(at=newest + i, row=queries + i):
      new_keys[layer, place[slot], head, at, :] = qkv[row, :]
      new_values[layer, place[slot], head, at, :] = qkv[row + num, :]
