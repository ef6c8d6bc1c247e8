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


def _expected_winner(values, answers) -> float:
  """The mean over the tied answers of the mean value of their completions."""
  counts = collections.Counter(x for x in answers if x is not None)
  if not counts:
    return 0.0
  most = max(counts.values())
  pairs = list(zip(values, answers, strict=True))
  value = lambda x: np.mean([v for v, y in pairs if y == x])
  return np.mean([value(x) for x, count in counts.items() if count == most])


@given(
  st.lists(
    st.tuples(
      st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([None, *"abc"])
    ),
    min_size=1,
    max_size=8,
  )
)
def test_majority_is_the_plurality_with_fair_ties(pairs):
  values, answers = zip(*pairs, strict=True)
  majority = estimators.majority(np.array([values]), [answers])
  np.testing.assert_allclose(majority, _expected_winner(values, answers))


@pytest.mark.parametrize("size", [0, 4])
def test_a_k_outside_of_the_samples_raises(size):
  with pytest.raises(ValueError, match=rf"k is {size}, not in 1..3"):
    estimators.best_of(np.ones((2, 3)), size)


def test_every_estimate_is_what_its_name_says():
  correct = np.array([[1, 1, 0, 0], [0, 0, 0, 1], [1] * 4, [0] * 4])
  answers = [["0", "0", "1", None], [*"1120"], [*"0000"], [*"1234"]]
  found = estimators.estimates(correct, answers)
  assert {name: x.value for name, x in found.items()} == pytest.approx(
    {
      "avg@4": 7 / 16,
      "maj@4": 0.5,
      "pass@2": (5 / 6 + 1 / 2 + 1) / 4,
      "pass@4": 0.75,
    }
  )
  for x in found.values():
    assert 0 <= x.low <= x.value <= x.high <= 1
  assert "maj@4" not in estimators.estimates(correct, [[None] * 4] * 4)
  assert list(estimators.estimates(correct[:, :1], [["1"]] * 4)) == ["avg@1"]


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


def test_intervals_have_a_width_even_if_all_values_are_equal():
  none = estimators.interval(np.zeros(30))
  assert none.value == none.low == 0 and 0.10 < none.high < 0.13
  everything = estimators.interval(np.ones(30))
  assert everything.high == 1 and np.isclose(everything.low, 1 - none.high)
  # However often each was tried: other problems may be another matter.
  assert estimators.interval(np.zeros(30), num_samples=64) == none
  assert estimators.interval(np.ones(1)) == (1, 0, 1)
  equal = estimators.interval(np.full(30, 0.5), num_samples=8)
  assert 0.05 < equal.high - equal.low < 0.2
