"""Files in a bucket, on a real server: names, contents, and copies."""

import pathlib
import types

import fsspec
import pytest

from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import bucket, storage
from tests.helpers.bucketed import check, log, objects, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
  "name", ["run[1]", "run*", "run?", "run#1", "a/../b", "..", "a//b", "a/./b"]
)
def test_urls_that_libraries_read_as_patterns_are_rejected(name):
  for use in (bucket.local, bucket.workdir, bucket.output):
    with pytest.raises(UserError, match="the URL of a bucket is gs://BUCKET"):
      use(f"gs://bucket/{name}")


@pytest.mark.parametrize("name", ["a run", "lr=0.1,é+~@:!", "a%20b", "a&b;c"])
def test_other_characters_of_urls_are_as_they_are(url, name):
  train(bucket.workdir(f"{url}/{name}"), 0, 2)
  check(f"{url}/{name}", 0, 2)


@pytest.mark.parametrize(
  "name", ["../../escaped", "a/../../escaped", "//escaped", "a/./b", "a\0b"]
)
def test_names_that_lead_outside_are_rejected(url, tmp_path, monkeypatch, name):
  objects = {f"{url[5:]}/{name}": {"type": "file", "size": 1}}
  server = fsspec.filesystem("gs")
  monkeypatch.setattr(server, "find", lambda *unused, **options: objects)
  with pytest.raises(UserError, match=r"has an object named .*: delete it"):
    bucket.local(url)
  with pytest.raises(UserError, match=r"has an object named .*: delete it"):
    bucket.workdir(url)
  assert not list(tmp_path.rglob("escaped"))


@pytest.mark.filterwarnings("ignore:Sending a large body")
@pytest.mark.parametrize("end", ["\r", "\n", "\r\n", "", "x" * 6_000_000])
def test_files_are_stored_as_they_are(url, tmp_path, end):
  content = b"weights" + end.encode() if end else b""
  (tmp_path / "file").write_bytes(content)
  storage.put(tmp_path / "file", f"{url}/file")
  copy = pathlib.Path(bucket.local(url))
  assert (copy / "file").read_bytes() == content


def _use(monkeypatch, server, **changes):
  """Makes all threads use `server` with some methods changed."""
  names = ("find", "info", "get_file", "put_file", "rm_file")
  methods = {name: getattr(server, name) for name in names} | changes
  monkeypatch.setattr(
    storage, "_filesystem", lambda place: types.SimpleNamespace(**methods)
  )


def test_stored_file_that_differs_is_reported(url, tmp_path, monkeypatch):
  """The last byte is lost on the way."""
  server, workdir = fsspec.filesystem("gs"), bucket.workdir(url)
  cut = lambda path, to: server.pipe(to, pathlib.Path(path).read_bytes()[:-1])
  _use(monkeypatch, server, put_file=cut)
  workdir.mkdir()
  (workdir / "log.txt").write_text("line\n")
  with pytest.raises(
    Unreachable, match=r"has 4 bytes .* but 5 and .*has the f"
  ):
    bucket.send(workdir)


def test_file_that_grows_while_it_is_sent_is_sent_again(url, monkeypatch):
  server, workdir = fsspec.filesystem("gs"), bucket.workdir(url)
  put_file = server.put_file

  def put_and_grow(*args):
    put_file(*args)
    log(workdir, 2)

  log(workdir, 0)
  with monkeypatch.context() as patch:
    _use(patch, server, put_file=put_and_grow)
    bucket.send(workdir)
  bucket.send(workdir)
  stored = server.cat(f"{url}/metrics.jsonl")
  assert stored == (workdir / "metrics.jsonl").read_bytes()


def test_copy_is_completed_and_follows_the_bucket(url, tmp_path):
  files = fsspec.filesystem("gs")
  for name in ("a", "b"):
    files.pipe(f"{url}/{name}", name.encode())
  copy = pathlib.Path(bucket.local(url))
  (copy / "a").unlink()
  (copy / "b").write_bytes(b"")  # as a kill or a full disk may leave it
  assert bucket.local(url) == str(copy)
  assert {x.name: x.read_text() for x in copy.iterdir()} == {"a": "a", "b": "b"}
  files.pipe(f"{url}/a", b"A")
  files.rm_file(f"{url}/b")
  copy = pathlib.Path(bucket.local(url))
  assert {x.name: x.read_text() for x in copy.iterdir()} == {"a": "A"}


def test_cache_may_be_a_link(url, tmp_path):
  (tmp_path / "disk").mkdir()
  (tmp_path / "cache").mkdir()
  (tmp_path / "cache/dppo_jax").symlink_to(tmp_path / "disk")
  train(bucket.workdir(url), 0, 2)
  check(url, 0, 2)
  to = pathlib.Path(bucket.output(f"{url}-model")).resolve()
  assert bucket.url(to) == f"{url}-model"


def test_file_that_vanishes_while_it_is_sent_is_left_out(url, monkeypatch):
  workdir = bucket.workdir(url)
  log(workdir, 0)
  (workdir / "other").touch()
  put = storage.put

  def remove_and_put(source, place):
    (workdir / "other").unlink(missing_ok=True)
    put(source, place)

  monkeypatch.setattr(storage, "put", remove_and_put)
  bucket.send(workdir)
  bucket._sent.clear()
  bucket.send(workdir)
  assert "metrics.jsonl" in objects(url)


def test_full_local_disk_is_named(url, monkeypatch):
  files = fsspec.filesystem("gs")
  files.pipe(f"{url}/model", b"weights")

  def fail(source, target):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(files, "get_file", fail)
  with pytest.raises(UserError, match=r"local disk .*: No space left") as info:
    bucket.local(url)
  assert not isinstance(info.value, Unreachable)


def test_export_needs_an_empty_place(url, tmp_path):
  folder = pathlib.Path(bucket.output(f"{url}/"))
  folder.mkdir()
  (folder / "model").write_text("weights")
  bucket.send(folder)
  with pytest.raises(UserError, match=f"--to: {url} is not an empty directory"):
    bucket.output(url)
  assert bucket.output(str(tmp_path)) == str(tmp_path)
