"""Checkpoints of the train state: written by orbax, verified by checksums.

Each part of a checkpoint (trained weights, frozen weights, the rest) has a file
of checksums, written before orbax marks the checkpoint as complete. A
checkpoint is damaged if that file is missing, if a file that it lists has
changed, or if the files belong to another step or run.

If a run is in a bucket, orbax writes there, each process its shards.
"""

from collections.abc import Iterator, Mapping
import contextlib
import json
import os
import pathlib

from etils import epath
import jax
from jaxtyping import PyTree
import orbax.checkpoint as ocp

from dppo_jax import distributed, errors
from dppo_jax.errors import Unreachable, UserError
from dppo_jax.files import bucket, storage
from dppo_jax.models import lora, parameters
from dppo_jax.records import TrainState
from dppo_jax.run import checkpoint_steps, checksums

_ITEMS = ("params", "rest")
_FROZEN = "frozen"  # weights that adapters belong to; only in step 0
_UNFINISHED = ".orbax-checkpoint-tmp"
_WAIT_SECONDS = 300  # for other processes, after this one has written its part


class _Handler(ocp.StandardCheckpointHandler):
  """Arrays with a label and the checksums of the files that hold them."""

  label: dict

  def finalize(self, directory) -> None:
    super().finalize(directory)
    folder = epath.Path(directory)
    (folder / checksums.LABEL).write_text(json.dumps(self.label))
    checksums.write(folder)


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
    self._workdir, self._keep, self._metric = workdir.absolute(), keep, best
    self._folder = bucket.place(self._workdir) / "checkpoints"
    self._url = bucket.url(self._workdir)  # "" for a local run
    self._labels: dict[int, dict | None] = {}  # None for a damaged one
    self._label: dict = {}  # of the checkpoint that is being written
    self._intact: set[epath.Path] = set()  # verified items of steps
    self._num_bytes = 0  # of the checkpoint that is being written
    complete_steps = distributed.on_first_process(
      checkpoint_steps.complete_steps
    )
    self._steps = complete_steps(self._workdir)
    self._dropped: list[int] = []  # steps to delete after the next write
    # A part of orbax has the value of the last manager. None suits all of them,
    # so a reader never sets 0.
    is_reader = read_only and distributed.count() > 1
    writers = ocp.options.MultiprocessingOptions(
      primary_host=None if is_reader else 0
    )
    self._handlers: dict[str, _Handler] = {}
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in (*_ITEMS, _FROZEN):
      # In a bucket each shard is an object, with a checksum of its server.
      handler = self._handlers[item] = _Handler(
        multiprocessing_options=writers, use_ocdbt=not self._url
      )
      handler.label = self._label
      registry.add(item, ocp.args.StandardSave, handler)
      registry.add(item, ocp.args.StandardRestore, handler)
    self._checkpointer = ocp.AsyncCheckpointer(
      ocp.CompositeCheckpointHandler(
        handler_registry=registry,
        composite_options=ocp.CompositeOptions(multiprocessing_options=writers),
      ),
      async_options=ocp.options.AsyncOptions(
        # In a bucket, `_reaching` has a limit that depends on the size.
        timeout_secs=24 * 3600 if self._url else _WAIT_SECONDS,
        post_finalization_callback=lambda: bucket.check_lease(self._workdir),
      ),
      multiprocessing_options=writers,
    )
    if not (read_only or self._url):
      with distributed.sharing_errors():
        if distributed.is_first():
          self._folder.mkdir(parents=True, exist_ok=True)
          for path in self._folder.iterdir():
            if _UNFINISHED in path.name:
              _remove(path)

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind, error, trace) -> None:
    try:
      with self._writing():
        self._checkpointer.close()
      if not isinstance(error, Exception):
        self._delete_dropped()
    except Exception:
      if error is None:  # the first error matters
        raise

  def latest_step(self) -> int | None:
    """Step of the latest complete checkpoint, damaged or not; None if none."""
    return max(self._steps, default=None)

  def recover(self) -> list[str]:
    """Sets damaged latest checkpoints aside; returns warnings.

    A checkpoint whose label is damaged does not compete for the best one, and
    is kept.
    """
    damaged = {}
    for step in sorted(self._steps, reverse=True):
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
      f"warning: the checkpoint of step {step} is damaged ({corruption}): its "
      f"files in {self._set_aside(step)} may be deleted; resuming from the one "
      "before"
      for step, corruption in damaged.items()
    ]
    self._steps = [x for x in self._steps if x not in damaged]
    read_labels = distributed.on_first_process(checkpoint_steps.read_labels)
    self._labels = dict(read_labels(self._workdir))
    return warnings + [
      f"warning: the label of the checkpoint of step {step} in {self._folder} "
      "is damaged: it is kept, and not compared with the best one; delete it "
      "if it is not needed"
      for step in self._unlabelled()
    ]

  def _unlabelled(self) -> list[int]:
    return [step for step, label in self._labels.items() if label is None]

  def is_best(self, step: int, values: Mapping[str, float]) -> bool:
    """Adds an evaluation; returns True if `step` is the best so far."""
    evaluation = {name: float(x) for name, x in values.items()}
    self._labels[step] = {"evaluation": evaluation}
    return self._find_best() == step

  def _find_best(self) -> int | None:
    return checkpoint_steps.find_best(self._labels, self._metric)

  @distributed.on_first_process
  def _prepare(self, step: int) -> None:
    """Removes what a save of `step` left that a kill has ended."""
    first = self._folder / "0"
    bucket.check_lease(self._workdir)
    with self._reaching():
      if 0 in self._steps and not first.exists():
        raise UserError(f"{first} was deleted: the run cannot be saved")
    self._delete(step)

  def save(self, step: int, state: TrainState) -> None:
    """Writes `state` in the background.

    Raises UserError if the previous write failed, or if the checkpoint of step
    0 was deleted since.
    """
    self.wait()
    self._prepare(step)
    run = distributed.on_first_process(run_name)(self._workdir)
    label = {"evaluation": {}, "run": run, "step": step}
    self._label |= label | (self._labels.get(step) or {})
    items = {
      "params": lora.trainable(state.params),
      "rest": state.replace(params=None),
    }
    if step == 0 and (frozen := lora.frozen(state.params)):
      items[_FROZEN] = frozen
    args = ocp.args.Composite(
      **{name: ocp.args.StandardSave(tree) for name, tree in items.items()}
    )
    self._num_bytes = _num_bytes(items)
    with self._writing():
      self._checkpointer.save(self._folder / str(step), args=args)
    self._steps.append(step)
    latest = sorted(self._steps)[-self._keep :]
    kept = {0, self._find_best(), *latest, *self._unlabelled()}
    self._dropped = [x for x in self._steps if x not in kept]
    self._steps = [x for x in self._steps if x in kept]

  def wait(self) -> None:
    """Waits for the last write, then deletes what is not to be kept."""
    with self._writing():
      self._checkpointer.wait_until_finished()
    self._delete_dropped()

  @distributed.on_first_process
  def _delete_dropped(self) -> None:
    if self._dropped:
      bucket.check_lease(self._workdir)
    for step in self._dropped:
      self._delete(step)
    self._dropped = []

  def _delete(self, step: int) -> None:
    """Deletes the files of a step; a kill leaves no part of a checkpoint."""
    path = self._hide(step, self._folder / f"{step}{_UNFINISHED}")
    with self._reaching():
      _remove(path)

  def _hide(self, step: int, to: epath.Path) -> epath.Path:
    """Makes a checkpoint incomplete; returns where its files are then.

    Args:
      to: new directory of a local one.
    """
    path = self._folder / str(step)
    with self._reaching():
      if self._url:
        (path / checkpoint_steps.COMMITTED).unlink(missing_ok=True)
      elif path.exists():
        _remove(to)
        path.rename(to)
        return to
    return path

  def restore(self, step: int, like: TrainState) -> TrainState:
    """Returns the state of `step`, placed as `like`, which may be abstract."""
    self.check(step)
    state = self._read(step, "rest", like.replace(params=None))
    return state.replace(params=self.restore_params(step, like.params))

  def restore_params(self, step: int, like: PyTree) -> PyTree:
    """Returns the weights of `step` alone; otherwise as `restore`."""
    params = self._restore_item(step, "params", lora.trainable(like))
    if frozen := lora.frozen(like):
      params |= self._restore_item(0, _FROZEN, frozen)
    return params

  def _restore_item(self, step: int, item: str, like: PyTree) -> PyTree:
    self.check_shapes(step, item, like)
    return self._read(step, item, like)

  def check_shapes(self, step: int, item: str, like: PyTree) -> None:
    """Raises UserError unless an intact item of `step` has these shapes."""
    self.check(step, (item,))
    # Of the item alone: the others may be damaged.
    with self._reaching():
      metadata = self._handlers[item].metadata(self._folder / str(step) / item)
    stored = _shapes(metadata.tree)
    expected = _shapes(like)
    for name in sorted(stored.keys() | expected.keys()):
      if stored.get(name) != expected.get(name):
        raise UserError(
          f"step {step} in {self._folder} holds another model: {name} has "
          f"shape {stored.get(name)} there but {expected.get(name)} in the "
          "config: use that run's config"
        )

  def _read(self, step: int, item: str, like: PyTree) -> PyTree:
    self._num_bytes = _num_bytes(like)
    args = ocp.args.Composite(**{item: ocp.args.StandardRestore(like)})
    path = self._folder / str(step)
    with self._reaching():
      return self._checkpointer.restore(path, args=args)[item]

  def check(self, step: int, items: tuple[str, ...] = _ITEMS) -> None:
    """Raises UserError if the files of `step` are damaged."""
    if corruption := self.corruption(step, items):
      with self._reaching():
        if not (self._folder / str(step)).exists():
          raise UserError(
            f"the checkpoint of step {step} in {self._folder} was deleted "
            "meanwhile, as by a run that trains there: use another step"
          )
      other = "" if _FROZEN in items else ", or use another step"
      raise UserError(
        f"the checkpoint of step {step} in {self._folder} is damaged "
        f"({corruption}): restore a copy of it{other}"
      )

  @distributed.on_first_process
  def corruption(self, step: int, items: tuple[str, ...] = _ITEMS) -> str:
    """Describes what is wrong with the files of `step`; "" if nothing is."""
    for item in items:
      folder = self._folder / str(step) / item
      if folder not in self._intact:
        try:
          corruption = checksums.find_corruption(
            folder, run_name(self._workdir), step
          )
        except OSError as error:  # of a file that is there
          raise UserError(
            f"{folder} cannot be read: {error.strerror}. Fix this, or move "
            "the checkpoint away to use the one before"
          ) from error
        if corruption:
          return f"{item}: {corruption}"
        self._intact.add(folder)
    return ""

  @distributed.on_first_process
  def _set_aside(self, step: int) -> str:
    return str(self._hide(step, self._folder / f"damaged-{step}"))

  def _reaching(self) -> contextlib.AbstractContextManager[None]:
    """Limits the time of a body that uses a bucket, and explains its errors."""
    return storage.reaching(self._folder, self._num_bytes)

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Explains errors of a write in one line."""
    local = contextlib.nullcontext if self._url else errors.writing
    with self._reaching(), local(self._folder):
      try:
        yield
      except Exception as error:
        cause: BaseException = error
        # After its own error, orbax waits for the other processes.
        while cause.__context__ and distributed.has_lost_another(cause):
          cause = cause.__context__
        if isinstance(cause, TimeoutError) and not self._url:
          raise Unreachable(
            "another process did not write its part of the checkpoint in "
            f"{_WAIT_SECONDS} s: see its last output"
          ) from error
        raise cause from error


def _remove(path: epath.Path) -> None:
  """Deletes a directory, or a link to one but nothing in it."""
  if os.path.islink(path):
    os.unlink(path)
  path.rmtree(missing_ok=True)


def run_name(workdir: pathlib.Path) -> str:
  """Returns the name of a run, which its checkpoints repeat; "" if unknown."""
  return checksums.read_json(workdir / "config.json").get(
    "fingerprints.run", ""
  )


def has_adapters(workdir: pathlib.Path) -> bool:
  """Returns True for a run that trains adapters of frozen weights."""
  with bucket.reaching(workdir / "checkpoints" / "0" / _FROZEN) as folder:
    return folder.exists()


def _num_bytes(tree: PyTree) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
  return {name: tuple(x.shape) for name, x in parameters.flatten(tree).items()}
