"""Files of one JSON object a line, as a run writes them and as they are read.

Without jax, so that what only reads runs starts at once.
"""

from collections.abc import Iterable, Iterator
import contextlib
import json
import os
import pathlib

# What a metric was called before, so that older runs can be read.
RENAMED = {
  "completions/dead_groups": "groups/zero_std",
  "pack/missing_rows": "pack/unplaced",
  "refill/seconds": "dynamic_sampling/seconds",
  "remember/seconds": "update_history/seconds",
}


def read(path: pathlib.Path) -> list[dict]:
  """The lines of a `.jsonl` file, without a last one cut short by a kill.

  Metrics go by their present names. There is no line where there is no file.

  Raises:
    ValueError: for a line that is no JSON object; it names file and line.
  """
  return _parsed(path, _split(path)[0])


def read_ends(path: pathlib.Path, size: int = 2**20) -> list[dict]:
  """The lines in the first and last `size` bytes of a file; see `read`.

  Of a long run's samples nobody wants to wait for more.
  """
  if not path.exists() or path.stat().st_size <= 2 * size:
    return read(path)
  with path.open("rb") as file:
    first = file.read(size).split(b"\n")[:-1]
    file.seek(-size, os.SEEK_END)
    last = file.read().split(b"\n")[1:-1]
  return _parsed(path, first + last)


def keep_until(path: pathlib.Path, step: int) -> list[str]:
  """Drops the lines of later steps and a last one cut short; says what it did.

  Args:
    step: that the run goes on after; -1 where it begins anew. Should there be
      lines of a run that had gone further, whose checkpoints somebody must have
      deleted, the file is kept under another name.
  Raises:
    ValueError: for a line without a step, and as `read` does.
  """
  lines, rest = _split(path)
  found = _parsed(path, lines)
  steps = [x.get("step") for x in found]
  if not all(isinstance(x, int) for x in steps):
    raise ValueError(f"{path} has a line without a step: delete that line")
  said = []
  if rest:
    said.append(f"{path}: a last line, cut short, is left out")
  later = sum(x > step for x in steps)
  if step < 0 and max(steps, default=0) > 0:
    names = (path.with_name(f"{path.name}.before-{i}") for i in range(1, 10**6))
    place = next(x for x in names if not x.exists())
    path.rename(place)
    said.append(
      f"{path} had {max(steps)} steps of a run without a checkpoint: it is now "
      f"{place}, and the run begins anew"
    )
    lines, steps = [], []
  elif later:
    said.append(
      f"{path}: {later} lines of steps after {step} will be written anew"
    )
  if said or not path.exists():
    kept = (
      x for x, at in zip(filter(None, lines), steps, strict=True) if at <= step
    )
    replace(path, (line.decode("utf-8") + "\n" for line in kept))
  return said


def replace(path: pathlib.Path, text: Iterable[str]) -> None:
  """Writes a text file, whole or not at all; raises as `writing` does."""
  unfinished = path.with_suffix(".tmp")
  with writing(path):
    try:
      with unfinished.open("w", encoding="utf-8") as file:
        file.write("".join(text))
        file.flush()
        os.fsync(file.fileno())  # else a power cut may leave its name alone
      os.replace(unfinished, path)
    except OSError:
      unfinished.unlink(missing_ok=True)
      raise


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
  """Says which file the system did not let us write.

  Raises:
    OSError: in one line.
  """
  try:
    yield
  except OSError as error:
    if not error.strerror:  # told already
      raise
    raise OSError(
      f"{path} cannot be written: {error.strerror}. Once that is mended, the "
      "same command goes on"
    ) from error


def _split(path: pathlib.Path) -> tuple[list[bytes], bytes]:
  """The lines of a file, and what follows the last."""
  # Bytes, as a cut may go through a character. And not splitlines: a completion
  # may hold any of the characters it splits at.
  content = path.read_bytes() if path.exists() else b""
  *lines, rest = content.split(b"\n")
  return lines, rest


def _parsed(path: pathlib.Path, lines: list[bytes]) -> list[dict]:
  found = []
  for number, line in enumerate(lines, 1):
    if not line:
      continue
    try:
      items = json.loads(line.decode("utf-8")).items()
    except (ValueError, AttributeError) as error:
      raise ValueError(
        f"{path}, line {number}, is damaged ({error}): delete that line"
      ) from error
    found.append({RENAMED.get(name, name): x for name, x in items})
  return found
