"""Training runs, each a separate process on its own core."""

from concurrent import futures
import pathlib

from dppo_jax.files import jsonl

from ..common import processes
from . import tasks

CONTROLS = "experiments/09_when_it_pays/controls.py"

_FIXED = {
  f"{name} {share:g}": (
    f"{CONTROLS}:{function}",
    f"--config.method.args.share={share}",
  )
  for name, function, shares in (
    ("neyman", "fixed", (0.5, 0.25, 0.125, 0.0625)),
    ("by chance", "uniform", (0.5, 0.25)),
  )
  for share in shares
}
BASELINE = {
  "grpo": (f"{CONTROLS}:baseline",),
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
  """Returns the variants of a cell that belong to a stage."""
  is_law = cell in tasks.LAW
  return {
    "baseline": BASELINE,
    "rest": SWEEP | (CONTROLS_ONLY | OTHERS if is_law else {}),
    "itself": ITSELF,
  }[stage]


def flags(cell: tasks.Cell, variant: str) -> list[str]:
  """Returns the flags of the cell, as the variant changes them."""
  changed = list(cell.flags)
  if variant.startswith("prompts by chance"):
    share = float(variant.rpartition(" ")[2])
    prompts = max(round(share * cell.prompts), 1)
    changed[0] = f"--config.data.prompts_per_step={prompts}"
    # Fewer prompts get less far in a step: they take more steps.
    steps = int(changed[1].partition("=")[2])
    changed[1] = f"--config.steps={int(steps / share**0.5)}"
  if variant == "grpo, twice the rate":
    rate = 2 * float(changed[2].partition("=")[2])
    changed[2] = f"--config.optimizer.learning_rate={rate}"
  return changed


class Pool:
  """Runs of cells, variants and seeds."""

  def __init__(self, root: pathlib.Path, cores: list[int]):
    self.root = root
    self._runs = processes.Runs(root, cores)

  def warm(self, task: str) -> None:
    """Fine-tunes the task's model, from which all its runs start."""
    self._start(f"warm-{task}", task, "grpo", "--config.steps=0").result()

  def start(self, cell: str, variant: str, seed: int) -> futures.Future:
    """Queues one run; its future ends with it."""
    task = tasks.CELLS[cell].task
    stages = (variants(cell, x) for x in ("baseline", "rest", "itself"))
    method, *more = next(x[variant] for x in stages if variant in x)
    return self._start(
      _name(cell, variant, seed),
      task,
      method,
      f"--config.sft.from_run={self.root / f'warm-{task}'}",
      f"--config.seed={seed}",
      *flags(tasks.CELLS[cell], variant),
      *more,
    )

  def lines(self, cell: str, variant: str, seed: int) -> list[dict] | None:
    """Returns the metrics of a finished run."""
    name = _name(cell, variant, seed)
    if not self._runs.is_done(name):
      return None
    return jsonl.read(self.root / name / "metrics.jsonl")

  def _start(
    self, name: str, task: str, method: str, *more: str
  ) -> futures.Future:
    config = f"{tasks.config_of(task)}:{method}"
    return self._runs.start(
      name, config, *tasks.prepare(task, self.root), *more
    )


def _name(cell: str, variant: str, seed: int) -> str:
  plain = f"{cell}-{variant}-{seed}"
  return plain.replace(", ", "-").replace(" ", "-")
