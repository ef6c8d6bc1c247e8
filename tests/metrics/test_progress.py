"""Progress on terminals of any width, and without one."""

import os
import pty
import re
import subprocess
import sys
import termios
import threading

import pytest

from dppo_jax.metrics import progress
from tests.helpers import commands

# Less than a second of compiling, then five short steps.
SHOW = """
import time
from dppo_jax.metrics import progress

with progress.Progress() as bar:
  with bar.task("compiling") as task:
    task.num_parts = 2
    with task.part("roll_out"):
      with task.part("update"):
        time.sleep(0.3)
  with bar.steps("step", 200) as steps:
    for done in range(1, 6):
      time.sleep(0.15)
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
  chunks = []

  def read():
    try:
      while chunk := os.read(ours, 4096):
        chunks.append(chunk)
    except OSError:  # the other end was closed
      pass

  reader = threading.Thread(target=read)
  reader.start()
  assert process.wait() == 0
  reader.join()
  os.close(ours)
  return b"".join(chunks).decode()


def _screen(written: str, columns: int) -> list[str]:
  """The lines that are left to see, and those that were drawn over."""
  seen = []
  for line in written.split("\n"):
    cells = ""
    for text in line.split("\r"):
      assert len(text) <= columns, "the terminal would wrap"
      cells = text + cells[len(text) :]
      seen.append(cells.rstrip())
  return seen


@pytest.mark.parametrize("columns", [80, 40])
def test_bar_fits_the_terminal_and_leaves_nothing_behind(columns):
  written = _on_a_terminal(columns)
  assert not re.search(r"[^\x20-\x7e\r\n]", written)  # no control codes
  seen = _screen(written, columns)
  assert "compiling" in seen and "compiling 0/2: update" in seen
  step = next(x for x in seen if x.startswith("step 3/200"))
  assert re.search(r"\[[#.]+\] 00:\d\d left", step)
  if columns == 80:
    assert "accuracy 0.91, trained 45%" in step
  # Messages have their own lines, and the bar is gone at the end.
  kept = [line.split("\r") for line in written.split("\n")]
  assert "step 3: held-out accuracy 0.500" in seen
  assert kept[-2][-2:] == ["over", ""] and not kept[-1][-1].strip()


def test_without_a_terminal_there_are_few_lines():
  lines = subprocess.run(
    [sys.executable, "-c", SHOW.replace("sleep(0.3)", "sleep(1.1)")],
    cwd=commands.ROOT,
    capture_output=True,
    check=True,
    text=True,
  ).stdout.splitlines()
  ended, step, message, over = lines
  assert re.fullmatch(r"compiling took 1.\d s", ended)
  # The first step is reported at once, none of the next ten seconds.
  assert re.fullmatch("step 1 of 200: accuracy 0.91.* 00:.. left", step)
  assert (message, over) == ("step 3: held-out accuracy 0.500", "over")
  dumb = _on_a_terminal(80, TERM="dumb")
  without_size = _on_a_terminal(0)
  for written in (dumb, without_size):
    shown = written.split("\r\n")
    assert "\r" not in "".join(shown) and shown[-2:] == ["over", ""]
    assert any(x.startswith("step 1 of 200") for x in shown)


def test_long_runs_are_reported_ever_more_rarely(monkeypatch, capsys):
  now = [0.0]
  monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
  with progress.Progress() as bar, bar.steps("step", 10_000, 100) as steps:
    for done in range(101, 10_001):
      now[0] += 1
      steps.advance(done)
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == "step 101 of 10000: 2:44:59 left"
  assert 100 < len(lines) < 300
  monkeypatch.setattr(progress.distributed, "is_first", lambda: False)
  with progress.Progress() as bar, bar.steps("step", 9) as steps:
    steps.advance(1)
    bar.say("nothing")
  assert not capsys.readouterr().out


_CLOSED = """
import sys
from dppo_jax import main
from dppo_jax.metrics import progress

def show(argv):
  for _ in range(9999):
    {}
  sys.stderr.write("done")

main.main = show
main.run()
"""


@pytest.mark.parametrize(
  ("act", "errors", "code"),
  [
    ("progress.Progress().say('x' * 99)", "done", 0),
    ("print('x' * 99, flush=True)", "error: output: Broken pipe\n", 1),
  ],
)
def test_run_continues_without_the_reader_of_its_output(act, errors, code):
  """The reader may be `head`; a mode that only prints ends."""
  child = subprocess.Popen(
    [sys.executable, "-c", _CLOSED.format(act)],
    cwd=commands.ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  child.stdout.readline()
  child.stdout.close()
  assert (child.stderr.read(), child.wait()) == (errors, code)
  child.stderr.close()


def test_commands_are_not_broken_into_lines():
  command = f"  python -m dppo_jax.main {'--workdir=runs/a-long-name ' * 5}"
  words = "word " * 40
  first, *others = progress.wrapped(f"{command}\n{words}").split("\n")
  assert first == command
  assert len(others) > 1 and max(map(len, others)) <= 79
