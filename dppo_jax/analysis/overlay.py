"""Groups of runs in one picture: accuracy against what it cost."""

from matplotlib import figure as figures
from matplotlib import lines
import numpy as np

from dppo_jax.analysis import comparison, runs, statistics
from dppo_jax.metrics import style

TITLES = {
  "seconds": "Accuracy over training time",
  "prompts": "over prompts drawn",
  "tokens": "over tokens trained",
}


def draw(result: comparison.Comparison) -> figures.Figure:
  """Accuracy against seconds, prompts and tokens, and times to a target."""
  with style.rc():
    is_short = result.tags == [row.group.label for row in result.rows]
    figure = style.figure(6.6 if is_short else 6.6 + 0.2 * len(result.rows))
    grid = figure.add_gridspec(2, 2)
    for place, cost in zip(
      (grid[0, 0], grid[0, 1], grid[1, 0]), runs.COSTS, strict=True
    ):
      axis = figure.add_subplot(place)
      _curves(axis, result, cost, has_labels=cost == "prompts")
    _times(figure.add_subplot(grid[1, 1]), result)
    figure.supxlabel(_legend(result), fontsize=9, color=style.FAINT)
    if not is_short:
      _name_tags(figure, result)
  return figure


def _name_tags(figure, result) -> None:
  """What the numbers stand for, above the curves."""
  rows = _coloured(result)
  handles = [
    lines.Line2D([], [], color=colour, label=f"{tag}  {row.group.label}")
    for row, colour, tag in rows
  ]
  figure.legend(
    handles=handles,
    loc="outside upper left",
    frameon=False,
    labelcolor="linecolor",
    fontsize=9,
  )


def _curves(axis, result, cost: str, has_labels: bool) -> None:
  ends, lows, highs = [], [], []
  for row, colour, tag in _coloured(result):
    curves = [run.curve(cost) for run in row.group.runs]
    band = statistics.band(curves)
    axis.plot(band.x, band.mean, color=colour, linewidth=2)
    if len(curves) > 1:
      axis.fill_between(
        band.x, band.low, band.high, color=colour, alpha=0.18, linewidth=0
      )
    for x, y in curves:  # what goes on beyond the shortest
      rest = np.append(x[1:], np.inf) > band.x[-1]  # the point before, too
      axis.plot(x[rest], y[rest], color=colour, linewidth=1, alpha=0.5)
    ends.append((tag, colour, float(band.mean[-1])))
    lows.append(min(y.min() for _, y in curves))
    highs.append(max(y.max() for _, y in curves))
  style.amounts(axis)
  least, most = min(lows), max(highs)
  style.shares(axis, max(least - 0.05, 0.0), min(most + 0.05, 1.0))
  axis.set_xlabel(runs.COSTS[cost][1])
  if not has_labels:
    axis.set_ylabel(f"{result.of} accuracy")
  axis.set_title(TITLES[cost])
  if result.main is not None:
    axis.axhline(result.main, color=style.FAINT, linewidth=1, linestyle=":")
    axis.annotate(
      f"{result.main:.0%}",
      (1, result.main),
      xycoords=("axes fraction", "data"),
      xytext=(0, 2),
      textcoords="offset points",
      ha="right",
      color=style.FAINT,
      fontsize=8,
    )
  if has_labels:
    style.labels_at_end(axis, ends)


def _times(axis, result) -> None:
  """A dot a seed, a bar for the mean: training seconds to the main target."""
  if result.main is None:
    axis.set_axis_off()
    axis.text(0.5, 0.5, "no target was reached", ha="center")
    return
  rows = _coloured(result)
  for place, (row, colour, _) in enumerate(rows):
    spent = [*row.reached["seconds"][result.main].values()]
    if spent:
      axis.barh(place, np.mean(spent), color=colour, alpha=0.3, height=0.6)
      jitter = place + 0.08 * (np.arange(len(spent)) - (len(spent) - 1) / 2)
      axis.plot(spent, jitter, "o", color=colour, markersize=4)
    missing = len(row.group.runs) - len(spent)
    if missing:
      start = max(spent, default=0.0)
      axis.annotate(
        f"{missing} of {len(row.group.runs)} never did",
        (start, place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=style.FAINT,
      )
  axis.set_yticks(range(len(rows)), result.tags)
  for tick, (_, colour, _) in zip(axis.get_yticklabels(), rows, strict=True):
    tick.set_color(colour)
  axis.invert_yaxis()
  axis.grid(visible=False, axis="y")
  axis.set_xlim(left=0)
  axis.set_xlabel(f"training seconds to {result.main:.0%}, a dot a seed")
  axis.set_title(_claim(result))


def _claim(result) -> str:
  """What the times show, in a title: no more than the verdict says."""
  mark = f"{result.main:.0%}"
  found = [
    (tag, row.speedups["seconds"][result.main])
    for row, _, tag in _coloured(result)[1:]
  ]
  if all(ratio is None or ratio.n < 2 for _, ratio in found):
    return f"Training time to {mark}"
  sooner = [
    (label, ratio)
    for label, ratio in found
    if ratio and ratio.excludes(1) and ratio.value > 1
  ]
  if not sooner:
    return f"None reaches {mark} provably sooner"
  if len(sooner) == 1:
    label, ratio = sooner[0]
    return f"{label} reaches {mark} {ratio.value:.2g}x sooner"
  return f"{' and '.join(label for label, _ in sooner)} reach {mark} sooner"


def _coloured(result):
  return [
    (row, style.COLOURS[i % len(style.COLOURS)], tag)
    for i, (row, tag) in enumerate(zip(result.rows, result.tags, strict=True))
  ]


def _legend(result) -> str:
  counts = {len(row.group.runs) for row in result.rows}
  if counts == {1}:
    return "one seed each, so no bands"
  seeds = " to ".join(str(x) for x in sorted({min(counts), max(counts)}))
  return (
    f"lines: means of {seeds} seeds; bands: lowest to highest seed; "
    "thin: single seeds, where others have ended"
  )
