"""The style of all pictures: colours, fonts, axes."""

import functools
import pathlib

from matplotlib import axes as mpl_axes
from matplotlib import figure as figures
from matplotlib import rc_context, ticker
from matplotlib.rcsetup import cycler

INK, FAINT, GRID = "#1f2328", "#59636e", "#d8dee4"
# Okabe and Ito (2008), distinct for colour-blind readers; dark enough for text.
COLOURS = "#0072b2 #c4500a #007f5c #b0528e #8a6d00 #3d8fc4 #5a5a5a".split()
# To make and plot a figure in.
rc = functools.partial(
  rc_context,
  {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": GRID,
    "legend.frameon": False,
    "text.color": INK,
    "text.parse_math": False,  # labels have users' texts
  },
)


def figure(height: float, width: float = 8.0) -> figures.Figure:
  """Returns an empty figure, without pyplot, which would choose a backend."""
  return figures.Figure(figsize=(width, height), layout="constrained")


def legend_below(axis: mpl_axes.Axes) -> None:
  """Adds a legend below the axis label, where it covers no line."""
  axis.legend(
    loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, fontsize=8
  )


def save(picture: figures.Figure, path: pathlib.Path) -> None:
  """Writes a PNG."""
  with rc():
    picture.savefig(path, dpi=200)


def format_axes(axis: mpl_axes.Axes) -> None:
  """Starts x at 0, with ticks such as 2 k; shows y as percent, up to 100%."""
  top = min(max(1.2 * axis.dataLim.ymax, 0.1), 1.03)
  axis.set(xlim=(0, None), ylim=(-0.03 * top, top))
  tick = lambda x, _: f"{x:g}" if x < 1000 else f"{x / 1000:g} k"
  axis.xaxis.set_major_formatter(tick)
  axis.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
