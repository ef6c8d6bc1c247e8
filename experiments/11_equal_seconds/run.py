r"""Compares batch shapes and methods after equal CPU seconds.

  python -m experiments.11_equal_seconds.run --stage=rates [--cores=0,1]
  python -m experiments.11_equal_seconds.run --stage=seeds
  python -m experiments.11_equal_seconds.run --stage=report

A cell is a task, a number of prompts per step and a group size. The stage
`rates` runs grpo in every cell of the grid with several learning rates and one
seed; `seeds` runs the methods with the best rate of each cell and five other
seeds. Every run is a process on its own core, starts from the same fine-tuned
weights and ends after the same CPU seconds of steps. Results are added to
results.jsonl as runs end; a run that is there is not repeated.
"""

import argparse
from collections.abc import Sequence
from concurrent import futures
import json
import pathlib
import queue
import shutil
import subprocess
import tempfile

from dppo_jax.analysis import runs

from ..common import processes, results
from . import grid

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.jsonl"


def read() -> list[dict]:
  """Returns the results so far."""
  lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
  return [json.loads(line) for line in lines]


def summary(workdir: pathlib.Path, marks: Sequence[float]) -> dict:
  """Returns the measurements of a run."""
  run = runs.load(workdir)
  seconds, accuracy = run.curve("step/cpu_seconds")
  stages = {x: run.total(f"{x}/seconds") for x in runs.STAGES}
  return {
    "steps": len(run.steps),
    "seconds": [round(float(x), 2) for x in seconds],
    "accuracy": [round(float(x), 4) for x in accuracy],
    "to": {f"{x:.0%}": run.cost_to(x, "step/cpu_seconds") for x in marks},
    "update_share": stages["update"] / sum(stages.values()),
    "rollout_share": stages["rollout"] / sum(stages.values()),
    "tokens_generated": run.total("tokens/generated"),
    "tokens_trained": run.total("tokens/trained"),
    "completions": run.total("completions/drawn") / run.total("prompts/kept"),
    "zero_std": run.total("groups/zero_std") / run.total("prompts/kept"),
    "noise": next(
      (x["noise/fraction"] for x in run.steps if "noise/fraction" in x), None
    ),
  }


class Pool:
  """Processes on some cores, whose results go to results.jsonl."""

  def __init__(self, root: pathlib.Path, cores: list[int]):
    self._root, self._free = root, queue.Queue()
    for core in cores:
      self._free.put(core)
    self._threads = futures.ThreadPoolExecutor(len(cores))
    self._done = {grid.key(row) for row in read()}

  def warm(self, task: str) -> pathlib.Path:
    """Fine-tunes the task's model, from which all its runs start."""
    workdir = self._root / f"{task}-warm"
    if not (workdir / "report.md").exists():
      flags = [*grid.TASKS[task].flags, "--config.steps=0"]
      self._execute(workdir, grid.TASKS[task], "grpo", flags)
    return workdir

  def run_all(self, cells: list[grid.Run]) -> None:
    """Runs what is not in results.jsonl yet, in order."""
    todo = [
      cell for cell in cells if grid.key(cell._asdict()) not in self._done
    ]
    for run in [self._threads.submit(self._run, cell) for cell in todo]:
      run.result()

  def _run(self, cell: grid.Run) -> None:
    task = grid.TASKS[cell.task]
    workdir = pathlib.Path(tempfile.mkdtemp(dir=self._root)) / "run"
    flags = [
      f"--config.sft.from_run={self._root / f'{cell.task}-warm'}",
      *grid.flags(cell),
    ]
    self._execute(workdir, task, cell.method, flags)
    row = {**cell._asdict(), **summary(workdir, task.marks), **results.facts()}
    with RESULTS.open("a") as file:
      file.write(json.dumps(row) + "\n")
    print(*cell, row["to"], row["accuracy"][-1], flush=True)
    shutil.rmtree(workdir.parent)

  def _execute(
    self, workdir: pathlib.Path, task: grid.Task, method: str, flags: list[str]
  ) -> None:
    core = self._free.get()
    command = processes.train_command(f"{task.config}:{method}", workdir)
    log = workdir.parent / f"{workdir.name}.log"
    env = {"EQUAL_SECONDS": str(task.seconds)}
    try:
      processes.execute([*command, *flags], {core}, log, env)
    except subprocess.CalledProcessError as error:
      raise RuntimeError(log.read_text()[-2000:]) from error
    finally:
      self._free.put(core)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--stage", choices=("rates", "seeds", "report"))
  parser.add_argument("--tasks", default=",".join(grid.TASKS))
  parser.add_argument("--cores", default="0,1")
  parser.add_argument(
    "--workdir", type=pathlib.Path, default=pathlib.Path("runs/equal_seconds")
  )
  args = parser.parse_args()
  if args.stage == "report":
    from . import report

    report.write(read())
    return
  root = args.workdir.resolve()
  root.mkdir(parents=True, exist_ok=True)
  pool = Pool(root, [int(core) for core in args.cores.split(",")])
  for task in args.tasks.split(","):
    grid.prepare(task)
    pool.warm(task)
    plan = grid.rates if args.stage == "rates" else grid.seeds
    pool.run_all(plan(task, read()))


if __name__ == "__main__":
  main()
