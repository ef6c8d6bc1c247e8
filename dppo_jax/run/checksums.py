"""Checksums and labels of the parts of checkpoints.

Locally these are SHA-256 sums of the files. In a bucket they are the MD5 sums
that the server has computed, so no file is read to check them.
"""

from concurrent import futures
import contextlib
import hashlib
import json
import os
import pathlib

from etils import epath

from dppo_jax.files import json_object, storage

LABEL = "label.json"  # name of the run, step and evaluation of a checkpoint


def write(directory: epath.Path) -> None:
  """Writes the checksums of all files in `directory`, at any depth."""
  kind = "md5" if storage.is_url(str(directory)) else "sha256"
  content = json.dumps(_checksums(directory, kind), indent=2)
  with (directory / f"{kind}.json").open("w") as file:
    file.write(content)
    if kind == "sha256":
      file.flush()
      os.fsync(file.fileno())


def find_corruption(directory: epath.Path, run: str, step: int) -> str:
  """Names a file that changed since `write`; "" if none did.

  Args:
    run, step: expected in the label, if the directory has one and if it and
      the caller know the name of the run.
  """
  kind, expected = _written(directory)
  if not expected:
    return f"{kind}.json cannot be read or is empty"
  try:
    checksums = _checksums(directory, kind)
  except _unreadable(directory) as error:
    return f"the files cannot be read, {error}"
  for name, digest in expected.items():
    if checksums.get(name) != digest:
      return f"{name} {'has changed' if name in checksums else 'is missing'}"
  label = {"run": run, "step": step} | read_json(directory / LABEL)
  if label["step"] != step:
    return f"it is of step {label['step']}"
  if run and label["run"] not in ("", run):
    return f"it is of another run, {label['run']}"
  return ""


def read_label(directory: epath.Path) -> dict | None:
  """Returns the label of a part; None if it is missing or has changed."""
  kind, expected = _written(directory)
  with contextlib.suppress(_unreadable(directory), ValueError):
    content = (directory / LABEL).read_bytes()
    if hashlib.new(kind, content).hexdigest() == expected.get(LABEL):
      return json_object.parse(content)
  return None


def _written(directory: epath.Path) -> tuple[str, dict[str, str]]:
  """Returns the kind of the checksums of a directory, and what was written."""
  for kind in ("md5", "sha256"):
    if content := read_json(directory / f"{kind}.json"):
      break
  return kind, content


def _checksums(directory: epath.Path, kind: str) -> dict[str, str]:
  """Checksum of each file by its path in `directory`."""
  if storage.is_url(str(directory)):
    read = lambda name: hashlib.md5((directory / name).read_bytes())
    return {  # an object that was composed of parts has none
      name: x.md5 or read(name).hexdigest()
      for name, x in storage.files(str(directory)).items()
    }

  def digest(path: pathlib.Path) -> tuple[str, str]:
    with path.open("rb") as file:
      name = path.relative_to(directory).as_posix()
      return name, hashlib.file_digest(file, kind).hexdigest()

  files = [x for x in pathlib.Path(directory).rglob("*") if x.is_file()]
  with futures.ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
    return dict(pool.map(digest, sorted(files)))


def read_json(path: epath.Path) -> dict:
  """Returns the content of a JSON file; nothing if it cannot be read."""
  with contextlib.suppress(_unreadable(path), ValueError):
    if isinstance(content := json_object.parse(path.read_bytes()), dict):
      return content
  return {}


def _unreadable(path: epath.Path) -> type[OSError]:
  """Returns the errors of a damaged file; others are of the connection."""
  return FileNotFoundError if storage.is_url(str(path)) else OSError
