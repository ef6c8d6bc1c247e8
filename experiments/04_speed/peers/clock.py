"""Stamps the end of every step, in every system alike."""

from collections.abc import Callable
import functools
import json
import os
import pathlib
import time
from typing import Any

STARTED = "PEERS_STARTED"  # time.monotonic() at which the process was started


class Clock:
  """Writes a JSON line at the end of each step.

  A step lasts from the end of the one before, the first from the start of the
  process: `seconds` by the wall, `cpu_seconds` of all threads, and the values
    added to it.
  """

  def __init__(self, path: pathlib.Path):
    self._file = path.open("w")
    self._wall, self._cpu = float(os.environ[STARTED]), 0.0
    self._step = 0
    self._values: dict[str, float] = {}

  def add(self, **values: float) -> None:
    """Adds a value to the line of the current step."""
    for name, value in values.items():
      self._values[name] = self._values.get(name, 0) + float(value)

  def timed(self, name: str, function: Callable) -> Callable:
    """`function`, adding the seconds that each call takes."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
      start = time.monotonic()
      out = function(*args, **kwargs)
      self.add(**{name: time.monotonic() - start})
      return out

    return call

  def end(self) -> None:
    """Ends the step in hand."""
    wall, cpu = time.monotonic(), time.process_time()
    self._step += 1
    line = {
      "step": self._step,
      "seconds": wall - self._wall,
      "cpu_seconds": cpu - self._cpu,
      **self._values,
    }
    self._file.write(json.dumps(line) + "\n")
    self._file.flush()
    self._wall, self._cpu, self._values = wall, cpu, {}


def repeat(function: Callable[[], None], times: int = 3) -> list[float]:
  """Seconds of each call, after a first call that is not counted."""
  function()
  out = []
  for _ in range(times):
    start = time.monotonic()
    function()
    out.append(time.monotonic() - start)
  return out
