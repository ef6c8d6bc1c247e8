"""Checks and times everything on a new accelerator.

  python -m experiments.05_accelerator.run [--minutes=40] [--items=...] \
    [--models=qwen3-0.6b,qwen3-1.7b,qwen3-4b] [--again]

On the devices that JAX finds: an NVIDIA GPU, a TPU or, for a try, a CPU. Each
item runs in its own process, so that running out of memory ends only that item.
Rows are appended to results.jsonl as they are measured, and an item that has
rows there for this device is not measured again: re-run the command to
continue. table.md is made from all rows there.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
MODELS = "qwen3-0.6b,qwen3-1.7b,qwen3-4b"

# Least to most costly to be without: an item is begun while there is time.
ITEMS = {
  "check": "the check before a run's first step, with its figures",
  "machine": "what plain JAX reaches: matrix products, memory, a collective",
  "attention": "every kernel against the reference, and its time",
  "rollout": "tokens against those of a CPU, bfloat16 against float32",
  "decode": "tokens/s of full slots, and the share of memory bandwidth",
  "memory": "the update's peak against the compiler's word and the plan's",
  "step": "seconds of a GRPO, a DPPO and a neyman step, stage by stage",
  "phases": "prefill, decode, select, score and update, and the update's MFU",
}
ONCE = ("machine", "rollout")  # of no model in particular


def main() -> None:
  args = _arguments()
  if args.one:
    return _run_one(*args.one.split(":"), args.results)
  start, left = time.monotonic(), []
  done = {} if args.again else _done(args.results)
  device = _device()
  for name in _names(args):
    if name in done.get(device, ()):
      print(f"{name}: measured before on {device}", flush=True)
    elif time.monotonic() - start > 60 * args.minutes:
      left.append(name)
    else:
      _in_a_process(name, args, device)
  if left:
    print(f"out of time; re-run for {', '.join(left)}")
  from . import table

  table.write(args.results)


def _arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__.partition("\n")[0],
    epilog="\n".join(f"{name}: {text}" for name, text in ITEMS.items()),
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--minutes", type=float, default=40)
  parser.add_argument("--items", default=",".join(ITEMS))
  parser.add_argument("--models", default=MODELS, help="keys of work.WORKS")
  parser.add_argument("--again", action="store_true", help="measure all again")
  parser.add_argument("--one", help=argparse.SUPPRESS)
  parser.add_argument(
    "--results", type=pathlib.Path, default=HERE / "results.jsonl"
  )
  args = parser.parse_args()
  for item in args.items.split(","):
    if item not in ITEMS:
      parser.error(f"--items has {item!r} but knows only {', '.join(ITEMS)}")
  return args


def _names(args: argparse.Namespace) -> list[str]:
  """`item` or `item:model`, small models before large ones."""
  items, models = args.items.split(","), args.models.split(",")
  once = [item for item in ITEMS if item in items and item in ONCE]
  each = [item for item in ITEMS if item in items and item not in ONCE]
  names = once + [f"{item}:{model}" for model in models for item in each]
  return sorted(names, key=lambda name: not name.startswith("check:"))


def _done(results: pathlib.Path) -> dict[str, set[str]]:
  """The items that have rows, by device."""
  items = {}
  if results.exists():
    for line in results.read_text("utf-8").splitlines():
      row = json.loads(line)
      items.setdefault(row["device"], set()).add(row["item"])
  return items


def _device() -> str:
  """Returns the devices here, queried in a process that then releases them."""
  code = "import jax; d = jax.devices(); print(len(d), 'x', d[0].device_kind)"
  process = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=False
  )
  if process.returncode:
    sys.exit(process.stderr)
  return process.stdout.strip().splitlines()[-1]


def _in_a_process(name: str, args: argparse.Namespace, device: str) -> None:
  """Runs one item; where it dies, that is a row as well."""
  print(f"== {name}", flush=True)
  start = time.monotonic()
  child = subprocess.run(
    [
      *(sys.executable, "-m", __spec__.name),
      *(f"--one={name}", f"--results={args.results.absolute()}"),
    ],
    cwd=HERE.parents[1],
    stderr=subprocess.PIPE,
    text=True,
    check=False,
  )
  seconds = time.monotonic() - start
  if child.returncode:
    lines = child.stderr.strip().splitlines() or [f"exit {child.returncode}"]
    message = next((x for x in lines if "RESOURCE_EXHAUSTED" in x), lines[-1])
    print(child.stderr[-2000:], flush=True)
    row = {"item": name, "device": device, "name": "failed", "error": message}
    with args.results.open("a", encoding="utf-8") as file:
      file.write(json.dumps(row) + "\n")
  print(f"== {name}: {seconds:.0f} s", flush=True)


def _run_one(item: str, *models_and_results: str) -> None:
  *models, results = models_and_results
  # A program compiled once need not be compiled again by the next item.
  os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path.home() / ".cache" / "dppo_jax" / "accelerator"),
  )
  from ..common import machine
  from . import checks, decoding, steps

  measure = {
    "check": checks.kernel_rows,
    "machine": checks.machine_rows,
    "attention": checks.attention_rows,
    "rollout": checks.rollout_rows,
    "decode": decoding.rows,
    "memory": steps.memory_rows,
    "step": steps.step_rows,
    "phases": steps.phase_rows,
  }[item]
  here = machine.description() | {"item": ":".join([item, *models])}
  with pathlib.Path(results).open("a", encoding="utf-8") as file:
    for row in measure(*models):
      line = json.dumps(row | here)
      file.write(line + "\n")
      file.flush()
      print(line, flush=True)


if __name__ == "__main__":
  main()
