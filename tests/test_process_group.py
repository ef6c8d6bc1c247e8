"""Communication between processes, with threads in their place."""

import collections
from concurrent import futures
import fcntl
import os
import threading
import types

import jax
from jax.experimental import multihost_utils
import numpy as np
import pytest

from dppo_jax import data, distributed, train
from dppo_jax.errors import UserError
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


def test_callback_that_fails_in_one_process_ends_all(each):
  def callback(step, info, state):
    if distributed.index() == 1:
      raise KeyError("boom")

  grader = types.SimpleNamespace(specs=())
  session = types.SimpleNamespace(callbacks=[callback], grader=grader)
  info = types.SimpleNamespace(metrics=lambda specs: {})
  log = lambda index: train._Session._log(session, 1, None, info, {})
  first, second, third = each(3, log)
  assert isinstance(second, KeyError)
  for error in (first, third):
    assert isinstance(error, RuntimeError) and "process 1: 'boom'" in str(error)


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


def test_locked_workdir_is_rejected_by_all(each, tmp_path):
  c = commands.config("arithmetic")

  def hold(index):
    with resume.held(tmp_path, c):
      return index

  assert each(2, hold) == [0, 1]
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
    slot_steps=np.float32(9),
  )

  def grade(index):
    return grading.grade(rollout, problems, tokenizer, _Letters())

  (full,) = each(1, grade)
  for graded in each(2, grade):
    np.testing.assert_array_equal(graded.rewards, full.rewards)
    np.testing.assert_array_equal(graded.correct, full.correct)
    assert graded.counts == full.counts
    assert graded.samples == full.samples
