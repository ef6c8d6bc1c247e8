"""Writes a run's report: `report.md` with `report.png`."""

from collections.abc import Iterator, Sequence
import pathlib
import re
import time
import traceback

from dppo_jax.analysis import jsonl, runs, style, tables
from dppo_jax.metrics import plots
from dppo_jax.metrics import warnings as health
from dppo_jax.metrics.writer import Writer

_TOTALS = (
  "prompts/drawn tokens/generated tokens/trained "
  "reward/timeouts reward/crashes reward/errors reward/nonfinite"
).split()


class LiveReport:
  """The report of a run that is under way."""

  def __init__(self, workdir: pathlib.Path, writer: Writer):
    self._workdir, self._writer = workdir, writer
    self._next = time.monotonic() + 60

  def refresh(self, step: int) -> None:
    """Writes the report if that takes less than 2% of the run's time.

    An error goes to `log.txt` and does not end the run.
    """
    start = time.monotonic()
    if start < self._next:
      return
    try:
      self.write(step)
    except Exception:
      self._writer.log(f"report of step {step}: {traceback.format_exc()}")
    end = time.monotonic()
    self._next = end + 50 * (end - start)

  def write(self, step: int) -> pathlib.Path:
    """Writes the report after a step; returns its path."""
    return write(self._workdir)


def write(workdir: pathlib.Path) -> pathlib.Path:
  """Writes the report of a run, finished or not; returns its path.

  Raises:
    UserError: if there is no run, a line is damaged or the disk is full.
  """
  run = runs.load(workdir)
  samples = jsonl.read(workdir / "samples.jsonl")
  with jsonl.writing(workdir / "report.png"):
    style.save(plots.draw(run), workdir / "report.png")
  seconds = plots.stage_seconds(run)
  total = max(sum(seconds.values()), 1e-9)
  times = [(k, f"{x:.1f}", f"{x / total:.0%}") for k, x in seconds.items()]
  parts = [
    f"# {plots.title(run)}",
    tables.markdown(("", ""), [*_summary(run)]),
    "![accuracy, pruning, tokens and time](report.png)",
    tables.markdown(("stage", "seconds in all steps", ""), times),
    *_samples(samples),
  ]
  jsonl.replace(workdir / "report.md", ["\n\n".join(parts), "\n"])
  return workdir / "report.md"


def _summary(run: runs.Run) -> Iterator[tuple[str, str]]:
  for section in ("method", "objective"):
    args = run.config.get(f"{section}.args", {}).items()
    args = ", ".join(f"{name}={value}" for name, value in args)
    yield section, f"{run.config.get(f'{section}.name', '?')}({args})"
  for name in dict.fromkeys(name for line in run.evals for name in line):
    if re.fullmatch("eval/(.*/)?accuracy", name):
      ends = [line for line in run.evals if name in line]
      error = name.removesuffix("accuracy") + "stderr"
      first, last = (
        f"{x[name]:.3f} ± {x[error]:.3f}" for x in (ends[0], ends[-1])
      )
      yield f"held-out: {name}", f"{first} → {last}"
  yield "training seconds", f"{run.total('step/seconds'):.1f}"
  for label, (part, total) in plots.FRACTIONS.items():
    yield label, f"{run.total(part) / max(run.total(total), 1):.1%}"
  for name in _TOTALS:
    yield name, f"{run.total(name):,.0f}"
  skipped = run.steps[-1].get("update/skipped", 0) if run.steps else 0
  yield "updates skipped", f"{skipped:.0f}"
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
      # Longer than any fence in the text.
      fence = "`" * (1 + max(2, *map(len, re.findall("`+", text)), 0))
      yield f"Step {step}, {verdict}, answer {x['answer']}:"
      yield f"{fence}\n{text}\n{fence}"
