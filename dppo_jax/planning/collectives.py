"""Collectives in the text of a compiled program."""

import collections
import math
import re
from typing import NamedTuple

_ITEM_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_COLLECTIVE = re.compile(
  r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|"
  r"collective-permute)(-start)?\("
)


class Collective(NamedTuple):
  """Collectives of one kind, such as all-gather, at one depth.

  Attributes:
    depth: loops around them in the source, such as micro-batches, layers or
      decode steps; -1 if unknown.
    bytes: size of their results on one device, each loop counted once.
  """

  kind: str
  depth: int
  count: int
  bytes: float


def read_collectives(text: str) -> list[Collective]:
  """Returns the collectives of a compiled program, largest first."""
  channels: dict[str | int, tuple[float, str, int]] = {}
  for number, line in enumerate(text.splitlines()):
    if not (match := _COLLECTIVE.search(line)):
      continue
    # The start of an asynchronous one, but all-reduce, returns its operands
    # too: several are a tuple, before the tuple of results.
    _, has_several, results = match[1].rpartition("), (")
    sizes = [_bytes(*x) for x in re.findall(r"\b(\w+)\[([\d,]*)\]", results)]
    is_pair = match[3] and match[2] != "all-reduce" and not has_several
    size = max(sizes) if is_pair else sum(sizes)
    source = re.search(r'op_name="([^"]*)"', line)
    depth = source[1].count("while/body") if source else -1
    # It appears in several places, all of the same channel.
    channel = re.search(r"channel_id=(\d+)", line)
    key = channel[1] if channel else -number
    entry = (size, match[2], depth)
    channels[key] = max(entry, channels.get(key, entry))
  groups = collections.defaultdict(list)
  for size, kind, depth in channels.values():
    groups[kind, depth].append(size)
  rows = [Collective(*key, len(x), sum(x)) for key, x in groups.items()]
  return sorted(rows, key=lambda x: -x.bytes)


def _bytes(dtype: str, dims: str) -> float:
  bits = _ITEM_BITS.get(dtype) or int([*re.findall(r"\d+", dtype), 0][0])
  return math.prod(int(x) for x in dims.split(",") if x) * bits / 8
