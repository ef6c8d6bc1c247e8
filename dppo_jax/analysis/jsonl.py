"""Reads and repairs `.jsonl` files, and replaces text files atomically."""

from collections.abc import Iterable, Iterator
import contextlib
import json
import os
import pathlib

from dppo_jax.errors import UserError


def read(path: pathlib.Path) -> list[dict]:
  """Returns the objects of a file, or none if there is no such file.

  A last line without a newline, as a kill leaves it, is ignored.

  Raises:
    UserError: if a line is not a JSON object.
  """
  # Bytes, since a cut may go through a character. Not `splitlines`, since a
  # completion may contain any of the characters that it splits at.
  content = path.read_bytes() if path.exists() else b""
  parsed = []
  for number, line in enumerate(content.split(b"\n")[:-1], 1):
    try:
      if line:
        parsed.append(dict(json.loads(line.decode()).items()))
    except (ValueError, AttributeError) as error:
      raise UserError(
        f"{path}, line {number}, is damaged ({error}): delete that line"
      ) from error
  return parsed


def keep_until(path: pathlib.Path, step: int) -> list[str]:
  """Removes lines after a step and a truncated last line; raises as `read`.

  Args:
    step: step of the checkpoint to resume from; -1 for a new run.

  Returns:
    A message for either, if there was anything to remove.
  """
  lines = read(path)
  kept = [line for line in lines if line.get("step", 0) <= step]
  removed = []
  if len(kept) < len(lines):
    removed.append(f"{len(lines) - len(kept)} lines after step {step}")
  if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
    removed.append("a truncated last line")
  if removed or not path.exists():
    replace(path, (json.dumps(x, ensure_ascii=False) + "\n" for x in kept))
  return [f"{path}: removed {text}" for text in removed]


def replace(path: pathlib.Path, text: Iterable[str]) -> None:
  """Writes a text file atomically; raises as `writing` does."""
  unfinished = path.with_suffix(".tmp")
  with writing(path):
    try:
      with unfinished.open(
        "w", encoding="utf-8", errors="backslashreplace"
      ) as file:
        file.write("".join(text))
        file.flush()
        os.fsync(file.fileno())  # or a power cut may leave an empty file
      os.replace(unfinished, path)
    except OSError:
      unfinished.unlink(missing_ok=True)
      raise


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
  """Turns an OSError into a UserError that names the file."""
  try:
    yield
  except OSError as error:
    raise UserError(
      f"{path} cannot be written: {error.strerror or error}. Fix this, then "
      "re-run the command to resume"
    ) from error
