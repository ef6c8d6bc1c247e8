"""Products of groups of rows by Pallas kernels for NVIDIA GPUs.

There `jax.lax.ragged_dot` multiplies all rows with every matrix (XLA of jax
0.10.2): it copies the rows once for each group, with zeros for all other rows.
"""

import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dppo_jax.models.attention.flash_kernel import dot
from dppo_jax.sharding import round_up

_ROWS = 64  # most rows of a group that a program multiplies at once
_WIDTH = 128  # most columns of a matrix
_INNER = 64  # most products summed at once
_LEAST = 16  # smallest side of a product on tensor cores


def fits(inner: int, outer: int) -> bool:
  """Returns True for matrices that divide into blocks for tensor cores."""
  return min(math.gcd(inner, _INNER), math.gcd(outer, _INNER)) >= _LEAST


def product(
  rows: Float[Array, "M E"],
  weights: Float[Array, "X E F"] | Float[Array, "X F E"],
  sizes: Int[Array, "X"],
  is_transposed: bool = False,
) -> Float[Array, "M F"]:
  """Computes `models.grouped.product`, on request with transposed matrices.

  Programs divide the blocks of rows, each within one group, and the width of
  the result.
  """
  inner, outer = weights.shape[:0:-1] if is_transposed else weights.shape[1:]
  block, width = _block(rows, sizes), math.gcd(outer, _WIDTH)
  num_blocks = pl.cdiv(len(rows), block) + len(sizes)
  ends, blocks = jnp.cumsum(sizes), -(-sizes // block)
  last_blocks = jnp.cumsum(blocks)
  number = jnp.arange(num_blocks, dtype=jnp.int32)
  group = (last_blocks <= number[:, None]).sum(1, dtype=jnp.int32)
  group = jnp.minimum(group, len(sizes) - 1)
  number -= (last_blocks - blocks)[group]
  first = (ends - sizes)[group] + number * block
  return pl.pallas_call(
    functools.partial(
      _product_kernel,
      block=block,
      width=width,
      step=math.gcd(inner, _INNER),
      is_transposed=is_transposed,
    ),
    grid=(num_blocks, outer // width),
    out_shape=jax.ShapeDtypeStruct((len(rows), outer), rows.dtype),
    compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
    name="grouped_product",
  )(group, first.astype(jnp.int32), ends[group], rows, weights)


def outer_product(
  rows: Float[Array, "M E"], grad: Float[Array, "M F"], sizes: Int[Array, "X"]
) -> Float[Array, "X E F"]:
  """Returns the gradient of the matrices; programs divide its blocks."""
  shape = len(sizes), rows.shape[1], grad.shape[1]
  inner, width = math.gcd(shape[1], _WIDTH), math.gcd(shape[2], _WIDTH)
  ends = jnp.cumsum(sizes)
  return pl.pallas_call(
    functools.partial(
      _outer_kernel, block=_block(rows, sizes), inner=inner, width=width
    ),
    grid=(shape[1] // inner, shape[2] // width, shape[0]),
    out_shape=jax.ShapeDtypeStruct(shape, rows.dtype),
    compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
    name="grouped_outer_product",
  )(ends - sizes, ends, rows, grad)


def _block(rows, sizes) -> int:
  """Returns the rows of a block, a power of two: half of an average group."""
  average = round_up(max(len(rows) // len(sizes), 1), 2)
  return min(_ROWS, max(_LEAST, pl.next_power_of_2(average) // 2))


def _is_row(start, end, shape):
  """Returns True in a block of rows from `start` on for those before `end`."""
  index = start + jnp.arange(shape[0], dtype=jnp.int32)
  return jnp.broadcast_to((index < end)[:, None], shape)


def _load(ref, start, end, block, columns):
  """Returns a block of rows, of some columns; 0 at and beyond row `end`."""
  mask = _is_row(start, end, (block, columns.size))
  return plgpu.load(ref.at[pl.ds(start, block), columns], mask=mask, other=0.0)


def _product_kernel(
  group, first, end, rows, weights, out, *, block, width, step, is_transposed
):
  i, j = pl.program_id(0), pl.program_id(1)
  group, start, end = group[i], first[i], end[i]
  columns = pl.ds(j * width, width)

  def add(k, total):
    inner = pl.ds(k * step, step)
    here = (columns, inner) if is_transposed else (inner, columns)
    a = _load(rows, start, end, block, inner)
    return total + dot(a, weights[group, *here], trans_b=is_transposed)

  @pl.when(start < end)  # blocks beyond the last group have no rows
  def _():
    total = jnp.zeros((block, width), jnp.float32)
    total = jax.lax.fori_loop(0, rows.shape[1] // step, add, total)
    plgpu.store(
      out.at[pl.ds(start, block), columns],
      total.astype(out.dtype),
      mask=_is_row(start, end, total.shape),
    )


def _outer_kernel(first, end, rows, grad, out, *, block, inner, width):
  i, j, group = (pl.program_id(axis) for axis in range(3))
  start, end = first[group], end[group]
  to_rows, to_columns = pl.ds(i * inner, inner), pl.ds(j * width, width)

  def add(k, total):
    first = start + k * block
    a = _load(rows, first, end, block, to_rows)
    b = _load(grad, first, end, block, to_columns)
    return total + dot(a, b, trans_a=True)

  total = jnp.zeros((inner, width), jnp.float32)
  total = jax.lax.fori_loop(0, pl.cdiv(end - start, block), add, total)
  out[group, to_rows, to_columns] = total.astype(out.dtype)
