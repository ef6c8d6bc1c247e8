"""Causal attention over packed rows and over prompts, by several backends.

A position attends to what its segment and prefix ids allow; id 0 is padding.
`algo.packing.fill` makes the ids of rows, `attend_prompts` those of prompts.
Decoding slots attend over their cache in `kv_cache.attend`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import sharding
from dppo_jax.errors import UserError
from dppo_jax.models.attention import (
  blockwise,
  decode_kernel,
  flash_kernel,
  kernels,
)
from dppo_jax.models.attention.kernels import LANES, MAX_BRANCHES

# Each `(q, k, v, segment_ids, prefix_ids) -> out`, as `attention`.
BACKENDS = {
  # TPU: all rows at once, which launches fewer kernels.
  "xla": functools.partial(blockwise.attention, rows_at_once=None),
  # CPU: row by row, so that none computes blocks that only another one sees.
  "xla_by_row": functools.partial(blockwise.attention, rows_at_once=1),
  # GPU: all pairs of tokens, since its host would wait for each loop over
  # blocks whose length the device computes.
  "xla_dense": kernels.dense,
  "splash": kernels.splash,  # TPU
  "triton": flash_kernel.attention,  # NVIDIA GPU
}

# Pallas kernel -> the platform that it is written for.
KERNELS = {"splash": "tpu", "triton": "gpu"}

# Kernel -> what the tokens of a row must be a multiple of.
_ROW_MULTIPLES = {"splash": LANES, "triton": 16}

# Values of config.model.attention.
CHOICES = ("auto", "xla", *KERNELS)


def choose_backend(
  name: str, platform: str, row_length: int, group_size: int, head_dim: int
) -> str:
  """Returns the key of `BACKENDS` that a run uses.

  Args:
    name: config.model.attention, one of `CHOICES`.
    platform: platform of the mesh's devices: cpu, gpu or tpu.
    row_length: tokens in a packed row.
    group_size: completions of a prompt.
    head_dim: size of a head.
  """
  plain = {"cpu": "xla_by_row", "tpu": "xla"}.get(platform, "xla_dense")
  kernel = {"tpu": "splash", "gpu": "triton"}.get(platform)
  multiple = _ROW_MULTIPLES.get(kernel, 1)
  fits = row_length % multiple == 0 and group_size <= MAX_BRANCHES
  if kernel == "triton":  # its blocks are powers of two
    fits &= head_dim >= 16 and head_dim.bit_count() == 1
  if name == "auto":
    return kernel if kernel and fits else plain
  if name == "xla":
    return plain
  if name != kernel or not fits:
    raise UserError(
      f"config.model.attention={name} needs a {KERNELS[name]}, "
      f"config.pack.row_length a multiple of {_ROW_MULTIPLES[name]}, "
      f"config.rollout.group_size at most {MAX_BRANCHES} and, on a GPU, heads "
      f"of 2^n >= 16 numbers, not a {platform}, {row_length}, {group_size} and "
      f"{head_dim}: set it to auto"
    )
  return name


def attention(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"] | None = None,
  backend: str = "xla",
  ranges: tuple[Int[Array, "B n"], ...] | None = None,
) -> Float[Array, "B L H D"]:
  """Computes causal attention within segments.

  A token sees those at or before it in its row that have its segment id or its
  prefix id, if any. The output of padding is undefined. Logits are float32 and
  exist for one pair of blocks at a time, in the backward pass too.

  Args:
    backend: a key of `BACKENDS`.
    ranges: result of `block_ranges`, to compute it once for all layers.
  """
  run, ids = BACKENDS[backend], (segment_ids, prefix_ids)
  if ranges is not None:
    ids = *ids, ranges
  mesh = jax.sharding.get_abstract_mesh()
  if axis_names := set(mesh.axis_names) - set(mesh.manual_axes):
    # Each device computes its own rows and heads: the compiler knows neither
    # how many blocks a row needs nor how to partition a kernel.
    by_head = sharding.unclaimed_spec("batch", None, "heads", None)
    by_row = sharding.unclaimed_spec("batch", None)
    run = jax.shard_map(
      run,
      in_specs=(by_head,) * 3 + (by_row,) * len(ids),
      out_specs=by_head,
      axis_names=axis_names,
      check_vma=False,
    )
  return run(q, k, v, *ids)


def block_ranges(
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"] | None,
  backend: str,
) -> tuple[Int[Array, "B n"], ...] | None:
  """Returns what a backend computes from the ids alone; None if nothing."""
  if backend != "triton":
    return None
  return flash_kernel.block_ranges(segment_ids, prefix_ids)


def attend_prompts(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  lengths: Int[Array, "B"],
  backend: str = "xla",
) -> Float[Array, "B L H D"]:
  """Computes causal attention of one sequence per row, padded at its end.

  Rows may be of any length: for a kernel they are padded to full blocks.
  """
  length = q.shape[1]
  is_kernel = backend in KERNELS
  if is_kernel:
    pad = (0, 0), (0, -length % LANES), (0, 0), (0, 0)
    q, k, v = (jnp.pad(x, pad) for x in (q, k, v))
  is_real = jnp.arange(q.shape[1], dtype=jnp.int32) < lengths[:, None]
  ids = is_real.astype(jnp.int32)
  if is_kernel:
    return attention(q, k, v, ids, backend=backend)[:, :length]
  # Plain XLA: the compiler spreads heads by itself, and takes any row count.
  return BACKENDS[backend](q, k, v, ids)
