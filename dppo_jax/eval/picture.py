"""The picture of an evaluation: estimates, more samples, levels."""

from collections.abc import Mapping
import functools
import pathlib
from typing import Any

from matplotlib import figure as figures
from matplotlib.axes import Axes

from dppo_jax.analysis import style, tables
from dppo_jax.eval import scores

_KINDS = ("greedy", "avg", "maj", "pass")  # of estimates
COLOURS = dict(zip(_KINDS, style.COLOURS, strict=False))
_MAX_BROKEN_DOWN = 4  # panels by level or subject
_short = functools.partial(tables.short, width=24)


def draw(path: pathlib.Path, results: Mapping[str, Any]) -> None:
  """Draws what `page.write` gets."""
  with style.rc():
    style.save(_drawn(results), path)


def _drawn(results: Mapping[str, Any]) -> figures.Figure:
  sets = results["sets"]
  broken_down = [
    (name, column, groups)
    for name, of_set in sets.items()
    for column, groups in of_set["by"].items()
  ][:_MAX_BROKEN_DOWN]
  has_curves = any(x["samples"] > 1 for x in sets.values())
  panels = 1 + has_curves + len(broken_down)
  columns = min(panels, 2)
  rows = -(-panels // columns)
  num_points = sum(len(scores.headlines(x["estimates"])) for x in sets.values())
  heights = [max(3.4, 0.26 * num_points + 1.4)]
  heights += [max(2.6, 0.36 * _most_groups(broken_down) + 1.2)] * (rows - 1)
  # No pyplot: it would choose a backend for the whole process.
  figure = figures.Figure(
    figsize=(5 * columns + 1, sum(heights)), layout="constrained"
  )
  axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
  axes = list(axes.flat)
  for axis in axes[panels:]:
    axis.remove()
  _draw_estimates(axes[0], sets)
  if has_curves:
    _draw_curves(axes[1], sets)
  for axis, part in zip(axes[1 + has_curves :], broken_down, strict=False):
    _draw_groups(axis, *part)
  figure.suptitle(f"{results['title']}, step {results['step']}")
  return figure


def _draw_estimates(axis: Axes, sets: Mapping[str, Any]) -> None:
  """A point with its interval for each set and main estimate."""
  ticks, labels, y = [], [], 0.0
  for name, of_set in sets.items():
    for estimate in scores.headlines(of_set["estimates"]):
      values = of_set["estimates"][estimate]
      _draw_point(axis, y, estimate, values)
      axis.annotate(
        f"{values['value']:.3f}",
        (values["value"], y),
        xytext=(0, 5),  # points above it
        textcoords="offset points",
        ha="center",
        fontsize="small",
      )
      ticks.append(y)
      labels.append(
        f"{_short(name)}  {estimate}" if len(sets) > 1 else estimate
      )
      y += 1
    y += 0.6  # between sets
  axis.set_yticks(ticks, labels)
  axis.set_ylim(y - 0.9, -0.7)  # the first set on top
  axis.set(xlim=(0, 1), xlabel="accuracy and 95% interval over problems")
  if len(sets) == 1:
    axis.set_title(_short(next(iter(sets))), fontsize="medium")


def _draw_curves(axis: Axes, sets: Mapping[str, Any]) -> None:
  """pass@k and maj@k by k; a colour for each set."""
  largest = 1
  for number, (name, of_set) in enumerate(sets.items()):
    for kind, marks in (("pass", "o-"), ("maj", "s--")):
      points = _by_size(of_set["estimates"], kind)
      if len(points) < 2:
        continue
      sizes = sorted(points)
      largest = max(largest, *sizes)
      colour = style.COLOURS[number % len(style.COLOURS)]
      label = f"{_short(name)} {kind}@k" if len(sets) > 1 else f"{kind}@k"
      if len(sets) == 1:
        colour = COLOURS[kind]
      at = lambda field, sizes=sizes, points=points: [
        points[k][field] for k in sizes
      ]
      axis.plot(
        sizes,
        at("value"),
        marks,
        color=colour,
        label=label,
        markersize=4,
        clip_on=False,  # a point at 0 or 1 is whole
      )
      axis.fill_between(
        sizes, at("low"), at("high"), color=colour, alpha=0.1, linewidth=0
      )
  axis.set_xscale("log", base=2)
  sizes = [2**i for i in range(largest.bit_length())]
  axis.set_xticks(sizes, map(str, sizes))
  axis.minorticks_off()
  axis.set(ylim=(0, 1), xlabel="k, completions of a problem", ylabel="accuracy")
  axis.legend(
    loc="lower center",
    bbox_to_anchor=(0.5, 1),  # above the lines
    ncols=2,
    frameon=False,
    fontsize="small",
  )


def _by_size(estimates: Mapping[str, Any], kind: str) -> dict[int, dict]:
  """The estimates of a kind by k; of one completion it is avg@n."""
  found = {}
  for name, estimate in estimates.items():
    what, _, size = name.partition("@")
    if what == kind:
      found[int(size)] = estimate
    if what == "avg":
      found[1] = estimate
  return found


def _draw_groups(
  axis: Axes, name: str, column: str, groups: Mapping[str, Any]
) -> None:
  """The first two main estimates by the value of a column."""
  for y, of_group in enumerate(groups.values()):
    kinds = list(of_group["estimates"].items())[:2]
    for i, (estimate, values) in enumerate(kinds):
      offset = 0.3 * (i - (len(kinds) - 1) / 2)
      label = estimate if y == 0 else None
      _draw_point(axis, y + offset, estimate, values, label)
  labels = [f"{_short(x)}  (n = {g['problems']})" for x, g in groups.items()]
  axis.set_yticks(range(len(groups)), labels)
  axis.set_ylim(len(groups) - 0.5, -0.5)
  axis.set(xlim=(0, 1), xlabel="accuracy and 95% interval over problems")
  axis.set_title(f"{_short(name)} by {column}", fontsize="medium", loc="left")
  if len(kinds) > 1:
    axis.legend(
      loc="lower right",
      bbox_to_anchor=(1.02, 0.99),  # above the points
      ncols=2,
      frameon=False,
      fontsize="small",
      columnspacing=1.0,
    )


def _most_groups(broken_down: list[tuple]) -> int:
  return max((len(groups) for *_, groups in broken_down), default=0)


def _draw_point(
  axis: Axes, y: float, name: str, estimate: Mapping, label: str | None = None
) -> None:
  below, above = (
    max(estimate["value"] - estimate["low"], 0.0),
    max(estimate["high"] - estimate["value"], 0.0),
  )
  axis.errorbar(
    estimate["value"],
    y,
    xerr=[[below], [above]],
    fmt="o",
    color=COLOURS[name.partition("@")[0]],
    capsize=3,
    markersize=5,
    label=label,
    clip_on=False,  # a point at 0 or 1 is whole
  )
