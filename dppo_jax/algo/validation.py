"""The one way in which methods and objectives refuse an option's value."""

from collections.abc import Callable
from typing import Any

from dppo_jax.errors import UserError


def check(
  name: str, value: Any, is_valid: Callable[[Any], bool], limit: str, where: str
) -> None:
  """Refuses a value.

  Args:
    name: of the option.
    is_valid: whether a value is within the limit; what it cannot compare, as a
      word with a number, is not.
    limit: what the value must be, in words: "in (0, 1]".
    where: the part of the config in which the option is set.
  Raises:
    UserError: naming option, value and limit.
  """
  try:
    is_refused = not is_valid(value)
  except TypeError:
    is_refused = True
  if is_refused:
    raise UserError(f"{name} is {value!r} but must be {limit}; see {where}")
