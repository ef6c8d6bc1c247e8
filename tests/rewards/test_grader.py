"""Rewards of completions, and the cost of hostile ones and of bad functions."""

from collections.abc import Iterator
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from dppo_jax.errors import UserError
from dppo_jax.rewards import Grader, math_answers, pool
from dppo_jax.rewards import grader as graders

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="not Linux")

PATIENT = 60.0  # seconds: a slow machine is no reason to fail
HANG = r"\boxed{9^{9^{9}}}"  # too many digits for a lifetime

# The completion says what the function does. Its neighbours are decoys: they
# must not hide the standard library.
REWARDS = """
import colorsys, json, math, os, signal, subprocess, sys, time
import helper
from dppo_jax.rewards import Verdict
print("noise " * 100_000, flush=True)

def nasty(completions, **kwargs):
  print('{"marks": [9.0]}\\\\n' * 10_000, flush=True)
  os.write(2, b"noise " * 100_000)
  values = [perform(text) for text in completions]
  return values[1:] if "short" in completions else values

def perform(text):
  if text == "raise":
    raise ValueError("first\\nsecond")
  if text == "sys.exit":
    sys.exit(0)
  if text == "os._exit":
    os._exit(3)
  if text == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
  if text == "memory":
    bytearray(8 << 30)
  if text.startswith("hang "):
    grandchild = subprocess.Popen(["sleep", "1000"])
    with open(text[5:] + "~", "w") as file:
      file.write(str(grandchild.pid))
    os.rename(text[5:] + "~", text[5:])
    time.sleep(1000)
  if text in ("none", "short") or "boxed" in text:
    return None
  if text == "stdin":
    return float(len(sys.stdin.read()))
  return float(text)

def shortest(completions):
  least = min(map(len, completions))
  return [len(text) == least for text in completions]

def solution_reward(completions, solution, **kwargs):
  return [None if s is None else float(s in c)
          for c, s in zip(completions, solution)]

def received(prompts, completions, answers, level, unused=None):
  seen = [str(x) for x in zip(prompts, answers, level)]
  return [float(a == b) for a, b in zip(seen, completions)]

def everything(**kwargs):
  names = sorted(kwargs)
  return [float(str(names) == text) for text in kwargs["completions"]]

def environment(completions):
  stdlib = os.path.dirname(os.__file__)
  is_right = (
    all(x.__file__.startswith(stdlib) for x in (colorsys, json, math))
    and helper.VALUE == 7 and "jax" not in sys.modules
    and os.environ["JAX_PLATFORMS"] == "cpu")
  return [Verdict("right" if is_right else "wrong") for _ in completions]
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("user")
  (folder / "my_rewards.py").write_text(REWARDS)
  (folder / "helper.py").write_text("VALUE = 7")
  for decoy in ("colorsys", "json", "math"):
    (folder / f"{decoy}.py").write_text("raise ImportError('decoy')")
  return folder / "my_rewards.py"


@pytest.fixture(scope="module")
def nasty(path) -> Iterator[Grader]:
  with Grader(f"{path}:nasty", 1, PATIENT) as grader:
    yield grader


def pop_faults(grader):
  """Warnings but the one about verdicts other than 0 and 1."""
  return [x for x in grader.pop_warnings() if "other than 0 and 1" not in x]


def grade(grader, completions, answers=None, columns=None, **options):
  answers = answers or [""] * len(completions)
  prompts = [f"What is {x}?" for x in answers]
  return grader.grade(prompts, completions, answers, columns, **options)


def faults(graded) -> dict[str, int]:
  names = (*graders.FAULTS, "nonfinite")
  return {x: graded.counts[x] for x in names if graded.counts[x]}


def is_running(pid: int) -> bool:
  """Returns False for a zombie: an ended orphan may still await its init."""
  try:
    return ") Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
  except FileNotFoundError:
    return False


def wait_until(condition) -> None:
  deadline = time.monotonic() + PATIENT
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.02)
  assert condition()


def test_built_in_rewards_add_up_without_a_process(monkeypatch):
  monkeypatch.setattr(subprocess, "Popen", None)
  texts = [r"\boxed{5}", r"\boxed{6}", r"\boxed{5", "5"]
  with Grader("exact,boxed:0.25", num_workers=0) as grader:
    grader.self_check()
    graded = grade(grader, texts, ["5"] * 4, group_sizes=[2, 2])
    verdict = grade(grader, texts, ["5"] * 4, verifier_only=True)
  assert graded.rewards.tolist() == [1.25, 0.25, 0.0, 0.0]
  assert graded.rewards.dtype == graded.correct.dtype == np.float32
  assert graded.correct.tolist() == verdict.rewards.tolist() == [1, 0, 0, 0]
  assert graded.values["boxed"].tolist() == [1, 1, 0, 0]
  counts = {x: n for x, n in graded.counts.items() if n}
  assert counts == {"right": 1, "wrong": 1, "unboxed": 2}
  assert [*verdict.values] == ["exact"] and grader.pop_warnings() == []


def test_verdicts_other_than_0_and_1_are_reported_once(path):
  with Grader(f"{path}:nasty", 1, PATIENT) as grader:
    grade(grader, ["0", "1"])
    assert grader.pop_warnings() == []
    grade(grader, ["0.5", "3"])
    (warning,) = grader.pop_warnings()
    assert "nasty returns values other than 0 and 1" in warning
    grade(grader, ["0.5", "3"])
    assert grader.pop_warnings() == []


def test_functions_get_the_arguments_in_their_signature(path):
  names = "environment shortest solution_reward:-2 received:4 everything:8"
  seen = str(("What is 7?", "7", 3))
  taken = "['answers', 'completions', 'level', 'prompts', 'solution']"
  completions = [seen, "aaaa", taken, "abcde"]
  columns = {"solution": ["x", None, None, "abc"], "level": [3, 4, 5, 6]}
  functions = [f"{path}:{x}" for x in names.split()]
  with Grader(functions, 2, PATIENT) as grader:
    grader.self_check(columns)
    graded = grade(grader, completions, [*"7777"], columns, group_sizes=[2, 2])
    assert grader.pop_warnings() == []
    with pytest.raises(UserError, match=r"requires 'solution'.* no such col"):
      grader.self_check({"level": [1]})
    grader.self_check({"level": [1]}, verifier_only=True)
    not_json = {"level": [{1}], "solution": ["x"], "photo": [b"\xff"]}
    assert faults(grade(grader, ["1"], None, not_json)) == {}
  assert {x: v.tolist() for x, v in graded.values.items()} == {
    "environment": [1, 1, 1, 1],
    "shortest": [0, 1, 0, 1],
    "solution_reward": [0, 0, 0, 1],
    "received": [1, 0, 0, 0],
    "everything": [0, 0, 1, 0],
  }
  assert graded.rewards.tolist() == [5, 2, 9, 0]
  assert graded.correct.tolist() == [1] * 4 and faults(graded) == {}
  assert graded.counts["right"] == 4


def test_rewards_keep_their_order_and_correct_is_clipped(path):
  with Grader(f"{path}:nasty:2,boxed", 3, PATIENT) as grader:
    values = [x / 8 for x in range(-20, 21)]
    graded = grade(grader, [str(x) for x in values])
    assert len({w._process.pid for w in grader._workers}) == 3
  assert graded.rewards.tolist() == [2 * x for x in values]
  assert graded.correct.tolist() == [min(max(x, 0), 1) for x in values]


def test_a_sum_that_float32_cannot_hold_is_counted():
  with Grader("exact:1e300", 1) as grader:
    graded = grade(grader, [r"\boxed{1}", r"\boxed{2}"], ["1", "1"])
  assert graded.rewards.tolist() == [0, 0]
  assert graded.counts["nonfinite"] == 1


@pytest.mark.parametrize(
  "culprit, fault, message",
  [
    ("raise", "errors", r"raised ValueError: first \(/.*, line 15\) on 4 comp"),
    ("sys.exit", "errors", r"raised SystemExit: 0 \("),
    ("short", "errors", "returned 3 values for 4 completions"),
    ("os._exit", "crashes", r"ended its process \(exit status 3\)"),
    ("kill", "crashes", r"ended its process \(signal 9\)"),
    pytest.param("memory", "crashes", "filled the memory", marks=needs_linux),
    ("1e39", "nonfinite", r"returned 1e\+39 on a completion"),
    ("-1e15", "nonfinite", r"returned -1e\+15|returned -1000000000000000"),
    ("none", None, None),
    ("stdin", None, None),
  ],
)
def test_a_fault_costs_its_own_reward(nasty, culprit, fault, message):
  nasty._warnings.clear()
  graded = grade(nasty, ["1", culprit, "2", "3"], group_sizes=[4])
  assert graded.rewards.tolist() == [1, 0, 2, 3]
  assert faults(graded) == ({fault: 1} if fault else {})
  again = grade(nasty, [culprit, "4"])  # one at a time from the start
  assert again.rewards.tolist() == [0, 4] and faults(again) == faults(graded)
  warnings = pop_faults(nasty)
  assert len(warnings) == bool(fault) and nasty.pop_warnings() == []
  if fault:
    line, *details = warnings[0].splitlines()
    assert line.startswith("reward function 'nasty' ")
    assert re.search(message, line) and line.endswith(f" as reward/{fault}")
    is_raised = fault == "errors" and message.startswith("raised")
    assert is_raised == any("in nasty" in x for x in details)


def test_a_hang_costs_its_own_reward(path, tmp_path):
  """Kills a user's function with its child process, and endless mathematics."""
  hang = f"hang {tmp_path / 'pid'}"
  completions = ["7", hang, HANG, r"\boxed{0.5}"]
  with Grader(f"{path}:nasty,math:2", 2, timeout_seconds=2.0) as grader:
    graded = grade(grader, completions, [r"\frac12"] * 4, group_sizes=[2, 2])
    assert graded.values["nasty"].tolist() == [7, 0, 0, 0]
    assert graded.rewards.tolist() == [7, 0, 0, 2]
    assert faults(graded) == {"timeouts": 2}
    (warning,) = pop_faults(grader)
    assert "'nasty' gave no answer within 2 s on 2 completions" in warning
  if sys.platform == "linux":
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(pid))


def test_a_function_that_always_kills_its_process_is_switched_off(
  nasty, monkeypatch
):
  monkeypatch.setattr(graders, "MAX_HANGS", 3)
  graded = grade(nasty, ["kill"] * 9)
  assert faults(graded) == {"crashes": 3, "switched_off": 6}
  assert "'nasty' is switched off, since it ended its process" in " ".join(
    nasty.pop_warnings()
  )
  graded = grade(nasty, ["1", "kill", "raise", "2"])  # tried again
  assert faults(graded) == {"crashes": 1, "errors": 1}


def test_a_reward_that_is_not_finite_switches_no_function_on(
  nasty, monkeypatch
):
  """Marks are judged after all calls."""
  monkeypatch.setattr(graders, "MAX_HANGS", 3)
  graded = grade(nasty, ["nan", "kill", "kill", "kill"])
  assert faults(graded) == {"nonfinite": 1, "crashes": 3}
  graded = grade(nasty, ["kill"] * 4)  # tried again by one call
  assert faults(graded) == {"crashes": 1, "switched_off": 3}


def test_a_child_that_died_while_idle_costs_nothing(nasty):
  assert grade(nasty, ["1"]).rewards == [1]
  (worker,) = nasty._workers
  os.kill(worker._process.pid, signal.SIGKILL)
  # Until it is dead, without reaping it.
  os.waitid(os.P_PID, worker._process.pid, os.WEXITED | os.WNOWAIT)
  graded = grade(nasty, ["1", "2"])
  assert graded.rewards.tolist() == [1, 2] and faults(graded) == {}


@pytest.mark.parametrize(
  "source, message",
  [
    ("import no_such_thing", "^config.reward.functions: .*no_such"),
    ("import os; os._exit(3)", "a worker process died while .*mine.py:f"),
    ("import time; time.sleep(600)", "mine.py:f did not load within 1 s:"),
    (
      "from dppo_jax.rewards import Grader\nGrader('math', 1).self_check()",
      "^config.reward.functions: .* file starts a run while it is imported",
    ),
  ],
)
def test_functions_that_cannot_be_loaded_end_the_start(
  tmp_path, monkeypatch, source, message
):
  if "sleep" in source:
    monkeypatch.setattr(pool, "LOAD_SECONDS", 1.0)
  (tmp_path / "mine.py").write_text(source)
  with Grader(f"{tmp_path}/mine.py:f", 1) as grader:
    with pytest.raises(UserError, match=message):
      grader.self_check()
    assert grader._workers[0]._process is None


def test_a_start_that_fails_is_repeated(tmp_path):
  (tmp_path / "mine.py").write_text(
    "import os\n"
    "with open(__file__ + '.starts', 'a+') as file:\n"
    "  file.write('x')\n"
    "  file.seek(0)\n"
    "  is_bad = len(file.read()) <= 2\n"
    "if is_bad: os._exit(3)\n"
    "def f(completions): return [7.0 for _ in completions]\n"
  )
  with Grader(f"{tmp_path}/mine.py:f", 1, PATIENT) as grader:
    assert grade(grader, ["1"]).rewards == [7]


def test_math_that_cannot_compare_is_found_at_the_start(monkeypatch):
  monkeypatch.setattr(math_answers, "_compare", lambda *unused: "unparsed")
  with pytest.raises(UserError, match="reinstall math-verify"):
    math_answers.warm_up()


def test_workers_persist_and_end_with_the_grader(path):
  with Grader(f"{path}:nasty", 2, PATIENT) as grader:
    assert [w._process for w in grader._workers] == [None, None]
    for _ in range(2):
      grade(grader, [*"123456"])
      processes = [w._process for w in grader._workers]
    assert [p.poll() for p in processes] == [None, None]
    groups = {os.getpgid(pid) for pid in [0, *[p.pid for p in processes]]}
    assert len(groups) == 3  # Ctrl-C reaches the parent alone
  assert [p.poll() for p in processes] == [-signal.SIGKILL] * 2


PARENT = """
import signal, sys
from dppo_jax.rewards import Grader
# A shell that runs the tests in the background has SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
path, completion, timeout = sys.argv[1:]
with Grader(path + ":nasty", 1, float(timeout)) as grader:
  grader.self_check()
  print(grader._workers[0]._process.pid, flush=True)
  if completion:
    grader.grade([""], [completion], [""])
  sys.stdin.read()
"""


@needs_linux
@pytest.mark.parametrize(
  "number, at_work",
  [(signal.SIGKILL, True), (signal.SIGKILL, False), (signal.SIGINT, True)],
)
def test_workers_end_with_their_parent(path, tmp_path, number, at_work):
  completion = f"hang {tmp_path / 'pid'}" if at_work else ""
  timeout = "1" if number == signal.SIGKILL else str(PATIENT)
  with subprocess.Popen(
    [sys.executable, "-c", PARENT, path, completion, timeout],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  ) as parent:
    child = int(parent.stdout.readline())
    if at_work:
      wait_until((tmp_path / "pid").exists)
    os.killpg(parent.pid, number)  # as a terminal does
    errors = parent.stderr.read()
    parent.wait()
  wait_until(lambda: not is_running(child))
  if at_work:
    grandchild = int((tmp_path / "pid").read_text())
    if number == signal.SIGKILL:
      os.kill(grandchild, signal.SIGKILL)  # its parent is gone
    wait_until(lambda: not is_running(grandchild))
  # One traceback, the parent's own.
  assert errors.count("\nKeyboardInterrupt") == (number == signal.SIGINT)
