"""Checkpoints in a bucket, on a real server: what is kept, damaged, claimed."""

import os
import pathlib

import fsspec
import pytest

from dppo_jax.errors import UserError
from dppo_jax.files import bucket
from dppo_jax.run import checkpoint, checkpoint_steps, resume
from tests.helpers import commands
from tests.helpers.bucketed import (
  check,
  damage,
  delete,
  go,
  log,
  objects,
  state,
  train,
)

pytestmark = pytest.mark.slow


def test_policy_decides_what_a_bucket_keeps(url):
  train(bucket.workdir(url), 0, 2, 4, 6, 8, keep=2, best="score")
  check(url, 0, 4, 6, 8)
  assert not train(go(url), 10, best="score")
  check(url, 0, 4, 10)


# What may disappear ----------------------------------------------------------


def test_local_files_of_a_run_may_be_deleted(url):
  """A user may free space, during the run and after it."""
  workdir = bucket.workdir(url)
  train(workdir, 0, 2)
  stored = objects(url)
  for file in workdir.rglob("*"):
    file.unlink()
  bucket.send(workdir)
  assert objects(url) == stored
  train(go(url), 4)
  check(url, 0, 4)


def test_objects_that_are_gone_delete_no_local_file(url, tmp_path):
  """Neither those of a run, nor the copy of a model."""
  workdir = bucket.workdir(url)
  train(workdir, 0, 2)
  model = pathlib.Path(bucket.local(url, names=["metrics.jsonl"]))
  files = {x: x.read_bytes() for x in (tmp_path / "cache").rglob("*.jsonl")}
  assert len(files) == 2
  delete(url)
  assert checkpoint_steps.complete_steps(go(url)) == []
  with pytest.raises(
    UserError, match=f"config.data: there is nothing at {url}"
  ):
    bucket.local(url, "config.data")
  assert (model / "metrics.jsonl").exists()
  assert all(path.read_bytes() == files[path] for path in files)


def test_lost_markers_end_the_start_and_delete_nothing(url):
  train(bucket.workdir(url), 0, 2, 4, keep=2)
  delete(url, "commit_success.txt")
  stored = objects(url)
  with pytest.raises(
    UserError, match=r"has files of step 2, 4 but no commit_s"
  ):
    train(go(url), 0)
  with pytest.raises(UserError, match="but no commit_s"):
    resume.check(go(url), commands.config("arithmetic"))
  stored.pop("lease.json")
  assert stored.items() <= objects(url).items()


def test_changed_times_change_nothing(url):
  """Copying a directory or restoring a backup does so."""
  workdir = bucket.workdir(url)
  train(workdir, 0, 2)
  stored = objects(url)
  for file in workdir.rglob("*"):
    os.utime(file, (1, 1))
  bucket.send(workdir)
  assert objects(url) == stored


def test_files_below_a_run_that_others_write_are_left_alone(url):
  """A run below it, an export, and notes of the user's."""
  train(bucket.workdir(url), 0)
  others = [f"{url}/{x}" for x in ("notes.txt", "sub/metrics.jsonl", "x/y/z")]
  server = fsspec.filesystem("gs")
  for other in others:
    server.pipe(other, b"old")
  workdir = go(url)
  with bucket.claimed(workdir):
    bucket.send(workdir)
    for other in others:
      server.pipe(other, b"new")
    log(workdir, 1)
  assert [server.cat(x) for x in others] == [b"new"] * 3
  assert not (workdir / "sub").exists()
  assert not (workdir / "notes.txt").exists()


# Damage -----------------------------------------------------------------------


def test_damaged_latest_checkpoint_is_set_aside(url):
  train(bucket.workdir(url), 0, 2, 4, keep=2)
  damage(url, "4/params/w/0.0")
  with checkpoint.Checkpoints(go(url), read_only=True) as checkpoints:
    assert checkpoints.corruption(4) == "params: w/0.0 has changed"
  (warning,) = train(go(url), 4, keep=2)
  assert "step 4 is damaged (params: w/0.0 has changed)" in warning
  check(url, 0, 2, 4)


def test_damaged_older_checkpoint_replaces_nothing(url):
  train(bucket.workdir(url), 0, 2, 4, keep=2)
  damage(url, "2/params/w/0.0")
  stored = objects(url)
  assert not train(go(url), 6, keep=3)
  kept = {x: y for x, y in stored.items() if x.startswith("checkpoints/")}
  assert kept.items() <= objects(url).items()


def test_checkpoint_with_a_damaged_label_is_kept_and_named(url):
  train(bucket.workdir(url), 0, 4, 6, best="score")
  label = fsspec.filesystem("gs").cat(f"{url}/checkpoints/4/rest/label.json")
  assert b'"score": 4.0' in label
  changed = label.replace(b'"score": 4.0', b'"score": -9.0')
  fsspec.filesystem("gs").pipe(f"{url}/checkpoints/4/rest/label.json", changed)
  (warning,) = train(go(url), 8, best="score")
  assert "label of the checkpoint of step 4" in warning
  assert checkpoint_steps.complete_steps(go(url)) == [0, 4, 8]


def test_checkpoint_that_is_marked_but_lacks_a_file_is_set_aside(url):
  for step, name in ((2, "params/w/0.0"), (4, "rest/md5.json")):
    train(bucket.workdir(url), 0, step)
    bucket._urls.clear()
    delete(url, f"checkpoints/{step}/{name}")
    (warning,) = train(go(url))
    assert f"step {step} is damaged ({name.partition('/')[0]}: " in warning
    check(url, 0)


def test_checkpoint_whose_older_label_has_no_checksum_is_kept(url):
  train(bucket.workdir(url), 0, 4, 6, best="score")
  delete(url, "checkpoints/4/rest/md5.json")
  (warning,) = train(go(url), 8, best="score")
  assert "label of the checkpoint of step 4" in warning
  assert checkpoint_steps.complete_steps(go(url)) == [0, 4, 8]


def test_checkpoint_that_was_copied_in_parts_is_intact(gs, url, monkeypatch):
  """Some tools compose large objects, which then have no MD5."""
  train(bucket.workdir(url), 0, 2)
  server, find = fsspec.filesystem("gs"), fsspec.filesystem("gs").find
  without = lambda info: {k: x for k, x in info.items() if k != "md5Hash"}
  monkeypatch.setattr(
    server,
    "find",
    lambda *args, **kwargs: {
      name: without(x) for name, x in find(*args, **kwargs).items()
    },
  )
  assert not train(go(url))
  damage(url, "2/params/w/0.0")
  (warning,) = train(go(url))
  assert "w/0.0 has changed" in warning


def test_local_checkpoint_that_was_copied_to_a_bucket_is_intact(url, tmp_path):
  """Its checksums are SHA-256, which the server does not have."""
  train(bucket.workdir(url), 0, 2)
  delete(url, "checkpoints/2/")
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    for step in (0, 2):
      checkpoints.save(step, state(step))
  server, there = fsspec.filesystem("gs"), f"{url}/checkpoints"
  server.put(str(tmp_path / "checkpoints/2"), there, recursive=True)
  server.pipe(f"{there}/2/commit_success.txt", b"")
  assert not train(go(url), 4, keep=2)
  check(url, 0, 2, 4)
  name = next(x for x in objects(url) if "/2/params/d/" in f"/{x}")
  damage(url, name.removeprefix("checkpoints/"))
  with checkpoint.Checkpoints(go(url), read_only=True) as checkpoints:
    assert checkpoints.corruption(2).endswith("has changed")


@pytest.mark.parametrize("answer", [b"<html>", FileNotFoundError("404")])
def test_wrong_answer_of_the_server_is_no_damage(url, monkeypatch, answer):
  train(bucket.workdir(url), 0, 2)

  def read(path):
    if isinstance(answer, Exception):
      raise answer
    return answer

  with monkeypatch.context() as patch:
    patch.setattr(fsspec.filesystem("gs"), "cat_file", read)
    with pytest.raises(UserError, match="cannot be read or written"):
      train(go(url))
  assert not train(go(url), 4, keep=2)
  check(url, 0, 2, 4)


def test_folders_that_a_console_makes_are_no_objects(url):
  """Empty objects whose names end in a slash."""
  places = ("", "checkpoints/", "checkpoints/2/", "evaluation/")
  server = fsspec.filesystem("gs")
  for place in places[:2]:
    server.pipe_file(f"{url}/{place}", b"")
  assert not train(bucket.workdir(url), 0, 2)
  for place in places:
    server.pipe_file(f"{url}/{place}", b"")
  check(url, 0, 2)
  assert not train(go(url), 4)
  check(url, 0, 4)


def test_lease_of_a_run_that_has_ended_is_replaced(url):
  for lease in (b"other", b"", b"\xff"):
    fsspec.filesystem("gs").pipe(f"{url}/lease.json", lease)
    train(go(url), 0)
    check(url, 0)


# Runs that compete ------------------------------------------------------------


def test_run_that_lost_its_lease_ends(url):
  workdir = bucket.workdir(url)
  lost = r"another run has started in gs://"
  with pytest.raises(UserError, match=lost), bucket.claimed(workdir):
    log(workdir, 0)
    bucket.send(workdir)
    with checkpoint.Checkpoints(workdir) as checkpoints:
      checkpoints.save(0, state(0))
      checkpoints.wait()
      train(go(url), 2)
      bucket._urls[workdir] = url
      with pytest.raises(UserError, match=lost):
        checkpoints.save(4, state(4))
      log(workdir, 4)
      with pytest.raises(UserError, match=lost):
        bucket.send(workdir)
  check(url, 0, 2)


def test_run_that_lost_its_lease_deletes_nothing(url):
  workdir = bucket.workdir(url)
  train(workdir, 0, 2)
  lost = r"another run has started in gs://"
  with pytest.raises(UserError, match=lost), bucket.claimed(workdir):
    with checkpoint.Checkpoints(workdir) as checkpoints:
      log(workdir, 4)
      bucket.send(workdir)
      checkpoints.save(4, state(4))
      checkpoints._checkpointer.wait_until_finished()
      fsspec.filesystem("gs").pipe(f"{url}/lease.json", b"other")
  check(url, 0, 2, 4)


def test_checkpoint_of_a_run_that_loses_its_lease_meanwhile_is_not_valid(url):
  workdir = bucket.workdir(url)
  with bucket.claimed(workdir), checkpoint.Checkpoints(workdir) as checkpoints:
    log(workdir, 0)
    checkpoints.save(0, state(0))
    checkpoints.wait()
    checkpoints._prepare = lambda step: None
    fsspec.filesystem("gs").pipe(f"{url}/lease.json", b"other")
    checkpoints.save(4, state(4))
    with pytest.raises(UserError, match=r"another run has started in gs://"):
      checkpoints.wait()
    del bucket._leases[workdir]
  assert checkpoint_steps.complete_steps(workdir) == [0]
