"""Which completions are written, and what is said of them."""

import numpy as np

from dppo_jax.metrics import samples


def _groups(rewards):
  """A line for each completion of the groups, in their order."""
  return [
    {"completion": f"{q}.{i}", "reward": float(reward)}
    for q, group in enumerate(rewards)
    for i, reward in enumerate(group)
  ]


def _shown(rewards, lengths, advantages, weights, **kwargs):
  return samples.of_step(
    _groups(rewards), *map(np.asarray, (lengths, advantages, weights)), **kwargs
  )


def test_kept_and_pruned_of_one_group_are_seen_side_by_side():
  """The pruned prompt has a row in the arrays, and no line of its own."""
  found = _shown(
    rewards=[[0, 0, 0, 0], [1, 0, 1, 0]],
    lengths=[[3, 3, 3, 3], [0, 0, 0, 0], [2, 2, 2, 2]],
    advantages=[[0, 0, 0, 0], [0, 0, 0, 0], [1, -1, 1, -1]],
    weights=[[1, 1, 1, 1], [0, 0, 0, 0], [2, 0, 2, 2]],
    limit=2,
  )
  assert [line["completion"] for line in found] == ["1.0", "1.1"]
  assert [line["kept"] for line in found] == [True, False]
  assert [line["advantage"] for line in found] == [1.0, -1.0]
  assert [line["weight"] for line in found] == [2.0, 0.0]


def test_places_that_one_kind_leaves_the_other_takes():
  shown = lambda weights: [
    line["completion"]
    for line in _shown([[1, 0, 1, 0]], [[1] * 4], [[1, -1, 1, -1]], [weights])
  ]
  assert shown([1, 1, 1, 1]) == ["0.0", "0.1", "0.2", "0.3"]
  assert shown([0, 0, 0, 1]) == ["0.0", "0.1", "0.2", "0.3"]
  is_kept = np.array([True, True, True, False])
  assert samples.half_and_half(is_kept, np.zeros(4), 3) == [0, 1, 3]


def test_different_advantages_are_seen_before_equal_ones():
  is_kept = np.array([True, True, True, False, False, False])
  advantages = np.array([1.0, 1.0, -1.0, 1.0, 1.0, -1.0])
  assert samples.half_and_half(is_kept, advantages, 4) == [0, 2, 3, 5]


def test_a_group_with_advantages_goes_before_one_without():
  found = _shown(
    rewards=[[1, 1], [1, 0]],
    lengths=[[1, 1], [1, 1]],
    advantages=[[0, 0], [1, -1]],
    weights=[[1, 1], [1, 1]],
  )
  assert [line["completion"] for line in found] == ["1.0", "1.1"]


def test_of_several_draws_those_that_were_gathered_have_an_outcome():
  """Dynamic sampling gathers the groups whose rewards differ, in order."""
  drawn = [[1, 1], [0, 1], [0, 0], [1, 0]]
  found = _shown(drawn, [[2, 2], [3, 3]], [[-1, 1], [2, -2]], [[1, 1], [5, 0]])
  assert [line["completion"] for line in found] == ["3.0", "3.1"]
  assert [line["advantage"] for line in found] == [2.0, -2.0]
  assert [line["weight"] for line in found] == [5.0, 0.0]


def test_where_nothing_was_gathered_nothing_was_kept():
  found = _shown([[1, 1]], [[0, 0]], [[0, 0]], [[0, 0]])
  assert [line["kept"] for line in found] == [False, False]
  assert _shown([], [[0, 0]], [[0, 0]], [[0, 0]]) == []
