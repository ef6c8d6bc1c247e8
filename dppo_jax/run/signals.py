"""SIGTERM and Ctrl-C: the first one stops a run, a second one exits at once."""

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import threading

from dppo_jax import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Functions that swallow every exception: JAX's part in a garbage collection.
_SWALLOWING = ("_xla_gc_callback", "__del__")


class StopRequest:
  """State of the first signal: received or not, and when it takes effect."""

  is_requested = False
  _is_deferred = False

  @contextlib.contextmanager
  def deferred(self) -> Iterator[None]:
    """Makes a signal set `is_requested`, for the body to check and to raise."""
    self._is_deferred = True
    try:
      yield
    finally:
      self._is_deferred = False

  def receive(self, number, frame) -> None:
    if frame is not None and frame.f_code.co_name in _SWALLOWING:
      signal.setitimer(signal.ITIMER_REAL, 0.02)  # then SIGALRM tries again
      return
    self.is_requested = True
    if not self._is_deferred:
      raise KeyboardInterrupt


@contextlib.contextmanager
def stop_signals(describe: Callable[[], str]) -> Iterator[StopRequest]:
  """Turns the first SIGTERM or Ctrl-C into a KeyboardInterrupt.

  A second signal exits at once. Python's handlers run only when a compiled
  program returns, so a thread reads the signals as well. Ignored signals stay
  ignored, as Ctrl-C is in a background job of a shell script.

  Args:
    describe: returns the line that process 0 prints if the body is stopped.
  """
  request = StopRequest()
  reads, writes = os.pipe()
  os.set_blocking(writes, False)
  previous = {
    number: signal.signal(number, request.receive)
    for number in (*SIGNALS, signal.SIGALRM)
    if signal.getsignal(number) is not signal.SIG_IGN
  }
  previous_fd = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
  watcher = threading.Thread(target=_watch, args=(reads,), daemon=True)
  watcher.start()
  try:
    yield request
  except KeyboardInterrupt:
    if distributed.is_first():
      print(describe(), flush=True)
    raise
  finally:
    signal.set_wakeup_fd(previous_fd)
    for number, handler in previous.items():
      signal.signal(number, handler)
    os.write(writes, b"\0")
    watcher.join()
    os.close(reads)
    os.close(writes)


def _watch(reads: int) -> None:
  """Exits at the second signal; reads their numbers until a 0."""
  is_stopping = False
  while number := os.read(reads, 1)[0]:
    if is_stopping and number in SIGNALS:
      os.write(2, b"\nexiting at once, at a second signal\n")
      os._exit(128 + number)
    elif number in SIGNALS:
      os.write(2, b"\nstopping; a second signal exits at once\n")
      is_stopping = True
