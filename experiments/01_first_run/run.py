"""Runs the default task with several methods and seeds, one after the other.

  python -m experiments.01_first_run.run [--seeds=3] [--variants=dppo,grpo]

Seconds are CPU seconds of the steps, on all cores together: other work on the
machine disturbs them less than wall time. Each run is a separate process; a
finished run is not repeated. Results go to results.jsonl and figure.png in this
folder.
"""

import argparse
import os
import pathlib
import statistics

from matplotlib import figure as figures

from dppo_jax.analysis import runs, tables

from ..common import processes, results
from ..common.tasks import CONFIGS

HERE = pathlib.Path(__file__).parent
VARIANTS = {
  "dppo": "dppo",
  "grpo": "grpo",
  "neyman": "neyman",
  "grpo-zeros": "experiments/common/baselines.py:grpo_all_tokens",
}
MARKS = (0.6, 0.7, 0.8)  # accuracies whose first crossing is reported
COLOURS = {
  "dppo": "#9e2a2b",
  "grpo": "#2a6f97",
  "neyman": "#012a4a",
  "grpo-zeros": "#9aa5b1",
}


def train(variant: str, seed: int, workdir: pathlib.Path) -> dict:
  """Trains one run and returns its measurements."""
  config = f"{CONFIGS['arithmetic']}:{VARIANTS[variant]}"
  command = processes.train_command(config, workdir, f"--config.seed={seed}")
  log = workdir.parent / f"{workdir.name}.log"
  processes.execute(command, os.sched_getaffinity(0), log)
  run = runs.load(workdir)
  steps = run.steps
  seconds, accuracy = run.curve("step/cpu_seconds")
  total = run.total
  median = lambda name: statistics.median(line[name] for line in steps)
  mean = lambda name: statistics.mean(line[name] for line in steps)
  return {
    "variant": variant,
    "seed": seed,
    "accuracy": accuracy.tolist(),
    "seconds": seconds.tolist(),
    "seconds_to": {
      f"{mark:.0%}": run.cost_to(mark, "step/cpu_seconds") for mark in MARKS
    },
    "step_seconds": median("step/cpu_seconds"),
    "step_wall_seconds": median("step/seconds"),
    "rollout_seconds": median("rollout/seconds"),
    "update_seconds": median("update/seconds"),
    "tokens_generated": total("tokens/generated"),
    "tokens_trained": total("tokens/trained"),
    "prompts_kept": total("prompts/kept") / total("prompts/drawn"),
    "completions_trained": (
      total("completions/trained") / total("completions/drawn")
    ),
    "pack_fill": mean("pack/fill"),
    "slots_busy": mean("rollout/slot_utilisation"),
    **results.facts(),
  }


def draw(rows: list[dict]) -> None:
  """Accuracy against training seconds, a line for each run."""
  figure = figures.Figure(figsize=(7, 4), layout="constrained")
  axis = figure.subplots()
  for variant, colour in COLOURS.items():
    for i, run in enumerate(r for r in rows if r["variant"] == variant):
      axis.plot(
        run["seconds"],
        run["accuracy"],
        color=colour,
        alpha=0.7,
        label=None if i else variant,
      )
  axis.set(
    xlabel="CPU seconds of training steps",
    ylabel="held-out accuracy (greedy)",
    ylim=(0, 1),
  )
  axis.set_xlim(left=0)
  axis.legend(loc="lower right")
  results.tidy(axis)
  figure.savefig(HERE / "figure.png", dpi=120)


def table(rows: list[dict]) -> str:
  """Returns medians over seeds, with the least and the largest in brackets."""

  def cell(values: list, digits: int) -> str:
    if None in values:
      return "not reached by all"
    return results.median_range(values, digits)

  to_mark = lambda mark: lambda r: r["seconds_to"][mark]
  columns = {
    "first accuracy (greedy)": (lambda r: r["accuracy"][0], 3),
    "final accuracy (greedy)": (lambda r: r["accuracy"][-1], 3),
    **{f"seconds to {x:.0%}": (to_mark(f"{x:.0%}"), 2) for x in MARKS},
    "seconds a step": (lambda r: r["step_seconds"], 3),
    "wall seconds": (lambda r: r["step_wall_seconds"], 3),
    "of these, rollout": (lambda r: r["rollout_seconds"], 3),
    "of these, update": (lambda r: r["update_seconds"], 3),
    "tokens generated": (lambda r: r["tokens_generated"], 0),
    "tokens trained": (lambda r: r["tokens_trained"], 0),
    "pack/fill": (lambda r: r["pack_fill"], 3),
    "slots busy": (lambda r: r["slots_busy"], 3),
  }
  runs_of = {r["variant"]: [] for r in rows}
  for row in rows:
    runs_of[row["variant"]].append(row)
  lines = [
    [name, *(cell([*map(value, x)], digits) for x in runs_of.values())]
    for name, (value, digits) in columns.items()
  ]
  return tables.markdown(["", *runs_of], lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument(
    "--variants", default="dppo,grpo,neyman", help="or grpo-zeros"
  )
  parser.add_argument("--workdir", default="runs/01_first_run")
  args = parser.parse_args()
  rows, root = [], pathlib.Path(args.workdir).absolute()
  root.mkdir(parents=True, exist_ok=True)
  for seed in range(args.seeds):
    for variant in args.variants.split(","):  # so that drift affects all
      rows.append(train(variant, seed, root / f"{variant}-{seed}"))
      results.write(HERE / "results.jsonl", rows)
  draw(rows)
  print(table(rows))


if __name__ == "__main__":
  main()
