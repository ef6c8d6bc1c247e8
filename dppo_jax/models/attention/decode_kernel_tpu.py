"""The decode kernel for TPUs; `decode_kernel` has its interface.

One slot's positions are read in blocks of all heads of keys, one after the
other: first the prompt's, then its own. Blocks that a slot does not need are
neither fetched nor computed. New keys and values are written in place, in
aligned tiles that are read, changed and written back meanwhile.
"""

import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from dppo_jax import sharding
from dppo_jax.models.attention.blockwise import MASKED

_div = jax.lax.div  # of numbers from 0: `//` would need a branch for others

BLOCK = 128  # a cache has a multiple of it
_MOST = 256  # positions that are read at once
_BLOCK_BYTES = 2**20  # of their keys, at most


def attend(
  qkv, cache, prompts, layer, place, prompt, positions, count, oldest,
  num, interpret,
):  # fmt: skip
  """Computes `decode_kernel.attend` with `[B, K, n (H/K + 2), D]` inputs."""
  batch, kv_heads, rows, dim = qkv.shape
  queries = rows - 2 * num
  new = jnp.split(qkv, [queries, queries + num], 2)
  row_bytes = kv_heads * dim * qkv.dtype.itemsize
  most = min(_MOST, max(BLOCK, pl.next_power_of_2(_BLOCK_BYTES // row_bytes)))
  sizes = [math.gcd(x.shape[3], most) for x in (prompts[0], cache[0])]
  num_blocks = [
    x.shape[3] // size
    for x, size in zip((prompts[0], cache[0]), sizes, strict=True)
  ]
  if oldest is None:  # the last new token sees position 0, too
    oldest = jnp.full_like(count, -num)
  tile = 32 // qkv.dtype.itemsize
  window = sharding.round_up(tile - 1 + num, tile)

  def prompt_block(slot, i, layer, place, prompt, *where):
    start, end = _ranges(slot, *where)[0]
    last = _div(jnp.maximum(end - 1, 0), sizes[0])
    i = jnp.clip(i, _div(start, sizes[0]), last)
    return layer[0], prompt[slot], 0, i, 0

  def own_block(slot, i, layer, place, prompt, *where):
    start, end = _ranges(slot, *where)[1]
    last = _div(jnp.maximum(end - 1, 0), sizes[1])
    i = jnp.clip(i - num_blocks[0], _div(start, sizes[1]), last)
    return layer[0], place[slot], 0, i, 0

  of_slot = lambda rows: pl.BlockSpec(
    (None, kv_heads, rows, dim), lambda slot, *_: (slot, 0, 0, 0)
  )
  block = lambda size, index: pl.BlockSpec(
    (None, None, kv_heads, size, dim), index
  )
  whole = pl.BlockSpec(memory_space=pl.ANY)
  total = pltpu.VMEM((kv_heads, queries, dim), jnp.float32)
  of_row = pltpu.VMEM((kv_heads, queries, 1), jnp.float32)
  windows = pltpu.VMEM((2, kv_heads, window, dim), qkv.dtype)
  out, *cache = pl.pallas_call(
    functools.partial(
      _kernel, num=num, sizes=sizes, prompt_blocks=num_blocks[0], tile=tile
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=6,
      grid=(batch, sum(num_blocks)),
      in_specs=[
        *map(of_slot, (queries, num, num)),
        *(block(sizes[0], prompt_block),) * 2,
        *(block(sizes[1], own_block),) * 2,
      ],
      out_specs=[of_slot(queries), *(whole,) * 2],
      scratch_shapes=[
        total, of_row, of_row, windows, pltpu.SemaphoreType.DMA((2,)),
      ],  # fmt: skip
    ),
    out_shape=[
      jax.ShapeDtypeStruct((batch, kv_heads, queries, dim), qkv.dtype),
      *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache),
    ],
    input_output_aliases={11: 1, 12: 2},
    # Slots are divided between the cores of a chip that has two.
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    interpret=interpret,
    name="decode_attention",
  )(
    layer[None], place, prompt, positions, count, oldest,
    *new, *prompts, *cache,
  )  # fmt: skip
  return out, tuple(cache)


def _ranges(slot, positions, count, oldest):
  """Returns the places of the prompt and the own ones that a slot may see."""
  shared = positions[slot] - count[slot]
  before = (0, shared), (shared, count[slot])
  return [(jnp.maximum(oldest[slot] - x, 0), end) for x, end in before]


def _kernel(
  layer, place, prompt, positions, count, oldest, query, new_key, new_value,
  prompt_keys, prompt_values, own_keys, own_values, out, keys, values,
  total, row_max, denom, windows, semaphores,
  *, num, sizes, prompt_blocks, tile,
):  # fmt: skip
  """Attends from one slot to one block of positions, all heads at once."""
  slot, step = pl.program_id(0), pl.program_id(1)
  newest = count[slot]
  shared = positions[slot] - newest
  exact = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
  einsum = functools.partial(
    jnp.einsum, precision=exact, preferred_element_type=jnp.float32
  )

  def add(keys, values, first, end, before, is_causal=False):
    """Adds the places from `first`, at positions `before` higher."""
    logits = einsum("kgd,ksd->kgs", query[...], keys[...])
    logits *= query.shape[-1] ** -0.5
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    number = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    # Of each query among the new tokens.
    number = _div(number, query.shape[1] // num)
    is_seen = first + index < end
    is_seen &= before + first + index >= oldest[slot] + number
    if is_causal:
      is_seen &= index <= number
    logits = jnp.where(is_seen, logits, MASKED)
    new_max = jnp.maximum(row_max[...], logits.max(-1, keepdims=True))
    rescale = jnp.exp(row_max[...] - new_max)
    probs = jnp.where(is_seen, jnp.exp(logits - new_max), 0.0)
    weighed = einsum("kgs,ksd->kgd", probs.astype(values.dtype), values[...])
    total[...] = total[...] * rescale + weighed
    denom[...] = denom[...] * rescale + probs.sum(-1, keepdims=True)
    row_max[...] = new_max

  # Of new positions beyond the cache, none is in its last window.
  length, size = keys.shape[3], windows.shape[2]
  start = jnp.minimum(_div(newest, tile) * tile, length - size)
  at = pl.ds(pl.multiple_of(start, tile), size)
  places = [x.at[layer[0], place[slot], :, at, :] for x in (keys, values)]

  def copies(is_write):
    pairs = [(x, windows.at[i]) for i, x in enumerate(places)]
    pairs = [pair[::-1] if is_write else pair for pair in pairs]
    return [
      pltpu.make_async_copy(*pair, semaphores.at[i])
      for i, pair in enumerate(pairs)
    ]

  @pl.when(step == 0)
  def _():
    for copy in copies(is_write=False):
      copy.start()
    total[...] = jnp.zeros_like(total)
    row_max[...] = jnp.full_like(row_max, MASKED)
    denom[...] = jnp.zeros_like(denom)
    add(new_key, new_value, 0, num, positions[slot], is_causal=True)

  @pl.when(step == 1)
  def _():
    for copy in copies(is_write=False):
      copy.wait()
    for i, new in enumerate((new_key, new_value)):
      # In float32, which every TPU can select from.
      changed = windows[i].astype(jnp.float32)
      row = jax.lax.broadcasted_iota(jnp.int32, changed.shape, 1)
      for j in range(num):
        token = new[:, j : j + 1, :].astype(jnp.float32)
        changed = jnp.where(row == newest + j - start, token, changed)
      windows[i] = changed.astype(windows.dtype)
    for copy in copies(is_write=True):
      copy.start()

  is_prompt = step < prompt_blocks
  of_prompt, of_own = _ranges(slot, positions, count, oldest)
  own = step - prompt_blocks

  def add_block(is_here, keys, values, first, seen, before):
    begin, end = seen
    needed = is_here & (first < end) & (first + keys.shape[1] > begin)
    pl.when(needed)(lambda: add(keys, values, first, end, before))

  first, own_first = step * sizes[0], own * sizes[1]
  add_block(is_prompt, prompt_keys, prompt_values, first, of_prompt, 0)
  add_block(~is_prompt, own_keys, own_values, own_first, of_own, shared)

  @pl.when(step == pl.num_programs(1) - 1)
  def _():
    # A token sees itself, so that no denominator is 0.
    out[...] = (total[...] / denom[...]).astype(out.dtype)
    for copy in copies(is_write=True):
      copy.wait()
