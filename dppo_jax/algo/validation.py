"""Validation of the arguments of methods and objectives."""

from collections.abc import Callable
import math
import numbers
from typing import Any, NamedTuple

from dppo_jax.errors import UserError


class Limit(NamedTuple):
  """Values that an argument may take, as a predicate and in words."""

  is_valid: Callable[[Any], bool]
  text: str


FRACTION = Limit(lambda x: 0 < x <= 1, "in (0, 1]")
SCHEDULE = Limit(
  lambda x: callable(x) or 0 < x <= 1, "in (0, 1], or a function of the step"
)
RATE = Limit(
  lambda x: 0 <= x < 1, "in [0, 1): a rate of 1 has no unbiased weight"
)
COUNT = Limit(
  lambda x: isinstance(x, numbers.Integral) and int(x) >= 1,
  "an integer of at least 1",
)
UNIT = Limit(lambda x: 0 <= x <= 1, "in [0, 1]")
POSITIVE = Limit(lambda x: x > 0, "above 0")
FINITE = Limit(lambda x: 0 <= x < math.inf, "at least 0 and finite")


def one_of(*choices: str) -> Limit:
  """Returns the limit of a choice of words."""
  return Limit(lambda x: x in choices, f"one of {', '.join(choices)}")


def check(limit: Limit, where: str = "config.method.args", **values: Any):
  """Raises UserError for a value outside its limit.

  Args:
    where: section of the config in which the options are set.
    **values: arguments by name; values that cannot be compared are invalid.
  """
  for name, value in values.items():
    try:
      is_valid = limit.is_valid(value)
    except (TypeError, ValueError):
      is_valid = False
    if not is_valid:
      raise UserError(
        f"{name} is {value!r} but must be {limit.text}; see {where}"
      )
