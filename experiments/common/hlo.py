"""Kernels and launches in the text of a program compiled for GPUs or TPUs."""

import collections
import functools
import re
from typing import NamedTuple

_KERNEL = re.compile(
  r'%([\w\-]+?)[.\d]* = .*custom_call_target="'
  r'(?:tpu_custom_call|__gpu\$xla\.gpu\.triton|mosaic_gpu\w*|__cu\w+\$\w+)"'
)
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = .*?[\])}]\s([a-z\-]+)\(")
_LAUNCHED = {
  "fusion",
  "custom-call",
  "copy",
  "convolution",
  "dot",
  "sort",
  "dynamic-update-slice",
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
  "all-gather-start",
  "all-reduce-start",
}


class Launches(NamedTuple):
  """Work that the host of a GPU gives it in one turn of a loop.

  Attributes:
    loop: named scope of the loop, such as decode; empty outside of all.
    kernels: launches of kernels and copies; loops of known length count in full
      and the longest branch of each conditional.
    syncs: times that the host waits for a condition which the device computes.
    unknown: inner loops whose length the device knows, counted as one turn.
  """

  loop: str
  kernels: int = 0
  syncs: int = 0
  unknown: int = 0

  def plus(self, other: "Launches", times: int = 1) -> "Launches":
    return Launches(
      self.loop,
      self.kernels + times * other.kernels,
      self.syncs + times * other.syncs,
      self.unknown + other.unknown,
    )


def launches(text: str) -> list[Launches]:
  """Returns the launches outside of loops, then of each outermost open loop.

  An open loop is one of unknown length.
  """
  computations, entry = _computations(text)
  loops = []

  @functools.cache
  def count(name: str, is_entry: bool = False) -> Launches:
    total = Launches("")
    for line in computations[name]:
      match = _INSTRUCTION.match(line)
      kind = match[1] if match else ""
      if kind in _LAUNCHED:
        total = total._replace(kernels=total.kernels + 1)
      elif kind == "while":
        turn = count(re.search(r"body=%?([\w.\-]+)", line)[1])
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        if known:
          total = total.plus(turn, int(known[1]))
        elif is_entry:
          loops.append(turn._replace(loop=_scope(line), syncs=turn.syncs + 1))
        else:
          turn = turn._replace(syncs=turn.syncs + 1, unknown=turn.unknown + 1)
          total = total.plus(turn)
      elif kind == "conditional":
        names = re.search(r"branch_computations=\{([^}]*)\}", line)
        names = names[1] if names else line.partition("_computation=")[2]
        branches = [x for x in re.findall(r"[\w.\-]+", names)]
        turns = [count(x) for x in branches if x in computations]
        total = total.plus(max(turns, key=lambda x: x.kernels))
        total = total._replace(syncs=total.syncs + 1)
      elif kind in ("call", "async-start"):
        callee = re.search(r"(?:to_apply|calls)=%?([\w.\-]+)", line)
        total = total.plus(count(callee[1])) if callee else total
    return total

  outside = count(entry, is_entry=True)
  return [outside, *loops]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Returns the lines of each computation by name, and the entry's name."""
  computations, lines, entry = {}, [], ""
  for line in text.splitlines():
    if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
      lines = computations[header[2]] = []
      entry = header[2] if header[1] else entry
    lines.append(line)
  return computations, entry


def _scope(line: str) -> str:
  """Returns the innermost named scope around a loop."""
  path = re.search(r'op_name="([^"]*)"', line)
  words = re.findall(r"[\w:]+", path[1].partition("/")[2]) if path else []
  words = [x for x in words if x not in ("while", "body", "shard_map")]
  return words[-1] if words else "loop"


def kernels(text: str) -> dict[str, int]:
  """Calls of each custom kernel in the program, by name."""
  names = []
  for line in text.splitlines():
    if match := _KERNEL.search(line):
      pallas = re.search(r'(\w+)/pallas_call"', line)
      names.append((pallas or match)[1])
  return dict(collections.Counter(names))
