"""Collectives and custom kernels in the text of a compiled program."""

import collections
from collections.abc import Iterator
import math
import re
from typing import NamedTuple

_ITEM_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_OPCODE = re.compile(r"[ )]([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(
  r"(calls|to_apply|body|\w+_computations?)={?(%?[\w.\-]+(?:, %?[\w.\-]+)*)"
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_KERNEL = re.compile(
  r"%([\w\-]+?)[.\d]* = .*custom_call_target=\"(?:tpu_custom_call|"
  r"__gpu\$xla\.gpu\.triton|__cublas\$\w+|__cudnn\$\w+)\""
)


class Collective(NamedTuple):
  """Collectives of one kind at one depth.

  Attributes:
    kind: HLO opcode, such as all-gather.
    depth: loops around them, such as micro-batches, layers or decode steps.
    count: instructions.
    bytes: size of their results on one device, each loop counted once.
  """

  kind: str
  depth: int
  count: int
  bytes: float


def kernels(text: str) -> dict[str, int]:
  """Number of calls of each custom kernel in the program, by name."""
  return dict(collections.Counter(_KERNEL.findall(text)))


def collectives(text: str) -> list[Collective]:
  """Collectives in the text of a compiled program, largest first."""
  bodies, entry = _computations(text)
  # An asynchronous collective appears in several computations, but its channel
  # is one.
  channels = {}
  for name, depth in _depths(bodies, entry).items():
    for number, (kind, line) in enumerate(_collective_lines(bodies[name])):
      channel = _CHANNEL.search(line)
      key = channel[1] if channel else (name, number)
      size = _result_bytes(line)
      channels[key] = max(channels.get(key, (0, "", 0)), (size, kind, depth))
  sums = collections.defaultdict(list)
  for size, kind, depth in channels.values():
    sums[kind, depth].append(size)
  rows = [Collective(*key, len(x), sum(x)) for key, x in sums.items()]
  return sorted(rows, key=lambda x: -x.bytes)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Lines of each computation by name, and the name of the entry."""
  bodies, entry, name = {}, "", None
  for line in text.splitlines():
    if header := _HEADER.match(line):
      name = header[2]
      bodies[name] = []
      entry = name if header[1] else entry
    elif line.rstrip() == "}":
      name = None
    elif name is not None:
      bodies[name].append(line)
  return bodies, entry


def _depths(bodies: dict[str, list[str]], entry: str) -> dict[str, int]:
  """The number of loops around each computation that the entry reaches."""
  depths, waiting = {entry: 0}, [entry]
  while waiting:
    caller = waiting.pop()
    for line in bodies[caller]:
      for attribute, names in _CALLED.findall(line):
        depth = depths[caller] + (attribute == "body")
        for name in names.replace("%", "").split(", "):
          if name in bodies and depths.get(name, -1) < depth:
            depths[name] = depth
            waiting.append(name)
  return depths


def _collective_lines(body: list[str]) -> Iterator[tuple[str, str]]:
  for line in body:
    right = line.partition(" = ")[2]
    opcode = _OPCODE.search(right)
    kind = opcode[1].removesuffix("-start") if opcode else ""
    if kind in _COLLECTIVES:
      yield kind, right


def _result_bytes(line: str) -> float:
  end = _OPCODE.search(line).start(1)
  sizes = [_bytes(*shape) for shape in _SHAPE.findall(line[:end])]
  # A start returns its operands too.
  return max(sizes, default=0) if "-start(" in line else sum(sizes)


def _bytes(dtype: str, dims: str) -> float:
  digits = re.search(r"\d+", dtype)
  bits = _ITEM_BITS.get(dtype) or int(digits[0] if digits else 0)
  return math.prod(int(x) for x in dims.split(",") if x) * bits / 8
