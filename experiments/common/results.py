"""Lines of results, and how tables and figures show them."""

from collections.abc import Iterable, Sequence
import csv
import io
import json
import pathlib
import platform
import statistics

import jax


def facts() -> dict[str, str]:
  """Returns the versions that a line of results is from."""
  machine = platform.processor() or platform.machine()
  return {"jax": jax.__version__, "machine": machine}


def write(path: pathlib.Path, rows: Iterable[dict]) -> None:
  """Writes one JSON line per row."""
  lines = [json.dumps(row, default=float) + "\n" for row in rows]
  path.write_text("".join(lines))


def read(path: pathlib.Path) -> list[dict]:
  """Returns the rows that `write` wrote."""
  return [json.loads(line) for line in path.read_text().splitlines()]


def to_csv(page: str) -> str:
  """Returns the tables of a Markdown page; a line outside of them is a cell."""
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  for line in page.splitlines():
    cells = [x.strip().strip("*") for x in line.strip("|").split("|")]
    if not line.startswith("|"):
      cells = [line.lstrip("# ")] if line else []
    if set("".join(cells)) != {"-"}:
      writer.writerow(cells)
  return text.getvalue()


def median_range(values: Sequence[float], digits: int = 2) -> str:
  """Formats the median with the least and the largest value."""
  shown = [statistics.median(values), min(values), max(values)]
  middle, low, high = (f"{x:.{digits}f}" for x in shown)
  return f"{middle} ({low}..{high})"


def tidy(axis) -> None:
  """Gives a plot a light grid and no frame at the top and right."""
  axis.grid(alpha=0.25)
  axis.spines[["top", "right"]].set_visible(False)
