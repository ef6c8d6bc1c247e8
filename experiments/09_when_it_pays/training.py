"""Training runs, each a process of its own on a core of its own."""

from collections.abc import Iterable
from concurrent import futures
import os
import pathlib
import queue
import shutil
import subprocess
import sys

import tasks

from dppo_jax.analysis import jsonl

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
CONTROLS = "experiments/09_when_it_pays/controls.py"

_FIXED = {
  f"{name} {share:g}": (
    f"{CONTROLS}:{function}",
    f"--config.method.args.share={share}",
  )
  for name, function, shares in (
    ("neyman", "fixed", (0.5, 0.25, 0.125, 0.0625)),
    ("by chance", "chance", (0.5, 0.25)),
  )
  for share in shares
}
BASELINE = {
  "grpo": (f"{CONTROLS}:baseline", "--config.objective.noise_every=8"),
  "grpo, twice the rate": ("grpo",),
}
SWEEP = {name: x for name, x in _FIXED.items() if name.startswith("neyman")}
CONTROLS_ONLY = {
  **{name: x for name, x in _FIXED.items() if name not in SWEEP},
  "prompts by chance 0.5": ("grpo",),
  "prompts by chance 0.25": ("grpo",),
}
OTHERS = {"dppo": ("dppo",)}
ITSELF = {"neyman, sets itself": ("neyman",)}


def variants(cell: str, stage: str) -> dict[str, tuple[str, ...]]:
  """Those of a cell that belong to a stage."""
  is_law = cell in tasks.LAW
  found = {
    "baseline": BASELINE,
    "rest": SWEEP | (CONTROLS_ONLY | OTHERS if is_law else {}),
    "itself": ITSELF,
  }
  return found[stage]


def flags(cell: tasks.Cell, variant: str) -> list[str]:
  """Of the cell, as the variant changes them."""
  found = list(cell.flags)
  if variant.startswith("prompts by chance"):
    share = float(variant.rpartition(" ")[2])
    prompts = max(round(share * cell.prompts), 1)
    found[0] = f"--config.data.prompts_per_step={prompts}"
    # Fewer prompts get less far in a step: they take more steps.
    steps = int(found[1].partition("=")[2])
    found[1] = f"--config.steps={int(steps / share**0.5)}"
  if variant == "grpo, twice the rate":
    rate = 2 * float(found[2].partition("=")[2])
    found[2] = f"--config.optimizer.learning_rate={rate}"
  return found


class Pool:
  """Runs on a few cores, as many at a time; what is done is not repeated."""

  def __init__(self, root: pathlib.Path, cores: Iterable[int]):
    self.root = root
    root.mkdir(parents=True, exist_ok=True)
    cores = list(cores)
    self._free = queue.Queue()
    for core in cores:
      self._free.put(core)
    self._threads = futures.ThreadPoolExecutor(len(cores))
    self._warm = {}

  def start(self, cell: str, variant: str, seed: int) -> futures.Future:
    """Queues one run; its future ends with it."""
    return self._threads.submit(self._train, cell, variant, seed)

  def warm(self, task: str) -> None:
    """Fine-tunes the task's model, from which all its runs start."""
    if task not in self._warm:
      self._warm[task] = self._threads.submit(
        self._run, f"warm-{task}", task, "grpo", "--config.steps=0"
      )
    self._warm[task].result()

  def lines(self, cell: str, variant: str, seed: int) -> list[dict] | None:
    """What a run wrote, if it is done."""
    folder = self.root / _name(cell, variant, seed)
    if not (folder / "report.md").exists():
      return None
    return jsonl.read(folder / "metrics.jsonl")

  def _train(self, cell: str, variant: str, seed: int) -> None:
    task = tasks.CELLS[cell].task
    stages = ("baseline", "rest", "itself")
    method, *more = next(
      x[variant] for s in stages if variant in (x := variants(cell, s))
    )
    self._run(
      _name(cell, variant, seed),
      task,
      method,
      f"--config.sft.from_run={self.root / f'warm-{task}'}",
      f"--config.seed={seed}",
      *flags(tasks.CELLS[cell], variant),
      *more,
    )

  def _run(self, name: str, task: str, method: str, *more: str) -> None:
    workdir = self.root / name
    if (workdir / "report.md").exists():
      return
    core = self._free.get()
    try:
      shutil.rmtree(workdir, ignore_errors=True)
      with (self.root / f"{name}.log").open("w") as log:
        subprocess.run(
          [
            *(sys.executable, "-m", "dppo_jax.main"),
            f"--config={tasks.config_of(task)}:{method}",
            f"--workdir={workdir}",
            *tasks.prepare(task, self.root),
            *more,
          ],
          cwd=ROOT,
          check=True,
          stdout=log,
          stderr=subprocess.STDOUT,
          preexec_fn=lambda: os.sched_setaffinity(0, {core}),
          env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
      print(f"{name}: done", flush=True)
    finally:
      self._free.put(core)


def _name(cell: str, variant: str, seed: int) -> str:
  plain = f"{cell}-{variant}-{seed}"
  return plain.replace(", ", "-").replace(" ", "-")
