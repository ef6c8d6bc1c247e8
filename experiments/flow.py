"""Draws the flow of a step for the README: what is pruned, and what for.

python -m experiments.flow
"""

import pathlib

from matplotlib import patches

from dppo_jax.analysis import style

BLUE, ORANGE, GREEN = style.COLOURS[:3]
HEIGHT = 400  # of 800 points across
# Of four prompts drawn: their probabilities, and whether they were kept.
PROMPTS = ((1.0, True), (0.5, False), (1.0, True), (0.5, True))
# Lengths of the completions of the kept ones, what is right, and what is kept.
COMPLETIONS = (
  ((30, 44, 24, 40), (1, 0, 1, 1), (0, 1, 1, 0)),
  ((46, 28, 38, 22), (0, 0, 1, 0), (0, 0, 1, 1)),
  ((26, 40, 32, 44), (1, 1, 0, 1), (1, 0, 1, 0)),
)
TOP, PITCH = 292, 58  # of the first group, and to the next
LEFT = {"draw": 14, "roll": 166, "select": 312, "pack": 478, "update": 636}


def main() -> None:
  figure = style.figure(HEIGHT / 100)
  figure.set_layout_engine("none")
  axis = figure.add_axes((0, 0, 1, 1))
  axis.set(xlim=(0, 800), ylim=(0, HEIGHT))
  axis.set_axis_off()
  for name, title, what in (
    ("draw", "draw prompts,\nchoose some", "1 of 4 pruned:\nnothing sampled"),
    ("roll", "roll out,\ngrade", "every completion\nof the others"),
    ("select", "select\ncompletions", "half pruned;\nkept ones weigh 1/p"),
    ("pack", "pack", "rows without gaps,\nshared prompts once"),
    ("update", "update", "costs no more than\nwhat was kept"),
  ):
    _words(axis, LEFT[name], 372, title, weight="bold", fontsize=11)
    _words(axis, LEFT[name], 92, what, color=style.FAINT, fontsize=9.5)
  for at in (130, 276, 442, 604):
    _arrow(axis, at)
  _draw_prompts(axis)
  _draw_groups(axis)
  _draw_rows(axis)
  _draw_update(axis)
  axis.plot([14, 786], [56, 56], color=style.GRID, linewidth=1)
  _words(
    axis,
    14,
    46,
    "Unbiased: what is kept with probability p counts 1/p times. Kept half of "
    "the time, it counts double,\nso on average everything counts once: the "
    "gradient is that of the full batch, for less work.",
    fontsize=10.5,
  )
  style.save(figure, pathlib.Path(__file__).with_name("flow.png"))


def _draw_prompts(axis) -> None:
  for i, (prob, is_kept) in enumerate(PROMPTS):
    y = _prompt_y(i)
    _box(axis, LEFT["draw"], y, 46, 20, style.FAINT, is_kept)
    label = f"p = {prob:g}" if is_kept else f"p = {prob:g}: pruned"
    colour = style.INK if is_kept else style.FAINT
    _words(axis, LEFT["draw"] + 52, y + 10, label, va="center", color=colour)


def _draw_groups(axis) -> None:
  kept = [i for i, (_, is_kept) in enumerate(PROMPTS) if is_kept]
  for place, (lengths, right, chosen) in zip(kept, COMPLETIONS, strict=True):
    for j, (length, is_right, is_chosen) in enumerate(
      zip(lengths, right, chosen, strict=True)
    ):
      y = _prompt_y(place) + 26 - 11 * j
      colour = GREEN if is_right else ORANGE
      _box(axis, LEFT["roll"], y, 1.6 * length, 8, colour)
      _box(axis, LEFT["select"], y, 1.6 * length, 8, colour, bool(is_chosen))
      if is_chosen:
        weight = 2 / PROMPTS[place][0]
        _words(
          axis,
          LEFT["select"] + 1.6 * length + 4,
          y + 4,
          f"×{weight:g}",
          va="center",
          fontsize=8.5,
        )
  _words(axis, LEFT["roll"], 352 - 20, "right", color=GREEN, fontsize=9)
  _words(axis, LEFT["roll"] + 34, 352 - 20, "wrong", color=ORANGE, fontsize=9)


def _draw_rows(axis) -> None:
  """The kept completions, each group behind its prompt."""
  rows = (
    ((0, 44, ORANGE), (0, 24, GREEN)),
    ((1, 38, GREEN), (1, 22, ORANGE)),
    ((2, 26, GREEN), (2, 32, ORANGE)),
  )
  for i, row in enumerate(rows):
    x, y = LEFT["pack"], 258 - 34 * i
    _box(axis, x, y, 18, 16, style.FAINT)
    x += 20
    for _, length, colour in row:
      _box(axis, x, y, 1.4 * length, 16, colour)
      x += 1.4 * length + 2


def _draw_update(axis) -> None:
  _words(
    axis,
    LEFT["update"],
    232,
    r"$g=\frac{1}{NG}\ \sum_{\mathrm{kept}}\ \frac{1}{p_i}\ \nabla\ell_i$",
    fontsize=13,
    va="center",
  )
  _words(
    axis,
    LEFT["update"],
    178,
    r"$\mathrm{E}[g]$ = full batch's",
    fontsize=11,
    va="center",
    color=BLUE,
    weight="bold",
  )


def _prompt_y(i: int) -> float:
  return TOP - PITCH * i - 10


def _box(axis, x, y, width, height, colour, is_kept=True) -> None:
  axis.add_patch(
    patches.Rectangle(
      (x, y),
      width,
      height,
      facecolor=colour if is_kept else "none",
      edgecolor=colour,
      linewidth=0.8,
      linestyle="-" if is_kept else (0, (2, 2)),
      alpha=0.9 if is_kept else 0.6,
    )
  )


def _arrow(axis, x) -> None:
  axis.annotate(
    "",
    (x + 22, 212),
    xytext=(x, 212),
    arrowprops={"arrowstyle": "-|>", "color": style.FAINT, "lw": 1.5},
  )


def _words(axis, x, y, text, **style_of) -> None:
  axis.text(x, y, text, **{"va": "top", "color": style.INK, **style_of})


if __name__ == "__main__":
  main()
