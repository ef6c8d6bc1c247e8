"""table.md from the rows of results.jsonl."""

from collections.abc import Iterable, Iterator
import json
import pathlib
from typing import Any

from . import published

Row = dict[str, Any]
GIB = 2**30


def write(results: pathlib.Path) -> None:
  """Writes `table.md` next to `results`, with a part for each device."""
  if not results.exists():
    return
  rows = [json.loads(x) for x in results.read_text("utf-8").splitlines()]
  lines = ["# Measured", ""]
  for device in dict.fromkeys(row["device"] for row in rows):
    here = _newest(row for row in rows if row["device"] == device)
    jax = next((row["jax"] for row in here if "jax" in row), "?")
    lines += [f"## {device}, jax {jax}", ""]
    for part in (
      _checks,
      _machine,
      _decode,
      _memory,
      _steps,
      _phases,
      _failures,
    ):
      page = list(part(here))
      lines += [*page, ""] if page else []
  results.with_name("table.md").write_text(
    "\n".join(lines).rstrip() + "\n", "utf-8"
  )


def _newest(rows: Iterable[Row]) -> list[Row]:
  """The last row of each name, in the order of the first."""
  names = ("item", "name", "dtype", "slots", "context")
  return list({tuple(row.get(x) for x in names): row for row in rows}.values())


def _of(rows: list[Row], item: str) -> list[Row]:
  """The rows of an item that did not fail."""
  is_of = lambda row: row["item"].partition(":")[0] == item
  return [row for row in rows if is_of(row) and row["name"] != "failed"]


def _table(head: str, rows: Iterable[str]) -> Iterator[str]:
  rows = list(rows)
  if rows:
    yield f"| {head} |"
    yield "|" + "---|" * (head.count("|") + 1)
    yield from (f"| {row} |" for row in rows)


def _machine(rows: list[Row]) -> Iterator[str]:
  for row in _of(rows, "machine"):
    if row["name"] == "yardstick":
      yield (
        f"Plain JAX reaches {row['bfloat16_flops'] / 1e12:.4g} TFLOP/s in "
        f"bfloat16, {row['float32_flops'] / 1e12:.4g} in float32, and "
        f"{row['bytes'] / 1e12:.3g} TB/s."
      )
    else:
      yield f"An all-reduce takes {row['bytes_per_second'] / 1e9:.3g} GB/s."


def _checks(rows: list[Row]) -> Iterator[str]:
  verdict = lambda row: "right" if row["is_right"] else "**wrong**"
  of = lambda row: f"{row['name']} | {row['model']} | {row['dtype']}"
  yield from _table(
    "check before a run | model | dtype | s | figures | is",
    (
      f"{of(row)} | {row['seconds']:.3g} | {row['text']} | {verdict(row)}"
      for row in _of(rows, "check")
    ),
  )
  yield ""
  yield from _table(
    "attention | model | dtype | row | ms, both passes | largest error | is",
    (
      f"{of(row)} | {row['row_length']} "
      f"| {1e3 * row['seconds']:.3g} | {max(row['errors'].values()):.1e} "
      f"| {verdict(row)}"
      if "errors" in row
      else f"{of(row)} | | | | {row['error'][:80]}"
      for row in _of(rows, "attention")
    ),
  )
  yield ""
  for row in _of(rows, "rollout"):
    measured = {
      name: f"{value:.3g}"
      for name, value in row.items()
      if name.startswith(("share", "logprob"))
    }
    numbers = ", ".join(f"{k} {v}" for k, v in measured.items())
    yield f"- {row['name']}: {numbers}: {verdict(row)}"


def _decode(rows: list[Row]) -> Iterator[str]:
  theirs = (
    f"*{x.engine}, {x.model}, {x.device}* | {x.slots} | {x.context} "
    f"| {x.step_ms:.3g} | {x.tokens_per_second:,.0f} "
    f"| {x.share_of_bandwidth:.0%} of the data sheet's | | "
    for x in published.DECODING
  )
  ours = [
    f"{row['model']} | {row['slots']} | {row['context']} "
    f"| {1e3 * row['seconds_of_a_step']:.3g} "
    f"| {row['tokens_per_second']:,.0f} | {row['share_of_bandwidth']:.0%} "
    f"| {row['bytes_of_a_step'] / GIB:.2f} | {_launches(row)}"
    for row in _of(rows, "decode")
  ]
  yield from _table(
    "decode | slots | context | ms a step | tokens/s | share of bandwidth "
    "| predicted GiB | predicted launches, waits",
    [*ours, *theirs] if ours else [],
  )


def _memory(rows: list[Row]) -> Iterator[str]:
  yield from _table(
    "model | update's peak, GiB | compiler's temporaries | planned",
    (
      f"{row['model']} | {row['peak_bytes'] / GIB:.1f} "
      f"| {row['temporary_bytes'] / GIB:.1f} "
      f"| {sum(row['planned'].values()) / GIB:.1f}"
      for row in _of(rows, "memory")
    ),
  )


def _steps(rows: list[Row]) -> Iterator[str]:
  steps, lines = _of(rows, "step"), []
  whole = {row["model"]: row for row in steps if row["name"] == "grpo"}
  for row in steps:
    ratio = whole[row["model"]]["step_seconds"] / row["step_seconds"]
    lines.append(
      f"{row['model']} | {row['name']} | {row['prompts']} "
      f"| {row['completions']} | {row['rollout_seconds']:.3g} "
      f"| {row['select_seconds']:.2g} | {row['update_seconds']:.3g} "
      f"| {row['step_seconds']:.3g} | {ratio:.2f} "
      f"| {row['slot_utilisation']:.0%}"
    )
  yield from _table(
    "model | method | prompts | completions trained | rollout s | select s "
    "| update s | step s | times grpo | slots busy",
    lines,
  )


def _phases(rows: list[Row]) -> Iterator[str]:
  yield from _table(
    "model | phase | attention | s | tokens/s | share of matrix products "
    "| predicted TFLOP | predicted launches, waits",
    (
      f"{row['model']} | {row['name']} | {row['attention']} "
      f"| {row['seconds_median']:.3g} | {row['tokens_per_second']:,.0f} "
      f"| {row['mfu']:.0%} | {row['flops'] / 1e12:.3g} | {_launches(row)}"
      for row in _of(rows, "phases")
    ),
  )


def _launches(row: Row) -> str:
  """Kernels and host waits of a turn of each loop, as predicted."""
  return "; ".join(
    f"{loop or 'outside of loops'} {kernels:,.0f}, {waits:,.0f}"
    for loop, (kernels, waits) in row.get("launches", {}).items()
    if kernels
  )


def _failures(rows: list[Row]) -> Iterator[str]:
  for row in rows:
    if row["name"] == "failed":
      yield f"- {row['item']} failed: {row['error'][:200]}"
