"""Sends metrics to TensorBoard and to Weights & Biases.

A tracker has the methods `scalars`, `sync` (before a checkpoint) and `close`.
"""

from collections.abc import Callable, Mapping
import functools
import importlib.util
import math
import pathlib
from typing import Any
import uuid

from dppo_jax.errors import UserError

Values = Mapping[str, Any]


class TensorBoard:
  """Scalars and the config, in `events/`."""

  def __init__(self, workdir: pathlib.Path, config: Values, first_step: int):
    import tensorboardX
    from tensorboardX.proto import event_pb2

    folder = workdir / "events"
    folder.mkdir(parents=True, exist_ok=True)
    # Files are read in the order of their names, which begin with the second.
    suffix = f".{len(list(folder.iterdir())):06}"
    self._writer = tensorboardX.SummaryWriter(
      str(folder), filename_suffix=suffix
    )
    # Events are written in this thread. An error in SummaryWriter's own thread
    # would only end that thread, and later events would wait for it for ever.
    self._events = self._writer.file_writer.event_writer
    self._events.add_event = functools.partial(
      self._try, self._events._ev_writer.write_event
    )
    log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    start = event_pb2.Event(step=first_step + 1, session_log=log)
    self._events.add_event(start)  # later steps of earlier files are void
    text = "\n".join(f"    {name}: {value}" for name, value in config.items())
    self._writer.add_text("config", text, max(first_step, 0))

  def scalars(self, step: int, values: Values) -> None:
    for name, value in values.items():
      if math.isfinite(value):
        self._writer.add_scalar(name, value, step)

  def sync(self) -> None:
    self._try(self._events.flush)

  def close(self) -> None:
    self.sync()
    self._writer.close()

  def _try(self, act: Callable, *args) -> None:
    try:
      act(*args)
    except OSError:
      self._events._closed = True  # or it fails again when the process exits
      raise


class Wandb:
  """Weights & Biases; a resumed run keeps its id."""

  def __init__(self, workdir: pathlib.Path, config: Values, first_step: int):
    import wandb

    path = workdir / "wandb_id"
    if first_step < 0 or not path.exists():
      path.write_text(f"{workdir.absolute().name}-{uuid.uuid4().hex[:8]}")
    options = {"id": path.read_text(), "name": path.read_text()}
    self._run = wandb.init(config=dict(config), resume="allow", **options)
    self.sync = lambda: None  # wandb sends metrics in the background
    self.close = self._run.finish

  def scalars(self, step: int, values: Values) -> None:
    self._run.log(dict(values), step=step)


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb}


def parse(names: str) -> list[str]:
  """Splits config.log.writers; raises UserError if a name is unknown."""
  parsed = [name.strip() for name in names.split(",") if name.strip()]
  for name in parsed:
    if name not in TRACKERS:
      raise UserError(
        f"config.log.writers has {name!r} but may have {', '.join(TRACKERS)}"
      )
  return parsed


def openers(
  workdir: pathlib.Path, config: Values, *, writers: str
) -> dict[str, Callable[[int], TensorBoard | Wandb]]:
  """Returns a constructor for each tracker in `writers`, by name.

  A constructor takes the step that the run resumes from; -1 for a new run.

  Raises:
    UserError: if a tracker is unknown or its package is not installed.
  """
  names = parse(writers)
  if "wandb" in names and not importlib.util.find_spec("wandb"):
    raise UserError("config.log.writers has wandb: pip install wandb first")
  return {x: functools.partial(TRACKERS[x], workdir, config) for x in names}
