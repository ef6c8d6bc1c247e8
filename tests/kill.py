"""Kills a run again and again, and compares what it ends with to one in peace.

  python tests/kill.py --times=20 --seed=0 [--processes=2]

starts a small run, kills it (SIGKILL) at random moments, and starts it again
each time until it is done. Then it says whether parameters, optimizer, prompt
history, metrics, samples and TensorBoard's events are to the bit those of a
run that nobody disturbed. Then the same with SIGTERM, and with the newest
checkpoint cut, emptied or with one bit flipped after each kill. Ten minutes on
two cores.

  python tests/kill.py --places

kills once at each of a few chosen places, destroys the weights of a step and
fills the disk, which is what the tests do.
"""

import argparse
from collections.abc import Callable
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

import events
import jax
import numpy as np
import orbax.checkpoint as ocp

from dppo_jax import config, train
from dppo_jax.metrics import logs, report
from dppo_jax.run import checksums, distributed, runtime_checks
from dppo_jax.step import collect, programs

STEPS = 6
# Where a run is killed, and how often it passes there before.
PLACES = {
  "compiling": (train.programs, "compile_step", 1),
  "rollout": (collect, "grade", 3),
  "update": (runtime_checks, "check_update", 3),
  "checkpoint": (checksums, "write", 2),
  "report": (report, "write", 1),
}
# What ends a run in an error, and what that says.
FAULTS = {
  "NaN": "update of step [2-4] made .* NaN: they are not saved",
  "full disk": "(metrics.jsonl|samples.jsonl|checkpoints).*: File too large",
}


def make_config(num_devices: int = 1) -> config.Config:
  """A model of a few thousand weights, rewarded for being brief."""
  c = config.Config()
  config.use_method(c, "neyman")  # which remembers prompts
  c.method.args["update_cost"] = 0.5  # a clock is never the same
  settings = {
    "steps": STEPS,
    "model.shape.layers": 1,
    "model.shape.embed": 16,
    "model.shape.mlp": 32,
    "model.shape.head_dim": 8,
    "data.num_arithmetic": 20,
    "data.max_operations": 1,
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
    "mesh.data": num_devices,
  }
  for name, value in settings.items():
    config.assign(c, name, value)
  return c


def run(workdir: pathlib.Path, place: str = "", pause: float = 0.0) -> None:
  """A run that kills itself at `place`, if that is given.

  Args:
    pause: seconds that it waits wherever it could kill itself, so that it is
      there when somebody else does.
  """
  programs.compile_program = lambda lowered, platform: lowered.compile()
  for name, (module, function, number) in PLACES.items():
    last = number if name == place else 0
    setattr(module, function, _passing(getattr(module, function), last, pause))
  train.run(make_config(jax.device_count()), workdir)


def run_one_of(port: int, count: int, index: int, *args) -> None:
  """`run` as one of several processes of a device each."""
  distributed.initialize(f"localhost:{port}", count, index)
  run(*args)


def fail(workdir: pathlib.Path, how: str, says: str) -> None:
  """A run that ends in an error which has to say `says`."""
  programs.compile_program = lambda lowered, platform: lowered.compile()
  how = {"NaN": _poison, "full disk": _fill_disk}[how]
  how(workdir)
  try:
    train.run(make_config(), workdir)
  except (OSError, ValueError, FloatingPointError) as error:
    assert re.search(says, str(error)), error
    return
  raise AssertionError("it ended without an error")


def _poison(workdir: pathlib.Path) -> None:
  """Destroys the weights in the second step."""
  collected, passed = train.collect, []

  def act(*args):
    state, got = collected(*args)
    passed.append(1)
    if len(passed) == 2:
      nan = jax.tree.map(lambda x: x * np.nan, state.params)
      state = state.replace(params=nan)
    return state, got

  train.collect = act


def _fill_disk(workdir: pathlib.Path) -> None:
  """From the end of the first step on, no file may grow much more."""
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


# Processes that need not import again: forked before JAX sees a device -------


def begin(function: Callable, *args) -> int:
  """Calls `function` in a process of its own, silently; its id."""
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
  """A run in `count` processes; their ids."""
  if count == 1:
    return [begin(run, *args)]
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    port = listener.getsockname()[1]
  return [begin(run_one_of, port, count, i, *args) for i in range(count)]


def end(pid: int) -> int:
  """Waits for a process; its exit status, negative for a signal."""
  return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# What two runs are compared by ----------------------------------------------


def outcome(workdir: pathlib.Path) -> dict[str, object]:
  """All that a run leaves, but for what clocks measured."""
  folder = (workdir / "checkpoints" / str(STEPS)).absolute()
  with ocp.StandardCheckpointer() as checkpointer:
    state = {}
    for item in ("params", "rest"):
      saved = checkpointer.metadata(folder / item).item_metadata.tree
      like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), saved)
      state[item] = checkpointer.restore(folder / item, like)
  is_timed = lambda name: "seconds" in name or name == "update/compiles"
  lines = {
    name: [
      {k: x for k, x in json.loads(line).items() if not is_timed(k)}
      for line in (workdir / name).read_text().splitlines()
    ]
    for name in ("metrics.jsonl", "samples.jsonl")
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
  return {"state": arrays, "TensorBoard": scalars, **lines}


def compare(workdir: pathlib.Path, whole: pathlib.Path) -> None:
  """Raises where a run has left other things than `whole` has."""
  logs.quiet_libraries()
  found, wanted = outcome(workdir), outcome(whole)
  assert len(wanted["state"]) > 20 and len(wanted["TensorBoard"]) > 100
  differing = [name for name in wanted if found[name] != wanted[name]]
  assert not differing, f"{workdir}: other {', '.join(differing)}"


# Ways to disturb a run ------------------------------------------------------


def kill_at_places(folder: pathlib.Path, whole: pathlib.Path) -> None:
  """One kill at each of `PLACES` and each of `FAULTS`, all of one run."""
  workdir = folder / "places"
  for place in PLACES:
    if place == "report":  # where it is done with the steps
      for how, says in FAULTS.items():
        assert end(begin(fail, workdir, how, says)) == 0, how
        print(f"ended by {how}", flush=True)
    status = end(begin(run, workdir, place))
    assert status == -signal.SIGKILL, f"{place}: {status}"
    print(f"killed at {place}", flush=True)
  assert end(begin(run, workdir)) == 0
  assert end(begin(compare, workdir, whole)) == 0
  print("the same as undisturbed")


def kill_at_random(
  folder: pathlib.Path,
  whole: pathlib.Path,
  chance: random.Random,
  number: int,
  times: int,
  damages: bool = False,
  count: int = 1,
) -> int:
  """Sends signal `number` so often, to as many runs as that takes.

  Returns:
    How many runs ended as the undisturbed one; all had to.
  """
  start = time.monotonic()
  assert not any(map(end, begin_run(count, folder / "timed", "", 0.2)))
  seconds = time.monotonic() - start
  runs = signals = damaged = 0
  while signals < times:
    workdir = folder / f"run-{runs}"
    while True:
      pids = begin_run(count, workdir, "", 0.2)
      if signals < times:
        _wait(workdir, chance, seconds, damages)
        # A request of one is known to all; a kill is not.
        for pid in pids if number == signal.SIGKILL else [chance.choice(pids)]:
          os.kill(pid, number)
      statuses = {end(pid) for pid in pids}
      if statuses == {0}:
        break
      assert count > 1 or statuses <= {-number, 130}, statuses
      signals += 1
      damaged += damages and damage(workdir, chance)
      print(".", end="", flush=True)
    assert end(begin(compare, workdir, whole)) == 0
    runs += 1
  what = signal.Signals(number).name
  print(f" {signals} of {what}, {damaged} damaged checkpoints, {runs} runs:")
  print("  all ended as the undisturbed one")
  return runs


def _steps(workdir: pathlib.Path) -> list[int]:
  names = (x.name for x in workdir.glob("checkpoints/*"))
  return sorted(int(name) for name in names if name.isdigit())


def _wait(
  workdir: pathlib.Path, chance: random.Random, seconds: float, damages: bool
) -> None:
  """Until the next signal.

  Args:
    seconds: what an undisturbed run takes.
    damages: there is to be a checkpoint after that of step 0.
  """
  if not damages:
    # The start takes long and is always the same: half of them come later.
    time.sleep(chance.uniform(chance.choice([0.0, 0.5]), 1.0) * seconds)
    return
  step, until = chance.choice([2, 4]), time.monotonic() + 3 * seconds
  while time.monotonic() < until and max(_steps(workdir), default=0) < step:
    time.sleep(0.02)
  time.sleep(chance.uniform(0.0, 0.5))


def damage(workdir: pathlib.Path, chance: random.Random) -> bool:
  """Damages the newest checkpoint, if there is one before it."""
  steps = _steps(workdir)
  if len(steps) < 2:
    return False
  newest = workdir / "checkpoints" / str(steps[-1])
  # Those that orbax writes when all is done say nothing of the state.
  done = ("_CHECKPOINT_METADATA", "commit_success.txt")
  files = sorted(
    x
    for x in newest.rglob("*")
    if x.is_file() and x.stat().st_size and x.name not in done
  )
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
  parser.add_argument("--places", action="store_true", help="chosen places")
  options = parser.parse_args()
  chance = random.Random(options.seed)
  with tempfile.TemporaryDirectory() as made:
    folder = pathlib.Path(made)
    whole = folder / "whole"
    assert not any(map(end, begin_run(options.processes, whole)))
    if options.places:
      kill_at_places(folder, whole)
      return
    for name, number, damages in (
      ("kill", signal.SIGKILL, False),
      ("ask", signal.SIGTERM, False),
      ("damage", signal.SIGKILL, True),
    ):
      if options.only in ("", name):
        kill_at_random(
          folder / name,
          whole,
          chance,
          number,
          options.times,
          damages,
          options.processes,
        )


if __name__ == "__main__":
  main()
