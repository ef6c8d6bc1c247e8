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

import numpy as np

from dppo_jax.analysis import jsonl, runs, statistics, tables
from dppo_jax.analysis.runs import Run
from dppo_jax.errors import UserError

# Options, and sections of them, that do not make a run another experiment.
_IGNORED = ("seed", "steps", "eval.every", "eval.columns", "sft.from_run")
_IGNORED_SECTIONS = ("checkpoint.", "log.")
_LEGEND = (
  "Accuracy is the last held-out accuracy; seconds are those of training\n"
  "steps; tokens are those trained on; ± and parentheses are 95% t-intervals\n"
  "over seeds, differences and ratios paired by seed."
)


class Group(NamedTuple):
  """Runs that differ only in their seed."""

  label: str
  runs: list[Run]

  def accuracies(self) -> dict[int, float]:
    """The last accuracy by seed."""
    return {run.seed: float(run.curve()[1][-1]) for run in self.runs}

  def seconds_to(self, target: float) -> dict[int, float]:
    """Training seconds to an accuracy by seed, of the runs that reached it."""
    spent = {run.seed: run.cost_to(target) for run in self.runs}
    return {seed: x for seed, x in spent.items() if x is not None}


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the comparison; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m dppo_jax.analysis.compare", description=__doc__
  )
  parser.add_argument("runs", nargs="+", metavar="RUN", help="a workdir")
  parser.add_argument(
    "--to", type=pathlib.Path, help="directory for compare.md and compare.png"
  )
  parser.add_argument(
    "--target",
    type=float,
    help="accuracy to which times are compared; by default nine tenths of the "
    "way to the accuracy that every run reached",
  )
  args = parser.parse_args(argv)
  try:
    groups = group([runs.load(path) for path in dict.fromkeys(args.runs)])
    target = args.target or default_target(groups)
    print(tables.aligned(*table(groups, target)), _LEGEND, sep="\n\n")
    if args.to:
      print(f"\n{write(groups, target, args.to)}")
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  return 0


def group(members: Sequence[Run]) -> list[Group]:
  """Groups runs by all options but the seed, in the order of the runs.

  Raises:
    UserError: if a run has no evaluation, or two runs have the same options and
      seed, as copies do.
  """
  by_options: dict[str, list[Run]] = {}
  for run in members:
    if not run.evals:
      raise UserError(f"{run.path} has no evaluation yet: leave it out")
    same = by_options.setdefault(json.dumps(_options(run)), [])
    if run.seed in [other.seed for other in same]:
      raise UserError(
        f"{run.path} has the options and the seed of another run: leave it out"
      )
    same.append(run)
  options = [json.loads(key) for key in by_options]
  labels = [_label(x, options) for x in options]
  return [*map(Group, labels, by_options.values())]


def _options(run: Run) -> dict:
  """The options that make the run what it is, by dotted name."""
  ignored = _IGNORED_SECTIONS
  if run.config.get("sft.from_run"):  # another run was fine-tuned
    ignored += ("sft.",)
  options = {}
  for name, value in sorted(run.config.items()):
    if name not in _IGNORED and not name.startswith(ignored):
      nested = value if isinstance(value, dict) else {"": value}
      options |= {f"{name}.{k}".rstrip("."): x for k, x in nested.items()}
  return options


def _label(options: dict, others: Sequence[dict]) -> str:
  """The method, and the options that differ among the groups that have them."""
  words = [options["method.name"]]
  for name, value in options.items():
    owner, is_arg, arg = name.partition(".args.")
    kind = f"{owner}.name"  # other methods have other arguments
    peers = [x for x in others if not is_arg or x[kind] == options[kind]]
    differs = any(x.get(name, value) != value for x in peers)
    if differs and name != "method.name":
      words.append(f"{arg or name}={value}")
  return " ".join(words)


def default_target(groups: Sequence[Group]) -> float:
  """Nine tenths of the way to the accuracy that every run reached."""
  curves = [run.curve()[1] for group in groups for run in group.runs]
  start, reached = np.mean([y[0] for y in curves]), min(map(max, curves))
  return round(float(start + 0.9 * (reached - start)), 2)


def table(
  groups: Sequence[Group], target: float
) -> tuple[list[str], list[list[str]]]:
  """Head and rows of the comparison, a row for each group."""
  head = ["", "seeds", "accuracy", "difference", f"s to {target:.0%}"]
  rows, baseline = [], groups[0]
  for group in groups:
    steps = max(sum(len(run.steps) for run in group.runs), 1)
    per_step = lambda name, group=group, steps=steps: (
      sum(run.total(name) for run in group.runs) / steps
    )
    accuracies, spent = group.accuracies(), group.seconds_to(target)
    accuracy, low, _ = statistics.mean([*accuracies.values()])
    row = [group.label, str(len(group.runs))]
    row.append(f"{accuracy:.3f}" + _error(accuracy - low))
    gain, low, _ = statistics.difference(accuracies, baseline.accuracies())
    row.append(f"{gain:+.3f}" + _error(gain - low) if group != baseline else "")
    seconds = f"{np.mean([*spent.values()]):.3g}" if spent else "-"
    is_partial = 0 < len(spent) < len(group.runs)
    row.append(seconds + (f" ({len(spent)} runs)" if is_partial else ""))
    row.append(_speed_up(group, baseline, target))
    row.append(f"{per_step('step/seconds'):.3g}")
    rows.append([*row, f"{per_step('tokens/trained'):,.0f}"])
  return [*head, "speed-up", "s/step", "tokens/step"], rows


def _error(x: float) -> str:
  return "" if np.isnan(x) else f" ± {x:.3f}"


def _speed_up(group: Group, baseline: Group, target: float) -> str:
  """The ratio of the times to the target; empty unless all runs reached it."""
  times = [x.seconds_to(target) for x in (baseline, group)]
  missing = len(baseline.runs + group.runs) - len(times[0]) - len(times[1])
  # A run that starts above the target takes 0 seconds and has no ratio.
  if (
    group == baseline
    or missing
    or 0 in [*times[0].values(), *times[1].values()]
  ):
    return ""
  value, low, high = statistics.ratio(*times)
  return f"{value:.2f}" + ("" if np.isnan(low) else f" ({low:.2f}-{high:.2f})")


def write(
  groups: Sequence[Group], target: float, folder: pathlib.Path
) -> pathlib.Path:
  """Writes compare.md and compare.png; returns the path of the page."""
  from dppo_jax.analysis import style  # imports matplotlib, which is slow

  folder.mkdir(parents=True, exist_ok=True)
  style.save(draw(groups, target), folder / "compare.png")
  title = f"# {' against '.join(group.label for group in groups)}"
  parts = [title, "![accuracy against its cost](compare.png)"]
  parts += [tables.markdown(*table(groups, target)), _LEGEND]
  jsonl.replace(folder / "compare.md", ["\n\n".join(parts), "\n"])
  return folder / "compare.md"


def draw(groups: Sequence[Group], target: float):
  """Draws the mean accuracy with its interval, over seconds and over tokens."""
  from dppo_jax.analysis import style

  with style.rc():
    figure = style.figure(height=3.6 + 0.1 * len(groups))
    axes = figure.subplots(1, 2, sharey=True)
    for axis, cost in zip(
      axes, ("step/seconds", "tokens/trained"), strict=True
    ):
      for group in groups:
        curves = [run.curve(cost) for run in group.runs]
        x, (y, low, high) = statistics.band(curves)
        axis.plot(x, y, label=group.label)
        axis.fill_between(x, low, high, alpha=0.15, linewidth=0)
      axis.axhline(target, color=style.FAINT, linestyle=":")
      axis.set_xlabel(f"{cost}, sum over steps")
      style.format_axes(axis)
    axes[0].set_ylabel("held-out accuracy")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
  return figure


if __name__ == "__main__":
  sys.exit(main())
