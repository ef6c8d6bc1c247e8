"""Tables of the grid, of the methods after equal seconds, and a figure."""

import pathlib
import statistics

from matplotlib import figure as figures

from dppo_jax.analysis import tables

from ..common import results
from . import grid

HERE = pathlib.Path(__file__).parent
# Of 32 groups of 16 on rings, from experiments 10 and 02: the noise scale over
# the batch, and the fraction of the noise that is between the completions of a
# prompt: half the completions cost 0.4 of the noise that half the prompts do.
NOISE, WITHIN = 10.0, 0.35


def predicted(row: dict) -> float:
  """Predicts the seconds to a target, up to a factor.

  Steps are proportional to 1 + r with the noise scale r over the batch, at the
  best learning rate; see experiments/09_when_it_pays.
  """
  groups = (1 - WITHIN) + WITHIN * 15 / (row["group"] - 1)
  r = NOISE * 32 / row["prompts"] * groups
  return row["seconds"][-1] / row["steps"] * (1 + r)


def seconds_to(row: dict, mark: str) -> str:
  return "–" if row["to"][mark] is None else f"{row['to'][mark]:.1f}"


def rates_table(task: str, rows: list[dict]) -> str:
  """Returns every cell at its best learning rate, of one seed."""
  of_run = {grid.key(row): row for row in rows}
  best = [of_run[x] for x in grid.best_rates(task, rows)]
  first = next(x for x in best if (x["prompts"], x["group"]) == (32, 16))
  head = ["prompts x group", "rate, times the root rule", "seconds a step"]
  head += ["update", "predicted time", "to 70%, s", "80%", "90%", "last"]
  lines = [
    [
      f"{row['prompts']} x {row['group']}",
      f"{row['factor']:g}",
      f"{row['seconds'][-1] / row['steps']:.3f}",
      f"{row['update_share']:.0%}",
      f"{predicted(row) / predicted(first):.2f}",
      *(seconds_to(row, mark) for mark in row["to"]),
      f"{row['accuracy'][-1]:.3f}",
    ]
    for row in best
  ]
  return tables.markdown(head, lines)


def median_to(runs: list[dict], mark: str) -> str:
  """Formats the median, with runs that did not get there as the largest."""
  times = sorted(x["to"][mark] or float("inf") for x in runs)
  reached = sum(x < float("inf") for x in times)
  middle = times[len(times) // 2]
  text = "–" if middle == float("inf") else f"{middle:.1f}"
  return text if reached == len(times) else f"{text} ({reached})"


def seeds_table(task: str, rows: list[dict]) -> str:
  """Returns medians over the seeds that were not used for tuning."""
  runs = [x for x in rows if x["task"] == task and x["seed"] in grid.SEEDS]
  kinds = sorted(
    {(x["group"], x["prompts"], x["method"]) for x in runs}, reverse=True
  )
  head = ["prompts x group", "method", "seeds", "steps", "update", "to 70%, s"]
  head += ["80%", "90%", "last accuracy"]
  lines = []
  for group, prompts, method in kinds:
    same = [
      x
      for x in runs
      if (x["group"], x["prompts"], x["method"]) == (group, prompts, method)
    ]
    lines.append(
      [
        f"{prompts} x {group}",
        method,
        str(len(same)),
        f"{statistics.median(x['steps'] for x in same):.0f}",
        f"{statistics.median(x['update_share'] for x in same):.0%}",
        *(median_to(same, mark) for mark in same[0]["to"]),
        results.median_range([x["accuracy"][-1] for x in same], 3),
      ]
    )
  return tables.markdown(head, lines)


def draw(task: str, rows: list[dict]) -> None:
  """Draws the accuracy of every run of the seeds against its seconds."""
  runs = [x for x in rows if x["task"] == task and x["seed"] in grid.SEEDS]
  figure = figures.Figure(figsize=(10, 3.2), layout="constrained")
  axes = figure.subplots(1, len(grid.GROUPS), sharey=True)
  colours = {"grpo": "#343a40", "neyman": "#2a6f97", "dppo": "#9e2a2b"}
  colours["automatic"] = "#e07a5f"
  for axis, group in zip(axes, grid.GROUPS, strict=True):
    for run in (x for x in runs if x["group"] == group):
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
  axes[0].set_ylabel("held-out accuracy")
  figure.savefig(HERE / f"{task.replace(' ', '_')}.png", dpi=120)


def write(rows: list[dict]) -> None:
  """Writes table.md and a figure for every task that has results."""
  parts = []
  for task in dict.fromkeys(x["task"] for x in rows):
    parts += [f"## {task}\n", rates_table(task, rows), ""]
    if any(x["task"] == task and x["seed"] in grid.SEEDS for x in rows):
      parts += [seeds_table(task, rows), ""]
      draw(task, rows)
  (HERE / "table.md").write_text("\n".join(parts))
