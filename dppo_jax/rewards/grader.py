"""Grades completions with reward functions, in processes that may be killed.

Completions are untrusted text, comparing two expressions is unbounded work
(9^{9^{9}} keeps sympy busy for ever), and a user's function may do anything. So
worker processes call the functions, on the completions of one prompt at a time.
If a call fails, its completions are graded one by one: only a completion that
raises, hangs, dies or fills the memory loses its reward.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
import itertools
import queue
from typing import Any, NamedTuple, Self

import numpy as np

from dppo_jax.errors import UserError
from dppo_jax.rewards.functions import (
  OURS,
  Items,
  Mark,
  RewardSpec,
  call,
  parse,
)
from dppo_jax.rewards.math_answers import last_boxed, outcome_by_text
from dppo_jax.rewards.normalize import normalize
from dppo_jax.rewards.pool import Fault, Worker

Columns = Mapping[str, Sequence[Any]]

FAULTS = ("timeouts", "crashes", "errors")
MAX_REMEMBERED = 100_000  # pairs of answers
IN_PROCESS = ("exact", "boxed")  # take time linear in the text
KNOWN_PAIRS = [  # gold answer, answer, their outcome by `math`
  (r"\frac{1}{2}", "0.5", "right"),
  ("(x+1)^2", "x^2+2x+1", "right"),
  ("1000", "1,001", "wrong"),
  ("[1,2]", "(1,2)", "wrong"),
]


class Graded(NamedTuple):
  """Rewards of `n` completions.

  Attributes:
    rewards: f32 `[n]`, the weighted sum over functions.
    correct: f32 `[n]`, the first function's value clipped to [0, 1].
    counts: completions by the first function's outcome, if it returns Verdicts
      (`right`, ...); values of any function that a fault made 0: `timeouts`,
      `crashes` of the process, `errors` (exceptions, also for a wrong number or
      type of values) and `nonfinite`.
    values: f32 `[n]` by function, before its weight; 0 for a fault and None.
  """

  rewards: np.ndarray
  correct: np.ndarray
  counts: collections.Counter
  values: dict[str, np.ndarray]


class Grader:
  """Grades completions; a context manager that ends its worker processes.

  The first function is the verifier: its value is the accuracy and, for a
  method with a prompt history, the difficulty of a problem. The others only
  shape the reward.
  """

  def __init__(
    self,
    functions: Items,
    num_workers: int = 2,
    timeout_seconds: float = 5.0,
    on_error: str = "zero",
  ):
    """Starts no process: a worker starts with its first call.

    Args:
      functions: the reward functions, as for `parse`.
      num_workers: number of processes; `exact` and `boxed` need none.
      timeout_seconds: wall-clock limit of one call by a process that is ready.
      on_error: "zero", or "stop" to raise if a user's function has a fault.
        Faults of ours are caused by completions and never raise.
    """
    self.specs = parse(functions)
    references = [x.reference for x in self.specs]
    references = [x for x in references if x not in IN_PROCESS]
    self._stops = on_error == "stop"
    self._workers = [
      Worker(references, timeout_seconds)
      for _ in range(max(num_workers, 1) if references else 0)
    ]
    self._idle = queue.SimpleQueue()
    for worker in self._workers:
      self._idle.put(worker)
    # A thread per worker waits for its answers.
    self._threads = futures.ThreadPoolExecutor(max(len(self._workers), 1))
    self._same: dict[tuple[str, str], bool] = {}  # by sorted pair of answers
    self._warnings: dict[str, str] = {}  # by function; empty once popped

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception) -> None:
    for worker in self._workers:
      worker.close()
    self._threads.shutdown(cancel_futures=True)
    for worker in self._workers:
      worker.stop()

  def self_check(self, columns: Columns | None = None) -> None:
    """Loads every function and grades `KNOWN_PAIRS` with `math`.

    Args:
      columns: columns of the data, checked for what the functions require.
    Raises:
      UserError: if a function cannot be loaded or does not go with the columns.
      RuntimeError: if `math` gives a wrong result.
    """
    for worker in self._workers[:1]:
      worker.start()
      if columns is not None:
        worker.check_columns(["prompts", "completions", "answers", *columns])
    for spec in self.specs:
      for gold, answer, outcome in KNOWN_PAIRS * (spec.reference == "math"):
        mark = self._mark_math(spec, rf"\boxed{{{answer}}}", gold)
        if mark != [outcome]:
          raise RuntimeError(
            f"the self-check of reward 'math' fails: {answer!r} is {mark[0]!r} "
            f"for the gold answer {gold!r}; reinstall math-verify as setup.py "
            "pins it, or raise config.reward.timeout_seconds"
          )

  def grade(
    self,
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str],
    columns: Columns | None = None,
    group_size: int = 1,
    verifier_only: bool = False,
  ) -> Graded:
    """Grades completions, in the order given.

    Args:
      prompts: problem of each completion, as text.
      completions: texts to grade.
      answers: gold answer of each, without a box.
      columns: other columns of the data by name, with values that JSON has.
      group_size: number of consecutive completions of one prompt, which a
        function receives together.
      verifier_only: True to call only the first function.
    Raises:
      ValueError: if lengths differ.
      UserError: if no process can start, or a function stops the run.
    """
    batch = {**(columns or {}), "prompts": prompts, "answers": answers}
    batch["completions"] = completions
    lengths = {name: len(values) for name, values in batch.items()}
    if len({*lengths.values()}) > 1 or len(completions) % group_size:
      raise ValueError(
        f"lengths differ, or no groups of {group_size}: {lengths}"
      )
    specs = self.specs[:1] if verifier_only else self.specs
    # All calls are under way before the first is waited for.
    calls = [self._mark(spec, batch, group_size) for spec in specs]
    counts, values = collections.Counter(), {}
    for spec, marks in zip(specs, calls, strict=True):
      values[spec.name] = self._values(spec, [*marks], counts)
    total = sum(spec.weight * values[spec.name] for spec in specs)
    rewards, num_overflows = _finite(total)  # a weight may be large
    counts["nonfinite"] += num_overflows
    values = {name: x.astype(np.float32) for name, x in values.items()}
    correct = np.clip(values[specs[0].name], 0, 1)
    return Graded(rewards.astype(np.float32), correct, counts, values)

  def same_answers(
    self, firsts: Sequence[str], seconds: Sequence[str]
  ) -> list[bool]:
    """Compares pairs of boxed answers, for a vote.

    If `math` is among the functions it decides, with either answer as the gold
    one; otherwise normalised texts are compared. Symmetric, but not transitive:
    10 is 10%, which is 0.1. A comparison that takes too long is False.
    """
    spec = next((x for x in self.specs if x.reference == "math"), None)
    pairs = [tuple(sorted(pair)) for pair in zip(firsts, seconds, strict=True)]
    if len(self._same) > MAX_REMEMBERED:
      self._same.clear()

    def is_same(pair: tuple[str, str]) -> bool:
      if spec is None or normalize(pair[0]) == normalize(pair[1]):
        return normalize(pair[0]) == normalize(pair[1])
      return any(
        self._mark_math(spec, rf"\boxed{{{answer}}}", gold) == ["right"]
        for gold, answer in (pair, pair[::-1])
      )

    new = [x for x in dict.fromkeys(pairs) if x not in self._same]
    self._same.update(zip(new, self._threads.map(is_same, new), strict=True))
    return [self._same[pair] for pair in pairs]

  def pop_warnings(self) -> list[str]:
    """Returns and clears the first fault message of each reward function."""
    warnings = [text for text in self._warnings.values() if text]
    self._warnings = dict.fromkeys(self._warnings, "")
    return warnings

  def _values(
    self, spec: RewardSpec, marks: list[Mark], counts: collections.Counter
  ) -> np.ndarray:
    """Returns the marks as finite numbers and adds to the counts."""
    words = [x for x in marks if isinstance(x, str)]
    is_verifier = spec is self.specs[0]
    counts.update(x for x in words if is_verifier or x in FAULTS)
    number = lambda x: float(x == "right" if isinstance(x, str) else x or 0)
    raw = np.array([number(x) for x in marks])
    values, num_nonfinite = _finite(raw)
    counts["nonfinite"] += num_nonfinite
    if num_nonfinite:
      bad = raw[values != raw][0]
      self._record_fault(spec, "nonfinite", f"returned {bad}")
    return values

  def _mark(
    self, spec: RewardSpec, batch: Columns, group_size: int
  ) -> Iterable[Mark]:
    """Begins to call a function; returns an iterator over the marks."""
    if spec.reference in IN_PROCESS:
      return call(OURS[spec.reference], batch)
    if spec.reference == "math":  # looks at one completion at a time
      pairs = batch["completions"], batch["answers"]
      parts = self._threads.map(lambda *x: self._mark_math(spec, *x), *pairs)
    else:
      begins = range(0, len(batch["completions"]), group_size)
      groups = [_slice(batch, i, i + group_size) for i in begins]
      parts = self._threads.map(lambda group: self._call(spec, group), groups)
    return itertools.chain.from_iterable(parts)

  def _mark_math(
    self, spec: RewardSpec, completion: str, answer: str
  ) -> list[Mark]:
    outcome = outcome_by_text(completion, answer)  # saves most of the calls
    if outcome:
      return [outcome]
    box = rf"\boxed{{{last_boxed(completion)}}}"
    return self._call(spec, {"completions": [box], "answers": [answer]})

  def _call(self, spec: RewardSpec, batch: Columns) -> list[Mark]:
    """Calls a function in a worker, at once or, if that fails, one by one."""
    num = len(batch["completions"])
    worker = self._idle.get()
    try:
      return worker.call(spec.reference, batch)
    except Fault as fault:
      self._record_fault(spec, fault.kind, fault.text, num)
      if num == 1:
        return [fault.kind]
    finally:
      self._idle.put(worker)
    return [self._call(spec, _slice(batch, i, i + 1))[0] for i in range(num)]

  def _record_fault(
    self, spec: RewardSpec, kind: str, fault: str, num: int = 1
  ) -> None:
    """Keeps a function's first fault as a warning, or raises it."""
    if spec.is_ours and kind != "errors":
      return
    line, _, details = fault.partition("\n")
    target = "a completion" if num == 1 else f"{num} completions of a prompt"
    text = f"reward function {spec.name!r} {line} on {target}"
    if self._stops:
      text = f"{text}; config.reward.on_error is 'stop'\n{details}"
      raise UserError(text.strip())
    text += "; each is tried alone and" if num > 1 else "; it"
    text += f" earns 0 if it fails, counted as reward/{kind}"
    self._warnings.setdefault(
      spec.name, f"{text}; config.reward.on_error=stop ends the run instead"
    )


def check(functions: Items) -> None:
  """Loads the functions in a process that then ends; raises UserError."""
  with Grader(functions, num_workers=1, timeout_seconds=60.0) as grader:
    grader.self_check()


def _finite(values: np.ndarray) -> tuple[np.ndarray, int]:
  """Returns values with 0 for those float32 cannot hold, and their number."""
  with np.errstate(over="ignore"):
    is_finite = np.isfinite(values.astype(np.float32))
  return np.where(is_finite, values, 0.0), int((~is_finite).sum())


def _slice(batch: Columns, begin: int, end: int) -> Columns:
  return {name: values[begin:end] for name, values in batch.items()}
