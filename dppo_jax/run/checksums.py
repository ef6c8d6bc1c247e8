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
    run, step: expected in the label, if the directory has one; the run if it
      and the caller know its name.
  """
  kind, expected = _written(directory)
  if not expected:
    return f"{kind}.json is missing or damaged"
  checksums = _checksums(directory, kind)
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
  content = _read(directory / LABEL)
  is_intact = hashlib.new(kind, content).hexdigest() == expected.get(LABEL)
  return json_object.parse(content) if is_intact else None


def _written(directory: epath.Path) -> tuple[str, dict[str, str]]:
  """Returns the kind of the checksums of a directory, and what was written."""
  usual = "md5" if storage.is_url(str(directory)) else "sha256"
  for kind in ("md5", "sha256"):
    if content := read_json(directory / f"{kind}.json"):
      return kind, content
  return usual, {}


def _checksums(directory: epath.Path, kind: str) -> dict[str, str]:
  """Checksum of each file by its path in `directory`."""
  if storage.is_url(url := str(directory)):
    stored = storage.files(url)
    # An object that was composed of parts has none.
    known = {name: x.md5 for name, x in stored.items() if kind == "md5"}
    read = lambda name: hashlib.new(kind, storage.read(f"{url}/{name}"))
    return {x: known.get(x) or read(x).hexdigest() for x in stored}

  def digest(path: pathlib.Path) -> tuple[str, str]:
    with path.open("rb") as file:
      name = path.relative_to(directory).as_posix()
      return name, hashlib.file_digest(file, kind).hexdigest()

  files = [x for x in pathlib.Path(directory).rglob("*") if x.is_file()]
  with futures.ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
    return dict(pool.map(digest, sorted(files)))


def read_json(path: epath.Path) -> dict:
  """Returns the content of a JSON file; nothing if it is none."""
  content = _read(path)
  with contextlib.suppress(ValueError):
    if isinstance(value := json_object.parse(content), dict):
      return value
  return {}


def _read(path: epath.Path | pathlib.Path) -> bytes:
  """Returns the content of a file; nothing if there is none at the path."""
  if storage.is_url(str(path)):
    return storage.read(str(path))
  with contextlib.suppress(
    FileNotFoundError, IsADirectoryError, NotADirectoryError
  ):
    return path.read_bytes()
  return b""
