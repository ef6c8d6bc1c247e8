"""Signals: the first asks a run to stop after its step, the second ends it."""

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import sys
import threading

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
  """Turns the first SIGTERM or Ctrl-C into a wish to stop after this step.

  A second ends the process at once, with the exit status of a program that the
  signal has killed. That cannot wait for Python, which gets to see a signal
  only when a compiled program returns to it: so the system tells a thread. In a
  notebook, whose variables would go too, a second interrupt is Python's.

  A signal that is ignored stays so, as Ctrl-C is in what a shell's script
  starts with &. A step may take longer than whoever asks will wait. The kill
  that follows costs the steps since the newest checkpoint and nothing else.
  """
  asked = []

  def ask(number, frame) -> None:
    asked.append(number)
    signal.signal(number, before[number])

  reads, writes = os.pipe()
  os.set_blocking(writes, False)
  before = {
    number: signal.signal(number, ask)
    for number in SIGNALS
    if signal.getsignal(number) is not signal.SIG_IGN
  }
  fd_before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)

  def watch() -> None:
    seen = 0
    while number := os.read(reads, 1)[0]:  # 0 is ours
      seen += number in SIGNALS
      if seen == 2 and "ipykernel" not in sys.modules:
        os.write(2, b"\nended at once, by a second signal\n")
        os._exit(128 + number)

  watcher = threading.Thread(target=watch, name="signals", daemon=True)
  watcher.start()
  try:
    yield lambda: bool(asked)
  finally:
    signal.set_wakeup_fd(fd_before)
    for number, handler in before.items():
      signal.signal(number, handler)
    os.write(writes, b"\0")
    watcher.join()
    os.close(reads)
    os.close(writes)
