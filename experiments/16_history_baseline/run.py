r"""Compares baselines from history with leave-one-out after equal completions.

  python -m experiments.16_history_baseline.run --tasks=rings --core=0
  python -m experiments.16_history_baseline.run --stage=report

A cell is a task, prompts x completions of a step, a baseline, a factor on the
learning rate and a seed. All runs of a task start from the same fine-tuned
weights and end after the same number of completions. results.jsonl gets a line
when a run ends, and a run that is there is not repeated.
"""

import argparse
from collections.abc import Iterator
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dppo_jax import rewards
from dppo_jax.algo import leave_one_out, objectives
from dppo_jax.config import cli
from dppo_jax.eval import eval_sets
from dppo_jax.records import TrainState
from dppo_jax.rng import rng_at
from dppo_jax.run import checkpoint, compile_cache
from dppo_jax.run.setup import Run, setup_run
from dppo_jax.step import abstract_values, programs
from dppo_jax.step.train_step import TrainStep

from ..common import processes, results
from .baseline import History

equal_seconds = importlib.import_module("experiments.11_equal_seconds.grid")
HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.jsonl"
DECAY, PRIOR = 0.75, 1.0


class Task(NamedTuple):
  """Sizes of the runs of a task.

  Attributes:
    completions: of a run.
    every: completions between two evaluations.
    factors: on the learning rate of experiment 11.
    seeds: none was used before the expectations were written.
  """

  completions: int
  every: int
  factors: tuple[float, ...]
  seeds: tuple[int, ...]


TASKS = {
  "rings": Task(20480, 4096, (1.0, 2.0), (10, 11, 12, 13, 14, 15)),
  "arithmetic": Task(8192, 1024, (8.0,), (10, 11, 12)),
  "long rings": Task(20480, 4096, (1.0,), (10, 11, 12)),
}


class Cell(NamedTuple):
  """One run; the baseline is leave-one-out, last visit, history or snapped."""

  task: str
  prompts: int
  group: int
  baseline: str
  factor: float
  seed: int


SHAPES = (
  (128, 1, "snapped"),
  (128, 2, "leave-one-out"),
  (32, 4, "leave-one-out"),
  (64, 1, "snapped"),
  (256, 1, "snapped"),
  (16, 4, "leave-one-out"),  # as many completions a step as 64 x 1
  (32, 2, "leave-one-out"),
)
GROUPS_WITH_HISTORY = tuple(
  (prompts, group, "last visit")
  for prompts, group in ((128, 2), (32, 4), (16, 4), (32, 2))
)
WITHOUT_SNAPPING = tuple((prompts, 1, "history") for prompts in (128, 64, 256))


def cells(task: str) -> Iterator[Cell]:
  """Yields the runs of a task, a rate and a seed at a time."""
  for factor in TASKS[task].factors:
    for seed in TASKS[task].seeds:
      for shape in SHAPES:
        yield Cell(task, *shape, factor, seed)
  if task == "rings":
    for seed in TASKS[task].seeds[:4]:
      for shape in (*GROUPS_WITH_HISTORY, *WITHOUT_SNAPPING):
        yield Cell(task, *shape, 1.0, seed)


def history(cell: Cell, num_problems: int) -> History | None:
  """Returns the history of a cell; None for leave-one-out."""
  if cell.baseline == "leave-one-out":
    return None
  if cell.baseline == "last visit":
    return History(num_problems, decay=0.0, prior=0.0, snaps=False)
  return History(num_problems, DECAY, PRIOR, cell.baseline == "snapped")


def set_up(cell: Cell) -> Run:
  """Returns the run of a cell, whose rewards are its advantages."""
  task = equal_seconds.TASKS[cell.task]
  equal = equal_seconds.Run(cell.task, cell.prompts, cell.group, cell.factor)
  config, _, _ = cli.parse(
    [
      "main",
      f"--config={task.config}:grpo",
      *equal_seconds.flags(equal),
      "--config.rollout.group_size=2",  # the least of a config
      "--config.eval.samples=2",
      "--config.callbacks=",
    ]
  )
  run = setup_run(config)
  # The loop below subtracts the baseline.
  objective = objectives.rloo(run.spec.objective.beta)._replace(
    advantage=lambda advantages, is_drawn: jnp.where(is_drawn, advantages, 0.0)
  )
  spec = dataclasses.replace(
    run.spec,
    objective=objective,
    group_size=cell.group,
    root_key=jax.random.key(cell.seed),
  )
  return run._replace(spec=spec)


@functools.cache
def compiled(cell: Cell) -> tuple[Run, dict[str, jax.stages.Compiled]]:
  """Returns the compiled stages of a cell; those of other seeds are equal."""
  run = set_up(cell)
  table = programs.step_programs(run.spec)
  table["sampled"] = eval_sets.program(run, run.eval_samples)
  table["greedy"] = eval_sets.program(run, samples=0)
  return run, programs.compile_programs(table)


def evaluate(
  run: Run,
  table: dict[str, jax.stages.Compiled],
  state: TrainState,
  grader: rewards.Grader,
  decoding: str,
) -> float:
  """Returns the held-out accuracy, sampled or greedy."""
  name = next(iter(run.eval_sets))
  completions = eval_sets.evaluate(
    run, name, table[decoding], state.params, grader
  )
  return round(float(completions.correct.mean()), 4)


def train(cell: Cell, workdir: pathlib.Path) -> dict:
  """Trains a cell from the weights of `workdir`; returns its measurements."""
  task = TASKS[cell.task]
  run, table = compiled(cell._replace(seed=0, baseline=""))
  key = jax.random.key(cell.seed)
  run = run._replace(spec=dataclasses.replace(run.spec, root_key=key))
  past = history(cell, len(run.train_set))
  size, spent = cell.prompts * cell.group, 0.0
  row = {"completions": [], "cpu_seconds": [], "sampled": [], "greedy": []}
  totals = dict.fromkeys(("trained", "micro_batches", "squares"), 0.0)
  with jax.set_mesh(run.spec.mesh), run.make_grader() as grader:
    step = TrainStep(run.spec, run.train_set, run.tokenizer, grader, table)
    like = abstract_values.abstract_params(run.spec)
    with checkpoint.Checkpoints(workdir, read_only=True) as warm:
      params = warm.restore_params(0, like)
    reference = (
      jax.tree.map(jnp.copy, params) if run.spec.has_reference else None
    )
    state = abstract_values.new_train_state(run.spec, params)
    for number in range(task.completions // size + 1):
      if number * size % task.every == 0:
        row["completions"].append(number * size)
        row["cpu_seconds"].append(round(spent, 2))
        row["sampled"].append(evaluate(run, table, state, grader, "sampled"))
      if number == task.completions // size:
        row["greedy"].append(evaluate(run, table, state, grader, "greedy"))
        break
      start = time.process_time()
      rng = rng_at(run.spec.root_key, number)
      state, experience = step.collect(state)
      ids, earned = np.asarray(experience.prompts.ids), experience.rewards
      if past:
        advantages = earned - past.baselines(ids, earned)
        past.add(ids, earned)
      else:
        advantages = np.asarray(leave_one_out(earned))
      experience = experience._replace(rewards=np.float32(advantages))
      batches = step.select(rng, experience, state)
      batches = step.score(rng, state.params, batches)
      state, updates = step.update(state, reference, batches)
      info = step.info(state, experience, batches, updates)
      spent += time.process_time() - start
      totals["trained"] += float(batches[0].metrics["completions/trained"])
      totals["micro_batches"] += float(info.batches[0].num_micro)
      totals["squares"] += float(np.square(advantages).sum())
  steps = task.completions // size
  return row | {
    "trained": round(totals["trained"] / task.completions, 4),
    "micro_batches": round(totals["micro_batches"] / steps, 2),
    "mean_square": round(totals["squares"] / task.completions, 4),
  }


def warm(task: str, root: pathlib.Path, core: int) -> pathlib.Path:
  """Fine-tunes the task's model, from which all its runs start."""
  equal_seconds.prepare(task)
  workdir = root / f"{task.replace(' ', '-')}-warm"
  if not (workdir / "report.md").exists():
    config = equal_seconds.TASKS[task]
    command = processes.train_command(f"{config.config}:grpo", workdir)
    flags = (*config.flags, "--config.steps=0")
    processes.execute([*command, *flags], {core}, root / "warm.log")
  return workdir


def read() -> list[dict]:
  """Returns the results so far."""
  lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
  return [json.loads(line) for line in lines]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--stage", choices=("train", "report"), default="train")
  parser.add_argument("--tasks", default=",".join(TASKS))
  parser.add_argument("--core", type=int, default=0)
  parser.add_argument(
    "--workdir", type=pathlib.Path, default=pathlib.Path("runs/history")
  )
  args = parser.parse_args()
  if args.stage == "report":
    from . import report

    report.write(read())
    return
  os.sched_setaffinity(0, {args.core})
  compile_cache.enable_compilation_cache()
  root = args.workdir.resolve()
  root.mkdir(parents=True, exist_ok=True)
  done = {Cell(*(row[x] for x in Cell._fields)) for row in read()}
  for task in args.tasks.split(","):
    workdir = warm(task, root, args.core)
    for cell in cells(task):
      if cell not in done:
        row = {**cell._asdict(), **train(cell, workdir), **results.facts()}
        with RESULTS.open("a") as file:
          file.write(json.dumps(row) + "\n")
        print(*cell, row["sampled"][-1], row["greedy"][-1], flush=True)


if __name__ == "__main__":
  main()
