"""Grades completions with reward functions, in processes that may be killed.

Completions are untrusted text, comparing two expressions is unbounded work
(9^{9^{9}} keeps sympy busy for ever), and a user's function may do anything.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
import itertools
from typing import Any, NamedTuple, Self

import numpy as np

from dppo_jax import distributed
from dppo_jax.errors import UserError
from dppo_jax.rewards.functions import (
  OURS,
  Items,
  RewardSpec,
  call,
  load,
  parse,
  required_arguments,
)
from dppo_jax.rewards.math_answers import last_boxed, outcome_by_text
from dppo_jax.rewards.pool import Fault, Worker, explain

Columns = Mapping[str, Sequence[Any]]

FAULTS = ("timeouts", "crashes", "errors", "switched_off")
IN_PROCESS = ("exact", "last_number", "boxed")  # take time linear in the text
MAX_WORKERS = 16  # processes, unless a caller names more
MAX_REWARD = 1e15
MAX_HANGS = 20  # calls in a row without an answer switch a function off


class Graded(NamedTuple):
  """Rewards of `n` completions.

  Attributes:
    rewards: f32 `[n]`, the weighted sum over functions.
    correct: f32 `[n]`, the first function's value clipped to [0, 1].
    counts: completions by the first function's outcome, if it returns Verdicts
      (`right`, ...); values of any function that a fault made 0: `timeouts`,
      `crashes` of the process, `errors` (exceptions, also for a wrong number or
      type of values), `switched_off` (not called, because it always hangs) and
      `nonfinite` (NaN, or at least `MAX_REWARD`; the weighted sum too).
    values: f32 `[n]` by function, before its weight; 0 for a fault and None.
  """

  rewards: np.ndarray
  correct: np.ndarray
  counts: collections.Counter
  values: dict[str, np.ndarray]


class Grader:
  """Grades completions; a context manager that ends its worker processes.

  The first function is the verifier: its value is the accuracy, and what a
  method's prompt history gets as correct. The others only shape the reward.
  """

  def __init__(
    self, functions: Items, num_workers: int = 0, timeout_seconds: float = 5.0
  ):
    """Loads batched functions; starts no process before the first call.

    Args:
      functions: the reward functions, as for `parse`.
      num_workers: number of processes; 0 for `default_workers`. Batched
        functions and the built-in ones except `math` need none.
      timeout_seconds: wall-clock limit of a call.
    Raises:
      UserError: if a batched function cannot be loaded.
    """
    self.specs = parse(functions)
    self._here = {
      spec: load(spec.reference)
      for spec in self.specs
      if spec.batched or spec.reference in IN_PROCESS
    }
    references = [x.reference for x in self.specs if x not in self._here]
    num_workers = num_workers or default_workers()
    self._workers = [
      Worker(references, timeout_seconds)
      for _ in range(num_workers if references else 0)
    ]
    # Never empty when asked: each worker has a thread that waits for it.
    self._idle = collections.deque(self._workers)
    self._threads = futures.ThreadPoolExecutor(num_workers)
    # One more, without the trainer's mesh, calls the functions `_here`.
    self._thread = futures.ThreadPoolExecutor(1)
    self._hangs = dict.fromkeys(self.specs, 0)  # calls in a row, unanswered
    self._warnings: dict[tuple, str] = {}  # by function; empty once popped

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception) -> None:
    for worker in self._workers:
      worker.close()
    self._thread.shutdown(cancel_futures=True)
    self._threads.shutdown(cancel_futures=True)
    for worker in self._workers:
      worker.stop()

  def self_check(
    self, columns: Iterable[str] | None = None, verifier_only: bool = False
  ) -> None:
    """Loads every function in all workers; `math` compares two answers.

    Args:
      columns: names of the data's columns; None if they are not known yet.
      verifier_only: True if the first function alone has to grade the data.
    Raises:
      UserError: if a function cannot be loaded or requires another column.
    """
    specs = self.specs[: 1 if verifier_only else None]
    graded = columns is not None and {x.reference for x in specs}
    names = {"prompts", "completions", "answers", *(columns or ())}
    required = [
      (spec.reference, name)
      for spec, function in self._here.items()
      for name in required_arguments(function)
    ]
    for of_worker in self._threads.map(Worker.start, self._workers):
      required += of_worker
    for reference, name in required:
      if graded and reference in graded and name not in names:
        raise UserError(
          f"config.reward.functions: {reference} requires {name!r}, but the "
          f"data has no such column: it has {', '.join(sorted(names))}"
        )

  def grade(
    self,
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str],
    columns: Columns | None = None,
    group_sizes: Sequence[int] | None = None,
    verifier_only: bool = False,
  ) -> Graded:
    """Grades completions, in the order given.

    Args:
      prompts: problem of each completion, as text.
      completions: texts to grade.
      answers: gold answer of each, without a box.
      columns: other columns of the data by name, with values that JSON has.
      group_sizes: numbers of consecutive completions of one prompt each, which
        a function receives together; None gives it one at a time. A batched
        function receives all.
      verifier_only: True to call only the first function.
    Raises:
      UserError: if no process can start.
    """
    batch = {
      **(columns or {}),
      "prompts": prompts,
      "completions": completions,
      "answers": answers,
    }
    specs = self.specs[:1] if verifier_only else self.specs
    # Starts all calls before it waits for the first.
    calls = {}
    for spec in specs:
      # One call tries a function that is switched off.
      self._hangs[spec] = min(self._hangs[spec], MAX_HANGS - 1)
      num, threads = len(completions), self._threads
      sizes: Sequence[int] = [1] * num
      if spec in self._here:
        sizes, threads = [num] if num else [], self._thread
      elif group_sizes is not None and spec.reference != "math":
        sizes = group_sizes
      ends = itertools.accumulate(sizes, initial=0)
      groups = [_slice(batch, i, j) for i, j in itertools.pairwise(ends)]
      calls[spec] = threads.map(self._marks, itertools.repeat(spec), groups)
    counts: collections.Counter[str] = collections.Counter()
    values = {
      spec.name: self._values(spec, [x for y in groups for x in y], counts)
      for spec, groups in calls.items()
    }
    terms = (spec.weight * values[spec.name] for spec in specs)
    total = sum(terms, np.zeros(len(completions)))
    rewards = _bounded(total, counts).astype(np.float32)
    values = {name: x.astype(np.float32) for name, x in values.items()}
    verdicts = values[specs[0].name]
    if not np.isin(verdicts, (0, 1)).all():
      self._warnings.setdefault(
        (specs[0], "values"),
        f"warning: {specs[0].name} returns values other than 0 and 1. What is "
        "called accuracy is their mean, clipped to [0, 1]: name a verifier as "
        "the first function of config.reward.functions to log one",
      )
    return Graded(rewards, verdicts.clip(0, 1), counts, values)

  def pop_warnings(self) -> list[str]:
    """Returns and clears the first fault message of each reward function."""
    warnings = [text for text in self._warnings.values() if text]
    self._warnings = dict.fromkeys(self._warnings, "")
    return warnings

  def _values(
    self, spec: RewardSpec, marks: list, counts: collections.Counter
  ) -> np.ndarray:
    """Counts the marks; returns them as numbers that float32 can hold."""
    is_verifier = spec is self.specs[0]
    words = [x for x in marks if isinstance(x, str)]
    counts.update(x for x in words if is_verifier or x in FAULTS)
    values = np.array(
      [x == "right" if isinstance(x, str) else x or 0 for x in marks],
      np.float64,
    )
    bounded = _bounded(values, counts)
    for bad in values[values != bounded][:1]:
      self._record_fault(spec, "nonfinite", f"returned {bad}")
    return bounded

  def _marks(self, spec: RewardSpec, group: Columns) -> list:
    """Calls a function on a group; `math` takes groups of one completion."""
    if spec in self._here:
      try:
        return call(self._here[spec], group)
      except (Exception, SystemExit) as error:
        num = len(group["completions"])
        self._record_fault(spec, "errors", explain(error), num)
        return ["errors"] * num
    if spec.reference == "math":
      (text,), (gold,) = group["completions"], group["answers"]
      if outcome := outcome_by_text(text, gold):  # saves most calls
        return [outcome]
      box = rf"\boxed{{{last_boxed(text)}}}"
      group = {"completions": [box], "answers": [gold]}
    return self._call(spec, group)

  def _call(self, spec: RewardSpec, batch: Columns) -> list:
    """Calls a function in a worker, at once or, if that fails, one by one."""
    num = len(batch["completions"])
    worker = self._idle.popleft()
    try:
      if self._hangs[spec] >= MAX_HANGS:
        return ["switched_off"] * num
      marks = worker.call(spec.reference, batch)
      self._hangs[spec] = 0
      return marks
    except Fault as fault:
      kind, text = fault.args
      self._record_fault(spec, kind, text, num)
      self._count_hang(spec, kind, text)
      if num == 1:
        return [kind]
    finally:
      self._idle.append(worker)
    return [self._call(spec, _slice(batch, i, i + 1))[0] for i in range(num)]

  def _record_fault(
    self, spec: RewardSpec, kind: str, fault: str, num: int = 1
  ) -> None:
    """Keeps a function's first fault of a kind as a warning."""
    if spec.reference in OURS and kind != "errors":
      return
    line, _, details = fault.partition("\n")
    target, cost = f"{num} completions", "they earn 0"
    if num == 1:
      target, cost = "a completion", "it earns 0"
    elif spec not in self._here:
      target, cost = f"{target} of a prompt", "a lone failure earns 0"
    text = (
      f"reward function {spec.name!r} {line} on {target}; {cost}, counted as "
      f"reward/{kind}\n{details}"
    )
    self._warnings.setdefault((spec, kind), text.strip())

  def _count_hang(self, spec: RewardSpec, kind: str, fault: str) -> None:
    """Switches off a user's function that has given no answer for too long."""
    is_hang = kind != "errors" and spec.reference not in OURS
    self._hangs[spec] = self._hangs[spec] + 1 if is_hang else 0
    if self._hangs[spec] == MAX_HANGS:
      text = (
        f"reward function {spec.name!r} is switched off, since it {fault} in "
        f"{MAX_HANGS} calls in a row: completions earn 0, counted as "
        "reward/switched_off. Each grading tries it again, once a worker. Load "
        "models in a class (dppo_jax/rewards/README.md) or raise "
        "config.reward.timeout_seconds"
      )
      self._warnings.setdefault((spec, "switched_off"), text)


def default_workers() -> int:
  """Returns the cores that this process may use, at most `MAX_WORKERS`."""
  return min(distributed.num_cores(), MAX_WORKERS)


def check(functions: Items) -> None:
  """Loads the functions, in a worker that then ends; raises UserError."""
  with Grader(functions, num_workers=1) as grader:
    grader.self_check()


def _bounded(values: np.ndarray, counts: collections.Counter) -> np.ndarray:
  """Counts numbers whose squares float32 cannot add up; makes them 0."""
  is_bounded = np.abs(values) < MAX_REWARD
  counts["nonfinite"] += int((~is_bounded).sum())
  return np.where(is_bounded, values, 0.0)


def _slice(batch: Columns, begin: int, end: int) -> Columns:
  return {name: values[begin:end] for name, values in batch.items()}
