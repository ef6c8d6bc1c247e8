"""What a run measured, for comparing runs."""

import pathlib
import statistics

from dppo_jax.reporting import metrics, report

MARKS = (0.6, 0.7, 0.8)  # accuracies whose first crossing is reported


def summary(workdir: pathlib.Path, clock: str) -> dict:
  """What the run in `workdir` measured, for comparing runs.

  Args:
    clock: the metric that tells a step's seconds.
  Returns:
    accuracy, seconds: at each evaluation; seconds are those of the steps.
    seconds_to: of each of `MARKS`, None where it was not reached.
    stage_seconds: of each stage, in all steps.
    The rest: medians over steps of `step_seconds`, totals of prompts and
    tokens, means of what is busy or full.
  """
  lines = metrics.read(workdir / "metrics.jsonl")
  steps = [line for line in lines if "step/seconds" in line]
  evals = [line for line in lines if "eval/accuracy" in line]
  seconds = report.seconds_at(steps, clock)
  total = lambda name: float(sum(line.get(name, 0.0) for line in steps))
  median = lambda name: statistics.median(line[name] for line in steps)
  mean = lambda name: total(name) / len(steps)
  return {
    "accuracy": [line["eval/accuracy"] for line in evals],
    "seconds": [seconds[line["step"]] for line in evals],
    "seconds_to": {
      f"{mark:.0%}": report.seconds_to(mark, evals, seconds) for mark in MARKS
    },
    "stage_seconds": {
      stage: total(f"{stage}/seconds") for stage in report.COLOURS
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
