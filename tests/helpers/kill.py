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

  python -m tests.helpers.kill --times=10 --bucket

trains in a bucket of a server that it starts, each time on another machine,
which has nothing but the bucket; no checkpoint is damaged. Also with
`--places` and, which kills one of them and resumes in a single process, with
`--places --processes=2`.
"""

import argparse
from collections.abc import Callable
import contextlib
import os
import pathlib
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback

from dppo_jax.run import checkpoint_steps
from tests.helpers import killed_run
from tests.helpers.killed_run import change_machine, compare, run

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


def begin_run(count: int, workdir, place="", pause=0.0) -> list[int]:
  """Starts a run in `count` processes; returns their ids.

  Only the last one kills itself at `place`.
  """
  if count == 1:
    return [begin(run, workdir, place, pause)]
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    port = listener.getsockname()[1]
  places = (count - 1) * [""] + [place]
  return [
    begin(killed_run.run_one_of, port, count, i, workdir, x, pause)
    for i, x in enumerate(places)
  ]


def end(pid: int) -> int:
  """Waits for a process; returns its status, negative for a signal."""
  return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Ways to disturb a run ------------------------------------------------------


def kill_at_places(folder: pathlib.Path, undisturbed: pathlib.Path) -> None:
  """Disturbs a run at each of its `places`; a local one by `FAULTS` too."""
  workdir = folder / "places"
  for place in killed_run.places(bool(killed_run.buckets)):
    if place == "report":  # after the last step
      for fault, message in killed_run.FAULTS.items():
        assert end(begin(killed_run.fail, workdir, fault, message)) == 0, fault
        print(f"ended by {fault}", flush=True)
    status = end(begin(run, workdir, place))
    assert status == -signal.SIGKILL, f"{place}: {status}"
    print(f"killed at {place}", flush=True)
    change_machine(workdir)
  assert end(begin(run, workdir)) == 0
  assert end(begin(compare, workdir, undisturbed)) == 0
  print("the same as undisturbed")


def kill_one_process(
  folder: pathlib.Path, undisturbed: pathlib.Path, count: int
) -> None:
  """Kills the last of several processes, then the only one, then none."""
  workdir = folder / "processes"
  other, last = map(end, begin_run(count, workdir, "update"))
  assert last == -signal.SIGKILL and other > 0, (other, last)
  print("killed one process", flush=True)
  change_machine(workdir)
  status = end(begin(killed_run.run_alone, count, workdir, "rollout"))
  assert status == -signal.SIGKILL, status
  print("killed the only process", flush=True)
  change_machine(workdir)
  assert not any(map(end, begin_run(count, workdir)))
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
      change_machine(workdir)
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
  """Returns the latest checkpoint of a local run, if there is one."""
  steps = checkpoint_steps.complete_steps(workdir)[-1:]
  return [workdir / "checkpoints" / str(step) for step in steps]


def damage(workdir: pathlib.Path, chance: random.Random) -> bool:
  """Damages the latest checkpoint of a run, if there is one before it."""
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
  parser.add_argument("--bucket", action="store_true", help="on a server")
  options = parser.parse_args()
  killed_run.more.update(killed_run.ADAPTERS if options.adapters else {})
  chance = random.Random(options.seed)
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    undisturbed = folder / "undisturbed"
    start = time.monotonic()
    pids = begin_run(options.processes, undisturbed, "", 0.02)
    assert not any(map(end, pids))
    seconds = time.monotonic() - start
    if options.bucket:
      killed_run.use_bucket(stack)
    if options.places and options.processes > 1:
      kill_one_process(folder, undisturbed, options.processes)
      return
    if options.places:
      kill_at_places(folder, undisturbed)
      return
    for name, number, damages in (
      ("kill", signal.SIGKILL, False),
      ("ask", signal.SIGTERM, False),
      ("damage", signal.SIGKILL, True),
    ):
      if options.only in ("", name) and not (options.bucket and damages):
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
