"""The steps of a run that have checkpoints, and the best one."""

from collections.abc import Mapping
import os
import pathlib
import re

from dppo_jax.errors import UserError
from dppo_jax.files import bucket
from dppo_jax.run import checksums

COMMITTED = "commit_success.txt"  # last file of a checkpoint in a bucket


def complete_steps(workdir: pathlib.Path) -> list[int]:
  """Steps of the complete checkpoints of a run, in order.

  Raises:
    UserError: if their directory cannot be read, is a link to nothing, or has
      files in a bucket that no marker makes a checkpoint.
  """
  folder = workdir / "checkpoints"
  names = _in_bucket(folder) if bucket.url(workdir) else _on_disk(folder)
  return sorted(int(x) for x in names if re.fullmatch("0|[1-9][0-9]*", x))


def _on_disk(folder: pathlib.Path) -> set[str]:
  try:
    return {x.name for x in folder.iterdir() if x.is_dir()}
  except OSError as error:
    for path in (folder.parent, folder):
      if os.path.islink(path) and not path.exists():
        raise UserError(f"{path} is a link to nothing") from error
    if isinstance(error, FileNotFoundError):
      return set()
    raise UserError(f"{folder} cannot be read: {error.strerror}") from error


def _in_bucket(folder: pathlib.Path) -> set[str]:
  with bucket.reaching(folder) as there:
    names = {x.parent.name for x in there.glob(f"*/{COMMITTED}")}
    # A kill may leave a part of the first one.
    lost = set() if names else {x.name for x in there.glob("*")} - {"0"}
  if lost:
    raise UserError(
      f"{there} has files of step {', '.join(sorted(lost))} but no "
      f"{COMMITTED}, which marks a complete checkpoint: restore it, or "
      "delete that directory to start again"
    )
  return names


def read_labels(workdir: pathlib.Path) -> list[tuple[int, dict | None]]:
  """Returns steps and labels; None for a missing or damaged label.

  An evaluation before the evaluation sets changed is left out: it may be of
  other problems.
  """
  changes = checksums.read_json(workdir / "config.json").get("changes") or {}
  of_sets = [x for x in changes if x.startswith("fingerprints.eval ")]
  with bucket.reaching(workdir / "checkpoints") as folder:
    labels = [
      (step, checksums.read_label(folder / str(step) / "rest"))
      for step in complete_steps(workdir)
    ]
  for step, label in labels:
    if label and any(step <= int(x.split()[-1]) for x in of_sets):
      label["evaluation"] = {}
  return labels


def find_best(labels: Mapping[int, dict | None], metric: str) -> int | None:
  """Returns the checkpoint with the best evaluation.

  Args:
    labels: of each step; without a label, a step does not compete.
    metric: name in an evaluation; higher is better, or lower after a leading
      `-`. Of equal values, the first one counts. Evaluations with another
      number of samples than the last one, as greedy ones, do not compete.
  """
  name = metric.removeprefix("-")
  sign = 1 if name == metric else -1
  labelled = ((step, labels[step] or {}) for step in sorted(labels))
  evaluations = ((step, x.get("evaluation", {})) for step, x in labelled)
  scores = [
    (step, x.get("eval/samples"), sign * x[name])
    for step, x in evaluations
    if name in x
  ]
  competing = {step: x for step, n, x in scores if n == scores[-1][1]}
  return max(competing, key=competing.get, default=None)


def find(
  workdir: pathlib.Path,
  step: int | str | None = None,
  option: str = "",
  best: str = "",
) -> int:
  """Returns `step` or the latest; raises UserError, about `option`, if none.

  Args:
    step: number, "best" or None.
    best: metric that "best" refers to; empty for eval/accuracy.
  """
  if step == "best":
    metric = best or "eval/accuracy"
    best_step = find_best(dict(read_labels(workdir)), metric)
    if best_step is not None:
      return best_step
    raise UserError(
      f"--step=best: no checkpoint in {bucket.place(workdir)} has been "
      f"evaluated by {metric.removeprefix('-')}: set config.checkpoint.best, "
      "or use a number"
    )
  steps = complete_steps(workdir)
  if step in steps:
    return step
  if steps and step is None:
    return steps[-1]
  of_step = "" if step is None else f" of step {step}"
  option = option or ("--workdir" if step is None else "--step")
  raise UserError(
    f"{option}: no checkpoint{of_step} in {bucket.place(workdir)}; "
    f"available: {', '.join(map(str, steps)) or 'none'}"
  )


def split_step(source: str) -> tuple[pathlib.Path, int]:
  """Returns the workdir and step of `RUN@STEP`; the step of `RUN` is 0."""
  run, step = re.fullmatch(r"(.+?)(?:@(\d+))?", source).groups("0")
  return bucket.workdir(run), int(step)
