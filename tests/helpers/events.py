"""TensorBoard's files, read as TensorBoard reads them."""

import pathlib
import struct

from tensorboardX import proto, record_writer


def read(folder: pathlib.Path) -> list[proto.event_pb2.Event]:
  """Returns the events of all files that no later file voids.

  A file that restarts at some step voids that step and later ones. A truncated
  event ends its file.
  """
  events = []
  for path in sorted(folder.iterdir()):
    for event in _events(path.read_bytes()):
      if event.HasField("session_log"):
        events = [x for x in events if x.step < event.step]
      events.append(event)
  return events


def _events(data: bytes):
  while len(data) > 12:
    (size,) = struct.unpack("<Q", data[:8])
    content, tail = data[12 : 12 + size], data[12 + size :]
    if len(tail) < 4:
      return
    for part, stored in ((data[:8], data[8:12]), (content, tail[:4])):
      assert struct.pack("<I", record_writer.masked_crc32c(part)) == stored
    yield proto.event_pb2.Event.FromString(content)
    data = tail[4:]
