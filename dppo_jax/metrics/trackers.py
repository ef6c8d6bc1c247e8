"""Sends metrics and completions to TensorBoard and to Weights & Biases.

A tracker has the methods `scalars`, `table` and `close`.
"""

from collections.abc import Mapping, Sequence
import math
import os
import pathlib
import re
import time
from typing import Any
import uuid

from dppo_jax.analysis import tables
from dppo_jax.errors import UserError

Values = Mapping[str, Any]


class TensorBoard:
  """Scalars, and tables as text, in `events/`."""

  def __init__(self, workdir: pathlib.Path, config: Values, first_step: int):
    from tensorboardX import event_file_writer, proto, summary

    self._proto, folder = proto, workdir / "events"
    self._text = summary.text
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

  def table(
    self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence]
  ) -> None:
    text = tables.markdown(columns, [[*map(_cell, row)] for row in rows])
    self._write(step, summary=self._text(name, text))
    self._file.flush()

  def _write(self, step: int, **content) -> None:
    event = self._proto.event_pb2.Event
    self._file.write_event(event(step=step, wall_time=time.time(), **content))


def _cell(value: Any) -> str:
  """Formats a value for a Markdown table, without markup of its own."""
  text = f"{value:.4g}" if isinstance(value, float) else str(value)
  text = re.sub(r"[\\`*_\[\]|<>&~]", lambda x: f"&#{ord(x[0])};", text)
  return "<br>".join(text.splitlines())


class Wandb:
  """Weights & Biases; a resumed run keeps its id."""

  def __init__(self, workdir: pathlib.Path, config: Values, first_step: int):
    import wandb

    path = workdir / "wandb_id"
    if first_step < 0 or not path.exists():
      path.write_text(uuid.uuid4().hex)  # a name may be too long, or have a ":"
    id_ = path.read_text()
    name = os.environ.get("WANDB_NAME", workdir.absolute().name[:128])
    run = wandb.init(config=dict(config), resume="allow", id=id_, name=name)
    self.scalars = lambda step, values: run.log(dict(values), step=step)
    self.table = lambda step, name, columns, rows: run.log(
      {name: wandb.Table(columns=columns, data=rows)}, step=step
    )
    self.close = run.finish


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb}
COMPLETIONS = "completions"  # a file that `Writer` writes


def parse(names: str) -> list[str]:
  """Splits config.log.writers; raises UserError if a name is unknown."""
  parsed = names.replace(",", " ").split()
  known = [*TRACKERS, COMPLETIONS]
  if unknown := [x for x in parsed if x not in known]:
    raise UserError(
      f"config.log.writers has {unknown[0]} but may have {', '.join(known)}"
    )
  return parsed
