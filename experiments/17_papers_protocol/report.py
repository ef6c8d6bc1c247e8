"""Tables after each epoch, what a history knows, and a figure."""

from collections.abc import Mapping, Sequence
import importlib
import pathlib

from matplotlib import figure as figures
import numpy as np

from dppo_jax.analysis import statistics, style, tables

from ..common import results
from . import held_out, history, parts, run

HERE = pathlib.Path(__file__).parent
MARKS = (0.6, 0.7, 0.8, 0.9)
NORMAL = 1.96  # standard errors of a 95% interval
# Speed-ups of the first epoch, written before the runs.
EXPECTED = {
  "single": {
    "GRPO as published, no KL": 1.2,
    "our grpo": 1.75,
    "dppo 0.7": 1.25,
    "dppo 0.5": 1.15,
    "dppo 0.9": 1.4,
    "dppo 0.7, group": 1.2,
    "cppo": 1.55,
    "cppo, same prompts": 1.55,
    "pods": 1.55,
    "neyman": 1.2,
    "d3s": 1.6,
    "greso": 0.8,
    "greso, exact, no KL": 0.8,
  },
  "words": {
    "our grpo": 1.7,
    "dppo 0.7": 1.25,
    "dppo 0.9": 1.4,
    "cppo": 1.55,
    "neyman": 1.25,
  },
}
Key = tuple[str, int]  # row, seed
Runs = dict[Key, list[dict]]  # lines of epochs 0, 1, 2, ...


def by_run(lines: Sequence[dict]) -> Runs:
  """Returns the lines of each run in the order of epochs, without gaps."""
  table: Runs = {}
  for name in run.ROWS:
    for seed in sorted({x["seed"] for x in lines}):
      some = [x for x in lines if (x["row"], x["seed"]) == (name, seed)]
      some = sorted(some, key=lambda x: x["epoch"])
      whole = [x for i, x in enumerate(some) if x["epoch"] == i]
      if len(whole) > 1:
        table[name, seed] = whole
  return table


def total(lines: Sequence[dict], key: str) -> float:
  return float(sum(x[key] for x in lines))


def accuracy(line: dict, decoding: str = "sampled") -> statistics.Interval:
  """Returns the mean accuracy over the sets, in points; NaN if unknown."""
  if not line[decoding]:
    return statistics.Interval(*3 * [np.nan])
  sets = 100 * np.array([line[decoding][x] for x in held_out.KINDS])
  half = NORMAL * np.sqrt(
    np.mean(np.square((sets[:, 2] - sets[:, 1]) / 2 / NORMAL)) / len(sets)
  )
  middle = float(sets[:, 0].mean())
  return statistics.Interval(middle, middle - float(half), middle + float(half))


def change(a: dict, b: dict, decoding: str = "sampled") -> statistics.Interval:
  """Returns the difference `a - b` of accuracies, in points."""
  x, y = accuracy(a, decoding), accuracy(b, decoding)
  half = float(np.hypot(x.high - x.value, y.high - y.value))
  return statistics.Interval(*(x.value - y.value + z for z in (0, -half, half)))


def epoch_table(table: Runs) -> str:
  """Returns the papers' columns after each epoch."""
  head = ["after epochs", "row", "seed", "CPU s of all steps", "speed-up"]
  head += ["of the last epoch", "sampled, mean of six sets"]
  head += ["change in points", "greedy", "change of greedy"]
  lines = []
  for epoch in range(1, max(map(len, table.values()), default=1)):
    for (name, seed), some in table.items():
      base = table.get((run.PUBLISHED, seed), [])
      if min(len(some), len(base)) <= epoch:
        continue
      both = [x[1 : epoch + 1] for x in (base, some)]
      seconds = [total(x, "cpu_seconds") for x in both]
      last = [x[-1]["cpu_seconds"] for x in both]
      ends = some[epoch], base[epoch]
      is_base = name == run.PUBLISHED
      shown = lambda x: statistics.with_interval(x, digits=1)
      lines.append(
        [
          epoch,
          name,
          seed,
          f"{seconds[1]:,.0f}",
          f"{seconds[0] / seconds[1]:.2f}",
          f"{last[0] / last[1]:.2f}",
          shown(accuracy(ends[0])),
          "-" if is_base else shown(change(*ends)),
          f"{accuracy(ends[0], 'greedy').value:.1f}",
          "-" if is_base else shown(change(*ends, "greedy")),
        ]
      )
  return tables.markdown(head, lines)


def summary_table(table: Runs, task: str) -> str:
  """Returns what was expected and seen: means over seeds, per epoch and row.

  A change has the interval over seeds or, of a single seed, that of its
  evaluations.
  """
  lines = []
  names = [x for x in run.ROWS if x != run.PUBLISHED]
  for epoch in range(1, max(map(len, table.values()), default=1)):
    far = {key: some for key, some in table.items() if len(some) > epoch}
    for name in names:
      pairs = {
        seed: (far[run.PUBLISHED, seed], some)
        for (row, seed), some in far.items()
        if row == name and (run.PUBLISHED, seed) in far
      }
      if not pairs:
        continue
      spent = [
        {x: total(y[i][1 : epoch + 1], "cpu_seconds") for x, y in pairs.items()}
        for i in (0, 1)
      ]
      gains = [
        _over_seeds([change(y[epoch], x[epoch], z) for x, y in pairs.values()])
        for z in ("sampled", "greedy")
      ]
      ends = [y[epoch] for _, y in pairs.values()]
      trained = np.mean([x["trained"] / x["generated"] for x in ends])
      expected = EXPECTED[task].get(name, "-") if epoch == 1 else "-"
      lines.append(
        [
          *(epoch, name, len(pairs), expected),
          statistics.with_interval(statistics.ratio(*spent), 2),
          *(statistics.with_interval(x, 1) for x in gains),
          f"{trained:.2f}",
          f"{max(x['max_weight'] for x in ends):.1f}",
        ]
      )
  head = ["after epochs", "row", "seeds", "expected", "speed-up"]
  head += ["change in points", "change of greedy"]
  head += ["trained of generated", "largest weight"]
  return tables.markdown(head, lines)


def _over_seeds(changes: Sequence[statistics.Interval]) -> statistics.Interval:
  values = [x.value for x in changes]
  return statistics.mean(values) if len(values) > 1 else changes[0]


def seconds_to(some: Sequence[dict], mark: float) -> float | None:
  """Returns the CPU seconds until the mean accuracy of 4 steps is a mark."""
  curves = importlib.import_module("experiments.15_real_model.report")
  return curves.seconds_to(curve(some), mark)


def curve(some: Sequence[dict]) -> dict[str, list[float]]:
  """Returns seconds and sampled accuracy of all steps of a run."""
  join = lambda key: [x for line in some[1:] for x in line[key]]
  return {
    "cpu_seconds": join("step_cpu_seconds"),
    "accuracy": join("step_accuracy"),
  }


def work_table(table: Runs) -> str:
  """Returns seconds to accuracies, tokens and parts of a step by epoch."""
  head = ["row", "seed", "epoch", *(f"s to {x:.0%}" for x in MARKS)]
  head += ["CPU s a step", "rollout", "score", "update", "micro-batches"]
  head += [
    "CPU s of one",
    "prompts rolled out",
    "tokens generated",
    "trained of generated",
  ]
  head += ["sampled accuracy", "largest weight", "noise"]
  lines = []
  for (name, seed), some in table.items():
    to = [seconds_to(some, mark) for mark in MARKS]
    for x in some[1:]:
      drawn = x["steps"] * run.ROWS[name].prompts
      shares = [x[y] / x["seconds"] for y in ("rollout", "score", "update")]
      noise = [y for y in x["noise_fraction"] if y]
      lines.append(
        [
          *(name, seed, x["epoch"]),
          *("-" if y is None else f"{y:.0f}" for y in to),
          f"{x['cpu_seconds'] / x['steps']:.1f}",
          *(f"{y:.0%}" for y in shares),
          f"{x['micro_batches'] / x['steps']:.2f}",
          f"{parts.costs(x)[0]:.2f}",
          f"{x['prompts'] / drawn:.2f}",
          f"{x['generated']:,.0f}",
          f"{x['trained'] / x['generated']:.2f}",
          f"{np.mean(x['step_accuracy']):.3f}",
          f"{x['max_weight']:.1f}",
          f"{np.mean(noise):.2f}" if noise else "-",
        ]
      )
  return tables.markdown(head, lines)


def set_table(table: Runs) -> str:
  """Returns each set's accuracy at the end of each epoch."""
  lines = []
  for (name, seed), some in table.items():
    for x in some:
      for decoding in ("sampled", "greedy"):
        if sets := x[decoding]:
          values = [statistics.Interval(*sets[y]) for y in held_out.KINDS]
          shown = [statistics.with_interval(y, 2) for y in values]
          lines.append([name, seed, x["epoch"], decoding, *shown])
  head = ["row", "seed", "epoch", "decoding", *held_out.KINDS]
  return tables.markdown(head, lines)


def history_table(table: Runs) -> str:
  """Returns what the history of groups knows, where no prompt is pruned."""
  head = ["row", "seed", "epoch", "groups"]
  head += ["without variance, predicted", "true", *history.NAMES]
  lines = []
  for (name, seed), some in table.items():
    for epoch in range(2, len(some)):
      x = history.knowledge(some[1 : epoch + 1])
      if not x or run.ROWS[name].method == "dppo":
        continue
      gains = [f"{y:.2f}" for y in x.gains]
      rates = f"{x.predicted:.2f}", f"{x.true:.2f}"
      lines.append([name, seed, epoch, x.groups, *rates, *gains])
  return tables.markdown(head, lines)


@style.rc()
def draw(table: Runs) -> figures.Figure:
  """Draws held-out and sampled accuracy over time, of the main rows.

  The first epoch of GRPO as published, with the same seed and so on the same
  machine, takes time 1. Dashed after seed 0. Other rows would need more colours
  than there are.
  """
  figure = style.figure(height=3.6)
  left, right = figure.subplots(1, 2, sharex=True)
  smooth = importlib.import_module("experiments.15_real_model.report").smooth
  names = [*run.TURNS[0], *run.TURNS[1]]
  for (name, seed), some in table.items():
    base = table.get((run.PUBLISHED, seed), [])
    if name not in names or len(base) < 2:
      continue
    colour, dashes = f"C{names.index(name)}", "-" if not seed else "--"
    steps = curve(some)
    unit = base[1]["cpu_seconds"]
    label = name if name not in left.get_legend_handles_labels()[1] else None
    left.plot(
      np.cumsum(steps["cpu_seconds"]) / unit,
      smooth(steps),
      f"{colour}{dashes}",
      label=label,
    )
    spent = np.cumsum([0.0, *(x["cpu_seconds"] for x in some[1:])]) / unit
    means = [accuracy(x) for x in some]
    errors = [
      [x.value - x.low for x in means],
      [x.high - x.value for x in means],
    ]
    right.errorbar(
      spent, [x.value for x in means], errors, fmt=f"{colour}o{dashes}"
    )
  xlabel = "time, in epochs of GRPO as published"
  left.set(xlabel=xlabel, ylabel="sampled, mean of 4 steps")
  right.set(xlabel=xlabel, ylabel="held out, mean of six sets, %")
  left.legend(loc="best", fontsize=8)
  return figure


def write(tasks: Mapping[str, Sequence[dict]]) -> None:
  """Prints the tables of each task, and writes them and its figure."""
  for task, lines in tasks.items():
    table = by_run(lines)
    others = epoch_table, work_table, set_table, history_table
    pages = [summary_table(table, task), *(x(table) for x in others)]
    page = "\n\n".join(pages)
    print(f"## {task}\n\n{page}\n")
    (HERE / f"{task}.csv").write_text(results.to_csv(page))
    style.save(draw(table), HERE / f"{task}.png")
