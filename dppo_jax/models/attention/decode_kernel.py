"""Attention of each decode slot's new token on TPUs, in one kernel.

A slot's past is its prompt, whose cache all completions of a group share, and
its own tokens. Its positions are read in blocks of all heads of keys: first its
prompt's, then its own. Blocks that it does not need are neither fetched nor
computed. New keys and values are written in place: aligned tiles around them
are read, changed and written back meanwhile.
"""

import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import sharding
from dppo_jax.models.attention.blockwise import MASKED

BLOCK = 128  # a cache has a multiple of it
_MOST = 256  # positions that are read at once
_BLOCK_BYTES = 2**20  # of their keys, at most

_div = jax.lax.div  # no operand is negative; `//` asks for the kind of device


def attend(
  q: Float[Array, "B H D"],
  k: Float[Array, "B K D"],
  v: Float[Array, "B K D"],
  cache: tuple[Float[Array, "Y S K T D"], Float[Array, "Y S K T D"]],
  prompts: tuple[Float[Array, "Y Q K P D"], Float[Array, "Y Q K P D"]],
  layer: Int[Array, ""],
  place: Int[Array, "B"],
  prompt: Int[Array, "B"],
  positions: Int[Array, "B"],
  count: Int[Array, "B"],
) -> tuple[Float[Array, "B H D"], tuple[Array, Array]]:
  """Writes keys and values of each slot's token, and attends to its past.

  Args:
    cache: keys and values of each slot's own tokens; to be donated.
    prompts: keys and values of the prompts.
    layer: row of `cache` and `prompts` to use.
    place: row of `cache` that each slot has, alone.
    prompt: row of `prompts` that each slot continues.
    positions: position of the new token; it sees that many others.
    count: own tokens so far, the place of the new one in `cache`.
  """
  (batch, _, dim), kv_heads = q.shape, k.shape[1]
  # One array, so that a single operation computes it: [B, K, H/K + 2, D].
  by_head = lambda x: x.reshape(batch, kv_heads, -1, dim)
  qkv = jnp.concatenate([by_head(x) for x in (q, k, v)], 2)
  run = _call
  if axis_names := sharding.free_axes():
    # Each device computes its own heads: no compiler can divide a kernel.
    heads = sharding.unclaimed_spec(None, "heads")
    caches = sharding.unclaimed_spec(None, None, "heads")
    run = jax.shard_map(
      run,
      in_specs=(heads, caches, caches, *(jax.P(),) * 5),
      out_specs=(heads, caches),
      axis_names=axis_names,
      check_vma=False,
    )
  out, cache = run(
    qkv, tuple(cache), tuple(prompts),
    layer, place, prompt, positions - count, count,
  )  # fmt: skip
  return out.reshape(q.shape), cache


def _call(qkv, cache, prompts, layer, place, prompt, shared, count):
  """Computes `attend` with `[B, K, H/K + 2, D]` inputs."""
  batch, kv_heads, rows, dim = qkv.shape
  queries = rows - 2
  new = jnp.split(qkv, [queries, queries + 1], 2)
  row_bytes = kv_heads * dim * qkv.dtype.itemsize
  most = min(_MOST, pl.next_power_of_2(1 + _BLOCK_BYTES // row_bytes) // 2)
  lengths = [x.shape[3] for x in (prompts[0], cache[0])]
  sizes = [math.gcd(x, most) for x in lengths]
  num_blocks = [x // size for x, size in zip(lengths, sizes, strict=True)]
  tile = 32 // qkv.dtype.itemsize

  def block(part):
    """The needed block of the prompts, part 0, or the own tokens, part 1."""

    def index(slot, step, layer, place, prompt, *ends):
      last = _div(jnp.maximum(ends[part][slot] - 1, 0), sizes[part])
      at = jnp.clip(step - part * num_blocks[0], 0, last)
      return layer[0], (prompt, place)[part][slot], 0, at, 0

    return pl.BlockSpec((None, None, kv_heads, sizes[part], dim), index)

  of_slot = lambda rows: pl.BlockSpec(
    (None, kv_heads, rows, dim), lambda slot, *_: (slot, 0, 0, 0)
  )
  whole = pl.BlockSpec(memory_space=pl.ANY)
  of_rows = lambda dim: pltpu.VMEM((kv_heads, queries, dim), jnp.float32)
  out, *cache = pl.pallas_call(
    functools.partial(_kernel, prompt_blocks=num_blocks[0]),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=5,
      grid=(batch, sum(num_blocks)),
      in_specs=[
        *map(of_slot, (queries, 1, 1)),
        *(block(part) for part in (0, 0, 1, 1)),
      ],
      out_specs=[of_slot(queries), *(whole,) * 2],
      scratch_shapes=[
        *map(of_rows, (dim, 1, 1)),
        pltpu.VMEM((2, kv_heads, tile, dim), qkv.dtype),
        pltpu.SemaphoreType.DMA((2,)),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((batch, kv_heads, queries, dim), qkv.dtype),
      *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache),
    ],
    input_output_aliases={10: 1, 11: 2},
    # Slots are divided between the cores of a chip that has two.
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    name="decode_attention",
  )(
    layer[None], place, prompt, shared, count,
    *new, *prompts, *cache,
  )  # fmt: skip
  return out, tuple(cache)


def _with_token(window, new, at):
  """Returns `window` with `new` at one place."""
  place = jax.lax.broadcasted_iota(jnp.int32, window.shape, 1)
  out, new = (x.astype(jnp.float32) for x in (window, new))  # to select from
  return jnp.where(place == at, new, out).astype(window.dtype)


def _kernel(
  layer, place, prompt, shared, count, query, new_key, new_value,
  prompt_keys, prompt_values, own_keys, own_values, out, keys, values,
  total, row_max, denom, windows, semaphores,
  *, prompt_blocks,
):  # fmt: skip
  """Attends from one slot to one block of positions, all heads at once."""
  slot, step = pl.program_id(0), pl.program_id(1)
  newest = count[slot]
  precision = "highest" if query.dtype == jnp.float32 else "default"
  einsum = functools.partial(
    jnp.einsum, precision=precision, preferred_element_type=jnp.float32
  )

  def add(keys, values, first, end):
    """Adds the places from `first` that are before `end`."""
    logits = einsum("kgd,ksd->kgs", query[...], keys[...])
    logits *= query.shape[-1] ** -0.5
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    is_seen = first + index < end
    logits = jnp.where(is_seen, logits, MASKED)
    new_max = jnp.maximum(row_max[...], logits.max(-1, keepdims=True))
    rescale = jnp.exp(row_max[...] - new_max)
    probs = jnp.where(is_seen, jnp.exp(logits - new_max), 0.0)
    weighed = einsum("kgs,ksd->kgd", probs.astype(values.dtype), values[...])
    total[...] = total[...] * rescale + weighed
    denom[...] = denom[...] * rescale + probs.sum(-1, keepdims=True)
    row_max[...] = new_max

  length, tile = keys.shape[3], windows.shape[2]
  start = _div(newest, tile) * tile
  around = pl.ds(pl.multiple_of(start, tile), tile)

  def copies(is_write):
    for i, x in enumerate((keys, values)):
      source, target = x.at[layer[0], place[slot], :, around, :], windows.at[i]
      source, target = (target, source) if is_write else (source, target)
      yield pltpu.make_async_copy(source, target, semaphores.at[i])

  @pl.when(step == 0)
  def _():
    for copy in copies(is_write=False):
      copy.start()
    total[...], denom[...] = jnp.zeros_like(total), jnp.zeros_like(denom)
    row_max[...] = jnp.full_like(row_max, MASKED)
    add(new_key, new_value, 0, 1)

  # Written once no more of the slot's cache is fetched.
  last = _div(jnp.clip(newest - 1, 0, length - 1), own_keys.shape[1])

  @pl.when(step == prompt_blocks + last)
  def _():
    for copy in copies(is_write=False):
      copy.wait()
    for i, new in enumerate((new_key, new_value)):
      windows[i] = _with_token(windows[i], new[...], newest - start)
    for copy in copies(is_write=True):
      copy.start()

  def add_block(keys, values, index, end):
    first = index * keys.shape[1]
    needed = (index >= 0) & (first < end)
    pl.when(needed)(lambda: add(keys, values, first, end))

  add_block(prompt_keys, prompt_values, step, shared[slot])
  add_block(own_keys, own_values, step - prompt_blocks, newest)

  @pl.when(step == pl.num_programs(1) - 1)
  def _():
    # A token sees itself, so that no denominator is 0.
    out[...] = (total[...] / denom[...]).astype(out.dtype)
    for copy in copies(is_write=True):
      copy.wait()
