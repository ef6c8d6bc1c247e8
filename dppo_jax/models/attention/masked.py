"""Attention with a mask of all pairs of tokens, for GPUs.

A loop over blocks, whose length the device computes, would make the host wait.
The mask is the same for all heads: a byte for each pair of tokens of a row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dppo_jax.models import gpu_library

LONGEST = 2**14  # tokens of a row; its mask then has 256 MiB


def by_kernel(q, k, v, end, window=None):
  """Computes `models.attention.attention` by the kernels of tokamax."""
  import tokamax  # an extra

  return tokamax.dot_product_attention(
    q,
    k,
    v,
    mask=_mask(end, window),
    is_causal=True,
    implementation=gpu_library.IMPLEMENTATIONS,
  )


def dense(q, k, v, end, window=None):
  """Computes `models.attention.attention` with all logits of a row at once."""
  mask = _mask(end, window)
  return jax.nn.dot_product_attention(
    q, k, v, mask=mask, is_causal=True, implementation="xla"
  )


def _mask(
  end: Int[Array, "B L"] | None,
  window: tuple[Int[Array, "B L"], Int[Array, "B L"]] | None,
) -> Bool[Array, "B 1 L L"] | None:
  """Returns the keys that each query sees, later ones included."""
  mask = None
  if end is not None:
    query = jnp.arange(end.shape[1], dtype=jnp.int32)[:, None]
    mask = (query < end[:, None])[:, None]
  if window is not None:
    position, oldest = window
    in_window = (position[:, None] >= oldest[:, :, None])[:, None]
    mask = in_window if mask is None else mask & in_window
  return mask
