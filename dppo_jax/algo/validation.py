"""Validation of the arguments of methods and objectives."""

from collections.abc import Callable
from typing import Any

from dppo_jax.errors import UserError


def check(
  name: str, value: Any, is_valid: Callable[[Any], bool], limit: str, where: str
) -> None:
  """Raises UserError for a value outside its limit.

  Args:
    name: name of the argument.
    is_valid: predicate; a value that it cannot compare is invalid.
    limit: the limit in words: "in (0, 1]".
    where: section of the config in which the option is set.
  """
  try:
    is_within = is_valid(value)
  except (TypeError, ValueError):
    is_within = False
  if not is_within:
    raise UserError(f"{name} is {value!r} but must be {limit}; see {where}")
