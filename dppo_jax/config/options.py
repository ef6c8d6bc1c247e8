"""Options: dataclass fields with a meaning, a range and a resume rule."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import inspect
import json
import numbers
import operator
from typing import Any

from dppo_jax import user_code
from dppo_jax.errors import UserError

# Accepted types by the type of the default.
_TYPES = {
  bool: (bool, "true or false"),
  int: (numbers.Integral, "a whole number"),
  float: (numbers.Real, "a number"),
  str: (str, "text"),
  Callable: ((str, Callable, list, tuple), "text or a function"),
  tuple: ((tuple, list), "a tuple"),
  dict: (Mapping, "a dict"),
}
_COMPARISONS = {
  "at least": operator.ge,
  "above": operator.gt,
  "at most": operator.le,
}


def option(
  default: Any,
  meaning: str,
  *,
  least: float = 0,
  above: float | None = None,
  most: float = 2**31 - 1,
  choices: tuple[str, ...] | None = None,
  may_change: bool = False,
  is_code: bool = False,
) -> Any:
  """Returns a dataclass field that carries its meaning and limits.

  Args:
    default: value of a config that does not set the option.
    meaning: noun phrase with the unit, for --help.
    least, above, most: range of a number.
    choices: allowed values.
    may_change: True if a resumed run may use another value, because it changes
      training by rounding errors at most (`run/workdir.py` has exceptions).
    is_code: True if the value may also be a function, or a list of functions.
  """
  metadata = {
    "meaning": meaning,
    "type": Callable if is_code else type(default),
    "limits": {"at least": least, "above": above, "at most": most},
    "choices": choices,
    "may_change": may_change,
  }
  if isinstance(default, dict):
    return dataclasses.field(default_factory=default.copy, metadata=metadata)
  return dataclasses.field(default=default, metadata=metadata)


def default_args(factory: Callable) -> dict[str, Any]:
  """Returns a factory's arguments with their defaults: each becomes a flag.

  Keyword-only arguments, such as the run's steps, are filled in by the run.
  """
  parameters = inspect.signature(factory).parameters.values()
  return {p.name: p.default for p in parameters if p.kind != p.KEYWORD_ONLY}


def walk(config) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
  """Yields `(dotted name, value, metadata)` of every field.

  Only the factories of method and objective have no metadata.
  """
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if not dataclasses.is_dataclass(value):
      yield field.name, value, field.metadata
      continue
    for name, inner, metadata in walk(value):
      yield f"{field.name}.{name}", inner, metadata


def assign(config, name: str, value: Any) -> None:
  """Sets the option, or the item of a dict option, with a dotted name."""
  *path, last = name.split(".")
  for part in path:
    config = getattr(config, part)
  if isinstance(config, dict):
    config[last] = value
  else:
    setattr(config, last, value)


def check_option(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
  """Checks a value against the type, choices and range of its option.

  Raises:
    UserError: naming value, limit and option.
  """
  type_, words = _TYPES[metadata["type"]]
  fits = isinstance(value, type_)
  if isinstance(value, bool):
    fits = type_ is bool
  limit = None if fits else words
  choices = metadata["choices"]
  if fits and choices and value not in choices:
    limit = f"one of {', '.join(choices)}"
  if fits and isinstance(value, numbers.Real):
    for words, bound in metadata["limits"].items():  # NaN is within none
      if bound is not None and not _COMPARISONS[words](value, bound):
        limit = f"{words} {bound}"
  if fits and isinstance(value, Mapping):
    try:
      json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
      limit = "a dict of text, finite numbers, lists and dicts"
  if limit:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:50]}..."
    raise UserError(f"config.{name} is {shown} but must be {limit}")


def flatten(config) -> dict[str, Any]:
  """Returns every value by its dotted name, as JSON holds it."""
  flat = {}
  for name, value, metadata in walk(config):
    if metadata:
      flat[name] = value
      continue
    kind = name.removesuffix(".factory")
    flat[f"{kind}.name"] = value.__name__
    if not value.__module__.startswith("dppo_jax."):  # a user's
      flat[f"{kind}.source"] = user_code.reference_of(value)
  # Configs made in Python may hold functions, and numbers of NumPy.
  plain = lambda x: (
    x.item() if hasattr(x, "item") else user_code.reference_of(x)
  )
  return json.loads(json.dumps(flat, default=plain))
