"""Trains all weights, or adapters of two ranks, on the task of experiment 03.

  python -m experiments.14_lora.run [--seeds=3] [--cores=0,1]

Each run is a process on its own core; all start from the same fine-tuned
weights. A finished run is not repeated. Results go to results.jsonl and
table.csv in this folder.
"""

import argparse
import pathlib
import statistics

from dppo_jax.analysis import runs, tables

from ..common import processes, results, rings
from ..common.tasks import CONFIGS, RINGS

HERE = pathlib.Path(__file__).parent
MARKS = (0.7, 0.8)
# Rank, 0 for all weights, and learning rate over that of full training.
VARIANTS = {
  "full": (0, 1.0),
  "rank 4": (4, 10.0),
  "rank 16": (16, 10.0),
  "rank 4, half the rate": (4, 5.0),
  "rank 16, half the rate": (16, 5.0),
}
RATE = 7e-4
CLOCK = "step/cpu_seconds"


def train_all(root: pathlib.Path, seeds: int, cores: list[int]) -> list[dict]:
  """Trains every variant, a seed at a time so that drift affects all."""
  pool = processes.Runs(root, cores)
  config = f"{CONFIGS['rings']}:grpo"
  pool.start("warm", config, "--config.steps=0").result()
  queued = {
    (variant, seed): pool.start(
      _name(variant, seed),
      config,
      f"--config.seed={seed}",
      f"--config.sft.from_run={root / 'warm'}",
      f"--config.lora.rank={rank}",
      f"--config.optimizer.learning_rate={factor * RATE}",
    )
    for seed in range(seeds)
    for variant, (rank, factor) in VARIANTS.items()
  }
  for run in queued.values():
    run.result()
  return [_row(root, variant, seed) for variant, seed in queued]


def _name(variant: str, seed: int) -> str:
  return f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}"


def _row(root: pathlib.Path, variant: str, seed: int) -> dict:
  run = runs.load(root / _name(variant, seed))
  seconds, accuracy = run.curve(CLOCK)
  of_steps = lambda metric: [x[metric] for x in run.steps]
  return {
    "variant": variant,
    "seed": seed,
    "accuracy": accuracy.tolist(),
    "seconds": seconds.tolist(),
    "to": {f"{x:.0%}": run.cost_to(x, CLOCK) for x in MARKS},
    "step": statistics.median(of_steps(CLOCK)),
    "update": statistics.median(of_steps("update/seconds")),
    "policy_ratio_max": statistics.median(of_steps("update/policy_ratio_max")),
    **results.facts(),
  }


def table(rows: list[dict]) -> str:
  """Returns medians over seeds, with ranges."""
  head = ["", "last accuracy (greedy)", "step, CPU s", "update, s"]
  head += [f"to {x:.0%}, CPU s" for x in MARKS]
  lines = []
  for variant in VARIANTS:
    some = [row for row in rows if row["variant"] == variant]
    line = [variant, results.median_range([x["accuracy"][-1] for x in some], 3)]
    line += [
      results.median_range([x[k] for x in some], 3) for k in ("step", "update")
    ]
    for mark in MARKS:
      times = [x["to"][f"{mark:.0%}"] for x in some]
      reached = [x for x in times if x is not None]
      cell = results.median_range(reached, 1) if reached else "–"
      few = f" ({len(reached)} of {len(times)})"
      line.append(cell + few * (len(reached) < len(times)))
    lines.append(line)
  return tables.markdown(head, lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--cores", default="0,1")
  parser.add_argument("--workdir", default="runs/14_lora")
  args = parser.parse_args()
  rings.write(RINGS / "data")
  cores = [int(core) for core in args.cores.split(",")]
  rows = train_all(pathlib.Path(args.workdir).absolute(), args.seeds, cores)
  results.write(HERE / "results.jsonl", rows)
  (HERE / "table.csv").write_text(results.to_csv(table(rows)))
  print(table(rows))


if __name__ == "__main__":
  main()
