"""Grading: what counts as equal, and what a hostile completion can cost."""

from collections.abc import Callable, Iterator
import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

from hypothesis import given
from hypothesis import strategies as st
import pytest

from dppo_jax import rewards
from dppo_jax.rewards import Grader, last_boxed

DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="not Linux")

HANG = r"\boxed{9^{9^{9}}}"  # too many digits for a lifetime
PATIENT = 60.0  # seconds: a slow machine is no reason to fail

# Stands in for math-verify: the answer says what goes wrong.
FAKE_MATH_VERIFY = """
import os, sys, time
{at_import}
LatexExtractionConfig = dict

def parse(text, *_, **__):
  if "print" in text:
    print("right " * 100_000, flush=True)
    print("right " * 100_000, file=sys.stderr, flush=True)
  if "exit" in text:
    os._exit(0)
  if "sleep" in text:
    time.sleep(600)
  if "memory" in text:
    bytearray(8 << 30)
  return [text]

def verify(gold, answer, **_):
  return "good" in answer[0]
"""


@pytest.fixture
def fake_math_verify(tmp_path, monkeypatch) -> Callable[[str], None]:
  def install(at_import: str = "") -> None:
    source = FAKE_MATH_VERIFY.format(at_import=at_import)
    (tmp_path / "math_verify.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

  return install


@pytest.fixture(scope="module")
def math() -> Iterator[Grader]:
  with Grader("math", num_workers=2, timeout_seconds=PATIENT) as grader:
    yield grader


def boxed(*answers: str) -> list[str]:
  return [rf"So the answer is $\boxed{{{answer}}}$." for answer in answers]


def pids(grader: Grader) -> list[int]:
  return [w.process.pid for w in grader._workers if w.process]


def is_running(pid: int) -> bool:
  """Whether it is at work: an orphan that ended may still await its init."""
  try:
    return ") Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
  except FileNotFoundError:
    return False


# Finding the answer.


@pytest.mark.parametrize(
  "text, answer",
  [
    (r"\boxed{5}", "5"),
    (r"first \boxed{4}, then \boxed{5}.", "5"),
    (r"\boxed{\frac{1}{\sqrt{2}}} and {so} on", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{x = \boxed{5}}", "5"),
    (r"\boxed{\boxed{5} \text{cm}}", "5"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
    (r"\boxed{a \\} b}", r"a \\"),
    (r"} { \boxed{5}", "5"),
    (r"\boxed {5}", "5"),
    (r"\fbox{5}", "5"),
    (r"$\boxed 5$.", "5"),
    (r"\boxed -1.5.", "-1.5"),
    (r"\boxed{4} but \boxed{5", "4"),
    (r"\boxed{}", ""),
    (r"\boxed{5", None),
    (r"\boxedx{5} \unboxed{5} boxed{5}", None),
    ("5", None),
    ("", None),
  ],
)
def test_last_boxed(text, answer):
  assert last_boxed(text) == answer


BALANCED = st.recursive(
  st.text("a1 ,"),
  lambda inner: st.lists(inner | inner.map("{{{}}}".format)).map("".join),
)


@given(st.text("a {}"), BALANCED, st.text("a {"))
def test_last_boxed_ignores_braces_outside_of_the_box(before, answer, after):
  text = f"{before}\\boxed{{{answer}}}{after}"
  assert last_boxed(text) == answer


def test_last_boxed_takes_linear_time():
  """Quadratic time would be hours."""
  assert last_boxed(r"\boxed{" * 100_000) is None


# Which answers are equal.


def test_exact_compares_text_and_starts_no_process(monkeypatch):
  monkeypatch.setattr(subprocess, "Popen", None)
  completions = [
    r"\boxed{ 18 }",
    r"\boxed{18.0}",
    "18",
    r"\boxed{4} \boxed{18}",
  ]
  with Grader("exact", num_workers=0) as grader:
    grader.self_check()
    assert grader.grade(completions, [" 18"] * 4) == [1.0, 0.0, 0.0, 1.0]
  assert grader.counts == dict.fromkeys(rewards.OUTCOMES, 0) | {
    "right": 2,
    "wrong": 1,
    "unboxed": 1,
  }


EQUAL = [
  ("1000", "1,000"),
  ("1,000", "1000"),
  ("1000", r"1{,}000"),
  ("34650", r"34,\!650"),
  (r"\frac{12}{5,\!525}", r"\frac{12}{5525}"),
  (r"\frac{1}{2}", "0.5"),
  ("0.5", r"\dfrac12"),
  ("5", "x=5"),
  ("x=5", "5"),
  ("5", r"5\text{ cm}"),
  ("5", r"5\ \text{units}^2"),
  ("90", r"90^\circ"),
  (r"10\%", "10"),
  ("18", r"\$18.00"),
  ("3", "3."),
  ("3.", "3"),
  ("5040", "7!"),
  ("8", "$8$"),
  (r"2\sqrt{2}", r"\sqrt{8}"),
  ("x^2+2x+1", "(x+1)^2"),
  ("(1, 2)", r"\left(1,2\right)"),
  (r"\{1,2\}", r"\{2,1\}"),
  (r"1 \pm \sqrt{2}", r"1-\sqrt{2}, 1+\sqrt{2}"),
  (r"(-\infty,3]", r"(-\infty, 3]"),
  (r"x \le 3", r"(-\infty,3]"),
  (r"\text{Evelyn}", "Evelyn"),
  (r"\text{(C)}", "C"),
  (
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"\begin{bmatrix}1\\2\end{bmatrix}",
  ),
]
UNEQUAL = [
  ("1000", "1,001"),
  (r"\frac{1}{3}", "0.33"),
  ("5", "-5"),
  ("2", r"\pm 2"),
  ("[1,2]", "(1,2)"),
  ("(1,2)", "(2,1)"),
  (r"\{1,2\}", r"\{1,2,3\}"),
  ("2", "1, 2, 3"),
  ("2", "2 or 3"),
  ("2", "the answer is 2"),
  ("2", "The final answer is 2. I hope"),
  ("2", "** $2$"),
  ("2", r"\text{either } 2 \text{ or } 3"),
  ("2", r"\sqrt[ 2"),
  (r"\text{Evelyn}", r"\text{John}"),
  ("x+1", "y+1"),
  (r"(-\infty,3]", r"x \le 3"),  # verify is not symmetric: gold goes first
  ("5", ""),
]


@pytest.mark.parametrize("gold, answer", EQUAL)
def test_equal_answers_score_1(math, gold, answer):
  assert math.grade(boxed(answer), [gold]) == [1.0]


@pytest.mark.parametrize("gold, answer", UNEQUAL)
def test_unequal_answers_score_0(math, gold, answer):
  assert math.grade(boxed(answer), [gold]) == [0.0]


def test_only_the_last_box_counts(math):
  text = r"$\boxed{0.5}$? No, the final answer is $\boxed{0.6}$, not $0.5$."
  golds = [r"\frac{1}{2}", r"\frac{3}{5}"]
  assert math.grade([text, text], golds) == [0.0, 1.0]
  assert math.grade(["The answer is $0.6$."], ["0.6"]) == [0.0]


def test_answers_that_nobody_can_read_are_counted(math):
  before = math.counts["unparsed"]
  long = "0" * rewards.MAX_ANSWER_CHARS + "5"
  assert math.grade(boxed("**5**", "5", long), ["5"] * 3) == [0.0, 1.0, 0.0]
  assert math.grade(boxed("5"), ["**5**"]) == [0.0]
  assert math.counts["unparsed"] - before == 3


def test_format_reward_is_for_a_complete_box():
  completions = [r"\boxed{5}", r"\boxed{6}", r"\boxed{5", "5"]
  with Grader("exact", format_reward=0.25) as grader:
    assert grader.grade(completions, ["5"] * 4) == [1.25, 0.25, 0.0, 0.0]
    assert [grader.reward(x) for x in ("right", "timeouts")] == [1.25, 0.25]


def test_rewards_keep_their_order(math):
  golds = [rf"\frac{{{i}}}{{2}}" for i in range(41)]
  answers = [str((i if i % 3 else i + 1) / 2) for i in range(41)]
  expected = [float(i % 3 > 0) for i in range(41)]
  assert math.grade(boxed(*answers), golds) == expected
  assert math.judge(boxed(*answers), golds) == [
    "right" if x else "wrong" for x in expected
  ]


# What goes wrong.


def test_a_hang_costs_one_reward():
  completions = [*boxed("0.5"), HANG, *boxed("0.5", "0.6", "0.5")]
  with Grader("math", num_workers=1, timeout_seconds=2.0) as grader:
    began = time.monotonic()
    earned = grader.grade(completions, [r"\frac{1}{2}"] * 5)
    assert 2.0 < time.monotonic() - began < PATIENT
    assert earned == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert grader.counts["timeouts"] == 1
    assert grader.counts["crashes"] == 0
    assert grader.grade(boxed("0.5"), [r"\frac{1}{2}"]) == [1.0]


def test_a_killed_worker_costs_one_reward():
  with Grader("math", num_workers=1, timeout_seconds=PATIENT) as grader:
    grader.self_check()
    killer = threading.Timer(1.0, os.kill, [*pids(grader), signal.SIGKILL])
    killer.start()
    earned = grader.grade([HANG, *boxed("0.5")], ["5", r"\frac{1}{2}"])
    killer.join()
    assert earned == [0.0, 1.0]
    assert grader.counts["crashes"] == 1
    assert grader.counts["timeouts"] == 0


def test_a_worker_killed_between_calls_costs_one_reward():
  with Grader("math", num_workers=1, timeout_seconds=PATIENT) as grader:
    grader.self_check()
    os.kill(*pids(grader), signal.SIGKILL)
    time.sleep(0.2)
    earned = grader.grade(boxed("0.5", "0.5"), [r"\frac{1}{2}"] * 2)
    assert earned == [0.0, 1.0]
    assert grader.counts["crashes"] == 1


@pytest.mark.parametrize("num_workers", [1, 3])
def test_each_fault_costs_its_own_reward(fake_math_verify, num_workers):
  fake_math_verify("print('right ' * 1000)")
  faults = ["good exit", "good", "good print", "good sleep", "bad", "good"]
  with Grader("math", num_workers, timeout_seconds=2.0) as grader:
    assert grader.judge(boxed(*faults), ["gold"] * 6) == [
      "crashes",
      "right",
      "right",
      "timeouts",
      "wrong",
      "right",
    ]


@needs_linux
def test_a_worker_cannot_fill_the_machine(fake_math_verify):
  fake_math_verify()
  with Grader("math", num_workers=1) as grader:
    answers = boxed("good memory", "good")
    assert grader.judge(answers, ["gold"] * 2) == ["crashes", "right"]


def test_the_clock_starts_with_a_ready_worker(fake_math_verify):
  fake_math_verify("time.sleep(2)")
  with Grader("math", num_workers=1, timeout_seconds=1.0) as grader:
    assert grader.grade(boxed("good"), ["gold"]) == [1.0]


@pytest.mark.parametrize(
  "at_import",
  ["raise ImportError('no antlr')", "os._exit(3)", "time.sleep(600)"],
)
def test_a_worker_that_cannot_start_is_an_error(
  fake_math_verify, monkeypatch, at_import
):
  fake_math_verify("print('before', file=sys.stderr, flush=True);" + at_import)
  monkeypatch.setattr(rewards, "START_SECONDS", 3.0)
  cause = "no antlr" if "antlr" in at_import else "before"
  with Grader("math", num_workers=1) as grader:
    with pytest.raises(RuntimeError, match=cause):
      grader.self_check()
    assert pids(grader) == []


@pytest.mark.parametrize("kind", ["exact", "math"])
def test_self_check_names_the_pair_that_fails(kind, math, monkeypatch):
  grader = math if kind == "math" else Grader(kind)
  before = dict(grader.counts)
  grader.self_check()
  pairs = [*rewards.KNOWN_PAIRS[kind], ("51", "52", True)]
  monkeypatch.setitem(rewards.KNOWN_PAIRS, kind, pairs)
  with pytest.raises(RuntimeError, match=r"'52' counts under 'wrong'.*'51'"):
    grader.self_check()
  assert grader.counts == before


@pytest.mark.parametrize(
  "args, knob",
  [
    ({"kind": "maths"}, "config.reward.kind is 'maths'.*'exact', 'math'"),
    ({"kind": "math", "num_workers": 0}, "config.reward.num_workers is 0"),
    (
      {"kind": "exact", "timeout_seconds": 0.0},
      r"config.reward.timeout_seconds is 0\.0",
    ),
  ],
)
def test_arguments_out_of_range_are_errors(args, knob):
  with pytest.raises(ValueError, match=knob):
    Grader(**args)


def test_lengths_must_agree(math):
  with pytest.raises(ValueError, match="2 gold answers for 1 completions"):
    math.grade(["5"], ["5", "6"])


# Whose processes they are.


def test_workers_persist_and_end_with_the_grader():
  with Grader("math", num_workers=2, timeout_seconds=PATIENT) as grader:
    assert pids(grader) == []
    grader.grade(boxed(*"123456"), ["0.5"] * 6)
    processes = [worker.process for worker in grader._workers]
    assert [process.poll() for process in processes] == [None, None]
    groups = {os.getpgid(pid) for pid in [0, *pids(grader)]}
    assert len(groups) == 3  # Ctrl-C reaches the parent alone
    grader.grade(boxed(*"123456"), ["0.5"] * 6)
    assert [worker.process for worker in grader._workers] == processes
    assert sum(grader.counts.values()) == grader.counts["wrong"] == 12
  assert [process.poll() for process in processes] == [-signal.SIGKILL] * 2


@needs_linux
def test_workers_do_not_load_jax(math):
  math.self_check()
  for pid in pids(math):
    loaded = pathlib.Path(f"/proc/{pid}/maps").read_text()
    assert "python" in loaded and "jaxlib" not in loaded


PARENT = r"""
import signal, sys
from dppo_jax.rewards import Grader
# A shell that runs the tests in the background has SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
with Grader("math", num_workers=1, timeout_seconds=1.0) as grader:
  grader.self_check()
  print(grader._workers[0].process.pid, flush=True)
  {does}
"""
HANGS = rf"grader.grade([r'{HANG}'], ['5'])"
WAITS = "sys.stdin.read()"


@needs_linux
@pytest.mark.parametrize(
  "does, number",
  [
    (HANGS, signal.SIGKILL),
    (WAITS, signal.SIGKILL),
    (HANGS, signal.SIGINT),
    (WAITS, signal.SIGINT),
  ],
  ids=["killed at work", "killed", "interrupted at work", "interrupted"],
)
def test_workers_end_with_their_parent(does, number):
  """Within the two deadlines and a second that an orphan may take."""
  with subprocess.Popen(
    [sys.executable, "-c", PARENT.format(does=does)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  ) as parent:
    child = int(parent.stdout.readline())
    time.sleep(0.3)
    os.killpg(parent.pid, number)  # as a terminal does
    parent.wait()
    errors = parent.stderr.read()
  deadline = time.monotonic() + 10.0
  while is_running(child) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not is_running(child)
  # One traceback, the parent's own.
  assert errors.count("\nKeyboardInterrupt") == (number == signal.SIGINT)


# Real data.


def rows(name: str) -> list[dict]:
  path = DATA / name
  with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as lines:
    return [json.loads(line) for line in lines]


STYLES = {
  "as it is": "{}",
  "in dollars": "${}$",
  "as a sentence": "{}.",
  "displayed": r"\displaystyle {}",
}


@needs_data
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["math500.jsonl", "gsm8k_test.jsonl"])
def test_gold_answers_equal_themselves(math, name, style):
  golds = [row["answer"] for row in rows(name)[:300]]
  earned = math.grade(boxed(*map(STYLES[style].format, golds)), golds)
  assert [g for g, x in zip(golds, earned, strict=True) if not x] == []


@needs_data
def test_solutions_earn_their_answers(math):
  golds = [row["answer"] for row in rows("math_test.jsonl")]
  solutions = [r["solution"] for r in rows("math_test.solutions.jsonl.gz")]
  assert math.grade(solutions, golds) == [1.0] * 5000


@needs_data
def test_other_answers_earn_nothing(math):
  """Of 499 pairs of neighbours, one is equal though its text differs."""
  golds = [row["answer"] for row in rows("math500.jsonl")]
  earned = math.grade(boxed(*golds[1:]), golds[:-1])
  pairs = zip(golds, golds[1:], earned, strict=False)
  assert [(g, a) for g, a, x in pairs if x and g != a] == [("5", "x=5")]
