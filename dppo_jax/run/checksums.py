"""Checksums and labels of the parts of checkpoints."""

from concurrent import futures
import contextlib
import hashlib
import json
import os
import pathlib

CHECKSUMS = "sha256.json"  # sha256-1.json of process 1, if it has its own copy
LABEL = "label.json"  # name of the run, step and evaluation of a checkpoint


def write(directory: pathlib.Path, process: int = 0) -> None:
  """Writes the checksums of all files in `directory`, at any depth.

  Args:
    process: index of the process whose copy this is.
  """
  content = json.dumps(_checksums(directory), indent=2)
  path = directory / _checksums_name(process)
  with path.open("w", encoding="utf-8") as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def find_corruption(directory: pathlib.Path, run: str, step: int) -> str:
  """Names a file that changed since `write`; "" if none did.

  Args:
    run, step: expected in the label, if the directory has one and if it and
      the caller know the name of the run.
  """
  label = {"run": run, "step": step, "processes": 1}
  label |= read_json(directory / LABEL)
  expected, name = {}, CHECKSUMS
  try:
    for process in range(label["processes"]):
      name = _checksums_name(process)
      expected |= dict(json.loads((directory / name).read_bytes()))
    checksums = _checksums(directory)
  except (OSError, ValueError, TypeError) as error:
    return f"{name} cannot be checked, {error}"
  for name, digest in expected.items():
    if checksums.get(name) != digest:
      return f"{name} {'has changed' if name in checksums else 'is missing'}"
  if label["step"] != step:
    return f"it is of step {label['step']}"
  if run and label["run"] not in ("", run):
    return f"it is of another run, {label['run']}"
  return "" if expected else f"{CHECKSUMS} is empty"


def _checksums_name(process: int) -> str:
  return f"sha256-{process}.json" if process else CHECKSUMS


def _checksums(directory: pathlib.Path) -> dict[str, str]:
  """SHA-256 of each file by its path in `directory`."""

  def digest(path: pathlib.Path) -> tuple[str, str]:
    with path.open("rb") as file:
      name = path.relative_to(directory).as_posix()
      return name, hashlib.file_digest(file, "sha256").hexdigest()

  files = sorted(x for x in directory.rglob("*") if x.is_file())
  with futures.ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
    return dict(pool.map(digest, files))


def read_json(path: pathlib.Path) -> dict:
  """Returns the content of a JSON file; nothing if it cannot be read."""
  with contextlib.suppress(OSError, ValueError):
    if isinstance(content := json.loads(path.read_bytes()), dict):
      return content
  return {}
