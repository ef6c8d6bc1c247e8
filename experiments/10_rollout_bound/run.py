"""Bounds the time that pruning rollouts could save.

  python -m experiments.10_rollout_bound.run

Trains grpo on experiment 03's task and on the default one, logs completions of
the policy at the start and at the end with all their gradients, and computes
from them what two-phase groups, stopping while generating and training on
random prefixes could gain in seconds to the same point. Results go to
results.jsonl, table.md and figure.png in this directory. What was logged stays
in the workdir and is not logged again.
"""

import argparse
import pathlib

import numpy as np

from ..common import results
from . import (
  bounds,
  cuts,
  logged,
  made,
  moments,
  report,
  slots,
  stopping,
  two_phase,
)

HERE = pathlib.Path(__file__).parent
STEPS = {"rings": 72, "arithmetic": 100}
STAGES = (two_phase.measure, stopping.measure, slots.measure, cuts.measure)
GROUPS = (16, 8, 4)


def describe(log: logged.Logged) -> dict:
  """Describes the batch itself."""
  m = moments.moments(log, moments.OBJECTIVES["grpo"])
  return {
    "rule": "batch",
    **results.facts(),
    "accuracy": log.rewards.mean(),
    "live_groups": (np.ptp(log.rewards, axis=1) > 0).mean(),
    "rollout_share": log.shares.rollout,
    "update_share": log.shares.update,
    "length": log.lengths.mean(),
    "length_log_std": np.log(log.lengths).std(),
    "longest": log.lengths.max(),
    "noise_scale": m.noise_scale / slots.PROMPTS,
    "smaller_batch": {
      bounds.name(r): bounds.smaller_batch(log.shares.rest, r)
      for r in bounds.RATIOS
    },
  }


def measure(log: logged.Logged) -> list[dict]:
  """All rows of one batch, the first about the batch itself.

  Gains are over the groups that a row is of; `over 16` is that over groups of
  16 at the same number of prompts, in the noise-dominated limit.
  """
  rows, control = [describe(log)], {}
  for group in GROUPS:
    for row in (r for s in STAGES for r in s(moments.regroup(log, group))):
      if row["is"] == "control" and group == GROUPS[0]:
        control[row["rule"], row["objective"]] = row["r=inf"]
      base = control.get((f"groups of {group}", row["objective"]), 1.0)
      if group != GROUPS[0] and row["objective"] == "any":
        continue
      gain = {"over 16": base * row["r=inf"]}
      kept = gain | row if group == GROUPS[0] else _without_gains(row) | gain
      rows.append({"group": group, **kept})
  # A step that is nothing but rollout: where rules like these gain most.
  alone = log._replace(shares=logged.Shares(1.0, 0.0))
  for row in (r for s in STAGES[:3] for r in s(alone)):
    if "Neyman" in row["rule"]:
      continue  # there is no update to choose for
    gain = {"r=inf": row["r=inf"]}
    about = {"group": GROUPS[0], "shares": "rollout alone"}
    rows.append(about | _without_gains(row) | gain)
  return [{"batch": log.name, **row} for row in rows]


def _without_gains(row: dict) -> dict:
  return {k: v for k, v in row.items() if isinstance(v, str)}


def _rounded(x):
  """Numbers to four digits, for the file."""
  if isinstance(x, dict):
    return {k: _rounded(v) for k, v in x.items()}
  return x if isinstance(x, str | int) else float(f"{x:.4g}")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--prompts", type=int, default=128)
  parser.add_argument("--workdir", default="runs/10_rollout_bound")
  args = parser.parse_args()
  if args.prompts % slots.PROMPTS:
    parser.error(f"--prompts is {args.prompts}, no multiple of {slots.PROMPTS}")
  root = pathlib.Path(args.workdir).absolute()
  rows = []
  for task, steps in STEPS.items():
    run = None
    for step in (0, steps):
      path = root / f"{task}-{step}-{args.prompts}.npz"
      if not path.exists():
        run = run or logged.train_policy(task, steps, root / task)
        name = f"{task}, step {step}"
        log = logged.collect(name, run, root / task, step, args.prompts)
        logged.save(log, path)
      rows += measure(logged.load(path))
      print(report.table(rows[-1]["batch"], rows), flush=True)
  rows += made.measure()
  results.write(HERE / "results.jsonl", map(_rounded, rows))
  report.write(rows, HERE)


if __name__ == "__main__":
  main()
