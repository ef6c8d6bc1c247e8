"""Seconds of the stages of a step."""

import collections
from collections.abc import Iterator
import contextlib
import time


class StageClock:
  """Measures the wall time of each stage of one step."""

  def __init__(self):
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self._start = time.monotonic()
    self._cpu_start = time.process_time()

  @contextlib.contextmanager
  def __call__(self, stage: str) -> Iterator[None]:
    """Adds the time inside the `with` block to `stage`."""
    start = time.monotonic()
    yield
    self.seconds[stage] += time.monotonic() - start

  def metrics(self) -> dict[str, float]:
    """Returns `stage/seconds` of every stage, and of the step so far.

    `step/cpu_seconds` is CPU time of this process, on all cores. Other
    processes do not affect it if they have other cores.
    """
    stages = {f"{stage}/seconds": s for stage, s in self.seconds.items()}
    return stages | {
      "step/seconds": time.monotonic() - self._start,
      "step/cpu_seconds": time.process_time() - self._cpu_start,
    }
