"""Completions of a step that are written down, with their outcomes."""

import numpy as np
import pytest

from dppo_jax.metrics import samples


def _chosen(rewards, lengths, advantages, weights):
  """`(name, advantage, weight)` of the chosen completions."""
  lines = [
    {"completion": f"{q}.{i}", "reward": float(reward)}
    for q, group in enumerate(rewards)
    for i, reward in enumerate(group)
  ]
  arrays = map(np.asarray, (lengths, advantages, weights))
  chosen = samples.choose(samples.with_outcomes(lines, *arrays))
  assert all(x["kept"] == (x["weight"] > 0) for x in chosen)
  return [(x["completion"], x["advantage"], x["weight"]) for x in chosen]


def test_kept_and_pruned_completions_of_one_group_are_chosen():
  """The pruned prompt has a row in the arrays, but no samples."""
  chosen = _chosen(
    rewards=[[0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0]],
    lengths=[[3] * 6, [0] * 6, [2] * 6],
    advantages=[[0] * 6, [0] * 6, [1, -1, 1, -1, 1, -1]],
    weights=[[1] * 6, [0] * 6, [2, 0, 2, 2, 0, 0]],
  )
  assert [x[0] for x in chosen] == ["1.0", "1.1", "1.2", "1.4"]
  assert chosen[:2] == [("1.0", 1.0, 2.0), ("1.1", -1.0, 0.0)]


@pytest.mark.parametrize("weights", [[1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
def test_either_kind_fills_the_places_of_the_other(weights):
  chosen = _chosen([[1, 0, 1, 0, 1]], [[1] * 5], [[1, -1, 1, -1, 1]], [weights])
  assert len(chosen) == 4 and any(x[2] for x in chosen)


def test_dynamic_sampling_gathers_the_groups_whose_rewards_differ():
  drawn = [[1, 1], [0, 1], [0, 0], [1, 0]]
  chosen = _chosen(
    drawn, [[2, 2], [3, 3]], [[-1, 1], [2, -2]], [[1, 1], [5, 0]]
  )
  assert chosen == [("3.0", 2.0, 5.0), ("3.1", -2.0, 0.0)]


def test_nothing_gathered_is_nothing_kept():
  chosen = _chosen([[1, 1]], [[0, 0]], [[0, 0]], [[0, 0]])
  assert chosen == [("0.0", 0.0, 0.0), ("0.1", 0.0, 0.0)]
  assert _chosen([], [[0, 0]], [[0, 0]], [[0, 0]]) == []
