"""The key-value cache of decoding: its layout and its operations.

A cache has slots, one sequence each. Its positions are split into parts, each a
separate array, so that attention skips the parts that no slot has reached yet.
Its layers are divided into a few groups that a compiled step unrolls.
"""

from collections.abc import Callable, Sequence
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from dppo_jax import sharding
from dppo_jax.models import layers
from dppo_jax.models.attention import decode_kernel
from dppo_jax.models.attention.blockwise import MASKED
from dppo_jax.models.config import ModelConfig

# Layers that a compiled step unrolls; each takes time to compile.
MAX_GROUPS = 4

# Smallest padded length of a prompt, and of a cache's first part, unless all
# are shorter.
_SHORTEST = 128


class KVPart(NamedTuple):
  """Keys and values of `B` slots at `c` positions, in `Y` layers of a group.

  Positions are the last axis of keys, so that `q @ keys` reads them in order;
  if prompts are shared, keys are [Y B K c D] like values, for the kernel.
  """

  keys: Float[Array, "Y B K D c"]
  values: Float[Array, "Y B K c D"]


# A tuple of groups: group i has the parts of layers i, i + U, i + 2U, ...
# where `U` is the number of groups.
KVCache = tuple[tuple[KVPart, ...], ...]


class SharedPrompts(NamedTuple):
  """Prompts that slots read where they are, instead of a copy each.

  Attributes:
    cache: the prompts' cache, in one part.
    slot: slot of their own cache that each of the slots has.
    rank: slot of `cache` that each slot continues.
    num_following: tokens of each slot that follow its prompt, without the
      newest.
  """

  cache: KVCache
  slot: Int[Array, "B"]
  rank: Int[Array, "B"]
  num_following: Int[Array, "B"]


class LayerCache(NamedTuple):
  """One layer of a cache: row `layer` of each part of its group.

  Attributes:
    prompts: the parts of shared prompts.
  """

  parts: tuple[KVPart, ...]
  layer: Int[Array, ""]
  prompts: tuple[KVPart, ...] = ()


def slot_and_prompt_sizes(
  model: ModelConfig, prompt_length: int, max_tokens: int
) -> tuple[list[int], list[int]]:
  """Returns the positions of each part of a slot's cache, and of a prompt's."""
  if model.shares_prompts:
    whole_blocks = lambda x: [sharding.round_up(x, decode_kernel.BLOCK)]
    return whole_blocks(max_tokens), whole_blocks(prompt_length)
  capacity = prompt_length + max_tokens - 1
  if model.unrolls_layers:  # where the choice of parts in each layer would wait
    one_part = lambda x: [sharding.round_up(x, 32)]
    return one_part(capacity), one_part(prompt_length)
  sizes = part_sizes(capacity)
  return sizes, prompt_part_sizes(sizes, prompt_length)


def part_sizes(capacity: int) -> list[int]:
  """Returns the positions of each part of a cache of at least `capacity`.

  Each part has the size of all parts before it together; the last has the rest.
  """
  first = max(_SHORTEST, layers.block_size(capacity))
  ends = _doublings(first, sharding.round_up(capacity, 32))
  return [end - start for start, end in itertools.pairwise([0, *ends])]


def prompt_part_sizes(sizes: Sequence[int], longest: int) -> list[int]:
  """Returns the leading parts that a prompt of `longest` tokens reaches."""
  starts = itertools.accumulate(sizes[:-1], initial=0)
  return [x for x, at in zip(sizes, starts, strict=True) if at < longest]


def prompt_paddings(longest: int) -> list[int]:
  """Returns padded lengths for prompts of up to `longest` tokens."""
  return _doublings(_SHORTEST, longest)


def init(model: ModelConfig, num_slots: int, sizes: Sequence[int]) -> KVCache:
  """Returns an empty cache in parts of `sizes`."""
  groups = num_groups(model)
  kv_heads = sharding.num_kv_heads(model.kv_heads)
  lead = (model.layers // groups, num_slots, kv_heads)
  step = -1 if model.shares_prompts else 1
  key_shape = lambda size: (model.head_dim, size)[::step]
  parts = tuple(
    KVPart(
      jnp.zeros((*lead, *key_shape(size)), model.dtype),
      jnp.zeros((*lead, size, model.head_dim), model.dtype),
    )
    for size in sizes
  )
  return (parts,) * groups


def put_slots(cache: KVCache, new: KVCache, start: Int[Array, ""]) -> KVCache:
  """Returns `cache` with the slots of `new`, which may have fewer parts."""
  put = lambda to, x: jax.lax.dynamic_update_slice_in_dim(to, x, start, 1)
  return tuple(
    (*jax.tree.map(put, parts[: len(x)], x), *parts[len(x) :])
    for parts, x in zip(cache, new, strict=True)
  )


def copy_slot(cache: KVCache, slot, source: KVCache, index) -> KVCache:
  """Copies slot `index` of `source`, which may be shorter, to `slot`."""
  take = lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1, 1)
  return put_slots(cache, jax.tree.map(take, source), slot)


def take_slots(cache: KVCache, slots: Int[Array, "C"]) -> KVCache:
  """Returns the cache of `slots`, in the given order."""

  def take(x):  # as a matrix of rows, which compiles in a third of the time
    rows = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    return rows[:, slots].reshape(len(x), len(slots), *x.shape[2:])

  return jax.tree.map(take, cache)


def num_groups(model: ModelConfig) -> int:
  """Returns the number of groups of a model's layers."""
  limit = model.layers if model.unrolls_layers else MAX_GROUPS
  return sharding.largest_divisor(model.layers, limit)


def scan_layers(
  layer: Callable[[Array, Any, LayerCache], tuple[Array, LayerCache]],
  x: Float[Array, "..."],
  weights: tuple[PyTree[Array], ...],
  cache: KVCache,
  inline: bool = False,
  prompts: KVCache | None = None,
) -> tuple[Float[Array, "..."], KVCache]:
  """Returns `(x, cache)` after every layer in order.

  Args:
    layer: `(x, weights, cache) -> (x, cache)` of one layer.
    weights: stacked data of each group of layers.
    inline: the layer's operations are copied for each group, not called.
    prompts: the cache of shared prompts.
  """
  prompts = ((),) * len(cache) if prompts is None else prompts
  layer = jax.jit(layer, inline=inline)  # traced once for all groups

  def one_of_each_group(carry, xs):
    x, cache = carry
    weights, index = xs
    new = []
    for p, *parts in zip(weights, cache, prompts, strict=True):
      x, layer_cache = layer(x, p, LayerCache(parts[0], index, parts[1]))
      new.append(layer_cache.parts)
    return (x, tuple(new)), None

  index = jnp.arange(len(cache[0][0].keys), dtype=jnp.int32)
  return jax.lax.scan(one_of_each_group, (x, cache), (weights, index))[0]


def write_prompts(
  cache: LayerCache,
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  keys_last: bool = True,
) -> LayerCache:
  """Writes a prompt into each slot, and zeros at and beyond position `L`.

  Args:
    keys_last: positions are the last axis of keys.
  """
  *ends, end = itertools.accumulate(sizes(cache.parts))
  padding = (0, 0), (0, end - k.shape[1]), (0, 0), (0, 0)
  split = [jnp.split(jnp.pad(x, padding), ends, 1) for x in (k, v)]
  key_axes = (0, 2, 3, 1) if keys_last else (0, 2, 1, 3)
  parts = [
    KVPart(
      part.keys.at[cache.layer].set(keys.transpose(*key_axes)),
      part.values.at[cache.layer].set(values.transpose(0, 2, 1, 3)),
    )
    for part, keys, values in zip(cache.parts, *split, strict=True)
  ]
  return cache._replace(parts=tuple(parts))


def write_tokens(
  cache: LayerCache,
  k: Float[Array, "B K D"],
  v: Float[Array, "B K D"],
  positions: Int[Array, "B"],
  rewrites: bool = False,
) -> LayerCache:
  """Writes the keys and values of each slot's next token.

  Args:
    positions: position of the token, which is dropped beyond the cache.
    rewrites: the layer's full cache is rewritten, for TPUs: if single positions
      are written, their compiler copies the caches of all layers to another
      layout at every read.
  """
  layer, parts, start = cache.layer, [], 0
  slots = jnp.arange(k.shape[0], dtype=jnp.int32)
  # Each part drops the positions that lie before or beyond it.
  put = lambda at, x: at.set(x, mode="drop", wrap_negative_indices=False)
  for keys, values in cache.parts:
    at = positions - start
    if rewrites:
      index = jnp.arange(keys.shape[-1], dtype=jnp.int32)
      is_new = (index == at[:, None])[:, None]
      new_keys = jnp.where(is_new[:, :, None], k[..., None], keys[layer])
      new_values = jnp.where(is_new[..., None], v[:, :, None], values[layer])
      part = KVPart(
        keys.at[layer].set(new_keys), values.at[layer].set(new_values)
      )
    else:
      part = KVPart(
        put(keys.at[layer, slots, :, :, at], k),
        put(values.at[layer, slots, :, at], v),
      )
    parts.append(part)
    start += keys.shape[-1]
  return cache._replace(parts=tuple(parts))


def attend(
  q: Float[Array, "B H D"],
  cache: LayerCache,
  positions: Int[Array, "B"],
  oldest: Int[Array, "B"] | None = None,
) -> Float[Array, "B H D"]:
  """Attends with a query per slot, to its own and all earlier positions.

  Parts that no slot has reached are not read. Reading them would not change the
  result (on a CPU, bit for bit): a fully masked part adds zeros.

  Args:
    positions: position of each query.
    oldest: first position that each query sees; None for 0.
  """
  parts, layer = cache.parts, cache.layer
  batch, heads, dim = q.shape
  kv_heads = parts[0].keys.shape[2]
  q = q.reshape(batch, kv_heads, heads // kv_heads, dim)
  ends = list(itertools.accumulate(sizes(parts)))

  einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def part_logits(part, end):
    logits = einsum("bhgd,bhds->bhgs", q, part.keys[layer]) * dim**-0.5
    index = jnp.arange(end - part.keys.shape[-1], end, dtype=jnp.int32)
    is_seen = index <= positions[:, None]
    if oldest is not None:
      is_seen &= index >= oldest[:, None]
    return jnp.where(is_seen[:, None, None], logits, MASKED)

  def weighted_values(probs, part):
    probs = probs.astype(part.values.dtype)
    return einsum("bhgs,bhsd->bhgd", probs, part.values[layer])

  def read(num_parts):
    here = parts[:num_parts]
    logits = [part_logits(*x) for x in zip(here, ends[:num_parts], strict=True)]
    row_max = functools.reduce(jnp.maximum, [x.max(-1) for x in logits])
    probs = [jnp.exp(x - row_max[..., None]) for x in logits]
    total = functools.partial(functools.reduce, jnp.add)
    denom = total(x.sum(-1) for x in probs)
    out = total(weighted_values(*x) for x in zip(probs, here, strict=True))
    return out / denom[..., None]

  reached = (positions.max() >= jnp.array(ends[:-1], jnp.int32)).sum()
  out = jax.lax.switch(
    reached, [functools.partial(read, n + 1) for n in range(len(parts))]
  )
  return out.reshape(batch, heads, dim).astype(q.dtype)


def sizes(parts: Sequence[KVPart]) -> list[int]:
  """Returns the positions of each part."""
  return [part.values.shape[-2] for part in parts]


def _doublings(least: int, most: int) -> list[int]:
  """Returns `least` and its doublings below `most`, then `most`."""
  return [least, *_doublings(2 * least, most)] if least < most else [most]
