r"""What a completion earns: is the answer in its last box the gold answer?

Completions are untrusted text, and whether two expressions are equal is
unbounded work: a box that holds 9^{9^{9}} keeps sympy busy for ever. So child
processes do the mathematics, one pair of answers at a time. A child that
hangs, dies or fills its memory costs one reward and is replaced.
"""

from collections.abc import Sequence
from concurrent import futures
import contextlib
import functools
import json
import logging
from multiprocessing import connection
import os
import queue
import re
import subprocess
import sys
from typing import Self

OUTCOMES = ("right", "wrong", "unboxed", "unparsed", "timeouts", "crashes")
MAX_ANSWER_CHARS = 1000  # ten times the longest gold answer of MATH
MEMORY_BYTES = 4 << 30  # address space of a child
START_SECONDS = 120.0  # to import math-verify, which takes half a second
CHILD_ENV = {
  "JAX_PLATFORMS": "cpu",  # should a child ever import JAX
  "CUDA_VISIBLE_DEVICES": "",
  "SYMPY_CACHE_SIZE": "100",  # 1000 numbers of a million digits fill a child
}

# For each kind: gold answer, answer, are they equal.
KNOWN_PAIRS = {
  "exact": [
    (r"\frac{1}{2}", r" \frac{1}{2} ", True),
    (r"\frac{1}{2}", "0.5", False),
  ],
  "math": [
    (r"\frac{1}{2}", "0.5", True),
    ("(x+1)^2", "x^2+2x+1", True),
    ("1000", "1,001", False),
    ("[1,2]", "(1,2)", False),
  ],
}

# A box and its brace; a box around one bare word; `\{` and other escapes, of
# which no brace counts; a brace.
_TOKEN = re.compile(
  r"(?P<box>\\(?:boxed|fbox)\s*\{)"
  r"|\\(?:boxed|fbox)(?![a-zA-Z])\s*(?P<bare>-?\w+(?:[./]\w+)*)"
  r"|\\.|(?P<open>\{)|(?P<close>\})",
  re.DOTALL,
)


def last_boxed(text: str) -> str | None:
  r"""The contents of the last complete `\boxed{}` or `\fbox{}`, or None.

  Last is the box that starts last; a box that is cut off does not count. Takes
  time linear in the text, whatever its braces.

  >>> last_boxed(r"not \boxed{4} but \boxed{\frac{1}{2}}, as \boxed{...")
  '\\frac{1}{2}'
  >>> last_boxed(r"hence $\boxed 5$.")
  '5'
  """
  starts = []  # of the open braces: where a box's contents begin, or -1
  begin, end = -1, -1
  for token in _TOKEN.finditer(text):
    if token["bare"]:
      begin, end = token.span("bare")
    elif token["box"]:
      starts.append(token.end())
    elif token["open"]:
      starts.append(-1)
    elif token["close"] and starts:
      start = starts.pop()
      if start > begin:
        begin, end = start, token.start()
  return None if begin < 0 else text[begin:end]


class Grader:
  r"""Grades completions; a context manager that ends its child processes.

  The answer is the text in the last complete box; a completion without one is
  wrong, as is an answer longer than `MAX_ANSWER_CHARS`. `exact` compares text,
  white space around it aside. `math` asks math-verify, which is lenient where
  notation is: units and subscripts (a number's base) are dropped, 10\% equals
  both 10 and 0.1, of an equation the last side counts where the gold answer is
  none, and a number may be off in the seventh decimal.

  Attributes:
    counts: completions graded so far by outcome, a key for each of `OUTCOMES`.
      `unboxed` had no box, `unparsed` an answer (or a gold answer) that is not
      mathematics; `timeouts` and `crashes` cost a child process each.
  """

  def __init__(
    self,
    kind: str,
    num_workers: int = 2,
    timeout_seconds: float = 5.0,
    format_reward: float = 0.0,
  ):
    """Starts no process: a worker starts with its first completion.

    Args:
      num_workers: child processes, at least 1; "exact" starts none.
      timeout_seconds: wall clock for one completion, above 0; it starts when a
        child that is ready gets the answer.
      format_reward: added wherever there is a complete box.
    Raises:
      ValueError: if an argument is out of range.
    """
    if kind not in KNOWN_PAIRS:
      raise ValueError(
        f"config.reward.kind is {kind!r}, not one of {[*KNOWN_PAIRS]}"
      )
    if kind == "math" and num_workers < 1:
      raise ValueError(
        f"config.reward.num_workers is {num_workers}, not at least 1"
      )
    if timeout_seconds <= 0:
      raise ValueError(
        f"config.reward.timeout_seconds is {timeout_seconds}, not above 0"
      )
    self.counts = dict.fromkeys(OUTCOMES, 0)
    self._kind = kind
    self._format_reward = format_reward
    num_workers = num_workers if kind == "math" else 0
    self._workers = [_Worker(timeout_seconds) for _ in range(num_workers)]
    self._idle = queue.SimpleQueue()
    for worker in self._workers:
      self._idle.put(worker)
    # As many threads as workers: each waits for one child.
    self._pool = futures.ThreadPoolExecutor(max(num_workers, 1))

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception) -> None:
    self._pool.shutdown(cancel_futures=True)
    for worker in self._workers:
      worker.stop()

  def grade(
    self, completions: Sequence[str], golds: Sequence[str]
  ) -> list[float]:
    """Rewards in the order given: 1 where right, else 0, and `format_reward`.

    Args and errors are those of `judge`.
    """
    return [self.reward(x) for x in self.judge(completions, golds)]

  def reward(self, outcome: str) -> float:
    """What an outcome earns: 1 where right, and `format_reward` for a box."""
    return float(outcome == "right") + self._format_reward * (
      outcome != "unboxed"
    )

  def judge(
    self, completions: Sequence[str], golds: Sequence[str]
  ) -> list[str]:
    """One of `OUTCOMES` for each completion, in the order given; counts them.

    Args:
      golds: the gold answer of each completion, without a box.
    Raises:
      ValueError: if the lengths differ.
      RuntimeError: if a child process cannot start.
    """
    if len(completions) != len(golds):
      raise ValueError(
        f"{len(golds)} gold answers for {len(completions)} completions"
      )
    outcomes = self._outcomes(completions, golds)
    for outcome in outcomes:
      self.counts[outcome] += 1
    return outcomes

  def self_check(self) -> None:
    """Grades `KNOWN_PAIRS` the way completions are; they are not counted.

    Raises:
      RuntimeError: names the first pair that was graded wrongly.
    """
    pairs = KNOWN_PAIRS[self._kind]
    completions = [rf"It is \boxed{{{answer}}}." for _, answer, _ in pairs]
    outcomes = self._outcomes(completions, [gold for gold, _, _ in pairs])
    for (gold, answer, is_equal), outcome in zip(pairs, outcomes, strict=True):
      if outcome != ("right" if is_equal else "wrong"):
        raise RuntimeError(
          f"config.reward.kind {self._kind!r} fails its self-check: answer "
          f"{answer!r} counts under {outcome!r} where the gold answer is "
          f"{gold!r}; reinstall math-verify as setup.py pins it, or raise "
          "config.reward.timeout_seconds"
        )

  def _outcomes(
    self, completions: Sequence[str], golds: Sequence[str]
  ) -> list[str]:
    run = map if self._kind == "exact" else self._pool.map
    return list(run(self._outcome, completions, golds))

  def _outcome(self, completion: str, gold: str) -> str:
    answer = last_boxed(completion)
    if answer is None:
      return "unboxed"
    if self._kind == "exact":
      return "right" if answer.strip() == gold.strip() else "wrong"
    # The same text is right whether or not anyone can parse it.
    if _tidy(answer) == _tidy(gold):
      return "right"
    if len(answer) > MAX_ANSWER_CHARS:
      return "unparsed"
    worker = self._idle.get()
    try:
      return worker.compare(gold, answer)
    finally:
      self._idle.put(worker)


class _Worker:
  """A child process that compares two answers at a time, restarted at need."""

  def __init__(self, timeout_seconds: float):
    self.process = None
    self._timeout_seconds = timeout_seconds

  def compare(self, gold: str, answer: str) -> str:
    """One of `OUTCOMES`. Raises RuntimeError if no child can start."""
    if self.process is None:
      self._start()
    try:
      print(json.dumps([gold, answer]), file=self.process.stdin, flush=True)
      outcome = self._read_line(self._timeout_seconds)
    except BrokenPipeError:
      outcome = "crashes"
    if outcome in ("timeouts", "crashes"):
      self.stop()
    return outcome

  def stop(self) -> str:
    """Ends the child, if there is one; returns what it wrote to stderr."""
    if self.process is None:
      return ""
    self.process.kill()
    _, errors = self.process.communicate()  # also closes the pipes
    self.process = None
    return errors

  def _start(self) -> None:
    # This file as a script: a child of multiprocessing imports dppo_jax.main,
    # and with it JAX. -P hides its neighbours, such as config.py, from imports.
    self.process = subprocess.Popen(
      [sys.executable, "-P", __file__, str(self._timeout_seconds)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=os.environ | CHILD_ENV,
      start_new_session=True,  # Ctrl-C is for the parent
    )
    if self._read_line(START_SECONDS) != "ready":
      raise RuntimeError(
        f"a grader process died, or was not ready in {START_SECONDS:g} s; its "
        f"stderr ends with: {self.stop()[-2000:]}"
      )

  def _read_line(self, seconds: float) -> str:
    # A line is shorter than a pipe's atomic write: its first byte brings all.
    if not connection.wait([self.process.stdout], seconds):
      return "timeouts"
    return self.process.stdout.readline().strip() or "crashes"


def _serve(timeout_seconds: float) -> None:
  """The child: says "ready", then answers each line of stdin with an outcome.

  It ends with its stdin, so it does not outlive the parent.
  """
  import resource
  import signal

  # Replies get a pipe of their own. Whatever else is printed goes to stderr, to
  # explain a failure to start, and once ready nowhere: a full pipe would block.
  replies = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
  logging.disable()  # math-verify warns that it keeps no time: the parent does
  _compare("1", "2")  # the first comparison builds the parser's tables
  silence = os.open(os.devnull, os.O_WRONLY)
  os.dup2(silence, 1)
  os.dup2(silence, 2)
  print("ready", file=replies, flush=True)
  for line in sys.stdin:
    # The parent's deadline comes first; this ends an orphan that hangs.
    signal.setitimer(signal.ITIMER_REAL, 2 * timeout_seconds + 1)
    outcome = _compare(*json.loads(line))
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(outcome, file=replies, flush=True)


def _compare(gold: str, answer: str) -> str:
  import math_verify

  gold_values, answer_values = _parse(_tidy(gold)), _parse(_tidy(answer))
  if not gold_values or not answer_values:
    return "unparsed"
  is_equal = math_verify.verify(  # not symmetric: the gold answer comes first
    gold_values, answer_values, timeout_seconds=None
  )
  return "right" if is_equal else "wrong"


@functools.lru_cache(maxsize=64)  # a group shares its gold answer
def _parse(text: str) -> list:
  import math_verify

  # LaTeX only, first match only: the default goes on to look for any number in
  # what it could not parse, and a policy learns to please it.
  return math_verify.parse(
    rf"\boxed{{{text}}}",
    [math_verify.LatexExtractionConfig(boxed_match_priority=0)],
    fallback_mode="no_fallback",
    extraction_mode="first_match",
    parsing_timeout=None,
  )


def _tidy(answer: str) -> str:
  r"""`answer` without the `,\!` between thousands or a full stop at its end."""
  answer = answer.replace(r",\!", "").replace(r"\!", "")
  return answer.strip().removesuffix(".").strip()


if __name__ == "__main__":
  _serve(float(sys.argv[1]))
