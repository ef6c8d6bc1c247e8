"""Writes a run's metrics, samples and messages, and times its stages.

Metrics are named `stage/quantity`; README.md explains each of them.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import json
import os
import pathlib
import time
import traceback
from typing import Any

from dppo_jax.analysis import jsonl
from dppo_jax.errors import UserError
from dppo_jax.metrics import progress
from dppo_jax.metrics import warnings as health

_LINES = ("metrics.jsonl", "samples.jsonl")


class Writer:
  """Writes `metrics.jsonl`, `samples.jsonl` and `log.txt`, and to trackers.

  The `step` of a line is the number of steps done.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    first_step: int | None,
    bar: progress.Progress,
    watch: health.Health | None = None,
    openers: Mapping[str, Callable[[int], Any]] | None = None,
  ):
    """Removes lines after `first_step`, as the run will write them again.

    Args:
      first_step: step of the checkpoint to resume from; None for a new run.
      bar: shows messages.
      watch: adds warnings to the metrics.
      openers: constructors of trackers, as `trackers.openers` returns them.
    """
    first_step = -1 if first_step is None else first_step
    self.bar, self._watch, self._workdir = bar, watch, workdir
    messages = [
      message
      for name in _LINES
      for message in jsonl.keep_until(workdir / name, first_step)
    ]
    if watch:
      for line in jsonl.read(workdir / "metrics.jsonl"):
        watch.check(line["step"], line)
    self._files = {
      name: (workdir / name).open(
        "a", encoding="utf-8", errors="backslashreplace"
      )
      for name in (*_LINES, "log.txt")
    }
    self._trackers = {}
    for message in messages:
      self.say(message)
    for name, open_one in (openers or {}).items():
      with self._dropping(name):
        self._trackers[name] = open_one(first_step)

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, *unused) -> None:
    self._each_tracker("close")
    for file in self._files.values():
      with contextlib.suppress(OSError):  # every line has been flushed
        file.close()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes a line of metrics, and prints a warning if they look wrong.

    Raises:
      UserError: if the disk is full or the working directory was deleted.
    """
    values = {name: float(value) for name, value in values.items()}
    messages = []
    if self._watch:
      warnings, messages = self._watch.check(step, values)
      values |= warnings
    self._append("metrics.jsonl", json.dumps({"step": step, **values}) + "\n")
    self._each_tracker("scalars", step, values)
    for message in messages:
      self.say(message)

  def write_samples(self, step: int, split: str, samples: list[dict]) -> None:
    """Writes completions with their problems, answers and rewards.

    Args:
      split: "train", "eval" or "eval/NAME".
    """
    lines = (
      json.dumps({"step": step, "split": split, **x}, ensure_ascii=False)
      for x in samples
    )
    self._append("samples.jsonl", "".join(f"{line}\n" for line in lines))

  def sync(self) -> None:
    """Makes sure that everything is on disk before a checkpoint is saved."""
    for name, file in self._files.items():
      with jsonl.writing(self._workdir / name):
        os.fsync(file.fileno())
    self._each_tracker("sync")

  def say(self, message: str) -> None:
    """Prints a message, and adds it to `log.txt`."""
    self.log(message)
    self.bar.say(progress.wrapped(message))

  def log(self, text: str) -> None:
    """Adds text to `log.txt` only, such as a traceback."""
    with contextlib.suppress(OSError):  # a full disk is reported elsewhere
      now = time.strftime("%Y-%m-%d %H:%M:%S")
      self._files["log.txt"].write(f"{now} {text}\n")
      self._files["log.txt"].flush()

  def _append(self, name: str, text: str) -> None:
    path = self._workdir / name
    with jsonl.writing(path):
      self._files[name].write(text)
      self._files[name].flush()
    if not path.exists():  # the open file was deleted
      raise UserError(
        f"the working directory {self._workdir} no longer exists, or {name} in "
        "it was deleted: the run cannot be saved"
      )

  def _each_tracker(self, method: str, *args) -> None:
    for name, tracker in [*self._trackers.items()]:
      with self._dropping(name):
        getattr(tracker, method)(*args)

  @contextlib.contextmanager
  def _dropping(self, name: str) -> Iterator[None]:
    """Drops a tracker that fails: it must not end the run."""
    try:
      yield
    except Exception as error:
      self._trackers.pop(name, None)
      self.log(traceback.format_exc())
      self.say(f"warning: {name} failed and is off from here on: {error!r}")


class Silent:
  """The writer of all processes but the first, which writes nothing."""

  def __init__(self, bar: progress.Progress):
    self.bar = bar

  def __enter__(self) -> "Silent":
    return self

  def __exit__(self, *unused) -> None:
    pass

  def __getattr__(self, name: str) -> Callable[..., None]:
    getattr(Writer, name)  # an AttributeError for what no writer can do
    return lambda *unused: None


class Clock:
  """Seconds spent in each stage of one step."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._start = time.monotonic()
    self._cpu_start = time.process_time()

  @contextlib.contextmanager
  def __call__(self, stage: str) -> Iterator[None]:
    """Adds the time inside the `with` block to `stage`."""
    start = time.monotonic()
    yield
    spent = time.monotonic() - start
    self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

  def metrics(self) -> dict[str, float]:
    """Seconds of every stage and of the step.

    `step/cpu_seconds` is the time of all cores, which other processes on the
    machine hardly change.
    """
    stages = {f"{stage}/seconds": x for stage, x in self.seconds.items()}
    return stages | {
      "step/seconds": time.monotonic() - self._start,
      "step/cpu_seconds": time.process_time() - self._cpu_start,
    }
