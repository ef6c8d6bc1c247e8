"""What was measured, as a table and as a picture."""

import pathlib

from completions import BUDGETS
from matplotlib import figure as figures

UNBIASED = {
  "uniform": "#9aa5b1",
  "dppo": "#9e2a2b",
  "neyman": "#2a6f97",
  "neyman, true norm": "#6c9a8b",
}
BIASED = {
  "cppo": "#d98e04",
  "d1s": "#7b4b94",
  "pods": "#b56576",
  "neyman": UNBIASED["neyman"],  # to compare with
}


def table(rows: list[dict]) -> str:
  """Variance, and squared bias of the biased, for each budget."""
  names = list(dict.fromkeys(r["method"] for r in rows))
  budgets = list(dict.fromkeys(r["budget"] for r in rows))
  lines = [
    "| | " + " | ".join(f"{b:.1%}" for b in budgets) + " |",
    "|---|" + "---|" * len(budgets),
  ]
  of = {(r["method"], r["budget"]): r for r in rows}
  for name in names:
    cells = " | ".join(_told(of[name, budget]) for budget in budgets)
    lines.append(f"| {name} | {cells} |")
  return "\n".join(lines)


def _told(r: dict) -> str:
  if r["variance"] is None:
    return "–"
  if r.get("bias", 0) > 0.02 * r["variance"] + 1e-3:
    return (
      f"{r['variance']:.3f} + {r['bias']:.2f} "
      f"(cos {r['cosine']:.2f}, x{r['scale']:.2f})"
    )
  return f"{r['variance']:.4f}"


def draw(results: list[dict], path: pathlib.Path) -> None:
  """Added variance, and squared error of the biased, against the budget."""
  results = [r for r in results if r["level"] == "completions"]
  batches = list(dict.fromkeys(r["batch"] for r in results))
  figure = figures.Figure(figsize=(9, 4 * len(batches)), layout="constrained")
  axes = figure.subplots(len(batches), 2, squeeze=False)
  for (left, right), name in zip(axes, batches, strict=True):
    rows = [r for r in results if r["batch"] == name]
    _plot(left, rows, UNBIASED, lambda r: r["variance"])
    left.set_title(f"{name}: unbiased: variance added")
    _plot(right, rows, BIASED, lambda r: r["variance"] + r["bias"])
    right.set_title(f"{name}: squared error of the biased")
  figure.savefig(path, dpi=120)


def _plot(axis, rows: list[dict], colours: dict[str, str], error) -> None:
  for name, colour in colours.items():
    points = sorted(
      (r["budget"], error(r))
      for r in rows
      if r["method"] == name and r["variance"] is not None
    )
    if points:
      axis.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
  axis.set(
    xlabel="share of tokens trained on",
    ylabel="over the full batch's own variance",
    yscale="log",
    xscale="log",
  )
  axis.set_xticks(BUDGETS, [f"{b:.1%}" for b in BUDGETS])
  axis.minorticks_off()
  axis.grid(alpha=0.25)
  axis.legend()
  axis.spines[["top", "right"]].set_visible(False)
