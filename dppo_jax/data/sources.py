"""Rows of problems: of a file, a data set of the hub or TFDS, or a function.

README.md lists the kinds of sources and the columns that count.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import decimal
import itertools
import json
import math
import os
import re
from typing import Any, NamedTuple

import numpy as np

from dppo_jax.data import hub
from dppo_jax.errors import UserError, first_line
from dppo_jax.files import bucket, json_object, paths, user_code
from dppo_jax.rewards import last_boxed

Record = Mapping[str, Any]
Source = str | Callable[[], Iterable[Record]]
Prompt = str | list[dict[str, Any]]  # text, or messages of role and content

PROBLEM_KEY = "problem,question,prompt"
ANSWER_KEY = (
  "answer,final_answer,expected_answer,ground_truth,reward_model.ground_truth,"
  "solution"
)
_MAX_COUNTED = 100_000  # rows beyond a limit
_ID_KEY = "id,unique_id,extra_info.index"
_NAMED = r"[\w.+-]+="  # start of a source with a name
_PREPARED = "dataset_info.json"  # in a directory that TFDS prepared


class Row(NamedTuple):
  """A row of a source.

  Attributes:
    id: the row's id column or, without one, its source and number.
    problem: text or conversation; this and the next two are empty if absent.
    answer: text that a grader compares with.
    solution: worked solution.
    columns: all columns of the row by name.
  """

  id: str
  problem: Prompt
  answer: str
  solution: str = ""
  columns: Mapping[str, Any] = {}


def parse_named(sources: Source) -> dict[str, Source]:
  """Parses `config.data.eval`, `NAME=SOURCE,NAME=SOURCE`, into a dict.

  A single source without a name is named after its file, data set or function.
  """
  if not sources:
    return {}
  if not isinstance(sources, str) or not re.match(_NAMED, sources):
    text = getattr(sources, "__name__", str(sources))
    name, *others = re.split("[:@](?!//)", text)
    if name in ("hf", "tfds") or user_code.is_reference(text):
      name = others[0]
    return {os.path.basename(name).partition(".")[0] or "eval": sources}
  named: dict[str, Source] = {}
  for part in map(str.strip, sources.split(",")):
    match = re.fullmatch(r"([\w.+-]+)=(.+)", part)
    if not match or match[1] in named:
      raise UserError(f"config.data.eval: {part!r} is not NEW_NAME=SOURCE")
    named[match[1]] = match[2]
  return named


def absolute(sources: str) -> str:
  """Makes the paths of a source, or of `NAME=SOURCE,...`, absolute."""
  if re.match(_NAMED, sources) and not os.path.exists(sources):
    named = (x.strip().partition("=") for x in sources.split(","))
    return ",".join(name + sign + _absolute(x) for name, sign, x in named)
  return _absolute(sources)


def _absolute(source: str) -> str:
  kind, colon, place = source.partition(":")
  if kind == "tfds":
    name, *split = place.split(":")
    directory = paths.absolute(name)
    is_local = os.path.exists(os.path.join(directory, _PREPARED))
    return ":".join([kind, directory if is_local else name, *split])
  is_path = os.sep in source or source.endswith((".jsonl", ".parquet"))
  is_path |= os.path.isdir(source) and source != "arithmetic"
  if colon or not is_path:
    return paths.of_code(source)
  return paths.absolute(source)


def read(
  source: Source,
  problem_key: str = PROBLEM_KEY,
  answer_key: str = ANSWER_KEY,
  limit: int = 0,
) -> tuple[list[Row], str]:
  """Returns the first `limit` rows of a source, in order; 0 reads all.

  Only the part of an answer after its last `####` counts, commas removed
  (GSM8K's format), or what its last box holds. In columns, bytes become text
  and arrays become lists.

  The text is ` of N`, the number of all rows, if `limit` left some out. Rows of
  functions are not counted: they may be endless.
  """
  name = getattr(source, "__name__", str(source))
  read_records, rows = reader(source), list[Row]()
  is_code = getattr(read_records, "__module__", "") != __name__
  left = 0
  try:
    unread = iter(read_records())
    for record in itertools.islice(unread, limit or None):
      default_id = f"{os.path.basename(name)}/{len(rows)}"
      columns = _to_python(record)
      if not isinstance(columns, dict):
        raise UserError(f"{columns!r:.60} is not an object with columns")
      rows.append(_make_row(columns, problem_key, answer_key, default_id))
    counted = () if is_code else itertools.islice(unread, _MAX_COUNTED)
    for _ in counted:
      left += 1
    more = " or more" * (left == _MAX_COUNTED)
    return rows, f" of {len(rows) + left:,}{more}" * bool(left)
  except Exception as error:  # files and user code fail in many ways
    reason = user_code.one_line(error) if is_code else first_line(error)
    row = len(rows) + left + 1
    raise UserError(f"{name} row {row}: {reason}") from error


def _make_row(
  columns: Record, problem_key: str, answer_key: str, default_id: str
) -> Row:
  id_, problem = _find(columns, _ID_KEY), _find(columns, problem_key)
  prompt = parse_messages(problem) or _to_text(problem)
  is_reply = problem is columns.get("messages") and is_begun(prompt)
  value, worked = _find(columns, answer_key), columns.get("solution")
  answer = _to_text(value).strip()
  _, marker, tail = answer.rpartition("####")
  if marker:
    answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", tail).strip()
  elif (box := last_boxed(answer)) is not None:
    answer = box.strip()
  elif value is worked and "\n" in answer:  # worked, but without an answer
    answer = ""
  solution = _alone(worked)
  if not isinstance(solution, str) or solution.strip() == answer:
    solution = ""
  return Row(
    id=str(id_) if isinstance(id_, str | int) else default_id,
    problem=prompt[:-1] if is_reply else prompt,
    answer=answer,
    solution=solution,
    columns=columns,
  )


def reader(source: Source) -> Callable[[], Iterable[Record]]:
  """Returns the function that reads the records of a source.

  Downloads a data set of the hub. Raises UserError if there is no such source,
  but for a set of TFDS, which is looked for when it is read.
  """
  if callable(source):
    return source
  if source.startswith("tfds:"):
    return lambda: _read_tfds(source)
  if source.startswith("hf:"):
    paths = hub.fetch(source)
    return lambda: itertools.chain.from_iterable(map(_read_parquet, paths))
  path = bucket.local(source, "config.data")
  if os.path.isdir(path):
    return lambda: _read_saved_dataset(path)
  if path.endswith((".jsonl", ".parquet")):
    if not os.path.isfile(path):
      raise UserError(f"there is no file {path!r}")
    is_parquet = path.endswith(".parquet")
    return lambda: (_read_parquet if is_parquet else _read_jsonl)(path)
  try:
    return user_code.load(path)
  except UserError as error:
    raise UserError(
      f"{error}; a source is arithmetic[:NUM[:MAX_OPS]], *.jsonl, *.parquet, "
      "DIR, hf:NAME[@REVISION][:CONFIG[:SPLIT]], tfds:NAME[:SPLIT], "
      "FILE.py:FUNCTION or MODULE:FUNCTION (which reads CSV as in "
      "dppo_jax/data/README.md)"
    ) from error


def _read_jsonl(path: str) -> Iterator[Record]:
  with open(path, "rb") as lines:
    yield from map(json.loads, filter(bytes.strip, lines))


def _read_parquet(path: str) -> Iterator[Record]:
  import pyarrow.parquet  # slow to import, and few sources need it

  with pyarrow.parquet.ParquetFile(path) as file:
    for batch in file.iter_batches():
      yield from batch.to_pylist()


def _read_saved_dataset(directory: str) -> Iterator[Record]:
  """Reads what `save_to_disk` of Hugging Face datasets wrote."""
  import pyarrow  # slow to import, and few sources need it

  dataset = os.path.join(directory, "dataset_dict.json")
  if os.path.exists(dataset):
    splits = json_object.read(dataset, {"splits": list[str]})["splits"]
    choices = " or ".join(os.path.join(directory, x) for x in splits)
    raise UserError(f"the directory has several splits: use {choices}")
  state = json_object.read(
    os.path.join(directory, "state.json"),
    {"_data_files": list[dict]},
    "save_to_disk of Hugging Face datasets writes this file: if it did not "
    "write the directory, name a file in it instead",
  )
  for shard in state["_data_files"]:
    name = json_object.check(shard, {"filename": str})["filename"]
    # A damaged file kills the process if it is mapped or not validated.
    with pyarrow.OSFile(os.path.join(directory, name)) as file:
      for batch in pyarrow.ipc.open_stream(file):
        batch.validate(full=True)
        yield from batch.to_pylist()


def _read_tfds(source: str) -> Iterator[Record]:
  import tensorflow_datasets as tfds  # slow to import, and few sources need it
  import tensorflow_datasets.text  # registers the text data sets

  name, _, split = source.removeprefix("tfds:").partition(":")
  if os.path.exists(os.path.join(name, _PREPARED)):
    rows = tfds.builder_from_directory(name).as_data_source(split or "train")
  else:
    rows = tfds.data_source(name, split=split or "train")
  return (rows[i] for i in range(len(rows)))


def _to_python(value: Any) -> Any:
  """Converts bytes and names to text, and NumPy's values to Python's."""
  if isinstance(value, bytes):
    return value.decode(errors="replace")
  if isinstance(value, np.ndarray | np.generic):
    return _to_python(value.tolist())
  if isinstance(value, Mapping):
    return {str(name): _to_python(x) for name, x in value.items()}
  if isinstance(value, list | tuple):
    return [_to_python(x) for x in value]
  if isinstance(value, set | frozenset):  # in an order that no run changes
    return sorted(map(_to_python, value), key=repr)
  return value


def _find(columns: Record, keys: str) -> Any:
  """Returns the first value in one of the columns, or None."""
  for key in map(str.strip, keys.split(",")):
    outer, _, inner = key.partition(".")
    nested = columns.get(outer)
    inside = nested.get(inner) if isinstance(nested, Mapping) else None
    for value in (columns.get(key), inside):
      if value not in (None, "", []) and value == value:  # not NaN
        return value
  return None


def _to_text(value: Any) -> str:
  """Returns text and numbers as text; anything else becomes empty."""
  value = _alone(value)
  if isinstance(value, float | decimal.Decimal):
    # A grader that compares text expects 18 and 0.00001, not 18.0 and 1e-05.
    text = f"{decimal.Decimal(str(value or 0)):f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if math.isfinite(value) else ""
  is_text = isinstance(value, str | int) and not isinstance(value, bool)
  return str(value) if is_text else ""


def _alone(value: Any) -> Any:
  """Returns the element of a list of one, else the value."""
  is_alone = isinstance(value, list) and len(value) == 1
  return value[0] if is_alone else value


def parse_messages(value: Any) -> Prompt | None:
  """Returns `value` as a conversation, or None if it is no list of messages.

  Messages keep their other keys, such as `tool_calls`, unless they are None.

  Raises UserError for a message without a role, or with other content than text
  unless it calls tools.
  """
  if not isinstance(value, list) or not any(
    isinstance(x, Mapping) for x in value
  ):
    return None
  for number, message in enumerate(value, 1):
    fields = message if isinstance(message, Mapping) else {}
    role, content = fields.get("role"), fields.get("content")
    has_calls = content is None and fields.get("tool_calls")
    is_text = isinstance(content, str) or has_calls
    if not (isinstance(role, str) and is_text):
      raise UserError(
        f"message {number} of the prompt must have text as role and content, "
        f"but is {str(message)[:80]!r}"
      )
  return [{k: x for k, x in m.items() if x is not None} for m in value]


def is_begun(prompt: Prompt) -> bool:
  """Returns True for a conversation that ends with an assistant message."""
  return not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"


def text_of(prompt: Prompt, with_system: bool = False) -> str:
  """Returns the text of a prompt, by default without system messages."""
  if isinstance(prompt, str):
    return prompt
  is_shown = lambda message: with_system or message["role"] != "system"
  return "\n\n".join(m.get("content", "") for m in prompt if is_shown(m))
