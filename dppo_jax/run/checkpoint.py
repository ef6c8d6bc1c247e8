"""Checkpoints of the train state: written by orbax, verified by checksums.

Each part of a checkpoint (trained weights, frozen weights, the rest) has a file
of SHA-256 checksums, written before orbax marks the checkpoint as complete. A
checkpoint is damaged if that file is missing or if a file that it lists has
changed.
"""

from collections.abc import Iterator, Mapping
from concurrent import futures
import contextlib
import hashlib
import json
import math
import os
import pathlib
import re
import shutil

import jax
from jaxtyping import PyTree
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from dppo_jax.analysis import jsonl
from dppo_jax.errors import UserError
from dppo_jax.models import lora
from dppo_jax.records import TrainState
from dppo_jax.run import distributed

CHECKSUMS = "sha256.json"
_ITEMS = ("params", "rest")
_FROZEN = "frozen"  # weights that adapters belong to; only in step 0


class _Handler(ocp.StandardCheckpointHandler):
  """Arrays with the checksums of the files that hold them."""

  def finalize(self, directory) -> None:
    super().finalize(directory)
    write_checksums(pathlib.Path(directory))


class _Best(policies.PreservationPolicy):
  """Preserves the checkpoint with the best evaluation."""

  step, score = 0, -math.inf

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    return [info.step == self.step for info in checkpoints]


class Checkpoints:
  """The checkpoints of one run; a context manager that waits for the last one.

  The checkpoint of step 0 is never deleted: it holds the weights of the
  reference policy and, of a run with adapters, the frozen weights. All
  processes of a run make the same calls.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    keep: int = 1,
    best: str = "",
    *,
    read_only: bool = False,
  ):
    """Opens, or makes, `workdir/checkpoints`; keeps the latest `keep`.

    Args:
      best: metric by which to keep the best checkpoint too, as in `find_best`.
    """
    self._workdir, self._folder = workdir, workdir / "checkpoints"
    self._keep, self._metric = keep, best
    self._best = _Best()
    self._intact: set[tuple[int, str]] = set()  # verified steps and items
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in (*_ITEMS, _FROZEN):
      handler = _Handler()
      registry.add(item, ocp.args.StandardSave, handler)
      registry.add(item, ocp.args.StandardRestore, handler)
    kept = [policies.LatestN(keep), policies.CustomSteps([0]), self._best]
    self._manager = ocp.CheckpointManager(
      self._folder.absolute(),
      handler_registry=registry,
      options=ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=not read_only,
        create=not read_only,
        read_only=read_only,
        preservation_policy=policies.AnyPreservationPolicy(kept),
      ),
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind, error, trace) -> None:
    try:
      with self._explaining_errors():
        self._manager.close()
    except Exception:
      if error is None:  # the first error matters
        raise

  def latest_step(self) -> int | None:
    """Step of the latest complete checkpoint, damaged or not; None if none."""
    return self._manager.latest_step()

  def recover(self) -> list[str]:
    """Sets damaged latest checkpoints aside; returns a warning for each.

    Also completes the deletion of old checkpoints that a kill prevented.
    """
    damaged = {}
    for step in sorted(self._manager.all_steps(), reverse=True):
      if not (corruption := self.corruption(step)):
        break
      damaged[step] = corruption
    else:
      if damaged:
        listed = "; ".join(f"{step}: {text}" for step, text in damaged.items())
        raise UserError(
          f"every checkpoint in {self._folder} is damaged ({listed}): restore "
          "a copy of one, or delete that directory to start again"
        )
    warnings = [
      f"warning: the checkpoint of step {step} is damaged ({corruption}) and "
      f"was moved to {self._set_aside(step)}, which may be deleted; resuming "
      "from the one before"
      for step, corruption in damaged.items()
    ]
    self.prune()
    self._manager.reload()
    best = distributed.on_first_process(find_best)(self._workdir, self._metric)
    if best:
      self._best.step, self._best.score = best
    return warnings

  def is_best(self, step: int, values: Mapping[str, float]) -> bool:
    """Adds an evaluation; returns True if `step` is the best so far."""
    sign, metric = _split_sign(self._metric)
    score = sign * values.get(metric, math.nan)
    if is_best := score > self._best.score:
      self._best.step, self._best.score = step, float(score)
    return is_best

  @distributed.on_first_process
  def prune(self) -> None:
    """Deletes all but the latest `keep` checkpoints, step 0 and the best."""
    best = find_best(self._workdir, self._metric) or [0]
    for step in complete_steps(self._workdir)[: -self._keep]:
      if step not in (0, best[0]):
        shutil.rmtree(self._folder / str(step), ignore_errors=True)

  def save(self, step: int, state: TrainState) -> None:
    """Writes `state` in the background; raises if the previous write failed."""
    items = {
      "params": lora.trainable(state.params),
      "rest": state.replace(params=None),
    }
    if step == 0 and (frozen := lora.frozen(state.params)):
      items[_FROZEN] = frozen
    args = ocp.args.Composite(
      **{name: ocp.args.StandardSave(tree) for name, tree in items.items()}
    )
    with self._explaining_errors():
      self._manager.save(step, args=args, force=True)

  def wait(self) -> None:
    with self._explaining_errors():
      self._manager.wait_until_finished()

  def restore(self, step: int, like: TrainState) -> TrainState:
    """Returns the state of `step`, placed as `like`, which may be abstract."""
    self.check(step)
    args = ocp.args.Composite(
      rest=ocp.args.StandardRestore(like.replace(params=None))
    )
    state = self._manager.restore(step, args=args).rest
    return state.replace(params=self.restore_params(step, like.params))

  def restore_params(self, step: int, like: PyTree) -> PyTree:
    """Returns the weights of `step` alone; otherwise as `restore`."""
    params = self._restore_item(step, "params", lora.trainable(like))
    if frozen := lora.frozen(like):
      params |= self._restore_item(0, _FROZEN, frozen)
    return params

  def _restore_item(self, step: int, item: str, like: PyTree) -> PyTree:
    self.check(step, (item,))
    stored = _shapes(self._manager.item_metadata(step)[item].tree)
    expected = _shapes(like)
    for name in sorted(stored.keys() | expected.keys()):
      if stored.get(name) != expected.get(name):
        raise UserError(
          f"step {step} of {self._workdir} holds another model: {name} has "
          f"shape {stored.get(name)} there but {expected.get(name)} in the "
          "config; omit --config to use the config of the run"
        )
    args = ocp.args.Composite(**{item: ocp.args.StandardRestore(like)})
    return self._manager.restore(step, args=args)[item]

  def check(self, step: int, items: tuple[str, ...] = _ITEMS) -> None:
    """Raises UserError if the files of `step` are damaged."""
    if corruption := self.corruption(step, items):
      other = "" if _FROZEN in items else ", or use another step"
      raise UserError(
        f"the checkpoint of step {step} in {self._folder} is damaged "
        f"({corruption}): restore a copy of it{other}"
      )

  def corruption(self, step: int, items: tuple[str, ...] = _ITEMS) -> str:
    """Describes what is wrong with the files of `step`; "" if nothing is."""
    find = distributed.on_first_process(find_corruption)
    for item in items:
      if (step, item) not in self._intact:
        if corruption := find(self._folder / str(step) / item):
          return f"{item}: {corruption}"
        self._intact.add((step, item))
    return ""

  @distributed.on_first_process
  def _set_aside(self, step: int) -> str:
    place = self._workdir / f"damaged-{step}"
    shutil.rmtree(place, ignore_errors=True)
    (self._folder / str(step)).rename(place)
    return str(place)

  @contextlib.contextmanager
  def _explaining_errors(self) -> Iterator[None]:
    """Turns an error of the file system, such as a full disk, into one line."""
    try:
      yield
    except Exception as error:
      # TensorStore: "...: No space left on device [os_error_code=..."
      match = re.search(r"([^:]+) \[os_error_code", str(error))
      if not match and not isinstance(error, OSError):
        raise
      reason = match[1].strip() if match else error.strerror or error
      raise UserError(
        f"cannot write a checkpoint in {self._folder}: {reason}. Fix this and "
        "re-run the same command to resume from the latest checkpoint"
      ) from error


def complete_steps(workdir: pathlib.Path) -> list[int]:
  """Steps of the complete checkpoints of a run, in order."""
  names = (path.name for path in workdir.glob("checkpoints/*"))
  return sorted(int(name) for name in names if name.isdigit())


def has_adapters(workdir: pathlib.Path) -> bool:
  """Returns True for a run that trains adapters of frozen weights."""
  return (workdir / "checkpoints" / "0" / _FROZEN).exists()


def find_best(workdir: pathlib.Path, metric: str) -> tuple[int, float] | None:
  """Returns the checkpoint with the best evaluation, and its score.

  Args:
    metric: name in metrics.jsonl; higher is better, or lower after a leading
      `-`, which negates the score. Of equal scores, the first one counts.
  """
  sign, metric = _split_sign(metric)
  steps, best = complete_steps(workdir), None
  for line in jsonl.read(workdir / "metrics.jsonl") if metric else ():
    score = sign * line.get(metric, math.nan)
    if line["step"] in steps and score > (best or (0, -math.inf))[1]:
      best = line["step"], score
  return best


def _split_sign(metric: str) -> tuple[int, str]:
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


def write_checksums(directory: pathlib.Path) -> None:
  """Writes the checksums of all files in `directory`, at any depth."""
  content = json.dumps(_checksums(directory), indent=2)
  with (directory / CHECKSUMS).open("w", encoding="utf-8") as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def find_corruption(directory: pathlib.Path) -> str:
  """Names a file that changed since `write_checksums`; "" if none did."""
  try:
    expected = dict(json.loads((directory / CHECKSUMS).read_bytes()))
    checksums = _checksums(directory)
  except (OSError, ValueError, TypeError) as error:
    return f"{CHECKSUMS} cannot be checked, {error}"
  for name, digest in expected.items():
    if checksums.get(name) != digest:
      return f"{name} {'has changed' if name in checksums else 'is missing'}"
  return "" if expected else f"{CHECKSUMS} is empty"


def _checksums(directory: pathlib.Path) -> dict[str, str]:
  """SHA-256 of each file by its path in `directory`."""

  def digest(path: pathlib.Path) -> tuple[str, str]:
    with path.open("rb") as file:
      name = path.relative_to(directory).as_posix()
      return name, hashlib.file_digest(file, "sha256").hexdigest()

  files = sorted(x for x in directory.rglob("*") if x.is_file())
  with futures.ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
    return dict(pool.map(digest, files))


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
  leaves, _ = jax.tree.flatten_with_path(tree)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
  return {name(path): tuple(x.shape) for path, x in leaves}


def split_step(source: str) -> tuple[pathlib.Path, int]:
  """Returns the workdir and step of `RUN@STEP`; the step of `RUN` is 0."""
  run, step = re.fullmatch(r"(.+?)(?:@(\d+))?", source).groups("0")
  return pathlib.Path(run), int(step)
