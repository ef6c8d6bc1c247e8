"""Kills a run repeatedly and compares its results to an undisturbed run.

  python -m tests.helpers.kill --times=20 --seed=0 [--processes=2]

kills (SIGKILL) a small run at random moments and restarts it each time until it
is done. Parameters, optimizer, prompt history, metrics, samples, TensorBoard
events and the best checkpoint must then be bit-identical to those of an
undisturbed run, and no checkpoint that it keeps may be missing. Then the same
with SIGTERM, and with the latest checkpoint cut, emptied or with one bit
flipped after each kill. Ten minutes on two cores.

  python -m tests.helpers.kill --adapters

does so with adapters, the method greso and `checkpoint.best`.

  python -m tests.helpers.kill --places

kills once at each of a few chosen places, destroys the weights of a step and
fills the disk, as the tests do.

  python -m tests.helpers.kill --times=10 --bucket=gs

trains in a bucket of a server that it starts, `gs` or `s3`, and mostly resumes
without the local copy, as on another machine; a damaged checkpoint is one of a
local copy. Also with `--places`.
"""

import argparse
from collections.abc import Callable
import contextlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback

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
  "upload": (storage.Bucket, "put", 20),
  "second upload": (storage.Bucket, "put", 60),
  "compiling": (programs, "compile_programs", 1),
  "rollout": (grade, "grade", 3),
  "update": (runtime_checks, "check_update", 3),
  "checkpoint": (checksums, "write", 2),
  "deletion": (storage.Bucket, "delete", 5),
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
  "eval.prompts": 8,
  "checkpoint.best": "-eval/tokens",
}
_more: dict[str, object] = {}
_buckets: list[str] = []  # the one to train in, with `--bucket`


def make_config(num_devices: int = 1) -> config.Config:
  """A model of a few thousand weights, rewarded for short completions."""
  c = config.Config()
  if _more:
    config.use_method(c, "greso")
  else:
    config.use_method(c, "neyman")  # it has a prompt history
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
    "log.completions": "all",
    "mesh.data": num_devices,
  }
  c.objective.args["beta"] = 0.04  # the reference is read from step 0
  for name, value in (settings | _more).items():
    config.assign(c, name, value)
  return c


def run(workdir: pathlib.Path, place: str = "", pause: float = 0.0) -> None:
  """Trains, and kills itself at `place` if given; else pauses at each place."""
  for name, (module, function, number) in places(bool(_buckets)).items():
    last = number if name == place else 0
    setattr(module, function, _passing(getattr(module, function), last, pause))
  train.run(make_config(jax.device_count()), _local(workdir))


def places(in_bucket: bool) -> dict[str, tuple]:
  """Returns the places to kill a run at, in the order in which it gets there.

  With a bucket these are its own: what else a run does, it does in its copy.
  """
  is_of_bucket = lambda place: place[0] is storage.Bucket
  return {k: x for k, x in PLACES.items() if is_of_bucket(x) == in_bucket}


def _local(workdir: pathlib.Path) -> pathlib.Path:
  """Returns the directory of a run: with a bucket a copy, made in `workdir`."""
  if not _buckets:
    return workdir
  os.environ["XDG_CACHE_HOME"] = str(workdir)
  url = f"{_buckets[0]}{workdir}"
  return pathlib.Path(bucket.local(url, is_workdir=True))


def _use_bucket(stack: contextlib.ExitStack, kind: str) -> None:
  """Makes all later runs train in a bucket."""
  os.environ |= stack.enter_context(servers.running(kind))
  _buckets.append(f"{kind}://bucket")


def _change_machine(workdir: pathlib.Path) -> None:
  """Leaves of a run only what is in its bucket, if it has one."""
  if _buckets:
    shutil.rmtree(workdir, ignore_errors=True)


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


# Processes, forked before JAX sees a device, so that they need not import ----


def begin(function: Callable, *args) -> int:
  """Calls `function` silently in a new process; returns its id."""
  sys.stdout.flush()
  pid = os.fork()
  if pid:
    return pid
  status = 1
  try:
    with open(os.devnull, "w") as nowhere:
      os.dup2(nowhere.fileno(), 1)
    function(*args)
    status = 0
  except KeyboardInterrupt:
    status = 130
  except BaseException:
    traceback.print_exc()
  finally:
    os._exit(status)


def begin_run(count: int, *args) -> list[int]:
  """Starts a run in `count` processes; returns their ids."""
  if count == 1:
    return [begin(run, *args)]
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    port = listener.getsockname()[1]
  return [begin(run_one_of, port, count, i, *args) for i in range(count)]


def end(pid: int) -> int:
  """Waits for a process; returns its status, negative for a signal."""
  return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Results of a run -----------------------------------------------------------


def outcome(workdir: pathlib.Path) -> dict[str, object]:
  """All results of a run except for measured times."""
  folder = (workdir / "checkpoints").absolute()
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
    for name in ("metrics.jsonl", "samples.jsonl", "completions/000001.jsonl")
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
    "best": checkpoint_steps.find_best(workdir, ADAPTERS["checkpoint.best"]),
    **lines,
  }


def compare(workdir: pathlib.Path, undisturbed: pathlib.Path) -> None:
  """Raises if the results of two runs differ."""
  compile_cache.quiet_libraries()
  _change_machine(workdir)
  workdir = _local(workdir)
  results, expected = outcome(workdir), outcome(undisturbed)
  assert len(expected["state"]) > 20 and len(expected["TensorBoard"]) > 100
  differing = [name for name in expected if results[name] != expected[name]]
  assert not differing, f"{workdir}: different {', '.join(differing)}"
  kept, needed = map(checkpoint_steps.complete_steps, (workdir, undisturbed))
  # A stop saves a further step, which takes the place of an older one.
  is_complete = {needed[0], needed[-1]} <= {*kept} and len(kept) >= len(needed)
  assert is_complete, f"{workdir}: {kept}, undisturbed {needed}"


# Ways to disturb a run ------------------------------------------------------


def kill_at_places(folder: pathlib.Path, undisturbed: pathlib.Path) -> None:
  """Disturbs one run at each of its `places`; a local one by `FAULTS` too."""
  workdir = folder / "places"
  for place in places(bool(_buckets)):
    if place == "report":  # after the last step
      for fault, message in FAULTS.items():
        assert end(begin(fail, workdir, fault, message)) == 0, fault
        print(f"ended by {fault}", flush=True)
    status = end(begin(run, workdir, place))
    assert status == -signal.SIGKILL, f"{place}: {status}"
    print(f"killed at {place}", flush=True)
    _change_machine(workdir)
  assert end(begin(run, workdir)) == 0
  assert end(begin(compare, workdir, undisturbed)) == 0
  print("the same as undisturbed")


def kill_at_random(
  folder: pathlib.Path,
  undisturbed: pathlib.Path,
  chance: random.Random,
  number: int,
  times: int,
  seconds: float,
  damages: bool = False,
  count: int = 1,
) -> None:
  """Sends signal `number` several times, to as many runs as that takes.

  With `damages`, damages a checkpoint that number of times. `seconds` are those
  of an undisturbed run.
  """
  runs = signals = damaged = 0
  while (damaged if damages else signals) < times:
    workdir = folder / f"run-{runs}"
    while True:
      pids = begin_run(count, workdir, "", 0.02)
      if (damaged if damages else signals) < times:
        _wait(workdir, chance, seconds, damages)
        # Processes share a stop request, but not a kill.
        for pid in pids if number == signal.SIGKILL else [chance.choice(pids)]:
          os.kill(pid, number)
      statuses = {end(pid) for pid in pids}
      if statuses == {0}:
        break
      # After a stop request to one process, others may not find it.
      ended = {1} if count > 1 and number == signal.SIGTERM else set()
      assert statuses <= {0, -number, 130, 75, 134, *ended}, statuses
      signals += 1
      if not damages and chance.random() < 0.75:
        _change_machine(workdir)
      damaged += damages and damage(workdir, chance)
      print(".", end="", flush=True)
    assert end(begin(compare, workdir, undisturbed)) == 0
    runs += 1
  name = signal.Signals(number).name
  print(f" {signals} of {name}, {damaged} damaged checkpoints, {runs} runs:")
  print("  all ended as the undisturbed one")


def _wait(
  workdir: pathlib.Path, chance: random.Random, seconds: float, damages: bool
) -> None:
  """Waits for a random part of a run, or for a new checkpoint after step 0."""
  if not damages:
    # The start takes long, so half of the signals come later.
    time.sleep(chance.uniform(chance.choice([0.0, 0.5]), 1.0) * seconds)
    return
  start, step = time.time(), chance.choice([2, 4])
  while time.time() < start + 3 * seconds:
    folders = _newest(workdir)
    with contextlib.suppress(FileNotFoundError):  # it was just set aside
      if any(
        int(x.name) >= step and x.stat().st_mtime > start for x in folders
      ):
        break
    time.sleep(0.02)
  time.sleep(chance.uniform(0.0, 0.5))


def _newest(workdir: pathlib.Path) -> list[pathlib.Path]:
  """Returns the latest checkpoint of a run, in each of its copies."""
  copies = [workdir, *workdir.glob(f"dppo_jax/buckets*/*/bucket{workdir}")]
  steps = [(x, checkpoint_steps.complete_steps(x)) for x in copies]
  return [x / "checkpoints" / str(many[-1]) for x, many in steps if many]


def damage(workdir: pathlib.Path, chance: random.Random) -> bool:
  """Damages the latest checkpoint of a copy, if there is one before it."""
  if not (folders := [x for x in _newest(workdir) if x.name != "0"]):
    return False
  newest = chance.choice(folders)
  # Files that orbax writes at the end hold nothing of the state.
  last = ("_CHECKPOINT_METADATA", "commit_success.txt")
  files = sorted(
    x
    for x in newest.rglob("*")
    if x.is_file() and x.stat().st_size and x.name not in last
  )
  if not files:  # emptied before, and the run was killed before it saw that
    return False
  file, how = chance.choice(files), chance.choice(["cut", "emptied", "flipped"])
  content = bytearray(file.read_bytes())
  if how == "emptied":
    shutil.rmtree(newest)
    newest.mkdir()
  elif how == "cut":
    file.write_bytes(content[: chance.randrange(len(content))])
  else:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
  return True


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--times", type=int, default=20, help="signals of a kind")
  parser.add_argument("--seed", type=int, default=0, help="of the moments")
  parser.add_argument("--processes", type=int, default=1, help="of a run")
  parser.add_argument("--only", default="", help="kill, ask or damage")
  parser.add_argument("--adapters", action="store_true", help="another run")
  parser.add_argument("--places", action="store_true", help="chosen places")
  parser.add_argument("--bucket", default="", help="gs or s3: its server")
  options = parser.parse_args()
  _more.update(ADAPTERS if options.adapters else {})
  chance = random.Random(options.seed)
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    undisturbed = folder / "undisturbed"
    start = time.monotonic()
    pids = begin_run(options.processes, undisturbed, "", 0.02)
    assert not any(map(end, pids))
    seconds = time.monotonic() - start
    if options.bucket:
      _use_bucket(stack, options.bucket)
    if options.places:
      kill_at_places(folder, undisturbed)
      return
    for name, number, damages in (
      ("kill", signal.SIGKILL, False),
      ("ask", signal.SIGTERM, False),
      ("damage", signal.SIGKILL, True),
    ):
      if options.only in ("", name):
        kill_at_random(
          folder / name,
          undisturbed,
          chance,
          number,
          options.times,
          seconds,
          damages,
          options.processes,
        )


if __name__ == "__main__":
  main()
