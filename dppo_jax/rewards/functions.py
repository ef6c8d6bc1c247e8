"""What a reward function is, how a config names one, and the three of ours.

A reward function is TRL's: called with keyword arguments only, it gets the
completions of one prompt and returns a number for each. Of `prompts` (problem
texts), `completions`, `answers` (gold answers) and every column of the data by
its own name it gets those that its signature names, all of them if it has
`**kwargs`. None stands for "does not apply": no reward, and no error.
"""

from collections.abc import Callable, Sequence
import inspect
from math import isfinite
import os
import sys
from typing import NamedTuple

from dppo_jax import user_code
from dppo_jax.rewards.math_answers import last_boxed, outcome

RewardFn = Callable[..., Sequence[float | None]]

OUTCOMES = ("right", "wrong", "unboxed", "unparsed")


class Verdict(float):
  """A reward of 1.0 for `right`, else 0.0, that knows why: its `outcome`."""

  outcome: str

  def __new__(cls, outcome: str):
    if outcome not in OUTCOMES:
      raise ValueError(f"outcome {outcome!r} is not one of {OUTCOMES}")
    self = super().__new__(cls, outcome == "right")
    self.outcome = outcome
    return self

  def __getnewargs__(self):  # for copies and pickles
    return (self.outcome,)


def exact(completions: list[str], answers: list[str]) -> list[Verdict]:
  """Right where the last box holds the answer's text, outer spaces aside."""
  return [_exact(*pair) for pair in zip(completions, answers, strict=True)]


def _exact(completion: str, gold: str) -> Verdict:
  answer = last_boxed(completion)
  if answer is None:
    return Verdict("unboxed")
  return Verdict("right" if answer.strip() == gold.strip() else "wrong")


def math(completions: list[str], answers: list[str]) -> list[Verdict]:
  """Right where the last box equals the answer mathematically (math-verify)."""
  return [
    Verdict(outcome(*pair)) for pair in zip(completions, answers, strict=True)
  ]


def boxed(completions: list[str]) -> list[float]:
  """1.0 where there is a complete box: a reward for the format."""
  return [float(last_boxed(text) is not None) for text in completions]


# One more also needs pairs to check itself with, and perhaps no process: see
# `KNOWN_PAIRS` and `IN_PROCESS` in grader.py.
OURS: dict[str, RewardFn] = {"exact": exact, "math": math, "boxed": boxed}


class RewardSpec(NamedTuple):
  """A reward function as the config names it.

  Attributes:
    name: for metrics and messages: the function's own name, or the reference
      where two functions share a name.
    reference: a key of `OURS`, `/absolute/FILE.py:FUNCTION` or
      `PACKAGE.MODULE:FUNCTION`.
    weight: of its values in the sum that is the reward; finite.
  """

  name: str
  reference: str
  weight: float = 1.0

  @property
  def is_ours(self) -> bool:
    return self.reference in OURS


Item = str | Callable | tuple[Callable, float] | RewardSpec


def parse(functions: str | Callable | Sequence[Item]) -> tuple[RewardSpec, ...]:
  """The reward functions that config.reward.functions names, in its order.

  Imports nothing: whether a function exists is found out by `load`.

  Args:
    functions: comma-separated items, each one of ours, `FILE.py:FUNCTION` or
      `PACKAGE.MODULE:FUNCTION`, with or without `:WEIGHT` (1.0), such as
      "math,boxed:0.5,my_rewards.py:brevity:0.1". From Python also a sequence
      of such items and of functions, or of pairs (function, weight); a function
      must be one that can be imported.
  Raises:
    ValueError: for an item that is none of these, a file that does not exist,
      or an item that is there twice.
  """
  if isinstance(functions, str):
    functions = functions.split(",")
  elif callable(functions):
    functions = [functions]
  specs = [_spec(item) for item in functions]
  if not specs:
    raise _refusal("there is none")
  references = [spec.reference for spec in specs]
  names = [spec.name for spec in specs]
  for reference in references:
    if references.count(reference) > 1:
      raise _refusal(f"{reference!r} is there twice")
  return tuple(
    spec._replace(name=spec.reference) if names.count(spec.name) > 1 else spec
    for spec in specs
  )


def _refusal(reason: str) -> ValueError:
  return ValueError(f"config.reward.functions: {reason}")


def _spec(item: Item) -> RewardSpec:
  if isinstance(item, RewardSpec):
    return item
  if isinstance(item, str):
    return _spec_of_text(item.strip())
  function, weight = item if isinstance(item, tuple | list) else (item, 1.0)
  if isinstance(function, str):  # as config.json has a pair
    return _spec_of_text(function)._replace(weight=_weight(weight, function))
  reference = _reference(function)
  name = reference.rpartition(":")[2]
  return RewardSpec(name, reference, _weight(weight, name))


def _spec_of_text(item: str) -> RewardSpec:
  first, *rest = item.split(":")
  if first in OURS and len(rest) <= 1:
    return RewardSpec(first, first, _weight(*rest or [1.0], item))
  if not (1 <= len(rest) <= 2 and user_code.is_reference(f"{first}:{rest[0]}")):
    raise _refusal(
      f"{item!r} is none of {', '.join(OURS)}, FILE.py:FUNCTION and "
      "PACKAGE.MODULE:FUNCTION, with or without :WEIGHT"
    )
  if user_code.is_file(first):
    first = os.path.abspath(first)
    if not os.path.isfile(first):
      raise _refusal(f"{item!r}: there is no file {first}")
  name, *weight = rest
  return RewardSpec(name, f"{first}:{name}", _weight(*weight or [1.0], item))


def _weight(weight: str | float, item: str) -> float:
  try:
    number = float(weight)
  except (TypeError, ValueError):
    number = float("nan")
  if not isfinite(number):
    raise _refusal(f"{item!r}: the weight {weight!r} is not a finite number")
  return number


def _reference(function: Callable) -> str:
  """Where a worker process finds `function`; a ValueError if nowhere."""
  for name, ours in OURS.items():
    if function is ours:
      return name
  name = getattr(function, "__qualname__", repr(function))
  place = getattr(function, "__module__", None)
  module = sys.modules.get(place)
  if not callable(function):
    reason = "it is not callable"
  elif "<lambda>" in name:
    reason = "a lambda has no name to import it by"
  elif "<locals>" in name:
    reason = "it is defined inside another function"
  elif place == "__main__" and not hasattr(module, "__file__"):
    reason = "it is defined in a notebook or an interactive session"
  elif user_code.attribute(module, name) is not function:
    reason = f"{place}.{name} is something else, or nothing"
  else:
    return user_code.reference_of(function)
  raise _refusal(
    f"a worker process cannot import {name}: {reason}; define it at the top "
    "level of a module or of a file"
  )


class Arguments(NamedTuple):
  """Which keyword arguments a function takes.

  Attributes:
    named: those that its signature names.
    required: those of them without a default.
    has_kwargs: whether it takes any other as well.
  """

  named: list[str]
  required: list[str]
  has_kwargs: bool


def arguments(function: RewardFn) -> Arguments:
  """What `function` takes; everything if it has no signature, as in C.

  Raises:
    TypeError: if it takes an argument by position only.
  """
  try:
    parameters = inspect.signature(function).parameters.values()
  except ValueError:
    return Arguments([], [], True)
  named = [
    p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
  ]
  for p in parameters:
    if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
      raise TypeError(f"takes {p.name!r} by position, not by keyword")
  return Arguments(
    [p.name for p in named],
    [p.name for p in named if p.default is p.empty],
    any(p.kind is p.VAR_KEYWORD for p in parameters),
  )


def load(reference: str) -> RewardFn:
  """Imports the function that a `RewardSpec` refers to.

  Whatever the import does happens in this process: call it in a worker.

  Raises:
    ValueError: in one line, if the import fails, there is no such function, or
      it cannot be called with keyword arguments.
  """
  if reference in OURS:
    return OURS[reference]
  try:
    function = user_code.load(reference)
  except ValueError as error:
    raise _refusal(str(error)) from error
  if inspect.iscoroutinefunction(function):
    raise _refusal(f"{reference!r} is async: make it an ordinary function")
  try:
    arguments(function)
  except TypeError as error:
    raise _refusal(f"{reference!r} {error}") from error
  return function


# What a function gave one completion, in a form that travels as JSON: a number,
# a Verdict's outcome, or None.
Mark = float | str | None


class BadValues(ValueError):
  """What a function returned is not a number, or None, for each completion."""


def call(
  function: RewardFn, arguments: dict[str, list], num: int
) -> list[Mark]:
  """Calls `function` on `num` completions.

  Raises:
    BadValues: if it does not return `num` numbers and None; a verb phrase.
  """
  result = function(**arguments)
  if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
    kind = type(result).__name__
    raise BadValues(f"returned a value of type {kind}, not a list of numbers")
  marks = [_mark(value) for value in result]
  if len(marks) != num:
    raise BadValues(f"returned {len(marks)} values for {num} completions")
  return marks


def _mark(value: object) -> Mark:
  if value is None:
    return None
  if isinstance(value, Verdict):
    return value.outcome
  if not hasattr(value, "__float__"):  # numbers of numpy and torch have it
    kind = type(value).__name__
    raise BadValues(f"returned a value of type {kind}, not a number")
  return float(value)
