"""The decode kernel for TPUs; `decode_kernel` has its interface.

A slot's positions are read in blocks of all heads of keys: first its prompt's,
then its own. Blocks that it does not need are neither fetched nor computed. New
keys and values are written in place: aligned tiles around them are read,
changed and written back meanwhile.
"""

import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from dppo_jax import sharding
from dppo_jax.models.attention.blockwise import MASKED

BLOCK = 128  # a cache has a multiple of it
_MOST = 256  # positions that are read at once
_BLOCK_BYTES = 2**20  # of their keys, at most

_div = jax.lax.div  # no operand is negative; `//` asks for the kind of device


def attend(
  qkv, cache, prompts, layer, place, prompt, positions, count, oldest,
  num,
):  # fmt: skip
  """Computes `decode_kernel.attend` with `[B, K, n (H/K + 2), D]` inputs."""
  batch, kv_heads, rows, dim = qkv.shape
  queries = rows - 2 * num
  new = jnp.split(qkv, [queries, queries + num], 2)
  row_bytes = kv_heads * dim * qkv.dtype.itemsize
  most = min(_MOST, pl.next_power_of_2(1 + _BLOCK_BYTES // row_bytes) // 2)
  lengths = [x.shape[3] for x in (prompts[0], cache[0])]
  sizes = [math.gcd(x, most) for x in lengths]
  num_blocks = [x // size for x, size in zip(lengths, sizes, strict=True)]
  if oldest is None:  # the last new token sees position 0, too
    oldest = jnp.full_like(count, -num)
  tile = 32 // qkv.dtype.itemsize
  window = sharding.round_up(tile - 1 + num, tile)

  def block(part):
    """The needed block of the prompts, part 0, or the own tokens, part 1."""

    def index(slot, step, layer, place, prompt, *where):
      start, end = _ranges(slot, *where)[part]
      last = _div(jnp.maximum(end - 1, 0), sizes[part])
      first = _div(start, sizes[part])
      at = jnp.clip(step - part * num_blocks[0], first, last)
      return layer[0], (prompt, place)[part][slot], 0, at, 0

    return pl.BlockSpec((None, None, kv_heads, sizes[part], dim), index)

  of_slot = lambda rows: pl.BlockSpec(
    (None, kv_heads, rows, dim), lambda slot, *_: (slot, 0, 0, 0)
  )
  whole = pl.BlockSpec(memory_space=pl.ANY)
  of_rows = lambda dim: pltpu.VMEM((kv_heads, queries, dim), jnp.float32)
  out, *cache = pl.pallas_call(
    functools.partial(
      _kernel, num=num, prompt_blocks=num_blocks[0], tile=tile
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=6,
      grid=(batch, sum(num_blocks)),
      in_specs=[
        *map(of_slot, (queries, num, num)),
        *(block(part) for part in (0, 0, 1, 1)),
      ],
      out_specs=[of_slot(queries), *(whole,) * 2],
      scratch_shapes=[
        *map(of_rows, (dim, 1, 1)),
        pltpu.VMEM((2, kv_heads, window, dim), qkv.dtype),
        pltpu.SemaphoreType.DMA((2,)),
      ],
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
    name="decode_attention",
  )(
    layer[None], place, prompt, positions, count, oldest,
    *new, *prompts, *cache,
  )  # fmt: skip
  return out, tuple(cache)


def _ranges(slot, positions, count, oldest):
  """Returns the places that a slot may see in its prompt and in its cache."""
  shared = positions[slot] - count[slot]
  before = (0, shared), (shared, count[slot])
  return [(jnp.maximum(oldest[slot] - x, 0), end) for x, end in before]


def _with_tokens(window, new, first):
  """Returns `window` with `new` from place `first`, as far as it reaches."""
  place = jax.lax.broadcasted_iota(jnp.int32, window.shape, 1)
  out, new = (x.astype(jnp.float32) for x in (window, new))  # to select from
  for i in range(new.shape[1]):
    out = jnp.where(place == first + i, new[:, i : i + 1], out)
  return out.astype(window.dtype)


def _kernel(
  layer, place, prompt, positions, count, oldest, query, new_key, new_value,
  prompt_keys, prompt_values, own_keys, own_values, out, keys, values,
  total, row_max, denom, windows, semaphores,
  *, num, prompt_blocks, tile,
):  # fmt: skip
  """Attends from one slot to one block of positions, all heads at once."""
  slot, step = pl.program_id(0), pl.program_id(1)
  newest, shared = count[slot], positions[slot] - count[slot]
  precision = "highest" if query.dtype == jnp.float32 else "default"
  einsum = functools.partial(
    jnp.einsum, precision=precision, preferred_element_type=jnp.float32
  )

  def add(keys, values, first, end, before):
    """Adds the places from `first`, at positions `before` higher."""
    logits = einsum("kgd,ksd->kgs", query[...], keys[...])
    logits *= query.shape[-1] ** -0.5
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    row = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    number = _div(row, query.shape[1] // num)  # of a query's token
    at = before + first + index - number  # as the first new token sees it
    is_seen = (first + index < end) & (at >= oldest[slot])
    is_seen &= at <= positions[slot]
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
  tiles = pl.ds(pl.multiple_of(start, tile), size)

  def copies(is_write):
    for i, x in enumerate((keys, values)):
      source, target = x.at[layer[0], place[slot], :, tiles, :], windows.at[i]
      source, target = (target, source) if is_write else (source, target)
      yield pltpu.make_async_copy(source, target, semaphores.at[i])

  @pl.when(step == 0)
  def _():
    for copy in copies(is_write=False):
      copy.start()
    total[...], denom[...] = jnp.zeros_like(total), jnp.zeros_like(denom)
    row_max[...] = jnp.full_like(row_max, MASKED)
    add(new_key, new_value, 0, num, positions[slot])

  # Written once no more of the slot's cache is fetched.
  last = _div(jnp.clip(newest - 1, 0, length - 1), own_keys.shape[1])

  @pl.when(step == prompt_blocks + last)
  def _():
    for copy in copies(is_write=False):
      copy.wait()
    for i, new in enumerate((new_key, new_value)):
      windows[i] = _with_tokens(windows[i], new[...], newest - start)
    for copy in copies(is_write=True):
      copy.start()

  def add_block(keys, values, index, seen, before):
    (begin, end), size = seen, keys.shape[1]
    first = index * size
    needed = (index >= 0) & (first < end) & (first + size > begin)
    pl.when(needed)(lambda: add(keys, values, first, end, before))

  of_prompt, of_own = _ranges(slot, positions, count, oldest)
  add_block(prompt_keys, prompt_values, step, of_prompt, 0)
  add_block(own_keys, own_values, step - prompt_blocks, of_own, shared)

  @pl.when(step == pl.num_programs(1) - 1)
  def _():
    # A token sees itself, so that no denominator is 0.
    out[...] = (total[...] / denom[...]).astype(out.dtype)
    for copy in copies(is_write=True):
      copy.wait()
