"""Attention over packed rows by JAX's splash kernel for TPUs.

It supports segments but no prefix that several segments share: here a segment
is a prompt with all its completions, and further dimensions of queries and
keys mask sibling completions. Their product is 0 where a key may be seen and
very negative where it belongs to a sibling.
"""

import math

import jax
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

MAX_BRANCHES = 64  # completions that may share a prompt within a row
LANES = 128  # tokens of the smallest block; a row is a multiple of it
_FAR = 2.0**15  # a power of two, so that its product is exact in any dtype


def attention(q, k, v, segment_ids, prefix_ids=None, interpret=False):
  """Computes `models.attention.attention`.

  Args:
    interpret: emulates the kernel on any platform, slowly.
  """
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
  q, k, groups = _with_branches(q, k, segment_ids, prefix_ids)
  ids = splash_attention.SegmentIds(groups, groups)
  heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
  return jax.vmap(kernel)(*heads_first, ids).swapaxes(1, 2)


def _with_branches(q, k, segment_ids, prefix_ids):
  """Returns queries and keys that mask siblings, and ids that do not.

  A prompt and its completions are neighbours in a row with consecutive ids.
  A query of completion `a` gets the unit vector of `a`; a key of completion `b`
  gets -FAR everywhere but at `b`. All others get zeros.
  """
  if prefix_ids is None:
    return q, k, segment_ids
  # A completion's number from 1 among those that share its prompt; 0 for the
  # prompt, and for a sequence that shares none.
  branch = segment_ids - prefix_ids
  unit = jax.nn.one_hot(branch - 1, MAX_BRANCHES, dtype=q.dtype)
  others = jnp.where(branch[..., None] > 0, (unit - 1) * _FAR, 0)
  extend = lambda x, more: jnp.concatenate(
    [x, jnp.broadcast_to(more[:, :, None], (*x.shape[:3], MAX_BRANCHES))], -1
  )
  return extend(q, unit), extend(k, others.astype(k.dtype)), prefix_ids
