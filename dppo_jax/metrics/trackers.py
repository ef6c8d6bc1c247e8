"""Where a run's numbers go beside its own files: TensorBoard, trackers.

`openers` has those that are named. A tracker is a library of the user's own: it
is imported only where it is named.
"""

from collections.abc import Callable, Mapping
import errno
import functools
import importlib
import math
import os
import pathlib
import socket
import struct
import time
import types
from typing import Any, Protocol
import uuid

from dppo_jax.metrics import jsonl

TRACKERS = ("wandb", "trackio")
NAMES = ("tensorboard", *TRACKERS)

# The few that matter, in the group that TensorBoard shows first: a capital
# comes before the small letters of the others.
MAIN = {
  "eval/accuracy": "Main/accuracy_held_out",
  "reward/accuracy": "Main/accuracy_training",
  "reward/mean": "Main/reward",
  "update/entropy": "Main/entropy",
  "update/grad_norm": "Main/grad_norm",
  "tokens/completion_mean": "Main/tokens_per_completion",
  "step/seconds": "Main/seconds_per_step",
}


class Writer(Protocol):
  """What a place for numbers can do."""

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """Metrics of a step, by their names."""

  def text(self, step: int, name: str, markdown: str) -> None:
    """A page, such as sampled completions."""

  def image(self, step: int, name: str, path: pathlib.Path) -> None:
    """A PNG."""

  def sync(self) -> None:
    """Writes out what there is: a checkpoint is about to be made."""

  def close(self) -> None:
    """Writes out what is left."""


class TensorBoard:
  """Scalars with the few that matter first, text and pictures, in `events/`."""

  def __init__(
    self, workdir: pathlib.Path, first_step: int, config: Mapping[str, Any]
  ):
    from tensorboardX.proto import event_pb2

    folder = workdir / "events"
    folder.mkdir(parents=True, exist_ok=True)
    # Read in the order of their names, of which no two are made alike.
    number = len(list(folder.iterdir()))
    name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
    # Written at once and by ourselves: a full disk ends the thread of
    # SummaryWriter, and who has more to write waits for it for ever.
    self._file = (folder / f"{name}.{number:06}").open("wb", buffering=0)
    self._add(file_version="brain.Event:2")
    # What the files before say of later steps counts no more.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(step=first_step + 1, session_log=start)
    lines = [f"| {name} | {_cell(value)} |" for name, value in config.items()]
    table = "\n".join(["| option | value |", "|---|---|", *lines])
    self.text(max(first_step, 0), "config", table)

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    from tensorboardX.proto import summary_pb2

    found = {}
    for name, value in values.items():
      if math.isfinite(value):
        found[name] = value
        if name in MAIN:
          found[MAIN[name]] = value
    if values.get("completions/drawn"):
      share = values["completions/trained"] / values["completions/drawn"]
      found["Main/completions_trained"] = share
    if found:
      value = summary_pb2.Summary.Value
      shown = [value(tag=x, simple_value=y) for x, y in found.items()]
      self._add(step=step, summary=summary_pb2.Summary(value=shown))

  def text(self, step: int, name: str, markdown: str) -> None:
    from tensorboardX import summary

    self._add(step=step, summary=summary.text(name, markdown))

  def image(self, step: int, name: str, path: pathlib.Path) -> None:
    from PIL import Image
    from tensorboardX.proto import summary_pb2

    # The file as it is; `add_image` would decode it and compress it again.
    with Image.open(path) as picture:
      width, height = picture.size
    image = summary_pb2.Summary.Image(
      height=height,
      width=width,
      colorspace=4,  # RGBA
      encoded_image_string=path.read_bytes(),
    )
    value = summary_pb2.Summary.Value(tag=name, image=image)
    self._add(step=step, summary=summary_pb2.Summary(value=[value]))

  def sync(self) -> None:
    os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()

  def _add(self, **content) -> None:
    """Writes an event as a TFRecord: length, content, a checksum of each."""
    from tensorboardX import record_writer
    from tensorboardX.proto import event_pb2

    event = event_pb2.Event(wall_time=time.time(), **content)
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    record = b"".join(
      part + struct.pack("<I", record_writer.masked_crc32c(part))
      for part in (length, data)
    )
    try:
      with jsonl.writing(self._file.name):
        if self._file.write(record) < len(record):
          raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
      self._file.close()
      raise


class Tracker:
  """Weights & Biases, or trackio, whose functions go by the same names."""

  def __init__(
    self,
    name: str,
    workdir: pathlib.Path,
    first_step: int,
    config: Mapping[str, Any],
    project: str,
  ):
    self._library = _library(name)
    run_id = _run_id(workdir, is_new=first_step < 0)
    # Of trackio a run's name is its id.
    identity = {"id": run_id} if name == "wandb" else {}
    self._library.init(
      project=project,
      name=run_id,
      config=dict(config),
      resume="allow",
      **identity,
    )

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    self._library.log(dict(values), step=step)

  def text(self, step: int, name: str, markdown: str) -> None:
    """Nothing: the config is theirs already, samples are in samples.jsonl."""

  def image(self, step: int, name: str, path: pathlib.Path) -> None:
    self._library.log({name: self._library.Image(str(path))}, step=step)

  def sync(self) -> None:
    """Nothing: their libraries send when they see fit."""

  def close(self) -> None:
    self._library.finish()


def parse(names: str) -> list[str]:
  """The writers that the config names.

  Raises:
    ValueError: for one that there is not.
  """
  found = [name.strip() for name in names.split(",") if name.strip()]
  for name in found:
    if name not in NAMES:
      raise ValueError(
        f"config.log.writers names {name!r} but may name {', '.join(NAMES)}"
      )
  return found


def check(names: str) -> None:
  """Loads the libraries that are named, before anything takes time.

  Raises:
    ValueError: where one is not installed; it says how to install it.
  """
  for name in parse(names):
    if name in TRACKERS:
      _library(name)


def openers(
  workdir: pathlib.Path,
  config: Mapping[str, Any],
  *,
  writers: str,
  project: str,
) -> dict[str, Callable[[int], Writer]]:
  """What makes each of the writers that are named, by name.

  It is called with the step that the run goes on after; -1 where it is new.

  Args:
    config: values of the run's options by dotted name.
    project: of the trackers, which the run is part of.
  """
  found = {}
  for name in parse(writers):
    if name == "tensorboard":
      found[name] = lambda first_step: TensorBoard(workdir, first_step, config)
    else:
      found[name] = functools.partial(
        Tracker, name, workdir, config=config, project=project
      )
  return found


def _library(name: str) -> types.ModuleType:
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(
      f"config.log.writers names {name}, which cannot be imported ({error}): "
      f"pip install {name}"
    ) from error


def _run_id(workdir: pathlib.Path, is_new: bool) -> str:
  """By what a tracker knows the run; one that goes on keeps it."""
  path = workdir / "tracker_id"
  if is_new or not path.exists():
    path.write_text(f"{workdir.absolute().name}-{uuid.uuid4().hex[:8]}\n")
  return path.read_text().strip()


def _cell(value: Any) -> str:
  return str(value).replace("|", "\\|")
