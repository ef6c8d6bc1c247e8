"""The table and the picture of the results."""

from collections.abc import Iterable
import pathlib
import statistics

import matplotlib.pyplot as plt
import numpy as np

from ..common import results

HERE = pathlib.Path(__file__).parent
COLUMNS = (
  "prompts x completions",
  "baseline",
  "rate",
  "seeds",
  "sampled accuracy after 40%",
  "60%",
  "80%",
  "100%",
  "greedy",
  "trained",
  "mean squared advantage",
  "CPU seconds",
)


def groups(rows: Iterable[dict]) -> dict[tuple, list[dict]]:
  """Returns the runs of every cell, those that differ in the seed together."""
  cells: dict[tuple, list[dict]] = {}
  for row in rows:
    key = (row["prompts"], row["group"], row["baseline"], row["factor"])
    cells.setdefault(key, []).append(row)
  order = {"leave-one-out": 0, "history": 1, "snapped": 2}
  return dict(sorted(cells.items(), key=lambda x: (order[x[0][2]], x[0])))


def table(rows: list[dict]) -> list[str]:
  """Returns the lines of a task's table: medians, least and largest values."""
  lines = [f"| {' | '.join(COLUMNS)} |", "| " + "--- | " * len(COLUMNS)]
  for (prompts, group, baseline, factor), runs in groups(rows).items():
    end = runs[0]["completions"][-1]
    at = [
      [np.interp(x * end, row["completions"], row["sampled"]) for row in runs]
      for x in (0.4, 0.6, 0.8)
    ]
    median = lambda values: f"{statistics.median(values):.3f}"
    column = lambda name, runs=runs: [row[name] for row in runs]
    last = lambda name, runs=runs: [row[name][-1] for row in runs]
    line = (
      f"{prompts} x {group}",
      baseline,
      f"{factor:g}",
      str(len(runs)),
      *map(median, at),
      results.median_range(last("sampled"), digits=3),
      results.median_range(last("greedy"), digits=3),
      median(column("trained")),
      median(column("mean_square")),
      f"{statistics.median(last('cpu_seconds')):.0f}",
    )
    lines.append(f"| {' | '.join(line)} |")
  return lines


def plot(task: str, rows: list[dict], path: pathlib.Path) -> None:
  """Draws the median curves of each shape at its better rate."""
  best: dict[tuple, tuple[float, list[dict]]] = {}
  for (*shape, _), runs in groups(rows).items():
    score = statistics.median(row["sampled"][-1] for row in runs)
    key = tuple(shape)
    if key not in best or score > best[key][0]:
      best[key] = score, runs
  figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
  for number, ((prompts, group, baseline), (_, runs)) in enumerate(
    best.items()
  ):
    style = {"leave-one-out": "--", "history": ":", "snapped": "-"}[baseline]
    label = f"{prompts} x {group} {baseline}"
    for axis, x in zip(axes, ("completions", "cpu_seconds"), strict=True):
      axis.plot(
        np.median([row[x] for row in runs], axis=0),
        np.median([row["sampled"] for row in runs], axis=0),
        style,
        color=f"C{number}",
        label=label,
      )
  axes[0].set(xlabel="completions", ylabel=f"sampled accuracy, {task}")
  axes[1].set(xlabel="CPU seconds of the steps")
  axes[1].legend(frameon=False, fontsize=8)
  for axis in axes:
    results.tidy(axis)
  figure.savefig(path, dpi=130)
  plt.close(figure)


def write(rows: list[dict]) -> None:
  """Writes table.md and a picture of each task."""
  lines = ["# Every cell", ""]
  for task in dict.fromkeys(row["task"] for row in rows):
    chosen = [row for row in rows if row["task"] == task]
    lines += [f"## {task}", "", *table(chosen), ""]
    plot(task, chosen, HERE / f"{task.replace(' ', '_')}.png")
  (HERE / "table.md").write_text("\n".join(lines))
