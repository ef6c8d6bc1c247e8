"""What a user sees while a run is at work, on terminals of any width."""

import io
import os
import pty
import re
import subprocess
import sys
import termios
import threading

import commands
import pytest

from dppo_jax.metrics import progress

# Half a second of compiling, then steps of which each takes 20 ms.
SHOW = """
import time
from dppo_jax.metrics import progress

progress._REDRAWN_EVERY = 0.01
with progress.Progress() as bar:
  with bar.task("compiling") as task:
    task.num_parts = 2
    with task.part("roll_out"):
      with task.part("update"):
        time.sleep(0.3)
  with bar.steps("step", 200) as steps:
    for done in range(1, 6):
      time.sleep(0.02)
      parts = "accuracy 0.91", "trained 45%", "0.18 s/step"
      steps.advance(done, *parts)
      if done == 3:
        bar.say("step 3: held-out accuracy 0.500")
    time.sleep(0.05)
  bar.say("over")
"""


def _on_a_terminal(columns: int, **environment) -> str:
  """Every byte that the program above writes to a terminal."""
  ours, theirs = pty.openpty()
  termios.tcsetwinsize(theirs, (24, columns))
  process = subprocess.Popen(
    [sys.executable, "-c", SHOW],
    cwd=commands.ROOT,
    env=os.environ | {"TERM": "xterm"} | environment,
    stdin=theirs,
    stdout=theirs,
    stderr=theirs,
  )
  os.close(theirs)
  found = []

  def read():
    while True:
      try:
        chunk = os.read(ours, 4096)
      except OSError:  # the other end was closed
        return
      if not chunk:
        return
      found.append(chunk)

  reader = threading.Thread(target=read)
  reader.start()
  assert process.wait() == 0
  reader.join()
  os.close(ours)
  return b"".join(found).decode()


def _screen(written: str, columns: int) -> list[str]:
  """The lines that are left to see, those that were drawn over too."""
  seen, cells, place = [], [], 0
  for character in written:
    if character == "\r":
      seen.append("".join(cells).rstrip())
      place = 0
    elif character == "\n":
      seen.append("".join(cells).rstrip())
      cells, place = [], 0
    else:
      assert place < columns, "the terminal would wrap"
      cells[place : place + 1] = [character]
      place += 1
  return [*seen, "".join(cells).rstrip()]


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_a_live_line_fits_the_terminal_and_leaves_nothing_behind(columns):
  written = _on_a_terminal(columns)
  assert not re.search(r"[^\x20-\x7e\r\n]", written)  # no control codes
  seen = _screen(written, columns)
  compiling = "compiling: 0 s, 2 of 2 to go"
  if columns >= 60:
    compiling += "  roll_out"
  assert any(x.startswith(compiling) for x in seen)
  step = next(x for x in seen if x.startswith("5/200"))
  assert re.search(r"0:0\d left", step)  # compilation is not in it
  assert "accuracy 0.91" in step
  if columns >= 60:
    assert "trained 45%" in step and "0.18 s/step" in step
  if columns == 80:
    assert re.search(r"\[#*\.{9,}\]", step)
  # What was said stands whole, and the live line is gone at the end.
  kept = [x for line in written.split("\n") for x in [line.split("\r")]]
  assert "step 3: held-out accuracy 0.500" in seen
  assert kept[-2][-2:] == ["over", ""] and not kept[-1][-1].strip()


def test_a_terminal_that_cannot_go_back_gets_whole_lines():
  written = _on_a_terminal(80, TERM="dumb")
  lines = written.split("\r\n")
  assert "\r" not in "".join(lines)
  assert lines[-2:] == ["over", ""]


def test_without_a_terminal_there_are_lines_now_and_then():
  lines = subprocess.run(
    [sys.executable, "-c", SHOW.replace("sleep(0.3)", "sleep(1.1)")],
    cwd=commands.ROOT,
    capture_output=True,
    check=True,
    text=True,
  ).stdout.splitlines()
  begun, ended, *steps, over = lines
  assert begun == "compiling: 1 s, 2 of 2 to go  roll_out 1.0 s  update 1.0 s"
  assert re.fullmatch(
    r"compiling took 1.\d s \(roll_out 1.\d s, update 1.\d s\)", ended
  )
  assert over == "over"
  # The first is told at once, none of the next ten seconds.
  told = [x for x in steps if re.match("step . of 200: accuracy 0.91", x)]
  assert len(told) == 1 and told[0].endswith(" left")


def test_a_live_line_names_what_is_counted_unless_it_is_steps():
  count = lambda name: progress.Steps(name, 9).text(79).partition("  ")[0]
  assert count("step") == "0/9"
  assert count("supervised step") == "supervised 0/9"
  assert count("test, greedy: problem") == "test, greedy: problem 0/9"


def test_the_time_left_is_that_of_the_last_steps(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
  steps = progress.Steps("step", 100, first=40)
  assert "left" not in steps.text(79)
  for done in range(41, 51):
    now[0] += 60
    steps.advance(done)
  assert "50:00 left" in steps.text(79)
  now[0] += 30  # of the step in hand
  assert "49:30 left" in steps.text(79)
  for done in range(51, 101):  # faster, and the slow ones are forgotten
    now[0] += 1
    steps.advance(done)
    if done == 98:
      assert "left" in steps.text(79)
  assert "left" not in steps.text(79)
  assert progress._duration(200_000) == "2 d 07:33"


def test_a_character_that_the_output_lacks_ends_no_run(monkeypatch):
  written = io.BytesIO()
  monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))
  progress.Progress().say("0.500 ± 0.100 of '\u4e2d'")
  assert written.getvalue().decode("latin-1") == "0.500 ± 0.100 of '?'\n"
