"""What a run writes: metrics, samples, and the clock of its stages.

Metrics are named `stage/quantity`. Where they are computed:

  prompts completions groups tokens reward rollout   grading.py
  weights prompts completions (probabilities)        algo/diagnostics.py
  pack                                               learner/select.py
  update                                             learner/update.py, train.py
  eval                                               evaluation/sets.py
  */seconds                                          the clock, in train.py
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import json
import os
import pathlib
import time
import traceback

import jax

from dppo_jax.metrics import jsonl, progress, trackers
from dppo_jax.metrics import warnings as health


class Writer:
  """`metrics.jsonl`, `samples.jsonl`, `log.txt`, TensorBoard and trackers.

  Names are `stage/quantity`. A line's `step` counts the updates done. Lines
  that a killed run wrote after the checkpoint it resumes from are dropped:
  they are about to be written again.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    first_step: int | None,
    bar: progress.Progress,
    watch: health.Health | None = None,
    openers: Mapping[str, Callable[[int], trackers.Writer]] | None = None,
  ):
    """Goes on after `first_step`; None starts afresh.

    Args:
      bar: shows what is said.
      watch: says what looks wrong with the numbers that are written.
      openers: of writers to other places by name, given the step to go on
        after, which is -1 for a new run.
    """
    self.bar, self._watch = bar, watch
    first_step = -1 if first_step is None else first_step
    said = [
      line
      for name in ("metrics.jsonl", "samples.jsonl")
      for line in jsonl.keep_until(workdir / name, first_step)
    ]
    if watch:  # goes on with what it had seen
      for line in jsonl.read(workdir / "metrics.jsonl"):
        watch.check(line["step"], line)
    self._workdir = workdir
    self._files = {
      name: (workdir / name).open(
        "a", encoding="utf-8", errors="backslashreplace"
      )
      for name in ("metrics.jsonl", "samples.jsonl", "log.txt")
    }
    self._writers = {}
    for line in said:
      self.say(line)
    for name, open_one in (openers or {}).items():
      with self._leaving_out(name):
        self._writers[name] = open_one(first_step)

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, *unused) -> None:
    self._tell_all("close")
    for file in self._files.values():
      # Every line has been flushed, or an error told of it.
      with contextlib.suppress(OSError):
        file.close()

  def sync(self) -> None:
    """Everything written is on disk, as it must be before a checkpoint is.

    Raises:
      OSError: where the disk does not take it.
    """
    for name, file in self._files.items():
      with jsonl.writing(self._workdir / name):
        os.fsync(file.fileno())
    self._tell_all("sync")

  def _append(self, name: str, text: str) -> None:
    with jsonl.writing(self._workdir / name):
      self._files[name].write(text)
      self._files[name].flush()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """One line of numbers, and a warning where they look wrong."""
    values = {name: float(value) for name, value in values.items()}
    if self._watch:
      warnings, said = self._watch.check(step, values)
      values |= warnings
      for line in said:
        self.say(line)
    line = json.dumps({"step": step, **values})
    self._append("metrics.jsonl", f"{line}\n")
    self._tell_all("scalars", step, values)

  def write_samples(self, step: int, split: str, samples: list[dict]) -> None:
    """Completions as text, with what they answer and what they earned.

    Args:
      split: whose problems they answer, "train", "eval" or "eval/NAME".
    """
    lines = (
      json.dumps({"step": step, "split": split, **x}, ensure_ascii=False)
      for x in samples
    )
    self._append("samples.jsonl", "".join(f"{line}\n" for line in lines))
    if split != "train":
      self._tell_all("text", step, f"samples/{split}", _page(samples[:4]))

  def image(self, step: int, name: str, path: pathlib.Path) -> None:
    """A PNG, for those places that show pictures."""
    self._tell_all("image", step, name, path)

  def _tell_all(self, what: str, *args) -> None:
    """Calls that method of every writer."""
    for name, writer in [*self._writers.items()]:
      with self._leaving_out(name):
        getattr(writer, what)(*args)

  @contextlib.contextmanager
  def _leaving_out(self, name: str) -> Iterator[None]:
    """Drops a writer that fails: another place's trouble ends no run."""
    try:
      yield
    except Exception as error:
      self.log(traceback.format_exc())
      self.say(f"{name} gets nothing more: {type(error).__name__}: {error}")
      self._writers.pop(name, None)

  def log(self, text: str) -> None:
    """Keeps text in `log.txt` alone, such as a traceback."""
    with contextlib.suppress(OSError):  # what fails may be what is told of here
      self._append("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

  def say(self, line: str) -> None:
    """A line on standard output, above the progress bar, and in `log.txt`."""
    self.log(line)
    self.bar.say(progress.wrapped(line))


class Silent:
  """Takes what a `Writer` takes and writes nothing.

  It is that of all processes but the first.
  """

  def __init__(self, bar: progress.Progress):
    self.bar = bar

  def __enter__(self) -> "Silent":
    return self

  def __exit__(self, *unused) -> None:
    pass

  def __getattr__(self, name: str) -> Callable[..., None]:
    getattr(Writer, name)  # what a writer cannot do, this cannot either
    return lambda *unused: None


def _page(samples: list[dict]) -> str:
  """Completions as Markdown."""
  indented = lambda text: "\n".join(f"    {x}" for x in text.splitlines())
  return "\n\n".join(
    f"reward {x['reward']:g}, answer {x['answer']}\n\n"
    f"{indented(x['problem'])}\n\n{indented(x['completion'])}"
    for x in samples
  )


class Clock:
  """Seconds spent in each stage of one step."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._start = time.monotonic()
    self._cpu_start = time.process_time()

  @contextlib.contextmanager
  def __call__(self, stage: str) -> Iterator[None]:
    """Adds the time inside the `with` to `stage`."""
    start = time.monotonic()
    yield
    spent = time.monotonic() - start
    self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

  def metrics(self) -> dict[str, float]:
    """`stage/seconds` of every stage, and of the step since the start.

    `step/cpu_seconds` is what all cores of this machine spent on it: on a
    core of its own, the seconds that the step takes when nothing disturbs it.
    """
    stages = {f"{stage}/seconds": s for stage, s in self.seconds.items()}
    return stages | {
      "step/seconds": time.monotonic() - self._start,
      "step/cpu_seconds": time.process_time() - self._cpu_start,
    }


class Compilations:
  """Counts what XLA compiles in this process, while the context lasts."""

  def __init__(self):
    self._count = 0

  def __enter__(self) -> "Compilations":
    jax.monitoring.register_event_duration_secs_listener(self._on_event)
    return self

  def __exit__(self, *unused) -> None:
    jax.monitoring.unregister_event_duration_listener(self._on_event)

  def _on_event(self, name: str, seconds: float, **unused) -> None:
    if name == "/jax/core/compile/backend_compile_duration":
      self._count += 1

  def since_last(self) -> int:
    """Programs compiled since the last call, or since the start."""
    count, self._count = self._count, 0
    return count
