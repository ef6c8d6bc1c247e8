"""Shows a run's progress: a bar on a terminal, otherwise a line now and then.

Does not import jax, so that it can show the loading of libraries.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import sys
import textwrap
import threading
import time

import tqdm

Show = Callable[[str], None]

_LONG = 1.0  # seconds: shorter tasks are not reported


class _Bar(tqdm.tqdm):
  monitor_interval = 0  # without tqdm's own thread


_Bar.set_lock(threading.RLock())  # tqdm's own is a semaphore of processes


class Task:
  """A task with timed parts, which may overlap."""

  def __init__(self, name: str, show: Show = lambda text: None):
    self.name, self.num_parts, self._show = name, 0, show
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    """Times a part of the task."""
    start = time.monotonic()
    count = f" {len(self._seconds)}/{self.num_parts}" if self.num_parts else ""
    self._show(f"{self.name}{count}: {name}")
    yield
    self._seconds[name] = time.monotonic() - start

  def summary(self, seconds: float) -> str:
    """A line with the seconds of the task and of its long parts."""
    long = {k: x for k, x in self._seconds.items() if x >= _LONG}
    parts = {f"{self.name} took": seconds} | long
    return ", ".join(f"{name} {x:.1f} s" for name, x in parts.items())


class Steps:
  """Shows steps in a bar, or in a line every ten seconds or more."""

  def __init__(self, bar: _Bar, say: Show | None):
    self._bar, self._say, self._first = bar, say, bar.n
    self._start, self._next_line = time.monotonic(), 0.0

  def advance(self, done: int, *notes: str) -> None:
    """Shows that `done` steps are done; notes describe the last one."""
    bar, text, now = self._bar, ", ".join(notes), time.monotonic()
    bar.set_postfix_str(text, refresh=False)
    bar.update(done - bar.n)
    if self._say and now >= self._next_line:
      elapsed = now - self._start
      self._next_line = now + max(10.0, elapsed / 60)
      left = elapsed / max(done - self._first, 1) * (bar.total - done)
      left = bar.format_interval(left)
      self._say(f"{bar.desc} {done} of {bar.total}: {text}, {left} left")


class Progress(contextlib.nullcontext):
  """Shows tasks and steps on standard error, and lines on standard output."""

  def __init__(self, is_silent: bool = False):
    super().__init__(self)
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    self._has_bar, self._is_silent = is_terminal and not is_silent, is_silent
    self._steps: _Bar | None = None

  @contextlib.contextmanager
  def task(self, name: str, is_brief: bool = False) -> Iterator[Task]:
    """Times a task; prints a line if it took a second, unless `is_brief`."""
    if self._steps:
      self._steps.set_postfix_str(name)
      yield Task(name)
      return
    start = time.monotonic()
    with self._bar(bar_format="{desc}") as bar:
      width = (bar.format_dict["ncols"] or 80) - 1
      task = Task(name, lambda text: bar.set_description_str(text[:width]))
      bar.set_description_str(name)
      yield task
    seconds = time.monotonic() - start
    if seconds >= _LONG and not is_brief:
      self.say(wrapped(task.summary(seconds)))

  @contextlib.contextmanager
  def steps(self, name: str, total: int, first: int = 0) -> Iterator[Steps]:
    """Shows steps, of which `first` were done before."""
    layout = "{desc} {n}/{total} [{bar}] {remaining} left{postfix}"
    with self._bar(total=total, initial=first, bar_format=layout) as bar:
      bar.set_description_str(name)
      self._steps = bar
      yield Steps(bar, None if self._has_bar else self.say)
    self._steps = None

  def say(self, text: str) -> None:
    """Prints lines on standard output, above the bar."""
    if not self._is_silent:
      encoding = sys.stdout.encoding or "utf-8"
      _Bar.write(text.encode(encoding, "replace").decode(encoding), sys.stdout)
      sys.stdout.flush()

  def _bar(self, **options) -> _Bar:
    options |= {"leave": False, "dynamic_ncols": True, "ascii": ".#"}
    return _Bar(file=sys.stderr, disable=not self._has_bar, **options)


def wrapped(text: str) -> str:
  """Breaks lines at 79 characters, but never inside a word or a path."""
  options = {"break_on_hyphens": False, "break_long_words": False}
  fill = lambda x: textwrap.fill(x, 79, subsequent_indent="  ", **options)
  return "\n".join(map(fill, text.splitlines()))
