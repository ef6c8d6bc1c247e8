"""Directories in a bucket, `gs://` or `s3://`, by way of a local copy.

A run works in its copy as in any directory; `upload_run` brings the bucket up
to date at each checkpoint. If a kill ends that early, the bucket holds a
complete checkpoint and logs that reach at least as far, since `upload_run`

1. takes the marker from checkpoints that the run no longer has or has changed,
2. sends logs, then checkpoints, then the marker of each checkpoint,
3. deletes checkpoints that the run has deleted.

A checkpoint without its marker does not exist for `local`. A file is the same
in both places if its size and its time are: copying sets the time of the local
one, in whole seconds, to that in the bucket.

`claimed` writes the id of a copy to the bucket. That copy is then the newer
one, and is kept as it is; any other copy is replaced by what the bucket holds.
The run that has lost its claim to another ends at its next upload.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import contextlib
import datetime
import fcntl
import logging
import os
import pathlib
import re
import sys
import uuid

from dppo_jax.errors import UserError

# Package of fsspec, and the extra of setup.py that installs it.
_PACKAGES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
_ID = ".copy"  # file with the id of a copy
_OF_RUN = ("checkpoints/", "completions/")  # what a run deletes
_MARKER = re.compile(r"checkpoints/(\d+)/_CHECKPOINT_METADATA")
_UNFINISHED = re.compile(r"^\.|^damaged-|\.tmp$|\.orbax-checkpoint-tmp")
_THREADS = 8

Stamp = tuple[int, int]  # size in bytes, and time in seconds


class Unreachable(UserError):
  """The bucket cannot be read or written for now."""


def _is_url(place: str) -> bool:
  return place.startswith(tuple(f"{kind}://" for kind in _PACKAGES))


def _cache() -> pathlib.Path:
  home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
  return home.expanduser().resolve() / "dppo_jax" / "buckets"


def url(path: pathlib.Path) -> str:
  """Returns the URL that a local path is the copy of; "" if it is none."""
  path = path.resolve()
  if not path.is_relative_to(_cache()):
    return ""
  kind, *parts = path.relative_to(_cache()).parts
  return f"{kind}://{'/'.join(parts)}"


def shown(path: pathlib.Path) -> str:
  """Returns the name of a path for its user: if it is a copy, the URL."""
  return url(path) or str(path)


def local(place: str, option: str = "", names: Iterable[str] = ()) -> str:
  """Returns a path as it is, and for a URL that of its up-to-date copy.

  Args:
    option: named by the error if there is nothing at the URL; if empty, that
      is no error.
    names: files to copy, if not all of them.
  """
  if not _is_url(place):
    return place
  copy = _cache() / place.rstrip("/").replace("://", "/")
  place = url(copy)
  copy.parent.mkdir(parents=True, exist_ok=True)
  # Processes of a machine share the copy.
  with copy.with_name(f"{copy.name}.lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with _explaining_errors(place):
      bucket = _Bucket(place)
      try:
        stored = _download(bucket, copy, names)
      except FileNotFoundError:  # it was deleted meanwhile
        stored = _download(bucket, copy, names)
  if option and not stored:
    raise UserError(f"{option}: there is nothing at {place}")
  return str(copy)


def _download(
  bucket: "_Bucket", copy: pathlib.Path, names: Iterable[str]
) -> dict[str, Stamp]:
  """Makes a copy equal to the bucket; returns what the bucket holds."""
  stored = bucket.files()
  complete = {"", *(_step_of(x) for x in stored if _MARKER.fullmatch(x))}
  wanted = {x: y for x, y in stored.items() if _step_of(x) in complete}
  wanted.pop(_ID, None)
  is_newer = bucket.is_claimed(copy) and _latest(_files(copy)) >= _latest(
    wanted
  )
  if is_newer:
    wanted = {x: y for x, y in wanted.items() if not (copy / x).exists()}
  if names:
    wanted = {x: wanted[x] for x in names if x in wanted}
  elif not is_newer:
    _delete(copy, _files(copy).keys() - wanted.keys())
  missing = [x for x, y in wanted.items() if _stamp(copy / x) != y]
  if missing:
    size = sum(wanted[x][0] for x in missing) / 1e6
    print(
      f"copying {bucket.url} to {copy}: {len(missing)} files, {size:,.1f} MB",
      file=sys.stderr,
      flush=True,
    )

  def get(name: str) -> None:
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    bucket.get(name, copy / name)
    os.utime(copy / name, (wanted[name][1],) * 2)

  _each(get, missing)
  return stored


def _delete(copy: pathlib.Path, names: Iterable[str]) -> None:
  """Deletes files of a copy, and directories without files."""
  for name in names:
    (copy / name).unlink()
  for folder, *_ in os.walk(copy, topdown=False):
    with contextlib.suppress(OSError):  # it is not empty
      os.rmdir(folder)


def upload(path: pathlib.Path) -> None:
  """Sends what is new in a local copy, or in a part of one, to the bucket.

  Does nothing for a path that is no copy. Raises Unreachable if the bucket is.
  """
  if place := url(path):
    with _explaining_errors(place, path):
      bucket, files = _Bucket(place), _files(path)
      stored = bucket.files()
      changed = [x for x in files if files[x] != stored.get(x)]
      _each(lambda name: bucket.put(name, path / name), changed)


def upload_run(workdir: pathlib.Path) -> None:
  """Uploads a run that has the claim, and deletes what it has deleted.

  Raises UserError if another copy has claimed the bucket since.
  """
  place = url(workdir)
  if not place:
    return
  with _explaining_errors(place, workdir):
    bucket, files = _Bucket(place), _files(workdir)
    stored = bucket.files()
    if not bucket.is_claimed(workdir):
      raise UserError(
        f"another run has started in {place} since: this one ends, and can be "
        "resumed from there when the other has ended"
      )
    changed = {x for x, stamp in files.items() if stamp != stored.get(x)}
    surplus = {x for x in stored.keys() - files.keys() if x.startswith(_OF_RUN)}
    steps = {_step_of(x) for x in changed}
    invalid = {
      marker
      for marker, step in _markers(stored).items()
      if step > _latest(files) or _step_of(marker) in steps
    }
    _each(bucket.delete, invalid)
    put = lambda name: bucket.put(name, workdir / name)
    for part in _in_order(changed | (invalid & files.keys())):
      _each(put, part)
    for part in reversed(_in_order(surplus - invalid)):
      _each(bucket.delete, part)


def _in_order(names: Iterable[str]) -> list[set[str]]:
  """Returns logs, files of checkpoints, and markers of checkpoints."""
  markers = _markers(names).keys()
  of_steps = {x for x in names if _step_of(x)} - markers
  return [{*names} - of_steps - markers, of_steps, markers]


def _markers(names: Iterable[str]) -> dict[str, int]:
  """Returns the step of each marker of a checkpoint."""
  return {x: int(y[1]) for x in names if (y := _MARKER.fullmatch(x))}


def _latest(names: Iterable[str]) -> int:
  return max(_markers(names).values(), default=-1)


def _step_of(name: str) -> str:
  """Returns the directory of the checkpoint that a file is of, or ""."""
  match = re.match(r"checkpoints/[^/]+/", name)
  return match[0] if match else ""


@contextlib.contextmanager
def claimed(workdir: pathlib.Path) -> Iterator[None]:
  """Claims the bucket of a copy, if it is one, and uploads it at the end."""
  if place := url(workdir):
    with _explaining_errors(place):
      workdir.mkdir(parents=True, exist_ok=True)
      if not copy_id(workdir):
        (workdir / _ID).write_text(uuid.uuid4().hex)
      _Bucket(place).put(_ID, workdir / _ID)
  try:
    yield
  except BaseException:
    with contextlib.suppress(UserError):  # the first error matters
      upload_run(workdir)
    raise
  upload_run(workdir)


def copy_id(workdir: pathlib.Path) -> str:
  """Returns the id of a copy; "" if it has none."""
  path = workdir / _ID
  return path.read_text() if path.exists() else ""


def _stamp(path: pathlib.Path) -> Stamp | None:
  if not path.is_file():
    return None
  stat = path.stat()
  return stat.st_size, int(stat.st_mtime)


def _files(folder: pathlib.Path) -> dict[str, Stamp]:
  """Returns the finished files of a copy by their names in it."""
  paths = {x.relative_to(folder).as_posix(): x for x in folder.rglob("*")}
  stamps = {
    name: _stamp(path)
    for name, path in paths.items()
    if not _UNFINISHED.search(name)
  }
  return {name: stamp for name, stamp in stamps.items() if stamp}


def _each(function: Callable[[str], None], names: Iterable[str]) -> None:
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    for _ in pool.map(function, names):
      pass


class _Bucket:
  """The files below a URL. Methods retry as the library of the bucket does."""

  def __init__(self, place: str):
    import fsspec  # slow to import, as what it imports is

    self.url, kind = place, place.partition(":")[0]
    # What it logs is raised too.
    logging.getLogger(_PACKAGES[kind][0]).setLevel(logging.CRITICAL)
    self._files = fsspec.filesystem(kind, use_listings_cache=False)

  def files(self) -> dict[str, Stamp]:
    """Returns all files by name; for the URL of a file, the name is empty."""
    root, stored = self.url.partition("://")[2], {}
    for path, info in self._files.find(root, detail=True).items():
      name = path.removeprefix(root).lstrip("/")
      if info["type"] == "file" and not path.endswith("/"):
        stored[name] = _stamp_of(info)
    return stored

  def is_claimed(self, copy: pathlib.Path) -> bool:
    """Returns True if this copy was the last to claim the bucket."""
    with contextlib.suppress(FileNotFoundError):
      return self._files.cat_file(self._path(_ID)).decode() == copy_id(copy)
    return False

  def get(self, name: str, to: pathlib.Path) -> None:
    self._files.get_file(self._path(name), str(to))

  def put(self, name: str, source: pathlib.Path) -> None:
    self._files.put_file(str(source), self._path(name))
    time = _stamp_of(self._files.info(self._path(name)))[1]
    os.utime(source, (time, time))

  def delete(self, name: str) -> None:
    self._files.rm_file(self._path(name))

  def _path(self, name: str) -> str:
    return f"{self.url}/{name}" if name else self.url


def _stamp_of(info: dict) -> Stamp:
  time: datetime.datetime = info.get("mtime") or info["LastModified"]
  return info["size"], int(time.timestamp())


@contextlib.contextmanager
def _explaining_errors(
  place: str, copy: pathlib.Path | None = None
) -> Iterator[None]:
  """Turns an error of a library, its transport or the server into one line.

  Args:
    copy: has what an upload did not send.
  """
  try:
    yield
  except UserError:
    raise
  except ImportError as error:
    package, extra = _PACKAGES[place.partition(":")[0]]
    raise UserError(
      f"{place} needs {package}: pip install 'dppo_jax[{extra}]' ({error})"
    ) from error
  except Exception as error:
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    advice = (
      f": {copy} has what is not there yet, and sends it when the command is "
      "run again on this machine"
    )
    raise Unreachable(
      f"{place} cannot be read or written ({reason}){advice * bool(copy)}"
    ) from error
