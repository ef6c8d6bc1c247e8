"""Draws a run: accuracy, pruning, tokens and time."""

from collections.abc import Sequence
import pathlib

from matplotlib import axes as mpl_axes
from matplotlib import figure as figures
import numpy as np

from dppo_jax.analysis import runs, style

_POINTS = 40  # of a curve over steps, each a mean of neighbours
FRACTIONS = {
  "prompts kept": ("prompts/kept", "prompts/drawn"),
  "completions kept": ("completions/kept", "completions/drawn"),
  "completions trained": ("completions/trained", "completions/drawn"),
  "zero-variance groups": ("groups/zero_std", "prompts/kept"),
}


def draw(run: runs.Run) -> figures.Figure:
  """Draws a run, which may have no steps yet."""
  with style.rc():
    figure = style.figure(height=6.2)
    (accuracy, pruning), (tokens, time) = figure.subplots(2, 2)
    _accuracy(accuracy, run)
    for i, (label, names) in enumerate(FRACTIONS.items()):
      x, part, total = _curves(run.steps, *names)
      # Thinner and thinner, so that equal curves are all visible.
      pruning.plot(x, part / np.maximum(total, 1), label=label, lw=4 - i)
    style.format_axes(pruning)
    x, *kinds = _curves(run.steps, "tokens/generated", "tokens/trained")
    for label, y in zip(("generated", "trained"), kinds, strict=True):
      tokens.plot(x, y, label=label)
    pruning.set(title="pruning", xlabel="step")
    tokens.set(title="tokens per step", xlabel="step", ylim=(0, None))
    pruning.legend(fontsize=8)
    tokens.legend(fontsize=8)
    seconds = stage_seconds(run)
    time.barh([*seconds], [*seconds.values()])
    time.invert_yaxis()
    time.set(title="time by stage", xlabel="seconds")
    figure.suptitle(title(run))
  return figure


def title(run: runs.Run) -> str:
  """Method, objective, data, seed and progress of a run."""
  config = run.config
  source = pathlib.PurePath(str(config.get("data.train", ""))).name
  method = config["method.name"]
  if config.get("objective.name", "grpo") != "grpo":
    method += f" ({config['objective.name']})"
  steps = f"step {run.done} of {config.get('steps', run.done)}"
  return f"{method} on {source}, seed {run.seed}, {steps}"


def stage_seconds(run: runs.Run) -> dict[str, float]:
  """Seconds in each stage and in the rest of the steps, the longest first."""
  seconds = {x: run.total(f"{x}/seconds") for x in runs.STAGES}
  seconds["other"] = max(run.total("step/seconds") - sum(seconds.values()), 0)
  ranked = sorted(seconds.items(), key=lambda item: -item[1])
  return {stage: x for stage, x in ranked if x}


def _accuracy(axis: mpl_axes.Axes, run: runs.Run) -> None:
  if run.evals:
    x, y = run.curve()
    errors = {line["step"]: line.get("eval/stderr", 0.0) for line in run.evals}
    axis.errorbar(x, y, [*errors.values()], fmt="o-", markersize=3)
    axis.set(title="held-out accuracy", xlabel="training seconds")
  else:
    axis.plot(*_curves(run.steps, "reward/accuracy"))
    axis.set(title="training accuracy", xlabel="step")
  style.format_axes(axis)


def _curves(steps: Sequence[dict], *names: str) -> list[np.ndarray]:
  """Steps and metrics, averaged over equal chunks of steps."""
  size = max(-(-len(steps) // _POINTS), 1)
  chunks = [steps[i : i + size] for i in range(0, len(steps), size)]
  return [
    np.array(
      [np.mean([x.get(name, np.nan) for x in chunk]) for chunk in chunks]
    )
    for name in ("step", *names)
  ]
