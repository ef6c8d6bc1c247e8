"""Writes a run's report: `report.md` with `report.png`."""

from collections.abc import Iterator, Sequence
import pathlib
import re
import textwrap

from matplotlib import figure as figures
import numpy as np

from dppo_jax.analysis import jsonl, runs, statistics, style, tables
from dppo_jax.metrics import warnings as health

_POINTS = 40  # of a curve over steps, each a mean of neighbours
_FRACTIONS = {
  "prompts kept": ("prompts/kept", "prompts/drawn"),
  "completions kept": ("completions/kept", "completions/drawn"),
  "completions trained": ("completions/trained", "completions/drawn"),
  "zero-variance groups": ("groups/zero_std", "prompts/kept"),
}
_TOTALS = (
  "prompts/drawn tokens/generated tokens/trained "
  "reward/timeouts reward/crashes reward/errors reward/switched_off "
  "reward/nonfinite"
).split()


def write(workdir: pathlib.Path) -> pathlib.Path:
  """Writes the report of a run, finished or not; returns its path."""
  run = runs.load(workdir)
  samples = jsonl.read(workdir / "samples.jsonl")
  with jsonl.writing(workdir / "report.png"):
    style.save(_draw(run), workdir / "report.png")
  seconds = _stage_seconds(run)
  total = max(sum(seconds.values()), 1e-9)
  times = [(k, f"{x:.1f}", f"{x / total:.0%}") for k, x in seconds.items()]
  parts = [
    f"# {_title(run)}",
    tables.markdown(("", ""), [*_summary(run)]),
    "± and error bars are 95% intervals over problems.",
    "![accuracy, pruning, tokens and time](report.png)",
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
  for name in dict.fromkeys(name for line in run.evals for name in line):
    if re.fullmatch("eval/(.*/)?accuracy", name):
      error = name.removesuffix("accuracy") + "stderr"
      evals = [x for x in run.evals if name in x]
      ends = [statistics.with_interval(x[name], x[error]) for x in evals]
      yield f"held-out: {name}", f"{ends[0]} → {ends[-1]}"
  yield "training seconds", f"{run.total('step/seconds'):.1f}"
  for label, (part, total) in _FRACTIONS.items():
    yield label, f"{run.total(part) / max(run.total(total), 1):.1%}"
  for name in _TOTALS:
    yield name, f"{run.total(name):,.0f}"
  skipped = max((x.get("update/skipped", 0) for x in run.steps), default=0)
  yield "updates skipped", f"{skipped:.0f}"
  if scale := runs.noise_scale(run.steps[-1:]):
    yield "gradient noise scale", scale
  for check in health.CHECKS:
    if count := run.total(f"warnings/{check.name}"):
      yield f"steps with the warning {check.name}", f"{count:.0f}"


def _samples(lines: Sequence[dict]) -> Iterator[str]:
  """Completions of the first and the last step, held-out ones if possible."""
  lines = [x for x in lines if x["split"] == "eval"] or lines
  for step in dict.fromkeys(x["step"] for x in (*lines[:1], *lines[-1:])):
    for x in [x for x in lines if x["step"] == step][:3]:
      verdict = "right" if x["correct"] == 1 else "wrong"
      text = f"{x['problem']}\n{x['completion']}"
      yield f"Step {step}, {verdict}, answer {x['answer']}:"
      yield textwrap.indent(text, "    ")  # as code


@style.rc()
def _draw(run: runs.Run) -> figures.Figure:
  """Draws a run, which may have no steps yet."""
  figure = style.figure(height=6.2)
  (accuracy, pruning), (tokens, time) = figure.subplots(2, 2)
  if run.evals:
    errors = {x["step"]: x.get("eval/stderr", 0.0) for x in run.evals}
    errors = statistics.NORMAL * np.array([*errors.values()])
    accuracy.errorbar(*run.curve(), errors, fmt="o-", ms=3)
    accuracy.set(title="held-out accuracy", xlabel="training seconds")
  else:
    accuracy.plot(*_curves(run.steps, "reward/accuracy"))
    accuracy.set(title="training accuracy", xlabel="step")
  for i, (label, names) in enumerate(_FRACTIONS.items()):
    x, part, total = _curves(run.steps, *names)
    # Thinner and thinner, so that equal curves are all visible.
    pruning.plot(x, part / np.maximum(total, 1), label=label, lw=4 - i)
  for label in ("generated", "trained"):
    tokens.plot(*_curves(run.steps, f"tokens/{label}"), label=label)
  seconds = _stage_seconds(run)
  time.barh([*seconds], [*seconds.values()])
  time.set(title="time by stage", xlabel="seconds")
  time.invert_yaxis()
  pruning.set(title="pruning", xlabel="step")
  tokens.set(title="tokens per step", xlabel="step", ylim=(0, None))
  for axis in (accuracy, pruning):
    style.format_axes(axis)
  for axis in (pruning, tokens):
    axis.legend(fontsize=8)
  figure.suptitle(_title(run))
  return figure


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
  ranked = sorted(seconds, key=seconds.get, reverse=True)
  return {stage: seconds[stage] for stage in ranked if seconds[stage]}


def _curves(steps: Sequence[dict], *names: str) -> np.ndarray:
  """Steps and metrics, averaged over equal chunks of steps."""
  size = max(-(-len(steps) // _POINTS), 1)
  chunks = [steps[i : i + size] for i in range(0, len(steps), size)]
  mean = lambda name, x: np.mean([line.get(name, np.nan) for line in x])
  return np.array([[mean(n, x) for x in chunks] for n in ("step", *names)])
