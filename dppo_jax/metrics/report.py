"""Writes a run's report: `report.md` with `report.png`."""

from collections.abc import Iterator, Sequence
import pathlib
import re
import textwrap
from typing import Any

from matplotlib import axes as mpl_axes
from matplotlib import figure as figures
import numpy as np

from dppo_jax.analysis import runs, statistics, style, tables
from dppo_jax.analysis.statistics import Interval
from dppo_jax.errors import writing
from dppo_jax.files import json_object, jsonl
from dppo_jax.metrics import health

_POINTS = 40  # of a curve over steps, each a mean of neighbours
_FRACTIONS = {
  "prompts kept": ("prompts/kept", "prompts/drawn"),
  "completions kept": ("completions/kept", "completions/drawn"),
  "completions trained": ("completions/trained", "completions/drawn"),
  "zero-variance groups": ("groups/zero_std", "prompts/kept"),
}
_SPEEDUP = "budget/predicted_speedup"
_PANELS = {  # over steps: metrics by their label
  "reward": {"mean": "reward/mean"},
  "tokens of a completion": {"mean": "tokens/completion_mean"},
  "entropy and any KL penalty, nats": {"entropy": "update/entropy"},
  "gradient norm": {"norm": "update/grad_norm"},
  "tokens per step": {x: f"tokens/{x}" for x in ("generated", "trained")},
  "predicted speed-up": {"speedup": _SPEEDUP},
}
_OPTIONS = {
  "data.train": str,
  "method.args": dict,
  "objective.name": str,
  "objective.args": dict,
  "steps": int,
}
_SAMPLE = {
  "split": str,
  "problem": str,
  "completion": str,
  "answer": str,
  "correct": float,
}
_TOTALS = (
  "prompts/drawn tokens/generated tokens/trained "
  "reward/timeouts reward/crashes reward/errors reward/switched_off "
  "reward/nonfinite"
).split()


def write(workdir: pathlib.Path, note: str = "") -> pathlib.Path:
  """Writes the report of a run, finished or not; returns its path.

  Args:
    note: what ended the run early, for the lines below the title.
  """
  run = runs.load(workdir)
  json_object.check(run.config, _OPTIONS, f"{workdir / 'config.json'}: ")
  samples = jsonl.read(workdir / "samples.jsonl", _SAMPLE)
  with writing(workdir / "report.png"):
    style.save(_draw(run), workdir / "report.png")
  seconds = _stage_seconds(run)
  total = max(sum(seconds.values()), 1e-9)
  times = [(k, f"{x:.1f}", f"{x / total:.0%}") for k, x in seconds.items()]
  parts = [
    f"# {_title(run)}",
    *([note] if note else []),
    tables.markdown(("", ""), [*_summary(run)]),
    "Parentheses and error bars are 95% intervals over problems.",
    "![accuracy, reward, length, entropy, pruning and time](report.png)",
    tables.markdown(("stage", "seconds in all steps", ""), times),
    *_samples(samples),
  ]
  jsonl.replace(workdir / "report.md", ["\n\n".join(parts), "\n"])
  return workdir / "report.md"


def _summary(run: runs.Run) -> Iterator[tuple[str, str]]:
  for section in ("method", "objective"):
    args = run.config[f"{section}.args"].items()
    args = ", ".join(f"{name}={value}" for name, value in args)
    yield section, f"{run.config[f'{section}.name']}({args})"
  yield from (run.config.get("changes") or {}).items()
  for label, ends in _accuracies(run):
    yield label, " → ".join(map(statistics.with_interval, ends))
  yield "training seconds", f"{run.total('step/seconds'):.1f}"
  for label, (part, total) in _FRACTIONS.items():
    yield label, f"{run.total(part) / max(run.total(total), 1):.1%}"
  for name in _TOTALS:
    yield name, f"{run.total(name):,.0f}"
  if speedup := _speedup(run):
    yield f"{_SPEEDUP}, mean over steps", speedup
  skipped = max((x.get("update/skipped", 0) for x in run.steps), default=0)
  yield "updates skipped", f"{skipped:.0f}"
  if scale := runs.noise_scale(run.steps[-1:]):
    yield "gradient noise scale", scale
  for check in health.CHECKS:
    if count := run.total(f"warnings/{check.name}"):
      yield f"steps with the warning {check.name}", f"{count:.0f}"


def headline(run: runs.Run) -> str:
  """Returns the results of a run in a line."""
  parts = [
    f"{label} {' to '.join(f'{x.value:.3f}' for x in ends)}"
    for label, ends in _accuracies(run)
  ]
  fraction = lambda part, whole: run.total(part) / max(run.total(whole), 1)
  completions = fraction("completions/trained", "completions/drawn")
  tokens = fraction("tokens/trained", "tokens/generated")
  parts.append(
    f"trained on {completions:.0%} of completions, {tokens:.0%} of tokens"
  )
  if speedup := _speedup(run):
    parts.append(f"predicted speed-up {speedup}")
  return f"result: {'; '.join(parts)}"


def _accuracies(run: runs.Run) -> Iterator[tuple[str, list[Interval]]]:
  """Yields named accuracies at both ends of a run, sampled before greedy."""
  names = (name for line in run.evals for name in line)
  matches = (re.fullmatch("(eval(?:/.*)?)/accuracy", x) for x in names)
  prefixes = dict.fromkeys(x[1] for x in matches if x)
  if run.steps and not any(line["eval/samples"] for line in run.evals):
    # The mean over the first and the last tenth of the steps.
    size = -(-len(run.steps) // 10)
    label = f"sampled accuracy (training, mean of {size} steps)"
    yield (
      label,
      [
        Interval(_mean("reward/accuracy", steps), np.nan, np.nan)
        for steps in (run.steps[:size], run.steps[-size:])
      ],
    )
  for prefix in prefixes:
    for decoding in ("sampled", "greedy"):
      lines = [x for x in run.evals if decoding in runs.accuracies(x, prefix)]
      for last in lines[-1:]:
        problems = prefix.removeprefix("eval/")
        problems = "held-out" if prefix == "eval" else problems
        if num := last.get(f"{prefix}/problems"):
          problems = f"{num:.0f} {problems} problems"
        samples = last["eval/samples"] if decoding == "sampled" else 1
        ends = [runs.accuracies(x, prefix)[decoding] for x in (lines[0], last)]
        yield f"{decoding} accuracy ({problems} x {samples:.0f})", ends


def _speedup(run: runs.Run) -> str:
  """Returns the mean predicted speed-up as text; empty if there is none."""
  predicted = [x[_SPEEDUP] for x in run.steps if _SPEEDUP in x]
  return f"{np.mean(predicted):.2f}" if predicted else ""


def _samples(lines: Sequence[dict]) -> Iterator[str]:
  """Completions at both ends, held-out ones if possible, of four problems.

  Problems whose verdict has changed come first, then those answered wrongly.
  """
  lines = [x for x in lines if x["split"] == "eval"] or lines
  steps = [x["step"] for x in (*lines[:1], *lines[-1:])]
  first, last = (
    {x["problem"]: x for x in reversed(lines) if x["step"] == step}
    for step in steps or (0, 0)
  )
  is_right = lambda x: x["correct"] == 1
  same = {
    p: x for p, x in last.items() if is_right(first.get(p, x)) == is_right(x)
  }
  changed = [p for p in last if p not in same]
  wrong = [p for p, x in same.items() if not is_right(x)]
  chosen = [*changed[:2], *wrong[:2], *changed[2:], *wrong[2:], *last]
  for problem in [*dict.fromkeys(chosen)][:4]:
    for step, by_problem in {steps[0]: first, steps[-1]: last}.items():
      if x := by_problem.get(problem):
        verdict = "right" if is_right(x) else "wrong"
        yield f"Step {step}, {verdict}, answer {x['answer']}:"
        text = f"{x['problem']}\n{x['completion']}"
        yield textwrap.indent(text, "    ")  # as code


@style.rc()
def _draw(run: runs.Run) -> figures.Figure:
  """Draws a run, which may have no steps yet."""
  figure = style.figure(height=9.0, width=12.0)
  axes = figure.subplots(3, 3)
  _draw_accuracy(axes[0, 0], run)
  _draw_step_metrics(axes.flat[[1, 2, 3, 4, 6, 8]], run.steps)
  _draw_pruning(axes[1, 2], run.steps)
  seconds = _stage_seconds(run)
  axes[2, 1].barh([*seconds], [*seconds.values()])
  axes[2, 1].set(title="time by stage", xlabel="seconds")
  axes[2, 1].invert_yaxis()
  for axis in axes.flat:
    if len(axis.get_legend_handles_labels()[1]) > 1:
      style.legend_below(axis)
  figure.suptitle(_title(run))
  return figure


def _draw_accuracy(axis: mpl_axes.Axes, run: runs.Run) -> None:
  """Draws accuracy over seconds, with dots alone where evaluations lack it."""
  spent = np.cumsum([x["step/seconds"] for x in run.steps])
  steps = [x | {"spent": y} for x, y in zip(run.steps, spent, strict=True)]
  _, x, y = _curves(steps, "spent", "reward/accuracy")
  axis.plot(x, y, label="sampled, training", color=style.FAINT, lw=1)
  seconds, _ = run.curve()
  evals = [*map(runs.accuracies, run.evals)]
  for decoding in ("sampled", "greedy"):
    at = [i for i, accuracies in enumerate(evals) if decoding in accuracies]
    if at:
      y = np.array([evals[i][decoding] for i in at])
      errors = np.abs(y[:, 1:] - y[:, :1]).T
      axis.errorbar(
        seconds[at],
        y[:, 0],
        errors,
        fmt="o-" if len(at) == len(evals) else "D",
        ms=3,
        label=f"{decoding}, held-out",
      )
  axis.set(title="accuracy", xlabel="training seconds")
  style.format_axes(axis)


def _draw_step_metrics(
  axes: Sequence[mpl_axes.Axes], steps: Sequence[dict]
) -> None:
  """Draws `_PANELS`, an axis for each, with deviations and lengths shaded."""

  def plot(axis, label, metric):
    lines = [line for line in steps if metric in line]
    axis.plot(*_curves(lines, metric), label=label)

  for axis, (title, metrics) in zip(axes, _PANELS.items(), strict=True):
    for label, metric in metrics.items():
      plot(axis, label, metric)
    axis.set(title=title, xlabel="step")
  reward, length, entropy, *from_zero = axes
  shade: dict[str, Any] = {"alpha": 0.15, "lw": 0}
  x, mean, std = _curves(steps, "reward/mean", "reward/std")
  label = "± deviation in a group"
  reward.fill_between(x, mean - std, mean + std, label=label, **shade)
  ends = _curves(steps, "tokens/completion_min", "tokens/completion_max")
  length.fill_between(*ends, label="shortest to longest", **shade)
  if any(x.get("update/kl") for x in steps):
    plot(entropy, "kl", "update/kl")
  for axis in (length, *from_zero):
    axis.set_ylim(0, None)
  if not any(_SPEEDUP in x for x in steps):
    axes[-1].remove()


def _draw_pruning(axis: mpl_axes.Axes, steps: Sequence[dict]) -> None:
  for i, (label, names) in enumerate(_FRACTIONS.items()):
    x, part, total = _curves(steps, *names)
    # Thinner and thinner, so that equal curves are all visible.
    axis.plot(x, part / np.maximum(total, 1), label=label, lw=4 - i)
  axis.set(title="pruning", xlabel="step")
  style.format_axes(axis)


def _title(run: runs.Run) -> str:
  """Method, data, seed and progress of a run, as a title."""
  source = pathlib.PurePath(run.config["data.train"]).name
  done = run.steps[-1]["step"] if run.steps else 0
  return (
    f"{run.config['method.name']} on {source}, seed {run.seed}, "
    f"step {done} of {run.config['steps']}"
  )


def _stage_seconds(run: runs.Run) -> dict[str, float]:
  """Seconds in each stage and in the rest of the steps, the longest first."""
  seconds = {x: run.total(f"{x}/seconds") for x in runs.STAGES}
  seconds["other"] = max(run.total("step/seconds") - sum(seconds.values()), 0)
  ranked = sorted(seconds, key=seconds.__getitem__, reverse=True)
  return {stage: seconds[stage] for stage in ranked if seconds[stage]}


def _curves(steps: Sequence[dict], *names: str) -> np.ndarray:
  """Steps and metrics, averaged over equal chunks of steps."""
  size = max(-(-len(steps) // _POINTS), 1)
  chunks = [steps[i : i + size] for i in range(0, len(steps), size)]
  return np.array([[_mean(n, x) for x in chunks] for n in ("step", *names)])


def _mean(name: str, steps: Sequence[dict]) -> float:
  """Returns the mean over the steps that have a metric; NaN without any."""
  return float(np.mean([x[name] for x in steps if name in x] or np.nan))
