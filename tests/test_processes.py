"""Several processes together have the results of one process."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from dppo_jax import train
from dppo_jax.run import checkpoint, setup
from dppo_jax.step import abstract_values
from dppo_jax.step.clock import StageClock
from tests.helpers import commands, one_process

pytestmark = pytest.mark.slow

# One compiled stage of decoding, rows of which each device has one.
OPTIONS = {
  "model.shape.layers": 1,
  "model.shape.embed": 32,
  "model.shape.mlp": 32,
  "model.shape.head_dim": 8,
  "data.train": "arithmetic:40:1",
  "data.eval": "",
  "data.prompts_per_step": 8,
  "rollout.group_size": 4,
  "rollout.max_tokens": 8,
  "rollout.num_slots": 2,
  "pack.row_length": 32,
  "pack.rows_per_micro": 1,
  "optimizer.learning_rate": 1e-2,
  "sft.steps": 0,
  "log.writers": "",
}

REWARD = """
import json, os, pathlib, signal

HERE = pathlib.Path(__file__).parent

def noise(prompts, completions):
  lines = [json.dumps(pair) for pair in zip(prompts, completions)]
  with open(HERE / "seen.jsonl", "a") as file:
    file.write("".join(line + chr(10) for line in lines))
  try:
    (HERE / "stop").rmdir()  # which one process does first
    os.kill(os.getppid(), signal.SIGTERM)
  except FileNotFoundError:
    pass
  # Some groups have variance. Which the second process has in step 2, and the
  # first in step 3, is shown in samples.jsonl.
  return [
    sum(map(ord, text)) % 4 / 4 if prompt[0] in "57" else 0.0
    for prompt, text in zip(prompts, completions)
  ]
"""


def _launcher() -> types.ModuleType:
  path = commands.ROOT / "experiments/launch/localhost.py"
  spec = importlib.util.spec_from_file_location("localhost", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class _Folder:
  """A run, the reward function that it calls, and all that this has seen."""

  def __init__(self, path: pathlib.Path, method: str = "dppo"):
    self.path, self.workdir = path, path / "run"
    self._method = method
    (path / "reward.py").write_text(REWARD)

  def _flags(self, steps: int, data: int, model: int) -> list[str]:
    options = OPTIONS | {
      "reward.functions": f"{self.path / 'reward.py'}:noise",
      "steps": steps,
      "mesh.data": data,
      "mesh.model": model,
    }
    return [
      f"--config={commands.ROOT}/configs/arithmetic.py:{self._method}",
      *(f"--config.{name}={value}" for name, value in options.items()),
    ]

  def config(self, steps: int):
    return commands.parse(self._flags(steps, data=1, model=1))

  def alone(self, steps: int) -> None:
    """Trains in this process, on one device."""
    train.run(self.config(steps), self.workdir)

  def together(self, steps: int, data: int, model: int = 1, **env: str):
    """Trains in two processes of two devices; exit codes and outputs."""
    program = commands.ROOT / "tests/helpers/one_process.py"
    paths = [str(commands.ROOT), os.environ.get("PYTHONPATH", "")]
    before = dict(os.environ)
    os.environ.update(env, PYTHONPATH=os.pathsep.join(paths))
    try:
      processes = _launcher().start(
        [
          *(sys.executable, "-P", str(program)),
          *self._flags(steps, data, model),
          f"--workdir={self.workdir}",
        ],
        *(2, 2),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
    finally:
      os.environ.clear()
      os.environ.update(before)
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    return [process.returncode for process in processes], outputs

  def seen(self) -> list[str]:
    return sorted((self.path / "seen.jsonl").read_text().splitlines())

  def lines(self, name: str) -> list[dict]:
    text = (self.workdir / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]

  def params(self, step: int):
    """The weights of a step, on one device."""
    run = setup.setup_run(self.config(steps=step))
    with checkpoint.Checkpoints(self.workdir, read_only=True) as checkpoints:
      return checkpoints.restore_params(
        step, abstract_values.abstract_params(run.spec)
      )


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
  """Four steps alone; and one alone, two together, interrupted, one alone."""
  alone = _Folder(tmp_path_factory.mktemp("alone"))
  alone.alone(steps=4)
  shared = _Folder(tmp_path_factory.mktemp("shared"))
  shared.alone(steps=1)
  (shared.path / "stop").mkdir()
  stopped = shared.together(steps=3, data=4)
  with checkpoint.Checkpoints(shared.workdir, read_only=True) as checkpoints:
    newest = checkpoints.latest_step()
  finished = shared.together(steps=3, data=4)
  shared.alone(steps=4)
  return types.SimpleNamespace(
    alone=alone, shared=shared, stopped=stopped, newest=newest, done=finished
  )


def _assert_same_weights(alone: _Folder, shared: _Folder, step: int):
  """Up to the order of sums."""
  first, one, other = alone.params(0), alone.params(step), shared.params(step)
  flat = lambda tree: np.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
  first, one, other = map(flat, (first, one, other))
  moved = np.linalg.norm(one - first)
  assert moved > 0.1
  assert np.linalg.norm(other - one) < 1e-3 * moved


def _kept(line: dict) -> dict:
  """Values that depend neither on the machine nor on the device count."""
  differs = ("seconds", "compiles", "pack/", "slot_util", "micro_batches")
  return {
    name: value
    for name, value in line.items()
    if not any(part in name for part in differs)
  }


def test_two_processes_sample_the_tokens_of_one(dense):
  assert len(dense.alone.seen()) == 4 * 8 * 4
  assert dense.shared.seen() == dense.alone.seen()


def test_two_processes_train_as_one_does(dense):
  _assert_same_weights(dense.alone, dense.shared, step=4)


def test_two_processes_write_the_files_of_one(dense):
  """Each line appears once, with the texts that the other process graded."""
  for name in ("samples", "metrics"):
    one, other = (x.lines(name) for x in (dense.alone, dense.shared))
    assert [line["step"] for line in other] == [line["step"] for line in one]
    for line, same in zip(map(_kept, one), map(_kept, other), strict=True):
      about = lambda x: (
        pytest.approx(x, rel=1e-3, abs=1e-5) if isinstance(x, float) else x
      )
      assert same == {name: about(x) for name, x in line.items()}
  assert {x.name for x in dense.shared.workdir.iterdir()} == {
    x.name for x in dense.alone.workdir.iterdir()
  }


def test_a_signal_to_one_process_stops_both_after_the_same_step(dense):
  codes, (first, second) = dense.stopped
  assert codes == [130, 130]
  assert dense.newest == 2
  assert "stopped after step 2; re-run the same command to resume" in first
  waits, *stops = second.split("\n", 1)
  assert waits.startswith("waiting at most 300 s for all processes at ")
  assert "".join(stops).strip() in (
    "",
    "stopping; a second signal exits at once",
  )


def test_same_command_resumes_and_only_the_first_process_prints(dense):
  codes, (first, second) = dense.done
  assert codes == [0, 0]
  assert "resuming after step 2" in first
  assert "report:" in first
  assert second.startswith("waiting at most") and second.count("\n") == 1


def test_experts_on_two_devices_of_each_of_two_processes(
  tmp_path_factory, monkeypatch
):
  """Each process holds half of the prompts; both its devices hold them.

  The automatic budget uses the measurements of the first process.
  """
  describe = one_process.with_experts(setup.describe_model)
  monkeypatch.setattr(setup, "describe_model", describe)
  monkeypatch.setattr(StageClock, "metrics", one_process.own_clock)
  alone = _Folder(tmp_path_factory.mktemp("experts_alone"), "neyman")
  config = alone.config(steps=3)
  config.pack.rows_per_micro = 2  # as on two groups of devices
  train.run(config, alone.workdir)
  shared = _Folder(tmp_path_factory.mktemp("experts_shared"), "neyman")
  codes, _ = shared.together(steps=3, data=2, model=2, EXPERTS="1")
  assert codes == [0, 0]
  assert shared.seen() == alone.seen()
  one, other = (
    [x["budget/completions"] for x in y.lines("metrics")[-2:]]
    for y in (alone, shared)
  )
  assert one == other and one[1] < 0.9
  _assert_same_weights(alone, shared, step=3)
