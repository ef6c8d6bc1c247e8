"""Chooses the completions of a step that are written to samples.jsonl."""

from collections.abc import Sequence
import itertools

import numpy as np


def of_step(
  samples: Sequence[dict],
  lengths: np.ndarray,
  advantages: np.ndarray,
  weights: np.ndarray,
) -> list[dict]:
  """Chooses four completions of one group, two of them pruned if possible.

  Each has `advantage`, `kept` and `weight` added.

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
  if len(groups) > len(rows):  # dynamic sampling drops groups of equal rewards
    groups = [x for x in groups if len({line["reward"] for line in x}) > 1]
  outcomes = [
    (group, a[: len(group)], w[: len(group)])
    for group, a, w in zip(
      groups, advantages[rows], weights[rows], strict=False
    )
  ]
  if not outcomes:
    nothing = np.zeros(len(samples))
    outcomes = [(samples, nothing, nothing)]
  rank = lambda x: (x[1].any(), (x[2] > 0).any() and not (x[2] > 0).all())
  group, advantage, weight = max(outcomes, key=rank)
  kept, pruned = np.flatnonzero(weight > 0), np.flatnonzero(weight == 0)
  kept = kept[: max(2, 4 - len(pruned))]
  return [
    group[i]
    | {"advantage": float(advantage[i]), "weight": float(weight[i])}
    | {"kept": bool(weight[i])}
    for i in sorted([*kept, *pruned[: 4 - len(kept)]])
  ]
