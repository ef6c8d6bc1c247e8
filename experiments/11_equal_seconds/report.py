"""Tables of the grid, of the methods after equal seconds, and a figure."""

import pathlib
import statistics

from matplotlib import figure as figures
import numpy as np

from dppo_jax.analysis import tables

from ..common import results
from . import grid

HERE = pathlib.Path(__file__).parent
# Of 32 groups of 16, from experiments 10 and 02: the noise scale over the
# batch, and the fraction of the noise between the completions of a prompt. On
# rings half the completions cost 0.4 of the noise that half the prompts do; on
# arithmetic the fraction is fitted to experiment 10's smaller groups.
NOISE = {
  "rings": (10.0, 0.35),
  "long rings": (10.0, 0.35),  # as for rings
  "arithmetic": (0.78, 0.4),
}
# Steps between evaluations of a method that is gone, where they differ.
EVERY = {("long rings", "automatic"): 16}


def predicted(row: dict) -> float:
  """Predicts the seconds to a target of grpo, up to a factor.

  Steps are proportional to 1 + r with the noise scale r over the batch, at the
  best learning rate; see experiments/09_when_it_pays.
  """
  noise, within = NOISE[row["task"]]
  groups = (1 - within) + within * 15 / (row["group"] - 1)
  r = noise * 32 / row["prompts"] * groups
  return row["seconds"][-1] / row["steps"] * (1 + r)


def steps_to(row: dict, mark: str) -> float:
  """Returns the steps to an accuracy; infinity if it was not reached."""
  if row["to"][mark] is None:
    return float("inf")
  usual = grid.steps_between(grid.key(row))
  every = EVERY.get((row["task"], row["method"]), usual)
  steps = [every * i for i in range(len(row["seconds"]))]
  return float(np.interp(row["to"][mark], row["seconds"], steps))


def digits(task: str) -> int:
  """Returns those of seconds."""
  return 1 if grid.TASKS[task].seconds > 10 else 2


def seconds_to(row: dict, mark: str) -> str:
  seconds = row["to"][mark]
  return "–" if seconds is None else f"{seconds:.{digits(row['task'])}f}"


def rates_table(task: str, rows: list[dict]) -> str:
  """Returns every cell at its best learning rate, of one seed."""
  of_run = {grid.key(row): row for row in rows}
  best = [of_run[x] for x in grid.best_rates(task, rows)]
  marks = [*best[0]["to"]]
  head = ["prompts x group", "rate, times the root rule", "seconds a step"]
  head += ["update", "predicted time", f"to {marks[0]}, s", *marks[1:]]
  head += [f"last ({grid.decoding(task)})"]
  lines = [
    [
      f"{row['prompts']} x {row['group']}"
      if row["method"] == "grpo"
      else row["method"],
      f"{row['factor']:g}",
      f"{row['seconds'][-1] / row['steps']:.3f}",
      f"{row['update_share']:.0%}",
      f"{predicted(row) / predicted(best[0]):.2f}"
      if row["method"] == "grpo"
      else "–",
      *(seconds_to(row, mark) for mark in marks),
      f"{row['accuracy'][-1]:.3f}",
    ]
    for row in best
  ]
  return tables.markdown(head, lines)


def median_of(values: list[float], places: int) -> str:
  """Formats the median; infinite ones are the largest, and are counted."""
  reached = sum(x < float("inf") for x in values)
  middle = statistics.median(values)
  text = "–" if middle == float("inf") else f"{middle:.{places}f}"
  return text if reached == len(values) else f"{text} ({reached})"


def seeds_table(task: str, rows: list[dict]) -> str:
  """Returns medians over the seeds that were not used for tuning."""
  runs = [x for x in rows if x["task"] == task and x["seed"]]
  kinds = sorted(
    {(x["group"], x["prompts"], x["method"], x["factor"]) for x in runs},
    reverse=True,
  )
  marks = [*runs[0]["to"]]
  head = ["prompts x group", "method", "rate", "seeds", "seconds a step"]
  head += ["update"]
  head += [f"to {marks[0]}, s", *marks[1:], f"steps to {marks[1]}"]
  head += [f"last accuracy ({grid.decoding(task)})"]
  lines = []
  for kind in kinds:
    same = [
      x
      for x in runs
      if (x["group"], x["prompts"], x["method"], x["factor"]) == kind
    ]
    group, prompts, method, factor = kind
    median = lambda of, s=same: statistics.median(map(of, s))
    seconds = lambda mark, s=same: [x["to"][mark] or float("inf") for x in s]
    lines.append(
      [
        f"{prompts} x {group}",
        method,
        f"{factor:g}",
        str(len(same)),
        f"{median(lambda x: x['seconds'][-1] / x['steps']):.3f}",
        f"{median(lambda x: x['update_share']):.0%}",
        *(median_of(seconds(mark), digits(task)) for mark in marks),
        median_of([steps_to(x, marks[1]) for x in same], 0),
        results.median_range([x["accuracy"][-1] for x in same], 3),
      ]
    )
  return tables.markdown(head, lines)


def draw(task: str, rows: list[dict]) -> None:
  """Draws the accuracy of every run of the seeds against its seconds.

  `automatic`, which chooses its size, is in every panel.
  """
  runs = [x for x in rows if x["task"] == task and x["seed"]]
  figure = figures.Figure(figsize=(10, 3.2), layout="constrained")
  axes = figure.subplots(1, len(grid.GROUPS), sharey=True)
  colours = {"grpo": "#343a40", "neyman": "#2a6f97", "dppo": "#9e2a2b"}
  colours["automatic"] = "#e07a5f"
  for axis, group in zip(axes, grid.GROUPS, strict=True):
    shown = [x for x in runs if x["method"] == "automatic"]
    shown += [
      x for x in runs if x["group"] == group and x["method"] != "automatic"
    ]
    for run in shown:
      axis.plot(
        run["seconds"],
        run["accuracy"],
        color=colours[run["method"]],
        alpha=0.6,
        label=run["method"],
      )
    handles = dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    axis.legend(handles.values(), handles.keys(), frameon=False)
    axis.set(title=f"groups of {group}", xlabel="CPU seconds of steps")
    results.tidy(axis)
  axes[0].set_ylabel(f"held-out accuracy ({grid.decoding(task)})")
  figure.savefig(HERE / f"{task.replace(' ', '_')}.png", dpi=120)


def write(rows: list[dict]) -> None:
  """Writes table.csv and a figure for every task that has results."""
  parts = []
  for task in dict.fromkeys(x["task"] for x in rows):
    parts += [f"## {task}\n", rates_table(task, rows), ""]
    if any(x["task"] == task and x["seed"] for x in rows):
      parts += [seeds_table(task, rows), ""]
      draw(task, rows)
  (HERE / "table.csv").write_text(results.to_csv("\n".join(parts)))
