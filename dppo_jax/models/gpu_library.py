"""The library of kernels for NVIDIA GPUs, tokamax, where it can run."""

import importlib.util

import jax.numpy as jnp

BLOCK = 64  # rows; the backward passes take whole blocks only
# Tried in order: the kernels, and for devices without them plain XLA.
IMPLEMENTATIONS = ("mosaic_gpu", "xla")

HOPPER, BLACKWELL = 9.0, 10.0  # compute capabilities


def obstacle(dtype: str, capability: float = HOPPER) -> str:
  """Returns why the kernels cannot train; empty if they can.

  Args:
    dtype: dtype of the computation.
    capability: compute capability of the GPU.
  """
  if importlib.util.find_spec("tokamax") is None:
    return "tokamax is not installed (the extra cuda, Python 3.12 or newer)"
  if jnp.dtype(dtype).itemsize != 2:
    return f"tokamax needs bfloat16 or float16, not {dtype}"
  if not HOPPER <= capability < BLACKWELL + 1:
    return f"tokamax needs compute capability 9 or 10, not {capability}"
  return ""
