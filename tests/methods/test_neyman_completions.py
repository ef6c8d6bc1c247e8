"""Neyman allocation of completions, against closed forms."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from dppo_jax import methods
from dppo_jax.algo import designs
from dppo_jax.methods.ranking import fixed_size, round_count
from tests.helpers.completions import (
  BINARY,
  VALUES,
  choose,
  groups_of,
  many,
  normalized,
)

NEYMAN = many(methods.neyman_completions(0.4, min_prob=0.02))
RNG = np.random.default_rng(0)
SCORED = groups_of(
  RNG.normal(size=(3, 6)),
  lengths=RNG.integers(1, 40, (3, 6), np.int32),
  is_needed=np.ones((3, 6), bool),
  scale=RNG.uniform(0.5, 2, (3, 6)).astype(np.float32),
  sum_sq_residual=RNG.uniform(0, 9, (3, 6)).astype(np.float32),
)


def without(groups, q):
  """The groups as if prompt `q` had not been rolled out."""
  return groups.replace(lengths=groups.lengths.at[q].set(0))


def _completed(groups):
  """Groups with all that a rule may ask for, for one compilation."""
  length = groups.lengths.astype(jnp.float32)
  return groups.replace(
    is_needed=groups.advantages != 0,
    scale=jnp.ones_like(length),
    sum_sq_residual=length,
  )


@given(VALUES, st.permutations(range(6)))
def test_order_within_a_group_does_not_matter(values, order):
  """The order changes a group's mean by rounding, which must not matter."""
  values = normalized(values)
  prob_of = lambda values: NEYMAN(_completed(groups_of(values)))[1][0]
  np.testing.assert_allclose(
    prob_of(values[:, order]), prob_of(values)[:, order], atol=2 / designs.GRID
  )


def test_neyman_is_proportional_to_gradient_size():
  prob = NEYMAN(SCORED)[1][0]
  norm = np.sqrt(np.asarray(SCORED.sum_sq_residual, np.float64))
  size = np.abs(np.asarray(SCORED.advantages)) * np.asarray(SCORED.scale) * norm
  is_between = (prob > 0.021) & (prob < 1)
  assert is_between.sum() > 6 and (prob == 1).any()
  ratio = prob[is_between] / size[is_between]
  np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-4)
  assert (size[prob == 1] * ratio.mean() >= 1 - 1e-4).all()
  assert (prob >= 0.02).all()
  np.testing.assert_allclose(prob.sum(), 7, rtol=1e-6)  # 0.4 of 18 is 7.2


def test_missing_fields_of_groups_have_defaults():
  rule = methods.neyman_completions(0.4, 0.02)
  bare = SCORED.replace(scale=None, sum_sq_residual=None, is_needed=None)
  complete = _completed(SCORED)
  np.testing.assert_array_equal(choose(rule, bare)[1], NEYMAN(complete)[1][0])


@pytest.mark.parametrize("pruned, num", [(3, 7), (1, 5)])
def test_neyman_keeps_its_budget_in_every_stratum(pruned, num):
  """0.4 of 18 or 12; of each prompt and sign what is expected, rounded."""
  keep, prob = NEYMAN(without(SCORED, pruned))
  assert (keep.sum(axis=(1, 2)) == num).all()
  sign = np.sign(np.asarray(SCORED.advantages))
  for q, s in itertools.product(range(3), (-1, 1)):
    is_alike = (sign[q] == s).astype(float)
    expected = (prob[0, q].astype(float) * is_alike).sum()
    actual = (keep[:, q] * is_alike).sum(axis=1)
    assert (np.abs(actual - expected) < 1).all()
  if pruned < 3:
    assert not keep[:, pruned].any() and (prob[:, pruned] == 0).all()


def test_neyman_is_unbiased_in_many_draws():
  """Tolerance: 5 standard errors of the mean of 500 weighted sums."""
  keep, prob = NEYMAN(SCORED)
  terms = np.asarray(SCORED.advantages) * np.cos(np.arange(18).reshape(3, 6))
  sums = np.where(keep, terms / np.where(keep, prob, 1), 0).sum(axis=(1, 2))
  error = 5 * sums.std() / np.sqrt(len(sums))
  assert 0 < abs(sums.mean() - terms.sum()) <= error < np.abs(terms).sum() / 4


def test_neyman_keeps_all_needed_completions_within_budget():
  is_needed = np.zeros((3, 6), bool)
  is_needed[0, :4] = is_needed[2, 3:] = True
  keep, prob = NEYMAN(SCORED.replace(is_needed=jnp.array(is_needed)))
  np.testing.assert_array_equal(keep, np.broadcast_to(is_needed, keep.shape))
  np.testing.assert_array_equal(prob, keep.astype(np.float32))
  nothing = SCORED.replace(is_needed=jnp.zeros((3, 6), bool))
  keep, prob = NEYMAN(nothing)
  assert not keep.any() and (prob == 0).all()


def test_budget_of_1_keeps_every_needed_completion():
  values = normalized(BINARY)
  keep, prob = choose(methods.neyman_completions(1.0), groups_of(values, [1]))
  expected = (values != 0) & (np.arange(4) != 1)[:, None]
  np.testing.assert_array_equal(keep, expected)
  np.testing.assert_array_equal(prob, expected.astype(np.float32))


def test_needed_completion_of_zero_advantage_may_be_kept():
  groups = SCORED.replace(advantages=SCORED.advantages.at[0].set(0.0))
  keep, prob = NEYMAN(without(groups, 1))
  np.testing.assert_allclose(prob[0, 0], 0.02, atol=2 / designs.GRID)
  assert (keep.sum(axis=(1, 2)) == 5).all() and keep[:, 0].any(axis=0).all()
  keep, prob = NEYMAN(SCORED.replace(advantages=jnp.zeros((3, 6))))
  assert (keep.sum(axis=(1, 2)) == 7).all()
  np.testing.assert_allclose(prob, 7 / 18, atol=1 / designs.GRID)


def _uniform(budget):
  """A draw of a fixed number without strata, all equally likely."""

  def rule(rng, groups):
    is_drawn = groups.lengths > 0
    num = round_count(budget, is_drawn.sum(dtype=jnp.int32))
    return fixed_size(rng.key, is_drawn.astype(jnp.float32), num)

  return rule


def test_a_draw_of_equal_sizes_keeps_a_fixed_number_with_equal_chances():
  draws = many(_uniform(0.4))
  for pruned, num in ((3, 7), (1, 5)):
    keep, prob = draws(without(SCORED, pruned))
    is_drawn = np.arange(3)[:, None] != pruned
    assert (keep.sum(axis=(1, 2)) == num).all()
    share = np.where(is_drawn, num / (is_drawn.sum() * 6), 0)
    share = np.broadcast_to(share, prob.shape)
    np.testing.assert_allclose(prob, share, atol=1 / designs.GRID)
    # No stratification: how many a prompt keeps is not fixed by its share.
    assert len(set(keep[:, 0].sum(axis=1))) > 3
