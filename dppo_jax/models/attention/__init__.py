"""Causal attention over packed rows and over prompts, by several backends.

A position attends to what its segment and prefix ids allow; id 0 is padding.
The ids of rows come from `algo.packing.fill`, of prompts from `attend_prompts`.
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
  splash_kernel,
)
from dppo_jax.models.attention.splash_kernel import LANES, MAX_BRANCHES

# Each `(q, k, v, segment_ids, prefix_ids) -> out`, as `attention`. `window` and
# `ranges` are passed by name: the first not to splash, the second to triton.
BACKENDS = {
  # TPU: all rows at once, which launches fewer kernels.
  "xla": functools.partial(blockwise.attention, rows_at_once=None),
  # CPU: row by row, so that none computes blocks that only another one sees.
  "xla_by_row": functools.partial(blockwise.attention, rows_at_once=1),
  # GPU: all pairs of tokens, since its host would wait for each loop over
  # blocks whose length the device computes.
  "xla_dense": blockwise.dense,
  "splash": splash_kernel.attention,  # TPU
  "triton": flash_kernel.attention,  # NVIDIA GPU
}

# Pallas kernel -> the platform that it is written for.
KERNELS = {"splash": "tpu", "triton": "gpu"}

# Values of config.model.attention.
CHOICES = ("auto", "xla", *KERNELS)


def choose_backend(
  name: str,
  platform: str,
  row_length: int,
  group_size: int,
  head_dim: int,
  has_window: bool = False,
  dtype: str = "float32",
) -> str:
  """Returns the key of `BACKENDS` that a run uses.

  Args:
    name: config.model.attention, one of `CHOICES`.
    platform: platform of the mesh's devices: cpu, gpu or tpu.
    row_length: tokens in a packed row.
    group_size: completions of a prompt.
    head_dim: size of a head.
    has_window: some layers see less than the longest sequence.
    dtype: dtype of the computation.
  """
  plain = {"cpu": "xla_by_row", "tpu": "xla"}.get(platform, "xla_dense")
  fits = {
    ("splash", "tpu"): row_length % LANES == 0
    and group_size <= MAX_BRANCHES
    and not has_window,
    # Its blocks are powers of two.
    ("triton", "gpu"): row_length % 16 == 0
    # 256 in float32 exceeds the shared memory
    and 16 <= head_dim <= (256 if dtype == "bfloat16" else 128)
    and head_dim.bit_count() == 1,
  }
  if name in ("auto", "xla"):
    kernels = [x for x in KERNELS if fits.get((x, platform)) and name == "auto"]
    return kernels[0] if kernels else plain
  if not fits.get((name, platform)):
    limits = {
      "splash": f"a TPU, config.pack.row_length a multiple of {LANES}, "
      f"config.rollout.group_size at most {MAX_BRANCHES} and no window",
      "triton": "a GPU, config.pack.row_length a multiple of 16 and heads of "
      "16, 32, 64, 128 or, in bfloat16, 256 numbers",
    }
    window = "a window shorter than a sequence, " if has_window else ""
    raise UserError(
      f"config.model.attention={name} needs {limits[name]}, not a "
      f"{platform}, rows of {row_length}, groups of {group_size}, {window}"
      f"heads of {head_dim} and {dtype}: set it to auto"
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
  window: tuple[Int[Array, "B L"], Int[Array, "B L"]] | None = None,
) -> Float[Array, "B L H D"]:
  """Computes causal attention within segments.

  A token sees those at or before it in its row that have its segment id or its
  prefix id, if any. The output of padding is undefined. Logits are float32 and
  exist for one pair of blocks at a time, in the backward pass too.

  Args:
    backend: a key of `BACKENDS`.
    ranges: result of `block_ranges`, to compute it once for all layers.
    window: each token's position in its sequence, and the first position
      that it sees; None if it sees all, as in the kernel for TPUs.
  """
  more = {"ranges": ranges, "window": window}
  more = {name: x for name, x in more.items() if x is not None}

  def run(q, k, v, segment_ids, prefix_ids, more):
    return BACKENDS[backend](q, k, v, segment_ids, prefix_ids, **more)

  if axis_names := sharding.free_axes():
    # Each device computes its own rows and heads: the compiler knows neither
    # how many blocks a row needs nor how to partition a kernel.
    by_head = sharding.unclaimed_spec("batch", None, "heads", None)
    by_row = sharding.unclaimed_spec("batch", None)
    run = jax.shard_map(
      run,
      in_specs=(by_head,) * 3 + (by_row,) * 3,
      out_specs=by_head,
      axis_names=axis_names,
      check_vma=False,
    )
  return run(q, k, v, segment_ids, prefix_ids, more)


def block_ranges(
  segment_ids: Int[Array, "B L"],
  prefix_ids: Int[Array, "B L"] | None,
  backend: str,
  head_dim: int,
) -> tuple[Int[Array, "B n"], ...] | None:
  """Returns what a backend computes from the ids alone; None if nothing."""
  if backend != "triton":
    return None
  return flash_kernel.block_ranges(segment_ids, prefix_ids, head_dim)


def attend_prompts(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  lengths: Int[Array, "B"],
  backend: str = "xla",
  oldest: Int[Array, "B L"] | None = None,
) -> Float[Array, "B L H D"]:
  """Computes causal attention of one sequence per row, padded at its end.

  Rows may be of any length: for a kernel they are padded to full blocks.

  Args:
    oldest: first position that each token sees; None for 0.
  """
  length = q.shape[1]
  padding = 0, -length % LANES if backend in KERNELS else 0
  pad = (0, 0), padding, (0, 0), (0, 0)
  q, k, v = (jnp.pad(x, pad) for x in (q, k, v))
  index = jnp.arange(q.shape[1], dtype=jnp.int32)
  ids = (index < lengths[:, None]).astype(jnp.int32)
  window = None
  if oldest is not None:
    window = jnp.broadcast_to(index, ids.shape), jnp.pad(oldest, pad[:2])
  if backend in KERNELS:
    out = attention(q, k, v, ids, backend=backend, window=window)
    return out[:, :length]
  # Plain XLA: the compiler spreads heads by itself, and takes any row count.
  return BACKENDS[backend](q, k, v, ids, ids, window=window)
