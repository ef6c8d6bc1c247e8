"""Completions of a step that are written down, with their outcomes."""

import numpy as np
import pytest

from dppo_jax.metrics import samples


def _chosen(rows, advantages, weights):
  """`(name, advantage, weight)` of the chosen completions.

  Args:
    rows: row of each drawn group in the arrays; None if it was not gathered.
  """
  lines = [
    {"completion": f"{number}.{i}", "row": row, "member": i}
    for number, row in enumerate(rows)
    for i in range(len(advantages[0]))
  ]
  arrays = map(np.asarray, (advantages, weights))
  chosen = samples.choose(samples.with_outcomes(lines, *arrays))
  assert not any("row" in x or "member" in x for x in chosen)
  assert all(x["kept"] == (x["weight"] > 0) for x in chosen)
  return [(x["completion"], x["advantage"], x["weight"]) for x in chosen]


def test_kept_and_pruned_completions_of_one_group_are_chosen():
  """The pruned prompt has a row in the arrays, but no samples."""
  chosen = _chosen(
    rows=[0, 2],
    advantages=[[0] * 6, [0] * 6, [1, -1, 1, -1, 1, -1]],
    weights=[[1] * 6, [0] * 6, [2, 0, 2, 2, 0, 0]],
  )
  assert [x[0] for x in chosen] == ["1.0", "1.1", "1.2", "1.4"]
  assert chosen[:2] == [("1.0", 1.0, 2.0), ("1.1", -1.0, 0.0)]


@pytest.mark.parametrize("weights", [[1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
def test_either_kind_fills_the_places_of_the_other(weights):
  chosen = _chosen([0], [[1, -1, 1, -1, 1]], [weights])
  assert len(chosen) == 4 and any(x[2] for x in chosen)


def test_dynamic_sampling_gathers_the_groups_whose_rewards_differ():
  rows = [None, 0, None, 1]
  chosen = _chosen(rows, [[-1, 1], [2, -2]], [[1, 1], [5, 0]])
  assert chosen == [("3.0", 2.0, 5.0), ("3.1", -2.0, 0.0)]


def test_nothing_gathered_is_nothing_kept():
  chosen = _chosen([None], [[0, 0]], [[0, 0]])
  assert chosen == [("0.0", 0.0, 0.0), ("0.1", 0.0, 0.0)]
  assert _chosen([], [[0, 0]], [[0, 0]]) == []
