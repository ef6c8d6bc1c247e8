"""Reads runs from their working directories."""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib

import numpy as np

from dppo_jax.analysis import statistics
from dppo_jax.errors import UserError
from dppo_jax.files import bucket, json_object, jsonl, paths

SECONDS = "step/seconds"
SCALE_LIMIT = 1e6  # prompts; a larger gradient noise scale is unknown
STAGES = (
  "data rollout reward update_history dynamic_sampling "
  "select score update budget"
).split()


@dataclasses.dataclass(frozen=True)
class Run:
  """The records of a run, finished or not.

  Attributes:
    config: options by dotted name, as in config.json.
    steps, evals: lines of metrics.jsonl.
  """

  path: pathlib.Path
  config: dict
  steps: list[dict]
  evals: list[dict]

  @property
  def seed(self) -> int:
    return self.config["seed"]

  def total(self, metric: str) -> float:
    """Sum of a metric over the steps."""
    return float(sum(line.get(metric, 0.0) for line in self.steps))

  @property
  def decoding(self) -> str:
    """The decoding of `eval/accuracy`: "greedy", or "sampled x 2"."""
    samples = self.evals[-1]["eval/samples"]
    return f"sampled x {samples:.0f}" if samples else "greedy"

  @property
  def has_moved(self) -> bool:
    """True if an accuracy is above the 95% interval of the first one."""
    first, *others = self.evals
    limit = first.get("eval/accuracy_high", first["eval/accuracy"])
    return any(line["eval/accuracy"] > limit for line in others)

  def curve(self, metric: str = SECONDS) -> tuple[np.ndarray, np.ndarray]:
    """Sum of a metric over the steps, and accuracy, at each evaluation."""
    at = [line["step"] for line in self.evals]
    spent = [line.get(metric, 0.0) for line in self.steps]
    done = [line["step"] for line in self.steps]
    x = np.interp(at, [0, *done], np.cumsum([0.0, *spent]))
    return x, np.array([line["eval/accuracy"] for line in self.evals])

  def cost_to(self, target: float, metric: str = SECONDS) -> float | None:
    """Sum of a metric until the accuracy first reaches `target`, or None.

    Accuracy is linear between evaluations.
    """
    x, y = self.curve(metric)
    if not (y >= target).any():
      return None
    first = int(np.argmax(y >= target))
    near = slice(max(first - 1, 0), first + 1)
    return float(np.interp(target, y[near], x[near]))


def accuracies(
  line: Mapping[str, float], prefix: str = "eval"
) -> dict[str, statistics.Interval]:
  """Returns the accuracies of an evaluation by decoding, sampled first.

  Args:
    line: metrics, with `eval/samples`.
    prefix: start of the names of the set's metrics.
  """
  metrics = {"sampled": "accuracy", "greedy": "greedy_accuracy"}
  if not line["eval/samples"]:
    metrics = {"greedy": "accuracy"}
  return {
    decoding: statistics.Interval(
      *(line.get(f"{prefix}/{x}{end}", np.nan) for end in ("", "_low", "_high"))
    )
    for decoding, x in metrics.items()
    if f"{prefix}/{x}" in line
  }


def noise_scale(steps: Sequence[dict]) -> str:
  """The mean gradient noise scale of steps as text; empty if not measured."""
  scales = [x["noise/scale"] for x in steps if "noise/scale" in x]
  if not scales:
    return ""
  is_known = max(scales) < SCALE_LIMIT
  return f"{np.mean(scales):,.0f} prompts" if is_known else "unknown"


def load(workdir: str | pathlib.Path) -> Run:
  """Reads the run in `workdir`, finished or not."""
  names = "config.json", "metrics.jsonl"
  path = pathlib.Path(bucket.local(paths.absolute(str(workdir)), names=names))
  kinds = {"seed": int, "method.name": str, "changes": dict | None}
  hint = f"{path} is not a run"
  config = json_object.read(path / "config.json", kinds, hint)
  lines = jsonl.read(path / "metrics.jsonl")
  for line in lines:
    for name, value in line.items():
      is_number = isinstance(value, int | float)
      # Others may be NaN or infinite if training has failed.
      if not is_number or (name == "eval/accuracy" and not np.isfinite(value)):
        raise UserError(
          f"{path / 'metrics.jsonl'}: {name} of step {line['step']} is "
          f"{value!r} but must be a number"
        )
  steps = [line for line in lines if SECONDS in line]
  # Earlier versions did not log the number of samples.
  samples = {"eval/samples": config.get("eval.samples", 0)}
  evals = [samples | line for line in lines if "eval/accuracy" in line]
  return Run(path, config, steps, evals)
