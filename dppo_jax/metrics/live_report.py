"""The report of a run that is still going on."""

import pathlib
import time
import traceback

from dppo_jax.metrics import jsonl, report
from dppo_jax.metrics import writer as metrics

_SHARE = 0.02  # of the run's time, at most


class LiveReport:
  """Writes the report anew, while that costs next to nothing."""

  def __init__(self, workdir: pathlib.Path, writer: metrics.Writer):
    self._workdir, self._writer = workdir, writer
    self._start = time.monotonic()
    self._spent = 0.0  # seconds
    self._next = 1.0  # a guess of what the first takes

  def refresh(self, step: int) -> None:
    """Writes the report if it is cheap; whatever fails goes to `log.txt`."""
    elapsed = time.monotonic() - self._start
    if self._spent + self._next > _SHARE * elapsed:
      return
    try:
      self.write(step)
    except Exception:  # a run does not end for want of a picture
      self._writer.log(traceback.format_exc())
    self._next = time.monotonic() - self._start - elapsed
    self._spent += self._next

  def write(self, step: int) -> pathlib.Path:
    """Writes the report; returns its path."""
    with jsonl.writing(self._workdir / "report.md"):
      page = report.write(self._workdir)
    self._writer.image(step, "report", page.with_suffix(".png"))
    return page
