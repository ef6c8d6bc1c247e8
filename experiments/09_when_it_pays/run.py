"""Compares predicted and measured speed-ups of pruned runs.

  python -m experiments.09_when_it_pays.run [--seeds=3] [--cores=0,1]

The unpruned runs of every task and batch size come first, then predictions from
them (predictions.jsonl), then the predicted runs and those with an automatic
budget. A finished run is not repeated. Results go to results.jsonl, table.csv
and figure.png in this folder.
"""

import argparse
import functools
import pathlib

from ..common import results
from . import predict, report, speedup, tasks, training

HERE = pathlib.Path(__file__).parent


def train(
  pool: training.Pool, stage: str, cells: list[str], seeds: int
) -> None:
  """Trains all runs of a stage, a seed at a time so that drift affects all."""
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
  """Measures speed-ups over the baseline, by seed and of the mean curves."""
  rows = []
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
        full = [speedup.mean_curve(x) for x in zip(*pairs, strict=True)]
        rows.append(
          {
            "cell": cell,
            "variant": variant,
            "seeds": len(pairs),
            "faster": speedup.ratio(*full, axis=1),
            "fewer_steps": speedup.ratio(*full, axis=0),
            "faster_by_seed": [speedup.ratio(*x, axis=1) for x in pairs],
            "step_seconds": float(full[1][1][-1] / full[1][0][-1]),
            "accuracy": [float(x[2][-1]) for _, x in pairs],
            **report.of_logs([x for x in lines if x]),
            **results.facts(),
          }
        )
  return rows


def _lines(pool: training.Pool, cell: str, seeds: int, variant: str) -> list:
  """Returns the metrics of every seed; None for a run that is missing."""
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
    pathlib.Path(args.root).absolute(), [*map(int, args.cores.split(","))]
  )
  cells = args.cells.split(";")
  for stage in args.stages.split(","):
    if stage == "predict":
      rows = predict.all_of(
        pool, [x for x in cells if x in tasks.LAW], args.seeds
      )
      results.write(HERE / "predictions.jsonl", rows)
    elif stage == "report":
      path = HERE / "results.jsonl"
      if rows := gather(pool, cells, args.seeds):
        results.write(path, rows)
      report.write(results.read(path), HERE)
    else:
      train(pool, stage, cells, args.seeds)


if __name__ == "__main__":
  main()
