"""Attention of each decode slot's new tokens, in one kernel.

A slot's past is its prompt, whose cache all completions of a group share, and
its own tokens. `decode_kernel_gpu` and `decode_kernel_tpu` are the kernels.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import sharding
from dppo_jax.models.attention import decode_kernel_gpu, decode_kernel_tpu


def attend(
  q: Float[Array, "B n H D"],
  k: Float[Array, "B n K D"],
  v: Float[Array, "B n K D"],
  cache: tuple[Float[Array, "Y S K T D"], Float[Array, "Y S K T D"]],
  prompts: tuple[Float[Array, "Y Q K P D"], Float[Array, "Y Q K P D"]],
  layer: Int[Array, ""],
  place: Int[Array, "B"],
  prompt: Int[Array, "B"],
  positions: Int[Array, "B"],
  count: Int[Array, "B"],
  oldest: Int[Array, "B"] | None = None,
  is_tpu: bool = False,
) -> tuple[Float[Array, "B n H D"], tuple[Array, Array]]:
  """Writes keys and values of each slot's `n` tokens, and attends to its past.

  Args:
    cache: keys and values of each slot's own tokens; to be donated.
    prompts: keys and values of the prompts.
    layer: row of `cache` and `prompts` to use.
    place: row of `cache` that each slot has, alone.
    prompt: row of `prompts` that each slot continues.
    positions: position of the first new token; it sees that many others.
    count: own tokens so far, the place of the first new one in `cache`. Those
      beyond the cache are not written.
    oldest: first position that the first new token sees, which may be negative,
      and one higher for each further token; None if they see all.
    is_tpu: runs the kernel for TPUs.
  """
  (batch, num, _, dim), kv_heads = q.shape, k.shape[2]
  # One array, so that a single operation computes it: [B, K, n (H/K + 2), D].
  by_head = lambda x: (
    x.reshape(batch, num, kv_heads, -1, dim)
    .swapaxes(1, 2)
    .reshape(batch, kv_heads, -1, dim)
  )
  qkv = jnp.concatenate([by_head(x) for x in (q, k, v)], 2)
  kernel = decode_kernel_tpu if is_tpu else decode_kernel_gpu
  run = functools.partial(kernel.attend, num=num)
  if axis_names := sharding.free_axes():
    # Each device computes its own heads: no compiler can divide a kernel.
    heads = sharding.unclaimed_spec(None, "heads")
    caches = sharding.unclaimed_spec(None, None, "heads")
    run = jax.shard_map(
      run,
      in_specs=(heads, caches, caches, *(jax.P(),) * 6),
      out_specs=(heads, caches),
      axis_names=axis_names,
      check_vma=False,
    )
  out, cache = run(
    qkv, tuple(cache), tuple(prompts),
    layer, place, prompt, positions, count, oldest,
  )  # fmt: skip
  out = out.reshape(batch, kv_heads, num, -1, dim).swapaxes(1, 2)
  return out.reshape(q.shape), cache
