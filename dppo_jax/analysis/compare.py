"""Compares runs in a table and a picture.

Runs that differ only in their seed form a group, described by the options in
which it differs from others. The first run's group is the baseline. Runs may be
unfinished.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import itertools
import json
import pathlib
import re
import sys
from typing import Any, NamedTuple

from matplotlib import figure as figures
import numpy as np

from dppo_jax.analysis import runs, statistics, style, tables
from dppo_jax.errors import UserError
from dppo_jax.files import jsonl

# Options, and sections of them, that do not make a run another experiment.
_IGNORED = tuple(
  "checkpoint. eval.every. fingerprints. log. seed. sft.from_run.".split()
)
_METHOD, _RATE = "method.name", "optimizer.learning_rate"
_DASHES = ("--", "-.", ":")  # of learning rates but the best
_LEGEND = """\
The baseline is the group of the first run; * is the most accurate learning rate
of several, if the others are below its interval. Accuracy is the last held-out
one, greedy or of n samples a problem ("sampled x n"), seconds are those of
training steps, tokens those trained on. ± and parentheses are 95% intervals
over seeds (Student's t), of differences and ratios paired by seed, if one group
has all seeds of the other."""

_OTHER_LENGTHS = "Some groups have runs of different numbers of steps."
_OTHER_SETS = "Some runs were evaluated on other problems than others."
_UNMOVED = (
  "No run has moved: none has an accuracy above the interval of its first one."
)


class Group(NamedTuple):
  """Runs that differ only in their seed.

  Attributes:
    options: the method, and options in which groups differ, by dotted name.
    is_best: the most accurate of several learning rates, all else being equal.
  """

  options: dict[str, Any]
  runs: list[runs.Run]
  is_baseline: bool
  is_best: bool = False

  @property
  def sweep(self) -> str:
    """The options as text, without the learning rate."""
    shown = (x for x in self.options.items() if x[0] not in (_METHOD, _RATE))
    words = [f"{_short(name)}={value}" for name, value in shown]
    return " ".join([self.options[_METHOD], *words])

  @property
  def label(self) -> str:
    rate = f" {_short(_RATE)}={self.options.get(_RATE)}{'*' * self.is_best}"
    return self.sweep + rate * (_RATE in self.options)

  @property
  def accuracy(self) -> float:
    return float(np.mean([*self.accuracies().values()]))

  @property
  def low(self) -> float:
    """The lower end of the interval over seeds or, of one, over problems."""
    low = statistics.mean([*self.accuracies().values()]).low
    last = self.runs[0].evals[-1]
    return (
      last.get("eval/accuracy_low", self.accuracy) if np.isnan(low) else low
    )

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
    if args.to and args.to.is_file():
      raise UserError(f"--to: {args.to} is a file: name a directory")
    if args.target is not None and not 0 < args.target <= 1:
      raise UserError(f"--target is {args.target:g} but must be in (0, 1]")
    members = [_of_one_decoding(runs.load(x)) for x in dict.fromkeys(args.runs)]
    groups = group(members)
    target = args.target or default_target(groups)
    legend = _LEGEND if target else f"{_LEGEND}\n{_UNMOVED}"
    sets = {x.config.get("fingerprints.eval") for x in members} - {None}
    legend += f"\n{_OTHER_SETS}" * (len(sets) > 1)
    last = lambda group: {run.evals[-1]["step"] for run in group.runs}
    has_others = any(len(last(x)) > 1 for x in groups)
    legend += f"\n{_OTHER_LENGTHS}" * has_others
    print(tables.aligned(*table(groups, target)), legend, sep="\n\n")
    if args.to:
      with jsonl.writing(args.to):
        args.to.mkdir(parents=True, exist_ok=True)
        style.save(plot(groups, target), args.to / "compare.png")
      parts = ["# Runs compared", "![accuracy over seconds](compare.png)"]
      parts += [tables.markdown(*table(groups, target)), legend]
      jsonl.replace(args.to / "compare.md", ["\n\n".join(parts), "\n"])
      print(f"\n{args.to / 'compare.md'}")
  except UserError as error:
    sys.exit(f"error: {error}")


def _of_one_decoding(run: runs.Run) -> runs.Run:
  """Returns a run with the evaluations that were decoded as its last one."""
  name = "eval/samples"
  evals = [x for x in run.evals if bool(x[name]) == bool(run.evals[-1][name])]
  return dataclasses.replace(run, evals=evals)


def group(members: Sequence[runs.Run]) -> list[Group]:
  """Groups runs by all options but the seed.

  Methods are in the order of the runs, their options in numerical order.
  """
  by_options: dict[str, list[runs.Run]] = {}
  for run in members:
    same = by_options.setdefault(json.dumps(_options(run)), [])
    if not run.evals:
      raise UserError(f"{run.path} has no evaluation yet: leave it out")
    if run.seed in [other.seed for other in same]:
      raise UserError(
        f"{run.path} has the options and the seed of another run (the run in "
        "config.sft.from_run does not count, its step does): leave it out"
      )
    same.append(run)
  options = [json.loads(key) for key in by_options]
  # Methods have arguments of their own.
  missing = lambda name, x: x if ".args." in name else None
  differs = lambda name, x: any(
    y.get(name, missing(name, x)) != x for y in options
  )
  groups: list[Group] = []
  for values, same in zip(options, by_options.values(), strict=True):
    shown = {k: x for k, x in values.items() if k == _METHOD or differs(k, x)}
    groups.append(Group(shown, same, is_baseline=not groups))
  for i, x in enumerate(groups):
    others = [y.accuracy for y in groups if y.sweep == x.sweep and y is not x]
    is_best = bool(others) and max(others) < x.low
    groups[i] = x._replace(is_best=is_best)
  methods, names = [x.options[_METHOD] for x in groups], _columns(groups)
  return sorted(
    groups,
    key=lambda group: (
      methods.index(group.options[_METHOD]),
      *(_sort_key(group.options.get(name)) for name in names),
    ),
  )


def _accuracy_name(groups: Sequence[Group]) -> str:
  """The name of the accuracies of groups, by how they were decoded."""
  decodings = {run.decoding for group in groups for run in group.runs}
  return f"accuracy ({' or '.join(sorted(decodings, reverse=True))})"


def _columns(groups: Sequence[Group]) -> list[str]:
  """Names of the options that differ, the learning rate last."""
  names = {name for group in groups for name in group.options}
  return sorted(names - {_METHOD}, key=lambda name: (name == _RATE, name))


def _sort_key(value: Any) -> tuple:
  """Sorts numbers, in text too, as numbers and before other text."""
  try:
    return 0, float(value), ""
  except (TypeError, ValueError):
    return 1, 0.0, str(value)


def _short(name: str) -> str:
  """A dotted name without the section of arguments and of the optimizer."""
  return name.split(".args.")[-1].removeprefix("optimizer.")


def _options(run: runs.Run) -> dict:
  """The options that make the run what it is, by dotted name."""
  ignored, config = [*_IGNORED], run.config
  if config.get("optimizer.schedule", "constant") == "constant":
    ignored.append("steps.")
  # A seed may have a run of its own to start from, whose fine-tuning does not
  # count, but a step does.
  if start := config.get("sft.from_run"):
    ignored.append("sft.")
  options = {
    f"{name}.{key}".rstrip("."): x
    for name, value in sorted(config.items())
    for key, x in (value if isinstance(value, dict) else {"": value}).items()
    if not f"{name}.".startswith(tuple(ignored))
  }
  if step := re.search(r"@0*[1-9]\d*$", start or ""):
    options["sft.from_run"] = step[0]
  return options


def default_target(groups: Sequence[Group]) -> float | None:
  """Nine tenths of the way to what every run reached that has moved, if any."""
  members = [run for group in groups for run in group.runs if run.has_moved]
  if not members:
    return None
  curves = [run.curve()[1] for run in members]
  start, reached = np.mean([y[0] for y in curves]), min(map(max, curves))
  start = min(start, reached)  # some may start above what others reached
  target = float(start + 0.9 * (reached - start))
  rounded = round(target, 2)
  return rounded if start < rounded <= reached else target


def table(
  groups: Sequence[Group], target: float | None
) -> tuple[list, list[list]]:
  """Head and rows of the comparison, a row for each group.

  Args:
    target: accuracy to which times are compared; None for no times.
  """
  names = _columns(groups)
  head = ["method", *map(_short, names), "seeds", _accuracy_name(groups)]
  head.append("difference")
  head += [f"s to {100 * target:.3g}%", "speed-up"] if target else []
  head += ["s/step", "tokens/step"]
  last_steps = [[y for run in x.runs for y in run.steps[-1:]] for x in groups]
  noise = [*map(runs.noise_scale, last_steps)]
  rows, (baseline,) = [], [x for x in groups if x.is_baseline]
  for group, scale in zip(groups, noise, strict=True):
    accuracies, is_other = group.accuracies(), not group.is_baseline
    gain = statistics.difference(accuracies, baseline.accuracies())
    mark = {_RATE: "*" if group.is_best else " "}  # keeps numbers aligned
    row = [str(group.options.get(x, "")) + mark.get(x, "") for x in names]
    row = [group.options[_METHOD], *row, str(len(group.runs))]
    row.append(_with_error(statistics.mean([*accuracies.values()])))
    row.append(_with_error(gain, "+") if is_other else "baseline")
    if target:
      row.append(_seconds(group, target))
      row.append(_speed_up(group, baseline, target) if is_other else "")
    for metric in ("step/seconds", "tokens/trained"):
      values = [x[metric] for run in group.runs for x in run.steps]
      row.append(_number(float(np.mean(values))) if values else "-")
    rows.append(row + [scale] * any(noise))
  return head + ["noise scale"] * any(noise), rows


def _number(x: float) -> str:
  return f"{x:,.3g}" if x < 1000 else f"{x:,.0f}"


def _seconds(group: Group, target: float) -> str:
  """The mean time to the target, of the runs that reached it."""
  spent = [*group.seconds_to(target).values()]
  if not spent:
    return "-"
  seconds = _number(float(np.mean(spent))) if any(spent) else "at the start"
  some = f" ({len(spent)} runs)" * (len(spent) < len(group.runs))
  return seconds + some


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
def plot(groups: Sequence[Group], target: float | None) -> figures.Figure:
  """Draws the mean accuracy with its interval over training seconds."""
  figure = style.figure(height=4)
  axis = figure.subplots()
  sweeps = [group.sweep for group in groups]
  colours = dict(zip(dict.fromkeys(sweeps), itertools.cycle(style.COLOURS)))
  for number, group in enumerate(groups):
    x, (y, low, high) = statistics.band([run.curve() for run in group.runs])
    is_main = group.is_best or sweeps.count(group.sweep) == 1
    dashes = _DASHES[sweeps[:number].count(group.sweep) % len(_DASHES)]
    color = colours[group.sweep]
    axis.plot(
      x,
      y,
      label=group.label,
      color=color,
      ls="-" if is_main else dashes,
      lw=2 if is_main else 1,
    )
    axis.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
  if target:
    axis.axhline(target, color=style.FAINT, linestyle=":")
  axis.set(
    xlabel="training seconds", ylabel=f"held-out {_accuracy_name(groups)}"
  )
  style.format_axes(axis)
  axis.legend(fontsize=8)
  return figure


if __name__ == "__main__":
  main()
