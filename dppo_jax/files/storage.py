"""Files in a bucket, `gs://` or `s3://`, by fsspec."""

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import contextlib
import datetime
import logging
import os
import pathlib

from dppo_jax import distributed
from dppo_jax.errors import Unreachable, UserError

# Packages of fsspec.
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
_THREADS = 8

Stamp = tuple[int, int]  # size in bytes, and time in seconds


def is_url(place: str) -> bool:
  """Returns True for a directory or file in a bucket."""
  return place.startswith(tuple(f"{kind}://" for kind in _PACKAGES))


def each(function: Callable[[str], None], names: Iterable[str]) -> None:
  """Calls a function with each name, several at a time."""
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    for _ in pool.map(function, names):
      pass


class Bucket:
  """The files below a URL. Methods retry as the library of the bucket does."""

  def __init__(self, place: str):
    import fsspec  # slow to import, as what it imports is

    self.url, kind = place, place.partition(":")[0]
    # What it logs is raised too.
    logging.getLogger(_PACKAGES[kind]).setLevel(logging.CRITICAL)
    self._files = fsspec.filesystem(kind, use_listings_cache=False)

  def files(self) -> dict[str, Stamp]:
    """Returns all files by name; for the URL of a file, the name is empty."""
    root, stored = self.url.partition("://")[2], {}
    for path, info in self._files.find(root, detail=True).items():
      name = path.removeprefix(root).lstrip("/")
      if info["type"] == "file" and not path.endswith("/"):
        stored[name] = _stamp_of(info)
    return stored

  def text(self, name: str) -> str:
    """Returns the content of a file; "" if there is none."""
    with contextlib.suppress(FileNotFoundError):
      return self._files.cat_file(self._path(name)).decode()
    return ""

  def get(self, name: str, to: pathlib.Path, stamp: Stamp) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f"{to.name}.tmp")  # no upload sends it
    self._files.get_file(self._path(name), str(part))
    os.utime(part, (stamp[1], stamp[1]))
    part.replace(to)

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


def _is_denied(error: Exception) -> bool:
  """True if there is no such bucket or no permission; gcsfs has no class."""
  is_final = isinstance(error, PermissionError | FileNotFoundError)
  is_unauthorized = getattr(error, "code", None) == 401
  return is_final or is_unauthorized or str(error).startswith("Forbidden: ")


@contextlib.contextmanager
def explaining_errors(
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
    package = _PACKAGES[place.partition(":")[0]]
    raise UserError(
      f"{place} needs {package}: pip install {package} ({error})"
    ) from error
  except Exception as error:
    if _is_denied(error):
      reason = " ".join(str(error).split())
      raise UserError(
        f"{place} cannot be read or written ({reason})"
      ) from error
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    advice = (
      f": {copy} has what is not there yet, and sends it when the command is "
      "run again on this machine"
      if distributed.count() == 1
      else ": the run resumes from the last checkpoint that is there"
    )
    raise Unreachable(
      f"{place} cannot be read or written ({reason}){advice * bool(copy)}"
    ) from error
