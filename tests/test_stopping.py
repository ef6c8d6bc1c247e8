"""Signals: one asks, two end, and neither waits for a compiled program."""

import signal
import subprocess
import sys

import pytest

# A regular expression that backtracks for hours holds the interpreter as a
# compiled program does: no handler of Python's runs before it is done.
_BUSY = """
import re, signal, sys
from dppo_jax import stopping

ignored = sys.argv[1] == "ignoring"
usual = signal.SIG_IGN if ignored else signal.default_int_handler
signal.signal(signal.SIGINT, usual)  # whatever the tests were started with

with stopping.stop_signal() as is_stopping:
  print("begun", flush=True)
  if sys.argv[1] == "busy":
    re.match(r"(a+)+$", "a" * 60 + "b")
  while not is_stopping():
    pass
  print("asked", flush=True)
  if sys.argv[1] == "saving":
    while True:
      pass
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_asks(number):
  child = _child("waiting")
  child.send_signal(number)
  assert child.communicate() == ("asked\nleft\n", "")
  assert child.returncode == 0


def test_what_is_ignored_stays_so():
  """As a shell's script has it of Ctrl-C for what it starts with &."""
  child = _child("ignoring")
  for _ in range(3):
    child.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
      child.wait(0.2)
  child.send_signal(signal.SIGTERM)
  assert child.communicate() == ("asked\nleft\n", "")


@pytest.mark.parametrize("how", ["busy", "saving"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(number, how):
  child = _child(how)
  child.send_signal(number)
  if how == "saving":
    assert child.stdout.readline() == "asked\n"
  # Two that arrive together count as one, as the system has it.
  while child.poll() is None:
    child.send_signal(number)
    try:
      child.wait(0.2)
    except subprocess.TimeoutExpired:
      continue
  assert child.returncode in (128 + number, -number)
  assert "Traceback" not in child.communicate()[1]
