"""The tasks, and the cells of the grid: prompts per step and group size."""

import pathlib
from typing import NamedTuple

from ..common import rings
from ..common.tasks import CONFIGS, RINGS

HERE = pathlib.Path(__file__).parent
LONG = RINGS / "long"
# Solutions of about three times as many tokens.
LONG_ROUNDS = (6, 7, 8)


class Task(NamedTuple):
  """A task.

  Attributes:
    seconds: CPU seconds of the steps of every run.
    rate: learning rate for 512 completions per step, before tuning.
    every: steps between evaluations, at 512 completions per step.
    flags: of every run.
  """

  config: pathlib.Path
  seconds: int
  rate: float
  every: int
  flags: tuple[str, ...] = ()


_LONG = (
  f"--config.data.train={LONG / 'train.jsonl'}",
  f"--config.data.eval={LONG / 'eval.jsonl'}",
  "--config.rollout.max_tokens=264",
  "--config.pack.row_length=296",
  "--config.pack.rows_per_micro=8",
  "--config.data.eval_limit=256",
)
TASKS = {
  "rings": Task(CONFIGS["rings"], 60, 7e-4, 6),
  "arithmetic": Task(CONFIGS["arithmetic"], 30, 2.8e-6, 8),
  "long rings": Task(CONFIGS["rings"], 120, 7e-4, 3, _LONG),
}
# The last chooses the group size itself, below 16, in steps of 32 prompts.
METHODS = {
  "grpo": ("grpo",),
  "dppo": ("dppo",),
  "neyman": ("neyman",),
  "automatic": ("neyman", "--config.method.args.rollout_budget=auto"),
}
GROUPS = (2, 4, 8, 16)
COMPLETIONS = (128, 256, 512)  # of a step
SEEDS = (1, 2, 3, 4, 5)


class Run(NamedTuple):
  """One run of a cell."""

  task: str
  prompts: int
  group: int
  factor: float
  method: str = "grpo"
  seed: int = 0


def key(row: dict) -> Run:
  """Returns the run that a row of results is of."""
  return Run(*(row[name] for name in Run._fields))


def prepare(task: str) -> None:
  """Writes the problems of a task."""
  if task == "rings":
    rings.write(RINGS / "data")
  elif task == "long rings":
    rings.write(LONG, rounds=LONG_ROUNDS)


def flags(run: Run) -> list[str]:
  """Returns the options of a run.

  The learning rate grows with the root of the completions, as AdamW has it.
  """
  task, completions = TASKS[run.task], run.prompts * run.group
  rate = run.factor * task.rate * (completions / 512) ** 0.5
  return [
    f"--config.data.prompts_per_step={run.prompts}",
    f"--config.rollout.group_size={run.group}",
    f"--config.optimizer.learning_rate={rate}",
    f"--config.eval.every={max(task.every * 512 // completions, 1)}",
    f"--config.seed={run.seed}",
    "--config.steps=100000",
    "--config.log.writers=",
    f"--config.callbacks={HERE / 'stop.py'}:after_step",
  ]


def cells(task: str) -> list[Run]:
  """Returns the grid, the largest batches first."""
  return [
    Run(task, completions // group, group, 1.0)
    for completions in reversed(COMPLETIONS)
    for group in reversed(GROUPS)
  ]


def rates(task: str, rows: list[dict]) -> list[Run]:
  """Returns the runs that tune the learning rate of each cell.

  The highest rate is tried on the smallest batches only: on rings it failed on
  larger ones.
  """
  del rows
  grid = cells(task)
  return [
    *(cell._replace(factor=x) for x in (1.0, 0.5) for cell in grid),
    *(cell._replace(factor=2.0) for cell in grid[-len(GROUPS) :]),
  ]


def score(row: dict) -> tuple[int, float]:
  """Returns a key that is larger for better runs: marks, then seconds."""
  reached = [x for x in row["to"].values() if x is not None]
  return len(reached), -reached[-1] if reached else row["accuracy"][-1]


def best_rates(task: str, rows: list[dict]) -> list[Run]:
  """Returns each cell with the rate of its best run."""
  tuned = [x for x in rows if x["task"] == task and x["seed"] == 0]
  tuned = [x for x in tuned if x["method"] == "grpo"]
  best = []
  for cell in cells(task):
    same = [
      row
      for row in tuned
      if (row["prompts"], row["group"]) == (cell.prompts, cell.group)
    ]
    if same:
      best.append(key(max(same, key=score)))
  return best


def seeds(task: str, rows: list[dict]) -> list[Run]:
  """Returns runs of each group size's best cell, a seed at a time."""
  of_run = {key(row): row for row in rows}
  best = best_rates(task, rows)
  chosen = [
    max((x for x in best if x.group == group), key=lambda x: score(of_run[x]))
    for group in GROUPS
  ]
  top = max(chosen, key=lambda x: score(of_run[x]))
  start = next(x for x in best if (x.prompts, x.group) == (32, 16))
  variants = [
    *((cell, "grpo") for cell in chosen),
    (top, "dppo"),
    *((cell, "neyman") for cell in chosen),
    (start, "automatic"),
  ]
  return [
    cell._replace(method=method, seed=seed)
    for part in (variants[:4], variants[-1:], variants[4:-1])
    for seed in SEEDS
    for cell, method in part
  ]
