"""Attention over packed rows, and over the cache of decoding slots."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import sharding
from dppo_jax.models import blockwise, kernels


def _xla(q, k, v, segment_ids, prefix_ids):
  """On a CPU row by row, so that each computes what it sees alone.

  Elsewhere all rows at once, which starts fewer kernels; not measured there.
  """
  together = 1 if jax.default_backend() == "cpu" else q.shape[0]
  return blockwise.attention(q, k, v, segment_ids, prefix_ids, together)


BACKENDS = {
  "xla": _xla,  # runs everywhere
  "splash": kernels.splash,  # TPU
  "triton": kernels.triton,  # NVIDIA
}
MASKED = blockwise.MASKED


def attention(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"],
  backend: str = "xla",
) -> Float[Array, "B L H D"]:
  """Causal attention within segments; `H` query heads share `K` of keys.

  A cell sees the cells at or before it in its row that carry its segment id or
  its prefix id. Id 0 is padding: what its cells get means nothing. Scores are
  float32, for one pair of blocks at a time, in the backward pass too.

  Args:
    backend: a key of `BACKENDS`.
  Raises:
    ValueError: for a row length that the backend does not take, and under a
      mesh for rows or heads that it does not divide.
  """
  run = BACKENDS[backend]
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty:
    # Each device its own rows and heads: how many blocks a row needs, and what
    # a kernel does with a part of an array, the compiler does not know.
    of_heads = sharding.spec(("batch", None, "heads", None))
    of_cells = sharding.spec(("batch", None))
    run = jax.shard_map(
      run,
      in_specs=(of_heads,) * 3 + (of_cells,) * 2,
      out_specs=of_heads,
      check_vma=False,
    )
  return run(q, k, v, segment_ids, prefix_ids)


def attend_prompts(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  lengths: Int[Array, "B"],
) -> Float[Array, "B L H D"]:
  """Causal attention where each row is one sequence, and padding after it.

  What comes out at or beyond its length means nothing.
  """
  is_real = jnp.arange(q.shape[1], dtype=jnp.int32) < lengths[:, None]
  ids = is_real.astype(jnp.int32)
  return _xla(q, k, v, ids, ids)


def attend_cache(
  q: Float[Array, "B H D"],
  keys: Float[Array, "Y n B K D c"],
  values: Float[Array, "Y n B K c D"],
  layer: Int[Array, ""],
  positions: Int[Array, "B"],
) -> Float[Array, "B H D"]:
  """One query per slot over cells `0..positions[slot]` of layer `layer`.

  The cache is read block by block up to the furthest position of any slot, so
  cells that no slot has reached cost nothing. A block that is wholly masked for
  a slot leaves that slot's result exactly as it was: what a slot gets does not
  depend on how far the others are.

  Args:
    keys: `n` blocks of `c` cells, each block of all slots in one piece.
  """
  batch, heads, dim = q.shape
  _, num_blocks, _, kv_heads, _, block = keys.shape
  q = q.reshape(batch, kv_heads, heads // kv_heads, dim)

  def read(cache, i):
    start = (layer, i, 0, 0, 0, 0)
    return jax.lax.dynamic_slice(cache, start, (1, 1, *cache.shape[2:]))[0, 0]

  def add_block(i, carry):
    out, top, total = carry
    scores = jnp.einsum(
      "bhgd,bhds->bhgs", q, read(keys, i), preferred_element_type=jnp.float32
    ) * (dim**-0.5)
    cells = i * block + jnp.arange(block, dtype=jnp.int32)
    is_live = cells <= positions[:, None]
    scores = jnp.where(is_live[:, None, None], scores, MASKED)
    new_top = jnp.maximum(top, scores.max(-1))
    shrink = jnp.exp(top - new_top)
    share = jnp.exp(scores - new_top[..., None])
    new = jnp.einsum(
      "bhgs,bhsd->bhgd",
      share.astype(values.dtype),
      read(values, i),
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
  if num_blocks == 1:
    out, _, total = add_block(0, carry)
  else:
    num_live = positions.max() // block + 1
    out, _, total = jax.lax.fori_loop(0, num_live, add_block, carry)
  return (out / total[..., None]).reshape(batch, heads, dim).astype(q.dtype)
