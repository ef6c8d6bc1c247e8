"""Reference rates of the machine, measured in the same run."""

from collections.abc import Callable
import platform
import statistics
import time
from typing import Any, NamedTuple

import jax

from dppo_jax.planning import step_time


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
  rates = {}
  for dtype in ("float32", "bfloat16"):
    rate, rates["bytes"] = step_time.ceilings(dtype, repeats=repeats)
    rates[f"{dtype}_flops"] = rate
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
