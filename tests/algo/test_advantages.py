"""Advantages: closed forms and what they do not depend on."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from dppo_jax.algo import advantages

ALL = {
  name: jax.jit(getattr(advantages, name))
  for name in ("group_normalized", "group_centred", "leave_one_out")
}
each = pytest.mark.parametrize("advantage", ALL.values(), ids=ALL.keys())
population = jax.jit(
  functools.partial(advantages.group_normalized, eps=1e-12, ddof=0)
)
is_zero_variance = jax.jit(advantages.is_zero_variance)
REWARD = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0])
GROUPS = st.lists(
  st.lists(REWARD, min_size=5, max_size=5), min_size=3, max_size=3
).map(lambda rewards: np.array(rewards, np.float32))
MASKS = st.lists(
  st.lists(st.booleans(), min_size=5, max_size=5), min_size=3, max_size=3
).map(np.array)


@pytest.mark.parametrize("right", range(1, 8))
def test_binary_rewards_have_a_closed_form(right):
  rewards = np.array([[1.0] * right + [0.0] * (8 - right)], np.float32)
  wrong = 8 - right
  expected = np.where(
    rewards == 1, np.sqrt(wrong / right), -np.sqrt(right / wrong)
  )
  actual = np.asarray(population(rewards), np.float64)
  np.testing.assert_allclose(actual, expected, rtol=1e-5)
  np.testing.assert_allclose(actual.sum(), 0, atol=1e-5)
  np.testing.assert_allclose((actual**2).sum(), 8, rtol=1e-5)
  np.testing.assert_allclose(
    np.abs(actual).sum(), 2 * np.sqrt(right * wrong), rtol=1e-5
  )
  share = right / 8
  np.testing.assert_allclose(
    np.abs(actual).mean(), 2 * np.sqrt(share * (1 - share)), rtol=1e-5
  )
  sample = ALL["group_normalized"](rewards)
  np.testing.assert_allclose(sample, np.sqrt(7 / 8) * expected, rtol=1e-5)


@each
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 7.7])
def test_equal_rewards_give_exactly_zero(advantage, reward):
  # The mean of eight 0.1s is not 0.1 in float32; the advantage is still zero.
  assert (advantage(np.full((3, 7), reward, np.float32)) == 0).all()


@each
def test_a_group_of_one_gives_exactly_zero(advantage):
  assert (advantage(np.array([[0.1], [3.0]], np.float32)) == 0).all()


@each
@hypothesis.given(GROUPS, st.permutations(range(5)))
def test_permuting_a_group_permutes_its_advantages(advantage, rewards, order):
  order = np.array(order)
  permuted = np.asarray(advantage(rewards))[:, order]
  np.testing.assert_allclose(advantage(rewards[:, order]), permuted, atol=1e-5)


@each
@hypothesis.given(GROUPS, MASKS)
def test_advantages_of_a_group_sum_to_zero(advantage, rewards, mask):
  for counted in (None, mask):
    total = np.asarray(advantage(rewards, counted)).sum(axis=1)
    np.testing.assert_allclose(total, 0.0, atol=1e-5)


@each
@hypothesis.given(GROUPS)
def test_mask_of_all_equals_no_mask(advantage, rewards):
  everyone = np.ones(rewards.shape, bool)
  np.testing.assert_array_equal(
    advantage(rewards, everyone), advantage(rewards)
  )


@each
@hypothesis.given(GROUPS, MASKS)
def test_statistics_are_those_of_counted_rewards_alone(
  advantage, rewards, mask
):
  """Uncounted rewards, of any value, have no effect."""
  actual = np.asarray(advantage(rewards, mask))
  assert (actual[~mask] == 0).all()
  for row, counted, values in zip(actual, mask, rewards, strict=True):
    alone = values[counted]
    if len(set(alone.tolist())) < 2:
      assert (row == 0).all()
      continue
    expected = alone - alone.mean(dtype=np.float64)
    if advantage is ALL["group_normalized"]:
      expected /= alone.std(ddof=1, dtype=np.float64) + 1e-6
    if advantage is ALL["leave_one_out"]:
      others = (alone.sum(dtype=np.float64) - alone) / (len(alone) - 1)
      expected = alone - others
    np.testing.assert_allclose(row[counted], expected, rtol=1e-4, atol=1e-5)
  strange = np.where(mask, rewards, np.float32(np.nan))
  np.testing.assert_array_equal(advantage(strange, mask), actual)


@each
def test_differences_of_large_rewards_are_not_rounded_away(advantage):
  """A mean of 32 rewards of 1e6 has steps of 1/16 in float32."""
  one = np.zeros((2, 32), np.float32)
  one[0, 3] = 1
  many = one + np.float32([[1e6], [-1e7]])
  np.testing.assert_array_equal(advantage(many), advantage(one))
  tenth = np.float32([[1000, 1000.1, 1000, 1000.1]])
  np.testing.assert_allclose(
    advantage(tenth), advantage(tenth - 1000), rtol=1e-6
  )


@hypothesis.given(GROUPS, MASKS)
def test_zero_variance_depends_on_counted_rewards_alone(rewards, mask):
  sets = [set(r[m]) for r, m in zip(rewards, mask, strict=True)]
  np.testing.assert_array_equal(
    is_zero_variance(rewards, mask), [len(values) < 2 for values in sets]
  )


@each
@pytest.mark.parametrize("kind", [list, np.array, np.float64])
def test_rewards_may_be_lists_and_whole_numbers(advantage, kind):
  rewards, counted = (
    [[1, 0, 0, 2], [3, 3, 3, 3]],
    [[True, True, False, True]] * 2,
  )
  plain = advantage.__wrapped__  # a list is no argument of a compiled function
  expected = advantage(np.array(rewards, np.float32), np.array(counted))
  np.testing.assert_array_equal(plain(kind(rewards), counted), expected)
  assert plain(kind(rewards)).dtype == np.float32


@each
def test_rewards_without_group_axis_are_rejected(advantage):
  with pytest.raises(AssertionError, match="has rank 1"):
    advantage.__wrapped__([1.0, 0.0, 0.0, 1.0])
  with pytest.raises(AssertionError, match="shape"):
    advantage.__wrapped__([[1.0, 0.0, 0.0, 1.0]], [True] * 4)


def test_overlong_penalty_falls_from_0_to_minus_1():
  lengths = np.array([[0, 6, 7, 8], [9, 10, 11, 99]], np.int32)
  penalty = jax.jit(advantages.overlong_penalty, static_argnums=(1, 2))
  np.testing.assert_allclose(
    penalty(lengths, 10, 4),
    [[0, 0, -0.25, -0.5], [-0.75, -1, -1, -1]],
    rtol=1e-6,
  )
  # The cache may be all of a completion: each token then costs the same.
  np.testing.assert_allclose(penalty(lengths, 10, 10)[0], [0, -0.6, -0.7, -0.8])
