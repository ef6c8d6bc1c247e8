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
from dppo_jax.models.attention import blockwise, kernels
from dppo_jax.models.attention.kernels import LANES, MAX_BRANCHES

# Each `(q, k, v, segment_ids, prefix_ids) -> out`, as `attention`.
BACKENDS = {
  # Any platform: all rows at once, which launches fewer kernels. Not measured.
  "xla": functools.partial(blockwise.attention, rows_at_once=None),
  # CPU: row by row, so that none computes blocks that only another one sees.
  "xla_by_row": functools.partial(blockwise.attention, rows_at_once=1),
  "splash": kernels.splash,  # TPU
  "triton": kernels.triton,  # NVIDIA GPU
}

# Pallas kernel -> the platform that it is written for.
KERNELS = {"splash": "tpu", "triton": "gpu"}

# Values of config.model.attention.
CHOICES = ("auto", "xla", *KERNELS)


def choose_backend(
  name: str, platform: str, row_length: int, group_size: int
) -> str:
  """Returns the key of `BACKENDS` that a run uses.

  Args:
    name: config.model.attention, one of `CHOICES`.
    platform: platform of the mesh's devices: cpu, gpu or tpu.
    row_length: tokens in a packed row.
    group_size: completions of a prompt.
  """
  fits = row_length % LANES == 0 and group_size <= MAX_BRANCHES
  if name == "auto" and platform == "tpu" and fits:
    return "splash"
  if name in ("auto", "xla"):
    return "xla_by_row" if platform == "cpu" else "xla"
  if platform != KERNELS[name] or not fits:
    raise UserError(
      f"config.model.attention={name} needs a {KERNELS[name]}, "
      f"config.pack.row_length a multiple of {LANES} and "
      f"config.rollout.group_size at most {MAX_BRANCHES}, not a {platform}, "
      f"{row_length} and {group_size}: set it to auto"
    )
  return name


def attention(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"] | None = None,
  backend: str = "xla",
) -> Float[Array, "B L H D"]:
  """Computes causal attention within segments.

  A token sees those at or before it in its row that have its segment id or its
  prefix id, if any. The output of padding is undefined. Logits are float32 and
  exist for one pair of blocks at a time, in the backward pass too.

  Args:
    backend: a key of `BACKENDS`.
  """
  run = BACKENDS[backend]
  mesh = jax.sharding.get_abstract_mesh()
  if axis_names := set(mesh.axis_names) - set(mesh.manual_axes):
    # Each device computes its own rows and heads: the compiler knows neither
    # how many blocks a row needs nor how to partition a kernel.
    by_head = sharding.unclaimed_spec("batch", None, "heads", None)
    by_row = sharding.unclaimed_spec("batch", None)
    run = jax.shard_map(
      run,
      in_specs=(by_head,) * 3 + (by_row,) * 2,
      out_specs=by_head,
      axis_names=axis_names,
      check_vma=False,
    )
  return run(q, k, v, segment_ids, prefix_ids)


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
