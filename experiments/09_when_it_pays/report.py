"""Table and picture of predicted and measured speed-ups."""

import math
import pathlib
import statistics

from matplotlib import figure as figures
import numpy as np

from dppo_jax.analysis import tables

from ..common.results import read, tidy, to_csv
from . import tasks, training

MARKERS = {"neyman": "o", "by chance": "s", "prompts by chance": "^"}
COLOURS = {
  "rings, 32": "#012a4a",
  "rings, 4": "#61a5c2",
  "arithmetic, 32": "#9e2a2b",
  "arithmetic, 4": "#e09f3e",
  "arithmetic, 256": "#540b0e",
}
PARTS = {"0.5": "½", "0.25": "¼", "0.125": "⅛", "0.0625": "1/16"}
ITSELF = "neyman, sets itself"
BUDGET = "shares/completions"  # chosen automatically, in saved results


def of_logs(runs_of: list[list[dict]]) -> dict[str, float]:
  """Returns means over all steps of what describes the regime and budgets.

  The saved results have older names: `shares/completions`, `noise/share`.
  """
  steps = [x for lines in runs_of for x in lines if "step/seconds" in x]
  means = {"trained": _mean(steps, "completions/trained")}
  names = {"budget/completions": BUDGET, "noise/fraction": "noise/share"}
  for name, saved in names.items():
    if name in steps[0]:
      means[saved] = _mean(steps, name)
  kept = _mean(steps, "prompts/kept")
  means["zero_variance"] = _mean(steps, "groups/zero_std") / kept
  return means


def _mean(steps: list[dict], name: str) -> float:
  return statistics.fmean(line[name] for line in steps)


def write(results: list[dict], folder: pathlib.Path) -> None:
  """Writes table.csv and figure.png of the results and predictions."""
  predicted = read(folder / "predictions.jsonl")
  pairs = _pairs(results, predicted)
  text = "\n\n".join(
    [_law_table(pairs), _agreement(pairs), _facts(predicted), _sweep(results)]
  )
  (folder / "table.csv").write_text(to_csv(text))
  print(text)
  _draw(pairs, results, folder / "figure.png")


def _pairs(results: list[dict], predicted: list[dict]) -> list[tuple]:
  known = {(r["cell"], r["variant"]): r for r in results}
  keys = [((f["cell"], f["variant"]), f) for f in predicted]
  return [(f, known[key]) for key, f in keys if key in known]


def _law_table(pairs: list[tuple]) -> str:
  head = (
    *("task, prompts", "choice", "seconds of a step", "added variance"),
    *("predicted", "at exponent 1", "measured", "by seed"),
  )
  lines = []
  for p, r in pairs:
    names = ("seconds", "added_variance", "faster", "faster_at_1")
    numbers = [f"{p[name]:.2f}" for name in names]
    seeds = sorted(r["faster_by_seed"])
    measured = (f"**{r['faster']:.2f}**", f"{seeds[0]:.2f}..{seeds[-1]:.2f}")
    lines.append((p["cell"], p["variant"], *numbers, *measured))
  return tables.markdown(head, lines)


def ranks(x: list[float]) -> np.ndarray:
  """Returns the rank of each, tied ones in the order they come in."""
  return np.argsort(np.argsort(x))


def _agreement(pairs: list[tuple]) -> str:
  """Rank correlation and median error of log ratios, overall and by cell."""
  head = ("", "pairs", "rank correlation", "median error of the log ratio")
  lines = []
  groups = {"all": pairs}
  for cell in tasks.LAW:
    groups[cell] = [x for x in pairs if x[0]["cell"] == cell]
  for name, group in groups.items():
    finite = [x for x in group if math.isfinite(x[1]["faster"])]
    if len(finite) < 2:
      continue
    for field, label in (("faster", name), ("faster_at_1", f"{name}, at 1")):
      a = [math.log(p[field]) for p, _ in finite]
      b = [math.log(r["faster"]) for _, r in finite]
      correlation = np.corrcoef(ranks(a), ranks(b))[0, 1]
      error = statistics.median(abs(x - y) for x, y in zip(a, b, strict=True))
      lines.append((label, len(finite), f"{correlation:.2f}", f"{error:.3f}"))
  return tables.markdown(head, lines)


def _facts(predicted: list[dict]) -> str:
  head = (
    *("", "groups without variance", "noise fraction", "noise scale, prompts"),
    *("update's part of a step", "twice the rate: steps", "exponent"),
  )
  lines = [
    (
      p["cell"],
      f"{p['zero_variance']:.0%}",
      f"{p['noise_share']:.2f}",
      f"{p['noise_scale']:.0f}",
      f"{p['update_share']:.2f}",
      f"{2 ** -p['rate_elasticity']:.2f}",
      f"{p['exponent']:.2f}",
    )
    for p in {p["cell"]: p for p in predicted}.values()
  ]
  return tables.markdown(head, lines)


def _sweep(results: list[dict]) -> str:
  """The automatic budget against the best fixed one."""
  head = (
    *("", "groups without variance", "best fixed budget", "faster than grpo"),
    *("automatic budget", "faster than grpo", "of the best", "greedy accuracy"),
    "grpo's",
  )
  lines = []
  of = {(r["cell"], r["variant"]): r for r in results}
  for cell in tasks.CELLS:
    fixed = [of[cell, x] for x in training.SWEEP if (cell, x) in of]
    if not fixed or (cell, ITSELF) not in of:
      continue
    grpo, itself = of[cell, "grpo"], of[cell, ITSELF]
    best = max([grpo, *fixed], key=lambda r: r["faster"])
    lines.append(
      (
        cell,
        f"{grpo['zero_variance']:.0%}",
        best["variant"].removeprefix("neyman "),
        f"{best['faster']:.2f}",
        f"{itself[BUDGET]:.2f}",
        f"**{itself['faster']:.2f}**",
        f"{itself['faster'] / best['faster']:.2f}",
        *(_mean_range(r["accuracy"]) for r in (itself, grpo)),
      )
    )
  return tables.markdown(head, lines)


def _mean_range(values: list[float]) -> str:
  spread = f" ({min(values):.3f}..{max(values):.3f})"
  return f"{statistics.fmean(values):.3f}{spread}"


def _draw(pairs: list[tuple], results: list[dict], path: pathlib.Path) -> None:
  figure = figures.Figure(figsize=(12, 5.2), layout="constrained")
  law, shares = figure.subplots(1, 2)
  _draw_law(law, pairs)
  _draw_shares(shares, results)
  for axis in (law, shares):
    tidy(axis)
  figure.savefig(path, dpi=120)


def _draw_law(axis, pairs: list[tuple]) -> None:
  labelled = set()
  for p, r in pairs:
    if not math.isfinite(r["faster"]):
      continue
    cell, point = p["cell"], (p["faster"], r["faster"])
    kind, _, share = p["variant"].rpartition(" ")
    label = None if cell in labelled else cell
    labelled.add(cell)
    axis.plot(*point, MARKERS[kind], color=COLOURS[cell], label=label)
    axis.annotate(
      PARTS[share],
      point,
      textcoords="offset points",
      xytext=(5, 3),
      fontsize=7,
      color=COLOURS[cell],
    )
  for kind, marker in MARKERS.items():
    axis.plot([], [], marker, color="#6c757d", label=kind)
  both = [x for p, r in pairs for x in (p["faster"], r["faster"])]
  ends = [0.9 * min(both), 1.1 * max(both)]
  axis.plot(ends, ends, color="#adb5bd", zorder=0)
  axis.set(
    xlabel="predicted: times as fast as GRPO to the same accuracy",
    ylabel="measured",
    xscale="log",
    yscale="log",
    title="The cost model: a number next to a mark is the fraction kept",
  )
  ticks = [x for x in (0.5, 0.7, 1, 1.4, 2, 2.8, 4) if ends[0] < x < ends[1]]
  for which in (axis.xaxis, axis.yaxis):
    which.set_ticks(ticks, [f"{x:g}" for x in ticks])
    which.minorticks_off()
  axis.legend(fontsize=8)


def _draw_shares(axis, results: list[dict]) -> None:
  colours = COLOURS | {
    "mixed rings, 32": "#386641",
    "mixed rings, 4": "#a7c957",
  }
  for cell in tasks.CELLS:
    of = {r["variant"]: r for r in results if r["cell"] == cell}
    points = [(1.0, 1.0)] + [
      (float(x.rpartition(" ")[2]), of[x]["faster"])
      for x in training.SWEEP
      if x in of
    ]
    if len(points) < 2:
      continue
    axis.plot(*zip(*points, strict=True), "o-", color=colours[cell], label=cell)
    if ITSELF in of:
      itself = of[ITSELF]
      axis.plot(
        itself[BUDGET],
        itself["faster"],
        "*",
        color=colours[cell],
        markersize=15,
        markeredgecolor="black",
      )
  edge = {"markeredgecolor": "black", "markersize": 13}
  axis.plot([], [], "*", color="white", label="automatic budget", **edge)
  axis.set(
    xlabel="fraction of the completions with nonzero advantage",
    ylabel="times as fast as GRPO to the same accuracy",
    xscale="log",
    title="Automatic and fixed budgets",
  )
  axis.set_xticks(
    [0.0625, 0.125, 0.25, 0.5, 1], ["1/16", "1/8", "1/4", "1/2", "1"]
  )
  axis.minorticks_off()
  axis.legend(fontsize=8)
