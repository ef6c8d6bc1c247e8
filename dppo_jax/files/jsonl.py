"""Reads and repairs `.jsonl` files, and replaces text files atomically."""

from collections.abc import Iterable
import json
import os
import pathlib
import types

from dppo_jax.errors import UserError, writing
from dppo_jax.files import bucket, json_object

# Of text files: escapes the lone surrogates of invalid text.
ENCODING = {"encoding": "utf-8", "errors": "backslashreplace"}


def read(
  path: pathlib.Path, kinds: json_object.Kinds = types.MappingProxyType({})
) -> list[dict]:
  """Returns the objects of a file, or none if there is no such file.

  A last line without a newline, as a kill leaves it, is ignored.

  Args:
    kinds: type of each key's value, as for `json_object.check`; `step` is one.
  Raises:
    UserError: for a line that is no such object, or of an earlier step than the
      line before it.
  """
  # Bytes, since a cut may go through a character. Not `splitlines`, since a
  # completion may contain any of the characters that it splits at.
  try:
    content = path.read_bytes() if path.exists() else b""
  except OSError as error:
    raise UserError(f"cannot read {path}: {error.strerror}") from error
  lines: list[dict] = []
  for number, text in enumerate(content.split(b"\n")[:-1], 1):
    try:
      value = json_object.parse(text.decode())
      lines.append(json_object.check(value, {"step": int, **kinds}))
      before = lines[-2:][0]["step"]
      if before > lines[-1]["step"]:
        raise ValueError(f"it follows step {before}")
    except ValueError as error:
      raise UserError(
        f"{bucket.place(path)}, line {number}, is damaged ({error}): delete "
        "that line"
      ) from error
  return lines


def keep_until(path: pathlib.Path, step: int) -> None:
  """Removes lines after a step and a truncated last line; raises as `read`."""
  replace(path, [line(x) for x in read(path) if x["step"] <= step])


def line(content: dict) -> str:
  """Returns a line of a file."""
  return json.dumps(content, ensure_ascii=False) + "\n"


def replace(path: pathlib.Path, text: Iterable[str]) -> None:
  """Writes a text file atomically; raises as `writing` does."""
  unfinished = path.with_suffix(".tmp")
  with writing(path):
    with unfinished.open("w", **ENCODING) as file:
      file.writelines(text)
      file.flush()
      os.fsync(file.fileno())  # or a power cut may leave an empty file
    os.replace(unfinished, path)
