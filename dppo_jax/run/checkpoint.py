"""Checkpoints of the train state: written by orbax, verified by checksums.

Each part of a checkpoint (trained weights, frozen weights, the rest) has a file
of SHA-256 checksums, written before orbax marks the checkpoint as complete. A
checkpoint is damaged if that file is missing, if a file that it lists has
changed, or if the files belong to another step or run.

If a run of several processes works in a bucket, each of them has its own copy
of the run and writes its arrays and checksums there: the parts are put together
in the bucket, and arrays are stored as one file for each shard.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import json
import math
import pathlib
import re
import shutil

import jax
from jaxtyping import PyTree
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from dppo_jax import distributed
from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import bucket
from dppo_jax.models import lora
from dppo_jax.records import TrainState
from dppo_jax.run import checkpoint_steps, checksums

_ITEMS = ("params", "rest")
_FROZEN = "frozen"  # weights that adapters belong to; only in step 0
_WAIT_SECONDS = 300  # for other processes, after this one has written its part


class _Handler(ocp.StandardCheckpointHandler):
  """Arrays with a label and the checksums of the files that hold them."""

  def __init__(self, label: dict, writers: ocp.options.MultiprocessingOptions):
    super().__init__(
      multiprocessing_options=writers,
      use_ocdbt=writers.primary_host is not None,
    )
    self._label = label

  def finalize(self, directory) -> None:
    super().finalize(directory)
    folder = pathlib.Path(directory)
    if distributed.is_first():
      (folder / checksums.LABEL).write_text(
        json.dumps(self._label), encoding="utf-8"
      )
    checksums.write(folder, distributed.index())


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
      best: metric by which to keep the best checkpoint too, as in
        `checkpoint_steps.find_best`.
    """
    self._workdir, self._folder = workdir, workdir / "checkpoints"
    self._metric = best
    self._best, self._evaluation = _Best(), {}
    self._has_copy = bool(bucket.url(workdir)) and distributed.count() > 1
    processes = distributed.count() if self._has_copy else 1
    name = distributed.on_first_process(run_name)(workdir)
    self._label = {"run": name, "processes": processes}
    self._intact: set[tuple[int, str]] = set()  # verified steps and items
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    # A part of orbax has the value of the last manager. None suits all of them,
    # so a reader never sets 0.
    is_reader = read_only and distributed.count() > 1
    writers = ocp.options.MultiprocessingOptions(
      primary_host=None if self._has_copy or is_reader else 0
    )
    self._handlers = {
      x: _Handler(self._label, writers) for x in (*_ITEMS, _FROZEN)
    }
    for item, handler in self._handlers.items():
      registry.add(item, ocp.args.StandardSave, handler)
      registry.add(item, ocp.args.StandardRestore, handler)
    kept = [policies.LatestN(keep), policies.CustomSteps([0]), self._best]
    self._manager = ocp.CheckpointManager(
      self._folder.absolute(),
      handler_registry=registry,
      options=ocp.CheckpointManagerOptions(
        async_options=ocp.options.AsyncOptions(
          timeout_secs=_WAIT_SECONDS,
          # A process would take another's directory for its own.
          create_directories_asynchronously=not self._has_copy,
        ),
        cleanup_tmp_directories=not read_only,
        create=not read_only,
        read_only=read_only,
        multiprocessing_options=writers,
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
    """Sets damaged latest checkpoints aside; returns a warning for each."""
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
    self._manager.reload()
    find_best = distributed.on_first_process(checkpoint_steps.find_best)
    if best := find_best(self._workdir, self._metric):
      self._best.step, self._best.score = best
    return warnings

  def is_best(self, step: int, values: Mapping[str, float]) -> bool:
    """Adds an evaluation; returns True if `step` is the best so far."""
    sign, metric = checkpoint_steps.split_sign(self._metric)
    score = sign * values.get(metric, math.nan)
    if is_best := score > self._best.score:
      self._best.step, self._best.score = step, float(score)
    self._evaluation = {step: {k: float(x) for k, x in values.items()}}
    return is_best

  @distributed.on_first_process
  def _check_first(self) -> None:
    first = self._folder / "0"
    if 0 in self._manager.all_steps() and not first.exists():
      raise UserError(f"{first} was deleted: the run cannot be saved")

  def save(self, step: int, state: TrainState) -> None:
    """Writes `state` in the background.

    Raises UserError if the previous write failed, or if the checkpoint of step
    0 was deleted since.
    """
    self.wait()
    self._check_first()
    evaluation = self._evaluation.get(step, {})
    self._label |= {"step": step, "evaluation": evaluation}
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
    # Not the manager's metadata, which needs all items to be intact.
    metadata = self._handlers[item].metadata(self._folder / str(step) / item)
    stored = _shapes(metadata.tree)
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
    """Describes what is wrong with the files of `step`; "" if nothing is.

    A damaged local copy of what is in a bucket is replaced first.
    """
    for item in items:
      if (step, item) not in self._intact:
        if bucket.url(self._workdir):
          self._fetch(step, item)
        seen = self._find_corruption(step, item)
        if any(seen) and bucket.url(self._workdir):
          is_damaged = bool(seen[distributed.index()])
          self._fetch(step, item, is_damaged=is_damaged)
          seen = self._find_corruption(step, item)
        if any(seen):
          return f"{item}: {next(filter(None, seen))}"
        self._intact.add((step, item))
    return ""

  def _fetch(self, step: int, item: str, *, is_damaged: bool = False) -> None:
    with distributed.sharing_errors():
      bucket.complete(self._folder / str(step) / item, is_damaged=is_damaged)

  def _find_corruption(self, step: int, item: str) -> list[str]:
    """Returns what each process finds, or all if one looks for them."""
    find = self._once_per_copy(checksums.find_corruption)
    seen = find(self._folder / str(step) / item, self._label["run"], step)
    return distributed.gather(seen)

  def _once_per_copy(self, function: Callable[..., str]) -> Callable[..., str]:
    """Makes one process call `function`, or all, if each has a copy."""
    if not self._has_copy:
      return distributed.on_first_process(function)

    def call(*args) -> str:
      with distributed.sharing_errors():
        return function(*args)

    return call

  def _set_aside(self, step: int) -> str:
    def move() -> str:
      place = self._workdir / f"damaged-{step}"
      shutil.rmtree(place, ignore_errors=True)
      (self._folder / str(step)).rename(place)
      return str(place)

    return self._once_per_copy(move)()

  @contextlib.contextmanager
  def _explaining_errors(self) -> Iterator[None]:
    """Turns an error of the file system, such as a full disk, into one line."""
    try:
      yield
    except Exception as error:
      cause = error
      # After its own error, orbax waits for the other processes.
      while cause.__context__ and distributed.has_lost_another(cause):
        cause = cause.__context__
      # TensorStore: "...: No space left on device [os_error_code=..."
      match = re.search(r"([^:]+) \[os_error_code", str(cause))
      if not match and not isinstance(cause, OSError):
        raise
      if isinstance(cause, TimeoutError):
        raise Unreachable(
          "another process did not write its part of the checkpoint in "
          f"{_WAIT_SECONDS} s: see its last output"
        ) from error
      reason = match[1].strip() if match else cause.strerror or cause
      raise UserError(
        f"cannot write a checkpoint in {self._folder}: {reason}. Fix this and "
        "re-run the same command to resume from the latest checkpoint"
      ) from error


def run_name(workdir: pathlib.Path) -> str:
  """Returns the name of a run, which its checkpoints repeat; "" if unknown."""
  return checksums.read_json(workdir / "config.json").get(
    "fingerprints.run", ""
  )


def has_adapters(workdir: pathlib.Path) -> bool:
  """Returns True for a run that trains adapters of frozen weights."""
  return (workdir / "checkpoints" / "0" / _FROZEN).exists()


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
  leaves, _ = jax.tree.flatten_with_path(tree)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
  return {name(path): tuple(x.shape) for path, x in leaves}
