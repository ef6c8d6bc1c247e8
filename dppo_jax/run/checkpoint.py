"""Checkpoints of the train state: written whole or not at all, by orbax.

Beside the arrays of each lie their checksums, written before orbax makes the
checkpoint one: what has none, or other files than they say, is damaged.
"""

from collections.abc import Iterator
import contextlib
import itertools
import pathlib
import re

import jax
from jaxtyping import PyTree
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from dppo_jax.records import TrainState
from dppo_jax.run import checksums, distributed

_ITEMS = ("params", "rest")


class _Handler(ocp.StandardCheckpointHandler):
  """Arrays with the checksums of the files that hold them."""

  def finalize(self, directory) -> None:
    super().finalize(directory)
    checksums.write(pathlib.Path(directory))


@ocp.args.register_with_handler(_Handler, for_save=True)
class _Save(ocp.args.StandardSave):
  pass


@ocp.args.register_with_handler(_Handler, for_restore=True)
class _Restore(ocp.args.StandardRestore):
  pass


class Checkpoints:
  """The checkpoints of one run; a context manager that waits for the last.

  That of step 0 is never deleted: its weights are the reference policy's, and
  it spares supervised fine-tuning a second time.

  All processes of a run make the same calls. The first alone reads and moves
  files; what it finds holds for all.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    keep: int = 1,
    *,
    keep_every: int = 0,
    every: int = 0,
    minutes: float = 0.0,
    read_only: bool = False,
  ):
    """What `keep` to `minutes` mean is in `config.checkpoint`."""
    self._workdir = workdir
    self._folder = workdir / "checkpoints"
    self._sound: set[tuple[int, str]] = set()  # steps and items looked at
    self.passed_over: list[str] = []
    kept = [policies.LatestN(keep), policies.CustomSteps([0])]
    if keep_every:
      kept.append(policies.EveryNSteps(keep_every))
    due = []
    if every:
      due.append(policies.FixedIntervalPolicy(every))
    if minutes:
      seconds = round(60 * minutes)
      due.append(
        policies.ContinuousCheckpointingPolicy(minimum_interval_secs=seconds)
      )
    if self._folder.exists() and not self._folder.is_dir():
      raise ValueError(
        f"{self._folder} is a file: a run's checkpoints go there"
      )
    self._manager = ocp.CheckpointManager(
      self._folder.absolute(),
      options=ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=not read_only,
        create=not read_only,
        read_only=read_only,
        preservation_policy=policies.AnyPreservationPolicy(kept),
        save_decision_policy=policies.AnySavePolicy(due),
      ),
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind, error, trace) -> None:
    try:
      with self._explained():
        self._manager.close()
    except Exception:
      if error is None:  # else that one is what went wrong first
        raise

  def latest_step(self) -> int | None:
    """The step of the newest complete checkpoint; None where there is none."""
    return self._manager.latest_step()

  def find(self, step: int | None = None) -> int:
    """`step` or, for None, the newest step whose weights are not damaged.

    Of damaged ones `passed_over` then has a line each.

    Raises:
      ValueError: where it has no checkpoint; it names those that there are.
    """
    steps = sorted(self._manager.all_steps())
    if steps and step is None:
      damaged = self._damaged(("params",))
      self.passed_over = [
        f"warning: the checkpoint of step {step} is damaged ({flaw}) and "
        "passed over"
        for step, flaw in damaged.items()
      ]
      return max(set(steps) - set(damaged))
    if step in steps:
      return step
    wanted = "no checkpoint" if step is None else f"no checkpoint {step}"
    there_are = ", ".join(map(str, steps)) or "none"
    raise ValueError(f"{wanted} in {self._workdir}: there are {there_are}")

  def is_sound(self, step: int) -> bool:
    """Whether the files of `step` are as they were written."""
    return not self._flaw(step)

  def recover(self) -> list[str]:
    """Sets damaged newest checkpoints aside; returns a line about each.

    Raises:
      ValueError: where there are checkpoints and all of them are damaged.
    """
    damaged = self._damaged()
    said = [
      f"warning: the checkpoint of step {step} is damaged ({flaw}) and is now "
      f"in {self._set_aside(step)}, to be deleted: going on from the one before"
      for step, flaw in damaged.items()
    ]
    if damaged:
      self._manager.reload()
    return said

  def _damaged(self, items: tuple[str, ...] = _ITEMS) -> dict[int, str]:
    """What is wrong with each step that is newer than the newest sound one."""
    steps = sorted(self._manager.all_steps(), reverse=True)
    flaws = {}
    for step in steps:
      if not (flaw := self._flaw(step, items)):
        return flaws
      flaws[step] = flaw
    if steps:
      found = "; ".join(f"{step}: {flaw}" for step, flaw in flaws.items())
      raise ValueError(
        f"every checkpoint in {self._folder} is damaged ({found}): put a copy "
        "of one back, or delete that directory to begin anew"
      )
    return flaws

  def is_due(self, step: int) -> bool:
    """Whether the config asks for a checkpoint of `step`, the one just done."""
    # By the first process's clock, where it is a matter of minutes.
    return distributed.gather(self._manager.should_save(step))[0]

  def save(self, step: int, state: TrainState) -> None:
    """Writes `state` in the background.

    Raises:
      ValueError: where it, or the one before, cannot be written.
    """
    args = ocp.args.Composite(
      params=_Save(state.params), rest=_Save(state.replace(params=None))
    )
    with self._explained():
      self._manager.save(step, args=args, force=True)

  def wait(self) -> None:
    """Returns when every checkpoint asked for is on disk; raises as `save`."""
    with self._explained():
      self._manager.wait_until_finished()

  def restore(self, step: int, like: TrainState) -> TrainState:
    """The state of `step`, placed as `like` is, which may be abstract.

    Raises:
      ValueError: where its files are damaged.
    """
    self._check(step)
    args = ocp.args.Composite(rest=_Restore(like.replace(params=None)))
    found = self._manager.restore(step, args=args)
    return found.rest.replace(params=self.restore_params(step, like.params))

  def restore_params(self, step: int, like: PyTree) -> PyTree:
    """The weights of `step` alone; otherwise as `restore`."""
    self._check(step, ("params",))
    args = ocp.args.Composite(params=_Restore(like))
    return self._manager.restore(step, args=args).params

  def _check(self, step: int, items: tuple[str, ...] = _ITEMS) -> None:
    if flaw := self._flaw(step, items):
      raise ValueError(
        f"the checkpoint of step {step} in {self._folder} is damaged ({flaw}): "
        "put a copy back, or take another step's"
      )

  def _flaw(self, step: int, items: tuple[str, ...] = _ITEMS) -> str:
    """What is wrong with the files of `step`; "" for nothing."""
    flaw = ""
    for item in items:
      if not flaw and (step, item) not in self._sound:
        if distributed.is_first():
          found = checksums.flaw(self._folder / str(step) / item)
          flaw = f"{item}: {found}" if found else ""
        flaw, *_ = distributed.gather(flaw)
        if not flaw:
          self._sound.add((step, item))
    return flaw

  def _set_aside(self, step: int) -> pathlib.Path:
    """Moves a checkpoint to where neither orbax nor anybody else takes it."""
    name = f"damaged-{step}"
    names = itertools.chain([name], (f"{name}.{i}" for i in itertools.count(1)))
    places = map(self._folder.with_name, names)
    place = next(x for x in places if not x.exists())
    with distributed.sharing_errors():
      if distributed.is_first():
        (self._folder / str(step)).rename(place)
    return place

  @contextlib.contextmanager
  def _explained(self) -> Iterator[None]:
    """Says in one line why a checkpoint cannot be written."""
    try:
      yield
    except Exception as error:
      if not (reason := _reason(error)):
        raise
      whole = [int(x.name) for x in self._folder.glob("*") if x.name.isdigit()]
      there_is = (
        f"The newest whole one is that of step {max(whole)}"
        if whole
        else "There is none yet"
      )
      raise ValueError(
        f"no checkpoint can be written in {self._folder}: {reason}. "
        f"{there_is}: once that is mended, the same command goes on"
      ) from error


def _reason(error: BaseException) -> str:
  """What the system said, without the story around it; "" if it is not its."""
  if isinstance(error, OSError):
    return error.strerror or str(error)
  # As TensorStore tells it: "Failed to ...: No space left on device [os_...".
  found = re.search(r"([^:]+) \[os_error_code", str(error))
  return found[1].strip() if found else ""


def split_step(source: str) -> tuple[pathlib.Path, int]:
  """The workdir and the step of `RUN` or `RUN@STEP`; alone, RUN is step 0.

  A directory whose own name ends so is that directory.
  """
  workdir, _, step = source.rpartition("@")
  if workdir and step.isdecimal() and not pathlib.Path(source).is_dir():
    return pathlib.Path(workdir), int(step)
  return pathlib.Path(source), 0


def abstract(tree: PyTree, shardings: PyTree) -> PyTree:
  """Shapes, dtypes and placements of `tree`, which may be abstract itself."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    tree,
    shardings,
  )
