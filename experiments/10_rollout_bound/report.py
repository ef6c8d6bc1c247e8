"""Table and picture of the results."""

import pathlib

from matplotlib import figure as figures
import numpy as np

COLUMNS = ("r=inf", "r=3", "r=1")
GREY, BLUE, RED = "#6c757d", "#2a6f97", "#9e2a2b"
# What the picture shows: line to objective and the rules' first words.
LINEAR = "leave-one-out, sum of tokens"
STOP = "stopping while generating"
LINES = {
  "groups of 8, 4 or 2\nand nothing else": ("grpo", "groups of"),
  "two-phase groups\n(2, 4 or 8 first)": ("grpo", "two phases"),
  "stopping while\ngenerating": (LINEAR, STOP),
  "no longest completion\nto wait for": ("any", "no tail"),
  "Neyman's choice\nat the update": (LINEAR, "no stop"),
  "stopping, and that": (LINEAR, f"{STOP},"),
  "Neyman's choice\nof prefixes": (LINEAR, "prefix cuts"),
}
MARKS = {
  "control": (RED, "s", "control: needs no rule"),
  "rule": (BLUE, "o", "rule learned on other prompts: can be had"),
  "same logs": (BLUE, "x", "rule learned on the same prompts: optimistic"),
  "bound": (GREY, "D", "bound: knows more than can be known"),
}


def table(batch: str, results: list[dict]) -> str:
  """Returns one batch's rules, in groups of 16 and of other sizes."""
  about = next(
    r for r in results if r["batch"] == batch and r["rule"] == "batch"
  )
  rows = [r for r in results if r["batch"] == batch and r["rule"] != "batch"]
  head = (*COLUMNS, "rollout alone", "in groups of 8", "in groups of 4")
  lines = [
    f"## {batch}",
    "",
    ", ".join(f"{k} {_told(v)}" for k, v in about.items() if k in _TOLD),
    "",
    "| rule | objective | knows | is | " + " | ".join(head) + " |",
    "|---" * (4 + len(head)) + "|",
  ]
  key = lambda r: tuple(r[x] for x in ("rule", "objective", "knows", "is"))
  at = {(*key(r), r["group"], r.get("shares")): r for r in rows}
  for row in rows:
    if row["group"] != 16 or "shares" in row:
      continue
    if row["objective"] == MEAN and "stop" not in row["rule"]:
      continue  # as those of sums; in results.jsonl
    find = lambda *which, row=row: at.get((*key(row), *which), {})
    cells = [row.get(c) for c in COLUMNS]
    cells.append(find(16, "rollout alone").get("r=inf"))
    cells += [find(group, None).get("over 16") for group in (8, 4)]
    numbers = " | ".join(_told(x) for x in cells)
    lines.append(f"| {' | '.join(key(row))} | {numbers} |")
  return "\n".join(lines)


_TOLD = (
  "accuracy",
  "live_groups",
  "rollout_share",
  "update_share",
  "length",
  "length_log_std",
  "noise_scale",
)


def _told(x) -> str:
  return "–" if x is None else f"{x:.2f}"


# Line to objective, rule, kind and knowledge; the best of what fits.
MEAN = "leave-one-out, mean of tokens"
SUMMARY = {
  "smaller groups, grpo": ("grpo", "groups of", "control", ""),
  "smaller groups, sums of tokens": (LINEAR, "groups of", "control", ""),
  "smaller groups, means of tokens": (MEAN, "groups of", "control", ""),
  "two phases, grpo: rule": ("grpo", "two phases", "rule", ""),
  "two phases, grpo: bound": ("grpo", "two phases", "bound", "prompt and p"),
  "two phases, sums: rule": (LINEAR, "two phases", "rule", ""),
  "two phases, sums: bound": (LINEAR, "two phases", "bound", "prompt and p"),
  "stopping, sums of tokens: rule": (LINEAR, STOP, "rule", ""),
  "stopping, sums of tokens: bound": (LINEAR, STOP, "bound", "prompt and l"),
  "stopping, means of tokens: rule": (MEAN, STOP, "rule", ""),
  "stopping, means of tokens: bound": (MEAN, STOP, "bound", "prompt and l"),
  "no tail, a slot each: bound": ("any", "no tail", "bound", "a slot each"),
  "no tail, 1/8 of the slots: bound": ("any", "no tail", "bound", "a slot for"),
  "Neyman's choice, sums: rule": (LINEAR, "no stop", "rule", ""),
  "stopping and that, sums: rule": (LINEAR, f"{STOP},", "rule", ""),
  "Neyman's choice, means: rule": (MEAN, "no stop", "rule", ""),
  "stopping and that, means: rule": (MEAN, f"{STOP},", "rule", ""),
  "Neyman's choice, grpo: rule": ("grpo", "Neyman", "rule", ""),
  "prefix cuts and that, grpo: rule": ("grpo", "prefix cuts", "rule", ""),
  "prefix cuts and that, grpo: bound": ("grpo", "prefix cuts", "bound", "ever"),
}


def summary(batches: list[str], results: list[dict]) -> str:
  """The best gain of each kind: in groups of 16, and of any size."""
  lines = ["| | " + " | ".join(batches) + " |", "|---" * 5 + "|"]
  for line, (objective, rule, kind, knows) in SUMMARY.items():
    cells = []
    for batch in batches:
      fits = [
        r
        for r in results
        if r["batch"] == batch
        and "over 16" in r
        and (r["objective"], r["is"]) == (objective, kind)
        and _is_rule(r["rule"], rule)
        and r["knows"].startswith(knows)
      ]
      best = max(r["over 16"] for r in fits if r["group"] == 16)
      cells.append(f"{best:.2f}")
      if len({r["group"] for r in fits}) > 1:
        cells[-1] += f" ({max(r['over 16'] for r in fits):.2f})"
    lines.append(f"| {line} | {' | '.join(cells)} |")
  return "\n".join(lines)


def _is_rule(name: str, rule: str) -> bool:
  """Compares names; the name of stopping is the start of another."""
  return name == rule if rule == STOP else name.startswith(rule)


def made_table(results: list[dict]) -> str:
  rows = [r for r in results if r["batch"].startswith("lognormal")]
  lines = [
    "## made lengths",
    "",
    "| lengths | rule | second moment | knows | r=inf | Cauchy-Schwarz |",
    "|---|---|---|---|---|---|",
  ]
  for r in rows:
    cells = (r["batch"], r["rule"], r["objective"], r["knows"])
    numbers = f"{_told(r['r=inf'])} | {_told(r.get('cauchy_schwarz'))}"
    lines.append(f"| {' | '.join(cells)} | {numbers} |")
  return "\n".join(lines)


def write(results: list[dict], folder: pathlib.Path) -> None:
  """table.md and figure.png."""
  batches = list(
    dict.fromkeys(r["batch"] for r in results if r["rule"] == "batch")
  )
  tables = [table(batch, results) for batch in batches]
  page = "\n\n".join([summary(batches, results), *tables, made_table(results)])
  (folder / "table.md").write_text(page + "\n")
  _draw(results, batches, folder / "figure.png")


def _draw(results: list[dict], batches: list[str], path) -> None:
  """Every rule's gain on every batch, a panel each."""
  figure = figures.Figure(figsize=(13, 5.6), layout="constrained")
  panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
  for panel, batch in zip(panels, batches, strict=True):
    rows = [
      r
      for r in results
      if r["batch"] == batch and r.get("group") == 16 and "shares" not in r
    ]
    for i, (objective, rule) in enumerate(LINES.values()):
      of = [
        r
        for r in rows
        if _is_rule(r["rule"], rule) and r["objective"] == objective
      ]
      _draw_line(panel, -i, of)
    panel.axvline(1, color="#343a40", linewidth=1)
    panel.axvline(1.15, color="#343a40", linewidth=1, linestyle=":")
    panel.set(xscale="log", xlim=(0.45, 9), title=batch)
    panel.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    panel.minorticks_off()
    panel.grid(alpha=0.25, axis="x")
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
  panels[0].set_yticks(-np.arange(len(LINES)), LINES)
  for kind, (colour, marker, label) in MARKS.items():
    fill = "none" if kind == "bound" else "full"
    panels[0].plot([], [], marker, color=colour, label=label, fillstyle=fill)
  figure.supxlabel(
    "times faster to the same point than groups of 16 "
    "(noise-dominated limit, this task's shares of time; dotted: 1.15)"
  )
  figure.legend(loc="outside upper center", ncols=4, frameon=False)
  figure.savefig(path, dpi=120)


def _draw_line(panel, y: float, rows: list[dict]) -> None:
  for lift, (kind, (colour, marker, _)) in zip(
    (0.0, -0.16, -0.16, 0.16), MARKS.items(), strict=True
  ):
    gains = [r["r=inf"] for r in rows if r["is"] == kind]
    panel.plot(
      np.clip(gains, 0.46, 9),
      np.full(len(gains), y + lift),
      marker,
      color=colour,
      markersize=5,
      alpha=0.8,
      fillstyle="none" if kind == "bound" else "full",
    )
