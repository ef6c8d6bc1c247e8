"""Measurements of a run."""

import pathlib
import statistics

from dppo_jax.analysis import runs

MARKS = (0.6, 0.7, 0.8)  # accuracies whose first crossing is reported


def summary(workdir: pathlib.Path, clock: str) -> dict:
  """Returns the measurements of the run in `workdir`.

  Args:
    clock: metric of a step's seconds.
  Returns:
    accuracy, seconds: at each evaluation; seconds are those of the steps.
    seconds_to: of each of `MARKS`, None where it was not reached.
    stage_seconds: of each stage, in all steps.
    All others: medians over steps of `step_seconds`, totals of prompts and
    tokens, means of fractions.
  """
  run = runs.load(workdir)
  steps, total = run.steps, run.total
  seconds, accuracy = run.curve(clock)
  median = lambda name: statistics.median(line[name] for line in steps)
  mean = lambda name: total(name) / len(steps)
  return {
    "accuracy": accuracy.tolist(),
    "seconds": seconds.tolist(),
    "seconds_to": {f"{mark:.0%}": run.cost_to(mark, clock) for mark in MARKS},
    "stage_seconds": {
      stage: total(f"{stage}/seconds") for stage in runs.STAGES
    },
    "step_seconds": median(clock),
    "prompts_drawn": total("prompts/drawn"),
    "prompts_kept": total("prompts/kept"),
    "zero_std_groups": total("groups/zero_std"),
    "completions_trained": total("completions/trained"),
    "tokens_generated": total("tokens/generated"),
    "tokens_trained": total("tokens/trained"),
    "pack_fill": mean("pack/fill"),
    "slots_busy": mean("rollout/slot_utilisation"),
    "weights_max": max(line["weights/max"] for line in steps),
  }
