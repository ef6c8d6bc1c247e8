"""Directories in a bucket: what commands read there, and runs that live there.

`local` copies files that are only read, a model or a data set. A copy is named
by the versions of its objects, so it never changes and is never out of date.

A run (`workdir`) writes its logs in a local directory of this process, which
`send` copies to the bucket, in this direction only. Checkpoints are written to
and read from the bucket itself, at `place`. Nothing is deleted because it is
absent elsewhere. `claimed` writes a lease: the run that has started last owns
the bucket, and an earlier one ends at its next checkpoint.
"""

from collections.abc import Iterable, Iterator
import contextlib
import hashlib
import json
import os
import pathlib
import re
import socket
import tempfile
import uuid

from etils import epath

from dppo_jax.errors import UserError
from dppo_jax.files import paths, storage

_CONFIG, _LEASE = "config.json", "lease.json"
# What a run logs: not its checkpoints, nor what others have written there.
_LOGS = re.compile(
  r"(metrics|samples)\.jsonl|config\.json|log\.txt|report\.(md|png)|wandb_id|"
  r"(completions|events)/[^/]+"
)
# URL and lease of each local directory; time and size of each file in it when
# it was last sent or fetched.
_urls: dict[pathlib.Path, str] = {}
_leases: dict[pathlib.Path, str] = {}
_sent: dict[str, tuple[int, int]] = {}


def _cache() -> pathlib.Path:
  home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return pathlib.Path(paths.absolute(home), "dppo_jax").resolve()


def url(path: pathlib.Path) -> str:
  """Returns the URL that a local path is sent to; "" if it is none."""
  for folder, where in _urls.items():
    if path.is_relative_to(folder):
      return f"{where}/{path.relative_to(folder)}".removesuffix("/.")
  return ""


def shown(path: pathlib.Path) -> str:
  """Returns the URL of a path, if it has one, or the path as seen from here."""
  here = pathlib.Path.cwd()
  is_below = path.is_relative_to(here) and path != here
  return url(path) or str(path.relative_to(here) if is_below else path)


def place(path: pathlib.Path) -> epath.Path:
  """Returns the place of what a run does not write to its local directory."""
  return epath.Path(url(path) or path)


@contextlib.contextmanager
def reaching(path: pathlib.Path, num_bytes: int = 0) -> Iterator[epath.Path]:
  """`storage.reaching`, of the place of a path."""
  with storage.reaching(place(path), num_bytes):
    yield place(path)


def local(where: str, option: str = "", names: Iterable[str] = ()) -> str:
  """Returns a path unchanged, and the path of a complete copy for a URL.

  Args:
    option: start of the error if there is nothing at the URL.
    names: files to copy, if not all of them.
  """
  if not storage.is_url(where):
    return where
  where = where.rstrip("/")
  stored = storage.files(where)
  if names:
    stored = {x: stored[x] for x in names if x in stored}
  if option and not stored:
    raise UserError(f"{option}: there is nothing at {where}")
  identity = json.dumps([where, sorted(stored.items())]).encode()
  name = hashlib.sha256(identity).hexdigest()[:16]
  copy = _cache() / "copies" / name / where.rpartition("/")[2]
  is_there = lambda path, size: path.is_file() and path.stat().st_size == size
  _fetch(
    where,
    copy,
    {x: y for x, y in stored.items() if not is_there(copy / x, y.size)},
  )
  return str(copy)


def _fetch(
  where: str, folder: pathlib.Path, stored: dict[str, storage.Stored]
) -> None:
  with storage.reaching(where, sum(x.size for x in stored.values())):
    storage.each(
      lambda x: storage.get(f"{where}/{x}".rstrip("/"), folder / x, stored[x]),
      stored,
    )
  _sent.update((str(folder / x), _stamp(folder / x)) for x in stored)


def _stamp(path: pathlib.Path) -> tuple[int, int]:
  """Returns what changes whenever a file does."""
  stat = path.stat()
  return stat.st_mtime_ns, stat.st_size


def output(where: str) -> str:
  """Returns a path unchanged, and a new local directory for an empty URL."""
  if not storage.is_url(where):
    return where
  if storage.files(where):
    raise UserError(f"--to: {where} is not an empty directory: choose another")
  return str(_new_folder(where.rstrip("/")))


def workdir(where: str) -> pathlib.Path:
  """Returns the local directory of a run, with its config if it has one."""
  if not storage.is_url(where):
    return pathlib.Path(where)
  if where.startswith("s3:"):
    raise UserError(
      f"{where}: a run can be in a local directory or gs://BUCKET/RUN; s3:// "
      "is for models, data and exports"
    )
  where = where.rstrip("/")
  for folder, known in _urls.items():
    if known == where:
      return folder
  stored, folder = storage.files(where), _new_folder(where)
  _fetch(where, folder, {x: stored[x] for x in {_CONFIG} & stored.keys()})
  return folder


def _new_folder(where: str) -> pathlib.Path:
  with storage.reaching(where):
    _cache().mkdir(parents=True, exist_ok=True)
    parent = tempfile.mkdtemp(prefix="run-", dir=_cache())
  folder = pathlib.Path(parent, where.rpartition("/")[2])
  _urls[folder] = where
  return folder


def send(path: pathlib.Path) -> None:
  """Sends files that changed since they were sent or fetched.

  Does nothing for a local path.

  Raises:
    UserError: if another run has claimed the bucket.
    Unreachable: if the bucket is.
  """
  if not (where := url(path)):
    return
  check_lease(path)
  files = [x for x in path.rglob("*") if x.is_file() and x.suffix != ".tmp"]
  stamps = {str(x): _stamp(x) for x in files}
  changed = {x: y for x, y in stamps.items() if _sent.get(x) != y}
  num_bytes = sum(size for _, size in changed.values())
  try:
    with storage.reaching(where, num_bytes):
      storage.each(_send_file, changed)
  except UserError as error:
    raise type(error)(f"{error}; {path} has the files") from error
  _sent.update(changed)


def _send_file(name: str) -> None:
  path = pathlib.Path(name)
  try:
    storage.put(path, url(path))
  except FileNotFoundError:
    if path.exists():  # the user may have deleted it meanwhile
      raise


def check_lease(path: pathlib.Path) -> None:
  """Raises UserError if another run has claimed the bucket since `claimed`."""
  if lease := _leases.get(path):
    with reaching(path) as run, contextlib.suppress(FileNotFoundError):
      if (owner := (run / _LEASE).read_text()) != lease:
        raise UserError(
          f"another run has started in {run} since ({owner}): this one "
          "ends, and can be resumed from there when the other has ended"
        )


def fetch_logs(path: pathlib.Path) -> None:
  """Copies what a run has logged in its bucket, if it is in one."""
  if where := url(path):
    logs = {x: y for x, y in storage.files(where).items() if _LOGS.fullmatch(x)}
    _fetch(where, path, logs)


@contextlib.contextmanager
def claimed(path: pathlib.Path) -> Iterator[None]:
  """Claims the bucket of a run, fetches its logs, and sends them at the end.

  Does nothing for a local path.
  """
  if url(path):
    lease = {"host": socket.gethostname(), "process": os.getpid()}
    _leases[path] = json.dumps(lease | {"id": uuid.uuid4().hex[:8]})
    with reaching(path) as run:
      (run / _LEASE).write_text(_leases[path])
    fetch_logs(path)
  try:
    yield
  except BaseException:
    with contextlib.suppress(UserError):  # the first error matters
      send(path)
    raise
  send(path)
