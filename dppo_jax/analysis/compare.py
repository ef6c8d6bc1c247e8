"""Compares runs in a table and a picture.

Runs that differ only in their seed form a group, named after the options in
which it differs from others. The first run's group is the baseline. Runs may be
unfinished.
"""

import argparse
from collections.abc import Sequence
import json
import pathlib
import sys
from typing import NamedTuple

from matplotlib import figure as figures
import numpy as np

from dppo_jax.analysis import jsonl, runs, statistics, style, tables
from dppo_jax.errors import UserError

# Options, and sections of them, that do not make a run another experiment.
_IGNORED = ("seed.", "steps.", "eval.every.", "eval.columns.", "sft.from_run.")
_IGNORED += ("checkpoint.", "log.", "fingerprints.")
_LEGEND = (
  "Accuracy is the last held-out accuracy; seconds are those of training\n"
  "steps; tokens are those trained on; ± and parentheses are 95% t-intervals\n"
  "over seeds, differences and ratios paired by seed."
)


class Group(NamedTuple):
  """Runs that differ only in their seed."""

  label: str
  runs: list[runs.Run]

  def accuracies(self) -> dict[int, float]:
    """The last accuracy by seed."""
    return {run.seed: float(run.curve()[1][-1]) for run in self.runs}

  def seconds_to(self, target: float) -> dict[int, float]:
    """Training seconds to an accuracy by seed, of the runs that reached it."""
    spent = {run.seed: run.cost_to(target) for run in self.runs}
    return {seed: x for seed, x in spent.items() if x is not None}


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the comparison, and writes it with `--to`."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add("runs", nargs="+", metavar="RUN", help="a workdir")
  add("--to", type=pathlib.Path, help="directory for compare.md, compare.png")
  add("--target", type=float, help="accuracy to which times are compared")
  args = parser.parse_args(argv)
  try:
    groups = group([runs.load(path) for path in dict.fromkeys(args.runs)])
    target = args.target or default_target(groups)
    print(tables.aligned(*table(groups, target)), _LEGEND, sep="\n\n")
    if args.to:
      args.to.mkdir(parents=True, exist_ok=True)
      style.save(draw(groups, target), args.to / "compare.png")
      parts = ["# Runs compared", "![accuracy over seconds](compare.png)"]
      parts += [tables.markdown(*table(groups, target)), _LEGEND]
      jsonl.replace(args.to / "compare.md", ["\n\n".join(parts), "\n"])
      print(f"\n{args.to / 'compare.md'}")
  except UserError as error:
    sys.exit(f"error: {error}")


def group(members: Sequence[runs.Run]) -> list[Group]:
  """Groups runs by all options but the seed, in the order of the runs."""
  by_options: dict[str, list[runs.Run]] = {}
  for run in members:
    same = by_options.setdefault(json.dumps(_options(run)), [])
    if not run.evals:
      raise UserError(f"{run.path} has no evaluation yet: leave it out")
    if run.seed in [other.seed for other in same]:
      raise UserError(
        f"{run.path} has the options and the seed of another run: leave it out"
      )
    same.append(run)
  options = [json.loads(key) for key in by_options]
  labels = [_label(x, options) for x in options]
  return [*map(Group, labels, by_options.values())]


def _options(run: runs.Run) -> dict:
  """The options that make the run what it is, by dotted name."""
  # Fine-tuning does not count if it was another run's.
  ignored = _IGNORED + ("sft.",) * bool(run.config["sft.from_run"])
  return {
    f"{name}.{key}".rstrip("."): x
    for name, value in sorted(run.config.items())
    for key, x in (value if isinstance(value, dict) else {"": value}).items()
    if not f"{name}.".startswith(ignored)
  }


def _label(options: dict, others: Sequence[dict]) -> str:
  """The method, and the options that differ among the groups that have them."""
  words = [options["method.name"]]
  for name, value in options.items():
    is_constant = all(x.get(name, value) == value for x in others)
    if not is_constant and name != "method.name":
      words.append(f"{name.split('.args.')[-1]}={value}")
  return " ".join(words)


def default_target(groups: Sequence[Group]) -> float:
  """Nine tenths of the way to the accuracy that every run reached."""
  curves = [run.curve()[1] for group in groups for run in group.runs]
  start, reached = np.mean([y[0] for y in curves]), min(map(max, curves))
  return round(float(start + 0.9 * (reached - start)), 2)


def table(groups: Sequence[Group], target: float) -> tuple[list, list[list]]:
  """Head and rows of the comparison, a row for each group."""
  head = ["", "seeds", "accuracy", "difference", f"s to {target:.0%}"]
  rows, baseline = [], groups[0]
  for group in groups:
    accuracies, is_other = group.accuracies(), group != baseline
    gain = statistics.difference(accuracies, baseline.accuracies())
    spent = [*group.seconds_to(target).values()]
    seconds = f"{np.mean(spent):.3g}" if spent else "-"
    if 0 < len(spent) < len(group.runs):
      seconds += f" ({len(spent)} runs)"
    row = [group.label, str(len(group.runs))]
    row.append(_with_error(statistics.mean([*accuracies.values()])))
    row.append(_with_error(gain, "+") if is_other else "")
    row += [seconds, _speed_up(group, baseline, target) if is_other else ""]
    for metric in ("step/seconds", "tokens/trained"):
      x = np.mean([x[metric] for run in group.runs for x in run.steps])
      row.append(f"{x:,.3g}" if x < 1000 else f"{x:,.0f}")
    rows.append(row)
  return [*head, "speed-up", "s/step", "tokens/step"], rows


def _with_error(x: statistics.Interval, sign: str = "") -> str:
  error = "" if np.isnan(x.low) else f" ± {x.value - x.low:.3f}"
  return f"{x.value:{sign}.3f}{error}"


def _speed_up(group: Group, baseline: Group, target: float) -> str:
  """The ratio of the times to the target; empty unless all runs reached it."""
  times = [x.seconds_to(target) for x in (baseline, group)]
  # A run that starts above the target takes 0 seconds and has no ratio.
  seconds = [x for by_seed in times for x in by_seed.values() if x]
  if len(seconds) < len(baseline.runs + group.runs):
    return ""
  value, low, high = statistics.ratio(*times)
  return f"{value:.2f}" + ("" if np.isnan(low) else f" ({low:.2f}-{high:.2f})")


@style.rc()
def draw(groups: Sequence[Group], target: float) -> figures.Figure:
  """Draws the mean accuracy with its interval over training seconds."""
  figure = style.figure(height=4)
  axis = figure.subplots()
  for group in groups:
    x, (y, low, high) = statistics.band([run.curve() for run in group.runs])
    axis.plot(x, y, label=group.label)
    axis.fill_between(x, low, high, alpha=0.15, linewidth=0)
  axis.axhline(target, color=style.FAINT, linestyle=":")
  axis.set(xlabel="training seconds", ylabel="held-out accuracy")
  style.format_axes(axis)
  axis.legend()
  return figure


if __name__ == "__main__":
  main()
