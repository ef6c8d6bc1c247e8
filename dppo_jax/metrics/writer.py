"""Writes a run's metrics, samples and messages.

Metrics are named `stage/quantity`; README.md explains each of them.
"""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import os
import pathlib
import time
import traceback
from typing import Any

from dppo_jax.errors import UserError, writing
from dppo_jax.files import jsonl
from dppo_jax.metrics import health, progress, trackers
from dppo_jax.metrics.samples import choose_columns


class Writer(contextlib.AbstractContextManager):
  """Writes metrics, samples, all completions, `log.txt`, and to trackers.

  The `step` of a line is the number of steps done. A tracker that fails is
  dropped: it must not end the run.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    first_step: int | None,
    bar: progress.Progress,
    watch: health.Health,
    writers: str,
    config: Mapping[str, Any],
  ):
    """Removes lines after `first_step`, as the run will write them again.

    Args:
      first_step: step of the checkpoint to resume from; None for a new run.
      writers: as `config.log.writers`.
      config: options of the run by name, which trackers show.
    """
    first_step = -1 if first_step is None else first_step
    self.bar, self._watch, self._workdir = bar, watch, workdir
    self._trackers: dict[str, Any] = {}
    for name in ("metrics.jsonl", "samples.jsonl"):
      jsonl.keep_until(workdir / name, first_step)
    for path in (workdir / "completions").glob("step-*.jsonl"):
      number = path.stem.removeprefix("step-")
      if number.isdecimal() and int(number) > first_step:
        path.unlink()
    for line in jsonl.read(workdir / "metrics.jsonl"):
      watch.check(line["step"], line)
    self._files = ("metrics.jsonl", "samples.jsonl", "log.txt")
    for name in self._files:
      (workdir / name).touch()
    names = trackers.parse(writers)
    self._keeps_completions = trackers.COMPLETIONS in names
    for name in trackers.TRACKERS.keys() & names:
      with self._dropping(name):
        tracker = trackers.TRACKERS[name](workdir, config, first_step)
        self._trackers[name] = tracker

  def __exit__(self, *unused) -> None:
    self._each_tracker("close")

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes a line of metrics, and prints a warning if they look wrong."""
    values = {name: float(value) for name, value in values.items()}
    warnings, messages = self._watch.check(step, values)
    values |= warnings
    self._append("metrics.jsonl", jsonl.line({"step": step, **values}))
    self._each_tracker("scalars", step, values)
    for message in messages:
      self.say(message)

  def write_samples(self, step: int, split: str, samples: list[dict]) -> None:
    """Writes completions; `split` is "train", "eval" or "eval/NAME"."""
    lines = [{"step": step, "split": split, **x} for x in samples]
    self._append("samples.jsonl", "".join(map(jsonl.line, lines)))
    if samples:
      self._each_tracker(
        "table", step, f"samples/{split}", *choose_columns(samples)
      )

  def write_completions(self, step: int, lines: Iterable[dict]) -> None:
    """Writes all completions of a step, if the run keeps them."""
    if self._keeps_completions:
      path = self._workdir / f"completions/step-{step:06d}.jsonl"
      with writing(path):
        path.parent.mkdir(exist_ok=True)
      jsonl.replace(path, (jsonl.line({"step": step, **x}) for x in lines))

  def sync(self) -> None:
    """Makes sure that all files are on disk before a checkpoint is saved."""
    for name in self._files:
      path = self._workdir / name
      with writing(path), path.open() as file:
        os.fsync(file.fileno())

  def say(self, message: str) -> None:
    """Prints a message, and adds it to `log.txt`."""
    self.log(message)
    self.bar.say(progress.wrapped(message))

  def log(self, text: str) -> None:
    """Adds text to `log.txt` only, such as a traceback."""
    with contextlib.suppress(OSError):  # a full disk is reported elsewhere
      now = time.strftime("%Y-%m-%d %H:%M:%S")
      self._write("log.txt", f"{now} {text}\n")

  def _append(self, name: str, text: str) -> None:
    path = self._workdir / name
    if not path.exists():
      raise UserError(f"{path} was deleted: the run cannot be saved")
    with writing(path):
      self._write(name, text)

  def _write(self, name: str, text: str) -> None:
    with (self._workdir / name).open("a", **jsonl.ENCODING) as file:
      file.write(text)

  def _each_tracker(self, method: str, *args) -> None:
    for name, tracker in [*self._trackers.items()]:
      with self._dropping(name):
        getattr(tracker, method)(*args)

  @contextlib.contextmanager
  def _dropping(self, name: str) -> Iterator[None]:
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
    self.write = self.write_samples = lambda *unused: None
    self.write_completions = lambda *unused: None
    self.say = self.log = self.sync = lambda *unused: None
