"""The tasks, each with two batch sizes a factor of eight apart.

`CELLS` names them; run.py makes their data and fine-tuned weights once.
"""

import pathlib
from typing import NamedTuple

from ..common import rings
from ..common.tasks import CONFIGS

# More rings with a faulty skill, and skills that fail less often.
MIXED = rings.Mix((0, 0, 1, 1, 1, 2, 2, 2, 3, 3), (0.2, 0.7))


class Cell(NamedTuple):
  """A task at one batch size.

  Attributes:
    task: whose model and problems.
    prompts: of a step.
    flags: of every run.
  """

  task: str
  prompts: int
  flags: tuple[str, ...]


def _cell(task: str, prompts: int, steps: int, rate: float, every: int) -> Cell:
  return Cell(
    task,
    prompts,
    (
      f"--config.data.prompts_per_step={prompts}",
      f"--config.steps={steps}",
      f"--config.optimizer.learning_rate={rate}",
      f"--config.eval.every={every}",
      f"--config.checkpoint.every={steps}",
    ),
  )


# Learning rates of the small batches are those of the large ones over the root
# of eight, as AdamW has it.
CELLS = {
  "rings, 32": _cell("rings", 32, 96, 7e-4, 6),
  "rings, 4": _cell("rings", 4, 320, 2.5e-4, 16),
  "arithmetic, 32": _cell("arithmetic", 32, 240, 2e-6, 10),
  "arithmetic, 4": _cell("arithmetic", 4, 480, 7e-7, 20),
  # Far above the noise scale: where pruning should pay most.
  "arithmetic, 256": _cell("arithmetic", 256, 64, 5.7e-6, 4),
  "mixed rings, 32": _cell("mixed", 32, 96, 2e-4, 6),
  "mixed rings, 4": _cell("mixed", 4, 320, 7e-5, 16),
}
# Cells that test the cost model; the others only test the automatic budget.
LAW = (
  *("rings, 32", "rings, 4"),
  *("arithmetic, 32", "arithmetic, 4", "arithmetic, 256"),
)


def config_of(task: str) -> str:
  """Returns the config file of the task's model."""
  return str(CONFIGS["arithmetic" if task == "arithmetic" else "rings"])


def prepare(task: str, folder: pathlib.Path) -> list[str]:
  """Writes the task's problems if needed; returns the flags that name them."""
  if task == "arithmetic":
    return []
  data = folder / f"{task}-data"
  if not (data / "eval.jsonl").exists():
    rings.write(data, mix=MIXED if task == "mixed" else rings.DEFAULT_MIX)
  return [
    f"--config.data.train={data / 'train.jsonl'}",
    f"--config.data.eval={data / 'eval.jsonl'}",
  ]
