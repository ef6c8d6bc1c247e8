"""Computes the bias and variance of off-policy corrections and schedules.

  python -m experiments.13_off_policy.run

Nothing is estimated: expectations are sums over all completions of a small
policy. Only the updates that separate the policies are drawn, from a few seeds;
rows are means over these. Writes results.jsonl and table.md in this directory,
in less than half a minute on one core.
"""

import argparse
import pathlib
import statistics

from ..common import results
from . import corrections, ledger, policies, report, schedules

HERE = pathlib.Path(__file__).parent
RATES = {"usual step": 2.0, "large step": 16.0}
LAGS = (1, 2, 4)
SEEDS = 8
ON_POLICY = "on policy"


def measure(task: policies.Task, path: list, lag: int) -> list[dict]:
  """Returns all rows of the last update of a path at one lag."""
  rows = []
  for sampler, here in settings(task, path, lag).items():
    about = {"sampler": sampler}
    rows.append(about | {"part": "drift", "rule": ""} | ledger.drift(here))
    rules = corrections.RULES[:1] if sampler == ON_POLICY else corrections.RULES
    for rule in rules:
      rows.append(about | {"part": "corrections"} | ledger.row(here, rule))
    for name in corrections.MASKS:
      rows.append(about | {"part": "masks"} | ledger.masked(here, name))
  about = {"sampler": "carried", "part": "schedules"}
  return rows + [about | x for x in schedules.rows(task, path, lag)]


def settings(task: policies.Task, path: list, lag: int) -> dict:
  """Returns the samplers to compare.

  `stale` is the policy `lag` updates ago. Completions of `carried` started at
  that time and continued with newer policies. `old baseline` is stale, with
  advantages over the value of the policy that sampled.
  """
  drawn = policies.logprobs(task, path[-1 - lag])
  stale = ledger.setting(task, path[-1], drawn)
  old = task.rewards - policies.values(task, drawn)[:, None]
  carried = schedules.window_logprobs(task, path, lag, lag)
  new = policies.logprobs(task, path[-1])
  return {
    ON_POLICY: ledger.setting(task, path[-1], new),
    "stale": stale,
    "carried": ledger.setting(task, path[-1], carried),
    "old baseline": stale._replace(advantage=old[..., None]),
  }


def mean(rows: list[dict]) -> dict:
  """Averages the numbers of rows of equal names."""
  average = lambda key: statistics.fmean(row[key] for row in rows)
  return {
    key: value if isinstance(value, str) else float(f"{average(key):.4g}")
    for key, value in rows[0].items()
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seeds", type=int, default=SEEDS)
  args = parser.parse_args()
  task = policies.enumerate_task()
  start = policies.warm_up(task)
  rows = []
  for step, rate in RATES.items():
    paths = [
      policies.updates(task, start, rate, max(LAGS), seed)
      for seed in range(args.seeds)
    ]
    for lag in LAGS:
      drawn = [measure(task, path, lag) for path in paths]
      about = {"step": step, "rate": str(rate), "lag": str(lag)}
      rows += [about | mean(x) for x in zip(*drawn, strict=True)]
  results.write(HERE / "results.jsonl", rows)
  (HERE / "table.md").write_text(report.page(rows))


if __name__ == "__main__":
  main()
