"""Real processes: how they join, save together, and lose each other."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
from jax._src import xla_bridge
import jax.numpy as jnp
import pytest

from dppo_jax import distributed
from dppo_jax.errors import UserError
from dppo_jax.records import TrainState
from dppo_jax.run import checkpoint

_JOIN = """
import sys
from dppo_jax.errors import Unreachable, UserError
from dppo_jax import distributed

distributed._CONNECT_SECONDS = int(sys.argv[1])
try:
  distributed.initialize(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
except UserError as error:
  sys.exit(f"UserError: {error}")
"""


_LOSE = """
import os, signal, sys, time
from dppo_jax import distributed, main

def work(argv):
  address, index = sys.argv[2], int(sys.argv[4])
  distributed.initialize(address, 3, index)
  distributed.gather(index)
  if index == int(os.environ["KILLED"]):
    os.kill(os.getpid(), signal.SIGKILL)
  if os.environ["WAITS"] == "gather":
    distributed.gather(index)
  time.sleep(60)

main.main = work
main.run()
"""


@pytest.mark.parametrize("killed", [0, 2])
@pytest.mark.parametrize("waits", ["gather", "alone"])
def test_loss_of_another_process_ends_in_one_line(monkeypatch, killed, waits):
  """At once, whether or not it is waited for."""
  monkeypatch.setenv("KILLED", str(killed))
  monkeypatch.setenv("WAITS", waits)
  start = time.monotonic()
  codes, errors = _join([0, 1, 2], program=_LOSE, count=3)
  assert time.monotonic() - start < 50
  assert codes.pop(killed) == -signal.SIGKILL
  assert codes == 2 * [os.EX_TEMPFAIL], errors
  del errors[killed]
  for error in errors:
    (line,) = [x for x in error.splitlines() if x.startswith("error: ")]
    assert line.startswith("error: another process has ended or cannot be re")


def test_process_id_that_is_used_twice_ends_all_in_one_line():
  codes, errors = _join([0, 1, 1], count=3)
  assert codes == [1, 1, 1]
  for error in errors:
    _, line = error.splitlines()
    assert "(two processes have --process_id=1): check --coord" in line


def _join(ids, seconds=60, devices=(1, 1, 1), program=_JOIN, count=2):
  """Exit codes and errors of some of `count` processes that join each other."""
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    port = listener.getsockname()[1]
  children = [
    subprocess.Popen(
      [
        *(sys.executable, "-c", program, str(seconds), f"localhost:{port}"),
        *(str(count), str(i)),
      ],
      env=os.environ
      | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(number)},
      stderr=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      text=True,
    )
    for i, number in zip(ids, devices, strict=False)
  ]
  try:
    errors = [child.communicate(timeout=100)[1] for child in children]
  finally:
    for child in children:
      child.kill()
  return [child.returncode for child in children], errors


@pytest.mark.parametrize("index", [0, 1])
def test_missing_processes_end_the_start_with_a_clear_message(index):
  codes, (error,) = _join([index], seconds=3)
  waits, ends = error.splitlines()
  assert re.fullmatch(
    r"waiting at most 3 s for all processes at --coordinator=local.*", waits
  )
  assert re.fullmatch(r"error: all processes at .* did not connect .*", ends)
  assert codes == [os.EX_TEMPFAIL]  # schedulers start the run again


def test_different_numbers_of_devices_are_rejected_by_name():
  codes, errors = _join([0, 1], devices=(1, 2))
  assert codes == [1, 1]
  for error in errors:
    assert "same number of devices" in error
    assert "1 in process 0" in error and "2 in process 1" in error


@pytest.fixture
def started(monkeypatch):
  """Options of each start of JAX's processes, which does nothing."""
  starts = []
  start = lambda *flags, **options: starts.append(flags)
  monkeypatch.setattr(jax.distributed, "initialize", start)
  monkeypatch.setattr(jax.config, "update", lambda *unused: None)
  monkeypatch.setattr(jax, "devices", lambda: [])
  return starts


@pytest.mark.parametrize(
  "given, problem",
  [
    (("localhost:1", None, 0), "Number of processes must be defined"),
    ((None, 2, None), "coordinator_address should be defined"),
    (("localhost", 2, 1), "check --coordinator=HOST:PORT"),
    (("localhost:1", 2, 2), "process_id=2"),
  ],
)
def test_incomplete_or_wrong_flags_are_rejected(monkeypatch, given, problem):
  monkeypatch.setattr(jax.config, "update", lambda *unused: None)
  # As in a new process: JAX would say first that it is too late.
  monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
  with pytest.raises(UserError, match=f"cannot connect .*{problem}"):
    distributed.initialize(*given)


def test_single_process_starts_nothing(started):
  distributed.initialize()
  distributed.initialize(num_processes=1)
  assert not started
  assert (distributed.count(), distributed.index()) == (1, 0)
  value = object()  # not JSON: nothing is sent
  assert distributed.gather(value) == [value]


@pytest.mark.parametrize(
  "platforms, chips, is_started",
  [
    ("", ["/dev/vfio/0"], True),
    ("", [], False),
    ("cpu", ["/dev/accel0"], False),
  ],
)
def test_hosts_of_a_tpu_slice_find_each_other(
  started, monkeypatch, platforms, chips, is_started
):
  monkeypatch.setenv("JAX_PLATFORMS", platforms)
  monkeypatch.setattr(distributed.glob, "glob", lambda pattern: chips)
  monkeypatch.setattr(
    distributed.importlib.util, "find_spec", lambda name: True
  )
  distributed.initialize()
  assert started == [(None, None, None)] * is_started


# Saving a part each --------------------------------------------------------

_SAVE = """
import os, pathlib, resource, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from dppo_jax import distributed, main
from dppo_jax.records import TrainState
from dppo_jax.run import checkpoint

def placed(values, *axes):
  sharding = NamedSharding(jax.make_mesh((2,), ("d",)), PartitionSpec(*axes))
  return jax.make_array_from_callback(
    values.shape, sharding, lambda i: values[i]
  )

makedirs = os.makedirs

def make_slowly(path, *args, **kwargs):
  if not distributed.index():
    time.sleep(0.2)
  makedirs(path, *args, **kwargs)

def work(argv):
  distributed.initialize(argv[2], 2, int(argv[4]))
  os.makedirs = make_slowly  # the other process is then ahead
  zero = placed(np.array(0))
  weights = {str(i): placed(np.ones((2, 1_000)), "d") for i in range(8)}
  is_full = os.environ["FULL"] == argv[4]
  if os.environ["FULL"]:
    checkpoint._WAIT_SECONDS = 10
  with checkpoint.Checkpoints(pathlib.Path(os.environ["RUN"])) as checkpoints:
    source = pathlib.Path(os.environ["SOURCE"])
    with checkpoint.Checkpoints(source, read_only=True) as reader:
      weights = reader.restore_params(0, weights)
    assert weights["7"].addressable_data(0)[0, 0] == 7
    state = TrainState(zero, zero, weights, weights, ())
    for step in range(5):
      checkpoints.save(step, state)
    checkpoints.wait()
    if is_full:
      limits = 100, resource.RLIM_INFINITY
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints.save(5, state)

main.main = work
main.run()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  """A run of one process, on a disk that all processes see."""
  workdir = tmp_path_factory.mktemp("source")
  weights = {str(i): jnp.full((2, 1_000), float(i)) for i in range(8)}
  state = TrainState(jnp.int32(0), jnp.int32(0), weights, weights, ())
  with checkpoint.Checkpoints(workdir) as checkpoints:
    checkpoints.save(0, state)
  return workdir


@pytest.mark.slow
@pytest.mark.parametrize("full", ["", "0", "1"])
def test_full_disk_of_one_process_ends_all(source, tmp_path, monkeypatch, full):
  """A limit on the size of files stands for a full disk.

  The processes start from the weights of a local run, as by `sft.from_run`.
  """
  monkeypatch.setenv("RUN", str(tmp_path / "run"))
  monkeypatch.setenv("SOURCE", str(source))
  monkeypatch.setenv("FULL", full)
  codes, errors = _join([0, 1], program=_SAVE)
  steps = {x.name for x in tmp_path.glob("run/checkpoints/[0-9]")}
  if not full:
    assert codes == [0, 0], errors
    assert steps == {"0", "5"}
    return
  at_fault, other = int(full), 1 - int(full)
  assert codes[at_fault] == 1, errors[at_fault]
  line = "checkpoints cannot be written: File too large. Fix this"
  assert line in errors[at_fault]
  assert codes[other] == os.EX_TEMPFAIL, errors[other]
  assert "another process did not write its part" in errors[other]
  assert steps == {"0", "4"}
