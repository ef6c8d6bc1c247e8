"""Programs in separate processes, bound to cores."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
import os
import pathlib
import queue
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def train_command(config: str, workdir: pathlib.Path, *flags: str) -> list[str]:
  """Returns the command of a training run."""
  main = [sys.executable, "-m", "dppo_jax.main", f"--config={config}"]
  return [*main, f"--workdir={workdir}", *flags]


def execute(
  arguments: Sequence[str],
  cores: Iterable[int],
  log: pathlib.Path,
  env: Mapping[str, str] | None = None,
) -> None:
  """Runs a program on some cores and writes its output to `log`.

  Args:
    env: environment variables in addition to those of this process.
  Raises:
    CalledProcessError: if the program fails.
  """
  with log.open("w") as file:
    subprocess.run(
      arguments,
      cwd=ROOT,
      check=True,
      stdout=file,
      stderr=subprocess.STDOUT,
      preexec_fn=lambda: os.sched_setaffinity(0, cores),
      env={**os.environ, **(env or {}), "PYTHONPATH": str(ROOT)},
    )


class Runs:
  """Training runs below one directory, each on its own core.

  A run that has its report is not repeated.
  """

  def __init__(self, root: pathlib.Path, cores: Sequence[int]):
    self.root = root
    root.mkdir(parents=True, exist_ok=True)
    self._free = queue.Queue()
    for core in cores:
      self._free.put(core)
    self._threads = futures.ThreadPoolExecutor(len(cores))

  def start(self, name: str, config: str, *flags: str) -> futures.Future:
    """Queues a run in the folder `name`; the future ends with it."""
    return self._threads.submit(self._train, name, config, *flags)

  def is_done(self, name: str) -> bool:
    return (self.root / name / "report.md").exists()

  def _train(self, name: str, config: str, *flags: str) -> None:
    core = self._free.get()
    try:
      if not self.is_done(name):
        workdir = self.root / name
        shutil.rmtree(workdir, ignore_errors=True)
        command = train_command(config, workdir, *flags)
        execute(command, {core}, self.root / f"{name}.log")
      print(f"{name}: done", flush=True)
    finally:
      self._free.put(core)
