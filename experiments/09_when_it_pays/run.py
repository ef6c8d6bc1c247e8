"""Does the law say beforehand how much sooner a pruned run gets there?

  python experiments/09_when_it_pays/run.py [--seeds=3] [--cores=0,1]

First the unpruned runs of every task and batch size, then the predictions made
of them, in predictions.jsonl; then the runs that were predicted, and those in
which the share sets itself. What is done is not repeated. Results go to
results.jsonl, table.md and figure.png beside this file.
"""

import argparse
import functools
import json
import pathlib
import platform

import jax
import predict
import report
import speedup
import tasks
import training

HERE = pathlib.Path(__file__).parent


def train(
  pool: training.Pool, stage: str, cells: list[str], seeds: int
) -> None:
  """All runs of a stage, a seed at a time so that drift hits all alike."""
  for task in dict.fromkeys(tasks.CELLS[cell].task for cell in cells):
    pool.warm(task)
  queued = [
    pool.start(cell, variant, seed)
    for seed in range(seeds)
    for cell in cells
    for variant in training.variants(cell, stage)
  ]
  for run in queued:
    run.result()


def gather(pool: training.Pool, cells: list[str], seeds: int) -> list[dict]:
  """Measured speed-ups over the baseline of the same seed, and of the means."""
  found = []
  for cell in cells:
    lines_of = functools.partial(_lines, pool, cell, seeds)
    base = speedup.undisturbed(lines_of("grpo"))
    for stage in ("baseline", "rest", "itself"):
      for variant in training.variants(cell, stage):
        lines = lines_of(variant)
        curves = speedup.undisturbed(lines)
        pairs = [(a, b) for a, b in zip(base, curves, strict=True) if a and b]
        if not pairs:
          continue
        whole = [speedup.mean_curve(x) for x in zip(*pairs, strict=True)]
        found.append(
          {
            "cell": cell,
            "variant": variant,
            "seeds": len(pairs),
            "faster": speedup.ratio(*whole, axis=1),
            "fewer_steps": speedup.ratio(*whole, axis=0),
            "faster_by_seed": [speedup.ratio(*x, axis=1) for x in pairs],
            "step_seconds": float(whole[1][1][-1] / whole[1][0][-1]),
            "accuracy": [float(x[2][-1]) for _, x in pairs],
            **report.of_logs([x for x in lines if x]),
            "jax": jax.__version__,
            "machine": platform.processor() or platform.machine(),
          }
        )
  return found


def _lines(pool: training.Pool, cell: str, seeds: int, variant: str) -> list:
  """Of every seed; None where it was not run."""
  return [pool.lines(cell, variant, seed) for seed in range(seeds)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--root", default="runs/09_when_it_pays")
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--cores", default="0,1")
  parser.add_argument("--cells", default=";".join(tasks.CELLS))
  parser.add_argument("--stages", default="baseline,predict,rest,itself,report")
  args = parser.parse_args()
  pool = training.Pool(
    pathlib.Path(args.root).absolute(), map(int, args.cores.split(","))
  )
  cells = args.cells.split(";")
  for stage in args.stages.split(","):
    if stage == "predict":
      rows = predict.all_of(
        pool, [x for x in cells if x in tasks.LAW], args.seeds
      )
      _write(HERE / "predictions.jsonl", rows)
    elif stage == "report":
      rows = gather(pool, cells, args.seeds)
      _write(HERE / "results.jsonl", rows)
      report.write(rows, HERE)
    else:
      train(pool, stage, cells, args.seeds)


def _write(path: pathlib.Path, rows: list[dict]) -> None:
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
  main()
