"""The steps of a run that have checkpoints, and the best one."""

import math
import pathlib
import re

from dppo_jax.errors import UserError
from dppo_jax.files import bucket, jsonl
from dppo_jax.run import checksums


def complete_steps(workdir: pathlib.Path) -> list[int]:
  """Steps of the complete checkpoints of a run, in order."""
  names = (x.name for x in workdir.glob("checkpoints/*") if x.is_dir())
  return sorted(int(x) for x in names if re.fullmatch("0|[1-9][0-9]*", x))


def find_best(workdir: pathlib.Path, metric: str) -> tuple[int, float] | None:
  """Returns the checkpoint with the best evaluation, and its score.

  Args:
    metric: name in an evaluation; higher is better, or lower after a leading
      `-`, which negates the score. Of equal scores, the first one counts.
  """
  sign, metric = split_sign(metric)
  lines = jsonl.read(workdir / "metrics.jsonl") if metric else ()
  logged = {line["step"]: line for line in lines if metric in line}
  best = None
  for step in complete_steps(workdir):
    label = checksums.read_json(
      workdir / "checkpoints" / str(step) / "rest" / checksums.LABEL
    )
    values = logged.get(step, {})
    # Checkpoints of earlier versions have no label.
    if isinstance(evaluation := label.get("evaluation"), dict):
      values = values | evaluation
    score = sign * values.get(metric, math.nan)
    if score > (best or (0, -math.inf))[1]:
      best = step, score
  return best


def split_sign(metric: str) -> tuple[int, str]:
  """Returns 1 and `metric`, or -1 and what follows its leading `-`."""
  return -1 if metric.startswith("-") else 1, metric.removeprefix("-")


def find(
  workdir: pathlib.Path,
  step: int | str | None = None,
  option: str = "--workdir",
  best: str = "",
) -> int:
  """Returns `step` or the latest; raises UserError, about `option`, if none.

  Args:
    step: number, "best" or None.
    best: metric that "best" refers to; empty for eval/accuracy.
  """
  if step == "best":
    metric = best or "eval/accuracy"
    if score := find_best(workdir, metric):
      return score[0]
    raise UserError(
      f"--step=best: no checkpoint in {workdir} has been evaluated by "
      f"{metric.removeprefix('-')}: set config.checkpoint.best, or use a number"
    )
  steps = complete_steps(workdir)
  if step in steps:
    return step
  if steps and step is None:
    return steps[-1]
  of_step = "" if step is None else f" of step {step}"
  raise UserError(
    f"{option}: no checkpoint{of_step} in {workdir}; available: "
    f"{', '.join(map(str, steps)) or 'none'}"
  )


def split_step(source: str) -> tuple[pathlib.Path, int]:
  """Returns the workdir and step of `RUN@STEP`; the step of `RUN` is 0."""
  run, step = re.fullmatch(r"(.+?)(?:@(\d+))?", source).groups("0")
  return pathlib.Path(bucket.local(run, "config.sft.from_run")), int(step)
