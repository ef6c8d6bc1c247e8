"""Grades completions with reward functions, in processes that may be killed.

Completions are untrusted text, comparing two expressions is unbounded work
(9^{9^{9}} keeps sympy busy for ever), and a user's function may do anything.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
import functools
import itertools
import queue
from typing import Any, NamedTuple, Self

import numpy as np

from dppo_jax.errors import UserError
from dppo_jax.rewards.functions import OURS, Items, RewardSpec, call, parse
from dppo_jax.rewards.math_answers import last_boxed, outcome_by_text
from dppo_jax.rewards.pool import Fault, Worker

Columns = Mapping[str, Sequence[Any]]

FAULTS = ("timeouts", "crashes", "errors")
IN_PROCESS = ("exact", "boxed")  # take time linear in the text


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
      timeout_seconds: wall-clock limit of a call.
      on_error: "zero", or "stop" to raise if a user's function has a fault.
    """
    self.specs = parse(functions)
    self._stops = on_error == "stop"
    references = [x.reference for x in self.specs]
    references = [x for x in references if x not in IN_PROCESS]
    num_workers = max(num_workers, 1)
    self._workers = [
      Worker(references, timeout_seconds)
      for _ in range(num_workers if references else 0)
    ]
    self._idle = queue.SimpleQueue()
    for worker in self._workers:
      self._idle.put(worker)
    # A thread per worker waits for its answers.
    self._threads = futures.ThreadPoolExecutor(num_workers)
    self._warnings: dict[str, str] = {}  # by function; empty once popped

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception) -> None:
    for worker in self._workers:
      worker.close()
    self._threads.shutdown(cancel_futures=True)
    for worker in self._workers:
      worker.stop()

  def self_check(self, columns: Iterable[str] | None = None) -> None:
    """Loads every function in a worker; `math` compares two answers.

    Args:
      columns: names of the data's columns; None if they are not known yet.
    Raises:
      UserError: if a function cannot be loaded or requires another column.
    """
    names = {"prompts", "completions", "answers", *(columns or ())}
    for worker in self._workers[:1]:
      worker.start()
      for reference, name in worker.required:
        if columns is not None and name not in names:
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
        a function receives together; None gives it one at a time.
      verifier_only: True to call only the first function.
    Raises:
      UserError: if no process can start, or a function stops the run.
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
      has_groups = group_sizes is not None and spec.reference != "math"
      sizes = group_sizes if has_groups else [1] * len(completions)
      ends = itertools.accumulate(sizes, initial=0)
      groups = [_slice(batch, i, j) for i, j in itertools.pairwise(ends)]
      marks = functools.partial(self._marks, spec)
      calls[spec] = self._threads.map(marks, groups)
    counts = collections.Counter()
    values = {
      spec.name: self._values(spec, [x for y in groups for x in y], counts)
      for spec, groups in calls.items()
    }
    total = sum(spec.weight * values[spec.name] for spec in specs)
    rewards = total.astype(np.float32)
    values = {name: x.astype(np.float32) for name, x in values.items()}
    return Graded(rewards, values[specs[0].name].clip(0, 1), counts, values)

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
    values = [x == "right" if isinstance(x, str) else x or 0 for x in marks]
    values = np.array(values, np.float64)
    with np.errstate(over="ignore"):
      is_finite = np.isfinite(values.astype(np.float32))
    counts["nonfinite"] += int((~is_finite).sum())
    for bad in values[~is_finite][:1]:
      self._record_fault(spec, "nonfinite", f"returned {bad}")
    return np.where(is_finite, values, 0.0)

  def _marks(self, spec: RewardSpec, group: Columns) -> list:
    """Calls a function on a group, which is one completion for `math`."""
    if spec.reference in IN_PROCESS:
      return call(OURS[spec.reference], group)
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
    worker = self._idle.get()
    try:
      return worker.call(spec.reference, batch)
    except Fault as fault:
      kind, text = fault.args
      self._record_fault(spec, kind, text, num)
      if num == 1:
        return [kind]
    finally:
      self._idle.put(worker)
    return [self._call(spec, _slice(batch, i, i + 1))[0] for i in range(num)]

  def _record_fault(
    self, spec: RewardSpec, kind: str, fault: str, num: int = 1
  ) -> None:
    """Keeps a function's first fault as a warning, or raises it."""
    if spec.reference in OURS and kind != "errors":
      return
    line, _, details = fault.partition("\n")
    target = "a completion" if num == 1 else f"{num} completions of a prompt"
    text = f"reward function {spec.name!r} {line} on {target}"
    if self._stops:
      text = f"{text}; config.reward.on_error is 'stop'\n{details}"
      raise UserError(text.strip())
    text += (
      f"; if it fails alone it earns 0, counted as reward/{kind}; "
      "config.reward.on_error=stop ends the run instead"
    )
    self._warnings.setdefault(spec.name, text)


def check(functions: Items) -> None:
  """Loads the functions in a process that then ends; raises UserError."""
  with Grader(functions, num_workers=1) as grader:
    grader.self_check()


def _slice(batch: Columns, begin: int, end: int) -> Columns:
  return {name: values[begin:end] for name, values in batch.items()}
