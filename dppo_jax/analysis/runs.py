"""Runs on disk, and groups of those that differ in their seed alone.

Without jax, so that what only reads runs starts at once.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
import pathlib
from typing import Any

import numpy as np

from dppo_jax.metrics import jsonl

# What an accuracy costs: the metric whose sum over steps it is, and its name.
COSTS = {
  "seconds": ("step/seconds", "training seconds"),
  "prompts": ("prompts/drawn", "prompts drawn"),
  "tokens": ("tokens/trained", "tokens trained"),
}
STAGES = (  # of a step
  "data",
  "rollout",
  "reward",
  "update_history",
  "dynamic_sampling",
  "select",
  "score",
  "update",
)
# Where nothing is held out: means of the training accuracy over so many parts.
PARTS = 20


@dataclasses.dataclass(frozen=True)
class Run:
  """What a run has written so far.

  Attributes:
    config: options by dotted name, as in config.json.
    steps, evals: lines of metrics.jsonl.
    clock: the metric that tells a step's seconds.
  """

  path: pathlib.Path
  config: dict
  steps: list[dict]
  evals: list[dict]
  clock: str = "step/seconds"

  @property
  def seed(self) -> int:
    return self.config.get("seed", 0)

  @property
  def done(self) -> int:
    """Steps done."""
    return self.steps[-1]["step"] if self.steps else 0

  @property
  def is_finished(self) -> bool:
    return self.done >= self.config.get("steps", 0)

  def total(self, metric: str) -> float:
    """Sum of a metric over the steps."""
    return float(sum(line.get(metric, 0.0) for line in self.steps))

  def cost_at(self, cost: str, steps: Sequence[int]) -> np.ndarray:
    """What had been spent when these steps were done; see `COSTS`."""
    metric = self.clock if cost == "seconds" else COSTS[cost][0]
    spent = [line.get(metric, 0.0) for line in self.steps]
    done = [line["step"] for line in self.steps]
    return np.interp(steps, [0, *done], np.cumsum([0.0, *spent]))

  def curve(self, cost: str = "seconds") -> tuple[np.ndarray, np.ndarray]:
    """What had been spent at each evaluation, and the accuracy then.

    Where nothing is held out, means of the accuracy of what was trained on.
    """
    step, accuracy = self._accuracy
    return self.cost_at(cost, step), accuracy

  def cost_to(self, mark: float, cost: str = "seconds") -> float | None:
    """What was spent until the accuracy was `mark`, or None if it never was.

    Between evaluations it is taken to be linear.
    """
    return crossing(mark, *self.curve(cost))

  @functools.cached_property
  def _accuracy(self) -> tuple[np.ndarray, np.ndarray]:
    if self.evals:
      points = {line["step"]: line["eval/accuracy"] for line in self.evals}
      return np.array([*points], float), np.array([*points.values()], float)
    step = np.array([line["step"] for line in self.steps], float)
    accuracy = [line.get("reward/accuracy", np.nan) for line in self.steps]
    return smooth(step, np.array(accuracy, float), PARTS)


def load(workdir: str | pathlib.Path, clock: str = "step/seconds") -> Run:
  """The run in a directory, finished or not.

  Raises:
    ValueError: where there is none, or its files cannot be read.
  """
  path = pathlib.Path(workdir)
  try:
    config = json.loads((path / "config.json").read_text("utf-8"))
    config["method.name"], config["seed"]
    config.pop("fingerprints", None)
  except OSError:
    raise ValueError(f"{path} is no run: it has no config.json") from None
  except (ValueError, LookupError, TypeError) as error:
    raise ValueError(f"{path}/config.json is no config: {error!r}") from None
  try:
    lines = jsonl.read(path / "metrics.jsonl")
    lines = [line for line in lines if isinstance(line.get("step"), int)]
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"{path}/metrics.jsonl cannot be read: {error}") from None
  return Run(
    path,
    config,
    steps=[line for line in lines if clock in line],
    evals=[line for line in lines if "eval/accuracy" in line],
    clock=clock,
  )


def call(config: Mapping[str, Any], what: str) -> str:
  """The method of a config, or its objective, with its arguments."""
  args = config.get(f"{what}.args", {}).items()
  args = ", ".join(f"{name}={value}" for name, value in args)
  return f"{config.get(f'{what}.name', '?')}({args})"


def crossing(mark: float, x: np.ndarray, y: np.ndarray) -> float | None:
  """Where the line through points first is at `mark`; None if it never is."""
  above = np.flatnonzero(y >= mark)
  if not above.size:
    return None
  i = above[0]
  if i == 0:
    return float(x[0])
  share = (mark - y[i - 1]) / (y[i] - y[i - 1])
  return float(x[i - 1] + share * (x[i] - x[i - 1]))


def smooth(
  x: np.ndarray, y: np.ndarray, parts: int
) -> tuple[np.ndarray, np.ndarray]:
  """Means over at most `parts` runs of neighbours; the last x of each."""
  if not len(x):
    return x, y
  size = -(-len(x) // parts)  # each as long, but the last
  split = lambda values: np.split(values, range(size, len(x), size))
  return (
    np.array([part[-1] for part in split(x)]),
    np.array([part.mean() for part in split(y)]),
  )
