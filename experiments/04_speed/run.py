"""Times every phase of a step against what the machine can do.

  python -m experiments.04_speed.run [--work=small] [--cores=0] \
    [--parts=phases,pruning,sharing,selection,growth,memory]

Seeds and shapes are fixed (work.py). Every figure is the median over
repetitions, with the least and the most. Rows are appended to results.jsonl
as they are measured; table.txt and figure.png are made from all rows there.
"""

import argparse
import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--work", default="small", help="a key of work.WORKS")
  parser.add_argument("--dtype", default="float32", help="of the computation")
  parser.add_argument("--attention", default="xla", help="which kernel")
  parser.add_argument("--remat", default="none", help="none, dots or layers")
  parser.add_argument("--cores", default="", help="as 0,1; empty takes all")
  parser.add_argument("--repeats", type=int, default=7)
  parser.add_argument("--parts", default="phases,pruning,sharing,selection")
  parser.add_argument(
    "--results", type=pathlib.Path, default=HERE / "results.jsonl"
  )
  return parser.parse_args()


def main() -> None:
  args = arguments()
  if args.cores:  # before JAX counts them
    cores = {int(core) for core in args.cores.split(",")}
    os.sched_setaffinity(0, cores)
  from ..common import machine, phases
  from ..common import work as works
  from . import table

  if args.work not in works.WORKS:
    sys.exit(f"--work is {args.work!r} but must be one of {[*works.WORKS]}")
  work = works.with_model(
    works.WORKS[args.work],
    dtype=args.dtype,
    attention=args.attention,
    remat=args.remat,
  )
  many = work._replace(prompts=8 * work.prompts)  # finer shares
  plans = {
    "phases": lambda: phases.phases(work, args.repeats),
    "pruning": lambda: phases.pruning(many, args.repeats),
    "sharing": lambda: phases.sharing(many, args.repeats),
    "selection": lambda: phases.selection(work, args.repeats),
    "growth": lambda: phases.growth(work, args.repeats),
    "memory": lambda: phases.memory(work),
  }
  here = machine.description() | {
    "cores": len(os.sched_getaffinity(0)),
    "work": args.work,
    "dtype": args.dtype,
    "attention": args.attention,
    "remat": args.remat,
  }
  parts = args.parts.split(",")
  for part in parts:
    if part not in plans:
      sys.exit(f"--parts has {part!r} but knows only {', '.join(plans)}")
  print(json.dumps(here), flush=True)
  with args.results.open("a", encoding="utf-8") as file:
    for part in parts:
      yard = machine.yardstick(max(args.repeats, 7))
      print(json.dumps(yard), flush=True)
      for measured in plans[part]():
        row = {"part": part, **measured, **here, "yardstick": yard}
        file.write(json.dumps(row) + "\n")
        file.flush()
        print(f"{part} · {table.line(row)}", flush=True)
  table.write(args.results)


if __name__ == "__main__":
  main()
