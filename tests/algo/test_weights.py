"""Horvitz-Thompson weights: exact by enumerating every possible draw."""

import itertools

import hypothesis
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax.algo import weights
from dppo_jax.records import Selection

PROB = st.sampled_from([0.05, 0.3, 0.5, 1.0])


@hypothesis.settings(max_examples=10)
@hypothesis.given(
  st.lists(PROB, min_size=2, max_size=2), st.lists(PROB, min_size=6, max_size=6)
)
def test_weights_average_to_one_over_all_draws(of_prompts, of_completions):
  """Two prompts of three completions: 2^2 x 2^6 draws, each with its chance."""
  prompt_prob = np.array(of_prompts, np.float32)
  prob = np.array(of_completions, np.float32).reshape(2, 3)
  chance_of = lambda keep, prob: np.where(keep, prob, 1 - prob).prod()
  mean = np.zeros((2, 3))
  for bits in itertools.product((False, True), repeat=8):
    prompts, completions = np.array(bits[:2]), np.array(bits[2:]).reshape(2, 3)
    chance = chance_of(prompts, prompt_prob) * chance_of(completions, prob)
    if chance:
      mean += chance * weights.horvitz_thompson(
        Selection(jnp.array(prompts), jnp.array(prompt_prob)),
        Selection(jnp.array(completions), jnp.array(prob)),
      )
  np.testing.assert_allclose(mean, 1.0, rtol=1e-5)


def test_dropped_items_have_weight_0_even_at_probability_0():
  actual = weights.horvitz_thompson(
    Selection(jnp.array([True]), jnp.array([0.5])),
    Selection(jnp.array([[True, False]]), jnp.array([[0.25, 0.0]])),
  )
  np.testing.assert_allclose(actual, [[8.0, 0.0]])


def test_selections_of_other_shapes_are_rejected():
  prompts, completions = (
    Selection(jnp.ones(shape, bool), jnp.ones(shape))
    for shape in ((2,), (2, 3))
  )
  with pytest.raises(AssertionError, match="shape"):
    weights.horvitz_thompson(completions, prompts)  # the wrong way round
  with pytest.raises(AssertionError, match="shape"):
    turned = Selection(completions.keep.T, completions.prob.T)
    weights.horvitz_thompson(prompts, turned)


def test_invalid_probabilities_of_kept_items_are_counted():
  strange = [0.0, -0.5, 1 + 2.0**-23, 2.0, np.nan, np.inf]
  prob = jnp.array([[0.5, 1.0, 2.0**-20], [0.0, 2.0, np.nan]])
  keep = jnp.array([[True, True, True], [False, False, False]])
  assert weights.invalid_probs(Selection(keep, prob)) == 0
  for value in strange:
    chosen = Selection(keep, prob.at[0, 1].set(value))
    assert weights.invalid_probs(chosen) == 1
  everything = Selection(jnp.ones(6, bool), jnp.array(strange))
  assert weights.invalid_probs(everything) == 6


def test_effective_sample_size():
  even = weights.effective_sample_size(
    jnp.array([4.0, 2.0, 0.0]), jnp.array([1.0, 2.0, 5.0])
  )
  np.testing.assert_allclose(even, 2.0)  # w a is constant over what is kept
  lopsided = weights.effective_sample_size(
    jnp.array([1.0, 1.0]), jnp.array([3.0, 1.0])
  )
  np.testing.assert_allclose(lopsided, 16 / 10)
  nothing = weights.effective_sample_size(jnp.zeros(3), jnp.ones(3))
  assert nothing == 0
