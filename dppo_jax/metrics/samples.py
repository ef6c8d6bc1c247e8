"""Completions of a step with their outcomes, for samples.jsonl and others."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_COLUMNS = (
  "problem completion answer reward correct tokens stopped advantage weight"
).split()


def with_outcomes(
  samples: Sequence[dict], advantages: np.ndarray, weights: np.ndarray
) -> list[list[dict]]:
  """Returns the groups of a step, `advantage`, `weight` and `kept` added.

  Args:
    samples: samples of `collect.Experience`.
    advantages, weights: `[Q, G]`; a completion of weight 0 was pruned.
  """
  groups: list[list[dict]] = []
  for sample in samples:
    line = dict(sample)
    at = row, member = line.pop("row"), line.pop("member")
    if member == 0:
      groups.append([])
    advantage, weight = (
      0.0 if row is None else float(x[at]) for x in (advantages, weights)
    )
    outcome = dict(advantage=advantage, weight=weight, kept=bool(weight))
    groups[-1].append(line | outcome)
  return groups


def choose(groups: list[list[dict]]) -> list[dict]:
  """Chooses four completions of one group, two of them pruned if possible."""
  rank = lambda group: (
    any(x["advantage"] for x in group),
    len({x["kept"] for x in group}) > 1,
  )
  group = max(groups, key=rank, default=[])
  # The first of each kind, then the second of each kind, and so on.
  place = lambda i: sum(x["kept"] == group[i]["kept"] for x in group[:i])
  chosen = sorted(range(len(group)), key=place)[:4]
  return [group[i] for i in sorted(chosen)]


def choose_columns(
  samples: Sequence[dict],
) -> tuple[list[str], list[list[Any]]]:
  """Returns columns and rows of a table of completions, for trackers."""
  columns = [x for x in _COLUMNS if x in samples[0]]
  return columns, [[line[x] for x in columns] for line in samples]
