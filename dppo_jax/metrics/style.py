"""How pictures look: colours, axes, labels beside lines.

Made for 800 pixels of width, opaque so that they read on a dark page as well.
"""

import itertools
import os
import pathlib

from matplotlib import axes as mpl_axes
from matplotlib import figure as figures
from matplotlib import rc_context, ticker
import numpy as np

INK, FAINT, GRID = "#1f2328", "#59636e", "#d8dee4"
# Okabe and Ito 2008, told apart by the colour-blind; dark enough for text.
COLOURS = (
  "#0072b2",
  "#c4500a",
  "#007f5c",
  "#b0528e",
  "#8a6d00",
  "#3d8fc4",
  "#5a5a5a",
)
WIDTH = 8.0  # inches, at 100 dots each as wide as a README
DOTS = 200  # an inch, for screens of twice the density
_RC = {
  "font.size": 10,
  "axes.titlesize": 11,
  "axes.titleweight": "bold",
  "axes.titlelocation": "left",
  "axes.titlepad": 8,
  "axes.labelcolor": FAINT,
  "axes.edgecolor": FAINT,
  "text.color": INK,
  "xtick.color": FAINT,
  "ytick.color": FAINT,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "axes.axisbelow": True,
  "grid.color": GRID,
  "grid.linewidth": 0.8,
  "figure.facecolor": "white",
}


def rc():
  """The context in which a figure is made and drawn."""
  return rc_context(_RC)


def figure(height: float) -> figures.Figure:
  """An empty figure, of no backend: pyplot would choose one for the process."""
  made = figures.Figure(figsize=(WIDTH, height), layout="constrained")
  made.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
  return made


def save(made: figures.Figure, path: pathlib.Path) -> None:
  """Writes a picture, whole or not at all."""
  unfinished = path.with_suffix(".tmp")
  with rc():
    made.savefig(unfinished, format="png", dpi=DOTS)
  os.replace(unfinished, path)


def amounts(axis: mpl_axes.Axes) -> None:
  """Ticks along x from 0 such as 0, 500, 1k, 2M."""
  axis.set_xlim(left=0)
  axis.xaxis.set_major_locator(ticker.MaxNLocator(5, steps=(1, 2, 5, 10)))
  axis.xaxis.set_major_formatter(amount)


def amount(x: float, place: int | None = None) -> str:
  """A tick's number: 0.5, 500, 1k, 2.5M."""
  for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(x) >= limit:
      return f"{x / limit:g}{unit}"
  return f"{x:g}"


def shares(axis: mpl_axes.Axes, least: float = 0.0, most: float = 1.0) -> None:
  """Percent along y, with a little space for markers at the ends."""
  margin = 0.03 * (most - least)
  axis.set_ylim(least - margin, most + margin)
  axis.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))


def labels_at_end(
  axis: mpl_axes.Axes, items: list[tuple[str, str, float]]
) -> None:
  """Names beside the right ends of lines, moved apart where they would touch.

  Args:
    items: label, colour and the line's last y in data.
  """
  if not items:
    return
  low, high = axis.get_ylim()
  # A line of text takes about 0.17 inches.
  height = axis.get_figure().get_size_inches()[1] * axis.get_position().height
  gap = (high - low) * 0.17 / max(height, 0.5)
  # Of equal ends the first is above.
  order = sorted(range(len(items)), key=lambda i: (items[i][2], -i))
  heights = [gap * len(items[i][0].splitlines()) for i in order]
  places = apart([items[i][2] for i in order], heights, low, high)
  for i, y in zip(order, places, strict=True):
    label, colour, _ = items[i]
    axis.annotate(
      label,
      (1, y),
      xycoords=("axes fraction", "data"),
      xytext=(5, 0),
      textcoords="offset points",
      color=colour,
      va="center",
      annotation_clip=False,
    )


def apart(
  y: list[float], heights: list[float], low: float, high: float
) -> list[float]:
  """Middles of blocks that do not touch, near the sorted `y` they are for."""
  gaps = [(a + b) / 2 for a, b in itertools.pairwise(heights)]
  placed = _pushed(y, gaps)
  # Where some were pushed up, all move back by as much as on average.
  shift = (sum(placed) - sum(y)) / len(y)
  # Down from the top, then up from the bottom.
  falling = [shift - place for place in placed[::-1]]
  falling = _pushed(falling, gaps[::-1], heights[-1] / 2 - high)
  rising = [-place for place in falling[::-1]]
  return _pushed(rising, gaps, heights[0] / 2 + low)


def _pushed(
  y: list[float], gaps: list[float], least: float = -np.inf
) -> list[float]:
  """Sorted places from `least` on with these gaps or more between them."""
  placed = []
  for value, gap in zip(y, [*gaps, 0.0], strict=True):
    placed.append(max(value, least))
    least = placed[-1] + gap
  return placed
