"""Attention over packed rows, and over the cache of decoding slots."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import buckets

QUERY_BLOCK = 512  # queries whose scores exist at once, at most
NUM_BLOCKS = 4  # of shorter rows; a block skips the keys that follow it
CACHE_BLOCK = 256  # cache cells read at once while decoding
MASKED = -1e30  # finite, so that a wholly masked block stays a number


def attention(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  segment_ids: Int[Array, "B L"],
) -> Float[Array, "B L H D"]:
  """Causal attention within segments; `H` query heads share `K` of keys.

  A cell sees the cells at or before it in its row that carry its segment id.
  Scores are float32. They exist for a block of queries at a time, in the
  backward pass too, and for no key after the block.
  """
  batch, length, heads, dim = q.shape
  kv_heads = k.shape[2]
  q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
  block = min(QUERY_BLOCK, -(-length // NUM_BLOCKS))  # the last may be shorter

  def attend(q, k, v, query_segments, key_segments, start):
    scores = jnp.einsum(
      "bqhgd,bshd->bhgqs", q, k, preferred_element_type=jnp.float32
    ) * (dim**-0.5)
    queries = start + jnp.arange(q.shape[1], dtype=jnp.int32)
    is_visible = (query_segments[:, :, None] == key_segments[:, None, :]) & (
      queries[:, None] >= jnp.arange(k.shape[1], dtype=jnp.int32)
    )
    scores = jnp.where(is_visible[:, None, None], scores, MASKED)
    share = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhgqs,bshd->bqhgd", share, v)

  if length > QUERY_BLOCK:
    attend = jax.checkpoint(attend, static_argnums=5)
  out = [
    attend(
      q[:, start : start + block],
      k[:, : start + block],
      v[:, : start + block],
      segment_ids[:, start : start + block],
      segment_ids[:, : start + block],
      start,
    )
    for start in range(0, length, block)
  ]
  return jnp.concatenate(out, axis=1).reshape(batch, length, heads, dim)


def attend_cache(
  q: Float[Array, "B H D"],
  keys: Float[Array, "Y B K C D"],
  values: Float[Array, "Y B K C D"],
  layer: Int[Array, ""],
  positions: Int[Array, "B"],
) -> Float[Array, "B H D"]:
  """One query per slot over cells `0..positions[slot]` of layer `layer`.

  The cache is read in blocks, up to the furthest position of any slot, so
  cells that no slot has reached cost nothing. A block that is wholly masked
  for a slot leaves that slot's result exactly as it was: what a slot gets
  does not depend on how far the others are.
  """
  batch, heads, dim = q.shape
  _, _, kv_heads, capacity, _ = keys.shape
  block = buckets.largest_divisor(capacity, CACHE_BLOCK)
  q = q.reshape(batch, kv_heads, heads // kv_heads, dim)

  def read(cache, start):
    return jax.lax.dynamic_slice(
      cache, (layer, 0, 0, start, 0), (1, batch, kv_heads, block, dim)
    )[0]

  def add_block(i, carry):
    out, top, total = carry
    start = i * block
    scores = jnp.einsum(
      "bhgd,bhsd->bhgs",
      q,
      read(keys, start),
      preferred_element_type=jnp.float32,
    ) * (dim**-0.5)
    is_live = start + jnp.arange(block, dtype=jnp.int32) <= positions[:, None]
    scores = jnp.where(is_live[:, None, None], scores, MASKED)
    new_top = jnp.maximum(top, scores.max(-1))
    shrink = jnp.exp(top - new_top)
    share = jnp.exp(scores - new_top[..., None])
    new = jnp.einsum(
      "bhgs,bhsd->bhgd",
      share.astype(values.dtype),
      read(values, start),
      preferred_element_type=jnp.float32,
    )
    return (
      out * shrink[..., None] + new,
      new_top,
      total * shrink + share.sum(-1),
    )

  carry = (
    jnp.zeros(q.shape, jnp.float32),
    jnp.full(q.shape[:-1], MASKED, jnp.float32),
    jnp.zeros(q.shape[:-1], jnp.float32),
  )
  if block == capacity:
    out, _, total = add_block(0, carry)
  else:
    num_blocks = positions.max() // block + 1
    out, _, total = jax.lax.fori_loop(0, num_blocks, add_block, carry)
  return (out / total[..., None]).reshape(batch, heads, dim).astype(q.dtype)
