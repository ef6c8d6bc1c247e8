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

Each of several processes has a copy of its own, which need not be on a disk
that they share: of a new checkpoint it holds what that process has written,
until `complete` fetches the other files. What they resume from is always what
the bucket holds.
"""

from collections.abc import Iterable, Iterator
import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import sys
import uuid

from dppo_jax import distributed
from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import storage

_ID = ".copy"  # file with the id of a copy
_PART = "part-"  # start of the id of a copy that has parts of checkpoints
_OF_RUN = ("checkpoints/", "completions/")  # what a run deletes
_MARKER_NAME = "_CHECKPOINT_METADATA"
_MARKER = re.compile(rf"checkpoints/(\d+)/{_MARKER_NAME}")
_UNFINISHED = re.compile(r"^\.|^damaged-|\.tmp$|\.orbax-checkpoint-tmp")
_COPIES = re.compile(r"buckets(-\d+)?")  # directories of copies


def _cache() -> pathlib.Path:
  home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
  return home.expanduser().resolve() / "dppo_jax"


def url(path: pathlib.Path) -> str:
  """Returns the URL that a local path is the copy of; "" if it is none."""
  path = path.resolve()
  if not path.is_relative_to(_cache()):
    return ""
  folder, kind, *parts = (*path.relative_to(_cache()).parts, "", "")
  is_copy = kind and _COPIES.fullmatch(folder)
  return f"{kind}://{'/'.join(filter(None, parts))}" if is_copy else ""


def shown(path: pathlib.Path) -> str:
  """Returns the name of a path for its user: if it is a copy, the URL."""
  return url(path) or str(path)


def local(
  place: str,
  option: str = "",
  names: Iterable[str] = (),
  *,
  is_workdir: bool = False,
) -> str:
  """Returns a path unchanged, and the path of an up-to-date copy for a URL.

  Args:
    option: named by the error if there is nothing at the URL; if empty, that
      is no error.
    names: files to copy, if not all of them.
    is_workdir: True for a run's directory: each process has its own copy.
  """
  if not storage.is_url(place):
    return place
  number = distributed.index() if is_workdir else 0
  folder = f"buckets-{number}" if number else "buckets"
  copy = _cache() / folder / place.rstrip("/").replace("://", "/")
  place = url(copy)
  with _locked(copy), storage.explaining_errors(place):
    bucket = storage.Bucket(place)
    try:
      stored = _download(bucket, copy, names, is_workdir)
    except FileNotFoundError:  # it was deleted meanwhile
      stored = _download(bucket, copy, names, is_workdir)
  if option and not stored:
    raise UserError(f"{option}: there is nothing at {place}")
  return str(copy)


@contextlib.contextmanager
def _locked(copy: pathlib.Path) -> Iterator[None]:
  """Waits for other processes of a machine that change the same copy."""
  copy.parent.mkdir(parents=True, exist_ok=True)
  with copy.with_name(f"{copy.name}.lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def _download(
  bucket: storage.Bucket,
  copy: pathlib.Path,
  names: Iterable[str],
  is_workdir: bool,
) -> dict[str, storage.Stamp]:
  """Makes a copy equal to the bucket; returns what the bucket holds.

  A copy in which a run is under way is left alone.
  """
  stored = bucket.files()
  complete = {"", *(_step_of(x) for x in stored if _MARKER.fullmatch(x))}
  wanted = {x: y for x, y in stored.items() if _step_of(x) in complete}
  wanted.pop(_ID, None)
  is_shared = is_workdir and distributed.count() > 1
  steps = _latest(_files(copy)), _latest(wanted)
  is_newer = (
    not _copy_id(copy).startswith(_PART)
    and _is_claimed(bucket, copy)
    and steps[0] >= steps[1]
  )
  if is_newer and is_shared and steps[0] > steps[1] and not _is_held(copy):
    raise UserError(
      f"{copy} has a checkpoint of step {steps[0]}, which was not sent to "
      f"{bucket.url}: train in one process first, which sends it, or delete "
      "the copy"
    )
  is_newer &= not is_shared
  if not is_newer and _is_held(copy):
    return stored
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
  storage.each(
    lambda name: bucket.get(name, copy / name, wanted[name]), missing
  )
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
    with storage.explaining_errors(place, path):
      bucket, files = storage.Bucket(place), _files(path)
      stored = bucket.files()
      changed = [x for x in files if files[x] != stored.get(x)]
      storage.each(lambda name: bucket.put(name, path / name), changed)


def upload_run(workdir: pathlib.Path, *, is_complete: bool = True) -> None:
  """Uploads a run that has the claim, and deletes what it has deleted.

  Args:
    is_complete: False to send no marker and to delete no checkpoint, since
      other processes have yet to send files of the new ones.

  Raises UserError if another copy has claimed the bucket since.
  """
  place = url(workdir)
  if not place:
    return
  with storage.explaining_errors(place, workdir):
    bucket, files = storage.Bucket(place), _files(workdir)
    stored = bucket.files()
    if not _is_claimed(bucket, workdir):
      raise UserError(
        f"another run has started in {place} since: this one ends, and can be "
        "resumed from there when the other has ended"
      )
    changed = {x for x, stamp in files.items() if stamp != stored.get(x)}
    logs, of_steps, markers = _in_order(changed)
    steps = {_step_of(x) for x in changed}
    invalid = {
      marker
      for marker, step in _markers(stored).items()
      if step > _latest(files) or _step_of(marker) in steps
    }
    storage.each(bucket.delete, invalid)
    # Files of another checkpoint of the same step.
    steps = {_step_of(x) for x in of_steps}
    stale = {x for x in stored if _step_of(x) in steps} - invalid
    storage.each(bucket.delete, stale - (files.keys() - changed))
    put = lambda name: bucket.put(name, workdir / name)
    storage.each(put, logs)
    storage.each(put, of_steps)
    if not is_complete:
      return
    storage.each(put, markers | (invalid & files.keys()))
    kept = {_step_of(x) for x in files} - {""}
    surplus = {
      x
      for x in stored.keys() - files.keys() - invalid
      if x.startswith(_OF_RUN) and _step_of(x) not in kept
    }
    for part in reversed(_in_order(surplus)):
      storage.each(bucket.delete, part)


def upload_from_all(workdir: pathlib.Path) -> str:
  """Uploads a run after a checkpoint; all of its processes call this.

  Returns an error if the bucket is out of reach: the next call tries again.
  Raises UserError as `upload_run` does.
  """
  is_first, is_alone = distributed.is_first(), distributed.count() == 1
  calls = [lambda: is_first and upload_run(workdir, is_complete=is_alone)]
  if not is_alone:
    calls.append(lambda: is_first or _upload_part(workdir))
    calls.append(lambda: is_first and upload_run(workdir))
  for call in calls:
    problem = ""
    with distributed.sharing_errors():
      try:
        call()
      except Unreachable as error:
        problem = str(error)
    if problem := next(filter(None, distributed.gather(problem)), ""):
      return problem
  return ""


def _upload_part(workdir: pathlib.Path) -> None:
  """Sends the files of checkpoints that only this process has."""
  place = url(workdir)
  with storage.explaining_errors(place, workdir):
    bucket, files = storage.Bucket(place), _files(workdir)
    _, of_steps, _ = _in_order(files.keys() - bucket.files().keys())
    storage.each(lambda name: bucket.put(name, workdir / name), of_steps)


def complete(folder: pathlib.Path, *, is_damaged: bool = False) -> None:
  """Fetches the files of a part of a checkpoint that a copy does not have.

  Does nothing for a path that is in no copy.

  Args:
    folder: RUN/checkpoints/STEP/PART.
    is_damaged: fetches all files of the part, if the bucket has the checkpoint.
  """
  step, run = folder.parent, folder.parents[2]
  if not (place := url(step)):
    return
  with _locked(run), storage.explaining_errors(place):
    bucket = storage.Bucket(place)
    stored = bucket.files()
    if is_damaged and _MARKER_NAME in stored:
      shutil.rmtree(folder, ignore_errors=True)
    missing = [
      name
      for name in stored
      if name.startswith(f"{folder.name}/") and not (step / name).exists()
    ]
    storage.each(
      lambda name: bucket.get(name, step / name, stored[name]), missing
    )


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
    with storage.explaining_errors(place):
      workdir.mkdir(parents=True, exist_ok=True)
      start = _PART if distributed.count() > 1 else ""
      if not re.fullmatch(f"{start}[0-9a-f]+", _copy_id(workdir)):
        (workdir / _ID).write_text(start + uuid.uuid4().hex)
      storage.Bucket(place).put(_ID, workdir / _ID)
  try:
    yield
  except BaseException:
    with contextlib.suppress(UserError):  # the first error matters
      upload_run(workdir, is_complete=distributed.count() == 1)
    raise
  upload_run(workdir, is_complete=distributed.count() == 1)


def _copy_id(copy: pathlib.Path) -> str:
  """Returns the id of a copy; "" if it has none."""
  path = copy / _ID
  return path.read_text() if path.exists() else ""


def _is_held(copy: pathlib.Path) -> bool:
  """Returns True if a run is under way in a copy, see `run.resume.held`."""
  if not copy.is_dir():
    return False
  folder = os.open(copy, os.O_RDONLY)
  try:
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:  # some file systems have no locks
    return False
  finally:
    os.close(folder)  # which unlocks it
  return False


def _is_claimed(bucket: storage.Bucket, copy: pathlib.Path) -> bool:
  """Returns True if this copy was the last to claim the bucket."""
  return bool(_copy_id(copy)) and bucket.text(_ID) == _copy_id(copy)


def _stamp(path: pathlib.Path) -> storage.Stamp | None:
  if not path.is_file():
    return None
  stat = path.stat()
  return stat.st_size, int(stat.st_mtime)


def _files(folder: pathlib.Path) -> dict[str, storage.Stamp]:
  """Returns the finished files of a copy by their names in it."""
  paths = {x.relative_to(folder).as_posix(): x for x in folder.rglob("*")}
  stamps = {
    name: _stamp(path)
    for name, path in paths.items()
    if not _UNFINISHED.search(name)
  }
  return {name: stamp for name, stamp in stamps.items() if stamp}
