"""Estimates equal enumeration over subsets; intervals cover."""

import collections
import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from dppo_jax.eval import estimators

VALUES = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=6)


@given(VALUES, st.data())
def test_best_of_is_the_mean_over_all_subsets(values, more):
  size = more.draw(st.integers(1, len(values)))
  found = estimators.best_of(np.array([values]), size)
  subsets = itertools.combinations(values, size)
  np.testing.assert_allclose(found, np.mean([max(x) for x in subsets]))


@pytest.mark.parametrize("num, size", [(8, 3), (64, 16), (1000, 500)])
def test_best_of_right_and_wrong_is_the_closed_form_of_pass_at_k(num, size):
  for right in (0, 1, 3, num // 2, num - 1, num):
    values = np.arange(num)[None] < right
    expected = 1 - math.comb(num - right, size) / math.comb(num, size)
    found = estimators.best_of(values.astype(np.float32), size)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_best_of_one_is_the_mean():
  values = np.random.default_rng(0).random((5, 7))
  np.testing.assert_allclose(estimators.best_of(values, 1), values.mean(1))


def _winner_by_hand(values, votes, subset) -> float:
  """What the most frequent answer of a subset is worth."""
  cast = collections.Counter(votes[i] for i in subset if votes[i] >= 0)
  if not cast:
    return 0.0
  most = max(cast.values())
  worth = lambda x: np.mean(
    [v for v, y in zip(values, votes, strict=True) if y == x]
  )
  return np.mean([worth(x) for x, count in cast.items() if count == most])


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=8), st.data())
def test_majority_is_the_mean_over_all_subsets(votes, more):
  size = more.draw(st.integers(1, len(votes)))
  kinds = st.lists(
    st.sampled_from([0.0, 0.5, 1.0]),
    min_size=len(votes),
    max_size=len(votes),
  )
  values = more.draw(kinds)
  subsets = itertools.combinations(range(len(votes)), size)
  expected = np.mean([_winner_by_hand(values, votes, x) for x in subsets])
  found = estimators.majority(np.array([values]), np.array([votes]), size)
  np.testing.assert_allclose(found, expected, atol=1e-12)


def test_majority_of_all_is_the_plurality_with_fair_ties():
  values = np.array([[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]])
  votes = np.array([[0, 0, 1, 2, 3], [0, 0, 1, 1, -1], [0, 0, 1, 1, 1]])
  found = estimators.majority(values.astype(float), votes, 5)
  np.testing.assert_allclose(found, [1, 0.5, 0])


def test_the_majority_of_one_is_the_mean_where_all_vote():
  rng = np.random.default_rng(1)
  votes = rng.integers(0, 3, (6, 5))
  values = (votes == 0).astype(float)
  found = estimators.majority(values, votes, 1)
  np.testing.assert_allclose(found, values.mean(1))


def test_a_majority_of_many_stays_finite():
  votes = np.arange(256)[None] % 32
  found = estimators.majority((votes == 0).astype(float), votes, 128)
  np.testing.assert_allclose(found, 1 / 32)


@pytest.mark.parametrize("size", [0, 4])
def test_a_k_that_was_not_sampled_is_refused(size):
  values, votes = np.ones((2, 3)), np.zeros((2, 3), int)
  for found in (
    lambda: estimators.best_of(values, size),
    lambda: estimators.majority(values, votes, size),
  ):
    with pytest.raises(ValueError, match=rf"k is {size}, not in 1..3"):
      found()


def _coverage(make, mean, num_samples, runs=2000) -> float:
  rng = np.random.default_rng(0)
  found = [estimators.interval(make(rng), num_samples) for _ in range(runs)]
  return float(np.mean([x.low <= mean <= x.high for x in found]))


# A run of 2,000 has a standard error of 0.005: 0.02 is four of them.
@pytest.mark.parametrize("mean", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("num", [30, 500])
def test_intervals_of_right_and_wrong_cover(num, mean):
  make = lambda rng: (rng.random(num) < mean).astype(float)
  covered = _coverage(make, mean, 1)
  assert abs(covered - 0.95) < (0.03 if num == 30 else 0.02)


@pytest.mark.parametrize("shape", [(0.3, 0.3), (2, 2), (0.1, 0.9), (0.3, 3)])
@pytest.mark.parametrize(
  "num, least, most", [(30, 0.92, 0.99), (300, 0.93, 0.97)]
)
def test_intervals_of_means_over_samples_cover(shape, num, least, most):
  """Pass rates differ from problem to problem by a beta distribution."""
  a, b = shape

  def make(rng):
    return rng.binomial(8, rng.beta(a, b, num)) / 8

  assert least <= _coverage(make, a / (a + b), 8) <= most


def test_an_interval_knows_what_a_few_problems_cannot_say():
  none = estimators.interval(np.zeros(30))
  assert none.value == none.low == 0 and 0.10 < none.high < 0.13
  everything = estimators.interval(np.ones(30))
  assert everything.high == 1 and np.isclose(everything.low, 1 - none.high)
  # However often each was tried: other problems may be another matter.
  assert estimators.interval(np.zeros(30), num_samples=64) == none
  assert estimators.interval(np.ones(1)) == (1, 0, 1)
  equal = estimators.interval(np.full(30, 0.5), num_samples=8)
  assert 0.05 < equal.high - equal.low < 0.2


@pytest.mark.parametrize(
  "num, sizes", [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_sizes_double_up_to_all(num, sizes):
  assert estimators.sizes(num) == sizes
