"""Tables as Markdown and as aligned text."""

from collections.abc import Sequence
from typing import Any


def markdown(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
  """Returns a Markdown table; characters that would end a cell are escaped."""
  cell = lambda x: str(x).replace("|", "\\|").replace("\n", " ")
  lines = [head, ("---",) * len(head), *rows]
  return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns aligned columns, the first to the left and others to the right."""
  lines = [[x.replace("\n", " ") for x in line] for line in (head, *rows)]
  widths = [max(map(len, x)) for x in zip(*lines, strict=True)]
  layout = "  ".join(f"{{:>{width}}}" for width in widths).replace(">", "<", 1)
  return "\n".join(layout.format(*line).rstrip() for line in lines)
