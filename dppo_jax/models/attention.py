"""Attention over packed rows, and over the cache of decoding slots."""

from collections.abc import Sequence
import functools
import itertools
from typing import NamedTuple

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


class Cells(NamedTuple):
  """Keys and values of `B` slots in `c` cells of `Y` layers' caches.

  Keys have the cells last, as the product with a single query likes them.
  """

  keys: Float[Array, "Y B K D c"]
  values: Float[Array, "Y B K c D"]


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
  parts: Sequence[Cells],
  layer: Int[Array, ""],
  positions: Int[Array, "B"],
) -> Float[Array, "B H D"]:
  """One query per slot over cells `0..positions[slot]` of one layer.

  Parts that no slot has reached are not read. How far the others are does not
  change what a slot gets, on a CPU to the last bit: a part that is wholly
  masked for it adds zeros.

  Args:
    parts: the cells in order, each part an array of its own: of a share of an
      array XLA's CPU backend makes a copy before a product.
    layer: which of the `Y`.
  """
  batch, heads, dim = q.shape
  kv_heads = parts[0].keys.shape[2]
  q = q.reshape(batch, kv_heads, heads // kv_heads, dim)
  ends = list(itertools.accumulate(part.keys.shape[-1] for part in parts))

  def score(part, end):
    scores = jnp.einsum(
      "bhgd,bhds->bhgs",
      q,
      part.keys[layer],
      preferred_element_type=jnp.float32,
    ) * (dim**-0.5)
    cells = jnp.arange(end - part.keys.shape[-1], end, dtype=jnp.int32)
    is_live = cells <= positions[:, None]
    return jnp.where(is_live[:, None, None], scores, MASKED)

  def weigh(share, part):
    return jnp.einsum(
      "bhgs,bhsd->bhgd",
      share.astype(part.values.dtype),
      part.values[layer],
      preferred_element_type=jnp.float32,
    )

  def read(num_parts):
    here = parts[:num_parts]
    scores = [score(*x) for x in zip(here, ends[:num_parts], strict=True)]
    top = functools.reduce(jnp.maximum, [x.max(-1) for x in scores])
    shares = [jnp.exp(x - top[..., None]) for x in scores]
    total = sum(x.sum(-1) for x in shares)
    out = sum(weigh(*x) for x in zip(shares, here, strict=True))
    return out / total[..., None]

  reached = (positions.max() >= jnp.array(ends[:-1], jnp.int32)).sum()
  out = jax.lax.switch(
    reached,
    [functools.partial(read, n + 1) for n in range(len(parts))],
  )
  return out.reshape(batch, heads, dim).astype(q.dtype)
