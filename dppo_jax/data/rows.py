"""Rows: what is made of a record, whatever its columns are called."""

from collections.abc import Iterator, Mapping
import datetime
import decimal
import itertools
import math
import os
from typing import Any, NamedTuple

import numpy as np

from dppo_jax.data import prompts, sources


class Columns(NamedTuple):
  """What a source calls its columns; `id` and `solution` may be absent.

  Each is a list of names with commas between them, of which the first that has
  a value counts. `a.b` is column b of what is in column a.
  """

  problem: str
  answer: str
  id: str
  solution: str


class Row(NamedTuple):
  """A row as it was read.

  Attributes:
    id: this and the next three are text, empty where the source lacks them.
    columns: every column of the source by its own name, as the source has it.
    messages: the prompt where the source has it as a conversation, else empty.
    place: file and line, or what else tells where the row is.
    flaw: why the row cannot be used, its place included; empty if it can.
  """

  id: str
  problem: str
  answer: str
  solution: str
  columns: Mapping[str, Any] = {}
  messages: tuple[prompts.Message, ...] = ()
  place: str = ""
  flaw: str = ""

  @property
  def prompt(self) -> prompts.Prompt:
    return list(self.messages) or self.problem


def read(
  source: sources.Source, columns: Columns, limit: int = 0
) -> Iterator[Row]:
  """The first `limit` rows of a source, all of them if 0, in its order.

  Of an answer, what follows the last `####` counts, commas removed (GSM8K's
  format). A list of one element is that element. A row without an id is called
  after its source and its number, counted from 0. Of a row's columns, what JSON
  lacks becomes what is closest: bytes text, arrays lists, times text in ISO
  8601, decimals and durations (seconds) floats; what has no such form, as an
  image, stays as it is.

  Raises:
    ValueError: if the source is missing, of no known kind, or has a malformed
      record, which is then named.
  """
  name = os.path.basename(sources.name_of(source))
  found = itertools.islice(sources.records(source), limit or None)
  for number, (place, record) in enumerate(found):
    try:
      yield _row(record, columns, f"{name}/{number}", place)
    except RecursionError as error:
      raise ValueError(f"{place}: nested too deep") from error


class _Unusable(ValueError):
  """Why a row cannot be used."""


def _row(
  record: Mapping[str, Any], columns: Columns, name: str, place: str
) -> Row:
  plain = {column: _plain(value) for column, value in record.items()}
  row = Row(name, "", "", "", plain, place=place)
  try:
    conversation = prompts.messages(_first(plain, columns.problem)[1])
    if conversation:
      problem = prompts.text(conversation)
    else:
      problem = _text(*_first(record, columns.problem))
    row = row._replace(
      id=_id(record, columns.id) or name,
      problem=problem,
      answer=_final_answer(_text(*_first(record, columns.answer))),
      solution=_text(*_first(record, columns.solution)),
      messages=tuple(conversation or ()),
    )
  except _Unusable as error:
    return row._replace(flaw=f"{place}: {error}")
  for part, text in zip(Row._fields[1:4], row[1:4], strict=True):
    if not prompts.is_unicode(text):
      return row._replace(flaw=f"{place}: half a character in the {part}")
  return row


def _id(record: Mapping[str, Any], names: str) -> str:
  """Empty where it is no text: a row is called after its number then."""
  try:
    text = _text(*_first(record, names))
  except _Unusable:
    return ""
  return text if prompts.is_unicode(text) else ""


def _first(record: Mapping[str, Any], names: str) -> tuple[str, Any]:
  """The first of the columns that has a value, and the value."""
  for name in filter(None, names.split(",")):
    value = _lookup(record, name)
    if value is not None:
      return name, value
  return names, None


def _lookup(record: Mapping[str, Any], name: str) -> Any:
  """What is in column `name`, which may be dotted; None for nothing."""
  if name in record:
    return record[name]
  outer, dot, inner = name.partition(".")
  nested = record.get(outer) if dot else None
  return _lookup(nested, inner) if isinstance(nested, Mapping) else None


def _text(name: str, value: Any) -> str:
  """The value of column `name` as text, empty where there is none."""
  if isinstance(value, np.ndarray | np.generic):
    value = value.tolist()
  if isinstance(value, list | tuple) and len(value) < 2:
    return _text(name, value[0]) if value else ""
  if isinstance(value, bytes):
    try:
      value = value.decode()
    except UnicodeDecodeError as error:
      raise _Unusable(f"{name!r} is not UTF-8") from error
  if isinstance(value, decimal.Decimal):
    value = format(value.normalize(), "f") if value.is_finite() else None
  if value is None or (isinstance(value, float) and not math.isfinite(value)):
    return ""
  if isinstance(value, float) and value.is_integer():
    value = int(value)  # a grader that compares text expects 18, not 18.0
  if isinstance(value, bool) or not isinstance(value, str | int | float):
    kind = type(value).__name__
    number = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    raise _Unusable(f"{name!r} must be text or a number, not {kind}{number}")
  try:
    return str(value)
  except ValueError as error:  # a whole number of more than 4,300 digits
    raise _Unusable(f"{name!r}: {error}") from error


def _plain(value: Any) -> Any:
  """`value` as JSON may hold it, where there is such a form."""
  if isinstance(value, bytes):
    try:
      return value.decode()
    except UnicodeDecodeError:
      return value
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist())
  if isinstance(value, Mapping):
    return {name: _plain(x) for name, x in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(x) for x in value]
  if isinstance(value, datetime.date | datetime.time):
    return value.isoformat()
  if isinstance(value, datetime.timedelta):
    return value.total_seconds()
  return float(value) if isinstance(value, decimal.Decimal) else value


def _final_answer(text: str) -> str:
  _, marker, tail = text.rpartition("####")
  return (tail.replace(",", "") if marker else text).strip()
