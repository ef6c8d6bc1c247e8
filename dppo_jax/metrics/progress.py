"""Shows a run's progress: a bar on a terminal, otherwise occasional lines."""

from collections.abc import Callable, Iterator
import contextlib
import errno
import os
import sys
import textwrap
import threading
import time
from typing import Self

import tqdm

from dppo_jax import distributed

Show = Callable[[str], None]


class _Bar(tqdm.tqdm):
  monitor_interval = 0  # without tqdm's own thread


_Bar.set_lock(threading.RLock())  # tqdm's own is a semaphore of processes

_NO_STEPS = _Bar(total=0, disable=True)  # which is false


class Task:
  """A task with parts, which may overlap."""

  def __init__(self, name: str, show: Show = lambda text: None):
    self._name, self._show = name, show
    self.num_parts, self._num_done = 0, 0

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    """Shows a part of the task and how many are done."""
    count = f" {self._num_done}/{self.num_parts}" if self.num_parts else ""
    self._show(f"{self._name}{count}: {name}")
    yield
    self._num_done += 1


class Progress(contextlib.nullcontext):
  """Shows tasks and steps on standard error, and lines on standard output.

  Of several processes, the first one alone shows them.
  """

  def __init__(self):
    super().__init__(self)
    self._is_silent = not distributed.is_first()
    self._has_bar = _is_terminal() and not self._is_silent
    self._steps = _NO_STEPS

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
      bar.set_description_str(name)
      yield Task(name, lambda text: bar.set_description_str(text[:width]))
    seconds = time.monotonic() - start
    if seconds >= 1.0 and not is_brief:
      self.say(f"{name} took {seconds:.1f} s")

  @contextlib.contextmanager
  def steps(self, name: str, total: int, first: int = 0) -> Iterator[Self]:
    """Shows steps as `advance` reports them; `first` were done before."""
    layout = "{desc} {n}/{total} [{bar}] {remaining} left{postfix}"
    with self._bar(total=total, initial=first, bar_format=layout) as bar:
      bar.set_description_str(name)
      self._steps, self._first = bar, first
      self._start, self._next_line = time.monotonic(), 0.0
      yield self
    self._steps = _NO_STEPS

  def advance(self, done: int, *notes: str) -> None:
    """Shows that `done` steps are done; notes describe the last one.

    Without a bar, it prints a line every ten seconds, later more rarely.
    """
    bar, now = self._steps, time.monotonic()
    bar.set_postfix_str(", ".join(notes), refresh=False)
    bar.update(done - bar.n)
    if not self._has_bar and now >= self._next_line:
      elapsed = now - self._start
      self._next_line = now + max(10.0, elapsed / 60)
      left = elapsed / max(done - self._first, 1) * (bar.total - done)
      text = ", ".join([*notes, f"{bar.format_interval(left)} left"])
      self.say(f"{bar.desc} {done} of {bar.total}: {text}")

  def say(self, text: str) -> None:
    """Prints lines on standard output, above the bar."""
    if not self._is_silent:
      encoding = sys.stdout.encoding or "utf-8"
      text = text.encode(encoding, "replace").decode(encoding)
      try:
        _Bar.write(text, sys.stdout)
        sys.stdout.flush()
      except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
          raise
        drop_output()  # its reader or terminal has ended: a run continues

  def _bar(self, **options) -> _Bar:
    options |= {"leave": False, "dynamic_ncols": True, "ascii": ".#"}
    return _Bar(file=sys.stderr, disable=not self._has_bar, **options)


def _is_terminal() -> bool:
  """True if standard error is a terminal with a size, in which a bar fits."""
  if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
    return False
  with contextlib.suppress(OSError):
    return os.get_terminal_size(sys.stderr.fileno()).columns > 0
  return False


def drop_output() -> None:
  """Sends standard output, which nothing reads any more, nowhere."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def wrapped(text: str) -> str:
  """Breaks lines at 79 characters, but no word, path or `  python` command."""
  fill = lambda x: textwrap.fill(
    x,
    79,
    subsequent_indent="  ",
    break_on_hyphens=False,
    break_long_words=False,
  )
  lines = text.splitlines()
  return "\n".join(x if x.startswith("  python") else fill(x) for x in lines)
