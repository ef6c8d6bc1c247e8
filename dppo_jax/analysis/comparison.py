"""What groups of runs reached and what it cost them, and what may be claimed.

Without jax, so that what only reads runs starts at once.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from dppo_jax.analysis import statistics
from dppo_jax.analysis.groups import Group
from dppo_jax.analysis.runs import COSTS
from dppo_jax.analysis.statistics import Interval

MOST_IN_TAG = 16  # characters


@dataclasses.dataclass(frozen=True)
class Row:
  """What a group reached; by seed, and against the baseline.

  Attributes:
    ends: accuracy at each seed's last evaluation.
    accuracy: their mean.
    stderr: of the last accuracy over problems, if there is but one seed.
    gain: `accuracy` less the baseline's; None for the baseline.
    reached: `reached[cost][target]` by seed, of those that got there.
    speedups: `speedups[cost][target]`, how many times less than the baseline
      it took; None where not all seeds of both got there.
  """

  group: Group
  ends: dict[int, float]
  accuracy: Interval
  stderr: float
  gain: Interval | None
  reached: dict[str, dict[float, dict[int, float]]]
  speedups: dict[str, dict[float, Interval | None]]


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Groups side by side; the first row is the baseline.

  Attributes:
    targets: accuracies, the lowest first.
    main: the target of which the verdict speaks, or None.
    level: of the intervals of each gain and speed-up, such that all gains of a
      comparison hold together with 95%, and so do its speed-ups at a target.
    of: "held-out" or "training", whose accuracy it is.
    verdict: sentences.
    notes: what to know of the data, such as runs that have not ended.
  """

  rows: list[Row]
  targets: list[float]
  main: float | None
  level: float
  of: str
  verdict: list[str]
  notes: list[str]

  @property
  def tags(self) -> list[str]:
    """Names of the rows for narrow places: labels, or numbers of long ones."""
    labels = [row.group.label for row in self.rows]
    if max(map(len, labels)) <= MOST_IN_TAG:
      return labels
    return [str(i) for i in range(1, len(labels) + 1)]

  @property
  def baseline(self) -> Row:
    return self.rows[0]


def compare(
  groups: Sequence[Group],
  targets: Sequence[float] = (),
  baseline: str | None = None,
) -> Comparison:
  """Compares groups of runs with one of them.

  Args:
    targets: accuracies to be reached, beside those that the data suggest.
    baseline: a label; `grpo` where there is one, else the first group's.
  Raises:
    ValueError: for a baseline that there is not, and where no run has an
      accuracy yet.
  """
  groups, notes = _with_accuracy(groups)
  groups = _baseline_first(groups, baseline)
  runs = [run for group in groups for run in group.runs]
  wanted = sorted({*_targets(groups), *targets})
  level = 1 - (1 - statistics.LEVEL) / max(len(groups) - 1, 1)
  rows = []
  for group in groups:
    rows.append(_row(group, rows[0] if rows else None, wanted, level))
  main = _main(rows, wanted)
  notes += _notes(groups)
  return Comparison(
    rows,
    wanted,
    main,
    level,
    "held-out" if runs[0].evals else "training",
    _verdict(rows, main),
    notes,
  )


def _with_accuracy(groups: Sequence[Group]) -> tuple[list[Group], list[str]]:
  """Only runs whose accuracies are of one kind, and a line for each other."""
  runs = [run for group in groups for run in group.runs]
  is_held_out = any(run.evals for run in runs)
  usable = lambda run: bool(run.evals if is_held_out else run.steps)
  notes = [
    f"{run.path}: left out, it has no "
    f"{'evaluation' if is_held_out else 'step'} yet"
    for run in runs
    if not usable(run)
  ]
  kept = [
    dataclasses.replace(group, runs=[run for run in group.runs if usable(run)])
    for group in groups
  ]
  kept = [group for group in kept if group.runs]
  if not kept:
    raise ValueError("no run has made a step or an evaluation yet")
  if not is_held_out:
    notes.append(
      "nothing was held out: accuracies are those of the completions that "
      "were trained on, of which a method may choose the prompts"
    )
  return kept, notes


def _baseline_first(groups: list[Group], label: str | None) -> list[Group]:
  if label is None:
    plain = [group for group in groups if group.label == "grpo"]
    plain += [group for group in groups if group.label.startswith("grpo")]
    first = (plain or groups)[0]
  else:
    named = [group for group in groups if group.label == label]
    if not named:
      labels = ", ".join(repr(group.label) for group in groups)
      raise ValueError(f"--baseline is {label!r} but must be one of {labels}")
    first = named[0]
  return [first, *(group for group in groups if group is not first)]


def _targets(groups: Sequence[Group]) -> list[float]:
  """Half and nine tenths of the way to what every run reached."""
  curves = [run.curve()[1] for group in groups for run in group.runs]
  start = float(np.mean([y[0] for y in curves]))
  end = min(float(y.max()) for y in curves)
  if end < start + 0.05:  # no way to speak of
    return []
  marks = (start + share * (end - start) for share in (0.5, 0.9))
  return [round(float(mark), 2) for mark in marks]


def _row(
  group: Group, baseline: Row | None, targets: Sequence[float], level: float
) -> Row:
  ends = {run.seed: float(run.curve()[1][-1]) for run in group.runs}
  reached = {
    cost: {mark: _reached(group, mark, cost) for mark in targets}
    for cost in COSTS
  }
  speedups = {}
  if baseline:
    speedups = {
      cost: {
        mark: _speedup(group, by_seed, baseline, cost, mark, level)
        for mark, by_seed in found.items()
      }
      for cost, found in reached.items()
    }
  last = group.runs[0].evals[-1] if group.runs[0].evals else {}
  return Row(
    group,
    ends,
    statistics.mean([*ends.values()]),
    last.get("eval/stderr", float("nan")),
    statistics.difference(ends, baseline.ends, level) if baseline else None,
    reached,
    speedups,
  )


def _reached(group: Group, mark: float, cost: str) -> dict[int, float]:
  spent = {run.seed: run.cost_to(mark, cost) for run in group.runs}
  return {seed: x for seed, x in spent.items() if x is not None}


def _speedup(
  group: Group,
  by_seed: dict[int, float],
  baseline: Row,
  cost: str,
  mark: float,
  level: float,
) -> Interval | None:
  others = baseline.reached[cost][mark]
  all_did = len(by_seed) == len(group.runs)
  all_did &= len(others) == len(baseline.group.runs)
  # A run that began at the target took nothing: that has no ratio.
  if not all_did or min([*by_seed.values(), *others.values()]) <= 0:
    return None
  return statistics.ratio(others, by_seed, level)


def _main(rows: Sequence[Row], targets: Sequence[float]) -> float | None:
  """The target that most runs reached, and of those the highest."""
  count = lambda mark: sum(len(row.reached["seconds"][mark]) for row in rows)
  usable = [mark for mark in targets if count(mark)]
  return max(usable, key=lambda mark: (count(mark), mark), default=None)


def _notes(groups: Sequence[Group]) -> list[str]:
  notes = []
  for group in groups:
    for run in group.runs:
      if not run.is_finished:
        planned = run.config["steps"]
        notes.append(f"{run.path}: {run.done} of {planned} steps so far")
  if any(len(group.runs) == 1 for group in groups):
    notes.append(
      "with one seed nothing is known of how runs of one config differ"
    )
  lengths = {run.done for group in groups for run in group.runs}
  if len(lengths) > 1:
    notes.append(
      f"runs have {min(lengths)} to {max(lengths)} steps: accuracies at the "
      "end are after different amounts of training"
    )
  return notes


def _verdict(rows: Sequence[Row], main: float | None) -> list[str]:
  told = [row for row in rows[1:] if row.gain.n > 1]
  lines = [_sentence(row, rows[0], main) for row in told]
  untold = [row.group.label for row in rows[1:] if row.gain.n < 2]
  if untold:
    lines.append(
      f"{', '.join(untold)} against {rows[0].group.label}: too few seeds, so "
      "nothing is claimed; run more of them (--config.seed=1, ...)."
    )
  return lines


def _sentence(row: Row, baseline: Row, main: float | None) -> str:
  """What may be said of a group against the baseline, and no more."""
  parts = [_accuracy_claim(row, baseline)]
  if main is not None:
    parts.append(_time_claim(row, baseline, main))
  return f"{row.group.label}: {'; '.join(parts)}."


def _accuracy_claim(row: Row, baseline: Row) -> str:
  gain, other = row.gain, baseline.group.label
  figures = (
    f"({gain.value:+.3f}, {gain.low:+.3f} to {gain.high:+.3f}, "
    f"{gain.n} {'paired ' if gain.is_paired else ''}seeds)"
  )
  if not gain.excludes(0):
    return f"accuracy at the end not distinguishable from {other}'s {figures}"
  word = "higher" if gain.value > 0 else "lower"
  return f"accuracy at the end {word} than {other}'s {figures}"


def _time_claim(row: Row, baseline: Row, main: float) -> str:
  ratio = row.speedups["seconds"][main]
  if ratio is None:
    got = [len(x.reached["seconds"][main]) for x in (row, baseline)]
    of = [len(x.group.runs) for x in (row, baseline)]
    return (
      f"{main:.0%} was reached by {got[0]} of its {of[0]} runs and by {got[1]} "
      f"of {of[1]} of {baseline.group.label}'s, so times are not compared"
    )
  figures = f"({ratio.low:.2g} to {ratio.high:.2g})"
  if not ratio.excludes(1):
    return (
      f"training time to {main:.0%} not distinguishable "
      f"(ratio {ratio.value:.2g}, {ratio.low:.2g} to {ratio.high:.2g})"
    )
  if ratio.value > 1:
    return f"reaches {main:.0%} {ratio.value:.2g} times sooner {figures}"
  return (
    f"reaches {main:.0%} {1 / ratio.value:.2g} times later "
    f"({1 / ratio.high:.2g} to {1 / ratio.low:.2g})"
  )
