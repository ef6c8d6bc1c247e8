"""Estimates equal enumeration over subsets; intervals cover."""

import collections
import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from dppo_jax.eval import estimators, eval_sets
from dppo_jax.rewards import functions

VALUES = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=6)
VOTES = st.tuples(
  st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([None, *"abc"])
)


@given(VALUES, st.data())
def test_best_of_is_the_mean_over_all_subsets(values, data):
  size = data.draw(st.integers(1, len(values)))
  best = estimators.best_of(np.array([values]), size)
  subsets = itertools.combinations(values, size)
  np.testing.assert_allclose(best, np.mean([max(x) for x in subsets]))


@pytest.mark.parametrize("num, size", [(8, 3), (1000, 500)])
def test_best_of_right_and_wrong_is_the_closed_form_of_pass_at_k(num, size):
  for right in (0, 1, 3, num // 2, num - 1, num):
    values = np.arange(num)[None] < right
    expected = 1 - math.comb(num - right, size) / math.comb(num, size)
    best = estimators.best_of(values.astype(np.float32), size)
    np.testing.assert_allclose(best, expected, atol=1e-12)


@given(st.lists(VOTES, min_size=1, max_size=8))
def test_majority_is_the_plurality_with_fair_ties(pairs):
  values, answers = zip(*pairs, strict=True)
  counts = collections.Counter(x for x in answers if x is not None)
  means = [
    np.mean([v for v, y in pairs if y == x])
    for x, count in counts.items()
    if count == max(counts.values())
  ]
  majority = estimators.majority(np.array([values]), [answers])
  np.testing.assert_allclose(majority, np.mean(means) if means else 0.0)


def test_every_estimate_is_what_its_name_says():
  correct = np.array([[1, 1, 0, 0], [0, 0, 0, 1], [1] * 4, [0] * 4])
  answers = [["0", "0", "1", None], [*"1120"], [*"0000"], [*"1234"]]
  estimates = estimators.estimates(correct, answers)
  assert {name: x.value for name, x in estimates.items()} == pytest.approx(
    {
      "avg@4": 7 / 16,
      "maj@4": 0.5,
      "pass@2": (5 / 6 + 1 / 2 + 1) / 4,
      "pass@4": 0.75,
    }
  )
  for x in estimates.values():
    assert 0 <= x.low <= x.value <= x.high <= 1
  assert "maj@4" not in estimators.estimates(correct, [[None] * 4] * 4)
  assert list(estimators.estimates(correct[:, :1], [["1"]] * 4)) == ["avg@1"]


# A run of 2,000 has a standard error of 0.005. Pass rates differ from problem
# to problem by a beta distribution.
@pytest.mark.parametrize(
  "num, least, most", [(30, 0.92, 0.99), (400, 0.93, 0.97)]
)
@pytest.mark.parametrize(
  "a, b, samples",
  [(0.1, 0.9, 1), (5, 5, 1), (0.9, 0.1, 1), (0.3, 0.3, 8), (2, 2, 8)],
)
def test_intervals_cover(num, least, most, a, b, samples):
  rng = np.random.default_rng(0)
  intervals = [
    estimators.interval(
      rng.binomial(samples, rng.beta(a, b, num)) / samples, samples
    )
    for _ in range(2000)
  ]
  mean = a / (a + b)
  assert least <= np.mean([x.low <= mean <= x.high for x in intervals]) <= most


def test_intervals_have_a_width_even_if_all_values_are_equal():
  none = estimators.interval(np.zeros(30))
  assert none.value == none.low == 0 and 0.10 < none.high < 0.13
  everything = estimators.interval(np.ones(30))
  assert everything.high == 1 and np.isclose(everything.low, 1 - none.high)
  # More samples of the same problems do not stand for other problems.
  assert estimators.interval(np.zeros(30), num_samples=64) == none
  assert estimators.interval(np.ones(1)) == (1, 0, 1)
  equal = estimators.interval(np.full(30, 0.5), num_samples=8)
  assert 0.05 < equal.high - equal.low < 0.2


@pytest.mark.parametrize(
  "verifier, texts, value",
  [
    ("exact", [r"\boxed{5}", r"\boxed{ 5 }", r"\boxed{5.}", "5", "5"], 1.0),
    ("math", [r"\boxed{5}", r"\boxed{5.}", r"\boxed{4}", "4", "4"], 1.0),
    # Boxes would elect 4, which is wrong: there is no vote.
    ("last_number", [r"\boxed{4} or 5", r"\boxed{4}, no: 5", "5"], None),
    ("mine.py:judge", [r"\boxed{5}"] * 5, None),
  ],
)
def test_a_majority_votes_with_what_the_verifier_reads(verifier, texts, value):
  records = [
    eval_sets._record({"row": 0, "member": i, "completion": text}, verifier)
    for i, text in enumerate(texts)
  ]
  grade = functions.OURS.get(verifier, functions.exact)
  for record in records:
    text = record["completion"]
    record["correct"] = grade(completions=[text], answers=["5"])[0]
  completions = eval_sets.Completions(records, len(records))
  estimates = completions.estimates()
  assert (f"maj@{len(texts)}" in estimates) == (value is not None)
  if value is not None:
    assert estimates[f"maj@{len(texts)}"].value == value
