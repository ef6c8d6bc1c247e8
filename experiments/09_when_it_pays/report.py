"""What was measured beside what was foretold: a table and a picture."""

import json
import math
import pathlib
import statistics

from matplotlib import figure as figures
import numpy as np
import tasks
import training

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


def of_logs(runs_of: list[list[dict]]) -> dict[str, float]:
  """Means over all steps of what tells the regime, and the shares chosen."""
  steps = [x for lines in runs_of for x in lines if "step/seconds" in x]
  found = {"trained": _mean(steps, "completions/trained")}
  for name in ("shares/completions", "shares/prompts", "noise/share"):
    if name in steps[0]:
      found[name] = _mean(steps, name)
  chosen = _mean(steps, "prompts/kept")
  found["zero_variance"] = _mean(steps, "groups/zero_std") / chosen
  return found


def _mean(steps: list[dict], name: str) -> float:
  return statistics.fmean(line[name] for line in steps)


def write(results: list[dict], folder: pathlib.Path) -> None:
  """table.md and figure.png of the results and predictions in `folder`."""
  foretold = [
    json.loads(line)
    for line in (folder / "predictions.jsonl").read_text().splitlines()
  ]
  pairs = _pairs(results, foretold)
  text = "\n\n".join(
    [_law_table(pairs), _agreement(pairs), _facts(foretold), _sweep(results)]
  )
  (folder / "table.md").write_text(f"{text}\n")
  print(text)
  _draw(pairs, results, folder / "figure.png")


def _pairs(results: list[dict], foretold: list[dict]) -> list[tuple]:
  known = {(r["cell"], r["variant"]): r for r in results}
  keys = [((f["cell"], f["variant"]), f) for f in foretold]
  return [(f, known[key]) for key, f in keys if key in known]


def _row(*cells) -> str:
  return f"| {' | '.join(map(str, cells))} |"


def _law_table(pairs: list[tuple]) -> str:
  lines = [
    _row(
      *("task, prompts", "choice", "seconds of a step", "added variance"),
      *("foretold", "at exponent 1", "measured", "by seed"),
    ),
    _row(*["---"] * 8),
  ]
  for f, r in pairs:
    seeds = sorted(r["faster_by_seed"])
    lines.append(
      _row(
        f["cell"],
        f["variant"],
        f"{f['seconds']:.2f}",
        f"{f['added_variance']:.2f}",
        f"{f['faster']:.2f}",
        f"{f['faster_at_1']:.2f}",
        f"**{r['faster']:.2f}**",
        f"{seeds[0]:.2f}..{seeds[-1]:.2f}",
      )
    )
  return "\n".join(lines)


def ranks(x: list[float]) -> np.ndarray:
  """The rank of each, ties apart in the order they come in."""
  return np.argsort(np.argsort(x))


def _agreement(pairs: list[tuple]) -> str:
  """Rank correlation and median error of log ratios, overall and by cell."""
  lines = [
    _row("", "pairs", "rank correlation", "median error of the log ratio"),
    _row(*["---"] * 4),
  ]
  groups = {"all": pairs}
  for cell in tasks.LAW:
    groups[cell] = [x for x in pairs if x[0]["cell"] == cell]
  for name, some in groups.items():
    for field, label in (("faster", name), ("faster_at_1", f"{name}, at 1")):
      some_pairs = [x for x in some if math.isfinite(x[1]["faster"])]
      if len(some_pairs) < 2:
        continue
      a = [math.log(f[field]) for f, _ in some_pairs]
      b = [math.log(r["faster"]) for _, r in some_pairs]
      correlation = np.corrcoef(ranks(a), ranks(b))[0, 1]
      error = statistics.median(abs(x - y) for x, y in zip(a, b, strict=True))
      lines.append(
        _row(label, len(some_pairs), f"{correlation:.2f}", f"{error:.3f}")
      )
  return "\n".join(lines)


def _facts(foretold: list[dict]) -> str:
  lines = [
    _row(
      *("", "groups without variance", "noise's share", "noise scale, prompts"),
      *("update's share of a step", "twice the rate: steps", "exponent"),
    ),
    _row(*["---"] * 7),
  ]
  for f in {f["cell"]: f for f in foretold}.values():
    lines.append(
      _row(
        f["cell"],
        f"{f['zero_variance']:.0%}",
        f"{f['noise_share']:.2f}",
        f"{f['noise_scale']:.0f}",
        f"{f['update_share']:.2f}",
        f"{2 ** -f['rate_elasticity']:.2f}",
        f"{f['exponent']:.2f}",
      )
    )
  return "\n".join(lines)


def _sweep(results: list[dict]) -> str:
  """The share that sets itself against the best of those that are fixed."""
  lines = [
    _row(
      *("", "groups without variance", "best fixed share", "faster than grpo"),
      *("sets itself to", "faster than grpo", "of the best", "accuracy"),
      "grpo's",
    ),
    _row(*["---"] * 9),
  ]
  of = {(r["cell"], r["variant"]): r for r in results}
  for cell in tasks.CELLS:
    fixed = [of[cell, x] for x in training.SWEEP if (cell, x) in of]
    if not fixed or (cell, ITSELF) not in of:
      continue
    grpo, itself = of[cell, "grpo"], of[cell, ITSELF]
    best = max([grpo, *fixed], key=lambda r: r["faster"])
    lines.append(
      _row(
        cell,
        f"{grpo['zero_variance']:.0%}",
        best["variant"].removeprefix("neyman "),
        f"{best['faster']:.2f}",
        f"{itself['shares/completions']:.2f}",
        f"**{itself['faster']:.2f}**",
        f"{itself['faster'] / best['faster']:.2f}",
        *(_told(r["accuracy"]) for r in (itself, grpo)),
      )
    )
  return "\n".join(lines)


def _told(values: list[float]) -> str:
  spread = f" ({min(values):.3f}..{max(values):.3f})"
  return f"{statistics.fmean(values):.3f}{spread}"


def _draw(pairs: list[tuple], results: list[dict], path: pathlib.Path) -> None:
  figure = figures.Figure(figsize=(12, 5.2), layout="constrained")
  law, shares = figure.subplots(1, 2)
  _draw_law(law, pairs)
  _draw_shares(shares, results)
  for axis in (law, shares):
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
  figure.savefig(path, dpi=120)


def _draw_law(axis, pairs: list[tuple]) -> None:
  seen = set()
  for f, r in pairs:
    if not math.isfinite(r["faster"]):
      continue
    kind = f["variant"].rpartition(" ")[0]
    label = f["cell"] if f["cell"] not in seen else None
    seen.add(f["cell"])
    axis.plot(
      f["faster"],
      r["faster"],
      MARKERS[kind],
      color=COLOURS[f["cell"]],
      label=label,
    )
    axis.annotate(
      PARTS[f["variant"].rpartition(" ")[2]],
      (f["faster"], r["faster"]),
      textcoords="offset points",
      xytext=(5, 3),
      fontsize=7,
      color=COLOURS[f["cell"]],
    )
  for kind, marker in MARKERS.items():
    axis.plot([], [], marker, color="#6c757d", label=kind)
  both = [x for f, r in pairs for x in (f["faster"], r["faster"])]
  ends = [0.9 * min(both), 1.1 * max(both)]
  axis.plot(ends, ends, color="#adb5bd", zorder=0)
  axis.set(
    xlabel="foretold: times as fast as GRPO to the same accuracy",
    ylabel="measured",
    xscale="log",
    yscale="log",
    title="The law: a number beside a mark is the share that was kept",
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
        itself["shares/completions"],
        itself["faster"],
        "*",
        color=colours[cell],
        markersize=15,
        markeredgecolor="black",
      )
  axis.plot(
    [],
    [],
    "*",
    color="white",
    markeredgecolor="black",
    markersize=13,
    label="sets itself",
  )
  axis.set(
    xlabel="share of the needed completions",
    ylabel="times as fast as GRPO to the same accuracy",
    xscale="log",
    title="The share that sets itself, and fixed ones",
  )
  axis.set_xticks(
    [0.0625, 0.125, 0.25, 0.5, 1], ["1/16", "1/8", "1/4", "1/2", "1"]
  )
  axis.minorticks_off()
  axis.legend(fontsize=8)
