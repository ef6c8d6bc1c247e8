"""Checkpoints: which is meant, what is damaged, what is kept, where it goes."""

import pathlib
import shutil
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import pytest

from dppo_jax.records import TrainState
from dppo_jax.run import checkpoint, checksums


def _state(step, **params):
  weights = {"w": jnp.arange(64.0).reshape(8, 8) + step, **params}
  moments = {"m": jnp.full((8, 8), float(step))}
  return TrainState(jnp.int32(step), jnp.int32(step), weights, moments, ())


@pytest.fixture(scope="module")
def three(tmp_path_factory):
  """The workdir of a run with checkpoints of steps 0, 2 and 4."""
  workdir = tmp_path_factory.mktemp("three")
  with checkpoint.Checkpoints(workdir, keep=2) as checkpoints:
    for step in (0, 2, 4):
      checkpoints.save(step, _state(step))
  return workdir


@pytest.fixture
def copy(three, tmp_path):
  shutil.copytree(three / "checkpoints", tmp_path / "checkpoints")
  return tmp_path


def test_a_run_may_be_named_with_a_step(tmp_path):
  assert checkpoint.split_step("runs/a") == (pathlib.Path("runs/a"), 0)
  assert checkpoint.split_step("runs/a@20") == (pathlib.Path("runs/a"), 20)
  assert checkpoint.split_step("me@home/a") == (pathlib.Path("me@home/a"), 0)
  named = tmp_path / "a@20"
  named.mkdir()
  assert checkpoint.split_step(str(named)) == (named, 0)
  assert checkpoint.split_step(f"{named}@5") == (named, 5)


def test_a_checkpoint_that_is_not_there_is_refused_by_name(tmp_path, three):
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    with pytest.raises(ValueError, match=r"no checkpoint in .*: there are non"):
      checkpoints.find()
  with checkpoint.Checkpoints(three, read_only=True) as checkpoints:
    assert checkpoints.find() == 4 and checkpoints.find(0) == 0
    with pytest.raises(ValueError, match=r"no checkpoint 3 in .* 0, 2, 4"):
      checkpoints.find(3)


def test_a_file_in_their_place_is_refused_by_name(tmp_path):
  (tmp_path / "checkpoints").touch()
  with pytest.raises(ValueError, match="checkpoints is a file"):
    checkpoint.Checkpoints(tmp_path)


# Damage ---------------------------------------------------------------------


def _largest(folder):
  files = (x for x in folder.rglob("*") if x.is_file() and x.name[0] != "S")
  return max(files, key=lambda x: x.stat().st_size)


def _cut(folder):
  file = _largest(folder / "params")
  file.write_bytes(file.read_bytes()[:-20])


def _flip(folder):
  """One bit of the weights, in the middle of their file."""
  file = _largest(folder / "params")
  found = bytearray(file.read_bytes())
  found[len(found) // 2] ^= 16
  file.write_bytes(found)


def _empty(folder):
  shutil.rmtree(folder)
  folder.mkdir()


DAMAGE = {
  "is not as it was written": _flip,
  "is not as it was": _cut,
  "params: SHA256SUMS is missing": lambda x: shutil.rmtree(x / "params"),
  "SHA256SUMS is missing": _empty,
  "rest: SHA256SUMS is missing": lambda x: (x / "rest/SHA256SUMS").unlink(),
  "manifest.ocdbt is missing": lambda x: (x / "rest/manifest.ocdbt").unlink(),
  "SHA256SUMS is empty": lambda x: (x / "rest/SHA256SUMS").write_text(""),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_damaged_newest_checkpoint_costs_one_checkpoint(copy, reason):
  DAMAGE[reason](copy / "checkpoints/4")
  with checkpoint.Checkpoints(copy, keep=2) as checkpoints:
    (line,) = checkpoints.recover()
    assert "of step 4 is damaged" in line and reason in line
    assert checkpoints.latest_step() == checkpoints.find() == 2
    chex.assert_trees_all_equal(checkpoints.restore(2, _state(0)), _state(2))
    checkpoints.save(4, _state(4))  # in its place
  with checkpoint.Checkpoints(copy, keep=2) as checkpoints:
    assert not checkpoints.recover()
    chex.assert_trees_all_equal(checkpoints.restore(4, _state(0)), _state(4))
  assert (copy / "damaged-4").is_dir()


def test_who_only_reads_passes_a_damaged_one_over_and_moves_nothing(copy):
  _flip(copy / "checkpoints/4")
  with checkpoint.Checkpoints(copy, read_only=True) as checkpoints:
    assert checkpoints.find() == 2
    assert "step 4 is damaged" in checkpoints.passed_over[0]
    with pytest.raises(ValueError, match=r"step 4 in .* is damaged \(params"):
      checkpoints.restore_params(4, _state(0).params)
  assert sorted(x.name for x in copy.iterdir()) == ["checkpoints"]


def test_where_all_are_damaged_one_line_says_so(copy):
  for step in (0, 2, 4):
    _flip(copy / f"checkpoints/{step}")
  with checkpoint.Checkpoints(copy) as checkpoints:
    with pytest.raises(ValueError, match=r"every checkpoint in .*4: .* 0: "):
      checkpoints.recover()
    with pytest.raises(ValueError, match="every checkpoint"):
      checkpoints.find()
  assert not list(copy.glob("damaged-*"))


def test_checksums_are_those_of_sha256sum(tmp_path):
  (tmp_path / "a/b").mkdir(parents=True)
  (tmp_path / "a/b/file").write_bytes(b"abc")
  checksums.write(tmp_path)
  digest, name = (tmp_path / checksums.NAME).read_text().split()
  # FIPS 180-2, appendix B.1.
  assert digest.startswith("ba7816bf8f01cfea") and name == "a/b/file"
  assert not checksums.flaw(tmp_path)


# What is written, when, and for how long ------------------------------------


def test_what_is_kept_and_when_a_checkpoint_is_due(tmp_path):
  with checkpoint.Checkpoints(
    tmp_path, keep=2, keep_every=3, every=2
  ) as checkpoints:
    assert [step for step in range(1, 6) if checkpoints.is_due(step)] == [2, 4]
    for step in range(8):
      checkpoints.save(step, _state(step))
    checkpoints.wait()
    assert not checkpoints.is_due(7)
  left = {int(x.name) for x in (tmp_path / "checkpoints").iterdir()}
  assert left == {0, 3, 6, 7}


def test_a_clock_asks_for_a_checkpoint(three):
  due = {
    minutes: checkpoint.Checkpoints(three, minutes=minutes).is_due(5)
    for minutes in (0.0, 1e-6, 60.0)
  }
  assert due == {0.0: False, 1e-6: True, 60.0: False}


_WRITE = """
import pathlib, resource, sys
import jax.numpy as jnp
from dppo_jax import checkpoint
from dppo_jax.records import TrainState
from dppo_jax.run import compile_cache

compile_cache.quiet_libraries()
state = lambda x: TrainState(jnp.int32(0), jnp.int32(0), {"w": x}, (), ())
try:
  with checkpoint.Checkpoints(pathlib.Path(sys.argv[1])) as checkpoints:
    checkpoints.save(0, state(jnp.ones(8)))
    checkpoints.wait()
    limits = (20_000, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints.save(1, state(jnp.sin(jnp.arange(100_000.0))))
    if sys.argv[2] == "again":
      checkpoints.save(2, state(jnp.ones(8)))
except ValueError as error:
  sys.exit(str(error))
"""


@pytest.mark.parametrize("how", ["again", "at the end"])
def test_a_disk_that_takes_no_more_is_told_in_a_line(tmp_path, how):
  """A limit of files' sizes stands for it: a test can set that."""
  done = subprocess.run(
    [sys.executable, "-c", _WRITE, tmp_path, how],
    capture_output=True,
    check=False,
    text=True,
  )
  said = (
    f"no checkpoint can be written in {tmp_path}/checkpoints: File too large. "
    "The newest whole one is that of step 0: once that is mended, the same "
    "command goes on\n"
  )
  # A library may have more to tell, as its threads end.
  assert done.stderr.endswith(said) and "handle" not in done.stderr
  with checkpoint.Checkpoints(tmp_path) as checkpoints:  # there is room again
    assert not checkpoints.recover() and checkpoints.latest_step() == 0
    checkpoints.save(1, _state(1))


def _placed(shape):
  """A state's shapes and where its arrays go on a mesh of that shape."""
  kind = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh(shape, ("data", "model"), kind)
  specs = {2: jax.P("data", "model"), 0: jax.P()}
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.NamedSharding(mesh, specs[x.ndim])
    ),
    _state(4),
  )


def test_a_state_goes_from_devices_to_other_devices(three, tmp_path):
  """From one to eight, to two by two, to four by two and back to one."""
  workdir = three
  for number, shape in enumerate([(8, 1), (2, 2), (4, 2), (1, 1)]):
    like = _placed(shape)
    with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
      found = checkpoints.restore(4, like)
    assert found.params["w"].sharding == like.params["w"].sharding
    chex.assert_trees_all_equal(found, _state(4))
    workdir = tmp_path / str(number)
    with checkpoint.Checkpoints(workdir) as checkpoints:
      checkpoints.save(4, found)
