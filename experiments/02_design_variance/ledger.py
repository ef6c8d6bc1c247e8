"""The rules by name, the claim of each, and the tables of its measurements."""

from typing import NamedTuple

TABLE = 0.25
BUDGETS = (0.5, 0.25, 0.125)
EXACT, BIASED, OTHER = "exactly", "no", "on purpose"


class Rule(NamedTuple):
  """A line of the ledger.

  Attributes:
    name: as it is printed.
    level: the stage that measured it.
    method: its name there.
    unbiased: whether its mean is the full batch's gradient: exactly, no, or on
      purpose that of another objective.
    source: where it is from.
  """

  name: str
  level: str
  method: str
  unbiased: str
  source: str


# The source is a number of arXiv, or says what the rule is for.
LINES = """
completions, after the rollout
uniform | completions: uniform | exactly | control
neyman | completions: neyman | exactly | ours, near 2604.28020
dppo | completions: dppo | exactly | 2603.04135
pods | completions: pods | no | 2504.13818
cppo: top k of a group | completions: cppo | no | 2503.22342
top k of the batch | completions: cppo, batch | no | code of 2503.22342
d1s | completions: d1s | no | 2509.22115
d1s, batch | completions: d1s, batch | no | 2509.22115

tokens
uniform tokens (NAT) | prefixes: tokens, uniform | exactly | 2603.06619
random prefixes (NAT-like) | prefixes: prefixes, uniform | exactly | 2603.06619
neyman prefixes | prefixes: prefixes, by size | exactly | ours
neyman tokens | tokens: neyman, tokens | exactly | ours
neyman completions + tokens | tokens: neyman, both | exactly | ours
d2s; d3s at that fraction | tokens: d2s | no | 2509.22115

prompts, before the rollout
uniform prompts | prompts: uniform | exactly | control
neyman prompts | prompts: neyman | exactly | ours
dppo prompts | prompts: dppo | exactly | 2603.04135
InfoBatch-like | prompts: InfoBatch-like | no | 2303.04947

how many rollouts
fewer of each prompt | rollouts: fewer of each | no | control
fewer of each, leave-one-out | group sizes: even, rloo | exactly | control
neyman group sizes | group sizes: neyman, grpo | no | ours
neyman group sizes, leave-one-out | group sizes: neyman, rloo | exactly | ours
two-phase groups | rollouts: two-phase groups | exactly | ours
VIP-like | rollouts: VIP-like | no | 2602.01601
Knapsack-like | rollouts: Knapsack-like | no | 2509.25849
DUET-like | rollouts: DUET-like | no | 2605.08441
Pilot-Commit-like | rollouts: Pilot-Commit-like | on purpose | 2605.26606
Reinforce-Ada-like | rollouts: Reinforce-Ada-like | on purpose | 2510.04996
DAPO dynamic sampling | rollouts: dynamic sampling | on purpose | 2503.14476
GRESO | rollouts: GRESO | on purpose | 2506.02177
ARRoL-like | rollouts: ARRoL-like | no | 2603.24840

baselines, any number of prompts
pairs, leave-one-out | baselines: leave-one-out of 2 | exactly | control
groups of 4, leave-one-out | baselines: leave-one-out of 4 | exactly | control
single completions, history | baselines: history of 1 | exactly | 2509.13232
single completions, snapped | baselines: snapped of 1 | exactly | ours
pairs, history | baselines: history of 2 | exactly | 2511.03710
pairs, snapped | baselines: snapped of 2 | exactly | ours
groups of 4, history | baselines: history of 4 | exactly | 2511.03710
groups of 4, snapped | baselines: snapped of 4 | exactly | ours
"""


def _parse(text: str) -> dict[str, list[Rule]]:
  """The rules by group."""
  groups = {}
  for block in text.strip().split("\n\n"):
    group, *rows = block.split("\n")
    cells = [row.split(" | ") for row in rows]
    groups[group] = [Rule(c[0], *c[1].split(": "), *c[2:]) for c in cells]
  return groups


RULES = _parse(LINES)


def find(
  rows: list[dict], batch: str, rule: Rule, budget: float
) -> dict | None:
  """Returns a rule's row; None where it cannot keep to the budget."""
  for row in rows:
    same = (row["batch"], row["level"]) == (batch, rule.level)
    if same and row["method"] == rule.method and row["budget"] == budget:
      return row if row["variance"] is not None else None
  return None


def at_length(rows: list[dict], row: dict, rule: Rule) -> float:
  """The squared error once the mean has the full gradient's length.

  An optimizer that normalises sees no lengths: what is left is the noise at
  that length, and the angle.
  """
  if rule.unbiased == EXACT:
    return row["variance"]
  batch = [r for r in rows if r["batch"] == row["batch"]]
  length = next(r["squared_length"] for r in batch if r["level"] == "batch")
  sampling = 0.0  # variance of the full batch from sampling its completions
  if rule.level == "group sizes":
    length, sampling = row["squared_length"], row["full_variance"]
  if rule.level == "rollouts":
    drawn = [r for r in batch if r["level"] == "rollouts"]
    sampling = next(r["variance"] for r in drawn if r["method"] == "full")
  noise = (row["variance"] + sampling) / row["scale"] ** 2 - sampling
  return noise + 2 * length * (1 - row["cosine"])


def seconds(rows: list[dict], batch: str, rule: Rule) -> float | None:
  """Returns seconds of an update at a quarter of the tokens over the full."""
  names = [f"{rule.level}: {rule.method}"]
  if (rule.level, rule.method) == ("prompts", "uniform"):
    names = ["rollouts: prompts by chance"]
  for row in rows:
    if (row["batch"], row["level"]) == (batch, "seconds"):
      if row["method"] in names:
        return row["of_full"]
  return None


def pages(rows: list[dict]) -> str:
  """All tables, as Markdown."""
  batches = list(dict.fromkeys(row["batch"] for row in rows))
  parts = [f"# {TABLE:.0%} of the tokens\n"]
  for batch in batches:
    parts += [f"## {batch.capitalize()}\n", _table(rows, batch), ""]
  parts += ["# Other budgets: squared bias + variance\n"]
  parts += [_budgets(rows, batches), ""]
  sizes = [r for r in rows if r["level"] == "group sizes"]
  parts += ["# Group sizes at equal tokens: variance at the full length\n"]
  parts += [_sizes(rows, sizes), ""]
  effects = [r for r in rows if r["level"] == "design effects"]
  parts += ["# Variance of neyman's draw over that of independent draws\n"]
  parts += [_effects(effects), ""]
  for batch in batches:
    designs = [r for r in rows if r["batch"] == batch]
    designs = [r for r in designs if r["level"] == "completions"]
    if designs:
      title = f"# Designs for completions, {batch}: bias² + variance\n"
      parts += [title, _designs(designs), ""]
  return "\n".join(parts)


def _table(rows: list[dict], batch: str) -> str:
  """Every rule at a quarter of the tokens, trained or generated."""
  lines = [
    "| rule | source | unbiased | bias² | variance | cos | length "
    "| at equal length | generated | trained | update, CPU s |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
  ]
  for group, rules in RULES.items():
    lines.append(f"| **{group}** |" + " |" * 10)
    lines += [_line(rows, batch, rule) for rule in rules]
  return "\n".join(lines)


def _line(rows: list[dict], batch: str, rule: Rule) -> str:
  row = find(rows, batch, rule, TABLE)
  head = f"| {rule.name} | {rule.source} | {rule.unbiased} |"
  if row is None:
    return head + " – |" * 8
  is_exact = rule.unbiased == EXACT
  cost = seconds(rows, batch, rule)
  cells = [
    "0" if is_exact else two_digits(row["bias"]),
    two_digits(row["variance"]),
    "1" if is_exact else f"{row['cosine']:.2f}",
    "1" if is_exact else f"{row['scale']:.2f}",
    two_digits(at_length(rows, row, rule)),
    f"{row.get('generated', 1.0):.0%}",
    f"{row['tokens']:.0%}",
    "–" if cost is None else f"x{cost:.2f}",
  ]
  if rule.unbiased == OTHER:
    cells[0] += f" ({two_digits(row['aim_bias'])})"
    cells[2] += f" ({row['aim_cosine']:.2f})"
    cells[3] += f" ({row['aim_scale']:.2f})"
  return head + "".join(f" {cell} |" for cell in cells)


def _budgets(rows: list[dict], batches: list[str]) -> str:
  """Squared errors at all budgets, side by side."""
  columns = [(batch, budget) for batch in batches for budget in BUDGETS]
  lines = [
    "| rule |" + "".join(f" {b}, {x:.3g} |" for b, x in columns),
    "|---|" + "---|" * len(columns),
  ]
  for group, rules in RULES.items():
    lines.append(f"| **{group}** |" + " |" * len(columns))
    for rule in rules:
      cells = [_both(find(rows, b, rule, x), rule) for b, x in columns]
      lines.append(f"| {rule.name} |" + "".join(f" {x} |" for x in cells))
  return "\n".join(lines)


def _sizes(rows: list[dict], sizes: list[dict]) -> str:
  """Returns every rule for group sizes, against even groups."""
  budgets = list(dict.fromkeys(row["budget"] for row in sizes))
  lines = [
    "| |" + "".join(f" {16 * x:g} each |" for x in budgets),
    "|---|" + "---|" * len(budgets),
  ]
  names = dict.fromkeys((row["batch"], row["method"]) for row in sizes)
  for batch, name in names:
    rule = Rule(name, "group sizes", name, BIASED, "")
    of = {
      r["budget"]: r
      for r in sizes
      if (r["batch"], r["method"]) == (batch, name)
    }
    cells = [two_digits(at_length(rows, of[x], rule)) for x in budgets]
    lines.append(f"| {batch}: {name} |" + "".join(f" {x} |" for x in cells))
  return "\n".join(lines)


def _effects(effects: list[dict]) -> str:
  """Returns measured effects, and those that the automatic budget expects."""
  lines = [
    "| | groups of | fraction kept | measured | expected |",
    "|---|---|---|---|---|",
  ]
  lines += [
    f"| {row['batch']} | {row['group']} | {row['share_of_live']} | "
    f"{row['measured']:.2f} | {row['predicted']:.2f} |"
    for row in effects
  ]
  return "\n".join(lines)


def _both(row: dict | None, rule: Rule) -> str:
  if row is None:
    return "–"
  bias = "" if rule.unbiased == EXACT else f"{two_digits(row['bias'])} + "
  return bias + two_digits(row["variance"])


def _designs(rows: list[dict]) -> str:
  """Every choice of completions, more of ours among them, at every budget."""
  names = list(dict.fromkeys(row["method"] for row in rows))
  budgets = list(dict.fromkeys(row["budget"] for row in rows))
  of = {(row["method"], row["budget"]): row for row in rows}
  lines = [
    "| |" + "".join(f" {budget:.3g} |" for budget in budgets),
    "|---|" + "---|" * len(budgets),
  ]
  for name in names:
    cells = [_design(of[name, budget]) for budget in budgets]
    lines.append(f"| {name} |" + "".join(f" {cell} |" for cell in cells))
  return "\n".join(lines)


def _design(row: dict) -> str:
  """Squared bias only where there is one beyond the noise of the draws."""
  if row["variance"] is None:
    return "–"
  if row["bias"] > 0.02 * row["variance"] + 1e-3:
    shape = f"(cos {row['cosine']:.2f}, x{row['scale']:.2f})"
    return f"{two_digits(row['bias'])} + {two_digits(row['variance'])} {shape}"
  return f"{row['variance']:.4f}"


def two_digits(x: float) -> str:
  """Formats a number with two significant digits."""
  if abs(x) < 5e-4:
    return "0.000"
  if abs(x) < 0.1:
    return f"{x:.3f}"
  return f"{x:.2f}" if abs(x) < 10 else f"{x:.0f}"
