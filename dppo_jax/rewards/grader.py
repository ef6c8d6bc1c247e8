"""Grades completions with reward functions, in processes that may be killed.

Completions are untrusted text, whether two expressions are equal is unbounded
work (a box that holds 9^{9^{9}} keeps sympy busy for ever), and a user's
function may do anything. So child processes call the functions, on the
completions of one prompt at a time. Where a call fails, its completions are
tried again one by one: who raises, hangs, dies or fills the memory is the only
one to lose a reward.
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
import itertools
import queue
from typing import Any, NamedTuple, Self

import numpy as np

from dppo_jax.rewards.functions import (
  OURS,
  Item,
  Mark,
  RewardSpec,
  arguments,
  call,
  parse,
)
from dppo_jax.rewards.math_answers import last_boxed, outcome_by_text
from dppo_jax.rewards.normalize import is_symmetric, normalize
from dppo_jax.rewards.workers import Fault, Worker, check_columns

FAULTS = ("timeouts", "crashes", "errors")
_REMEDIES = {
  "timeouts": "config.reward.timeout_seconds is the limit",
  "crashes": "config.reward.on_error=stop ends the run instead",
  "errors": "config.reward.on_error=stop ends the run and shows where",
  "nonfinite": "config.reward.on_error=stop ends the run instead",
}
MAX_REMEMBERED = 100_000  # pairs of answers
IN_PROCESS = ("exact", "boxed")  # ours that take time linear in the text

# For each function: gold answer, answer, are they equal.
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


def check(functions: str | Callable | Sequence[Item]) -> None:
  """Loads the functions that are not ours in a process that then ends.

  Args:
    functions: as for `parse`.
  Raises:
    ValueError: in one line, if one cannot be loaded.
    RuntimeError: likewise, if no process can start.
  """
  references = [x.reference for x in parse(functions) if not x.is_ours]
  if references:
    worker = Worker(references, timeout_seconds=1.0)
    try:
      worker.start()
    finally:
      worker.stop()


class Graded(NamedTuple):
  """What `n` completions earn.

  Attributes:
    rewards: f32 `[n]`, the weighted sum over functions.
    correct: f32 `[n]`, the first function's value clipped to [0, 1].
    counts: how many completions the first function finds `right`, `wrong`,
      `unboxed` and `unparsed`, if it returns Verdicts, and how many values of
      any function are 0 because of a fault: `timeouts`, `crashes` of the
      process, `errors` (an exception, a wrong number or type of values), and
      `nonfinite` values.
    values: f32 `[n]` of each function by name, before its weight; finite, 0
      for a fault and for None.
  """

  rewards: np.ndarray
  correct: np.ndarray
  counts: collections.Counter
  values: dict[str, np.ndarray]


class Grader:
  """Grades completions; a context manager that ends its child processes.

  The first function is the verifier: what it says is the accuracy and, for a
  method with a prompt history, how hard a problem is. The others only shape the
  reward.
  """

  def __init__(
    self,
    functions: str | Callable | Sequence[Item],
    num_workers: int = 2,
    timeout_seconds: float = 5.0,
    on_error: str = "zero",
  ):
    """Starts no process: a worker starts with its first call.

    Args:
      functions: as for `parse`.
      num_workers: child processes, at least 1; `exact` and `boxed` need none.
      timeout_seconds: wall clock for one call of a function, above 0; it starts
        when a child that is ready gets the call.
      on_error: "zero", or "stop" to raise where a function that is not ours has
        a fault. Ours have faults that only the completions are to blame for.
    Raises:
      ValueError: if an argument is out of range.
    """
    self.specs = parse(functions)
    references = [x.reference for x in self.specs]
    references = [x for x in references if x not in IN_PROCESS]
    if references and num_workers < 1:
      raise ValueError(
        f"config.reward.num_workers is {num_workers}, not at least 1"
      )
    if timeout_seconds <= 0:
      raise ValueError(
        f"config.reward.timeout_seconds is {timeout_seconds}, not above 0"
      )
    if on_error not in ("zero", "stop"):
      raise ValueError(
        f"config.reward.on_error is {on_error!r}, not one of ['zero', 'stop']"
      )
    self._stops = on_error == "stop"
    self._workers = [
      Worker(references, timeout_seconds)
      for _ in range(num_workers if references else 0)
    ]
    self._idle = queue.SimpleQueue()
    for worker in self._workers:
      self._idle.put(worker)
    # As many threads as workers: each waits for one child.
    self._pool = futures.ThreadPoolExecutor(max(len(self._workers), 1))
    self._same: dict[tuple[str, str], bool] = {}  # of answers, in order
    self._news: dict[str, str] = {}  # of each function, empty once handed out

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception) -> None:
    for worker in self._workers:
      worker.close()  # ends the calls that are under way
    self._pool.shutdown(cancel_futures=True)
    for worker in self._workers:
      worker.stop()

  def self_check(
    self, columns: Mapping[str, Sequence[Any]] | None = None
  ) -> None:
    """Loads every function and grades `KNOWN_PAIRS` with ours.

    Args:
      columns: of the data, if it is to be checked that they suffice and that a
        child can be sent them.
    Raises:
      ValueError: in one line, if a function cannot be loaded or does not go
        with the columns.
      RuntimeError: if ours err, or a child cannot start.
    """
    if self._workers:
      worker = self._idle.get()
      try:
        worker.start()
        if columns is not None:
          for spec in self.specs:
            if takes := worker.takes.get(spec.reference):
              check_columns(spec, takes, columns)
      finally:
        self._idle.put(worker)
    for spec in self.specs:
      if spec.reference not in KNOWN_PAIRS:
        continue
      pairs = KNOWN_PAIRS[spec.reference]
      batch = {
        "completions": [
          rf"It is \boxed{{{answer}}}." for _, answer, _ in pairs
        ],
        "answers": [gold for gold, _, _ in pairs],
      }
      marks = itertools.chain.from_iterable(self._mark(spec, batch, 1))
      for (gold, answer, is_equal), mark in zip(pairs, marks, strict=True):
        if mark != ("right" if is_equal else "wrong"):
          raise RuntimeError(
            f"config.reward.functions: {spec.name!r} fails its self-check: "
            f"answer {answer!r} counts under {mark!r} where the gold answer is "
            f"{gold!r}; reinstall math-verify as setup.py pins it, or raise "
            "config.reward.timeout_seconds"
          )

  def grade(
    self,
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
    group_size: int = 1,
    verifier_only: bool = False,
  ) -> Graded:
    """What each completion earns, in the order given.

    Args:
      prompts: the problem of each completion, as text.
      answers: the gold answer of each, without a box.
      columns: what else the data says of each, by name; JSON, and none called
        as one of the arguments above.
      group_size: so many consecutive completions are of one prompt, and a
        function sees them together.
      verifier_only: calls the first function alone.
    Raises:
      ValueError: if lengths differ, or a column is not JSON.
      RuntimeError: if a child cannot start, or a function stops the run.
    """
    batch = dict(columns or {}) | {
      "prompts": prompts,
      "completions": completions,
      "answers": answers,
    }
    num = len(completions)
    for name, values in batch.items():
      if len(values) != num:
        raise ValueError(f"{len(values)} {name} for {num} completions")
    if group_size < 1 or num % group_size:
      raise ValueError(f"{num} completions are not in groups of {group_size}")
    specs = self.specs[:1] if verifier_only else self.specs
    # All calls are under way before the first is waited for.
    calls = [self._mark(spec, batch, group_size) for spec in specs]
    counts = collections.Counter()
    values, total = {}, np.zeros(num)
    for spec, parts in zip(specs, calls, strict=True):
      marks = list(itertools.chain.from_iterable(parts))
      value = self._values(spec, marks, counts)
      values[spec.name] = value.astype(np.float32)
      total += spec.weight * value
    with np.errstate(over="ignore"):
      rewards = total.astype(np.float32)
    is_finite = np.isfinite(rewards)  # a weight may be large
    counts["nonfinite"] += int((~is_finite).sum())
    verdict = values[specs[0].name]
    return Graded(
      np.where(is_finite, rewards, np.float32(0)),
      np.clip(verdict, 0, 1),
      counts,
      values,
    )

  def same_answers(
    self, firsts: Sequence[str], seconds: Sequence[str]
  ) -> list[bool]:
    """Whether two answers, as they stand in a box, are one: for a vote.

    Where `math` is among the functions they are compared as it does, either
    one in the place of the gold answer; else their texts are. Symmetric, but
    not transitive: 10 is 10%, which is 0.1. A comparison that takes too long
    says no.

    Raises:
      RuntimeError: if a child cannot start.
    """
    spec = next((x for x in self.specs if x.reference == "math"), None)
    pairs = [tuple(sorted(pair)) for pair in zip(firsts, seconds, strict=True)]
    if len(self._same) > MAX_REMEMBERED:
      self._same.clear()

    def is_same(pair: tuple[str, str]) -> bool:
      if spec is None or normalize(pair[0]) == normalize(pair[1]):
        return normalize(pair[0]) == normalize(pair[1])
      orders = (pair,) if is_symmetric(*pair) else (pair, pair[::-1])
      return any(
        self._mark_math(spec, rf"\boxed{{{answer}}}", gold) == ["right"]
        for gold, answer in orders
      )

    asked = [x for x in dict.fromkeys(pairs) if x not in self._same]
    found = self._pool.map(is_same, asked)
    self._same.update(zip(asked, found, strict=True))
    return [self._same[pair] for pair in pairs]

  def news(self) -> list[str]:
    """For the log: the first fault of each function, once, in one line."""
    news = [text for text in self._news.values() if text]
    self._news = dict.fromkeys(self._news, "")
    return news

  def _values(
    self, spec: RewardSpec, marks: list[Mark], counts: collections.Counter
  ) -> np.ndarray:
    """The marks as finite numbers; counts why they are what they are."""
    words = collections.Counter(x for x in marks if isinstance(x, str))
    if spec is not self.specs[0]:
      words = {fault: words[fault] for fault in FAULTS}
    counts.update(words)
    number = lambda x: float(x == "right" if isinstance(x, str) else x or 0)
    values = np.array([number(x) for x in marks])
    with np.errstate(over="ignore"):
      is_finite = np.isfinite(values.astype(np.float32))
    if not is_finite.all():
      counts["nonfinite"] += int((~is_finite).sum())
      self._tell(spec, "nonfinite", f"returned {values[~is_finite][0]}")
    return np.where(is_finite, values, 0.0)

  def _mark(
    self, spec: RewardSpec, batch: Mapping[str, Sequence], group_size: int
  ) -> Iterable[list[Mark]]:
    """Begins to call a function; the marks, some completions at a time."""
    num = len(batch["completions"])
    if spec.reference in IN_PROCESS:
      function = OURS[spec.reference]
      taken = {name: batch[name] for name in arguments(function).named}
      return [call(function, taken, num)]
    if spec.reference == "math":  # looks at one completion at a time
      pairs = batch["completions"], batch["answers"]
      return self._pool.map(lambda *pair: self._mark_math(spec, *pair), *pairs)
    begin = range(0, num, group_size)
    return self._pool.map(
      lambda i: self._call(spec, _slice(batch, i, i + group_size)), begin
    )

  def _mark_math(
    self, spec: RewardSpec, completion: str, answer: str
  ) -> list[Mark]:
    outcome = outcome_by_text(completion, answer)  # spares most of the calls
    if outcome:
      return [outcome]
    box = rf"\boxed{{{last_boxed(completion)}}}"  # all that a child looks at
    return self._call(spec, {"completions": [box], "answers": [answer]})

  def _call(
    self, spec: RewardSpec, batch: Mapping[str, Sequence]
  ) -> list[Mark]:
    """Calls a function in a worker: at once or, failing that, one by one."""
    num = len(batch["completions"])
    worker = self._idle.get()
    try:
      return worker.call(spec.reference, batch)
    except Fault as fault:
      self._tell(spec, fault.kind, fault.text, num)
      if num == 1:
        return [fault.kind]
    finally:
      self._idle.put(worker)
    return [self._call(spec, _slice(batch, i, i + 1))[0] for i in range(num)]

  def _tell(self, spec: RewardSpec, kind: str, what: str, num: int = 1) -> None:
    if spec.is_ours and kind != "errors":
      return
    line, _, details = what.partition("\n")
    whom = "a completion" if num == 1 else f"the {num} completions of a prompt"
    text = f"reward function {spec.name!r} {line} on {whom}"
    if "string indices must be integers" in line:
      text += " (completions are strings here, not lists of chat messages)"
    if self._stops:
      text += "; config.reward.on_error is 'stop'"
      raise RuntimeError(f"{text}\n{details}".strip())
    if num > 1:
      text += ": they are tried one by one; any that fails again"
    else:
      text += ": it"
    text += f" earns 0 from it, counted under reward/{kind}; {_REMEDIES[kind]}"
    self._news.setdefault(spec.name, text)


def _slice(
  batch: Mapping[str, Sequence], begin: int, end: int
) -> dict[str, Sequence]:
  return {name: values[begin:end] for name, values in batch.items()}
