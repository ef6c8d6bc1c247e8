"""Reference rates of the machine, measured in the same run."""

from collections.abc import Callable
import platform
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Seconds(NamedTuple):
  """Seconds of several repetitions."""

  median: float
  least: float
  most: float


def timed(run: Callable[[], Any], repeats: int) -> Seconds:
  """Wall seconds of `run()`, after one call that is not counted."""
  jax.block_until_ready(run())
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(run())
    seconds.append(time.perf_counter() - start)
  return Seconds(statistics.median(seconds), min(seconds), max(seconds))


def yardstick(repeats: int) -> dict[str, float]:
  """FLOP/s of large square matrix products, and bytes/s of reading and writing.

  Both are what plain JAX programs reach here, not the figures of a data sheet.
  """
  size = 2048 if jax.default_backend() == "cpu" else 8192
  rates = {}
  for dtype in ("float32", "bfloat16"):
    a = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    seconds = timed(lambda f=product, a=a: f(a), repeats)
    rates[f"{dtype}_flops"] = 2 * size**3 / seconds.median
  held = [jnp.ones((1 << 26,), jnp.float32)]  # 256 MiB, past every cache
  # In place: pages that were never touched would be timed too.
  add = jax.jit(lambda x: x + 1, donate_argnums=0)

  def sweep():
    held[0] = add(held[0])
    return held[0]

  rates["bytes"] = 2 * held[0].nbytes / timed(sweep, repeats).median
  return rates


def description() -> dict[str, str]:
  """Returns the hardware and software of the measurements."""
  name = platform.processor() or platform.machine()
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
      lines = [line for line in file if line.startswith("model name")]
    name = lines[0].partition(":")[2].strip() if lines else name
  except OSError:
    pass
  devices = jax.devices()
  return {
    "cpu": name,
    "device": f"{len(devices)} x {devices[0].device_kind}",
    "jax": jax.__version__,
    "python": platform.python_version(),
  }
