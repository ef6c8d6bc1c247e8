"""Signals: one stops, two exit at once, and neither waits for a program."""

import os
import pty
import signal
import subprocess
import sys

import pytest

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# A regular expression that backtracks for hours holds the interpreter as a
# compiled program does: no handler of Python's runs before it is done.
_BUSY = """
import gc, re, signal, sys, time
from dppo_jax.run import signals

how = sys.argv[1]
usual = signal.SIG_IGN if how == "ignoring" else signal.default_int_handler
signal.signal(signal.SIGINT, usual)  # even in background
if how == "ignoring":
  signal.signal(signal.SIGHUP, usual)  # as nohup does

def _xla_gc_callback(*unused):
  for _ in range(10):
    time.sleep(0.01)

try:
  with signals.stop_signals(lambda: "stopped early") as stop:
    if how == "starting":
      print("begun", flush=True)
      time.sleep(60)
    if how == "collecting":
      gc.callbacks.append(_xla_gc_callback)
      print("begun", flush=True)
      while True:
        gc.collect()
        for _ in range(10**6):
          pass
    stop.defer()
    print("begun", flush=True)
    if how == "busy":
      re.match(r"(a+)+$", "a" * 60 + "b")
    while not stop.is_requested:
      pass
    print("asked", flush=True)
    if how == "saving":
      while True:
        pass
except KeyboardInterrupt:
  sys.exit(130)
print("left", flush=True)
"""


def _child(how):
  child = subprocess.Popen(
    [sys.executable, "-c", _BUSY, how],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert child.stdout.readline() == "begun\n"
  return child


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_waits_for_the_step(number):
  child = _child("waiting")
  child.send_signal(number)
  output, errors = child.communicate()
  assert output == "asked\nleft\n" and errors.split() == [
    *"stopping; a second signal exits at once".split()
  ]
  assert child.returncode == 0


@pytest.mark.parametrize("how", ["starting", "collecting"])
@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_outside_a_step_stops_with_a_line(number, how):
  """Also in a garbage collection, whose callbacks swallow exceptions."""
  child = _child(how)
  child.send_signal(number)
  output, errors = child.communicate()
  assert output == "stopped early\n" and "ignored" not in errors
  assert child.returncode == 130


def test_ignored_signal_stays_ignored():
  """Shell scripts start background jobs with Ctrl-C ignored."""
  child = _child("ignoring")
  for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT):
    child.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
      child.wait(0.2)
  child.send_signal(signal.SIGTERM)
  assert child.communicate()[0] == "asked\nleft\n"


def test_second_hangup_does_not_hurry():
  """A shell and the kernel may both send one."""
  child = _child("saving")
  child.send_signal(signal.SIGHUP)
  assert child.stdout.readline() == "asked\n"
  for _ in range(3):
    child.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
      child.wait(0.2)
  child.kill()
  child.communicate()


@pytest.mark.parametrize("how", ["busy", "saving"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_exits_at_once(number, how):
  child = _child(how)
  child.send_signal(number)
  if how == "saving":
    assert child.stdout.readline() == "asked\n"
  # Two signals that arrive together count as one.
  while child.poll() is None:
    child.send_signal(number)
    try:
      child.wait(0.2)
    except subprocess.TimeoutExpired:
      continue
  assert child.returncode in (128 + number, -number)
  assert "Traceback" not in child.communicate()[1]


_ON_A_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from dppo_jax.metrics import progress
from dppo_jax.run import signals

with signals.stop_signals(lambda: "stopped early") as stop:
  stop.defer()
  with progress.Progress().steps("step", 10) as bar:
    bar.say("begun")
    while not stop.is_requested:
      pass
    bar.advance(1, "a note")
    bar.say("a line for a terminal that is gone")
  open(sys.argv[1], "w").close()
  raise KeyboardInterrupt
"""


def test_closed_terminal_stops_a_run_that_can_still_save(tmp_path):
  """The end of an ssh session sends SIGHUP, and output raises from then on."""
  terminal, end = pty.openpty()
  child = subprocess.Popen(
    [sys.executable, "-c", _ON_A_TERMINAL, str(tmp_path / "saved")],
    **dict.fromkeys(("stdin", "stdout", "stderr"), end),
    start_new_session=True,
  )
  os.close(end)
  while b"begun" not in os.read(terminal, 1000):
    pass
  os.close(terminal)
  assert child.wait(60) in (1, 130, -signal.SIGINT)
  assert (tmp_path / "saved").exists()
