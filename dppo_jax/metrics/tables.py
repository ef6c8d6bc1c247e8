"""Tables as Markdown and as lines of a terminal."""

from collections.abc import Sequence
from typing import Any

Rows = Sequence[Sequence[str]]


def markdown(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
  """A Markdown table; what would end a cell is escaped."""
  cell = lambda x: str(x).replace("|", "\\|").replace("\n", " ")
  lines = [head, ("---",) * len(head), *rows]
  return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def aligned(head: Sequence[str], rows: Rows, width: int = 80) -> str:
  """Columns beside each other; the first is cut where lines would be wider."""
  columns = list(zip(head, *rows, strict=True))
  widths = [max(map(len, column)) for column in columns]
  left = width - sum(widths[1:]) - 2 * len(widths[1:])
  widths[0] = max(min(widths[0], left), 4)
  lines = []
  for first, *rest in (head, *rows):
    cells = [short(first, widths[0]).ljust(widths[0])]
    cells += [x.rjust(n) for x, n in zip(rest, widths[1:], strict=True)]
    lines.append("  ".join(cells).rstrip())
  return "\n".join(lines)


def short(text: str, width: int) -> str:
  """At most `width` characters, with an ellipsis for what is left out."""
  return text if len(text) <= width else text[: width - 1] + "…"


def amount(x: float) -> str:
  """A number to three figures: 0.25, 12.3, 1,230, 45.1k, 1.2M."""
  for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
    if abs(x) >= limit:
      return f"{x / (1e3 if unit == 'k' else limit):.3g}{unit}"
  return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.{3 if abs(x) >= 1 else 2}g}"
