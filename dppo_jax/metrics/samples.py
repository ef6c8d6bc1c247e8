"""Completions of a step with their outcomes, for samples.jsonl and others."""

from collections.abc import Sequence
import itertools

import numpy as np


def with_outcomes(
  samples: Sequence[dict],
  lengths: np.ndarray,
  advantages: np.ndarray,
  weights: np.ndarray,
) -> list[list[dict]]:
  """Returns the groups of a step, `advantage`, `weight` and `kept` added.

  Args:
    samples: one for each sampled completion, group by group.
    lengths: `[Q, G]`, tokens; 0 for the completions of a pruned prompt.
    advantages, weights: `[Q, G]`; a completion of weight 0 was pruned.
  """
  rows, sizes = np.flatnonzero(lengths.max(axis=1)), (lengths > 0).sum(axis=1)
  if sizes.sum() < len(samples):  # with dynamic sampling all are of one size
    sizes = np.full(len(samples) // lengths.shape[1], lengths.shape[1])
  ends = itertools.accumulate(sizes[sizes > 0], initial=0)
  groups = [samples[i:j] for i, j in itertools.pairwise(ends)]
  # Dynamic sampling drops groups of equal rewards: they have no row.
  drops, rows = len(groups) > len(rows), iter(rows)
  nothing = np.zeros(lengths.shape[1])
  outcomes = []
  for group in groups:
    is_dropped = drops and len({line["reward"] for line in group}) == 1
    row = None if is_dropped else next(rows, None)
    a, w = (nothing if row is None else x[row] for x in (advantages, weights))
    outcomes.append(
      [
        line
        | {"advantage": float(a[i]), "weight": float(w[i])}
        | {"kept": bool(w[i])}
        for i, line in enumerate(group)
      ]
    )
  return outcomes


def choose(groups: list[list[dict]]) -> list[dict]:
  """Chooses four completions of one group, two of them pruned if possible."""
  rank = lambda group: (
    any(x["advantage"] for x in group),
    len({x["kept"] for x in group}) > 1,
  )
  group = max(groups, key=rank, default=[])
  kept = [i for i, x in enumerate(group) if x["kept"]]
  pruned = [i for i, x in enumerate(group) if not x["kept"]]
  kept = kept[: max(2, 4 - len(pruned))]
  return [group[i] for i in sorted([*kept, *pruned[: 4 - len(kept)]])]
