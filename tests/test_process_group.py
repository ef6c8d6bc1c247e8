"""Communication between processes, with threads in their place."""

import collections
from concurrent import futures
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types

import jax
from jax._src import xla_bridge
from jax.experimental import multihost_utils
import numpy as np
import pytest
import yaml

from dppo_jax import data, distributed
from dppo_jax.errors import Unreachable, UserError
from dppo_jax.records import Rollout, Selection
from dppo_jax.rewards.grader import Graded
from dppo_jax.run import preflight, resume
from dppo_jax.step import grade as grading
from tests.helpers import commands

LAUNCH = commands.ROOT / "experiments/launch"


@pytest.fixture
def each(monkeypatch):
  """Calls a function in many threads; returns what each returns or raises."""
  local = threading.local()

  def call(num, function):
    barrier, sent = threading.Barrier(num, timeout=10), {}

    def allgather(x):
      sent[local.index] = x
      barrier.wait()
      stacked = np.stack([sent[i] for i in range(num)])
      barrier.wait()
      return stacked

    def run(index):
      local.index = index
      try:
        return function(index)
      except Exception as error:
        return error

    monkeypatch.setattr(distributed, "count", lambda: num)
    monkeypatch.setattr(
      distributed, "index", lambda: getattr(local, "index", 0)
    )
    monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
    with futures.ThreadPoolExecutor(num) as pool:
      return list(pool.map(run, range(num)))

  return call


@pytest.mark.parametrize("length", [0, 4000, 5000, 300_000])
def test_gather_returns_all_values_of_any_length(each, length):
  values = [{"text": "é" * length}, [1.5, None], True]
  assert each(3, lambda i: distributed.gather(values[i])) == [values] * 3


@pytest.mark.parametrize(
  "kind, others", [(UserError, UserError), (KeyError, RuntimeError)]
)
def test_error_of_one_process_is_raised_in_all(each, kind, others):
  def work(index):
    with distributed.sharing_errors():
      if index == 1:
        raise kind("no such column")
    return "done"

  first, second, third = each(3, work)
  assert isinstance(second, kind)
  for error in (first, third):
    assert isinstance(error, others)
    assert str(error).startswith("process 1: ") and "column" in str(error)
  assert each(2, lambda i: work(0)) == ["done"] * 2


def test_result_and_error_of_the_first_process_reach_all(each):
  calls = []

  @distributed.on_first_process
  def work(problem=""):
    calls.append(distributed.index())
    if problem:
      raise OSError(problem)
    return {"path": "a"}

  assert each(3, lambda i: work()) == [{"path": "a"}] * 3
  first, second = each(2, lambda i: work(problem="full disk"))
  assert isinstance(first, OSError)
  assert str(second) == "process 0: full disk"
  assert calls == [0, 0]
  assert each(1, lambda i: work()) == [{"path": "a"}]


def test_loss_of_another_process_is_recognised(each):
  """JAX raises a ValueError if it is lost during a gather."""
  lost = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: reset")
  gathers = ValueError("UNKNOWN: Gloo AllGather failed: closed by peer")
  full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
  errors = (lost, gathers, full, ValueError("a bug"))
  recognise = lambda i: [distributed.has_lost_another(x) for x in errors]
  assert each(2, recognise)[0] == [True, True, False, False]
  assert not any(each(1, recognise)[0])


def _rows(readers, num_rows):
  """An array of which devices of some processes hold some rows."""
  places = {
    _Device(process): (slice(*rows), slice(None)) for process, rows in readers
  }
  sharding = types.SimpleNamespace(devices_indices_map=lambda shape: places)
  return types.SimpleNamespace(shape=(num_rows, 3), sharding=sharding)


class _Device:
  def __init__(self, process_index):
    self.process_index = process_index


@pytest.mark.parametrize(
  "readers, expected",
  [
    # Two devices of a process hold the same rows.
    ([(0, (0, 2)), (0, (0, 2)), (1, (2, 4)), (1, (2, 4))], [0, 0, 1, 1]),
    # Two processes do.
    ([(0, (0, 4)), (1, (0, 4))], [0, 0, 1, 1]),
    ([(0, (0, 3)), (1, (0, 3)), (2, (3, 4)), (3, (3, 4))], [0, 0, 1, 2]),
  ],
)
def test_each_row_has_one_owner_that_can_read_it(each, readers, expected):
  num = 1 + max(i for i, _ in readers)
  owners = each(num, lambda i: distributed.owners(_rows(readers, 4)).tolist())
  assert owners == [expected] * num


def test_different_flags_are_rejected_by_name(each, tmp_path):
  ours = [commands.config("arithmetic"), commands.config("arithmetic", seed=7)]
  first, second = each(
    2, lambda i: resume.check_processes(ours[i], tmp_path / "run")
  )
  assert "config.seed is 7 but 0 in process 0" in str(second)
  assert str(first).startswith("process 1: config.seed")
  check = lambda i: resume.check_processes(ours[0], tmp_path / str(i))
  assert f"is '{tmp_path}/1' but '{tmp_path}/0' in" in str(each(2, check)[1])
  check = lambda i: resume.check_processes(ours[0], tmp_path)
  assert each(2, check) == [None, None]


def test_copies_of_a_run_that_differ_are_rejected(each, tmp_path, monkeypatch):
  """A bucket may change while one process after another copies it."""
  steps = lambda path: [*range(distributed.index())]
  monkeypatch.setattr(resume.checkpoint, "complete_steps", steps)
  monkeypatch.setattr(resume.bucket, "url", lambda path: "gs://bucket/run")
  c = commands.config("arithmetic")
  errors = each(2, lambda i: resume.check_processes(c, tmp_path))
  assert [type(x) for x in errors] == [Unreachable] * 2
  assert "has changed while processes read" in str(errors[0])


def test_locked_workdir_is_rejected_by_all(each, tmp_path):
  c = commands.config("arithmetic")

  def hold(index):
    with resume.held(tmp_path / "config.json", c):
      return (tmp_path / "config.json").exists()

  assert each(2, hold) == [True, True]
  folder = os.open(tmp_path, os.O_RDONLY)
  fcntl.flock(folder, fcntl.LOCK_EX)
  first, second = each(2, hold)
  os.close(folder)
  assert "another process trains" in str(first)
  assert str(second).startswith("process 0: another process trains")


def test_mesh_without_devices_of_a_process_is_rejected(each):
  mesh = types.SimpleNamespace(
    devices=np.array([_Device(0), _Device(0)]), size=2
  )
  (error, *_) = each(3, lambda i: preflight.check_processes(mesh))
  assert "2 devices has none of process 1, 2: config.mesh.data=-1" in str(error)
  mesh.devices = np.array([_Device(0), _Device(1)])
  assert each(2, lambda i: preflight.check_processes(mesh)) == [None, None]


# Joining the other processes ------------------------------------------------

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
import os, signal, sys
from dppo_jax import main
from dppo_jax import distributed

def work(argv):
  address, index = sys.argv[2], int(sys.argv[4])
  distributed.initialize(address, 2, index)
  distributed.gather(index)
  if index:
    os.kill(os.getpid(), signal.SIGKILL)
  distributed.gather(index)

main.main = work
main.run()
"""


def test_loss_of_another_process_ends_in_one_line():
  codes, errors = _join([0, 1], program=_LOSE)
  assert codes == [os.EX_TEMPFAIL, -signal.SIGKILL]
  line = errors[0].splitlines()[-1]
  assert line.startswith("error: another process has ended or cannot be reac")


def _join(ids, seconds=60, devices=(1, 1), program=_JOIN):
  """Exit codes and errors of some of two processes that join each other."""
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    port = listener.getsockname()[1]
  children = [
    subprocess.Popen(
      [
        *(sys.executable, "-c", program, str(seconds), f"localhost:{port}"),
        *("2", str(i)),
      ],
      env=os.environ
      | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(number)},
      stderr=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      text=True,
    )
    for i, number in zip(ids, devices, strict=False)
  ]
  errors = [child.communicate(timeout=100)[1] for child in children]
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


@pytest.mark.parametrize("name", ["slurm.sh", "tpu_pod.sh"])
def test_launch_scripts_are_bash(name):
  subprocess.run(["bash", "-n", LAUNCH / name], check=True)


def test_skypilot_launch_passes_the_three_flags():
  task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
  assert task["num_nodes"] > 1
  flags = re.findall(r"--(coordinator|num_processes|process_id)=", task["run"])
  assert flags == ["coordinator", "num_processes", "process_id"]


def test_gke_restarts_what_was_stopped_or_lost_a_process_and_no_error():
  text = (LAUNCH / "gke.yaml").read_text()
  for name, value in {"HOSTS": "4", "CHIPS": "4"}.items():
    text = text.replace(f"&{name.lower()} {name}", f"&{name.lower()} {value}")
  jobset = yaml.safe_load(text)
  (job,) = jobset["spec"]["replicatedJobs"]
  spec = job["template"]["spec"]
  assert spec["parallelism"] == spec["completions"]
  (rule,) = spec["podFailurePolicy"]["rules"]
  codes = rule["onExitCodes"]
  assert rule["action"] == "FailJob"
  assert codes["operator"] == "In"
  assert 1 in codes["values"]
  assert not {os.EX_TEMPFAIL, 130, 134, 137, 143} & set(codes["values"])
  (container,) = spec["template"]["spec"]["containers"]
  assert codes["containerName"] == container["name"]


def test_exit_code_is_that_of_a_failing_process():
  done = subprocess.run(
    [sys.executable, LAUNCH / "localhost.py", "--processes=2", "--nonsense"],
    cwd=commands.ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 1
  assert "[process 1] error:" in done.stdout


class _Letters:
  """A grader that counts letters."""

  def grade(self, prompts, completions, answers, columns, **unused):
    values = np.array([len(set(x)) / 3 for x in completions], np.float32)
    counts = collections.Counter(right=int((values == 1).sum()))
    return Graded(values, values.clip(0, 1), counts, {"letters": values})


@pytest.mark.parametrize("lengths", [[3, 2, 4, 1], [3, 2, 0, 0], [0, 0, 0, 0]])
def test_divided_grading_equals_the_full_one(each, lengths):
  """Also if one process has nothing to grade."""
  tokenizer = data.CharacterTokenizer()
  texts = ("1+1=", "2+2=", "3+3=", "4+4=")
  rows = [data.Row(text, text, text[0], "", {}) for text in texts]
  problems = data.prepare("train", rows, tokenizer, 8)
  rng = np.random.default_rng(0)
  lengths = np.repeat(np.array(lengths, np.int32)[:, None], 2, axis=1)
  rollout = Rollout(
    prompt_ids=np.array([2, 0, 3, 1], np.int32),
    tokens=rng.integers(2, 12, (4, 2, 4)).astype(np.int32),
    logprobs=np.zeros((4, 2, 4), np.float32),
    lengths=lengths,
    is_stopped=lengths > 2,
    kept=Selection(lengths[:, 0] > 0, np.ones(4, np.float32)),
    slot_steps=np.int32(9),
    busy_steps=np.int32(8),
  )

  def grade(index):
    return grading.grade(rollout, problems, tokenizer, _Letters())

  (full,) = each(1, grade)
  for graded in each(2, grade):
    np.testing.assert_array_equal(graded.rewards, full.rewards)
    np.testing.assert_array_equal(graded.correct, full.correct)
    assert graded.counts == full.counts
    assert graded.samples == full.samples
