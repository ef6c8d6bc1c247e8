"""Tables of the runs on a pretrained model, and a figure.

Seconds are CPU seconds. A run has one core, so that on an idle one they are the
seconds of the wall, and other programs on it do not change them much.
"""

from collections.abc import Sequence
import pathlib
import statistics

from matplotlib import figure as figures
import numpy as np

from dppo_jax.analysis import style, tables

from ..common import results
from . import run

HERE = pathlib.Path(__file__).parent
MARKS = (0.5, 0.6, 0.7, 0.8)
WINDOW = 4  # steps, 256 completions, whose mean accuracy is compared
MAIN = ("grpo", "dppo", "neyman")
PEERS = ("trl", "tunix")


def smooth(row: dict) -> np.ndarray:
  """Returns the mean sampled accuracy of each step and those before it."""
  values = row["accuracy"]
  starts = [max(i + 1 - WINDOW, 0) for i in range(len(values))]
  return np.array([np.mean(values[a : i + 1]) for i, a in enumerate(starts)])


def seconds_to(row: dict, mark: float) -> float | None:
  """Returns the seconds of steps until the accuracy first reaches a mark."""
  reached = np.flatnonzero(smooth(row) >= mark)
  return (
    float(np.cumsum(row["cpu_seconds"])[reached[0]]) if len(reached) else None
  )


def cell_of(row: dict) -> run.Cell:
  return run.Cell(*(row[x] for x in run.Cell._fields))


def of_methods(rows: Sequence[dict]) -> list[dict]:
  """Returns the runs that compare methods."""
  names = {cell.name for cell in (*run.METHODS, *run.FEW)}
  return [row for row in rows if cell_of(row).name in names]


def run_table(rows: Sequence[dict]) -> str:
  """Returns one line a run."""
  head = ["method", "prompts x group", "rate", "seed", "steps", "seconds"]
  head += ["update", "micro-batches", "tokens generated", "trained"]
  head += [f"to {x:.0%}, s" for x in MARKS] + ["last 4 steps", "held out"]
  lines = []
  for row in rows:
    total = sum(row["cpu_seconds"])
    to = [seconds_to(row, mark) for mark in MARKS]
    lines.append(
      [
        row["method"],
        f"{row['prompts']} x {row['group']}",
        row["rate"],
        row["seed"],
        len(row["seconds"]),
        f"{total:.0f}",
        f"{sum(row['update']) / sum(row['seconds']):.0%}",
        f"{sum(row['micro_batches']):.0f}",
        f"{sum(row['generated']):,.0f}",
        f"{sum(row['trained']):,.0f}",
        *("-" if x is None else f"{x:.0f}" for x in to),
        f"{smooth(row)[-1]:.2f}",
        f"{row['held_out'][-1]:.2f}",
      ]
    )
  return tables.markdown(head, lines)


def method_table(rows: Sequence[dict]) -> str:
  """Returns medians over seeds, with the least and the largest value."""
  head = ["method", "seeds", "seconds of a step", "micro-batches a step"]
  head += ["tokens trained", "predicted speed-up"]
  head += ["accuracy of the last 4 steps", "accuracy at 240 s"]
  lines = []
  for method in dict.fromkeys(row["method"] for row in rows):
    some = [row for row in rows if row["method"] == method]
    spread = lambda values: (
      f"{statistics.median(values):.2f} ({min(values):.2f} to "
      f"{max(values):.2f})"
    )
    at = [
      np.interp(240, np.cumsum(row["cpu_seconds"]), smooth(row)) for row in some
    ]
    trained = [sum(x["trained"]) / sum(x["generated"]) for x in some]
    predicted = [np.mean(x["predicted"]) for x in some if x["predicted"]]
    lines.append(
      [
        method,
        len(some),
        spread([np.mean(x["cpu_seconds"]) for x in some]),
        spread([np.mean(x["micro_batches"]) for x in some]),
        spread(trained),
        spread(predicted) if any(predicted) else "-",
        spread([smooth(x)[-1] for x in some]),
        spread(at),
      ]
    )
  return tables.markdown(head, lines)


def epoch_table(rows: Sequence[dict]) -> str:
  """Returns runs of several epochs, a line for each epoch."""
  head = ["method", "seed", "epoch", "seconds of a step", "of it rollout"]
  head += ["update"]
  head += ["tokens generated", "trained", "accuracy", "held out at the end"]
  names, lines = {cell.name for cell in run.EPOCHS}, []
  for row in (row for row in rows if cell_of(row).name in names):
    for start in range(0, len(row["seconds"]), run.EPOCH):
      part = slice(start, start + run.EPOCH)
      lines.append(
        [
          row["method"],
          row["seed"],
          1 + start // run.EPOCH,
          f"{np.mean(row['cpu_seconds'][part]):.1f}",
          *(
            f"{sum(row[stage][part]) / sum(row['seconds'][part]):.0%}"
            for stage in ("rollout", "update")
          ),
          f"{sum(row['generated'][part]):,.0f}",
          f"{sum(row['trained'][part]):,.0f}",
          f"{np.mean(row['accuracy'][part]):.3f}",
          f"{row['held_out'][-1]:.2f}",
        ]
      )
  return tables.markdown(head, lines)


def peer_table(rows: Sequence[dict]) -> str:
  """Returns the runs of other systems and ours on the same prompts."""
  head = ["system", "CPU seconds of a step", "tokens generated"]
  head += ["CPU ms per generated token", "accuracy of the last 4 steps"]
  theirs = [row for row in rows if row["method"] in PEERS]
  steps = min((len(row["seconds"]) for row in theirs), default=0)
  seeds = {row["seed"] for row in theirs}
  lines = []
  for row in (*(x for x in of_methods(rows) if x["seed"] in seeds), *theirs):
    seconds = sum(row["cpu_seconds"][:steps])
    tokens = sum(row["generated"][:steps])
    lines.append(
      [
        row["method"],
        f"{seconds / steps:.1f}",
        f"{tokens:,.0f}",
        f"{1000 * seconds / tokens:.1f}",
        f"{smooth(row)[steps - 1]:.2f}",
      ]
    )
  return tables.markdown(head, lines)


@style.rc()
def draw(rows: Sequence[dict]) -> figures.Figure:
  """Draws sampled accuracy over seconds: each seed, and their median."""
  figure = style.figure(height=3.4)
  axis = figure.subplots()
  for number, method in enumerate(MAIN):
    some = [row for row in rows if row["method"] == method]
    curves = [(np.cumsum(row["cpu_seconds"]), smooth(row)) for row in some]
    for x, y in curves:
      axis.plot(x, y, f"C{number}", lw=0.7, alpha=0.5)
    grid = np.linspace(20, min(x[-1] for x, _ in curves), 100)
    median = np.median([np.interp(grid, x, y) for x, y in curves], axis=0)
    axis.plot(grid, median, f"C{number}", lw=2.5, label=method)
  styles = {"trl": ("k--", "TRL (grpo)"), "tunix": ("k:", "tunix (grpo)")}
  for row in (x for x in rows if x["method"] in PEERS):
    line, label = styles[row["method"]]
    axis.plot(np.cumsum(row["cpu_seconds"]), smooth(row), line, label=label)
  axis.set(
    xlabel="CPU seconds of training steps on one core",
    ylabel=f"sampled accuracy, mean of {WINDOW} steps",
    title="SmolLM2-135M-Instruct on one-step problems: six seeds, medians",
  )
  axis.legend(loc="lower right")
  return figure


def write(rows: Sequence[dict]) -> None:
  """Writes table.csv and figure.png."""
  compared = of_methods(rows)
  theirs = [row for row in rows if row["method"] in PEERS]
  page = [
    method_table(compared),
    epoch_table(rows),
    peer_table(rows),
    run_table([row for row in rows if row["method"] not in PEERS]),
  ]
  (HERE / "table.csv").write_text(results.to_csv("\n\n".join(page)))
  style.save(draw([*compared, *theirs]), HERE / "figure.png")
