"""Advantages: closed forms and what they do not depend on."""

import hypothesis
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.algo import advantages

ALL = (
  advantages.group_normalized,
  advantages.group_centred,
  advantages.leave_one_out,
)
GROUPS = st.lists(
  st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]), min_size=5, max_size=5),
  min_size=1,
  max_size=4,
)


@pytest.mark.parametrize("right", range(1, 8))
def test_binary_rewards_have_a_closed_form(right):
  rewards = np.array([[1.0] * right + [0.0] * (8 - right)], np.float32)
  wrong = 8 - right
  scale = np.sqrt(7 / 8)  # the sample deviation, not the population's
  expected = scale * np.where(
    rewards == 1, np.sqrt(wrong / right), -np.sqrt(right / wrong)
  )
  got = advantages.group_normalized(jnp.array(rewards))
  np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_hand_computed_vectors():
  rewards = jnp.array([[1.0, 0.0, 0.0, 0.0]])
  np.testing.assert_allclose(
    advantages.group_centred(rewards), [[0.75, -0.25, -0.25, -0.25]]
  )
  np.testing.assert_allclose(
    advantages.leave_one_out(rewards), [[1.0, -1 / 3, -1 / 3, -1 / 3]]
  )
  np.testing.assert_allclose(
    advantages.group_normalized(rewards), [[1.5, -0.5, -0.5, -0.5]], rtol=1e-5
  )


@pytest.mark.parametrize("advantage", ALL)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 7.7])
def test_equal_rewards_give_exactly_zero(advantage, reward):
  # The mean of eight 0.1s is not 0.1 in float32; the advantage is still zero.
  got = advantage(jnp.full((3, 7), reward, jnp.float32))
  assert (got == 0).all()


@pytest.mark.parametrize("advantage", ALL)
@hypothesis.given(GROUPS, st.permutations(range(5)))
def test_permuting_a_group_permutes_its_advantages(advantage, rewards, order):
  rewards, order = jnp.array(rewards, jnp.float32), np.array(order)
  np.testing.assert_allclose(
    advantage(rewards[:, order]), advantage(rewards)[:, order], atol=1e-5
  )


@pytest.mark.parametrize("advantage", ALL)
@hypothesis.given(GROUPS)
def test_advantages_of_a_group_sum_to_zero(advantage, rewards):
  total = advantage(jnp.array(rewards, jnp.float32)).sum(axis=1)
  np.testing.assert_allclose(total, 0.0, atol=1e-5)
