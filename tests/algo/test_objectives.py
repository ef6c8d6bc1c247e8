"""The surrogate against hand-computed values, and its slopes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.algo import objectives

GRPO = objectives.grpo(clip_low=0.2, clip_high=0.3)


def _loss(objective, ratio, advantage, weight=1.0, **kwargs):
  one = jnp.ones((1, 1))
  args = dict(
    old_logprobs=0 * one,
    advantages=advantage * one,
    weights=weight * one,
    is_trained=one > 0,
    segment_ids=jnp.ones((1, 1), jnp.int32),
  )
  value = lambda logprob: objectives.surrogate(
    objective, logprob * one, **args, **kwargs
  )[0]
  return jax.value_and_grad(value)(jnp.log(jnp.float32(ratio)))


@pytest.mark.parametrize(
  ("ratio", "advantage", "loss", "slope"),
  [
    (1.0, 2.0, -2.0, -2.0),  # on policy: the slope is -advantage
    (1.0, -2.0, 2.0, 2.0),
    (1.25, 2.0, -2.5, -2.5),  # inside both bounds
    (1.5, 2.0, -2.6, 0.0),  # above 1.3, and going up would pay nothing
    (1.5, -2.0, 3.0, 3.0),  # above, but the way back is open
    (0.5, 2.0, -1.0, -1.0),
    (0.5, -2.0, 1.6, 0.0),  # below 0.8
  ],
)
def test_clipping_by_hand(ratio, advantage, loss, slope):
  got = _loss(GRPO, ratio, advantage)
  np.testing.assert_allclose(got, (loss, slope), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_weighting_the_term_equals_weighting_the_advantage(ratio, advantage):
  folded = _loss(GRPO, ratio, 3.0 * advantage)
  outside = _loss(GRPO, ratio, advantage, weight=3.0)
  np.testing.assert_allclose(folded, outside, rtol=1e-6)


def test_kl_by_hand():
  # The reference gives the token half of the policy's probability.
  half = jnp.log(jnp.array([[0.5]]))
  kl = objectives.kl_k3(jnp.zeros((1, 1)), half)
  np.testing.assert_allclose(kl, 0.5 - np.log(0.5) - 1, rtol=1e-6)
  loss, slope = _loss(objectives.grpo(beta=0.1), 1.0, 2.0, ref_logprobs=half)
  np.testing.assert_allclose(loss, -2.0 + 0.1 * kl[0, 0], rtol=1e-6)
  np.testing.assert_allclose(slope, -2.0 + 0.1 * (1 - 0.5), rtol=1e-6)


def test_kl_averages_to_the_divergence():
  policy = jnp.array([0.5, 0.3, 0.2])
  reference = jnp.array([0.2, 0.2, 0.6])
  mean = (policy * objectives.kl_k3(jnp.log(policy), jnp.log(reference))).sum()
  exact = (policy * jnp.log(policy / reference)).sum()
  np.testing.assert_allclose(mean, exact, rtol=1e-5)


def test_cells_that_are_not_trained_cannot_poison_the_sum():
  bad = jnp.array([[0.0, jnp.nan]])
  ones = jnp.ones((1, 2))
  value = lambda logprobs: objectives.surrogate(
    GRPO,
    logprobs,
    bad,
    ones,
    ones,
    jnp.array([[True, False]]),
    jnp.ones((1, 2), jnp.int32),
  )[0]
  loss, slope = jax.value_and_grad(value)(bad)
  assert loss == -1 and (slope == jnp.array([[-1.0, 0.0]])).all()


@pytest.mark.parametrize(
  "args", [{"clip_low": 0.0}, {"clip_high": -1.0}, {"beta": -0.1}]
)
def test_senseless_coefficients_are_refused(args):
  with pytest.raises(ValueError, match=r"objective\.args"):
    objectives.grpo(**args)
