"""Reads JSON objects, and checks their keys and the types of their values."""

from collections.abc import Mapping
import json
import os
import pathlib
import types
import typing
from typing import Any

from dppo_jax.errors import UserError
from dppo_jax.files import bucket

# Kind of a value -> its description.
_WORDS = {
  bool: "true or false",
  int: "a whole number",
  float: "a number",
  str: "text",
  dict: "an object",
  list[int]: "a list of whole numbers",
  list[str]: "a list of text",
  list[dict]: "a list of objects",
  dict[str, str]: "an object of text",
  types.NoneType: "null",
}

Kinds = Mapping[str, Any]  # key -> key of _WORDS, or several joined by `|`


def parse(text: str | bytes) -> Any:
  """Returns the value of JSON text; raises ValueError for any that is none."""
  try:
    return json.loads(text)
  except RecursionError as error:
    raise ValueError("nested too deeply") from error


def read(
  path: str | os.PathLike, kinds: Kinds = types.MappingProxyType({}), hint=""
) -> dict[str, Any]:
  """Returns the object in a file; raises UserError if there is none.

  Args:
    kinds: as for `check`.
    hint: end of the error, with what to do.
  """
  try:
    return check(parse(pathlib.Path(path).read_bytes()), kinds)
  except (OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(
      f"cannot read {bucket.place(pathlib.Path(path))} ({reason})"
      f"{': ' * bool(hint)}{hint}"
    ) from error


def check(content: Any, kinds: Kinds, label: str = "") -> dict[str, Any]:
  """Returns `content`; raises UserError unless it is an object of such values.

  Args:
    kinds: type of each key's value. A key may be absent if its type includes
      None. Other keys may have any value.
    label: start of the error.
  """
  if not isinstance(content, dict):
    raise UserError(f"{label}not a JSON object")
  for key, kind in kinds.items():
    value = content.get(key)
    if not _is_of(value, kind):
      is_union = isinstance(kind, types.UnionType)
      words = [_WORDS[x] for x in (kind.__args__ if is_union else (kind,))]
      shown = repr(value)[:60] if key in content else "missing"
      raise UserError(
        f"{label}{key} is {shown} but must be {' or '.join(words)}"
      )
  return content


def _is_of(value: Any, kind: Any) -> bool:
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin is types.UnionType:
    return any(_is_of(value, x) for x in args)
  if origin:
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, origin) and all(_is_of(x, args[-1]) for x in items)
  is_number = isinstance(value, int) and kind is float
  is_bool = isinstance(value, bool)
  return (is_number or isinstance(value, kind)) and is_bool == (kind is bool)
