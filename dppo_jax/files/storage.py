"""Objects in a bucket, `gs://` or `s3://`: listed, read, written and deleted.

What was sent or received is compared with the size and the MD5 that the server
has (for S3 the size: its client sends a checksum that the server verifies).
"""

import base64
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import contextlib
import hashlib
import logging
import os
import pathlib
import re
from typing import Any, NamedTuple

from dppo_jax import distributed, errors
from dppo_jax.errors import UserError

# Packages of fsspec.
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
_THREADS = 8
_SMALL = 5_000_000  # bytes that a server of `gs://` gets in one request
# Time limit: a number of seconds, and the time of a transfer at a slow rate.
SECONDS = 120
_BYTES_PER_SECOND = 10_000_000
_OPTIONS = {"use_listings_cache": False}


class Stored(NamedTuple):
  """An object in a bucket."""

  size: int
  md5: str  # hexadecimal; "" if the server has none
  version: str  # changes whenever the object does


def is_url(where: str) -> bool:
  """Returns True for a URL of a bucket; raises UserError for another URL."""
  if not re.match(r"\w+:/|(gs|gcs|s3|s3a):", where, re.IGNORECASE):
    return False
  kind, _, name = where.rstrip("/").partition("://")
  # Libraries read these characters as patterns and versions.
  if kind not in _PACKAGES or not _is_safe(name) or re.search(r"[*?[#]", name):
    raise UserError(
      f"{where}: the URL of a bucket is gs://BUCKET/NAME or s3://BUCKET/NAME, "
      "without *, ?, [, # and parts such as '..'"
    )
  return True


def _is_safe(name: str) -> bool:
  """Returns False for a name that leads elsewhere on a disk."""
  return "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))


def each(function: Callable[[str], object], names: Iterable[str]) -> None:
  """Calls a function with each name, several at a time."""
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    for _ in pool.map(function, names):
      pass


def _filesystem(url: str) -> Any:
  import fsspec  # slow to import, as what it imports is

  kind = url.partition(":")[0]
  # Also for etils, which has an object of its own.
  fsspec.config.conf |= dict.fromkeys(("gs", "gcs", "s3"), _OPTIONS)
  # What it logs is raised too.
  logging.getLogger(_PACKAGES[kind]).setLevel(logging.CRITICAL)
  if host := os.environ.get("STORAGE_EMULATOR_HOST"):  # read by gcsfs only
    host = host if "://" in host else f"http://{host}"
    os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", host)
  return fsspec.filesystem(kind)


def files(url: str) -> dict[str, Stored]:
  """Returns all objects below a URL by name; "" is the object at the URL.

  Raises:
    UserError: for a name that would be outside a local directory.
  """
  root, stored = url.partition("://")[2], {}
  with reaching(url):
    infos = _filesystem(url).find(url, detail=True)
  for path, info in infos.items():
    name = path.removeprefix(root).removeprefix("/")
    if info["type"] != "file" or path.endswith("/"):
      continue
    if name and not _is_safe(name):
      raise UserError(f"{url} has an object named {name!r}: delete it")
    stored[name] = _stored(info)
  return stored


def get(url: str, to: pathlib.Path, stored: Stored) -> None:
  """Copies an object to a file, which appears once it is complete."""
  to.parent.mkdir(parents=True, exist_ok=True)
  unfinished = to.with_name(f".{to.name}.{os.getpid()}.tmp")
  try:
    _filesystem(url).get_file(url, str(unfinished))
    _compare(url, stored, unfinished.stat().st_size, _md5(unfinished))
    unfinished.replace(to)
  finally:
    unfinished.unlink(missing_ok=True)


def read(url: str) -> bytes:
  """Returns the content of an object; nothing if there is none."""
  if not (stored := files(url).get("")):
    return b""
  with reaching(url, stored.size):
    content = _filesystem(url).cat_file(url)
    md5 = hashlib.md5(content).hexdigest()
    _compare(url, stored, len(content), md5)
  return content


def put(source: pathlib.Path, url: str) -> None:
  """Copies a file to an object; may be called again if the file changes."""
  before, md5 = source.stat(), _md5(source)
  content = source.read_bytes() if before.st_size < _SMALL else b""
  if url.startswith("gs:") and content.endswith(b"\r"):
    import tensorstore  # gcsfs encodes such content ambiguously

    name, _, path = url.removeprefix("gs://").partition("/")
    store = {"driver": "gcs", "bucket": name, "path": path}
    tensorstore.KvStore.open(store).result().write("", content).result()
  else:
    _filesystem(url).put_file(str(source), url)
  stored = _stored(_filesystem(url).info(url))
  if source.stat().st_mtime_ns == before.st_mtime_ns:
    _compare(url, stored, before.st_size, md5)


def _stored(info: dict) -> Stored:
  md5 = base64.b64decode(info.get("md5Hash", "")).hex()
  version = info.get("generation") or info.get("etag") or info.get("ETag")
  return Stored(info["size"], md5, md5 or str(version))


def _compare(path: str, stored: Stored, size: int, md5: str) -> None:
  if (size, md5) != (stored.size, stored.md5 or md5):
    raise ConnectionError(
      f"{path} has {stored.size} bytes and MD5 {stored.md5} in the bucket but "
      f"{size} and {md5} here"
    )


def _md5(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "md5").hexdigest()


@contextlib.contextmanager
def reaching(where: str | os.PathLike, num_bytes: int = 0) -> Iterator[None]:
  """Limits the time of a body that uses a URL, and explains its errors.

  Does nothing for a local path.

  Args:
    num_bytes: size of what the body transfers.
  Raises:
    UserError: if access is denied, the request is rejected, there is no such
      file or a package is missing, or for an error of the local disk.
    Unreachable: for all other errors of a bucket.
  """
  where = str(where)
  if not is_url(where):
    yield
    return
  seconds = round(SECONDS + num_bytes / _BYTES_PER_SECOND)
  text = f"{where} did not answer within {seconds} s; re-run the command"
  with errors.limited(seconds, text):
    try:
      yield
    except Exception as error:
      if isinstance(error, UserError) or distributed.has_lost_another(error):
        raise
      raise _explained(where, error) from error


def _explained(where: str, error: Exception) -> UserError:
  if isinstance(error, ImportError):
    package = _PACKAGES[where.partition(":")[0]]
    return UserError(
      f"{where} needs {package}: pip install {package} ({error})"
    )
  if reason := errors.of_disk(error):
    disk = getattr(error, "filename", None) or "the local disk"
    return UserError(f"{disk} cannot be written: {reason}")
  reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
  return errors.of_server(
    error,
    f"{where} cannot be read or written ({reason}): re-run the command once "
    "this has changed",
  )
