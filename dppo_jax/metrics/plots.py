"""A run in one picture: what it learnt, what it pruned, where the time went."""

from collections.abc import Sequence
import pathlib

from matplotlib import axes as mpl_axes
from matplotlib import figure as figures
import numpy as np

from dppo_jax.analysis import runs
from dppo_jax.metrics import style, tables

BLUE, ORANGE, GREEN, PURPLE = style.COLOURS[:4]
POINTS = 40  # of a line over steps, each a mean over neighbours


def draw(run: runs.Run) -> figures.Figure:
  """Accuracy, pruning, tokens and time; a run may have nothing yet."""
  with style.rc():
    figure = style.figure(height=6.2)
    axes = figure.subplots(2, 2)
    _accuracy(axes[0, 0], run)
    if run.steps:
      _pruning(axes[0, 1], run.steps)
      _tokens(axes[1, 0], run.steps)
      _times(axes[1, 1], run)
    else:
      for axis in axes.flat[1:]:
        axis.set_axis_off()
      axes[0, 1].text(0.5, 0.5, "no step yet", ha="center")
    planned = run.config.get("steps", run.done)
    figure.suptitle(
      f"{title(run)} · step {run.done} of {planned}",
      color=style.FAINT,
      fontsize=10,
    )
  return figure


def title(run: runs.Run) -> str:
  """Method, objective, data and seed."""
  config = run.config
  source = pathlib.PurePath(str(config.get("data.train", ""))).name
  what = config["method.name"]
  if config.get("objective.name", "grpo") != "grpo":
    what += f" ({config['objective.name']})"
  return f"{what} on {source}, seed {run.seed}"


def _accuracy(axis: mpl_axes.Axes, run: runs.Run) -> None:
  of = "held-out" if run.evals else "training"
  x, y = run.curve()
  axis.set(xlabel="training seconds", ylabel=f"{of} accuracy")
  if not len(x):
    axis.set_title("No evaluation yet")
    style.shares(axis)
    return
  axis.plot(x, y, "o-", color=BLUE, markersize=3.5, clip_on=False)
  errors = {line["step"]: line.get("eval/stderr", 0.0) for line in run.evals}
  if errors:
    error = np.array([*errors.values()])
    axis.fill_between(
      x, y - error, y + error, color=BLUE, alpha=0.18, linewidth=0
    )
    axis.set_xlabel("training seconds; band: ± standard error")
  if len(x) > 1 or x[0]:
    style.amounts(axis)
  style.shares(axis)
  spent = f" in {x[-1]:,.0f} s" if x[-1] >= 10 else f" in {x[-1]:.1f} s"
  axis.set_title(
    f"{of.capitalize()} accuracy {y[0]:.0%} → {y[-1]:.0%}{spent}"
    if len(y) > 1
    else f"{of.capitalize()} accuracy {y[0]:.0%} at the start"
  )


def _pruning(axis: mpl_axes.Axes, steps: Sequence[dict]) -> None:
  ends = []
  # The later the thinner: equal shares are all seen.
  for colour, width, label, part, whole in (
    (
      style.FAINT,
      1.5,
      "zero-variance\ngroups",
      "groups/zero_std",
      "prompts/kept",
    ),
    (BLUE, 3.5, "prompts kept", "prompts/kept", "prompts/drawn"),
    (
      ORANGE,
      2.5,
      "completions\nkept",
      "completions/kept",
      "completions/drawn",
    ),
    (
      GREEN,
      1.5,
      "completions\ntrained",
      "completions/trained",
      "completions/drawn",
    ),
  ):
    x, y = _line(steps, lambda at, a=part, b=whole: at(a) / max(at(b), 1))
    if len(x):
      kind = "--" if colour == style.FAINT else "-"
      axis.plot(x, y, kind, color=colour, linewidth=width)
      ends.append((label, colour, float(y[-1])))
  axis.set(xlabel="step", ylabel="share")
  style.amounts(axis)
  style.shares(axis)
  style.labels_at_end(axis, ends)
  share = _share(steps, "completions/trained", "completions/drawn")
  axis.set_title(f"{share:.0%} of completions trained")


def _tokens(axis: mpl_axes.Axes, steps: Sequence[dict]) -> None:
  made = _line(steps, lambda at: at("tokens/generated"))
  trained = _line(steps, lambda at: at("tokens/trained"))
  axis.set(xlabel="step", ylabel="tokens a step")
  if len(made[0]) and len(made[0]) == len(trained[0]):
    axis.fill_between(made[0], trained[1], made[1], color=BLUE, alpha=0.12)
    axis.fill_between(trained[0], 0, trained[1], color=GREEN, alpha=0.3)
    for (x, y), colour, label in (
      (made, BLUE, "generated"),
      (trained, GREEN, "trained"),
    ):
      axis.plot(x, y, color=colour)
      last = y[-len(y) // 3 :]
      is_below = label == "trained" and last.min() > 0.3 * made[1].max()
      axis.annotate(
        label,
        (x[-1], last.min() if is_below else last.max()),
        xytext=(0, -3 if is_below else 3),
        textcoords="offset points",
        color=colour,
        ha="right",
        va="top" if is_below else "bottom",
      )
    axis.set_ylim(0, 1.12 * max(made[1].max(), 1.0))
    axis.yaxis.set_major_formatter(style.amount)
  style.amounts(axis)
  share = _share(steps, "tokens/trained", "tokens/generated")
  axis.set_title(f"{share:.0%} of generated tokens trained")


def _times(axis: mpl_axes.Axes, run: runs.Run) -> None:
  spent = spent_in(run)
  total = max(run.total("step/seconds"), 1e-9)
  spent["the rest"] = max(total - sum(spent.values()), 0.0)
  spent = {
    stage: seconds
    for stage, seconds in sorted(spent.items(), key=lambda x: -x[1])
    if seconds >= total / 200
  }
  names = [stage.replace("_", " ") for stage in spent]
  bars = axis.barh(names, list(spent.values()), color=BLUE, height=0.65)
  axis.bar_label(
    bars,
    [f"{tables.amount(x)} s, {x / total:.0%}" for x in spent.values()],
    padding=3,
    fontsize=9,
  )
  axis.invert_yaxis()
  axis.grid(visible=False, axis="y")
  style.amounts(axis)
  axis.set_xlim(0, 1.35 * max(spent.values(), default=1.0))
  axis.set_xlabel("seconds in all steps")
  first = next(iter(names), "nothing")
  share = next(iter(spent.values()), 0.0) / total
  axis.set_title(f"{first.capitalize()} takes {share:.0%} of the time")


def spent_in(run: runs.Run) -> dict[str, float]:
  """Seconds in each of the stages that the run has."""
  return {
    stage: run.total(f"{stage}/seconds")
    for stage in runs.STAGES
    if any(f"{stage}/seconds" in line for line in run.steps)
  }


def _line(steps: Sequence[dict], value) -> tuple[np.ndarray, np.ndarray]:
  """Step and value of the lines that have what `value` asks for, smoothed."""
  found = []
  for line in steps:
    try:
      found.append((line["step"], value(line.__getitem__)))
    except KeyError:  # of an older run
      continue
  x, y = np.array(found, float).reshape(-1, 2).T
  return runs.smooth(x, y, POINTS)


def _share(steps: Sequence[dict], part: str, whole: str) -> float:
  total = lambda name: sum(line.get(name, 0.0) for line in steps)
  return total(part) / max(total(whole), 1.0)
