"""Sends metrics to TensorBoard and to Weights & Biases.

A tracker has the methods `scalars` and `close`.
"""

from collections.abc import Mapping
import math
import pathlib
import time
from typing import Any
import uuid

from dppo_jax.errors import UserError

Values = Mapping[str, Any]


class TensorBoard:
  """Scalars, in `events/`."""

  def __init__(self, workdir: pathlib.Path, config: Values, first_step: int):
    from tensorboardX import event_file_writer, proto

    self._proto, folder = proto, workdir / "events"
    folder.mkdir(parents=True, exist_ok=True)
    # Files are read in the order of their names, which begin with the second.
    suffix = f".{len(list(folder.iterdir())):06}"
    # Not SummaryWriter: an error in its thread would end only that thread, and
    # later events would wait for it for ever.
    self._file = event_file_writer.EventsWriter(str(folder / "events"), suffix)
    # Later steps of earlier files are void.
    start = proto.event_pb2.SessionLog.START
    self._write(first_step + 1, session_log={"status": start})
    self.close = self._file.close

  def scalars(self, step: int, values: Values) -> None:
    summary = self._proto.summary_pb2.Summary()
    for name, value in values.items():
      if math.isfinite(value):
        summary.value.add(tag=name, simple_value=value)
    self._write(step, summary=summary)
    self._file.flush()  # a kill must lose nothing before a checkpoint

  def _write(self, step: int, **content) -> None:
    event = self._proto.event_pb2.Event
    self._file.write_event(event(step=step, wall_time=time.time(), **content))


class Wandb:
  """Weights & Biases; a resumed run keeps its id."""

  def __init__(self, workdir: pathlib.Path, config: Values, first_step: int):
    import wandb

    path = workdir / "wandb_id"
    if first_step < 0 or not path.exists():
      path.write_text(f"{workdir.absolute().name}-{uuid.uuid4().hex[:8]}")
    options = {"id": path.read_text(), "name": path.read_text()}
    run = wandb.init(config=dict(config), resume="allow", **options)
    self.scalars = lambda step, values: run.log(dict(values), step=step)
    self.close = run.finish


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb}


def parse(names: str) -> list[str]:
  """Splits config.log.writers; raises UserError if a name is unknown."""
  parsed = names.replace(",", " ").split()
  if unknown := {*parsed} - TRACKERS.keys():
    known = ", ".join(TRACKERS)
    raise UserError(f"config.log.writers has {unknown} but may have {known}")
  return parsed
