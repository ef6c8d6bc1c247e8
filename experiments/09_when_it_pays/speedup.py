"""Speed-ups of one run over another, from their accuracy curves."""

from collections.abc import Sequence
import math
import statistics

import numpy as np

LEVELS = 12  # of accuracy, at which times are compared


def curve(lines: Sequence[dict]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Steps, CPU seconds of the steps, and held-out accuracy at evaluations.

  A step that measured noise counts as long as the one before it.
  """
  spent, last, at = 0.0, 0.0, {0: 0.0}
  for line in lines:
    if "step/cpu_seconds" in line:
      if not line.get("noise/measured") or not last:
        last = line["step/cpu_seconds"]
      spent += last
      at[line["step"]] = spent
  points = {
    line["step"]: line["eval/accuracy"]
    for line in lines
    if "eval/accuracy" in line
  }
  steps = np.array(sorted(points), float)
  return (
    steps,
    np.array([at[int(s)] for s in steps]),
    np.array([points[int(s)] for s in steps]),
  )


def undisturbed(runs: Sequence[list[dict] | None]) -> list[tuple | None]:
  """Curves of one variant's seeds, None for a missing run.

  Other work on the machine makes a step take more CPU seconds, never less: all
  seeds are taken to need as long for a step, on average, as the fastest.
  """
  curves = [curve(lines) if lines else None for lines in runs]
  paces = [c[1][-1] / c[0][-1] for c in curves if c]
  return [
    c and (c[0], c[1] * (min(paces) * c[0][-1] / c[1][-1]), c[2])
    for c in curves
  ]


def crossing(x: np.ndarray, y: np.ndarray, level: float) -> float | None:
  """Returns where the running maximum of a curve first reaches a level."""
  y = np.maximum.accumulate(y)
  if y[-1] < level:
    return None
  i = int(np.argmax(y >= level))
  if i == 0:
    return float(x[0])
  part = (level - y[i - 1]) / (y[i] - y[i - 1])
  return float(x[i - 1] + part * (x[i] - x[i - 1]))


def ratio(slow, fast, axis: int) -> float:
  """Median over accuracies that both reach of one's cost over the other's.

  Args:
    slow, fast: curves; what comes out is above 1 where `fast` is faster.
    axis: 0 for steps, 1 for seconds.
  """
  top = min(max(slow[2]), max(fast[2]))
  bottom = max(slow[2][0], fast[2][0])
  levels = bottom + (top - bottom) * np.linspace(0.2, 0.95, LEVELS)
  logs = []
  for level in levels:
    a = crossing(slow[axis], slow[2], level)
    b = crossing(fast[axis], fast[2], level)
    if a and b:
      logs.append(math.log(a / b))
  return math.exp(statistics.median(logs)) if logs else math.nan


def mean_curve(curves: Sequence[tuple]) -> tuple:
  """Averages curves of runs that are evaluated at the same steps."""
  num = min(len(c[0]) for c in curves)
  return tuple(np.mean([c[i][:num] for c in curves], axis=0) for i in range(3))
