"""Attention by the kernels that come with JAX, for TPU and for NVIDIA GPUs.

Both know segments but no prefix that several segments share. That is told them
in further dimensions of queries and keys, whose product is 0 where a key may be
seen and very negative where it belongs to another completion of the prompt.
"""

import jax
from jax.experimental.pallas.ops.gpu import attention as triton_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as splash_mask,
)
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MAX_BRANCHES = 64  # completions that may share a prompt within a row
LANES = 128  # a row is in whole blocks of so many cells
_FAR = 2.0**15  # a power of two: the product is exact in every dtype


def splash(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"],
  interpret: bool = False,
) -> Float[Array, "B L H D"]:
  """Pallas splash attention, for TPU.

  Args:
    interpret: runs anywhere, slowly.
  Raises:
    ValueError: for rows that are not whole blocks.
  """
  length, heads, dim = q.shape[1:]
  block = _block(length, "splash", 512)
  mask = splash_mask.CausalMask((length, length))
  kernel = splash_kernel.make_splash_mha(
    splash_mask.MultiHeadMask([mask] * heads),
    block_sizes=splash_kernel.BlockSizes(*(block,) * 8),
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )
  q = q * jnp.asarray(dim**-0.5, q.dtype)
  q, k = _with_branches(q, k, segment_ids - prefix_ids)
  ids = splash_kernel.SegmentIds(prefix_ids, prefix_ids)
  heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
  return jax.vmap(kernel)(*heads_first, ids).swapaxes(1, 2)


def triton(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"],
  interpret: bool = False,
) -> Float[Array, "B L H D"]:
  """Pallas flash attention in Triton, for NVIDIA GPUs.

  Args:
    interpret: runs anywhere, slowly.
  Raises:
    ValueError: for rows that are not whole blocks.
  """
  heads, dim = q.shape[2:]
  block = _block(q.shape[1], "triton", 64)
  repeat = lambda x: jnp.repeat(x, heads // x.shape[2], axis=2)
  q, k = _with_branches(q, repeat(k), segment_ids - prefix_ids)
  out = triton_kernel.mha(
    q,
    k,
    jnp.pad(repeat(v), (*((0, 0),) * 3, (0, MAX_BRANCHES))),
    prefix_ids,
    sm_scale=dim**-0.5,
    causal=True,
    block_sizes=triton_kernel.BlockSizes(*(block,) * 6),
    interpret=interpret,
  )
  return out[..., :dim]


def _block(length: int, backend: str, largest: int) -> int:
  """The largest block that divides a row."""
  block = largest
  while length % block and block > LANES:
    block //= 2
  if length % block:
    raise ValueError(
      f"config.pack.row_length is {length} but must be a multiple of "
      f"{block} for config.model.attention={backend!r}"
    )
  return block


def _with_branches(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L H D"],
  branch: Int[Array, "B L"],
) -> tuple[Array, Array]:
  """Queries and keys with what keeps a prompt's completions apart.

  A prompt and the completions that share it are neighbours, numbered on:
  `branch` is 0 for the prompt, and for a completion that shares none.
  A query of completion `a` gets the unit vector of `a`; a key of completion `b`
  gets -FAR everywhere but at `b`. All others get zeros.
  """
  own = jax.nn.one_hot(branch - 1, MAX_BRANCHES, dtype=q.dtype)
  others = jnp.where(branch[..., None] > 0, (own - 1) * _FAR, 0).astype(k.dtype)
  extend = lambda x, more: jnp.concatenate(
    [x, jnp.broadcast_to(more[:, :, None], (*x.shape[:3], MAX_BRANCHES))], -1
  )
  return extend(q, own), extend(k, others)
