"""URLs, and errors of buckets: final ones, and those that may pass."""

import contextlib
import errno
import hashlib
import types

from etils import epath
import fsspec
import pytest

from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import bucket, storage
from dppo_jax.run import checksums


def _denied(code: int) -> Exception:
  """Returns what gcsfs raises for a status."""
  retry = pytest.importorskip("gcsfs.retry")
  content = b'{"error": {"message": "no access to it"}}'
  with pytest.raises(Exception, match="no access") as info:
    retry.validate_response(code, content, "bucket/run")
  return info.value


@pytest.mark.parametrize(
  "code, kind", [(401, UserError), (403, UserError), (503, Unreachable)]
)
def test_only_denied_access_to_a_bucket_is_final(code, kind):
  with pytest.raises(UserError, match="no access to it") as info:
    with storage.reaching("gs://bucket/run"):
      raise _denied(code)
  assert type(info.value) is kind


@pytest.mark.parametrize(
  "error, kind",
  [
    (OSError(errno.ENOSPC, "No space left on device"), UserError),
    (OSError(errno.EDQUOT, "Disk quota exceeded", "/cache/x"), UserError),
    (PermissionError(errno.EACCES, "Permission denied", "/cache"), UserError),
    (OSError(errno.ENOTEMPTY, "Directory not empty", "/cache/x"), UserError),
    (ConnectionResetError(errno.ECONNRESET, "reset by peer"), Unreachable),
    (TimeoutError(), Unreachable),
    (ValueError("PERMISSION_DENIED: Error reading gs://bucket"), UserError),
    (ValueError("UNAVAILABLE: Error reading gs://bucket"), Unreachable),
  ],
)
def test_errors_of_the_local_disk_and_denied_access_are_final(error, kind):
  with pytest.raises(kind) as info:
    with storage.reaching("gs://bucket/run"):
      raise error
  assert type(info.value) is kind


@pytest.mark.parametrize(
  "place",
  [
    *("gcs://b/run", "GS://b/run", "s3a://b/run", "gs:/b/run", "gs://"),
    *("http://b/run", "S3://b/run", "file:///run", "s3:/b", "gs:b/run"),
  ],
)
def test_unknown_urls_are_rejected(place):
  for use in (bucket.local, bucket.workdir, bucket.output):
    with pytest.raises(UserError, match="the URL of a bucket is gs://BUCKET"):
      use(place)


def test_runs_cannot_be_in_s3():
  with pytest.raises(UserError, match=r"s3://b/run: a run can be in a local d"):
    bucket.workdir("s3://b/run")


def test_objects_without_md5_are_read_within_the_time_of_their_size(
  monkeypatch,
):
  """The server has MD5 sums but of objects that were composed of parts."""
  root = "gs://b/run/params"
  stored = {
    "known": storage.Stored(10**12, "0" * 32, "1"),
    "composed": storage.Stored(3 * 10**9, "", "2"),
  }
  below = lambda url: {"": stored["composed"]} if url != root else stored
  server = types.SimpleNamespace(cat_file=lambda url: url.encode())
  sizes = []

  @contextlib.contextmanager
  def reaching(url, num_bytes=0):
    sizes.append(num_bytes)
    yield

  monkeypatch.setattr(storage, "files", below)
  monkeypatch.setattr(storage, "_filesystem", lambda url: server)
  monkeypatch.setattr(storage, "_compare", lambda *unused: None)
  monkeypatch.setattr(storage, "reaching", reaching)
  sums = checksums._checksums(epath.Path(root), "md5")
  assert sizes == [3 * 10**9]
  read = hashlib.md5(f"{root}/composed".encode()).hexdigest()
  assert sums == {"known": "0" * 32, "composed": read}


def test_local_paths_are_left_alone(tmp_path):
  assert bucket.local("") == ""
  assert bucket.local(str(tmp_path)) == str(tmp_path)
  assert bucket.workdir(str(tmp_path)) == tmp_path
  assert bucket.url(tmp_path) == ""
  with bucket.claimed(tmp_path):
    bucket.send(tmp_path)
  assert not list(tmp_path.iterdir())


def test_missing_package_is_named(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

  def fail(*unused, **options):
    raise ImportError("Please install gcsfs")

  monkeypatch.setattr(fsspec, "filesystem", fail)
  with pytest.raises(UserError, match="needs gcsfs: pip install gcsfs"):
    bucket.local("gs://bucket/x")
