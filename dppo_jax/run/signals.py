"""SIGTERM, Ctrl-C and SIGHUP: the first stops a run, a second exits at once."""

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import threading

from dppo_jax.metrics import progress

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Functions that swallow every exception: JAX's part in a garbage collection.
_SWALLOWING = ("_xla_gc_callback", "__del__")


class StopRequest:
  """State of the first signal: received or not, and when it takes effect."""

  is_requested = False
  _is_deferred = False

  def defer(self) -> None:
    """Makes signals from here on set `is_requested` and nothing else."""
    self._is_deferred = True

  def receive(self, number, frame) -> None:
    if frame is not None and frame.f_code.co_name in _SWALLOWING:
      signal.setitimer(signal.ITIMER_REAL, 0.02)  # then SIGALRM tries again
      return
    self.is_requested = True
    if not self._is_deferred:
      raise KeyboardInterrupt


@contextlib.contextmanager
def stop_signals(describe: Callable[[], str]) -> Iterator[StopRequest]:
  """Turns the first signal of `SIGNALS` into a KeyboardInterrupt.

  A second signal exits at once, unless it is SIGHUP. Python's handlers run only
  when a compiled program returns, so a thread reads the signals as well.
  Ignored signals stay ignored, as Ctrl-C is in a background job of a shell
  script and SIGHUP under nohup.

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
    progress.Progress().say(describe())
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
    # A shell and the kernel may both send SIGHUP at the end of a session.
    if number in SIGNALS and not (is_stopping and number == signal.SIGHUP):
      text = "exiting at once, at a" if is_stopping else "stopping; a"
      end = "" if is_stopping else " exits at once"
      with contextlib.suppress(OSError):  # of a closed terminal
        os.write(2, f"\n{text} second signal{end}\n".encode())
      if is_stopping:
        os._exit(128 + number)
      is_stopping = True
