"""A bucket holds a consistent run however an upload ends, and any copy of it.

Real servers on localhost; runs are directories of small files with the names
that the package gives them.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import http.server
import json
import pathlib
import shutil
import threading
import types

import fsspec
import pytest

from dppo_jax import distributed
from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import bucket, storage
from tests.helpers import servers

pytestmark = pytest.mark.slow


class Killed(BaseException):
  """Ends an upload as a kill does."""


@pytest.fixture(scope="module", params=servers.SERVERS)
def server(request):
  """`(kind, variables)` of a server."""
  servers.skip_without(request.param)
  with servers.running(request.param) as variables:
    yield request.param, variables


@pytest.fixture
def machines(server, monkeypatch, tmp_path):
  """Returns a function that goes to a machine, by its name."""
  kind, variables = server
  _connect(monkeypatch, kind, variables)

  def go(name: str) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    return f"{kind}://bucket/{tmp_path.name}/run"

  return go


def _connect(monkeypatch, kind: str, variables: dict[str, str]) -> None:
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  fsspec.get_filesystem_class(kind).clear_instance_cache()


def _copy(url: str) -> pathlib.Path:
  return pathlib.Path(bucket.local(url))


def _train(run: pathlib.Path, until: int, keep: int = 1, version="") -> None:
  """Writes logs and checkpoints as a run does that has got to step `until`."""
  lines = [json.dumps({"step": x}) + "\n" for x in range(until + 1)]
  run.mkdir(parents=True, exist_ok=True)
  (run / "config.json").write_text("{}")
  (run / "metrics.jsonl").write_text("".join(lines))
  step = run / "checkpoints" / str(until)
  (step / "params").mkdir(parents=True)
  (step / "params" / f"data-{version}{until}").write_text(f"{version}{until}")
  (step / "params" / "sha256.json").write_text(f"{version}{until}")
  (step / "_CHECKPOINT_METADATA").write_text("marker")
  (run / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir(exist_ok=True)
  steps = sorted(int(x.name) for x in (run / "checkpoints").glob("[0-9]"))
  for old in steps[1:-keep]:
    shutil.rmtree(run / "checkpoints" / str(old))


def _check(run: pathlib.Path, least: int) -> int:
  """Raises unless a run can resume; returns the step it resumes after."""
  steps = [int(x.name) for x in (run / "checkpoints").glob("[0-9]")]
  for step in steps:
    folder = run / "checkpoints" / str(step) / "params"
    expected = (folder / "sha256.json").read_text()
    assert (folder / f"data-{expected}").read_text() == expected
  lines = (run / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(x)["step"] for x in lines][: max(steps) + 1] == [
    *range(max(steps) + 1)
  ]
  assert max(steps) >= least and 0 in steps
  return max(steps)


def _kill_after(monkeypatch, calls: int) -> None:
  left = iter(range(calls))

  def killing(method):
    def act(*args):
      if next(left, None) is None:
        raise Killed
      return method(*args)

    return act

  for name in ("put", "delete"):
    method = killing(getattr(storage.Bucket, name))
    monkeypatch.setattr(storage.Bucket, name, method)


def _damage(run: pathlib.Path) -> None:
  """Sets the latest checkpoint aside, and saves other ones of steps 2 and 4."""
  (run / "checkpoints" / "4").rename(run / "damaged-4")
  _train(run, 3, keep=3, version="new")


def _save_again(run: pathlib.Path) -> None:
  """Replaces the latest checkpoint by another one of the same step."""
  (run / "checkpoints" / "4").rename(run / "damaged-4")
  _train(run, 4, keep=2, version="new")


@pytest.mark.parametrize(
  "change, least, latest",
  [
    (lambda run: _train(run, 6, keep=2), 4, 6),
    (_damage, 2, 3),
    (_save_again, 2, 4),
  ],
  ids=["next", "earlier", "again"],
)
def test_kill_at_any_call_leaves_a_run_that_resumes(
  machines, change, least, latest
):
  """On another machine too, where the upload may seem not to have begun."""
  for calls in range(100):
    url = f"{machines(f'first-{calls}')}-{latest}-{calls}"
    with bucket.claimed(run := _copy(url)):
      for step in (0, 2, 4):
        _train(run, step, keep=2)
        bucket.upload_run(run)
    change(run)
    with pytest.MonkeyPatch.context() as patch:
      _kill_after(patch, calls)
      try:
        bucket.upload_run(run)
        is_killed = False
      except Killed:
        is_killed = True
    _check(_copy(url), latest)  # on the same machine nothing is lost
    machines(f"second-{calls}")
    resumed = _check(copy := _copy(url), least)
    if not is_killed:
      break
  assert resumed == latest
  assert 3 < calls < 99
  names = {x.name for x in run.iterdir()} - {"damaged-4", ".copy"}
  assert {x.name for x in copy.iterdir()} == names
  assert sorted(bucket._files(copy)) == sorted(bucket._files(run))


@contextlib.contextmanager
def _process(monkeypatch, index: int) -> Iterator[None]:
  """Acts as one of two processes."""
  with monkeypatch.context() as patch:
    patch.setattr(distributed, "count", lambda: 2)
    patch.setattr(distributed, "index", lambda: index)
    yield


def _copies(monkeypatch, url: str) -> list[pathlib.Path]:
  copies = []
  for index in range(2):
    with _process(monkeypatch, index):
      copies.append(pathlib.Path(bucket.local(url, is_workdir=True)))
  return copies


def _train_both(copies: list[pathlib.Path], until: int) -> None:
  """Trains as `_train` does; only the second copy has one of the files."""
  _train(copies[0], until)
  step = copies[1] / "checkpoints" / str(until)
  (step / "params").mkdir(parents=True)
  (step / "params" / f"part-{until}").write_text("part")
  (step / "_CHECKPOINT_METADATA").write_text("another marker")


def _upload_both(monkeypatch, copies: list[pathlib.Path]) -> None:
  with _process(monkeypatch, 0):
    bucket.upload_run(copies[0], is_complete=False)
  with _process(monkeypatch, 1):
    bucket._upload_part(copies[1])
  with _process(monkeypatch, 0):
    bucket.upload_run(copies[0])


def test_kill_leaves_the_files_of_all_processes_or_none(machines, monkeypatch):
  for calls in range(1, 99):
    url = f"{machines(f'first-{calls}')}-{calls}"
    copies = _copies(monkeypatch, url)
    assert copies[0] != copies[1]
    assert {*map(bucket.url, copies)} == {url}
    with _process(monkeypatch, 0), bucket.claimed(copies[0]):
      _train_both(copies, 0)
    assert not bucket._markers(storage.Bucket(url).files())
    _upload_both(monkeypatch, copies)
    _train_both(copies, 2)
    with monkeypatch.context() as patch:
      _kill_after(patch, calls)
      with contextlib.suppress(Killed):
        _upload_both(monkeypatch, copies)
        break
    for resumed in _copies(monkeypatch, url):
      step = _check(resumed, 0)
      assert (resumed / f"checkpoints/{step}/params/part-{step}").exists()
  assert 3 < calls < 99
  folder = copies[0] / "checkpoints" / "2" / "params"
  assert not (folder / "part-2").exists()
  bucket.complete(folder)
  assert (folder / "part-2").exists()
  for resumed in _copies(monkeypatch, url):
    assert _check(resumed, 2) == 2


def test_damaged_copy_is_replaced_if_the_bucket_has_the_checkpoint(machines):
  with bucket.claimed(run := _copy(machines("first"))):
    _train(run, 0)
    _train(run, 2)
  _train(run, 4, keep=2)
  for step, content in ((2, "2"), (4, "damaged")):
    file = run / "checkpoints" / str(step) / "params" / f"data-{step}"
    file.write_text("damaged")
    bucket.complete(file.parent)
    assert file.read_text() == "damaged"
    bucket.complete(file.parent, is_damaged=True)
    assert file.read_text() == content


def test_a_replacement_that_fails_changes_nothing_in_the_bucket(
  machines, monkeypatch
):
  url = machines("first")
  with bucket.claimed(run := _copy(url)):
    _train(run, 0)
    _train(run, 2)
  stored = storage.Bucket(url).files()
  part = run / "checkpoints" / "2" / "params"

  def get_file(source, target):
    pathlib.Path(target).write_text("half of it")
    raise ConnectionResetError

  with monkeypatch.context() as patch:
    patch.setattr(storage.Bucket(url)._files, "get_file", get_file)
    with pytest.raises(Unreachable):
      bucket.complete(part, is_damaged=True)
  bucket.upload_run(run)
  assert storage.Bucket(url).files() == stored
  bucket.complete(part)
  assert _check(run, 2) == 2


def test_steps_not_sent_are_not_lost_to_a_start_of_several_processes(
  machines, monkeypatch
):
  url = machines("first")
  with bucket.claimed(run := _copy(url)):
    _train(run, 0)
  assert _copies(monkeypatch, url)[0] == run
  _train(run, 2)
  with pytest.raises(UserError, match="checkpoint of step 2, which was not s"):
    _copies(monkeypatch, url)
  assert _check(_copy(url), 2) == 2
  bucket.upload_run(run)
  assert _check(_copies(monkeypatch, url)[1], 2) == 2


def test_run_that_lost_its_claim_ends(machines):
  url = machines("first")
  with bucket.claimed(run := _copy(url)):
    _train(run, 0)
  machines("second")
  with bucket.claimed(other := _copy(url)):
    _train(other, 2)
  machines("first")
  _train(run, 4)
  with pytest.raises(UserError, match=r"another run has started in .* since"):
    bucket.upload_run(run)
  assert _check(_copy(url), 2) == 2  # as the bucket, not as it was left


def test_results_of_other_machines_are_added(machines):
  url = machines("first")
  with bucket.claimed(run := _copy(url)):
    _train(run, 0)
  machines("second")
  folder = _copy(url) / "evaluation" / "step-0"
  folder.mkdir(parents=True)
  (folder / "results.json").write_text("{}")
  bucket.upload(folder)
  machines("first")
  _train(run, 2)
  assert (_copy(url) / "evaluation/step-0/results.json").exists()
  assert _check(run, 2) == 2


@pytest.mark.parametrize("answers", [True, False], ids=["503", "gone"])
def test_bucket_out_of_reach_loses_nothing(
  machines, server, monkeypatch, answers
):
  url = machines("first")
  with bucket.claimed(run := _copy(url)):
    _train(run, 0)
  _train(run, 2)
  kind, variables = server
  _retry_at_once(monkeypatch, kind)
  with _unavailable() as busy, monkeypatch.context() as patch:
    port = busy if answers else servers.free_port()
    _connect(patch, kind, servers.environment(kind, port))
    with pytest.raises(Unreachable, match=f"{url} .*: {run} has what"):
      bucket.upload_run(run)
    with pytest.raises(Unreachable, match=f"{url} cannot be read"):
      bucket.local(url)
  _connect(monkeypatch, kind, variables)
  assert _check(_copy(url), 2) == 2
  bucket.upload_run(run)
  machines("second")
  assert _check(_copy(url), 2) == 2


def _retry_at_once(monkeypatch, kind: str) -> None:
  """Makes libraries wait no second between their tries."""
  monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
  place = {"gs": "gcsfs.retry.asyncio", "s3": "s3fs.core.asyncio"}[kind]
  quick = {**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(0)}
  monkeypatch.setattr(place, types.SimpleNamespace(**quick))


class _Unavailable(http.server.BaseHTTPRequestHandler):
  def _answer(self):
    self.send_error(503)

  do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer

  def log_message(self, *unused):
    pass


@contextlib.contextmanager
def _unavailable() -> Iterator[int]:
  """Starts a server that answers every request with 503; yields its port."""
  address = ("localhost", 0)
  with http.server.ThreadingHTTPServer(address, _Unavailable) as started:
    thread = threading.Thread(target=started.serve_forever)
    thread.start()
    try:
      yield started.server_port
    finally:
      started.shutdown()
      thread.join()


def test_file_is_copied_alone(machines, tmp_path):
  """A data set is one file."""
  url = f"{machines('first')}/train.jsonl"
  folder = _copy(machines("first"))
  folder.mkdir()
  for name in ("train.jsonl", "train.jsonl.bak"):
    (folder / name).write_text(name)
  bucket.upload(folder)
  machines("second")
  copy = _copy(url)
  assert copy.read_text() == "train.jsonl"
  assert not copy.with_name("train.jsonl.bak").exists()
  with pytest.raises(UserError, match=r"config.data: there is nothing at .*x"):
    bucket.local(f"{url}x", "config.data")


def test_local_paths_are_left_alone(tmp_path):
  assert bucket.local("") == ""
  assert bucket.local(str(tmp_path)) == str(tmp_path)
  assert bucket.url(tmp_path) == ""
  with bucket.claimed(tmp_path):
    bucket.upload(tmp_path)
  assert not list(tmp_path.iterdir())


def test_missing_package_is_named(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setattr(fsspec, "filesystem", lambda *unused, **options: 1 / 0)
  with pytest.raises(
    UserError, match="gs://bucket/x cannot be read or written"
  ):
    bucket.local("gs://bucket/x")

  def fail(*unused, **options):
    raise ImportError("Please install gcsfs")

  monkeypatch.setattr(fsspec, "filesystem", fail)
  with pytest.raises(UserError, match="needs gcsfs: pip install gcsfs"):
    bucket.local("gs://bucket/x")
