"""Products of groups of rows, each group with its own matrix.

Each platform has an implementation that does only the necessary work.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax import sharding
from dppo_jax.models import gpu_library

_LARGEST_BLOCK = 64  # rows that a CPU multiplies at once
# Rows, inner and outer width that a TPU's kernel has in fast memory at once.
_TILE = (512, 1024, 768)
_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((0,), (0,)), ((), ())),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[],
)


@jax.custom_vjp
def product(
  rows: Float[Array, "M E"],
  weights: Float[Array, "X E F"],
  sizes: Int[Array, "X"],
) -> Float[Array, "M F"]:
  """Returns the rows of each group times its matrix, as `jax.lax.ragged_dot`.

  Rows beyond all groups are undefined, in the product and in the gradient. On a
  CPU `ragged_dot` is a dense product of all rows with every matrix (jax 0.10.2
  and 0.12.0). On a TPU only the gradient of the weights is dense: for 32 groups
  on a v5e the compiler counts 11.3 times the ideal work of all three products,
  and 1.0 times with the kernel below (jax 0.10.2). On a GPU every product is
  dense, except by the kernels of `gpu_library`.
  """
  ways = {"cpu": _by_blocks, "default": jax.lax.ragged_dot}
  if _suits_library(rows):
    ways["cuda"] = _by_library
  return jax.lax.platform_dependent(rows, weights, sizes, **ways)


def _forward(rows, weights, sizes):
  return product(rows, weights, sizes), (rows, weights, sizes)


def _backward(saved, grad):
  rows, weights, sizes = saved
  to_weights = {"cpu": _outer_by_blocks, "default": _outer}
  if len(rows) % 128 == 0:
    to_weights["tpu"] = _outer_by_kernel
  if _suits_library(rows):
    to_weights["cuda"] = _outer_by_library
  return (
    product(grad, weights.swapaxes(1, 2), sizes),
    jax.lax.platform_dependent(rows, grad, sizes, **to_weights),
    None,
  )


product.defvjp(_forward, _backward)


def _by_blocks(rows, weights, sizes):
  """Multiplies blocks of a group's rows, one after the other.

  The last block of a group reaches into the next group, which overwrites it.
  """
  size, num_blocks, span = _blocks(len(rows), sizes)
  rows = jnp.pad(rows, ((0, size), (0, 0)))

  def multiply(i, out):
    group, first, _ = span(i)
    block = jax.lax.dynamic_slice_in_dim(rows, first, size) @ weights[group]
    return jax.lax.dynamic_update_slice_in_dim(out, block, first, 0)

  out = jnp.zeros((len(rows), weights.shape[2]), rows.dtype)
  out = jax.lax.fori_loop(0, num_blocks, multiply, out)
  return out[: len(rows) - size]


def _outer_by_blocks(rows, grad, sizes):
  """Returns the gradient of the weights, summed block by block."""
  size, num_blocks, span = _blocks(len(rows), sizes)
  rows, grad = (jnp.pad(x, ((0, size), (0, 0))) for x in (rows, grad))

  def add(i, out):
    group, first, end = span(i)
    a, b = (jax.lax.dynamic_slice_in_dim(x, first, size) for x in (rows, grad))
    is_in_group = first + jnp.arange(size, dtype=jnp.int32) < end
    a, b = (jnp.where(is_in_group[:, None], x, 0) for x in (a, b))
    return out.at[group].add(a.T @ b)

  out = jnp.zeros((len(sizes), rows.shape[1], grad.shape[1]), rows.dtype)
  return jax.lax.fori_loop(0, num_blocks, add, out)


def _blocks(num_rows: int, sizes: Int[Array, "X"]):
  """Returns the rows of a block, the number of blocks, and a span of each.

  A span is the block's group, its first row and the end of the group's rows.
  """
  size = sharding.round_up(max(num_rows // len(sizes), 1), 8)
  size = min(size, _LARGEST_BLOCK)
  ends, blocks = jnp.cumsum(sizes), -(-sizes // size)
  last_blocks = jnp.cumsum(blocks)

  def span(i):
    group = (last_blocks <= i).sum(dtype=jnp.int32)
    number = i - (last_blocks - blocks)[group]
    return group, (ends - sizes)[group] + number * size, ends[group]

  return size, last_blocks[-1], span


def _suits_library(rows) -> bool:
  has_blocks = len(rows) % gpu_library.BLOCK == 0
  return has_blocks and not gpu_library.obstacle(str(rows.dtype))


def _by_library(rows, weights, sizes):
  import tokamax  # an extra

  ways = gpu_library.IMPLEMENTATIONS
  return tokamax.ragged_dot(rows, weights, sizes, implementation=ways)


def _outer(rows, grad, sizes):
  return jax.lax.ragged_dot_general(rows, grad, sizes, _BY_GROUP)


def _outer_by_library(rows, grad, sizes):
  """Returns the gradient of the weights; dense on a Blackwell."""
  import tokamax

  ways = gpu_library.IMPLEMENTATIONS
  return tokamax.ragged_dot_general(
    rows, grad, sizes, _BY_GROUP, implementation=ways
  )


def _outer_by_kernel(rows, grad, sizes, interpret=False):
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm  # slow

  largest = sharding.largest_divisor(len(rows) // 128, _TILE[0] // 128)
  inner, outer = rows.shape[1], grad.shape[1]
  tile = (128 * largest, min(_TILE[1], inner), min(_TILE[2], outer))
  with jax.numpy_dtype_promotion("standard"):  # the kernel adds bool to int
    return tgmm(rows.T, grad, sizes, rows.dtype, tile, interpret=interpret)
