"""The run that `kill` disturbs: its config, its faults and its results."""

from collections.abc import Callable
import contextlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp

from dppo_jax import config, distributed, train
from dppo_jax.errors import UserError
from dppo_jax.files import bucket, storage
from dppo_jax.metrics import report
from dppo_jax.run import checkpoint, checkpoint_steps, checksums, compile_cache
from dppo_jax.step import grade, programs, runtime_checks, train_step
from tests.helpers import events, servers

STEPS = 6
# Functions in which a run is killed, and at which call.
PLACES = {
  "fetch": (bucket, "_fetch", 2),
  "first logs": (storage, "put", 3),
  "commit": (bucket, "check_lease", 5),
  "last logs": (storage, "put", 10),
  "compiling": (programs, "compile_programs", 1),
  "rollout": (grade, "grade", 3),
  "update": (runtime_checks, "check_update", 3),
  "checkpoint": (checksums, "write", 2),
  "deletion": (checkpoint.Checkpoints, "_delete", 4),
  "report": (report, "write", 1),
}
# Faults that end a run with an error, and the expected messages.
FAULTS = {
  "NaN": "update of step [2-4] made .* NaN: they are not saved",
  "full disk": "(metrics|samples|completions|checkpoints).*: File too large",
}


# Options with `--adapters`; the evaluated metric changes in each step.
ADAPTERS = {
  "lora.rank": 2,
  "data.eval": "arithmetic",
  "data.eval_limit": 8,
  "eval.every": 1,
  "checkpoint.best": "-eval/tokens",
}
more: dict[str, object] = {}
buckets: list[str] = []  # the one to train in, with `--bucket`


def make_config(num_devices: int = 1) -> config.Config:
  """A model of a few thousand weights, rewarded for short completions."""
  c = config.Config()
  if more:
    config.use_method(c, "greso")
  elif num_devices > 1:
    config.use_method(c, "dppo")  # less to compile, in each process
  else:
    config.use_method(c, "neyman")
    c.method.args["update_cost"] = 0.5  # measured times would differ
  settings = {
    "steps": STEPS,
    "model.shape.layers": 1,
    "model.shape.embed": 16,
    "model.shape.mlp": 32,
    "model.shape.head_dim": 8,
    "data.train": "arithmetic:20:1",
    "data.prompts_per_step": 8,
    "data.eval": "",
    "rollout.group_size": 4,
    "rollout.max_tokens": 8,
    "rollout.num_slots": 4,
    "pack.row_length": 24,
    "pack.rows_per_micro": 8,
    "optimizer.learning_rate": 1e-2,
    "reward.overlong_tokens": 8,
    "checkpoint.every": 2,
    "log.writers": "tensorboard,completions",
    "mesh.data": num_devices,
  }
  c.objective.args["beta"] = 0.04  # the reference is read from step 0
  for name, value in (settings | more).items():
    config.assign(c, name, value)
  return c


def run(workdir: pathlib.Path, place: str = "", pause: float = 0.0) -> None:
  """Trains, and kills itself at `place` if given; else pauses at each place."""
  for name, (module, function, number) in PLACES.items():
    last = number if name == place else 0
    setattr(module, function, _passing(getattr(module, function), last, pause))
  train.run(make_config(jax.device_count()), local(workdir))


def places(in_bucket: bool) -> dict[str, tuple]:
  """Returns the places to kill a run at, in the order in which it gets there.

  With a bucket these are its own: what else a run does, it does in its copy.
  """
  of_bucket = storage, bucket, checkpoint.Checkpoints
  is_of_bucket = lambda place: place[0] in of_bucket
  return {k: x for k, x in PLACES.items() if is_of_bucket(x) == in_bucket}


def local(workdir: pathlib.Path) -> pathlib.Path:
  """Returns the directory of a run: with a bucket, what it has locally."""
  if not buckets:
    return workdir
  os.environ["XDG_CACHE_HOME"] = str(workdir)
  return bucket.workdir(f"{buckets[0]}{workdir}")


def use_bucket(stack: contextlib.ExitStack) -> None:
  """Makes all later runs train in a bucket."""
  os.environ |= stack.enter_context(servers.running("gs"))
  buckets.append("gs://bucket")
  storage.SECONDS = 1200  # of a machine that does other work


def change_machine(workdir: pathlib.Path) -> None:
  """Leaves of a run only what is in its bucket, if it has one."""
  if buckets:
    shutil.rmtree(workdir, ignore_errors=True)


def run_alone(num_devices: int, *args) -> None:
  """`run` as the only process of several devices."""
  jax.config.update("jax_num_cpu_devices", num_devices)
  run(*args)


def run_one_of(port: int, count: int, index: int, *args) -> None:
  """`run` as one of several processes of one device each."""
  distributed.initialize(f"localhost:{port}", count, index)
  run(*args)


def fail(workdir: pathlib.Path, fault: str, message: str) -> None:
  """Trains with a fault that must end in an error with this message."""
  {"NaN": _poison, "full disk": _fill_disk}[fault](workdir)
  try:
    train.run(make_config(), workdir)
  except (OSError, UserError) as error:
    assert re.search(message, str(error)), error
    return
  raise AssertionError("the run ended without an error")


def _poison(workdir: pathlib.Path) -> None:
  """Destroys the weights in the second step."""
  collect, passed = train_step.TrainStep.collect, []

  def act(*args):
    state, experience = collect(*args)
    passed.append(1)
    if len(passed) == 2:
      nan = jax.tree.map(lambda x: x * np.nan, state.params)
      state = state.replace(params=nan)
    return state, experience

  train_step.TrainStep.collect = act


def _fill_disk(workdir: pathlib.Path) -> None:
  """Limits the size of files from the end of the first step on."""
  checked, passed = runtime_checks.check_update, []

  def act(*args):
    size = (workdir / "metrics.jsonl").stat().st_size
    if not passed:
      limits = (size + 100, resource.RLIM_INFINITY)
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    passed.append(1)
    return checked(*args)

  runtime_checks.check_update = act


def _passing(function: Callable, last: int, pause: float) -> Callable:
  passed = []

  def act(*args, **kwargs):
    passed.append(1)
    if len(passed) == last:
      os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(pause)
    return function(*args, **kwargs)

  return act


# Results of a run -----------------------------------------------------------


def outcome(workdir: pathlib.Path) -> dict[str, object]:
  """All results of a run except for measured times."""
  folder = bucket.place(workdir.absolute()) / "checkpoints"
  items = [f"{STEPS}/params", f"{STEPS}/rest"]
  items += ["0/frozen"] * checkpoint.has_adapters(workdir)
  with ocp.StandardCheckpointer() as checkpointer:
    state = {}
    for item in items:
      saved = checkpointer.metadata(folder / item).item_metadata.tree
      like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), saved)
      state[item] = checkpointer.restore(folder / item, like)
  is_timed = lambda name: "seconds" in name or name == "update/compiles"
  lines = {
    name: [
      {k: x for k, x in json.loads(line).items() if not is_timed(k)}
      for line in (workdir / name).read_text().splitlines()
    ]
    for name in (
      *("metrics.jsonl", "samples.jsonl"),
      *(f"completions/step-{i:06d}.jsonl" for i in range(1, STEPS + 1)),
    )
  }
  scalars = sorted(
    (value.tag, event.step, value.simple_value)
    for event in events.read(workdir / "events")
    for value in event.summary.value
    if value.HasField("simple_value") and not is_timed(value.tag)
  )
  arrays = {
    jax.tree_util.keystr(path): np.asarray(x).tobytes()
    for path, x in jax.tree_util.tree_leaves_with_path(state)
  }
  return {
    "state": arrays,
    "TensorBoard": scalars,
    "best": checkpoint_steps.find_best(
      dict(checkpoint_steps.read_labels(workdir)), ADAPTERS["checkpoint.best"]
    ),
    **lines,
  }


def compare(workdir: pathlib.Path, undisturbed: pathlib.Path) -> None:
  """Raises if the results of two runs differ."""
  compile_cache.quiet_libraries()
  change_machine(workdir)
  workdir = local(workdir)
  with bucket.claimed(workdir):  # which fetches the logs
    results, expected = outcome(workdir), outcome(undisturbed)
  assert len(expected["state"]) > 20 and len(expected["TensorBoard"]) > 100
  differing = [name for name in expected if results[name] != expected[name]]
  assert not differing, f"{workdir}: different {', '.join(differing)}"
  kept, needed = map(checkpoint_steps.complete_steps, (workdir, undisturbed))
  # A stop saves a further step, which takes the place of an older one.
  is_complete = {needed[0], needed[-1]} <= {*kept} and len(kept) >= len(needed)
  assert is_complete, f"{workdir}: {kept}, undisturbed {needed}"
