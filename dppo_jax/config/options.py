"""Options: dataclass fields with a meaning, a range and a resume rule."""

from collections.abc import Callable, Iterator, Mapping
import copy
import dataclasses
import functools
import inspect
import json
from numbers import Integral, Real
from typing import Any

from dppo_jax.errors import UserError
from dppo_jax.files import paths, user_code

# Accepted types by the type of the default.
_TYPES: dict[Any, tuple[Any, str]] = {
  bool: (bool, "true or false"),
  int: (Integral, "a whole number"),
  float: (Real, "a number"),
  str: (str, "text"),
  Callable: ((str, Callable, list, tuple), "text or a function"),
  tuple: ((tuple, list), "a tuple, or a list in JSON"),
  dict: (Mapping, "a dict, or an object in JSON"),
}


def option(
  default: Any,
  meaning: str,
  *,
  least: float = 0,
  most: float = 2**31 - 1,
  choices: tuple[str, ...] = (),
  items: type = str,
  is_code: bool = False,
  may_change: bool = False,
  absolute: Callable[[str], str] | None = None,
) -> Any:
  """Returns a dataclass field that carries its meaning and limits.

  Args:
    meaning: noun phrase with the unit, for --help.
    items: type of the items of a tuple.
    is_code: True if the value may also be a function, or a list of functions.
    may_change: True if a resumed run may use another value, because it changes
      training by rounding errors at most (`run/resume.py` has exceptions).
    absolute: makes the paths in the value absolute; None if it names none.
  """
  metadata = dict(
    meaning=meaning,
    type=Callable if is_code else type(default),
    least=least,
    most=most,
    choices=choices,
    items=items,
    may_change=may_change,
    absolute=absolute or (paths.of_code if is_code else None),
  )
  if isinstance(default, dict):
    return dataclasses.field(default_factory=default.copy, metadata=metadata)
  return dataclasses.field(default=default, metadata=metadata)


adjustable = functools.partial(option, may_change=True)


def default_args(factory: Callable) -> dict[str, Any]:
  """Returns a factory's arguments with their defaults: each becomes a flag.

  Keyword-only arguments, such as the run's steps, are filled in by the run.
  """
  parameters = inspect.signature(factory).parameters.values()
  return {p.name: p.default for p in parameters if p.kind != p.KEYWORD_ONLY}


def walk(config) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
  """Yields `(dotted name, value, metadata)` of every option.

  The factories of method and objective are none.
  """
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      for name, inner, metadata in walk(value):
        yield f"{field.name}.{name}", inner, metadata
    elif field.metadata:
      yield field.name, value, field.metadata


def assign(config, name: str, value: Any) -> None:
  """Sets the option with a dotted name, or an entry of a dict option."""
  *sections, last = name.split(".")
  section = functools.reduce(getattr, sections, config)
  if isinstance(section, dict):
    section[last] = value
  else:
    setattr(section, last, value)


def absolute_paths(config):
  """Returns a copy of the config in which no path is relative, but in lists."""
  config = copy.deepcopy(config)
  for name, value, metadata in walk(config):
    if isinstance(value, str) and (absolute := metadata["absolute"]):
      assign(config, name, absolute(value))
    if isinstance(value, dict) and name.endswith(".args"):
      files = {k: x for k, x in value.items() if str(x).endswith(".jsonl")}
      value |= {k: paths.absolute(x) for k, x in files.items()}
  return config


def check_option(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
  """Raises UserError unless a value has the type and range of its option."""
  type_, words = _TYPES[metadata["type"]]
  least, most, choices = (metadata[x] for x in ("least", "most", "choices"))
  is_number = isinstance(value, Real)
  if type_ == (tuple, list) and isinstance(value, type_):
    for item in value:
      of_item = {**metadata, "type": metadata["items"]}
      check_option(f"{name} has an item that", item, of_item)
  if not isinstance(value, type_) or isinstance(value, bool) > (type_ is bool):
    limit = words
  elif choices and value not in choices:
    limit = f"one of {', '.join(x or repr(x) for x in choices)}"
  elif is_number and not value <= most:  # NaN is within no limit
    limit = f"at most {most}"
  elif is_number and value < least:
    limit = f"at least {least}"
  else:
    return
  raise UserError(f"config.{name} is {repr(value)[:60]} but must be {limit}")


def flatten(config) -> dict[str, Any]:
  """Returns every value by its dotted name, as JSON holds it."""
  flat = {name: value for name, value, _ in walk(config)}
  for kind in ("method", "objective"):
    factory = getattr(config, kind).factory
    flat[f"{kind}.name"] = factory.__name__
    if not factory.__module__.startswith("dppo_jax."):  # a user's
      flat[f"{kind}.source"] = user_code.reference_of(factory)
  return json.loads(json.dumps(flat, default=_to_json))


def _to_json(value: Any) -> Any:
  """Converts the numbers of NumPy and the functions of a config in Python."""
  is_number = hasattr(value, "item")
  return value.item() if is_number else user_code.reference_of(value)
