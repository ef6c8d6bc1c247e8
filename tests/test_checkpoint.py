"""Checkpoints: which one is used, which are damaged, which are kept."""

import errno
import json
import pathlib
import shutil
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import pytest

from dppo_jax.errors import UserError
from dppo_jax.records import TrainState
from dppo_jax.run import checkpoint, checkpoint_steps, checksums, resume
from tests.helpers import commands


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


def test_run_may_be_named_with_a_step():
  assert checkpoint_steps.split_step("runs/a") == (pathlib.Path("runs/a"), 0)
  assert checkpoint_steps.split_step("runs/a@20") == (
    pathlib.Path("runs/a"),
    20,
  )
  assert checkpoint_steps.split_step("me@home/a") == (
    pathlib.Path("me@home/a"),
    0,
  )


def test_missing_checkpoint_is_rejected_by_name(tmp_path, three):
  with pytest.raises(UserError, match=r"--workdir: no checkpoint in .* none"):
    checkpoint_steps.find(tmp_path)
  assert (
    checkpoint_steps.find(three) == 4 and checkpoint_steps.find(three, 0) == 0
  )
  with pytest.raises(UserError, match=r"--of: no .* step 3 in .* 0, 2, 4"):
    checkpoint_steps.find(three, 3, "--of")


def test_other_names_next_to_checkpoints_are_no_steps(copy):
  for name in ("4.bak", "best", "²", "02"):
    shutil.copytree(copy / "checkpoints/2", copy / "checkpoints" / name)
  (copy / "checkpoints/7").write_text("a file")
  assert checkpoint_steps.complete_steps(copy) == [0, 2, 4]


# Damage ---------------------------------------------------------------------


def _largest(folder):
  files = (x for x in folder.rglob("*") if x.is_file() and x.name[0] != "s")
  return max(files, key=lambda x: x.stat().st_size)


def _cut(folder):
  file = _largest(folder / "params")
  file.write_bytes(file.read_bytes()[:-20])


def _flip(folder):
  """Flips one bit of the weights, in the middle of their file."""
  file = _largest(folder / "params")
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 16
  file.write_bytes(content)


def _empty(folder):
  shutil.rmtree(folder)
  folder.mkdir()


DAMAGE = {
  "flipped": _flip,
  "cut": _cut,
  "no weights": lambda x: shutil.rmtree(x / "params"),
  "empty": _empty,
  "no checksums": lambda x: (x / "rest/sha256.json").unlink(),
  "no manifest": lambda x: (x / "rest/manifest.ocdbt").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_latest_checkpoint_costs_one_checkpoint(copy, kind):
  DAMAGE[kind](copy / "checkpoints/4")
  with checkpoint.Checkpoints(copy, keep=2) as checkpoints:
    (line,) = checkpoints.recover()
    assert "of step 4 is damaged" in line
    assert checkpoints.latest_step() == 2
    chex.assert_trees_all_equal(checkpoints.restore(2, _state(0)), _state(2))
    checkpoints.save(4, _state(4))  # in its place
  with checkpoint.Checkpoints(copy, keep=2) as checkpoints:
    assert not checkpoints.recover()
    chex.assert_trees_all_equal(checkpoints.restore(4, _state(0)), _state(4))
  assert (copy / "checkpoints/damaged-4").is_dir()


def test_readers_reject_a_damaged_checkpoint_and_move_nothing(copy):
  _flip(copy / "checkpoints/4")
  with checkpoint.Checkpoints(copy, read_only=True) as checkpoints:
    with pytest.raises(UserError, match=r"step 4 in .* is damaged \(params"):
      checkpoints.restore_params(4, _state(0).params)
  assert sorted(x.name for x in copy.iterdir()) == ["checkpoints"]


def test_run_with_only_damaged_checkpoints_ends_in_one_line(copy):
  for step in (0, 2, 4):
    _flip(copy / f"checkpoints/{step}")
  with checkpoint.Checkpoints(copy) as checkpoints:
    with pytest.raises(UserError, match=r"every checkpoint in .*4: .* 0: "):
      checkpoints.recover()
  assert not list(copy.rglob("damaged-*"))


def test_checkpoint_of_another_step_or_run_is_damaged(copy, tmp_path_factory):
  """Each names its run and step; a run without a name, as a copy, has none."""
  for name in ("params", "rest"):
    shutil.rmtree(copy / "checkpoints/4" / name)
    shutil.copytree(
      copy / "checkpoints/2" / name, copy / "checkpoints/4" / name
    )
  other = tmp_path_factory.mktemp("other")
  (other / "config.json").write_text('{"fingerprints.run": "abc"}')
  with checkpoint.Checkpoints(other) as checkpoints:
    checkpoints.save(2, _state(2))
  with checkpoint.Checkpoints(copy, read_only=True) as checkpoints:
    assert checkpoints.corruption(4) == "params: it is of step 2"
    assert not checkpoints.corruption(2)
  shutil.rmtree(copy / "checkpoints/2")
  shutil.copytree(other / "checkpoints/2", copy / "checkpoints/2")
  for name, corruption in {
    "xyz": "params: it is of another run, abc",
    "abc": "",
    "": "",
  }.items():
    (copy / "config.json").write_text(f'{{"fingerprints.run": "{name}"}}')
    with checkpoint.Checkpoints(copy, read_only=True) as checkpoints:
      assert checkpoints.corruption(2) == corruption


def test_deleted_checkpoints_end_the_run_at_the_next_save(copy):
  with checkpoint.Checkpoints(copy, keep=2) as checkpoints:
    checkpoints.save(6, _state(6))
    checkpoints.save(8, _state(8))  # keep=2: the run itself deleted 2 and 4
    checkpoints.wait()
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UserError, match=r"checkpoints/0 was deleted: the run"):
      checkpoints.save(10, _state(10))
  assert not (copy / "checkpoints").exists()


# What is written, when, and for how long ------------------------------------


def test_latest_checkpoints_are_kept(tmp_path):
  with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
    for step in range(5):
      checkpoints.save(step, _state(step))
  assert checkpoint_steps.complete_steps(tmp_path) == [0, 3, 4]


def _evaluated(workdir, metric, values, first=0):
  """Saves steps whose evaluation is due or best, keeping the latest one."""
  with checkpoint.Checkpoints(workdir, 1, metric) as checkpoints:
    if first:
      checkpoints.recover()
    for step, value in enumerate(values, first):
      with (workdir / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}, "eval/accuracy": {value}}}\n')
      is_best = checkpoints.is_best(step, {"eval/accuracy": value})
      if is_best or step % 2 == 0:
        checkpoints.save(step, _state(step))


def test_best_checkpoint_is_kept_and_remembered(tmp_path):
  """Also if it is not due; of equals the first; across a restart."""
  metric = "eval/accuracy"
  _evaluated(tmp_path, metric, [0.1, 0.7, 0.7, 0.3, 0.5])
  assert checkpoint_steps.complete_steps(tmp_path) == [0, 1, 4]
  _evaluated(tmp_path, metric, [0.6, 0.2], first=5)
  assert checkpoint_steps.complete_steps(tmp_path) == [0, 1, 6]
  assert checkpoint_steps.find(tmp_path, "best") == 1
  # The option may change; the lowest score left is that of step 0.
  _evaluated(tmp_path, "-" + metric, [0.4, 0.0, 0.3], first=7)
  assert checkpoint_steps.complete_steps(tmp_path) == [0, 8]
  _evaluated(tmp_path, "-" + metric, [0.5, 1.0, 0.2], first=10)
  assert checkpoint_steps.complete_steps(tmp_path) == [0, 8, 12]
  assert checkpoint_steps.find(tmp_path, "best", best="-" + metric) == 8


def test_best_is_of_the_present_evaluation_sets(tmp_path):
  """Steps 0 to 2 were evaluated on other problems."""
  metric = "eval/accuracy"
  _evaluated(tmp_path, metric, [0.1, 0.7, 0.9])
  changes = {"fingerprints.eval after step 2": "a to b"}
  (tmp_path / "config.json").write_text(json.dumps({"changes": changes}))
  with pytest.raises(UserError, match=r"--step=best: no checkpoint in .* by e"):
    checkpoint_steps.find(tmp_path, "best")
  _evaluated(tmp_path, metric, [0.5, 0.3], first=3)
  assert checkpoint_steps.find(tmp_path, "best") == 3


def test_best_is_of_evaluations_with_as_many_samples_as_the_last():
  """A greedy evaluation is no better than a sampled one."""
  label = lambda accuracy, samples: {
    "evaluation": {"eval/accuracy": accuracy, "eval/samples": samples}
  }
  labels = {6: label(0.3, 0), 0: label(0.9, 4), 4: label(0.5, 0), 2: None}
  assert checkpoint_steps.find_best(labels, "eval/accuracy") == 4


def test_best_of_nothing_is_rejected(three):
  with pytest.raises(UserError, match=r"--step=best: no checkpoint in .* by e"):
    checkpoint_steps.find(three, "best")


def test_best_checkpoint_is_remembered_without_the_metrics(tmp_path):
  _evaluated(tmp_path, "eval/accuracy", [0.1, 0.7, 0.3])
  (tmp_path / "metrics.jsonl").unlink()
  _evaluated(tmp_path, "eval/accuracy", [0.6, 0.5, 0.4], first=3)
  assert checkpoint_steps.complete_steps(tmp_path) == [0, 1, 4]


@pytest.mark.parametrize("file", ["label.json", "sha256.json"])
def test_checkpoint_with_a_damaged_label_is_kept_and_named(tmp_path, file):
  _evaluated(tmp_path, "eval/accuracy", [0.1, 0.7, 0.3])
  path = tmp_path / "checkpoints/1/rest" / file
  content = bytearray(path.read_bytes())
  if file == "label.json":
    content[content.index(b"0.7")] ^= 1  # to 1.7, which no later one exceeds
  else:
    content[content.index(b"label.json") + 14] ^= 1  # its checksum
  path.write_bytes(content)
  assert checkpoint_steps.find(tmp_path, "best") == 2
  with checkpoint.Checkpoints(tmp_path, 1, "eval/accuracy") as checkpoints:
    (warning,) = checkpoints.recover()
    assert "the label of the checkpoint of step 1 in" in warning
    assert checkpoints.is_best(3, {"eval/accuracy": 0.9})
    checkpoints.save(3, _state(3))
  assert checkpoint_steps.complete_steps(tmp_path) == [0, 1, 3]


def test_reader_deletes_nothing(copy):
  with checkpoint.Checkpoints(copy, read_only=True):
    pass
  assert checkpoint_steps.complete_steps(copy) == [0, 2, 4]


# Directories -----------------------------------------------------------------


def test_a_workdir_may_have_any_name(three, tmp_path):
  """Brackets and stars are no pattern."""
  for name in ("a[1]", "*"):
    shutil.copytree(three, tmp_path / name)
    assert checkpoint_steps.complete_steps(tmp_path / name) == [0, 2, 4]
    (tmp_path / name / "checkpoints/5.orbax-checkpoint-tmp").mkdir()
    with checkpoint.Checkpoints(tmp_path / name) as checkpoints:
      assert checkpoints.latest_step() == 4
    assert not [*tmp_path.rglob("*-tmp")]


@pytest.mark.parametrize("kind", ["link", "linked run", "file", "denied"])
def test_checkpoints_that_cannot_be_listed_are_not_absent(
  copy, kind, monkeypatch
):
  """Nothing is written before the error, if a disk is not mounted."""
  folder, workdir = copy / "checkpoints", copy
  if kind == "linked run":
    workdir = copy / "link"
    workdir.symlink_to(copy / "nothing")
  elif kind == "denied":

    def deny(self):
      raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "iterdir", deny)
  else:
    folder.rename(copy / "moved")
    if kind == "link":
      folder.symlink_to(copy / "nothing")
    else:
      folder.write_text("")
  text = "link to nothing" if "link" in kind else "checkpoints cannot be read: "
  with pytest.raises(UserError, match=text):
    resume.check(workdir, commands.config("arithmetic"))


def test_checkpoint_that_cannot_be_read_is_not_damaged(copy, monkeypatch):
  """A network's file system may lose a file for a moment."""

  def lose(*unused):
    raise OSError(errno.ESTALE, "Stale file handle")

  with checkpoint.Checkpoints(copy, keep=2) as checkpoints:
    with monkeypatch.context() as patch:
      patch.setattr(checksums.hashlib, "file_digest", lose)
      with pytest.raises(UserError, match=r"4/params cannot be read: Stale"):
        checkpoints.recover()
    assert not checkpoints.recover() and checkpoints.latest_step() == 4


def test_checkpoint_on_another_disk_is_dropped_there_left_alone(copy):
  moved = copy / "2"
  (copy / "checkpoints/2").rename(moved)
  (copy / "checkpoints/2").symlink_to(moved)
  with checkpoint.Checkpoints(copy) as checkpoints:
    assert not checkpoints.recover()
    checkpoints.save(6, _state(6))
  assert checkpoint_steps.complete_steps(copy) == [0, 6]
  assert sorted(x.name for x in (copy / "checkpoints").iterdir()) == ["0", "6"]
  assert (moved / "params").is_dir()


def test_reader_names_a_checkpoint_that_a_run_has_dropped(copy):
  with checkpoint.Checkpoints(copy, read_only=True) as checkpoints:
    shutil.rmtree(copy / "checkpoints/4")
    with pytest.raises(UserError, match=r"step 4 in .* was deleted meanwhile"):
      checkpoints.restore(4, _state(0))


def test_run_without_its_name_in_the_config_is_recognised(tmp_path):
  c = commands.config("arithmetic")
  resume.write(tmp_path, c)
  name = checkpoint.run_name(tmp_path)
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(0, _state(0))
  content = json.loads((tmp_path / "config.json").read_text())
  del content["fingerprints.run"]
  (tmp_path / "config.json").write_text(json.dumps(content))
  resume.write(tmp_path, c)
  assert name and checkpoint.run_name(tmp_path) == name


def test_checkpoints_left_by_a_kill_are_deleted_at_the_next_save(copy):
  with checkpoint.Checkpoints(copy, keep=1) as checkpoints:
    checkpoints.recover()
    assert checkpoint_steps.complete_steps(copy) == [0, 2, 4]
    checkpoints.save(6, _state(6))
  assert checkpoint_steps.complete_steps(copy) == [0, 6]


_WRITE = """
import pathlib, resource, sys
import jax.numpy as jnp
from dppo_jax.errors import UserError
from dppo_jax.run import checkpoint
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
except UserError as error:
  sys.exit(str(error))
"""


@pytest.mark.parametrize("when", ["again", "at the end"])
def test_full_disk_ends_with_a_clear_message(tmp_path, when):
  """A limit on the size of files stands for a full disk."""
  done = subprocess.run(
    [sys.executable, "-c", _WRITE, tmp_path, when],
    capture_output=True,
    check=False,
    text=True,
  )
  message = (
    f"{tmp_path}/checkpoints cannot be written: File too large. Fix this, then "
    "re-run the command to resume\n"
  )
  # A library may have more to say, as its threads end.
  assert message in done.stderr and "handle" not in done.stderr
  with checkpoint.Checkpoints(tmp_path) as checkpoints:  # there is room again
    assert not checkpoints.recover() and checkpoints.latest_step() == 0
    checkpoints.save(1, _state(1))


def _placed(shape):
  """A state's shapes, and its shardings on a mesh of that shape."""
  kind = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh(shape, ("data", "model"), kind)
  specs = {2: jax.P("data", "model"), 0: jax.P()}
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.NamedSharding(mesh, specs[x.ndim])
    ),
    _state(4),
  )


def test_state_moves_between_meshes(three, tmp_path):
  """From one device to eight, to two by two, to four by two, back to one."""
  workdir = three
  for number, shape in enumerate([(8, 1), (2, 2), (4, 2), (1, 1)]):
    like = _placed(shape)
    with checkpoint.Checkpoints(workdir, read_only=True) as checkpoints:
      state = checkpoints.restore(4, like)
    assert state.params["w"].sharding == like.params["w"].sharding
    chex.assert_trees_all_equal(state, _state(4))
    workdir = tmp_path / str(number)
    with checkpoint.Checkpoints(workdir) as checkpoints:
      checkpoints.save(4, state)
