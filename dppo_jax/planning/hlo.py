"""What a compiled program says of itself: its collectives and its kernels."""

import collections
import math
import re
from typing import NamedTuple

_ITEM_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_OPCODE = re.compile(r"[ )]([a-z][a-z0-9\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLS = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)={([^}]*)}")
_BRANCH = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")
_CONSTANT = re.compile(r"%(\S+) = [su]32\[\]\S* constant\((\d+)\)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_START = "AsyncCollectiveStart"
_CUSTOM_CALL = re.compile(r"%([\w\-]+?)[.\d]* = .*\"tpu_custom_call\"")


class Collective(NamedTuple):
  """Traffic of one kind, at one depth.

  Attributes:
    kind: all-gather, all-reduce, reduce-scatter, all-to-all or
      collective-permute.
    depth: loops around it of which the program does not say how often they
      turn: micro-batches, decode steps.
    bytes: that one device receives in one turn of those.
  """

  kind: str
  depth: int
  bytes: float


def kernels(text: str) -> dict[str, int]:
  """How often each Pallas kernel for TPUs stands in the program."""
  return dict(collections.Counter(_CUSTOM_CALL.findall(text)))


def collectives(text: str) -> list[Collective]:
  """The traffic between devices, by kind and depth, the most first.

  Loops whose number of turns the program states are multiplied out; of the
  branches of a conditional that with the most traffic counts.

  Args:
    text: of a compiled program, in the words of XLA.
  """
  program = _Program(text)
  sums = collections.Counter()
  for kind, depth, size in program.walk(program.entry, 1, 0):
    sums[kind, depth] += size
  found = [Collective(*key, size) for key, size in sums.items() if size]
  return sorted(found, key=lambda x: -x.bytes)


class _Program:
  """Computations by name, and who calls whom."""

  def __init__(self, text: str):
    self.lines, self.entry, name = {}, "", None
    for line in text.splitlines():
      if header := _HEADER.match(line):
        name = header[2]
        self.lines[name] = []
        self.entry = name if header[1] else self.entry
      elif line.rstrip() == "}":  # a kernel's settings may begin with one
        name = None
      elif name is not None:
        self.lines[name].append(line)
    # A collective that is started, fused with other work and finished is named
    # by its channel in each of these places, and counted where it starts.
    self._starts = {
      name for name, body in self.lines.items() if _START in "".join(body)
    }
    self._channels = {
      channel
      for name in self._starts
      for channel in _CHANNEL.findall("".join(self.lines[name]))
    }

  def walk(self, name: str, times: int, depth: int):
    """`(kind, depth, bytes)` of each collective that a computation reaches."""
    for line in self.lines.get(name, ()):
      right = line.partition(" = ")[2]
      opcode = _OPCODE.search(right)
      if not opcode:
        continue
      kind = opcode[1].removesuffix("-start")
      if kind in _KINDS and self._is_counted(name, right):
        received = _received(kind, right, opcode.start(1))
        yield kind, depth, times * received
      if " while(" in right:
        turns = self._turns(right)
        inner = (times * (turns or 1), depth + (turns is None))
      else:
        inner = (times, depth)
      for called in _CALLS.findall(right):
        if kind not in ("all-reduce", "reduce-scatter"):
          yield from self.walk(called, *inner)
      branches = _BRANCH.findall(right)
      for group in _BRANCHES.findall(right):
        branches += [x.strip().lstrip("%") for x in group.split(",")]
      if branches:
        found = [list(self.walk(branch, *inner)) for branch in branches]
        yield from max(found, key=lambda x: sum(size for *_, size in x))

  def _is_counted(self, name: str, line: str) -> bool:
    channel = _CHANNEL.search(line)
    is_async = channel and channel[1] in self._channels
    return not is_async or name in self._starts

  def _turns(self, line: str) -> int | None:
    """Turns of a while loop, where the program states them."""
    if known := re.search(r'known_trip_count"?:\s*{"?n"?:"?(\d+)', line):
      return int(known[1])
    # Else from the condition: a counter that is below a constant.
    called = re.findall(r"(?:condition|body)=%?([\w.\-]+)", line)
    condition, body = ("\n".join(self.lines.get(x, ())) for x in called)
    below = re.findall(
      r"compare\(%(get-tuple-element\S*), %([^)\s]+)\), direction=LT", condition
    )
    limits = dict(_CONSTANT.findall(condition))
    if len(below) != 1 or below[0][1] not in limits:
      return None
    index = re.search(rf"%{re.escape(below[0][0])} = .*index=(\d+)", condition)
    return math.ceil(int(limits[below[0][1]]) / _step(body, int(index[1])))


def _step(body: str, index: int) -> int:
  """What a loop adds to the counter at `index` of its carry; 1 if unclear."""
  root = re.search(r"ROOT .* tuple\(([^)]*)\)", body)
  if not root:
    return 1
  result = re.sub(r"/\*.*?\*/", "", root[1]).split(",")[index].strip()
  sums = re.search(rf"{re.escape(result)} = .* add\(\S+, %([^)\s]+)\)", body)
  constants = dict(_CONSTANT.findall(body))
  return int(constants.get(sums[1], 1)) if sums else 1


def _received(kind: str, line: str, end: int) -> float:
  """Bytes that a device receives in a collective; `line[:end]` is its type."""
  sizes = [_bytes(*shape) for shape in _SHAPE.findall(line[:end])]
  size = max(sizes, default=0) if "-start(" in line else sum(sizes)
  n = _group_size(line)
  return {
    "all-gather": size * (n - 1) / n,
    "all-reduce": 2 * size * (n - 1) / n,
    "reduce-scatter": size * (n - 1),
    "all-to-all": size * (n - 1) / n,
    "collective-permute": size,
  }[kind]


def _bytes(dtype: str, dims: str) -> float:
  bits = _ITEM_BITS.get(dtype)
  if bits is None:
    digits = re.search(r"\d+", dtype)
    bits = int(digits[0]) if digits else 0
  return math.prod(int(x) for x in dims.split(",") if x) * bits / 8


def _group_size(line: str) -> int:
  """Devices that take part in a collective, as its groups say."""
  if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] {([^}]*)}", line):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
    total = 1
    for axis, part in re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2]):
      total *= int(part or sizes[axis])
    return max(total, 1)
  if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
    return int(iota[1])
  if listed := re.search(r"replica_groups={{([\d,]+)}", line):
    return listed[1].count(",") + 1
  return 2
