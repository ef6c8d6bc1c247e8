"""Runs the default task with several methods and seeds, one after the other.

  python experiments/01_first_run/run.py [--seeds=3] [--variants=dppo,grpo]

Seconds are CPU seconds of the steps, on all cores together: other work on the
machine disturbs them less than those of a clock on the wall. Each run is a
process of its own under the one command of the README; one that is done already
is not repeated. Results go to results.jsonl and figure.png beside this file.
"""

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys

import jax
from matplotlib import figure as figures

from dppo_jax.analysis import jsonl, runs

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
VARIANTS = {
  "dppo": ["--config=configs/arithmetic.py:dppo"],
  "grpo": ["--config=configs/arithmetic.py:grpo"],
  "neyman": ["--config=configs/arithmetic.py:neyman"],
  "grpo-zeros": [
    "--config=configs/arithmetic.py:grpo",
    "--config.objective.train_zero_advantage=True",
  ],
}
MARKS = (0.6, 0.7, 0.8)  # accuracies whose first crossing is reported
COLOURS = {
  "dppo": "#9e2a2b",
  "grpo": "#2a6f97",
  "neyman": "#012a4a",
  "grpo-zeros": "#9aa5b1",
}


def train(variant: str, seed: int, workdir: pathlib.Path) -> dict:
  """One run; what it measured."""
  subprocess.run(
    [
      sys.executable,
      "-m",
      "dppo_jax.main",
      *VARIANTS[variant],
      f"--config.seed={seed}",
      f"--workdir={workdir}",
    ],
    cwd=ROOT,
    check=True,
  )
  run = runs.load(workdir, clock="step/cpu_seconds")
  steps = run.steps
  seconds, accuracy = run.curve()
  total = lambda name: sum(line[name] for line in steps)
  median = lambda name: statistics.median(line[name] for line in steps)
  return {
    "variant": variant,
    "seed": seed,
    "accuracy": accuracy.tolist(),
    "seconds": seconds.tolist(),
    "seconds_to": {f"{mark:.0%}": run.cost_to(mark) for mark in MARKS},
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
    "pack_fill": statistics.mean(line["pack/fill"] for line in steps),
    "slots_busy": statistics.mean(
      line["rollout/slot_utilisation"] for line in steps
    ),
    "jax": jax.__version__,
    "machine": platform.processor() or platform.machine(),
  }


def draw(results: list[dict]) -> None:
  """Accuracy against training seconds, a line for each run."""
  figure = figures.Figure(figsize=(7, 4), layout="constrained")
  axis = figure.subplots()
  for variant, colour in COLOURS.items():
    runs = [r for r in results if r["variant"] == variant]
    for i, run in enumerate(runs):
      axis.plot(
        run["seconds"],
        run["accuracy"],
        color=colour,
        alpha=0.7,
        label=None if i else variant,
      )
  axis.set(
    xlabel="CPU seconds of training steps",
    ylabel="held-out accuracy",
    ylim=(0, 1),
  )
  axis.set_xlim(left=0)
  axis.grid(alpha=0.25)
  axis.legend(loc="lower right")
  axis.spines[["top", "right"]].set_visible(False)
  figure.savefig(HERE / "figure.png", dpi=120)


def table(results: list[dict]) -> str:
  """Medians over seeds, smallest and largest in brackets."""

  def shown(values, digits):
    if any(v is None for v in values):
      return "not reached by all"
    low, mid, high = min(values), statistics.median(values), max(values)
    return f"{mid:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"

  variants = list(dict.fromkeys(r["variant"] for r in results))
  rows = {
    "first accuracy": (lambda r: r["accuracy"][0], 3),
    "final accuracy": (lambda r: r["accuracy"][-1], 3),
    **{
      f"seconds to {mark:.0%}": (
        lambda r, m=f"{mark:.0%}": r["seconds_to"][m],
        2,
      )
      for mark in MARKS
    },
    "seconds a step": (lambda r: r["step_seconds"], 3),
    "on the wall": (lambda r: r["step_wall_seconds"], 3),
    "of which rollout": (lambda r: r["rollout_seconds"], 3),
    "of which update": (lambda r: r["update_seconds"], 3),
    "tokens generated": (lambda r: r["tokens_generated"], 0),
    "tokens trained": (lambda r: r["tokens_trained"], 0),
    "pack/fill": (lambda r: r["pack_fill"], 3),
    "slots busy": (lambda r: r["slots_busy"], 3),
  }
  lines = [
    "| | " + " | ".join(variants) + " |",
    "|---|" + "---|" * len(variants),
  ]
  for name, (value, digits) in rows.items():
    cells = [
      shown([value(r) for r in results if r["variant"] == variant], digits)
      for variant in variants
    ]
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return "\n".join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument(
    "--variants", default="dppo,grpo,neyman", help="or grpo-zeros"
  )
  parser.add_argument("--workdir", default="runs/01_first_run")
  args = parser.parse_args()
  path = HERE / "results.jsonl"
  path.write_text("")
  for seed in range(args.seeds):
    for variant in args.variants.split(","):  # so that drift hits all alike
      workdir = pathlib.Path(args.workdir).absolute() / f"{variant}-{seed}"
      with path.open("a") as file:
        file.write(json.dumps(train(variant, seed, workdir)) + "\n")
  results = jsonl.read(path)
  draw(results)
  print(table(results))


if __name__ == "__main__":
  main()
