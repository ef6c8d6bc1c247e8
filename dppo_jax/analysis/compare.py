"""Compares runs: curves, a table, a verdict.

  python -m dppo_jax.analysis.compare RUN RUN ... [--to=DIR] [--target=0.8]

Runs that differ in their seed alone are a group; the groups are named after
what they differ in. With --to it writes compare.md, compare.png and
compare.json there. A run may be unfinished; a directory that is no run costs a
line on standard error and the exit status 1, the others are compared.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import json
import pathlib
import sys
import textwrap

import numpy as np

from dppo_jax.analysis import comparison, groups, runs
from dppo_jax.analysis.comparison import Comparison, Row
from dppo_jax.analysis.statistics import Interval
from dppo_jax.metrics import jsonl, tables


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the comparison; returns 0, or 1 where a directory was no run."""
  args = _parse(argv)
  found, is_whole = [], True
  for path in dict.fromkeys(args.runs):
    try:
      found.append(runs.load(path, args.clock))
    except ValueError as error:
      print(error, file=sys.stderr)
      is_whole = False
  if not found:
    print("none of these is a run", file=sys.stderr)
    return 1
  grouped, left_out = groups.group(found)
  try:
    result = comparison.compare(grouped, args.target, args.baseline)
  except ValueError as error:
    print(error, file=sys.stderr)
    return 1
  result.notes[:0] = left_out
  print(text(result))
  if args.to:
    print(f"\n{write(result, args.to)}")
  return 0 if is_whole else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
  summary, _, rest = __doc__.partition("\n")
  parser = argparse.ArgumentParser(
    prog="python -m dppo_jax.analysis.compare",
    description=summary,
    epilog=rest,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("runs", nargs="+", metavar="RUN", help="a workdir")
  parser.add_argument("--to", type=pathlib.Path, help="where files go")
  parser.add_argument(
    "--target",
    type=_share,
    action="append",
    default=[],
    help="an accuracy to be reached, from 0 to 1; may be repeated",
  )
  parser.add_argument("--baseline", help="label of the group to compare with")
  parser.add_argument(
    "--clock",
    default="step/seconds",
    choices=("step/seconds", "step/cpu_seconds"),
    help="what training seconds are; cpu_seconds where runs shared a machine",
  )
  return parser.parse_args(argv)


def _share(word: str) -> float:
  try:
    value = float(word)
  except ValueError:
    value = -1.0
  if not 0 < value <= 1:
    raise argparse.ArgumentTypeError(f"{word} is not above 0 and at most 1")
  return value


def write(result: Comparison, folder: pathlib.Path) -> pathlib.Path:
  """Writes compare.md, compare.png and compare.json; returns the first."""
  from dppo_jax.analysis import overlay
  from dppo_jax.metrics import style  # matplotlib takes its time

  folder.mkdir(parents=True, exist_ok=True)
  style.save(overlay.draw(result), folder / "compare.png")
  content = json.dumps(to_json(result), indent=2, allow_nan=False)
  jsonl.replace(folder / "compare.json", [content, "\n"])
  path = folder / "compare.md"
  jsonl.replace(path, [markdown(result), "\n"])
  return path


def text(result: Comparison) -> str:
  """For a terminal of 80 columns."""
  lines = []
  labels = [row.group.label for row in result.rows]
  if result.tags != labels:
    lines += [
      _wrapped(f"{tag}  {label}")
      for tag, label in zip(result.tags, labels, strict=True)
    ] + [""]
  for title, head, rows in _tables(result, result.tags):
    lines += [title, "", tables.aligned(head, rows), ""]
  lines += [_wrapped(line) for line in [*_explained(result), *result.verdict]]
  lines += [_wrapped(f"Note: {line}") for line in result.notes]
  return "\n".join(lines)


def markdown(result: Comparison) -> str:
  """The page of the comparison."""
  parts = [f"# {' against '.join(row.group.label for row in result.rows)}"]
  if result.verdict:
    parts.append("\n".join(f"- {line}" for line in result.verdict))
  parts.append("![accuracy against what it cost](compare.png)")
  labels = [row.group.label for row in result.rows]
  for title, head, rows in _tables(result, labels):
    parts += [f"## {title}", tables.markdown(head, rows)]
  parts.append(" ".join(_explained(result)))
  if result.notes:
    parts.append("\n".join(f"- {line}" for line in result.notes))
  parts += ["## Runs", _runs(result)]
  return "\n\n".join(parts)


def to_json(result: Comparison) -> dict:
  """The comparison as plain values; None where there is no number."""
  rows = []
  for row in result.rows:
    values = {
      "label": row.group.label,
      "options": row.group.options,
      "runs": [str(run.path) for run in row.group.runs],
      "seeds": row.group.seeds,
    }
    for name in ("ends", "accuracy", "stderr", "gain", "reached", "speedups"):
      values[name] = getattr(row, name)
    rows.append(values)
  names = ("targets", "main", "level", "of", "verdict", "notes")
  return _plain({n: getattr(result, n) for n in names} | {"groups": rows})


def _plain(x):
  if isinstance(x, Interval):
    return _plain(x._asdict())
  if dataclasses.is_dataclass(x):
    return _plain(dataclasses.asdict(x))
  if isinstance(x, dict):
    return {str(name): _plain(value) for name, value in x.items()}
  if isinstance(x, list | tuple):
    return [_plain(value) for value in x]
  if isinstance(x, float | np.floating):
    return float(x) if np.isfinite(x) else None
  return x


def _tables(
  result: Comparison, names: Sequence[str]
) -> list[tuple[str, list[str], list[list[str]]]]:
  """Title, head and rows of each table; `names` are those of the groups."""
  of = f"{result.of} accuracy"
  head = ["", "seeds", of, f"minus {tables.short(names[0], 8)}"]
  head += ["s/step", "tokens/step"]
  rows = [
    [
      name,
      str(len(row.group.runs)),
      _accuracy(row),
      _gain(row.gain) if row.gain else "",
      f"{_mean(row, lambda run: run.total(run.clock)):.3g}",
      f"{_mean(row, lambda run: run.total('tokens/trained')):,.0f}",
    ]
    for name, row in zip(names, result.rows, strict=True)
  ]
  found = [("What they reached", head, rows)]
  for target in result.targets:
    head = ["", "seeds", "seconds", "prompts", "tokens", "times sooner"]
    rows = [
      [name, *_cost_cells(row, target)]
      for name, row in zip(names, result.rows, strict=True)
    ]
    found.append((f"What {target:.0%} took", head, rows))
  return found


def _mean(row: Row, total) -> float:
  """Of a total in each run, the mean over all of their steps."""
  steps = sum(len(run.steps) for run in row.group.runs)
  return sum(map(total, row.group.runs)) / max(steps, 1)


def _accuracy(row: Row) -> str:
  at = row.accuracy
  if at.n > 1:
    return f"{at.value:.3f} ± {at.high - at.value:.3f}"
  return f"{at.value:.3f}"


def _gain(gain: Interval) -> str:
  if gain.n < 2:
    return f"{gain.value:+.3f}"
  return f"{gain.value:+.3f} ± {gain.high - gain.value:.3f}"


def _cost_cells(row: Row, target: float) -> list[str]:
  by_cost = [row.reached[cost][target] for cost in runs.COSTS]
  did, of = len(by_cost[0]), len(row.group.runs)
  cells = [
    tables.amount(float(np.mean([*x.values()]))) if x else "-" for x in by_cost
  ]
  ratio = row.speedups["seconds"][target] if row.speedups else None
  if ratio is None:
    last = ""
  elif ratio.n < 2:
    last = f"{ratio.value:.2f}"
  else:
    last = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
  return [f"{did} of {of}", *cells, last]


def _explained(result: Comparison) -> list[str]:
  many = any(len(row.group.runs) > 1 for row in result.rows)
  lines = [
    "Accuracy is that of the last evaluation; tokens are those trained on; "
    "seconds are those of training steps, without evaluation, fine-tuning and "
    "compilation; costs are means of the runs that got there."
  ]
  if many:
    lines.append("± is half of a 95% t-interval over seeds.")
  if many and len(result.rows) > 2:
    lines.append(
      "Against the baseline the intervals are wider "
      f"({result.level:.1%}), so that all {len(result.rows) - 1} hold together."
    )
  return lines


def _runs(result: Comparison) -> str:
  rows = [
    (row.group.label, str(run.seed), f"{run.done}", str(run.path))
    for row in result.rows
    for run in row.group.runs
  ]
  return tables.markdown(("group", "seed", "steps", "directory"), rows)


def _wrapped(line: str) -> str:
  return textwrap.fill(line, 80, subsequent_indent="  ")


if __name__ == "__main__":
  sys.exit(main())
