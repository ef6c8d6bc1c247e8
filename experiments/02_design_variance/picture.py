"""The ledger as a picture: a line for each rule, how wrong it is along it."""

import pathlib

from matplotlib import figure as figures
from matplotlib import lines

from . import ledger
from .ledger import BIASED, BUDGETS, EXACT, OTHER, TABLE

# Shape and colour both encode a rule's claim.
MARKS = {
  EXACT: ("o", "#2a6f97", "exactly unbiased: variance"),
  BIASED: ("X", "#9e2a2b", "biased: squared bias + variance"),
  OTHER: ("D", "#c77d00", "another objective, on purpose: the same"),
}
FLOOR, CEILING = 1e-3, 3e4  # what is less is drawn at the left edge


def draw(rows: list[dict], path: pathlib.Path) -> None:
  """Squared error of every rule, for each batch side by side."""
  batches = list(dict.fromkeys(row["batch"] for row in rows))
  count = sum(1 + len(rules) for rules in ledger.RULES.values())
  figure = figures.Figure(figsize=(14, 0.27 * count + 2.2))
  figure.set_layout_engine("constrained")
  axes = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
  for axis, batch in zip(axes, batches, strict=True):
    _panel(axis, rows, batch)
  _name_lines(axes[0])
  style = {"color": "#444444", "ls": ""}
  handles = [
    lines.Line2D([], [], marker=m, color=c, ls="", ms=8, label=label)
    for m, c, label in MARKS.values()
  ]
  hollow = {
    "marker": "s",
    "mfc": "white",
    "label": "brought to the full gradient's length",
  }
  tick = {"marker": "|", "label": f"at {BUDGETS[0]:.0%} and {BUDGETS[-1]:.1%}"}
  handles += [lines.Line2D([], [], **style, **x) for x in (hollow, tick)]
  figure.legend(handles=handles, loc="outside lower center", ncols=5)
  figure.suptitle(
    f"What each rule adds to the gradient's squared error at {TABLE:.0%} of "
    "the tokens, and the CPU seconds of its update",
    fontsize=14,
  )
  figure.savefig(path, dpi=110)


def _panel(axis, rows: list[dict], batch: str) -> None:
  """One batch: error along x, a rule a line."""
  facts = next(r for r in rows if r["batch"] == batch and "live" in r)
  axis.set_title(f"{batch}: {facts['live']:.0%} of the groups have a signal")
  y = 0.0
  for rules in ledger.RULES.values():
    y -= 1
    for rule in rules:
      _line(axis, rows, batch, rule, y)
      y -= 1
  axis.set(xscale="log", xlim=(FLOOR / 1.6, CEILING), ylim=(y, 1.4))
  axis.set_xlabel("squared error over the full batch's own variance")
  axis.axvline(1, color="#444444", lw=1)
  note = {"fontsize": 9, "va": "center"}
  axis.text(0.8, 0.7, "less than the full batch's noise", ha="right", **note)
  axis.text(1.25, 0.7, "more", **note)
  place = axis.get_yaxis_transform()
  axis.text(1.01, 0.7, "update", transform=place, **note)
  axis.grid(axis="x", alpha=0.25)
  axis.tick_params(axis="y", length=0)
  axis.spines[["top", "right", "left"]].set_visible(False)


def _line(axis, rows, batch: str, rule: ledger.Rule, y: float) -> None:
  """The error at the table's budget, and ticks at the others."""
  marker, colour, _ = MARKS[rule.unbiased]
  axis.axhline(y, color="#eeeeee", lw=0.8, zorder=0)
  by_budget = {b: ledger.find(rows, batch, rule, b) for b in BUDGETS}
  errors = {b: _error(r, rule) for b, r in by_budget.items() if r}
  axis.plot(
    list(errors.values()), [y] * len(errors), "|-", color=colour, ms=7, lw=1
  )
  if TABLE not in errors:
    text = "cannot keep so little"
    place = axis.get_yaxis_transform()
    axis.text(0.02, y, text, fontsize=8, va="center", transform=place)
    return
  axis.plot(errors[TABLE], y, marker, color=colour, ms=8, zorder=3)
  rescaled = max(ledger.at_length(rows, by_budget[TABLE], rule), FLOOR)
  if not 0.7 < rescaled / errors[TABLE] < 1.4:
    axis.plot([rescaled, errors[TABLE]], [y, y], ":", color=colour, lw=1)
    axis.plot(rescaled, y, "s", color=colour, mfc="white", ms=6, zorder=3)
  cost = ledger.seconds(rows, batch, rule)
  if cost is not None:
    place = axis.get_yaxis_transform()
    text = f"x{cost:.2f}"
    axis.text(1.01, y, text, fontsize=9, va="center", transform=place)


def _error(row: dict, rule: ledger.Rule) -> float:
  bias = 0.0 if rule.unbiased == EXACT else row["bias"]
  return max(row["variance"] + bias, FLOOR)


def _name_lines(axis) -> None:
  """The rules' names at the left, each group's above them."""
  places, names, y = [], [], 0.0
  for group, rules in ledger.RULES.items():
    for name in (group, *(rule.name for rule in rules)):
      places.append(y)
      names.append(name)
      y -= 1
  axis.set_yticks(places, names)
  for label in axis.get_yticklabels():
    if label.get_text() in ledger.RULES:
      label.set_fontweight("bold")
