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
  widths = [max(map(len, x)) for x in zip(head, *rows, strict=True)]
  widths[0] *= -1
  pad = lambda x, width: f"{x:<{-width}}" if width < 0 else f"{x:>{width}}"
  lines = ("  ".join(map(pad, line, widths)).rstrip() for line in (head, *rows))
  return "\n".join(lines)


def short(text: str, width: int) -> str:
  """Returns at most `width` characters, with an ellipsis if text was cut."""
  return text if len(text) <= width else text[: width - 1] + "…"
