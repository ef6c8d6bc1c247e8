"""The one way in which methods and objectives refuse an option's value."""


def check(
  name: str, value: object, is_valid: bool, limit: str, where: str
) -> None:
  """Refuses a value.

  Args:
    name: of the option.
    is_valid: whether the value is within the limit.
    limit: what the value must be, in words: "in (0, 1]".
    where: the part of the config in which the option is set.
  Raises:
    ValueError: naming option, value and limit, where `is_valid` is False.
  """
  if not is_valid:
    raise ValueError(f"{name} is {value!r} but must be {limit}; see {where}")
