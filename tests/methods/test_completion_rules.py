"""Completion rules, against brute force and closed forms."""

import functools
import itertools

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.algo import designs
from tests.helpers.completions import (
  BINARY,
  VALUES,
  choose,
  draw,
  groups_of,
  normalized,
)


def _share_of(num):
  """A fraction that depends on the step, so that one compilation serves all."""
  return lambda step: step.astype(jnp.float32) / num


STEPWISE = {  # jitted once; the step is the number to keep of 3 x 6 or of 6
  (factory.__name__, scope): jax.jit(factory(_share_of(num), scope))
  for factory in (methods.top_abs_advantage, methods.max_variance)
  for scope, num in (("group", 6), ("batch", 18))
}


def _stepwise(factory, scope, groups, num, seed=0):
  chosen = STEPWISE[factory.__name__, scope](draw(seed, num), groups)
  return np.asarray(chosen.keep), np.asarray(chosen.prob)


def test_batch_mean_is_over_prompts_rolled_out():
  rule = methods.drop_small_advantage(0.6, scope="batch")
  values = [[2, -2, 0, 0], [0.5, -0.5, 0.5, -0.5], [9, 9, 9, 9]]
  _, prob = choose(rule, groups_of(values, pruned=[2]))  # mean |A|: 0.75
  np.testing.assert_allclose(prob[0], [1, 1, 0.4, 0.4], rtol=1e-6)
  np.testing.assert_allclose(prob[1], [0.4] * 4, rtol=1e-6)


@given(VALUES, st.integers(1, 6))
def test_largest_advantages_of_each_group_are_kept(values, num):
  rule = methods.top_abs_advantage
  keep, prob = _stepwise(rule, "group", groups_of(values), num)
  size = np.abs(values)
  assert (keep.sum(axis=1) == num).all()
  for q in range(3):
    last = np.sort(size[q])[-num]
    above, at = size[q] > last, size[q] == last
    share = (num - above.sum()) / at.sum()
    np.testing.assert_allclose(
      prob[q], np.where(above, 1, np.where(at, share, 0)), rtol=1e-6
    )


@given(VALUES, st.integers(1, 18))
def test_largest_advantages_of_the_batch_are_kept(values, share):
  rule = methods.top_abs_advantage
  keep, prob = _stepwise(rule, "batch", groups_of(values, pruned=[1]), share)
  num = max(share * 12 // 18, 1)
  size = np.abs(values)[[0, 2]]
  assert not keep[1].any() and (prob[1] == 0).all()
  np.testing.assert_allclose(
    np.sort(size[keep[[0, 2]]]), np.sort(size.reshape(-1))[-num:]
  )
  np.testing.assert_allclose(prob.sum(), num, rtol=1e-5)


def test_advantages_equal_up_to_rounding_are_tied():
  """Otherwise rounding of a group's mean would decide which one is kept."""
  nearly = np.array([[1, 1 + 2e-7, -1, 1 - 1e-7, -1 - 3e-7, 0.9]], np.float32)
  assert len(set(np.abs(nearly[0]))) == 5
  rule = methods.top_abs_advantage(0.5)
  _, prob = choose(rule, groups_of(nearly))
  np.testing.assert_allclose(prob[0], [0.6] * 5 + [0], rtol=1e-6)


@given(VALUES, st.integers(2, 6))
def test_a_groups_subset_has_the_largest_variance(values, num):
  rule = methods.max_variance
  keep, prob = _stepwise(rule, "group", groups_of(values), num)
  for q in range(3):
    _check_subset(values[q], keep[q], prob[q], num)


@given(VALUES, st.integers(1, 18), st.integers(0, 2))
def test_the_batchs_subset_has_the_largest_variance(values, share, pruned):
  rule = methods.max_variance
  groups = groups_of(values, pruned=[pruned])
  keep, prob = _stepwise(rule, "batch", groups, share)
  rows = [q for q in range(3) if q != pruned]
  assert not keep[pruned].any() and (prob[pruned] == 0).all()
  num = max(share * 12 // 18, 2)
  flat = lambda x: x[rows].reshape(-1)
  _check_subset(flat(values), flat(keep), flat(prob), num)


def _check_subset(values, keep, prob, num):
  """Against all subsets of that size; equal values are equally likely."""
  values = values.astype(np.float64)
  every = np.array(list(itertools.combinations(values, num)))
  assert keep.sum() == num
  best = every.var(axis=1).max()
  np.testing.assert_allclose(values[keep].var(), best, atol=1e-5)
  for value in set(values):
    is_tied = values == value
    share = keep[is_tied].mean()
    np.testing.assert_allclose(prob[is_tied], share, rtol=1e-6)
  ascending = np.sort(values)
  balanced = min(
    (
      high
      for high in range(num + 1)
      if np.isclose(_ends(ascending, high, num).var(), best, atol=1e-6)
    ),
    key=lambda high: (abs(2 * high - num), high),
  )
  np.testing.assert_allclose(
    np.sort(values[keep]), _ends(ascending, balanced, num)
  )


def _ends(ascending, high, num):
  """The lowest `num - high` and the highest `high`."""
  return np.append(ascending[: num - high], ascending[len(ascending) - high :])


def test_variance_survives_a_large_mean():
  """Values around 10000, whose squares are equal in float32."""
  values = np.array([np.arange(10000, 10006)] * 3, np.float32)
  rule = methods.max_variance
  keep, _ = _stepwise(rule, "group", groups_of(values), 4)
  np.testing.assert_array_equal(keep, [[1, 1, 0, 0, 1, 1]] * 3)


@given(VALUES, st.integers(2, 6))
def test_rewards_and_their_advantages_have_the_same_subset(rewards, num):
  rule = methods.max_variance
  by_reward, _ = _stepwise(rule, "group", groups_of(rewards), num)
  groups = groups_of(normalized(rewards))
  by_advantage, _ = _stepwise(rule, "group", groups, num)
  np.testing.assert_array_equal(by_reward, by_advantage)


@pytest.mark.parametrize("num_right", range(7))
def test_subset_is_balanced_if_possible(num_right):
  rewards = np.zeros((3, 6), np.float32)
  rewards[:, :num_right] = 1
  rule = methods.max_variance
  keep, _ = _stepwise(rule, "group", groups_of(normalized(rewards)), 4)
  expected = np.clip(2, 4 - (6 - num_right), num_right)
  np.testing.assert_array_equal(keep[:, :num_right].sum(axis=1), expected)


@pytest.mark.parametrize("factory, scope", STEPWISE)
def test_fraction_of_1_keeps_everything(factory, scope):
  num = 6 if scope == "group" else 18
  chosen = STEPWISE[factory, scope](
    draw(0, num), groups_of(normalized(BINARY[:3]))
  )
  assert chosen.keep.all() and (chosen.prob == 1).all()


def test_fraction_is_rounded_down_as_in_exact_arithmetic():
  """In float32, 13/22 of 22 is less than 13."""
  rule = methods.top_abs_advantage(13 / 22)
  values = np.arange(22, dtype=np.float32)[None]
  assert choose(rule, groups_of(values))[0].sum() == 13


DROP = jax.jit(methods.drop_small_advantage(0.6))
PERMUTED = {
  "drop_small_advantage": lambda groups: DROP(draw(0), groups).prob,
  **{
    f"{factory} {scope}": functools.partial(
      lambda rule, num, groups: rule(draw(0, num), groups).prob,
      STEPWISE[factory, scope],
      3 if scope == "group" else 9,
    )
    for factory, scope in STEPWISE
  },
}


@pytest.mark.parametrize("name", PERMUTED)
@given(VALUES, st.permutations(range(6)))
def test_order_within_a_group_does_not_matter(name, values, order):
  """The order changes a group's mean by rounding, which must not matter."""
  prob_of, values = PERMUTED[name], normalized(values)
  prob = np.asarray(prob_of(groups_of(values)))
  again = np.asarray(prob_of(groups_of(values[:, order])))
  np.testing.assert_allclose(again, prob[:, order], atol=2 / designs.GRID)


def test_unweighted_is_the_mean_over_what_was_kept():
  rule = methods.drop_small_advantage(0.6)
  groups = groups_of(normalized(BINARY), pruned=[1])
  honest, _ = choose(rule, groups, seed=3)
  keep, prob = choose(methods.unweighted(rule), groups, seed=3)
  np.testing.assert_array_equal(keep, honest)
  drawn = np.array([0, 2, 3])
  terms = np.random.default_rng(0).normal(size=keep.shape)[drawn]
  actual = (terms / prob[drawn])[keep[drawn]].sum() / terms.size
  np.testing.assert_allclose(actual, terms[keep[drawn]].mean(), rtol=1e-6)
