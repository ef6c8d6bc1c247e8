"""Reward functions: their names in a config, and the built-in ones.

README.md has the convention for functions of your own, which is TRL's.
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
from decimal import Decimal
import functools
import inspect
from math import isfinite
import re
from typing import Any, NamedTuple

from dppo_jax.errors import UserError
from dppo_jax.files import paths, user_code
from dppo_jax.rewards.math_answers import (
  MAX_CHARS,
  last_boxed,
  outcome,
  warm_up,
)
from dppo_jax.rewards.notation import DASHES, normalize, without_units

RewardFn = Callable[..., Sequence[float | None]]
_OUTCOMES = ("right", "wrong", "unboxed", "unparsed")


class Verdict(float):
  """A reward of 1.0 for the outcome `right` and 0.0 for any other.

  Other outcomes are `wrong`, `unboxed` (`exact` and `math`) and `unparsed`
  (`math` and `last_number`).
  """

  outcome: str

  def __new__(cls, outcome: str):
    self = super().__new__(cls, outcome == "right")
    self.outcome = outcome
    return self


def exact(completions: list[str], answers: list[str]) -> list[Verdict]:
  """Compares the text in the last box with the answer, outer spaces aside."""
  verdicts = []
  for text, gold in zip(completions, answers, strict=True):
    box = last_boxed(text)
    is_right = box is not None and box.strip() == gold.strip()
    other = "unboxed" if box is None else "wrong"
    verdicts.append(Verdict("right" if is_right else other))
  return verdicts


def math(completions: list[str], answers: list[str]) -> list[Verdict]:
  """Compares the last box with the answer mathematically (math-verify)."""
  pairs = zip(completions, answers, strict=True)
  return [Verdict(outcome(*pair)) for pair in pairs]


# A minus directly in front is a sign unless an operand precedes it, as in 5-3.
_NUMBER = re.compile(
  r"((?<![\da-zA-Z)\]}%])(?<![\d)\]}%] )-)?\\?\$?"
  r"((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
)


def last_number(completions: list[str], answers: list[str]) -> list[Verdict]:
  """Compares the value of the last number in the text with the answer's.

  Numbers may have a sign, thousands separators, decimals, $ and %. Without one,
  and for an answer that is not a number alone, the outcome is `unparsed`.

  The number may stand anywhere. It also earns 1.0 at the end of a row of
  guesses, in a remark after another answer, as part of an expression such as
  1/2 or x^2, with a wrong unit, or where the token limit cut the text off.
  """
  verdicts = []
  for text, gold in zip(completions, answers, strict=True):
    numbers = _NUMBER.finditer(text[-MAX_CHARS:].translate(DASHES))
    last = collections.deque(numbers, maxlen=1)
    bare = without_units(normalize(re.sub(r"\\?\$", "", gold)))
    target = _NUMBER.fullmatch(bare.rstrip(" \\%").lstrip("+"))
    if last and target:
      is_right = _value(last[0]) == _value(target)
      verdicts.append(Verdict("right" if is_right else "wrong"))
    else:
      verdicts.append(Verdict("unparsed"))
  return verdicts


def _value(number: re.Match) -> Decimal:
  return Decimal((number[1] or "") + number[2].replace(",", ""))


def boxed(completions: list[str]) -> list[float]:
  """Returns 1.0 for a complete box: a reward for the format."""
  return [float(last_boxed(text) is not None) for text in completions]


OURS: dict[str, RewardFn] = {
  function.__name__: function for function in (exact, math, last_number, boxed)
}
# A reference and, if given, a weight and the word `batched`.
_ITEM = re.compile(
  rf"({'|'.join(OURS)}|[^:]+:[^:]+)(?::(?!batched$)([^:]+))?(:batched)?"
)


class RewardSpec(NamedTuple):
  """A reward function as the config names it.

  Attributes:
    name: the function's own, for metrics and messages.
    reference: a key of `OURS`, `/absolute/FILE.py:FUNCTION` or
      `PACKAGE.MODULE:FUNCTION`.
    weight: factor of its values in the reward; finite.
    batched: True to call it once for all completions of a rollout, in the
      trainer's process.
  """

  name: str
  reference: str
  weight: float = 1.0
  batched: bool = False


Items = str | Callable | Sequence[str | Callable]


def parse(functions: Items) -> tuple[RewardSpec, ...]:
  """Returns the specs of config.reward.functions, without importing anything.

  Args:
    functions: items such as "math,my.py:brevity:0.1,my.py:Model:2:batched".
      From Python also a function or class of the top level of a module, or a
      sequence.
  Raises:
    UserError: for an invalid item or a repeated name.
  """
  if isinstance(functions, str):
    functions = functions.split(",")
  elif callable(functions):
    functions = [functions]
  specs = tuple(_spec(item) for item in functions)
  names = [spec.name for spec in specs]
  if not specs:
    raise _error("it is empty: name a function")
  names.append("overlong")  # config.reward.overlong_tokens
  if twice := [x for x in names if names.count(x) > 1]:
    raise _error(f"the name {twice[0]} is taken: choose another")
  return specs


def _error(reason: str) -> UserError:
  return UserError(f"config.reward.functions: {reason}")


def _spec(item: str | Callable) -> RewardSpec:
  text = item if isinstance(item, str) else user_code.reference_of(item)
  match = _ITEM.fullmatch(text.strip())
  reference, weight = match.group(1, 2) if match else ("", "")
  batched = bool(match and match[3])
  if reference not in OURS and not user_code.is_reference(reference):
    raise _error(
      f"{text!r} is none of {', '.join(OURS)}, FILE.py:FUNCTION and "
      "PACKAGE.MODULE:FUNCTION, with or without :WEIGHT and, last, :batched"
    )
  if batched and reference in OURS:
    raise _error(f"{text!r}: only functions of your own may be batched")
  reference = paths.of_code(reference)
  name = reference.rpartition(":")[2]
  with contextlib.suppress(ValueError):
    if isfinite(number := float(weight or 1)):
      return RewardSpec(name, reference, number, batched)
  raise _error(f"{text!r}: the weight {weight!r} is not a finite number")


def load(reference: str) -> RewardFn:
  """Imports a function or, of a class, returns this process's only instance.

  Raises:
    UserError: if it cannot be imported or constructed.
  """
  try:
    if reference == "math":
      warm_up()
    function = OURS.get(reference) or user_code.load(reference)
  except UserError as error:
    raise _error(str(error)) from error
  if isinstance(function, type):
    try:
      function = _instance(function)
    except (Exception, SystemExit) as error:
      reason = user_code.one_line(error)
      raise _error(f"{reference}() cannot be constructed: {reason}") from error
    if not callable(function):
      raise _error(f"{reference}: the class has no method __call__")
  if not _takes(function, "completions"):
    raise _error(f"{reference} does not take an argument 'completions'")
  return function


_instance = functools.cache(lambda cls: cls())


def _takes(function: RewardFn, name: str) -> bool:
  parameters = inspect.signature(function).parameters
  has_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  return has_any or name in parameters


def required_arguments(function: RewardFn) -> list[str]:
  """Returns the names of a function's arguments without a default."""
  return [
    p.name
    for p in inspect.signature(function).parameters.values()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]


# The result for one completion: a number, a Verdict's outcome, or None.
Mark = float | str | None


def _mark(value: Any) -> float | str:
  """Returns an outcome of ours, or the number: types of numbers differ."""
  outcome = getattr(value, "outcome", None)
  return outcome if outcome in _OUTCOMES else float(value)


def call(function: RewardFn, batch: Mapping[str, Sequence]) -> list[Mark]:
  """Calls a function; raises if it does not return a number per completion."""
  values = function(**{x: y for x, y in batch.items() if _takes(function, x)})
  is_list = isinstance(values, Iterable) and getattr(values, "shape", True)
  if not is_list or isinstance(values, str | bytes | Mapping):
    raise TypeError(f"returned {values!r}"[:60] + ", not a list of numbers")
  marks = [x if x is None else _mark(x) for x in values]
  num = len(batch["completions"])
  if len(marks) != num:
    raise ValueError(f"returned {len(marks)} values for {num} completions")
  return marks
