"""Attention over packed rows by JAX's splash kernel for TPUs.

It supports segments but no tree of them: here a segment is a tree, a prompt
with all that continues it, and further dimensions of queries and keys mask
branches. Their product is 0 where a key may be seen and very negative where the
query is outside of the key's interval.
"""

import math

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

MAX_BRANCHES = 64  # of a tree, such as completions that share a prompt
LANES = 128  # tokens of the smallest block; a row is a multiple of it
_FAR = 2.0**15  # a power of two, so that its product is exact in any dtype


def attention(q, k, v, end, window=None, interpret=False):
  """Computes `models.attention.attention`.

  Args:
    window: None, since the kernel has none.
    interpret: emulates the kernel on any platform, slowly.
  """
  if window is not None:
    raise NotImplementedError("splash attention has no window of positions")
  length, heads, dim = q.shape[1:]
  block = math.gcd(length, 512)
  mask = splash_attention.CausalMask((length, length))
  kernel = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([mask] * heads),
    block_sizes=splash_attention.BlockSizes(*(block,) * 8),
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )
  q = q * jnp.asarray(dim**-0.5, q.dtype)
  ids = None
  if end is not None:
    q, k, tree = _with_branches(q, k, end)
    ids = splash_attention.SegmentIds(tree, tree)
  heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
  return jax.vmap(kernel)(*heads_first, ids).swapaxes(1, 2)


def _with_branches(q, k, end):
  """Returns queries and keys that mask branches, and the trees' ids.

  A tree begins where no earlier key is seen any more, a branch where `end`
  changes; branches are numbered from 0, the root, depth first. A key is seen by
  its branch and those that follow up to a last one, within its tree. A query
  gets the unit vector of its branch; a key gets -FAR at those after its last.
  """
  shift = lambda x: jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]
  index = jnp.arange(end.shape[1], dtype=jnp.int32)
  is_root = shift(jax.lax.cummax(end, axis=1)) <= index
  branch = jnp.cumsum(is_root | (end != shift(end)), axis=1, dtype=jnp.int32)
  branch -= jax.lax.cummax(jnp.where(is_root, branch, 0), axis=1)
  last = jnp.take_along_axis(branch, end - 1, axis=1)
  number = jnp.arange(1, MAX_BRANCHES + 1, dtype=jnp.int32)
  unit = (branch[..., None] == number).astype(q.dtype)
  others = jnp.where(last[..., None] < number, -_FAR, 0.0).astype(k.dtype)
  extend = lambda x, more: jnp.concatenate(
    [x, jnp.broadcast_to(more[:, :, None], (*x.shape[:3], MAX_BRANCHES))], -1
  )
  tree = jnp.cumsum(is_root, axis=1, dtype=jnp.int32)
  return extend(q, unit), extend(k, others), tree
