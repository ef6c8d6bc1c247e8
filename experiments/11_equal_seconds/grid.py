"""The tasks, and the cells of the grid: prompts per step and group size."""

import pathlib
from typing import NamedTuple

from ..common import rings
from ..common.tasks import CONFIGS, RINGS

HERE = pathlib.Path(__file__).parent
LONG = RINGS / "data" / "long"
# More rounds, and more rings with a faulty skill, each seldomer at fault: few
# groups have zero variance.
LONG_ROUNDS = (4, 5, 6)
LONG_MIX = rings.Mix((0, 1, 1, 1, 1, 2, 2, 2), (0.05, 0.4))


class Task(NamedTuple):
  """A task.

  Attributes:
    seconds: CPU seconds of the steps of every run.
    rate: learning rate for 512 completions per step, before tuning.
    every: steps between evaluations, at 512 completions per step.
    marks: accuracies, the time to which is measured.
    completions: numbers of completions of a step, the smallest first.
    factors: on the learning rate, tried in every cell.
    small_factors: also tried on the smallest batches.
    seed_factor: of the other seeds; 0 for the best of each cell.
    seeds: other than that of the tuning.
    flags: of every run.
  """

  config: pathlib.Path
  seconds: int
  rate: float
  every: float
  completions: tuple[int, ...]
  factors: tuple[float, ...]
  marks: tuple[float, ...] = (0.7, 0.8, 0.9)
  small_factors: tuple[float, ...] = ()
  seed_factor: float = 0.0
  seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
  flags: tuple[str, ...] = ()


# The KL penalty of the GRPO paper: zero advantages are trained on, too.
_LONG = (
  f"--config.data.train={LONG / 'train.jsonl'}",
  f"--config.data.eval={LONG / 'eval.jsonl'}",
  "--config.rollout.max_tokens=200",
  "--config.pack.row_length=240",
  "--config.pack.rows_per_micro=11",
  "--config.model.remat=layers",
  "--config.objective.args.beta=0.04",
  "--config.eval.samples=2",
)
TASKS = {
  # The highest rate failed on larger batches.
  "rings": Task(
    CONFIGS["rings"],
    seconds=60,
    rate=7e-4,
    every=6,
    completions=(128, 256, 512),
    factors=(1.0, 0.5),
    small_factors=(2.0,),
  ),
  "arithmetic": Task(
    CONFIGS["arithmetic"],
    seconds=8,
    rate=2.8e-6,
    every=0.5,
    completions=(128, 512),
    factors=(32.0, 8.0),
    small_factors=(128.0,),
    seed_factor=8.0,  # at the best, four steps are enough
  ),
  "long rings": Task(
    CONFIGS["rings"],
    seconds=50,
    rate=7e-4,
    every=2,
    completions=(128,),
    factors=(1.0, 0.5),
    marks=(0.4, 0.45, 0.5),
    flags=_LONG,
  ),
}
GROUPS = (2, 4, 8, 16)
# Prompts and largest group of the rows `automatic`, whose rule is no more.
AUTOMATIC = 32, 16


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


def decoding(task: str) -> str:
  """Returns how the completions of a task's evaluations were decoded."""
  is_sampled = "--config.eval.samples=2" in TASKS[task].flags
  return "sampled x 2" if is_sampled else "greedy"


def prepare(task: str) -> None:
  """Writes the problems of a task."""
  if task == "rings":
    rings.write(RINGS / "data")
  elif task == "long rings":
    rings.write(LONG, mix=LONG_MIX, rounds=LONG_ROUNDS)


def flags(run: Run) -> list[str]:
  """Returns the options of a run.

  The learning rate grows with the root of the completions, as AdamW has it.
  """
  task, completions = TASKS[run.task], run.prompts * run.group
  rate = run.factor * task.rate * (completions / 512) ** 0.5
  return [
    *task.flags,
    f"--config.data.prompts_per_step={run.prompts}",
    f"--config.rollout.group_size={run.group}",
    f"--config.optimizer.learning_rate={rate}",
    f"--config.eval.every={steps_between(run)}",
    f"--config.seed={run.seed}",
    "--config.steps=100000",
    "--config.log.writers=",
    f"--config.callbacks={HERE / 'stop.py'}:after_step",
  ]


def steps_between(run: Run) -> int:
  """Returns the steps between evaluations of a run."""
  every = TASKS[run.task].every
  return max(int(every * 512 / (run.prompts * run.group)), 1)


def cells(task: str) -> list[Run]:
  """Returns the grid, the largest batches first."""
  return [
    Run(task, completions // group, group, 1.0)
    for completions in reversed(TASKS[task].completions)
    for group in reversed(GROUPS)
  ]


def rates(task: str, rows: list[dict]) -> list[Run]:
  """Returns the runs that tune the learning rate of each cell."""
  del rows
  grid, limits = cells(task), TASKS[task]
  return [
    *(cell._replace(factor=x) for x in limits.factors for cell in grid),
    *(
      cell._replace(factor=x)
      for x in limits.small_factors
      for cell in grid[-len(GROUPS) :]
    ),
  ]


def score(row: dict) -> tuple[int, float]:
  """Returns a key that is larger for better runs: marks, then seconds."""
  reached = [x for x in row["to"].values() if x is not None]
  return len(reached), -reached[-1] if reached else row["accuracy"][-1]


def best_rates(task: str, rows: list[dict], factor: float = 0.0) -> list[Run]:
  """Returns each cell with the rate of its best run, `automatic` last.

  Args:
    factor: takes this one instead of the best. `automatic` then has the
      learning rate of the smallest batches, as it samples about as many.
  """
  tuned = [x for x in rows if x["task"] == task and x["seed"] == 0]
  if factor:
    automatic_factor = factor * (TASKS[task].completions[0] / 512) ** 0.5
    is_same = lambda x: (
      x["factor"]
      == (automatic_factor if x["method"] == "automatic" else factor)
    )
    tuned = [x for x in tuned if is_same(x)]
  grid = [*cells(task), Run(task, *AUTOMATIC, 1.0, "automatic")]
  best = []
  for cell in grid:
    name = lambda x: (x.prompts, x.group, x.method)
    same = [row for row in tuned if name(key(row)) == name(cell)]
    if same:
      best.append(key(max(same, key=score)))
  return best


def seeds(task: str, rows: list[dict]) -> list[Run]:
  """Returns runs of each group size's best cell, a seed at a time."""
  of_run = {key(row): row for row in rows}
  best = best_rates(task, rows, TASKS[task].seed_factor)
  top = lambda runs: max(runs, key=lambda x: score(of_run[x]))
  plain = [x for x in best if x.method == "grpo"]
  chosen = [top(x for x in plain if x.group == group) for group in GROUPS]
  variants = [
    *((cell, "grpo") for cell in chosen),
    (top(chosen), "dppo"),
    *((cell, "neyman") for cell in chosen),
  ]
  return [
    cell._replace(method=method, seed=seed)
    for seed in TASKS[task].seeds
    for cell, method in variants
  ]
