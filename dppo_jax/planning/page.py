"""A plan in words and tables: for a terminal, as Markdown and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
import json
import pathlib
from typing import Any, NamedTuple

from dppo_jax.analysis import jsonl, tables
from dppo_jax.metrics import progress

GIB = 2**30


class Table(NamedTuple):
  head: Sequence[str]
  rows: Sequence[Sequence[str]]


class Heading(NamedTuple):
  text: str


Block = Heading | Table | str  # a str is a paragraph


def terminal(blocks: Iterable[Block]) -> str:
  """Lines of at most 79 columns, as far as tables allow."""
  found = []
  for block in blocks:
    if isinstance(block, Table):
      found.append(tables.aligned(block.head, block.rows))
    elif isinstance(block, Heading):
      found.append(f"{block.text}\n{'-' * len(block.text)}")
    else:
      found.append(progress.wrapped(block))
  return "\n\n".join(found)


def markdown(blocks: Iterable[Block]) -> str:
  found = []
  for block in blocks:
    if isinstance(block, Table):
      found.append(tables.markdown(block.head, block.rows))
    elif isinstance(block, Heading):
      found.append(f"## {block.text}")
    else:
      found.append(block)
  return "\n\n".join(found)


def write(
  directory: pathlib.Path,
  name: str,
  title: str,
  blocks: Sequence[Block],
  values: Mapping[str, Any],
) -> pathlib.Path:
  """Writes `NAME.md` and `NAME.json`; returns the page's path."""
  directory.mkdir(parents=True, exist_ok=True)
  text = json.dumps(values, indent=2)
  jsonl.replace(directory / f"{name}.json", [text, "\n"])
  path = directory / f"{name}.md"
  jsonl.replace(path, [f"# {title}\n\n", markdown(blocks), "\n"])
  return path


def gib(size: float) -> str:
  return f"{size / GIB:,.{2 if size < 100 * GIB else 0}f}"


def amount(x: float) -> str:
  """A number to three figures with a unit of a thousand: 12.3 T."""
  for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
    if x >= limit:
      return f"{x / limit:.3g} {unit}"
  return f"{x:,.0f}"


def duration(seconds: float) -> str:
  return f"{seconds:.3f}" if seconds < 10 else f"{seconds:,.1f}"
