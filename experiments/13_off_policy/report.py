"""Tables of the ledger."""

COLUMNS = {
  "bias": "bias",
  "cosine": "cosine",
  "length": "length",
  "variance": "variance",
  "mse_64": "error, 64",
  "mse_512": "error, 512",
}
CELLS = [(step, lag) for step in ("usual step", "large step") for lag in "124"]


def page(rows: list[dict]) -> str:
  """Returns table.md: a summary and all columns at each step and lag."""
  parts = [
    "# Summary",
    "## Policies",
    _drift(rows),
    "## Bias",
    summary(rows, "bias"),
    "## Squared error of 64 completions",
    summary(rows, "mse_64"),
    "## Squared error of 512 completions",
    summary(rows, "mse_512"),
    "## Bias with the baseline of the policy that sampled",
    baselines(rows),
    "## Masked tokens",
    _masks(rows),
    "# All columns",
  ]
  for step, lag in CELLS:
    parts += [f"## {step}, lag {lag}", _full(rows, step, lag)]
  return "\n\n".join(parts) + "\n"


def summary(rows: list[dict], column: str) -> str:
  """Returns one column of every rule at every step and lag."""
  lines = [_header("rule")]
  for part, sampler in (
    ("corrections", "on policy"),
    ("corrections", "stale"),
    ("schedules", "carried"),
  ):
    some = [r for r in rows if (r["part"], r["sampler"]) == (part, sampler)]
    for name in dict.fromkeys(r["rule"] for r in some):
      label = "no lag" if sampler == "on policy" else name
      lines.append(_line(label, some, name, column))
  return "\n".join(lines)


def baselines(rows: list[dict]) -> str:
  """Returns the biases of rows with another baseline."""
  some = [r for r in rows if r["sampler"] == "old baseline" and "bias" in r]
  names = dict.fromkeys(r["rule"] for r in some)
  lines = [_line(name, some, name, "bias") for name in names]
  return "\n".join([_header("rule"), *lines])


def _header(first: str) -> str:
  names = " | ".join(f"{step}, lag {lag}" for step, lag in CELLS)
  return f"| {first} | {names} |\n|---" + "|---" * len(CELLS) + "|"


def _line(label: str, rows: list[dict], name: str, column: str) -> str:
  values = {(r["step"], r["lag"]): r[column] for r in rows if r["rule"] == name}
  return f"| {label} | " + " | ".join(number(values[x]) for x in CELLS) + " |"


def _drift(rows: list[dict]) -> str:
  some = [r for r in rows if (r["part"], r["sampler"]) == ("drift", "stale")]
  labels = {
    "mean_abs_log_ratio": "mean of abs(log ratio) of a token",
    "max_ratio": "largest ratio of a token",
    "max_sequence_ratio": "largest ratio of a completion",
    "sequence_log_std": "deviation of the log ratio of a completion",
  }
  lines = [_line(label, some, "", key) for key, label in labels.items()]
  return "\n".join([_header("drift"), *lines])


def _masks(rows: list[dict]) -> str:
  some = [r for r in rows if (r["part"], r["sampler"]) == ("masks", "stale")]
  lines = [_header("mask, completions")]
  for name in dict.fromkeys(r["rule"] for r in some):
    for key, label in (
      ("masked", "all"),
      ("masked_short", "up to 3 tokens"),
      ("masked_long", "6 to 8 tokens"),
    ):
      lines.append(_line(f"{name}, {label}", some, name, key))
  return "\n".join(lines)


def _full(rows: list[dict], step: str, lag: str) -> str:
  lines = [
    "| rule | sampler | " + " | ".join(COLUMNS.values()) + " | trained |",
    "|---|---" + "|---" * len(COLUMNS) + "|---|",
  ]
  for r in rows:
    if (r["step"], r["lag"]) == (step, lag) and "bias" in r:
      cells = [number(r[x]) for x in COLUMNS]
      cells.append(number(r["trained"]) if "trained" in r else "")
      lines.append(f"| {r['rule']} | {r['sampler']} | {' | '.join(cells)} |")
  return "\n".join(lines)


def number(value: float) -> str:
  """Formats three digits; rounding errors of exact zeros are 0."""
  if abs(value) < 5e-4:
    return "0" if abs(value) < 1e-12 else "<0.001"
  return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
