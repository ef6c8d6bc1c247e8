"""The table and the picture of the results."""

from collections.abc import Iterable, Iterator
import csv
import pathlib
import statistics

from matplotlib import figure as figures
import numpy as np

from ..common import results

HERE = pathlib.Path(__file__).parent
# CPU seconds of steps after which the accuracy is compared.
SECONDS = {"rings": (10, 14), "long rings": (30, 50), "arithmetic": (2, 3)}
FEWEST = 3  # seeds of a curve


def groups(rows: Iterable[dict]) -> dict[tuple, list[dict]]:
  """Returns the runs of every cell, those that differ in the seed together."""
  cells: dict[tuple, list[dict]] = {}
  for row in rows:
    key = (row["prompts"], row["group"], row["baseline"], row["factor"])
    cells.setdefault(key, []).append(row)
  order = {"leave-one-out": 0, "last visit": 1, "history": 2, "snapped": 3}
  return dict(sorted(cells.items(), key=lambda x: (order[x[0][2]], x[0])))


def median(values: Iterable[float]) -> str:
  return f"{statistics.median(values):.3f}"


def table(rows: list[dict]) -> Iterator[dict[str, str]]:
  """Yields a line for each cell: medians over seeds, sampled unless named."""
  for (prompts, group, baseline, factor), runs in groups(rows).items():
    after = lambda x, name, runs=runs: median(
      np.interp(x, row[name], row["sampled"]) for row in runs
    )
    last = lambda name, runs=runs: [row[name][-1] for row in runs]
    ends = results.median_range(last("sampled"), digits=3)
    yield {
      "task": runs[0]["task"],
      "prompts x completions": f"{prompts} x {group}",
      "baseline": baseline,
      "rate": f"{factor:g}",
      "seeds": str(len(runs)),
      **{
        f"after {x:,} completions": after(x, "completions")
        for x in runs[0]["completions"][1:-1]
      },
      "at the end": ends,
      **{
        f"after {x} CPU seconds": after(x, "cpu_seconds")
        for x in SECONDS[runs[0]["task"]]
      },
      "greedy": median(last("greedy")),
      "trained": median([row["trained"] for row in runs]),
      "mean squared advantage": median([row["mean_square"] for row in runs]),
      "CPU seconds": f"{statistics.median(last('cpu_seconds')):.1f}",
    }


def plot(task: str, rows: list[dict], path: pathlib.Path) -> None:
  """Draws the median curves of each shape at its better rate."""
  best: dict[tuple, tuple[float, list[dict]]] = {}
  for (*shape, _), runs in groups(rows).items():
    score = statistics.median(row["sampled"][-1] for row in runs)
    key = tuple(shape)
    if len(runs) < FEWEST:
      continue
    if key not in best or score > best[key][0]:
      best[key] = score, runs
  figure = figures.Figure(figsize=(10, 3.8), layout="constrained")
  axes = figure.subplots(1, 2)
  for number, ((prompts, group, baseline), (_, runs)) in enumerate(
    best.items()
  ):
    style = {"leave-one-out": "--", "last visit": ":"}.get(baseline, "-")
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


def write(rows: list[dict]) -> None:
  """Writes the table and the picture of each task."""
  tasks: dict[str, list[dict]] = {}
  for row in rows:
    tasks.setdefault(row["task"], []).append(row)
  for task, chosen in tasks.items():
    lines, name = [*table(chosen)], task.replace(" ", "_")
    with (HERE / f"{name}.csv").open("w", newline="") as file:
      writer = csv.DictWriter(file, lines[0].keys(), lineterminator="\n")
      writer.writeheader()
      writer.writerows(lines)
    plot(task, chosen, HERE / f"{name}.png")
