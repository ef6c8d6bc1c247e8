"""Causal attention over packed rows and over prompts, by several backends.

A row is laid out depth first: a prompt, and behind it what continues it, each
with its own continuations. So every key is seen by one interval of queries: a
query at `q` sees a key at `k` if and only if k <= q < end[k].
Decoding slots attend over their cache in `kv_cache.attend`.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import sharding
from dppo_jax.errors import UserError
from dppo_jax.models import gpu_library
from dppo_jax.models.attention import (
  blockwise,
  decode_kernel,
  masked,
  splash_kernel,
)
from dppo_jax.models.attention.splash_kernel import LANES, MAX_BRANCHES

# `(q, k, v, end, window) -> out`, as `attention`.
Backend = Callable[..., Float[Array, "B L H D"]]

BACKENDS: dict[str, Backend] = {
  # TPU: all rows at once, which launches fewer kernels.
  "xla": functools.partial(blockwise.attention, rows_at_once=None),
  # CPU: row by row, so that none computes blocks that only another one sees.
  "xla_by_row": functools.partial(blockwise.attention, rows_at_once=1),
  "xla_dense": masked.dense,  # GPU
  "splash": splash_kernel.attention,  # TPU
  "tokamax": masked.by_kernel,  # NVIDIA GPU
}

# Kernel -> the platform that it is written for.
KERNELS = {"splash": "tpu", "tokamax": "gpu"}

# Values of config.model.attention.
CHOICES = ("auto", "xla", *KERNELS)

# Tokens of a row whose logits plain XLA computes at once on a GPU; in longer
# ones the host of the GPU waits for a loop over blocks.
_LONGEST_DENSE = 2**12


class Shapes(NamedTuple):
  """Facts that the choice of a backend depends on.

  Attributes:
    platform: platform of the mesh's devices: cpu, gpu or tpu.
    row_length: tokens in a packed row.
    group_size: completions of a prompt.
    head_dim: size of a head.
    has_window: some layers see less than the longest sequence.
    dtype: dtype of the computation.
    capability: compute capability of a GPU.
  """

  platform: str
  row_length: int
  group_size: int
  head_dim: int
  has_window: bool = False
  dtype: str = "float32"
  capability: float = gpu_library.HOPPER


def choose_backend(name: str, shapes: Shapes) -> str:
  """Returns the key of `BACKENDS` that a run uses.

  Args:
    name: config.model.attention, one of `CHOICES`.
  """
  reason, platform = obstacle(shapes), shapes.platform
  if name in KERNELS and KERNELS[name] != platform:
    reason = f"it needs a {KERNELS[name].upper()}, not a {platform.upper()}"
  if name in KERNELS and reason:
    raise UserError(
      f"config.model.attention={name} cannot run: {reason}; set it to auto"
    )
  if name != "xla" and not reason:
    return next(x for x, where in KERNELS.items() if where == platform)
  return plain(platform, shapes.row_length)


def plain(platform: str, row_length: int) -> str:
  """Returns the key of `BACKENDS` for plain XLA."""
  if platform == "gpu":
    return "xla_dense" if row_length <= _LONGEST_DENSE else "xla"
  return "xla" if platform == "tpu" else "xla_by_row"


def obstacle(shapes: Shapes) -> str:
  """Returns why the platform's kernel cannot run; empty if it can."""
  length, heads = shapes.row_length, f"heads have {shapes.head_dim} numbers"
  where = f"config.pack.row_length is {length}"
  if shapes.platform == "tpu":
    num = shapes.group_size
    reasons = {
      f"{where} and no multiple of {LANES}": length % LANES,
      f"config.rollout.group_size is {num}, above {MAX_BRANCHES}": (
        num > MAX_BRANCHES
      ),
      "the model has a window shorter than a sequence": shapes.has_window,
    }
  elif shapes.platform == "gpu":
    missing = gpu_library.obstacle(shapes.dtype, shapes.capability)
    is_blackwell = shapes.capability >= gpu_library.BLACKWELL
    reasons = {
      missing: bool(missing),
      f"{where} and no multiple of {gpu_library.BLOCK}": (
        length % gpu_library.BLOCK
      ),
      f"{where}, above {masked.LONGEST}": length > masked.LONGEST,
      f"{heads}, above 128 on a Blackwell": (
        shapes.head_dim > 128 and is_blackwell
      ),
    }
  else:
    return "there is no kernel for it"
  return "; ".join(reason for reason, holds in reasons.items() if holds)


def attention(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  end: Int[Array, "B L"] | None,
  backend: str = "xla",
  window: tuple[Int[Array, "B L"], Int[Array, "B L"]] | None = None,
) -> Float[Array, "B L H D"]:
  """Computes causal attention within the sequences of rows.

  Logits are float32 and, but for `xla_dense`, exist for one pair of blocks at a
  time, in the backward pass too.

  Args:
    end: one past the last query that sees each key, its own place included;
      None if all later ones do, which the blocks of plain XLA do not take.
    backend: a key of `BACKENDS`.
    window: each token's position in its sequence, and the first position
      that it sees; None if it sees all, as in the kernel for TPUs.
  """
  run = BACKENDS[backend]
  if axis_names := sharding.free_axes():
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
  return run(q, k, v, end, window)


def seen_by_itself(end: Int[Array, "B L"]) -> Int[Array, "B L"]:
  """Returns `end`, but at least one past the key's own place."""
  return jnp.maximum(end, 1 + jnp.arange(end.shape[1], dtype=jnp.int32))


def attend_prompts(
  q: Float[Array, "B L H D"],
  k: Float[Array, "B L K D"],
  v: Float[Array, "B L K D"],
  lengths: Int[Array, "B"],
  backend: str = "xla",
  oldest: Int[Array, "B L"] | None = None,
) -> Float[Array, "B L H D"]:
  """Computes causal attention of one sequence per row, padded at its end.

  Rows may be of any length: for a kernel they are padded to full blocks. What
  follows a sequence is not seen by it, and its output is undefined.

  Args:
    oldest: first position that each token sees; None for 0.
  """
  length = q.shape[1]
  padding = 0, -length % LANES if backend in KERNELS else 0
  pad = (0, 0), padding, (0, 0), (0, 0)
  q, k, v = (jnp.pad(x, pad) for x in (q, k, v))
  end = seen_by_itself(jnp.broadcast_to(lengths[:, None], q.shape[:2]))
  window = None
  if oldest is not None:
    index = jnp.arange(q.shape[1], dtype=jnp.int32)
    window = jnp.broadcast_to(index, end.shape), jnp.pad(oldest, pad[:2])
  if backend in KERNELS:
    out = attention(q, k, v, None, backend, window)
    return out[:, :length]
  # Plain XLA: the compiler spreads heads by itself, and takes any row count.
  return BACKENDS[backend](q, k, v, end, window)
