"""What a run is doing: a line that lives on a terminal, or lines now and then.

Without jax, so that it can speak before jax is loaded. All of it is ASCII with
no control character but the carriage return: nothing is garbled, whatever the
terminal.
"""

import collections
from collections.abc import Iterator
import contextlib
import os
import sys
import textwrap
import threading
import time

WIDTH = 79  # of whatever is said in whole lines
_REDRAWN_EVERY = 0.25  # seconds
_TOLD_EVERY = 10.0  # seconds, without a terminal
_LONG = 1.0  # seconds: what takes less is not worth a line


class Task:
  """Something that takes a while, perhaps in parts that run side by side."""

  def __init__(self, name: str, is_brief: bool = False):
    """`is_brief` keeps what takes a few seconds off the printed lines."""
    self.name = name
    self.num_parts = 0
    self.told_at = 10.0 if is_brief else _LONG
    self.is_brief = is_brief
    self._start = time.monotonic()
    self._running: dict[str, float] = {}
    self._done: dict[str, float] = {}

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    """Says that a part is under way; times of one name add up."""
    start = self._running[name] = time.monotonic()
    yield
    del self._running[name]
    spent = time.monotonic() - start
    self._done[name] = self._done.get(name, 0.0) + spent

  @property
  def seconds(self) -> float:
    return time.monotonic() - self._start

  def text(self, width: int) -> str:
    """What is under way and for how long, the longest part first."""
    now = time.monotonic()
    running = {name: now - start for name, start in [*self._running.items()]}
    whole = f"{self.name}: {self.seconds:.0f} s"
    if self.num_parts:
      left = self.num_parts - len(self._done.keys() - running.keys())
      whole += f", {left} of {self.num_parts} to go"
    return _fitting([whole, *_longest(running)], width)

  def summary(self) -> str:
    """How long it took, and which parts of it."""
    long = {name: x for name, x in self._done.items() if x >= _LONG}
    parts = f" ({', '.join(_longest(long))})" if long else ""
    return f"{self.name} took {self.seconds:.1f} s{parts}"


class Steps:
  """Steps of one kind, with a bar and the time that is left."""

  def __init__(self, name: str, total: int, first: int = 0):
    self.name, self.total, self.done = name, total, first
    self.is_news, self.told_at = False, 0.0
    self._parts: list[str] = []
    # When the last ones were done: what came before the first does not count.
    self._ends = collections.deque([(time.monotonic(), first)], maxlen=51)

  def advance(self, done: int, *parts: str) -> None:
    """So many are done; `parts` describe the last, what matters most first."""
    self._ends.append((time.monotonic(), done))
    self.done, self._parts, self.is_news = done, [*parts], True

  def text(self, width: int) -> str:
    """As much as fits: the count, a bar, the time left, then the parts."""
    kind = self.name.removesuffix("step").rstrip()
    head = f"{kind} {self.done}/{self.total}".lstrip()
    rest = [*self._left(), *self._parts]
    space = width - len("  ".join([head, *rest])) - 2
    bar = ""
    if space >= 7:
      cells = min(space, 30) - 2
      full = cells * self.done // max(self.total, 1)
      bar = f"[{'#' * full}{'.' * (cells - full)}]"
    return _fitting([head, *([bar] if bar else []), *rest], width)

  def line(self) -> str:
    """The same as a line to keep."""
    parts = ", ".join([*self._parts, *self._left()])
    return f"{self.name} {self.done} of {self.total}: {parts}"

  def _left(self) -> list[str]:
    (start, first), (end, last) = self._ends[0], self._ends[-1]
    if last == first or last >= self.total:
      return []
    left = (end - start) / (last - first) * (self.total - last)
    left = max(0.0, left - (time.monotonic() - end))
    return [f"{_duration(left)} left"]


class Progress:
  """Shows what is under way; a context manager.

  On a terminal the innermost task or steps stand in a line on standard error,
  which is redrawn in place while the main thread is busy. Elsewhere a task is
  told when it has taken a second, then ever more rarely, and when it is over;
  steps are told every ten seconds, and in a long run every sixtieth of it.
  """

  def __init__(self, is_silent: bool = False):
    """Nothing at all is shown where `is_silent`."""
    self._is_silent = is_silent
    self._is_terminal = is_terminal(sys.stderr) and not is_silent
    self._shown: list[Task | Steps] = []
    self._drawn = 0  # characters of the line that stands on the terminal
    self._start = time.monotonic()
    self._lock = threading.RLock()
    self._is_over = threading.Event()
    self._thread = threading.Thread(target=self._keep_telling, daemon=True)

  def __enter__(self) -> "Progress":
    if not self._is_silent:
      self._thread.start()
    return self

  def __exit__(self, *unused) -> None:
    self._is_over.set()
    if not self._is_silent:
      self._thread.join()
    self._shown.clear()
    self._redraw()

  @contextlib.contextmanager
  def task(self, name: str, is_brief: bool = False) -> Iterator[Task]:
    """Shows a task while it lasts; how long it took is said if that was long.

    Of what `is_brief`, as all is between steps, only ten seconds are told.
    """
    is_brief |= any(isinstance(x, Steps) for x in self._shown)
    with self._showing(Task(name, is_brief)) as task:
      yield task
    if task.seconds >= _LONG and not is_brief:
      self.say(wrapped(task.summary()))

  @contextlib.contextmanager
  def steps(self, name: str, total: int, first: int = 0) -> Iterator[Steps]:
    """Shows steps while they last, `first` of which were done before."""
    with self._showing(Steps(name, total, first)) as steps:
      yield steps

  @contextlib.contextmanager
  def _showing(self, shown: Task | Steps) -> Iterator[Task | Steps]:
    with self._lock:
      self._shown.append(shown)
      self._redraw()
    try:
      yield shown
    finally:
      with self._lock:
        self._shown.remove(shown)
        self._redraw()

  def say(self, text: str) -> None:
    """Prints lines on standard output, above the line that lives."""
    if self._is_silent:
      return
    with self._lock:
      self._erase()
      _print(text)
      self._redraw()

  def _keep_telling(self) -> None:
    while not self._is_over.wait(_REDRAWN_EVERY):
      with self._lock:
        if self._is_terminal:
          self._redraw()
        elif self._shown:
          self._tell(self._shown[-1])

  def _tell(self, shown: Task | Steps) -> None:
    now = time.monotonic() - self._start
    if isinstance(shown, Task):
      if shown.seconds >= shown.told_at:
        shown.told_at = max(_TOLD_EVERY, 2 * shown.told_at)
        _print(shown.text(WIDTH))
    elif shown.is_news and now >= shown.told_at:
      shown.told_at, shown.is_news = now + max(_TOLD_EVERY, now / 60), False
      _print(shown.line())

  def _redraw(self) -> None:
    if self._is_terminal:
      width = _width(sys.stderr)
      text = self._shown[-1].text(width) if self._shown else ""
      padding = " " * (min(self._drawn, width) - len(text))
      back = "" if text else "\r"
      sys.stderr.write(f"\r{text}{padding}{back}")
      sys.stderr.flush()
      self._drawn = len(text)

  def _erase(self) -> None:
    if self._is_terminal and self._drawn:
      sys.stderr.write(f"\r{' ' * self._drawn}\r")
      sys.stderr.flush()
      self._drawn = 0


def is_terminal(stream) -> bool:
  """Whether a line on it can be written over."""
  is_tty = getattr(stream, "isatty", lambda: False)
  return is_tty() and os.environ.get("TERM", "") != "dumb"


def wrapped(text: str) -> str:
  """Each line of `text` in lines of at most 79 characters.

  Words, and paths however long, stay whole.
  """
  options = {"break_on_hyphens": False, "break_long_words": False}
  return "\n".join(
    textwrap.fill(line, WIDTH, subsequent_indent="  ", **options)
    for line in text.splitlines()
  )


def _print(text: str) -> None:
  """Prints lines; a character that standard output lacks becomes a `?`."""
  encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
  print(text.encode(encoding, "replace").decode(encoding), flush=True)


def _width(stream) -> int:
  """Characters that fit in a line; in the last column some terminals wrap."""
  try:
    columns = os.get_terminal_size(stream.fileno()).columns
  except (OSError, ValueError):
    columns = 0
  return (columns or WIDTH + 1) - 1


def _fitting(parts: list[str], width: int) -> str:
  """The first parts, as many as fit; the first of all is cut if need be."""
  text = parts[0][:width]
  for part in parts[1:]:
    if len(text) + 2 + len(part) > width:
      break
    text += f"  {part}"
  return text


def _longest(seconds: dict[str, float]) -> list[str]:
  """`name 1.2 s` of each, the longest first."""
  ranked = sorted(seconds.items(), key=lambda item: -item[1])
  return [f"{name} {x:.1f} s" for name, x in ranked]


def _duration(seconds: float) -> str:
  """As 0:07, 12:34, 1:23:45 or 2 d 03:45."""
  minutes, second = divmod(round(seconds), 60)
  hours, minute = divmod(minutes, 60)
  days, hour = divmod(hours, 24)
  if days:
    return f"{days} d {hour:02}:{minute:02}"
  clock = f"{minute:02}:{second:02}"
  return f"{hours}:{clock}" if hours else clock.removeprefix("0")
